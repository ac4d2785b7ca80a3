//! Whether this process may be a driver.
//!
//! A node starts the driver's own program again, as its worker and (in local mode) as its warden. If `main` does not begin
//! with kolo's entry, such a process would run `main` again and start processes in its turn, without end.

use std::sync::OnceLock;

/// Names the call socket and the control socket of a worker: two numbers of descriptors, with a comma.
pub(crate) const WORKER_FDS: &str = "KOLO_WORKER_FDS";

/// Why this process can't be a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EntryError {
    /// `main` has not called kolo's entry, so workers could not be made of this program. Nothing was started.
    #[error(
        "this program's `main` does not begin with kolo's entry, without which its workers would run `main` again: put #[kolo::main] on `async fn main` in place of #[tokio::main], or begin `main` with kolo::worker::run_if_worker(); tests use kolo-harness"
    )]
    Missing,
    /// kolo started this process as a worker or as a warden, and `main` used a cluster before kolo's entry.
    #[error(
        "kolo started this process as a {role}, but its `main` ran as the driver's: put #[kolo::main] on `async fn main`, or begin `main` with kolo::worker::run_if_worker()"
    )]
    Passed {
        /// `worker` or `warden`.
        role: &'static str,
    },
    /// This is a worker, and workers use no clusters. Only the driver does, where `#[kolo::main]` runs `main`.
    #[error(
        "this process is a worker: only the driver, in which #[kolo::main] runs `main`, can use a cluster"
    )]
    Worker,
}

/// What kolo's entry found this process to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Driver,
    Worker,
}

static ROLE: OnceLock<Role> = OnceLock::new();

/// The entry was called, in a process of this role. The first call counts.
pub(crate) fn entered(role: Role) {
    ROLE.get_or_init(|| role);
}

/// Whether this process may use a cluster.
pub(crate) fn may_connect() -> Result<(), EntryError> {
    judge(ROLE.get().copied(), |name| std::env::var_os(name).is_some())
}

/// Whether this process may start workers, which run its program.
pub(crate) fn may_start() -> Result<(), EntryError> {
    may_connect()?;
    match ROLE.get() {
        Some(_) => Ok(()),
        None => Err(EntryError::Missing),
    }
}

fn judge(role: Option<Role>, is_set: impl Fn(&str) -> bool) -> Result<(), EntryError> {
    match role {
        Some(Role::Driver) => Ok(()),
        Some(Role::Worker) => Err(EntryError::Worker),
        None => [
            (kolo_process::WARDEN_FD_VAR, "warden"),
            (WORKER_FDS, "worker"),
        ]
        .into_iter()
        .find(|(name, _)| is_set(name))
        .map_or(Ok(()), |(_, role)| Err(EntryError::Passed { role })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_kolo_started_is_no_driver() {
        let none = |_: &str| false;
        let worker = |name: &str| name == WORKER_FDS;
        let warden = |name: &str| name == kolo_process::WARDEN_FD_VAR;
        assert_eq!(judge(None, none), Ok(()));
        assert_eq!(judge(Some(Role::Driver), none), Ok(()));
        // A driver's own variables are not for the driver: the entry has looked at them.
        assert_eq!(judge(Some(Role::Driver), warden), Ok(()));
        assert_eq!(judge(Some(Role::Worker), none), Err(EntryError::Worker));
        for (is_set, role) in [
            (&worker as &dyn Fn(&str) -> bool, "worker"),
            (&warden, "warden"),
        ] {
            let error = judge(None, is_set).unwrap_err();
            assert_eq!(error, EntryError::Passed { role });
            assert!(error.to_string().contains("#[kolo::main]"));
            assert_eq!(error.to_string().lines().count(), 1);
        }
    }
}
