//! A process that was started.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use kolo_transport::wire::Exit;
use rustix::event::{PollFd, PollFlags, Timespec};
use tokio::sync::watch;

use crate::supervisor::Shared;
use crate::{procfs, sys};

/// How long [`Child::stop`] waits after `SIGKILL`. Longer takes only a process in an uninterruptible wait.
const KILL_WAIT: Duration = Duration::from_secs(10);

/// A signal to send with [`Child::signal`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Signal {
    /// `SIGHUP`.
    Hangup,
    /// `SIGINT`.
    Interrupt,
    /// `SIGQUIT`.
    Quit,
    /// `SIGTERM`: please end.
    Terminate,
    /// `SIGKILL`: end without being asked.
    Kill,
    /// `SIGSTOP`: stand still.
    Stop,
    /// `SIGCONT`: go on.
    Continue,
    /// `SIGUSR1`.
    User1,
    /// `SIGUSR2`.
    User2,
}

impl Signal {
    const fn raw(self) -> rustix::process::Signal {
        use rustix::process::Signal as Raw;
        match self {
            Self::Hangup => Raw::HUP,
            Self::Interrupt => Raw::INT,
            Self::Quit => Raw::QUIT,
            Self::Terminate => Raw::TERM,
            Self::Kill => Raw::KILL,
            Self::Stop => Raw::STOP,
            Self::Continue => Raw::CONT,
            Self::User1 => Raw::USR1,
            Self::User2 => Raw::USR2,
        }
    }
}

/// Why a signal was not sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SignalError {
    /// The process has ended, and so has its group. Nothing to do.
    #[error("process {pid} has ended already")]
    Ended {
        /// The process.
        pid: u32,
    },
    /// The system refused, for instance because the process changed its user.
    #[error("cannot send a signal to process {pid}: {reason}")]
    Refused {
        /// The process.
        pid: u32,
        /// What the system said.
        reason: String,
    },
}

/// The names under which the system knows the process.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) pidfd: OwnedFd,
}

impl Process {
    /// Signals its process group.
    pub(crate) fn signal(&self, signal: Signal) -> Result<(), SignalError> {
        let ended = SignalError::Ended { pid: self.pid };
        let Some(pid) = procfs::raw(self.pid) else {
            return Err(ended);
        };
        sys::signal_group(self.pidfd.as_fd(), pid, signal.raw()).map_err(|error| {
            if error.raw_os_error() == Some(libc::ESRCH) {
                ended
            } else {
                SignalError::Refused {
                    pid: self.pid,
                    reason: error.to_string(),
                }
            }
        })
    }

    /// Whether it has ended. If in doubt, no.
    pub(crate) fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }
}

/// A process that was started by a [`Warden`](crate::Warden). Clones are the same process.
///
/// Dropping it does not end the process; [`Child::stop`] and the end of its warden do.
#[derive(Debug, Clone)]
pub struct Child {
    pub(crate) process: Arc<Process>,
    pub(crate) exit: watch::Receiver<Option<Exit>>,
    pub(crate) warden: Weak<Shared>,
    /// The number of the request that started it.
    pub(crate) id: u64,
}

impl Child {
    /// Its process id, which is also its process group and session.
    pub fn pid(&self) -> u32 {
        self.process.pid
    }

    /// How it ended; `None` as long as that is not known.
    pub fn exit(&self) -> Option<Exit> {
        *self.exit.borrow()
    }

    /// Waits until it has ended, and says how.
    ///
    /// By then what was left of its process group and session has been killed, so its pipes end too; but a process that
    /// left both on purpose may hold them open for as long as other workers of the warden live. One that was started with
    /// [`linger`](crate::SpawnRequest::linger) has this when it is released.
    ///
    /// [`Exit::Unknown`] if the warden was lost: the process is dead then as well. Any number of tasks may wait. Cancel
    /// safe. Waits for as long as the process runs.
    pub async fn wait(&self) -> Exit {
        let mut exit = self.exit.clone();
        match exit.wait_for(Option::is_some).await {
            Ok(exit) => exit.unwrap_or(Exit::Unknown),
            // The runtime of the warden's handle is gone; the warden is ending all processes.
            Err(_) => Exit::Unknown,
        }
    }

    /// Kills what is left of its process group and session, if it has ended and was started with
    /// [`linger`](crate::SpawnRequest::linger). Does not wait for their end; if the warden is gone, so are they.
    pub async fn release(&self) {
        if let Some(warden) = self.warden.upgrade() {
            warden.release(self.id).await;
        }
    }

    /// Sends a signal to its process group.
    ///
    /// # Errors
    ///
    /// [`SignalError`].
    pub fn signal(&self, signal: Signal) -> Result<(), SignalError> {
        if self.exit().is_some() {
            return Err(SignalError::Ended { pid: self.pid() });
        }
        self.process.signal(signal)
    }

    /// Asks its process group to end (`SIGTERM`, and `SIGCONT` so that one that stands still can obey), kills it after
    /// `grace`, and says how it ended.
    ///
    /// Ends within `grace` and 10 s: [`Exit::Unknown`] if it has not ended by then, which only a process in an
    /// uninterruptible wait can do. Dropped half-way it may have sent `SIGTERM` and will not send `SIGKILL`.
    pub async fn stop(&self, grace: Duration) -> Exit {
        for signal in [Signal::Terminate, Signal::Continue] {
            self.try_signal(signal);
        }
        if let Ok(exit) = tokio::time::timeout(grace, self.wait()).await {
            return exit;
        }
        self.try_signal(Signal::Kill);
        let killed = tokio::time::timeout(KILL_WAIT, self.wait()).await;
        killed.unwrap_or_else(|_| {
            tracing::error!(pid = self.pid(), after = ?KILL_WAIT, "a killed process has not ended");
            Exit::Unknown
        })
    }

    fn try_signal(&self, signal: Signal) {
        match self.signal(signal) {
            // Between its end and the report of it.
            Ok(()) | Err(SignalError::Ended { .. }) => {}
            Err(error) => tracing::warn!(%error, ?signal, "stopping a process"),
        }
    }

    /// Device and inode of the file that it executes, which is what it is whatever its path says.
    ///
    /// # Errors
    ///
    /// `NotFound` if it has ended; `PermissionDenied` if it changed its user.
    pub fn executable_id(&self) -> io::Result<(u64, u64)> {
        let file = std::fs::metadata(format!("/proc/{}/exe", self.pid()))?;
        // After the look, so that the number was this process's when it was used.
        if self.process.has_ended() {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!("process {} has ended", self.pid()),
            ));
        }
        Ok((file.dev(), file.ino()))
    }
}
