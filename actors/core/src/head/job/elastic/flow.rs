//! What is under way between an elastic job and one of its nodes.

use std::collections::VecDeque;

use kolo_wire::NodeRequest;
use kolo_wire::ids::{Generation, Slot};

use crate::membership::Process;

/// What is under way between the job and a node.
#[derive(Debug, Default)]
pub(in crate::head::job) struct Flow {
    /// Seats that are given to the node, and about which membership has not heard yet.
    pub(super) asking: Vec<Slot>,
    /// Processes that are to be started.
    pub(super) queue: Vec<Process>,
    /// Processes in the request to start that is under way.
    pub(super) starting: Vec<Process>,
    /// What is to be pushed once the first workers are started.
    pub(super) waiting: Vec<(Sent, NodeRequest)>,
    /// What was pushed, in order, and not answered yet.
    pub(super) pushed: VecDeque<Sent>,
    /// The how-manieth word of the driver says that the node has the program.
    pub(super) program: u64,
    /// A request is under way whose answer is still to come, though the node was lost.
    pub(super) is_owed: bool,
}

/// What was pushed to a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Sent {
    /// Processes to start.
    Start(Vec<Process>),
    /// A generation.
    Membership(Generation),
    /// The wish that its members hold.
    Hold(Generation),
    /// Anything that nothing hangs on.
    Other,
}

impl Flow {
    /// It is on its way already.
    pub(super) fn is_sent(&self, sent: &Sent) -> bool {
        self.pushed.contains(sent) || self.waiting.iter().any(|(waiting, _)| waiting == sent)
    }

    /// The node is told to undo everything, or is lost: nothing else is under way any more.
    pub(in crate::head::job) fn clear(&mut self) {
        self.waiting.clear();
        self.pushed.clear();
    }

    /// Nothing is started there any more.
    pub(super) fn forget_processes(&mut self) {
        self.queue.clear();
        self.starting.clear();
    }
}
