//! How a group of workers is.

use std::fmt;

/// The state of a group of workers. Workers of a group change state together: one that fails makes the whole group fail.
///
/// The numbers are torchelastic's, and so are the names in [`WorkerState::name`].
///
/// ```
/// use kolo_core::agent::WorkerState;
///
/// assert!(WorkerState::Healthy.is_running());
/// assert!(!WorkerState::Succeeded.is_running());
/// assert_eq!(WorkerState::Failed.value(), 32);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum WorkerState {
    /// The agent has lost track of the workers, or has done half of something. No agent recovers from that.
    Unknown = 0,
    /// The group was made, and never started.
    Init = 1,
    /// Workers run and are well.
    Healthy = 2,
    /// Workers run and are not well.
    Unhealthy = 4,
    /// The agent has stopped the workers, and is about to start them anew.
    Stopped = 8,
    /// All workers have exited with code 0.
    Succeeded = 16,
    /// Workers have exited with another code, or a signal has ended them.
    Failed = 32,
}

impl WorkerState {
    /// All states, in the order of their numbers.
    pub const ALL: [Self; 7] = [
        Self::Unknown,
        Self::Init,
        Self::Healthy,
        Self::Unhealthy,
        Self::Stopped,
        Self::Succeeded,
        Self::Failed,
    ];

    /// Whether processes of the workers are there, well or not.
    #[must_use]
    pub const fn is_running(self) -> bool {
        matches!(self, Self::Healthy | Self::Unhealthy)
    }

    /// The number of the state: a power of two, or 0 for [`WorkerState::Unknown`].
    #[must_use]
    pub const fn value(self) -> u8 {
        self as u8
    }

    /// The name in small letters, as metrics have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Init => "init",
            Self::Healthy => "healthy",
            Self::Unhealthy => "unhealthy",
            Self::Stopped => "stopped",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
        }
    }
}

impl fmt::Display for WorkerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
