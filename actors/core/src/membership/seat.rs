//! Seats, and the processes that sit in them.

use std::collections::BTreeSet;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

pub use kolo_wire::ids::Incarnation;
use kolo_wire::ids::{NodeId, Slot};

/// The name of one process of a job. No other process of the job ever has the same name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Process {
    /// The seat that the process is in.
    pub slot: Slot,
    /// The how-manieth process of the seat.
    pub incarnation: Incarnation,
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} of slot {}", self.incarnation, self.slot)
    }
}

/// A failure domain: what breaks together. Several nodes may share one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Host(pub Arc<str>);

impl From<&str> for Host {
    fn from(name: &str) -> Self {
        Self(name.into())
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// The node that holds a seat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// The node.
    pub node: NodeId,
    /// Its failure domain.
    pub host: Host,
}

/// Where a process listens for its peers. Membership passes it on and never looks inside.
pub type Addresses = Arc<[SocketAddr]>;

/// How far a seat is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// No node holds the seat, and nobody looks for one.
    Vacant,
    /// A node is being looked for.
    Reserving,
    /// A node holds the seat, and no process is there. Only of a group that is started anew.
    Held,
    /// A process was started and has not said hello.
    Booting,
    /// The process can take part in a generation, and does not. Spares stay here.
    Ready,
    /// The process is a member of the last generation that was active.
    Active,
    /// The process was told to end, because the group is started anew.
    Stopping,
    /// The process was active and has ended with success: its work is done.
    Returned,
    /// The process is not there any more, for the reason in [`Seat::loss`].
    Lost,
}

impl State {
    /// A process is there, or is on its way.
    #[must_use]
    pub fn is_there(self) -> bool {
        matches!(
            self,
            Self::Booting | Self::Ready | Self::Active | Self::Stopping
        )
    }

    /// The process is there and can take part in a generation.
    #[must_use]
    pub fn is_live(self) -> bool {
        matches!(self, Self::Ready | Self::Active)
    }
}

/// Why a process is not there any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Loss {
    /// The process ended by itself. The text has its exit and what the process said at last.
    Died(String),
    /// Its node was lost. Until `fenced` the process may still run there, unseen: the node ends its
    /// workers by then, because its own lease has run out.
    Node {
        /// How the loss was seen.
        why: String,
        /// When the process has ended for certain.
        fenced: Instant,
    },
    /// A deadline passed. The process may hang, and is stopped.
    Late(String),
    /// The process was asked to go, because its node leaves.
    Left(String),
}

impl Loss {
    /// Whether the process has failed, and then whether its host may be to blame. A late process is no proof that its host is bad.
    pub(super) fn is_failure(&self) -> (bool, bool) {
        match self {
            Self::Died(_) => (true, true),
            Self::Late(_) => (true, false),
            Self::Node { .. } | Self::Left(_) => (false, false),
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Died(why) => f.write_str(why),
            Self::Node { why, .. } => write!(f, "its node was lost: {why}"),
            Self::Late(why) => write!(f, "late: {why}"),
            Self::Left(why) => write!(f, "left: {why}"),
        }
    }
}

/// A place of a job that one process at a time can take, and what is true of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seat {
    /// The number of the seat. It stays for the whole job.
    pub slot: Slot,
    /// The last process that was started here.
    pub incarnation: Incarnation,
    /// How far the seat is.
    pub state: State,
    /// Since when it is that far.
    pub since: Instant,
    /// The node that holds the seat.
    pub location: Option<Location>,
    /// The node drains, so the process is to leave.
    pub leaving: bool,
    /// Where the process listens. Empty until it is ready.
    pub addresses: Addresses,
    /// Why the last process that was lost here was lost.
    pub loss: Option<Loss>,
}

impl Seat {
    /// The last process that was started here.
    #[must_use]
    pub fn process(&self) -> Process {
        Process {
            slot: self.slot,
            incarnation: self.incarnation,
        }
    }

    /// The failure domain of the seat.
    #[must_use]
    pub fn host(&self) -> Option<&Host> {
        self.location.as_ref().map(|location| &location.host)
    }

    /// A process could be started here without a new reservation.
    #[must_use]
    pub fn is_startable(&self, cooling: &BTreeSet<Host>) -> bool {
        let warm = self.host().is_some_and(|host| !cooling.contains(host));
        self.state == State::Lost && !self.leaving && warm
    }
}
