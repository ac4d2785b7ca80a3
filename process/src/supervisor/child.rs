//! A process that was started.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Weak};

use kolo_transport::wire::Exit;
use rustix::event::{PollFd, PollFlags, Timespec};
use tokio::sync::watch;

use super::Shared;
use crate::signal::Signal;
use crate::{procfs, sys};

/// Why a signal was not sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SignalError {
    /// The process has ended, and so has all that was below it. Nothing to do.
    #[error("process {pid} has ended already")]
    Ended {
        /// The process.
        pid: u32,
    },
    /// The system refused, for instance because the process changed its user, or the warden takes no more orders.
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
    /// Kills its process group.
    pub(crate) fn kill(&self) {
        let Some(pid) = procfs::raw(self.pid) else {
            return;
        };
        let kill = Signal::Kill.raw();
        if let Err(error) = sys::signal_group(self.pidfd.as_fd(), pid, kill) {
            tracing::debug!(pid = self.pid, %error, "killing a process");
        }
    }

    /// Whether it has ended. If in doubt, no.
    pub(crate) fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }
}

/// How far a process is with its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    Running,
    /// It has ended, and others below it live.
    Ended(Exit),
    /// It has ended, and nothing is left of it.
    Gone(Exit),
}

impl Life {
    pub(crate) const fn exit(self) -> Option<Exit> {
        match self {
            Self::Running => None,
            Self::Ended(exit) | Self::Gone(exit) => Some(exit),
        }
    }
}

/// A process that was started by a [`Warden`](crate::Warden). Clones are the same process.
///
/// Its end comes in two steps: first its own ([`Child::wait`]), then that of what it has left behind ([`Child::gone`]), which
/// lives on until it ends by itself or is killed ([`Signal::Kill`]).
///
/// Dropping it does not end the process; [`Child::signal`] and the end of its warden do.
#[derive(Debug, Clone)]
pub struct Child {
    pub(crate) process: Arc<Process>,
    pub(crate) life: watch::Receiver<Life>,
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
        self.life.borrow().exit()
    }

    /// Waits until it has ended, and says how. What it has started may still be there.
    ///
    /// [`Exit::Unknown`] if the warden was lost: the process is dead then as well. Any number of tasks may wait. Cancel
    /// safe. Waits for as long as the process runs.
    pub async fn wait(&self) -> Exit {
        self.until(|life| *life != Life::Running).await
    }

    /// Waits until nothing of it is left, and says how it ended itself.
    ///
    /// Left is what is in its process group or session, or below such a process; and, of what has lost its parent *and* has
    /// left the session, everything that is below the warden, for nobody knows whose it is. After [`Signal::Kill`] the
    /// latter is not waited for: it is killed when the last process of the warden is gone.
    ///
    /// As [`Child::wait`] otherwise.
    pub async fn gone(&self) -> Exit {
        self.until(|life| matches!(life, Life::Gone(_))).await
    }

    async fn until(&self, is: impl FnMut(&Life) -> bool) -> Exit {
        let mut life = self.life.clone();
        match life.wait_for(is).await {
            Ok(life) => life.exit().unwrap_or(Exit::Unknown),
            // The runtime of the warden's handle is gone; the warden is ending all processes.
            Err(_) => Exit::Unknown,
        }
    }

    /// Sends a signal, also after its own end to what it has left behind. Returns before it arrives; signals arrive in
    /// order. Whom it reaches depends on what it means:
    ///
    /// - [`Signal::Interrupt`] and [`Signal::Terminate`] ask to end: they reach everything
    ///   below it, whatever session that is in, and what below the warden belongs to nobody (see [`Child::gone`]). Each
    ///   process gets the same one once, however often and through whomever it is sent, and one that stands still goes on.
    ///   When all that a process has left behind ignores its [`Signal::Interrupt`], that gets [`Signal::Terminate`].
    /// - [`Signal::Kill`]: everything below it.
    /// - [`Signal::Stop`] and [`Signal::Continue`]: as the first, but again each time.
    /// - [`Signal::User1`] and [`Signal::User2`] reach the first on each way down that does something about it. A shell between
    ///   kolo and the program, which would die of it, is left alone, and so is what the program has started.
    ///
    /// # Errors
    ///
    /// [`SignalError`].
    pub fn signal(&self, signal: Signal) -> Result<(), SignalError> {
        let ended = SignalError::Ended { pid: self.pid() };
        let gone = matches!(*self.life.borrow(), Life::Gone(_));
        let warden = self.warden.upgrade().filter(|_| !gone).ok_or(ended)?;
        if signal == Signal::Kill && self.exit().is_none() {
            // A warden that stands still passes nothing on.
            self.process.kill();
        }
        warden.order(self.id, self.pid(), signal)
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
