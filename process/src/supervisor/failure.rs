//! From an `errno` to a [`SpawnError`].

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::SpawnError;
use crate::request::SpawnRequest;
use crate::sys::Step;

/// What was to be started, for messages.
#[derive(Debug, Clone)]
pub(super) struct Subject {
    path: PathBuf,
    directory: Option<PathBuf>,
    /// Of arguments and environment.
    bytes: usize,
}

impl Subject {
    pub(super) fn warden(exe: &Path) -> Self {
        Self {
            path: exe.to_owned(),
            directory: None,
            bytes: 0,
        }
    }

    pub(super) fn worker(request: &SpawnRequest, bytes: usize) -> Self {
        Self {
            path: request.program.clone(),
            directory: request.cwd.clone(),
            bytes,
        }
    }

    pub(super) fn warden_lost(&self) -> SpawnError {
        let path = self.path.clone();
        SpawnError::WardenLost { path }
    }

    pub(super) fn resources(&self, reason: String) -> SpawnError {
        let path = self.path.clone();
        SpawnError::Resources { path, reason }
    }

    pub(super) fn timed_out(&self, after: Duration) -> SpawnError {
        SpawnError::TimedOut {
            path: self.path.clone(),
            seconds: after.as_secs(),
        }
    }

    pub(super) fn system(&self, step: &'static str, error: &io::Error) -> SpawnError {
        if let Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM) = error.raw_os_error() {
            return self.resources(error.to_string());
        }
        SpawnError::System {
            path: self.path.clone(),
            step,
            reason: error.to_string(),
        }
    }

    /// What a start in this process that failed means.
    pub(super) fn failure_of_start(&self, (step, error): (Step, io::Error)) -> SpawnError {
        match error.raw_os_error() {
            Some(errno) => self.failure(step, errno),
            None => self.system("start", &error),
        }
    }

    /// What a failed step in the warden or in the new process means.
    pub(super) fn failure(&self, step: Step, errno: i32) -> SpawnError {
        let path = self.path.clone();
        let error = io::Error::from_raw_os_error(errno);
        match (step, errno) {
            (Step::Directory, _) => SpawnError::BadDirectory {
                path,
                directory: self.directory.clone().unwrap_or_default(),
                reason: error.to_string(),
            },
            (Step::Exec, libc::ENOENT | libc::ENOTDIR) => SpawnError::NotFound { path },
            (Step::Exec, libc::EACCES | libc::EPERM | libc::EISDIR) => {
                SpawnError::NotExecutable { path }
            }
            (Step::Exec, libc::ENOEXEC | libc::EINVAL | libc::ELIBBAD) => {
                SpawnError::NotAProgram { path }
            }
            (Step::Exec, libc::ETXTBSY) => SpawnError::Busy { path },
            (Step::Exec, libc::E2BIG) => SpawnError::TooLarge {
                path,
                bytes: self.bytes,
            },
            (Step::Exec | Step::Fork, libc::EAGAIN) => SpawnError::TooManyProcesses { path },
            (Step::Descriptors, _) => self.system("descriptors", &error),
            (Step::Fork, _) => self.system("fork", &error),
            (Step::Prepare, _) => self.system("preparing the process", &error),
            (Step::Exec, _) => self.system("execve", &error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_errno_has_its_error() {
        let subject = Subject {
            path: "/x/prog".into(),
            directory: Some("/y".into()),
            bytes: 5,
        };
        for (step, errno, message) in [
            (
                Step::Exec,
                libc::ENOENT,
                "cannot start /x/prog: no such file, or its interpreter does not exist",
            ),
            (
                Step::Exec,
                libc::ETXTBSY,
                "cannot start /x/prog: it is open for writing; start it when it is written",
            ),
            (
                Step::Exec,
                libc::E2BIG,
                "cannot start /x/prog: 5 bytes of arguments and environment are more than the system takes",
            ),
            (
                Step::Fork,
                libc::EAGAIN,
                "cannot start /x/prog: the limit of processes is reached (ulimit -u, or pids.max of the cgroup)",
            ),
            (
                Step::Fork,
                libc::ENOMEM,
                "cannot start /x/prog: Cannot allocate memory (os error 12)",
            ),
            (
                Step::Descriptors,
                libc::EMFILE,
                "cannot start /x/prog: Too many open files (os error 24)",
            ),
            (
                Step::Directory,
                libc::ENOENT,
                "cannot start /x/prog: working directory /y: No such file or directory (os error 2)",
            ),
            (
                Step::Prepare,
                libc::EPERM,
                "cannot start /x/prog: preparing the process: Operation not permitted (os error 1)",
            ),
        ] {
            assert_eq!(subject.failure(step, errno).to_string(), message);
        }
        assert!(subject.failure(Step::Fork, libc::EAGAIN).is_retryable());
        assert!(!subject.failure(Step::Exec, libc::ENOENT).is_retryable());
    }
}
