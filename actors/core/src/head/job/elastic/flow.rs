//! What is under way between an elastic job and one of its nodes.

use kolo_wire::ids::Slot;

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
    /// The how-manieth word of the driver says that the node has the program.
    pub(super) program: u64,
    /// A request is under way whose answer is still to come, though the node was lost.
    pub(super) is_owed: bool,
}

impl Flow {
    /// A seat or a process waits for something.
    pub(super) fn is_waiting(&self) -> bool {
        !(self.asking.is_empty() && self.queue.is_empty())
    }

    /// Nothing is started there any more.
    pub(super) fn forget_processes(&mut self) {
        self.queue.clear();
        self.starting.clear();
    }
}
