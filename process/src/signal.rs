//! Signals for workers.

use serde::{Deserialize, Serialize};

/// A signal to send with [`Child::signal`](crate::Child::signal).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Signal {
    /// `SIGINT`.
    Interrupt,
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

/// What a signal means, which decides whom it reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// Please end.
    Notice,
    /// End.
    Kill,
    /// Stand still, or go on.
    Control,
    /// Whatever the program makes of it.
    User,
}

impl Signal {
    pub(crate) const fn raw(self) -> rustix::process::Signal {
        use rustix::process::Signal as Raw;
        match self {
            Self::Interrupt => Raw::INT,
            Self::Terminate => Raw::TERM,
            Self::Kill => Raw::KILL,
            Self::Stop => Raw::STOP,
            Self::Continue => Raw::CONT,
            Self::User1 => Raw::USR1,
            Self::User2 => Raw::USR2,
        }
    }

    pub(crate) const fn meaning(self) -> Meaning {
        match self {
            Self::Interrupt | Self::Terminate => Meaning::Notice,
            Self::Kill => Meaning::Kill,
            Self::Stop | Self::Continue => Meaning::Control,
            Self::User1 | Self::User2 => Meaning::User,
        }
    }

    /// Whether it asks a process to end, so that the process may take its time for it.
    #[must_use]
    pub const fn is_notice(self) -> bool {
        matches!(self.meaning(), Meaning::Notice)
    }
}
