//! Why a process could not be started.

use std::path::PathBuf;

/// Why a warden or a worker could not be started. Nothing of it runs then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpawnError {
    /// No such file, or the interpreter that a script names in its first line does not exist. Check the path.
    #[error("cannot start {path}: no such file, or its interpreter does not exist")]
    NotFound {
        /// The program.
        path: PathBuf,
    },
    /// The file may not be executed: no `x` permission, a directory, or a file system mounted `noexec`.
    /// Set the permission or move the file.
    #[error(
        "cannot start {path}: permission denied; it must be a file with execute permission, not on a noexec mount"
    )]
    NotExecutable {
        /// The program.
        path: PathBuf,
    },
    /// The file is no program for this machine: neither ELF of this architecture nor a script with `#!`.
    #[error(
        "cannot start {path}: not a program for this machine (neither an ELF file nor a script with #!)"
    )]
    NotAProgram {
        /// The program.
        path: PathBuf,
    },
    /// The file was open for writing the whole time that was waited. Start it when it is written.
    #[error("cannot start {path}: it is open for writing; start it when it is written")]
    Busy {
        /// The program.
        path: PathBuf,
    },
    /// The working directory does not exist or may not be entered.
    #[error("cannot start {path}: working directory {directory}: {reason}")]
    BadDirectory {
        /// The program.
        path: PathBuf,
        /// The directory.
        directory: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// The limit of processes is reached (`ulimit -u`, or `pids.max` of the cgroup). Raise it or ask for fewer
    /// workers.
    #[error(
        "cannot start {path}: the limit of processes is reached (ulimit -u, or pids.max of the cgroup)"
    )]
    TooManyProcesses {
        /// The program.
        path: PathBuf,
    },
    /// Memory or file descriptors are used up. Free some or raise the limit (`ulimit -n`).
    #[error("cannot start {path}: {reason}")]
    Resources {
        /// The program.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// Arguments and environment together are longer than the system takes. Shorten the environment.
    #[error(
        "cannot start {path}: {bytes} bytes of arguments and environment are more than the system takes"
    )]
    TooLarge {
        /// The program.
        path: PathBuf,
        /// How many bytes they are.
        bytes: usize,
    },
    /// The request itself is wrong: a zero byte, a descriptor number twice. A fault of the caller.
    #[error("cannot start {path}: {reason}")]
    Invalid {
        /// The program.
        path: PathBuf,
        /// What is wrong and what is allowed.
        reason: String,
    },
    /// The program was started as a warden and did not answer as one. Its `main` must begin with
    /// [`run_if_warden`](crate::run_if_warden), which `#[kolo::main]` does.
    #[error(
        "{path} was started as a warden and {reason}; its main must begin with kolo_process::run_if_warden() (#[kolo::main] does it)"
    )]
    NotAWarden {
        /// The program.
        path: PathBuf,
        /// What it did instead.
        reason: String,
    },
    /// The warden is gone: killed, or closed meanwhile. Start another.
    #[error("cannot start {path}: the warden is gone")]
    WardenLost {
        /// The program.
        path: PathBuf,
    },
    /// The process did not start in time, for instance from a file system that hangs. If it still starts later
    /// it is killed.
    #[error("cannot start {path}: not done after {seconds} s")]
    TimedOut {
        /// The program.
        path: PathBuf,
        /// How long it was waited for.
        seconds: u64,
    },
    /// The system refused for a reason that is none of the above.
    #[error("cannot start {path}: {step}: {reason}")]
    System {
        /// The program.
        path: PathBuf,
        /// What was being done.
        step: &'static str,
        /// What the system said.
        reason: String,
    },
}

impl SpawnError {
    /// Whether the same request may succeed later without a change.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::Busy { .. }
                | Self::TooManyProcesses { .. }
                | Self::Resources { .. }
                | Self::TimedOut { .. }
        )
    }
}
