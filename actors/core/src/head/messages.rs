//! The inputs of a [`HeadCore`](super::HeadCore), and its outputs.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_wire::identity::Identity;
use kolo_wire::ids::{ClusterId, JobId, NodeId};
use kolo_wire::{
    GenerationTable, HeadReply, HeadRequest, JobEvent, JobSpec, Member, NodeRequest, Obituary,
    SubmitFrame,
};

use super::job::{GroupState, JobConfig, Reply};
use super::registry::Session;
use crate::fence::Fence;
use crate::membership::Process;
use crate::rendezvous::{DoorNews, DoorOpening};

/// What a head must know from its start.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// The cluster.
    pub cluster: ClusterId,
    /// A node that stood still for so long counts as lost. Nodes are told it.
    pub lease: Duration,
    /// How often nodes are to be heard.
    pub heartbeat: Duration,
    /// Settings of every job.
    pub job: JobConfig,
}

/// The time of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// By the clock that stands still while the head does. Leases and deadlines count by it.
    pub awake: Instant,
    /// By the real clock. People see ages by it.
    pub real: Instant,
}

impl From<Instant> for Now {
    fn from(now: Instant) -> Self {
        Self {
            awake: now,
            real: now,
        }
    }
}

/// Names a question until it is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct AskId(pub u64);

/// Names a request to a node until its reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestId {
    /// The connection over which it goes.
    pub session: Session,
    /// Counts all requests of the head.
    pub number: u64,
}

/// The side that asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caller {
    /// A peer, over its connection.
    Peer(Session),
    /// The HTTP API, which has checked the right of its own caller.
    Http,
}

/// A question to the head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Question {
    /// A request as it came off the socket. The caller's role is checked here (S-2).
    Request(Caller, Box<HeadRequest>),
    /// Take no more jobs, and let those that run go on. Answered when all have ended.
    Drain {
        /// Why, for drivers that submit a job.
        reason: String,
    },
    /// Take no more jobs and stop all. Answered when all have ended.
    Shutdown {
        /// Why, for drivers and workers.
        reason: String,
    },
}

/// Something happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// A connection was made. Its peer is authenticated.
    Connected {
        /// A number that no other connection has, and not 0.
        session: Session,
        /// The peer.
        peer: Identity,
        /// The address that the peer comes from.
        remote: IpAddr,
        /// The head's own address as the peer reaches it, if that is known.
        local: Option<IpAddr>,
    },
    /// The connection has ended.
    Disconnected {
        /// The connection.
        session: Session,
        /// How it ended.
        reason: String,
        /// What is known of the workers behind it, if it was a node's.
        fence: Fence,
    },
    /// The nodes behind these connections were heard, at these times of [`Now::awake`].
    Heard(Vec<(Session, Instant)>),
    /// An obituary of a node's daemon has come, from whomever.
    Obituary(Obituary),
    /// A question came: one [`Output::Answer`].
    Asked {
        /// Its name.
        ask: AskId,
        /// The question.
        question: Question,
    },
    /// Nobody waits for this answer any more.
    Forget(AskId),
    /// A driver submits a job. It hears of it by [`Output::Tell`], also if the job is refused.
    Submit {
        /// The driver's connection.
        session: Session,
        /// The job's id, drawn at random.
        job: JobId,
        /// The job.
        spec: Box<JobSpec>,
        /// It is to end where its workers would start.
        dry_run: bool,
    },
    /// The driver of a job sends a frame.
    Frame(JobId, SubmitFrame),
    /// The driver of a job is gone.
    DriverGone(JobId),
    /// The reply to an [`Output::Send`].
    Replied(RequestId, Reply),
    /// The address that workers connect to, or why there is none: the answer to an [`Output::OpenRendezvous`].
    RendezvousOpened(JobId, Result<SocketAddr, String>),
    /// News of the door of a process: see [`Output::OpenDoor`].
    Door(JobId, Process, DoorNews),
    /// Time has passed: see [`HeadCore::deadline`](super::HeadCore::deadline).
    Tick,
}

/// Why the head ends a node's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkEnd {
    /// The node counts as lost.
    Lost,
    /// The node has registered over another connection.
    Replaced,
}

/// How much a line of the log matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// A fault in kolo.
    Error,
    /// Something went wrong.
    Warn,
    /// Something happened.
    Info,
}

/// A line for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// How much it matters.
    pub level: Level,
    /// The job that it is about.
    pub job: Option<JobId>,
    /// The node that it is about.
    pub node: Option<NodeId>,
    /// The text.
    pub text: String,
    /// The group that it is about, and how that is.
    pub group: Option<GroupState>,
}

/// The plain HTTP rendezvous of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opening {
    /// The job.
    pub job: JobId,
    /// Its members.
    pub members: Vec<Member>,
    /// The addresses that members come from.
    pub peers: Vec<IpAddr>,
    /// An address of this host that all nodes of the job reach, if one is known.
    pub local: Option<IpAddr>,
}

/// Something to do. Outputs are done in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Send a request over the connection that its id names, with the longest wait for the reply: at most one
    /// [`Input::Replied`], any time later.
    Send(RequestId, Box<NodeRequest>, Duration),
    /// The reply to a request is not wanted any more.
    Cancel(RequestId),
    /// End a connection, and say why.
    CloseLink(Session, LinkEnd, String),
    /// Tell the driver of a job. [`JobEvent::Ended`] is the last event of each job.
    Tell(JobId, Box<JobEvent>),
    /// Answer a question. Certificates, the list of the revoked and the time of day are left out: the daemon has them.
    Answer(AskId, Box<HeadReply>),
    /// Open a rendezvous: one [`Input::RendezvousOpened`].
    OpenRendezvous(Opening),
    /// Close all rendezvous of a job, which may have none, and all doors.
    CloseRendezvous(JobId),
    /// Open a rendezvous for one process: one [`DoorNews::Opened`], and others later.
    OpenDoor(DoorOpening),
    /// Let the members of a generation in at their doors. Its number is the last word: others that come later have higher ones.
    Admit(Arc<GenerationTable>),
    /// Tell a process behind its door that hosts have changed: one [`DoorNews::Noticed`] with this number, if the door is open.
    Notice(JobId, Process, u64),
    /// Close the door of a process.
    CloseDoor(JobId, Process),
    /// Write a line into the log.
    Log(Line),
    /// The number of living nodes is this from now on.
    Alive(usize),
}
