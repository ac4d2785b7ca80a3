//! The memory of this process, as Linux tells it.

use std::fs;

/// A line of `/proc/self/status`, in bytes. 0 where there is none.
fn status(name: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mut lines = status.lines();
    let line = lines.find_map(|line| line.strip_prefix(name));
    let number = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    number.unwrap_or_default() * 1024
}

/// The memory in use, from which on [`peak`] counts.
pub(crate) fn reset_peak() -> u64 {
    // Where that is forbidden the peak of before counts: each cluster is larger than the one before.
    fs::write("/proc/self/clear_refs", "5").ok();
    status("VmRSS")
}

/// The most memory that was in use since then.
pub(crate) fn peak() -> u64 {
    status("VmHWM")
}
