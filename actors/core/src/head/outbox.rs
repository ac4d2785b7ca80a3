//! Deliveries to the nodes of a job: one after the other to each node, each until the node takes or refuses it.

use std::collections::BTreeSet;
use std::time::Duration;

use kolo_wire::ids::NodeId;

use super::messages::RequestId;
use crate::pace::Backoff;

/// How long to wait after a push that did not work: at first, and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));

/// Tables of one job that are under way at once. Each is as long as the job is large.
const MOST_TABLES: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    /// One is on its way.
    Delivering(RequestId),
    /// It did not work, and is tried again later.
    Pausing,
}

/// The deliveries to one node.
#[derive(Debug)]
pub(super) struct Outbox {
    state: State,
    backoff: Backoff,
}

impl Outbox {
    pub(super) fn new() -> Self {
        let (first, most) = PAUSES;
        Self {
            state: State::Idle,
            backoff: Backoff::new(first, most),
        }
    }

    /// Another one may go. [`Outbox::sent`] must follow.
    pub(super) fn is_idle(&self) -> bool {
        self.state == State::Idle
    }

    pub(super) fn sent(&mut self, request: RequestId) {
        self.state = State::Delivering(request);
    }

    /// The request that is on its way.
    pub(super) fn under_way(&self) -> Option<RequestId> {
        match self.state {
            State::Delivering(request) => Some(request),
            State::Idle | State::Pausing => None,
        }
    }

    /// The delivery did not work. How long to wait until [`Outbox::resume`].
    pub(super) fn failed(&mut self) -> Duration {
        self.state = State::Pausing;
        self.backoff.failed()
    }

    pub(super) fn resume(&mut self) {
        self.state = State::Idle;
    }

    /// The node has taken or refused the delivery. How often it had failed.
    pub(super) fn taken(&mut self) -> u32 {
        self.state = State::Idle;
        self.backoff.worked()
    }

    /// Attempts that have failed in a row.
    pub(super) fn failures(&self) -> u32 {
        self.backoff.failures()
    }
}

/// The nodes to which the table of a job is under way, and those that wait for their turn.
#[derive(Debug, Default)]
pub(super) struct Tables {
    under_way: BTreeSet<NodeId>,
    waiting: BTreeSet<NodeId>,
}

impl Tables {
    /// Whether the table may go to the node now. If not, the node waits.
    pub(super) fn admit(&mut self, node: NodeId) -> bool {
        let has_room = self.under_way.len() < MOST_TABLES;
        let nodes = if has_room {
            &mut self.under_way
        } else {
            &mut self.waiting
        };
        nodes.insert(node);
        has_room
    }

    /// A delivery to the node is over, or pointless.
    pub(super) fn over(&mut self, node: NodeId) {
        self.under_way.remove(&node);
        self.waiting.remove(&node);
    }

    /// A node that has waited, if the table may go there now.
    pub(super) fn next(&mut self) -> Option<NodeId> {
        let has_room = self.under_way.len() < MOST_TABLES;
        has_room.then(|| self.waiting.pop_first()).flatten()
    }
}
