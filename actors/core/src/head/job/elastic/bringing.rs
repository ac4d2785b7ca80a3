//! The driver brings its program to the nodes that have joined.

use std::collections::VecDeque;

use kolo_wire::JobEvent;
use kolo_wire::ids::NodeId;

use super::super::{Action, Base};
use crate::head::job::parts::Hold;

/// Nodes that have joined, and may lack the program.
#[derive(Debug, Default)]
pub(super) struct Bringing {
    /// How often the driver was told of new nodes.
    told: u64,
    /// Nodes of which the driver has not been told.
    fresh: Vec<NodeId>,
    /// Nodes that wait for the driver's program, by the number of the word of them. Each is answered by one word of the driver.
    awaiting: VecDeque<(u64, Vec<NodeId>)>,
}

impl Bringing {
    /// The driver is to be told of a node.
    pub(super) fn joins(&mut self, node: NodeId) {
        self.fresh.push(node);
    }

    /// Tells the driver of new nodes.
    pub(super) fn announce(&mut self, job: &mut Base) {
        let fresh = std::mem::take(&mut self.fresh);
        if fresh.is_empty() {
            return;
        }
        self.told += 1;
        let mut nodes = Vec::with_capacity(fresh.len());
        for node in fresh {
            let part = job.parts.find(node);
            if let Some(part) = part.filter(|part| job.parts[*part].hold == Hold::Reserved) {
                job.parts[part].flow.program = self.told;
                nodes.push(job.placed_node(part));
            }
        }
        let waiting = nodes.iter().map(|placed| placed.node).collect();
        self.awaiting.push_back((self.told, waiting));
        let told = JobEvent::Placed { job: job.id, nodes };
        job.actions.push(Action::Tell(told));
    }

    /// The driver says that the nodes hold the program of which it was told first.
    pub(super) fn answered(&mut self, job: &mut Base) {
        let Some((word, nodes)) = self.awaiting.pop_front() else {
            return;
        };
        for node in nodes {
            let part = job.parts.find(node);
            // A later stay there is told of by a later word.
            if let Some(part) = part.filter(|part| job.parts[*part].flow.program == word) {
                job.parts[part].has_program = true;
                job.parts.pend(node);
            }
        }
    }
}
