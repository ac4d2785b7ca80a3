//! What happens next: events in order of their time, and of their coming where the time is the same.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use kolo_core::node::messages::{AskId, Input as NodeInput};
use kolo_wire::ids::{Generation, JobId};
use kolo_wire::{Exit, FromWorker, ToWorker};

use crate::driver::Errand;
use crate::faults::Fault;
use crate::link::{Mail, Side};
use crate::node::Tag;
use crate::worker::Ending;

/// Microseconds since the beginning of a run.
pub(crate) type Time = u64;

pub(crate) const MS: Time = 1000;
pub(crate) const SECOND: Time = 1000 * MS;

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

/// The events that are to come.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    order: BinaryHeap<Reverse<(Time, u64)>>,
    events: BTreeMap<u64, Event>,
    sequence: u64,
}

impl Queue {
    pub(crate) fn push(&mut self, at: Time, event: Event) {
        self.sequence += 1;
        self.order.push(Reverse((at, self.sequence)));
        self.events.insert(self.sequence, event);
    }

    pub(crate) fn pop(&mut self) -> Option<(Time, Event)> {
        let Reverse((at, sequence)) = self.order.pop()?;
        Some((at, self.events.remove(&sequence)?))
    }
}
