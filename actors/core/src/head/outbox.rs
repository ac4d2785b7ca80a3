//! Pushes to one node for one job: in order, each until the node takes or refuses it.

use std::collections::VecDeque;
use std::time::Duration;

use kolo_wire::NodeRequest;

use super::messages::RequestId;
use crate::pace::Backoff;

/// How long to wait after a push that did not work: at first, and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    /// The first one is on its way.
    Delivering(RequestId),
    /// It did not work, and is tried again later.
    Pausing,
}

/// What is being delivered to one node.
#[derive(Debug)]
pub(super) struct Outbox {
    waiting: VecDeque<NodeRequest>,
    state: State,
    backoff: Backoff,
}

impl Outbox {
    pub(super) fn new() -> Self {
        let (first, most) = PAUSES;
        Self {
            waiting: VecDeque::new(),
            state: State::Idle,
            backoff: Backoff::new(first, most),
        }
    }

    pub(super) fn push(&mut self, request: NodeRequest) {
        self.waiting.push_back(request);
    }

    /// The push whose turn it is. [`Outbox::sent`] must follow.
    pub(super) fn next(&self) -> Option<&NodeRequest> {
        self.waiting.front().filter(|_| self.state == State::Idle)
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

    /// The node has taken or refused the first push. The push, and how often it had failed.
    pub(super) fn taken(&mut self) -> (Option<NodeRequest>, u32) {
        self.state = State::Idle;
        (self.waiting.pop_front(), self.backoff.worked())
    }

    /// Attempts that have failed in a row.
    pub(super) fn failures(&self) -> u32 {
        self.backoff.failures()
    }
}
