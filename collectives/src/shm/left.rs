//! How much memory the host has left. The system gives pages of a shared file for as long as it can, and then ends processes:
//! who wants many asks first.

use std::io;

/// What is left to others, of what this process could have: they may be ranks that ask at the same time.
const OTHERS: u64 = 512 << 20;

/// Whether the host still has `bytes` for this process.
///
/// # Errors
///
/// [`io::ErrorKind::OutOfMemory`], with how much there is. On a system that does not tell, none.
pub(super) fn check(bytes: usize) -> io::Result<()> {
    match std::fs::read_to_string("/proc/meminfo") {
        Ok(told) => enough(&told, bytes as u64),
        Err(_) => Ok(()),
    }
}

fn enough(told: &str, bytes: u64) -> io::Result<()> {
    let Some(left) = left(told) else {
        return Ok(());
    };
    if bytes.saturating_add(OTHERS) <= left {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::OutOfMemory,
        format!(
            "the host has {} MiB left, of which {} are for others",
            left >> 20,
            OTHERS >> 20
        ),
    ))
}

/// Bytes without what would have to be taken from a process; pages of shared files can be swapped out.
fn left(told: &str) -> Option<u64> {
    let kilobytes = |name: &str| {
        let line = told.lines().find_map(|line| line.strip_prefix(name))?;
        let number = line.trim().strip_suffix("kB")?.trim();
        number.parse::<u64>().ok()
    };
    let left = kilobytes("MemAvailable:")?.saturating_add(kilobytes("SwapFree:").unwrap_or(0));
    Some(left.saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOLD: &str = "MemTotal:       24689764 kB\nMemFree:        100 kB\n\
        MemAvailable:    2000000 kB\nSwapFree:          10000 kB\n";

    #[test]
    fn what_is_left_is_read_from_what_linux_tells() {
        assert_eq!(left(TOLD), Some(2_010_000 * 1024));
        assert_eq!(left("MemAvailable: 5 kB"), Some(5 * 1024));
        for strange in ["", "MemFree: 5 kB", "MemAvailable: x kB", "MemAvailable: 5"] {
            assert_eq!(left(strange), None, "{strange:?}");
        }
        assert_eq!(
            left(&format!("MemAvailable: {} kB", u64::MAX)),
            Some(u64::MAX)
        );
        assert!(std::fs::read_to_string("/proc/meminfo").is_ok_and(|told| left(&told).is_some()));
    }

    #[test]
    fn more_than_is_left_is_refused_with_how_much_there_is() {
        let most = 2_010_000 * 1024 - OTHERS;
        enough(TOLD, most).unwrap();
        enough("", u64::MAX).unwrap();
        for bytes in [most + 1, u64::MAX] {
            let error = enough(TOLD, bytes).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
            assert!(error.to_string().contains("has 1962 MiB left"), "{error}");
        }
    }
}
