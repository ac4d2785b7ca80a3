//! What happens next: events in order of their time, and of their coming where the time is the same.

use std::collections::BTreeMap;

use kolo_core::node::messages::{AskId, Input as NodeInput};
use kolo_wire::ids::{Generation, JobId, NodeId};
use kolo_wire::{Exit, FromWorker, SubmitFrame, ToWorker};

use crate::knobs::Time;
use crate::link::{Mail, Side, Tag};
use crate::worker::Ending;

/// Something happens.
#[derive(Debug)]
pub(crate) enum Event {
    /// A message comes to one side of a connection.
    Arrive(u64, Side, Mail),
    /// One side of a connection looks how long the other one was silent.
    Idle(u64, Side),
    /// The head hears something from its own host.
    HeadHears(u64, Box<kolo_core::head::messages::Input>),
    /// A connection of the head has ended.
    HeadLost(u64, u64, String),
    /// The head's deadline is over.
    HeadTick(u64),
    /// A node's deadline is over.
    NodeTick(usize, u64),
    /// A node sends its next heartbeat.
    Beat(usize, u64),
    /// A node tries to connect to the head.
    Connect(usize, u64),
    /// A node hears no answer to its question in time.
    Unanswered(usize, u64, Tag, u64),
    /// The shell of a node has something for its core.
    Shell(usize, u64, Box<NodeInput>),
    /// A node looks for jobs that nobody is there for.
    Orphans(usize, u64),
    /// A node that is cut off kills what has not ended at its notice.
    Kill(usize, u64, JobId, AskId),
    /// A process hears its node.
    Tell(u32, Box<ToWorker>),
    /// A node hears a process.
    Said(u32, Box<FromWorker>),
    /// An installed program has started.
    Begins(u32),
    /// A process has done its share of a step.
    Worked(u32, Generation, u64),
    /// An operation of a process ends.
    Operation(u32, Generation, u64, Ending),
    /// Nobody waits any longer in an operation of a generation.
    Patience(JobId, Generation, u64),
    /// A process has waited for the next generation for as long as it may.
    Waited(u32, Generation),
    /// A process ends.
    Exit(u32, Exit),
    /// A driver does something.
    Driver(usize, Errand),
    /// Something goes wrong, or right again.
    Fault(Fault),
}

/// Something that a driver does at a time.
#[derive(Debug, Clone)]
pub(crate) enum Errand {
    /// Connects and submits.
    Begin,
    Ping,
    /// Its program is on these nodes now.
    Programs(Vec<NodeId>),
    Says(SubmitFrame),
    /// Somebody else stops its job.
    Stopped,
    /// It is gone, without a word.
    Vanish,
    /// It has read the end of its job.
    Leave,
}

/// Something goes wrong, or right again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fault {
    NodeCrashes(usize),
    NodeStarts(usize),
    /// A daemon is asked to end, as by `SIGTERM`.
    NodeLeaves(usize),
    /// A daemon that is asked to end has waited long enough.
    Gone(usize, u64),
    NodeStops(usize, Time),
    /// Nothing passes to the head, to the node, or to other hosts.
    Cut(usize, [bool; 2], bool),
    HeadCrashes,
    HeadStarts,
    HeadStops(Time),
    /// Some worker dies.
    Kill,
    /// All faults are over.
    Heal,
    /// A job is looked at, and loses a worker.
    Serve,
    /// It is looked at again.
    Again,
    /// A job lost a worker a moment ago.
    Aftermath(u32),
    /// A node is drained, or is not any more.
    Drain(usize, bool),
    /// Drained nodes are looked at, and drivers end their jobs.
    Finish,
    /// Nothing is left.
    Quiet,
}

/// The events that are to come.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    events: BTreeMap<(Time, u64), Event>,
    sequence: u64,
}

impl Queue {
    pub(crate) fn push(&mut self, at: Time, event: Event) {
        self.sequence += 1;
        self.events.insert((at, self.sequence), event);
    }

    pub(crate) fn pop(&mut self) -> Option<(Time, Event)> {
        let ((at, _), event) = self.events.pop_first()?;
        Some((at, event))
    }
}
