//! Connections to the head, as QUIC has them: what is sent arrives once, in any order between streams, or the connection
//! ends. Loss is delay.

use std::collections::BTreeMap;

use kolo_core::head::job::Reply;
use kolo_core::head::messages::RequestId;
use kolo_core::node::messages::WorkerId;
use kolo_wire::ids::JobId;
use kolo_wire::{HeadReply, HeadRequest, JobEvent, JobSpec, NodeRequest, SubmitFrame};

use crate::knobs::Time;

/// A side of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Head,
    Peer,
}

impl Side {
    pub(crate) fn other(self) -> Self {
        match self {
            Self::Head => Self::Peer,
            Self::Peer => Self::Head,
        }
    }
}

/// The process that has connected to the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peer {
    /// This node, in this life of its daemon.
    Node(usize, u64),
    Driver(usize),
}

/// A kind of question to the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Tag {
    Register,
    Beat,
    /// Events, in this session of the core.
    Events(u64),
    Sign(WorkerId),
    Drain,
}

/// A message between the head and a peer.
#[derive(Debug, Clone)]
pub(crate) enum Mail {
    /// A peer asks the head; the number tells its questions apart.
    Ask(Tag, u64, Box<HeadRequest>),
    /// The head answers.
    Answer(Tag, u64, Box<HeadReply>),
    /// The head asks a node.
    Order(RequestId, Box<NodeRequest>),
    /// A node answers.
    Reply(RequestId, Box<Reply>),
    /// A driver submits.
    Submit(JobId, Box<JobSpec>),
    /// A driver says something of its job.
    Frame(JobId, SubmitFrame),
    /// The head tells a driver.
    News(Box<JobEvent>),
    /// Nothing but that the other side is there.
    Ping,
    /// The connection ends; why.
    Close(String),
}

/// A stream whose messages come in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stream {
    Beats,
    Job,
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) peer: Peer,
    pub(crate) is_open: [bool; 2],
    /// When each side has heard the other one last.
    pub(crate) heard: [Time; 2],
    /// What waits for the network, by the side that it goes to.
    pub(crate) held: [Vec<Mail>; 2],
    /// When the last message of a stream arrives.
    last: BTreeMap<(u8, Stream), Time>,
}

impl Link {
    pub(crate) fn new(peer: Peer, now: Time) -> Self {
        Self {
            peer,
            is_open: [true; 2],
            heard: [now; 2],
            held: [Vec::new(), Vec::new()],
            last: BTreeMap::new(),
        }
    }

    /// When a message arrives that would arrive at `at` if it were alone.
    pub(crate) fn in_order(&mut self, to: Side, mail: &Mail, at: Time) -> Time {
        let stream = match mail {
            Mail::Ask(Tag::Beat, ..) | Mail::Answer(Tag::Beat, ..) => Stream::Beats,
            Mail::Submit(..) | Mail::Frame(..) | Mail::News(_) => Stream::Job,
            _ => return at,
        };
        let last = self.last.entry((to as u8, stream)).or_default();
        *last = at.max(*last);
        *last
    }
}
