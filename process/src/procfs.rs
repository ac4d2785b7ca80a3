//! What `/proc` says about other processes.

use std::fs;
use std::os::fd::AsFd;

use rustix::process::{Pid, PidfdFlags, Signal};

/// One process, as it was when it was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) parent: u32,
    pub(crate) group: u32,
    pub(crate) session: u32,
    /// When it started, in clock ticks since boot. With the process id it names a process for ever.
    pub(crate) start: u64,
    /// It has ended and waits to be reaped.
    pub(crate) dead: bool,
}

impl Process {
    /// The process with this id; `None` if there is none.
    pub(crate) fn read(pid: u32) -> Option<Self> {
        Self::parse(pid, &fs::read(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(pid: u32, stat: &[u8]) -> Option<Self> {
        // The second field is the name in parentheses, in which anything may stand.
        let end = stat.iter().rposition(|byte| *byte == b')')?;
        let rest = std::str::from_utf8(stat.get(end + 1..)?).ok()?;
        let mut fields = rest.split_ascii_whitespace();
        let state = fields.next()?;
        Some(Self {
            pid,
            parent: fields.next()?.parse().ok()?,
            group: fields.next()?.parse().ok()?,
            session: fields.next()?.parse().ok()?,
            // Fields 7 to 21 stand between.
            start: fields.nth(15)?.parse().ok()?,
            dead: matches!(state, "Z" | "X" | "x"),
        })
    }

    /// Kills it (`SIGKILL`), unless its id names another process by now.
    pub(crate) fn kill(&self) {
        let Some(pid) = raw(self.pid) else { return };
        let Ok(pidfd) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else {
            return;
        };
        if Self::read(self.pid).is_some_and(|now| now.start == self.start) {
            // Ended meanwhile, or not ours to kill.
            rustix::process::pidfd_send_signal(pidfd.as_fd(), Signal::KILL).ok();
        }
    }
}

/// A process id as rustix wants it.
pub(crate) fn raw(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw)
}

/// All processes that this one may see.
pub(crate) fn all() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(Process::read)
        .collect()
}

/// The children of this thread's process, which has only this thread; `None` if the kernel does not list them.
///
/// Complete as long as nobody reaps meanwhile, which only this thread could.
pub(crate) fn children() -> Option<Vec<u32>> {
    let list = fs::read_to_string("/proc/thread-self/children").ok()?;
    list.split_ascii_whitespace()
        .map(|pid| pid.parse().ok())
        .collect()
}

/// Those among `all` that are below `root`.
pub(crate) fn below(all: &[Process], root: u32) -> Vec<Process> {
    let mut children = std::collections::HashMap::<u32, Vec<&Process>>::new();
    for process in all {
        children.entry(process.parent).or_default().push(process);
    }
    let mut found = Vec::new();
    let mut open = vec![root];
    while let Some(parent) = open.pop() {
        // Taken out, so that a list that changed while it was read can't lead in circles.
        for child in children.remove(&parent).unwrap_or_default() {
            found.push(*child);
            open.push(child.pid);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_full_of_traps_is_skipped() {
        let stat = b"7 (a) R 1 (\xff) S 4 5 6 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 9876 10 11";
        let process = Process::parse(7, stat).unwrap();
        let expected = Process {
            pid: 7,
            parent: 4,
            group: 5,
            session: 6,
            start: 9876,
            dead: false,
        };
        assert_eq!(process, expected);
        assert_eq!(Process::parse(7, b"7 (a) S 4 5"), None);
        assert_eq!(Process::parse(7, b""), None);
    }

    #[test]
    fn this_process_is_found_below_its_parent() {
        let me = Process::read(std::process::id()).unwrap();
        assert!(!me.dead);
        let found = below(&all(), me.parent);
        assert!(found.iter().any(|process| process.pid == me.pid));
        assert!(found.iter().all(|process| process.pid != me.parent));
    }

    #[test]
    fn a_circle_ends() {
        let process = |pid, parent| Process {
            pid,
            parent,
            group: 0,
            session: 0,
            start: 0,
            dead: false,
        };
        let all = [process(2, 1), process(1, 2), process(3, 2)];
        assert_eq!(below(&all, 1).len(), 3);
    }
}
