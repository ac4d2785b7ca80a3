//! What a job hears, and what it wants done.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kolo_wire::ids::{Generation, NodeId, Slot};
use kolo_wire::{
    GenerationTable, JobEvent, Member, NetworkReport, NodeEvent, NodeReply, NodeRequest, Refusal,
    SubmitFrame,
};

use crate::fence::Fence;
use crate::interfaces::{Discovery, Network};
use crate::membership::Process;
use crate::rendezvous::DoorNews;

/// A part of the placement: a node and its workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// The node.
    pub node: NodeId,
    /// Its hostname.
    pub hostname: String,
    /// Where its daemon listens.
    pub address: SocketAddr,
    /// How many workers it gets; their ranks follow those of the site before.
    pub workers: u32,
}

/// Seats of an elastic job that a node is to hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seating {
    /// The node. The number of its workers is that of the seats.
    pub site: Site,
    /// The seats.
    pub slots: Vec<Slot>,
}

/// What the head decides about all jobs.
#[derive(Debug, Clone, Copy)]
pub struct JobConfig {
    /// How long a node may take to answer reserve, start and release.
    pub request_timeout: Duration,
    /// How long a node may take to answer stop, over two grace periods.
    pub stop_margin: Duration,
    /// How long an address may take to answer a probe.
    pub probe_limit: Duration,
    /// How long the workers of a node may run on unseen at most after the node was lost. The head takes no less than
    /// [`fence::of_head`](crate::fence::of_head).
    pub fence: Duration,
}

impl Default for JobConfig {
    /// 10 s, 5 s, 2 s, and 10 s.
    fn default() -> Self {
        Self {
            request_timeout: Duration::from_secs(10),
            stop_margin: Duration::from_secs(5),
            probe_limit: Duration::from_secs(2),
            fence: Duration::from_secs(10),
        }
    }
}

/// How a node answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// With this.
    Answer(NodeReply),
    /// No; nothing was done.
    Refused(Refusal),
    /// Not in time, or the connection ended. It may be done or not.
    Unknown(String),
}

impl Reply {
    /// Why it is not the answer that was wanted.
    pub(in crate::head) fn unexpected(self) -> String {
        match self {
            Self::Unknown(reason) => reason,
            Self::Refused(refusal) => refusal.message,
            Self::Answer(_) => "it sent an answer to another question".to_owned(),
        }
    }
}

/// Something happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Answer to the [`Action::Request`] for this node.
    Replied {
        /// The node.
        node: NodeId,
        /// Its answer.
        reply: Reply,
    },
    /// The node took the delivery of [`Job::next_push`](super::Job::next_push), or refused it.
    Pushed {
        /// The node.
        node: NodeId,
        /// Its answer.
        answer: Result<NodeReply, Refusal>,
    },
    /// A node reports.
    Node {
        /// The node.
        node: NodeId,
        /// What happened on it.
        event: NodeEvent,
    },
    /// The node's session has ended or its lease has run out.
    NodeLost {
        /// The node.
        node: NodeId,
        /// How that was seen.
        reason: String,
        /// What is known of the workers there.
        fence: Fence,
    },
    /// Nothing of the job is left on a node that is lost, for certain.
    Fenced {
        /// The node.
        node: NodeId,
        /// How that is known.
        reason: String,
    },
    /// Answer to [`Action::Discover`].
    Discovered(Result<Arc<Network>, NetworkReport>),
    /// Answer to [`Action::OpenRendezvous`].
    Rendezvous(Result<SocketAddr, String>),
    /// News of the door of a process: see [`Action::OpenDoor`].
    Door(Process, DoorNews),
    /// Answer to [`Action::Place`]. The head has booked what the seats need there. If a node is new to the job, say
    /// [`Job::connect_by`](super::Job::connect_by) before.
    Placed {
        /// Nodes for seats.
        seated: Vec<Seating>,
        /// Seats for which there is no room.
        without: Vec<Slot>,
        /// What is missing where, if there are such seats.
        why: String,
    },
    /// There may be room for more seats of an elastic job: a node has joined, or something was given back, by the job itself
    /// too.
    Offered,
    /// Another job waits for room, and so does this one, which has some: see [`Job::is_short`](super::Job::is_short).
    Contended,
    /// A node is to be left, by a job that can: an elastic one.
    Drain {
        /// The node.
        node: NodeId,
        /// Why.
        reason: String,
    },
    /// The time to leave a node is over: processes that are still there are ended.
    Evict {
        /// The node.
        node: NodeId,
        /// Why.
        reason: String,
    },
    /// A node need not be left after all.
    Undrain {
        /// The node.
        node: NodeId,
    },
    /// The driver says something.
    Driver(SubmitFrame),
    /// The driver's connection or stream has ended.
    DriverGone,
    /// Somebody else asks for the end.
    Stop {
        /// Who and why.
        reason: String,
    },
    /// Time has passed: see [`Job::deadline`](super::Job::deadline).
    Tick,
}

/// A delivery whose turn it is.
#[derive(Debug, Clone, PartialEq)]
pub enum Next {
    /// The membership, which [`Job::membership`](super::Job::membership) makes.
    Membership,
    /// This.
    Order(Box<NodeRequest>),
}

/// A state of an elastic job's group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupState {
    /// As torchelastic names it: `HEALTHY`, `UNHEALTHY`, `SUCCEEDED`, `FAILED` or `STOPPED`.
    pub state: &'static str,
    /// The generation that was active last.
    pub generation: Generation,
    /// Its members.
    pub members: u32,
    /// Restarts that failures have used up.
    pub restarts: u32,
    /// Why the group is in this state.
    pub cause: String,
}

/// Something to do. Actions are done in order.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Send a request to a node, and answer with one [`Event::Replied`] within the deadline. There is never
    /// more than one for a node at a time.
    Request {
        /// The node.
        node: NodeId,
        /// The request.
        request: Box<NodeRequest>,
        /// The longest wait for its answer.
        deadline: Duration,
    },
    /// One more thing is to be delivered to the node. Deliver what [`Job::next_push`](super::Job::next_push) gives, one after the
    /// other, and try each again until the node takes or refuses it: one [`Event::Pushed`]. A later [`Action::Request`] for the
    /// node or its loss ends the attempts.
    Push(NodeId),
    /// Tell the driver.
    Tell(JobEvent),
    /// Find out what connects the nodes, and answer with one [`Event::Discovered`].
    Discover(Box<Discovery>),
    /// Open the plain HTTP rendezvous for these members, in place of the one before, and answer with one [`Event::Rendezvous`].
    OpenRendezvous(Vec<Member>),
    /// Close it again.
    CloseRendezvous,
    /// Open a rendezvous for this process alone, on this node and with this `HOROVOD_HOSTNAME`: one [`DoorNews::Opened`], and others
    /// later.
    OpenDoor(Process, NodeId, String),
    /// Let the members of a generation in at their doors.
    Admit(Arc<GenerationTable>),
    /// Tell a process behind its door that hosts have changed: one [`DoorNews::Noticed`] with this number.
    Notice(Process, u64),
    /// Close the door of a process.
    CloseDoor(Process),
    /// Find nodes for these seats of an elastic job, and answer with one [`Event::Placed`] that has all of them.
    Place {
        /// The seats.
        slots: Vec<Slot>,
        /// Hostnames that get no process now, because one has failed there.
        avoid: Vec<String>,
    },
    /// Some seats of the job are not needed any more on the node, which has others.
    GiveBack {
        /// The node.
        node: NodeId,
        /// How many.
        workers: u32,
    },
    /// Nothing of the job is left on the node.
    Free(NodeId),
    /// Something of the job may be left on the node, which lives and does not say. Go on asking it to stop.
    Abandon(NodeId),
    /// For the log.
    Note(String),
    /// The group of an elastic job is in another state, for the log.
    Group(GroupState),
    /// The job has ended and asks for nothing more.
    Finished,
}
