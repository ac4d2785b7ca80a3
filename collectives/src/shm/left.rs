//! How much memory the host has left, and the container, if this process is in one. The system gives pages of a shared file for as
//! long as it can, and then ends processes: who wants many asks first.

use std::io;
use std::path::{Path, PathBuf};

/// What is left to others, of what this process could have: they may be ranks that ask at the same time. Of the little that there may be an
/// eighth at most.
const OTHERS: u64 = 512 << 20;

/// What is left, and how much of it is for others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Left {
    bytes: u64,
    others: u64,
}

/// Where the groups of processes are that have limits of their own (cgroup v2).
const GROUPS: &str = "/sys/fs/cgroup";

/// Whether the host still has `bytes` for this process, and its container.
///
/// # Errors
///
/// [`io::ErrorKind::OutOfMemory`], with how much there is. On a system that does not tell, none.
pub(super) fn check(bytes: usize) -> io::Result<()> {
    let bytes = bytes as u64;
    if let Ok(told) = std::fs::read_to_string("/proc/meminfo") {
        enough("host", left(&told), bytes)?;
    }
    let of_container = match std::fs::read_to_string("/proc/self/cgroup") {
        Ok(told) => left_in(Path::new(GROUPS), &told, |file| {
            std::fs::read_to_string(file).ok()
        }),
        Err(_) => None,
    };
    enough("container", of_container, bytes)
}

fn enough(of: &str, left: Option<Left>, bytes: u64) -> io::Result<()> {
    let Some(Left {
        bytes: left,
        others,
    }) = left
    else {
        return Ok(());
    };
    if bytes.saturating_add(others) <= left {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::OutOfMemory,
        format!(
            "the {of} has {} MiB left, of which {} are for others",
            left >> 20,
            others >> 20
        ),
    ))
}

/// What the limits of this process's group leave it, and of all groups in which that is. `told` is what the system says of which
/// groups that are, `read` reads a file. None if there is no limit.
fn left_in(root: &Path, told: &str, read: impl Fn(&Path) -> Option<String>) -> Option<Left> {
    // Of version 2 there is one group, which has no number and no names.
    let group = told.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let own: PathBuf = root.join(group);
    let groups = own.ancestors().take_while(|group| group.starts_with(root));
    groups.filter_map(|group| left_of(group, &read)).min()
}

/// What the limit of one group leaves it, if it has one.
fn left_of(group: &Path, read: impl Fn(&Path) -> Option<String>) -> Option<Left> {
    let number = |file: &str| read(&group.join(file))?.trim().parse::<u64>().ok();
    // The other word is `max`.
    let most = number("memory.max")?;
    let used = number("memory.current")?;
    // What can be had again, as pages of files, is counted as used, too.
    let again = read(&group.join("memory.stat")).map_or(0, |stat| to_be_had_again(&stat));
    Some(Left {
        bytes: most.saturating_sub(used.saturating_sub(again)),
        others: OTHERS.min(most / 8),
    })
}

/// Bytes of pages of files, and of what the kernel keeps as long as nobody wants the memory. What is in shared memory is not among them.
fn to_be_had_again(stat: &str) -> u64 {
    let line = |line: &str| {
        let (name, bytes) = line.split_once(' ')?;
        let counts = matches!(name, "inactive_file" | "active_file" | "slab_reclaimable");
        bytes.trim().parse::<u64>().ok().filter(|_| counts)
    };
    stat.lines().filter_map(line).fold(0, u64::saturating_add)
}

/// Bytes without what would have to be taken from a process; pages of shared files can be swapped out.
fn left(told: &str) -> Option<Left> {
    let kilobytes = |name: &str| {
        let line = told.lines().find_map(|line| line.strip_prefix(name))?;
        let number = line.trim().strip_suffix("kB")?.trim();
        number.parse::<u64>().ok()
    };
    let left = kilobytes("MemAvailable:")?.saturating_add(kilobytes("SwapFree:").unwrap_or(0));
    Some(Left {
        bytes: left.saturating_mul(1024),
        others: OTHERS,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOLD: &str = "MemTotal:       24689764 kB\nMemFree:        100 kB\n\
        MemAvailable:    2000000 kB\nSwapFree:          10000 kB\n";

    #[test]
    fn what_is_left_is_read_from_what_linux_tells() {
        let bytes = |told: &str| left(told).map(|left| left.bytes);
        for (told, expected) in [
            (TOLD, Some(2_010_000 * 1024)),
            ("MemAvailable: 5 kB", Some(5 * 1024)),
            ("", None),
            ("MemFree: 5 kB", None),
            ("MemAvailable: x kB", None),
            ("MemAvailable: 5", None),
            ("MemAvailable: 18446744073709551615 kB", Some(u64::MAX)),
        ] {
            assert_eq!(bytes(told), expected, "{told:?}");
        }
        assert!(std::fs::read_to_string("/proc/meminfo").is_ok_and(|told| left(&told).is_some()));
        let most = 2_010_000 * 1024 - OTHERS;
        enough("host", left(TOLD), most).unwrap();
        enough("host", left(""), u64::MAX).unwrap();
        for bytes in [most + 1, u64::MAX] {
            let error = enough("host", left(TOLD), bytes).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
            assert!(
                error.to_string().contains("the host has 1962 MiB left"),
                "{error}"
            );
        }
    }

    /// A group outside of what this process sees has no files there; of version 1 there are no files, either.
    #[test]
    fn the_least_that_any_group_leaves_counts_if_there_is_a_limit() {
        let stat = "anon 1\nfile 800\ninactive_file 300\nactive_file 2\nslab_reclaimable 7\n";
        let own = [
            ("jobs/one/memory.max", "max\n"),
            ("jobs/one/memory.current", "700\n"),
        ];
        let less = [
            ("jobs/one/memory.max", "750\n"),
            ("jobs/one/memory.current", "700\n"),
        ];
        let full = [
            ("jobs/one/memory.max", "750\n"),
            ("jobs/one/memory.current", "800\n"),
        ];
        let outer = [
            ("jobs/memory.max", "1000\n"),
            ("jobs/memory.current", "900\n"),
        ];
        let with_stat = [outer[0], outer[1], ("jobs/memory.stat", stat)];
        let root = [("memory.max", "5000"), ("memory.current", "1000")];
        let unlimited = [("memory.max", "max"), ("memory.current", "5")];
        let one = "4:memory:/old\n0::/jobs/one\n";
        for (told, files, expected) in [
            (one, [&own[..], &outer].concat(), Some(100)),
            (one, [&own[..], &with_stat].concat(), Some(409)),
            (one, [&less[..], &with_stat].concat(), Some(50)),
            (one, [&full[..], &with_stat].concat(), Some(0)),
            // Inside a container its own group is the root.
            ("0::/", root.to_vec(), Some(4000)),
            (one, root.to_vec(), Some(4000)),
            ("0::/", unlimited.to_vec(), None),
            ("0::/", vec![("memory.max", "100")], None),
            ("", root.to_vec(), None),
            ("4:memory:/\n", root.to_vec(), None),
            ("0::/../../etc\n", root.to_vec(), Some(4000)),
        ] {
            let left = left_in(Path::new("/groups"), told, |wanted| {
                let of = |(file, _): &&(&str, &str)| Path::new("/groups").join(file) == wanted;
                files.iter().find(of).map(|(_, text)| (*text).to_owned())
            });
            assert!(left.is_none_or(|left| left.others <= OTHERS));
            assert_eq!(left.map(|left| left.bytes), expected, "{told:?} {files:?}");
        }
    }
}
