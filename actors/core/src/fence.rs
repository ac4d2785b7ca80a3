//! The time after which no worker of a node runs that is cut off from the head.
//!
//! An elastic job goes on without such a node, so that its workers must end whoever else still reaches them (G-3). Both sides take their times
//! from here: the node ends the workers after [`of_node`], and the head counts on it after [`of_head`].

use std::time::Duration;

/// How long workers have for their notice before they are killed.
pub const NOTICE: Duration = Duration::from_secs(1);

/// For a busy host: between the end of a time and the end of the last process.
const MARGIN: Duration = Duration::from_secs(2);

/// How long after the death of its daemon a warden has killed all workers (O-1).
const WARDEN: Duration = Duration::from_secs(1);

/// The knowledge of the workers of a node that is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fence {
    /// Nothing: the node may only be cut off. They have ended after [`of_head`].
    Lease,
    /// The daemon was stopped and leaves. It ends them first, or kills them, which it can't tell any more: as [`Fence::Lease`].
    Left,
    /// The daemon is dead, and their wardens kill them: they have ended after [`of_death`].
    Wardens,
    /// They have ended.
    Ended,
}

/// How long after the head has heard of a daemon's death workers may still run that nobody speaks of.
#[must_use]
pub fn of_death() -> Duration {
    WARDEN + MARGIN
}

/// A head that starts anew, or stands still for a moment, ends nothing.
const AWAY: Duration = Duration::from_secs(3);

/// How long a node whose connection to the head has ended waits for another one before it ends the workers of elastic jobs: a
/// lease, or 3 s if that is more.
#[must_use]
pub fn of_node(lease: Duration) -> Duration {
    lease.max(AWAY)
}

/// How long after the head has lost a node its workers may still run: the node sees the end of the connection by a missing answer
/// to a heartbeat, waits, and ends them.
#[must_use]
pub fn of_head(lease: Duration, heartbeat: Duration) -> Duration {
    let seen = lease.saturating_add(heartbeat);
    let ended = of_node(lease).saturating_add(NOTICE);
    seen.saturating_add(ended).saturating_add(MARGIN)
}
