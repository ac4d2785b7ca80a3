//! Room for descriptors, before anything is begun that can't do without: libraries below panic, or fail half way, where none is
//! left.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// There are too few descriptors, and there can't be more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what} needs {needed} open files more, and of the {limit} that are the limit {open} are in use; raise it: `ulimit -n 1024`, \
     LimitNOFILE= in a unit, or limits.conf"
)]
pub struct TooFewDescriptors {
    what: &'static str,
    needed: u64,
    limit: u64,
    open: u64,
}

#[derive(Debug, PartialEq, Eq)]
enum Room {
    Enough,
    /// Up to the hard limit there is.
    ToRaise,
    TooLittle,
}

/// `None` is no limit.
fn room(soft: Option<u64>, hard: Option<u64>, open: u64, needed: u64) -> Room {
    let wanted = open.saturating_add(needed);
    let fits = |limit: Option<u64>| limit.is_none_or(|limit| limit >= wanted);
    if fits(soft) {
        Room::Enough
    } else if fits(hard) {
        Room::ToRaise
    } else {
        Room::TooLittle
    }
}

/// Sees to it that `needed` descriptors are free, for `what`. If the soft limit is in the way it is raised as far as it may be;
/// else it stays as it is, since child processes inherit it.
///
/// # Errors
///
/// [`TooFewDescriptors`] if the hard limit is in the way.
pub fn make_room(what: &'static str, needed: u64) -> Result<(), TooFewDescriptors> {
    let limit = getrlimit(Resource::Nofile);
    let open = open(limit.current);
    match room(limit.current, limit.maximum, open, needed) {
        Room::Enough => Ok(()),
        Room::ToRaise => {
            raise();
            Ok(())
        }
        Room::TooLittle => Err(TooFewDescriptors {
            what,
            needed,
            limit: limit.maximum.unwrap_or(u64::MAX),
            open,
        }),
    }
}

/// How many are in use. Where that can't be seen for want of one more, all of them are.
fn open(limit: Option<u64>) -> u64 {
    match std::fs::read_dir("/proc/self/fd") {
        // One of them is that of the folder itself.
        Ok(entries) => (entries.count() as u64).saturating_sub(1),
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::MFILE.raw_os_error()) => {
            limit.unwrap_or_default()
        }
        Err(_) => 0,
    }
}

/// Raises this process's limit of open files as far as it may, for daemons: a node needs about eight descriptors for each worker,
/// a head some for each member, and the usual soft limit of 1024 is a relic.
pub fn raise() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "the limit of open files could not be raised");
    }
}

/// The fewest peers, however few descriptors there are.
const FEWEST_PEERS: usize = 8;

/// How many descriptors this process may have now.
#[must_use]
pub fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// How many peers that nobody knows yet may take one of so many descriptors each, `most` at most: a quarter of them. The others are
/// for a process's own work.
#[must_use]
pub fn for_peers(descriptors: u64, most: usize) -> usize {
    usize::try_from(descriptors / 4)
        .unwrap_or(usize::MAX)
        .max(FEWEST_PEERS)
        .min(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_is_raised_where_that_helps_and_only_there() {
        for (soft, hard, open, needed, expected) in [
            (Some(1024), Some(1024), 3, 1021, Room::Enough),
            (Some(1024), Some(1024), 4, 1021, Room::TooLittle),
            (Some(24), Some(4096), 3, 48, Room::ToRaise),
            (Some(24), None, 3, 48, Room::ToRaise),
            (Some(24), Some(24), 3, 48, Room::TooLittle),
            (Some(24), Some(50), 3, 48, Room::TooLittle),
            (None, None, 3, u64::MAX, Room::Enough),
        ] {
            assert_eq!(room(soft, hard, open, needed), expected);
        }
    }

    #[test]
    fn the_limit_what_is_needed_and_what_to_do_are_told_in_one_line() {
        let error = make_room("this test", u64::MAX / 2).unwrap_err();
        assert!((3..error.limit).contains(&error.open), "{error:?}");
        let text = error.to_string();
        assert!(text.starts_with("this test needs 9223372036854775807 open files more"));
        assert!(text.contains("`ulimit -n 1024`") && !text.contains('\n'));
        assert_eq!(make_room("this test", 1), Ok(()));
    }

    #[test]
    fn the_limit_of_open_files_is_what_it_may_be() {
        raise();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
    }
}
