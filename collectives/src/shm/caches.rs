//! How much the processor's caches hold.

use std::sync::OnceLock;

/// Bytes of a core's second cache; 1 MiB if the system does not tell.
pub(super) fn second() -> usize {
    static SIZE: OnceLock<usize> = OnceLock::new();
    *SIZE.get_or_init(|| size(2).unwrap_or(1 << 20))
}

/// Bytes of the last cache, which cores share; 0 if the system does not tell.
pub(super) fn last() -> usize {
    static SIZE: OnceLock<usize> = OnceLock::new();
    *SIZE.get_or_init(|| size(3).unwrap_or(0))
}

fn size(level: usize) -> Option<usize> {
    let file = format!("/sys/devices/system/cpu/cpu0/cache/index{level}/size");
    parse(&std::fs::read_to_string(file).ok()?)
}

/// As Linux writes it: `1024K`.
fn parse(told: &str) -> Option<usize> {
    let kibibytes: usize = told.trim().strip_suffix('K')?.parse().ok()?;
    kibibytes.checked_mul(1 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_linux_writes_them() {
        assert_eq!(parse("1024K\n"), Some(1 << 20));
        assert_eq!(parse("32768K"), Some(32 << 20));
        for strange in ["", "K", "12", "12M", "-1K", &format!("{}K", usize::MAX)] {
            assert_eq!(parse(strange), None, "{strange:?}");
        }
        assert!(second() > 0);
    }
}
