//! Questions that are answered when jobs have ended, so that a node or the head can leave without breaking any.

use kolo_wire::ids::NodeId;

use super::messages::AskId;
use super::registry::{NodeRegistry, Session};

/// The questions.
#[derive(Debug, Default)]
pub(super) struct Drains {
    nodes: Vec<(NodeId, Session, AskId)>,
    head: Vec<AskId>,
    /// Why the head takes no more jobs.
    pub(super) stopping: Option<String>,
}

impl Drains {
    /// Answered when the node holds nothing any more, or its stay is over.
    pub(super) fn add_node(&mut self, node: NodeId, session: Session, ask: AskId) {
        self.nodes.push((node, session, ask));
    }

    /// Answered when there is no job any more.
    pub(super) fn add_head(&mut self, ask: AskId) {
        self.head.push(ask);
    }

    pub(super) fn forget(&mut self, ask: AskId) {
        self.nodes.retain(|(_, _, other)| *other != ask);
        self.head.retain(|other| *other != ask);
    }

    /// Takes those that are to be answered now.
    pub(super) fn settle(&mut self, registry: &NodeRegistry, any_job: bool) -> Vec<AskId> {
        let mut over = Vec::new();
        self.nodes.retain(|(node, session, ask)| {
            let waits = !registry.is_idle(*node) && registry.is_current(*node, *session);
            if !waits {
                over.push(*ask);
            }
            waits
        });
        if !any_job {
            over.append(&mut self.head);
        }
        over
    }
}
