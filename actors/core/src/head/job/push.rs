//! What is delivered to a node, in order. Each message is made when its turn comes: those of all nodes at once would be too much.

use std::collections::VecDeque;

use kolo_wire::ids::{Generation, NodeId};
use kolo_wire::{NodeReply, NodeRequest, Refusal};

use super::{Action, Hold, Job};

/// Something to deliver.
#[derive(Debug, PartialEq)]
pub(super) enum Push {
    /// A generation.
    Membership(Generation),
    /// Anything else.
    Order(Box<NodeRequest>),
}

impl Push {
    pub(super) fn order(request: NodeRequest) -> Self {
        Self::Order(Box::new(request))
    }

    pub(super) fn is_revocation(&self) -> bool {
        matches!(self, Self::Order(request) if matches!(**request, NodeRequest::Revoke { .. }))
    }

    pub(super) fn is_start(&self) -> bool {
        matches!(self, Self::Order(request) if matches!(**request, NodeRequest::Start(_)))
    }
}

/// What is delivered to one node, in order.
#[derive(Debug, Default)]
pub(super) struct Pushes {
    pub(super) queue: VecDeque<Push>,
    /// The last generation that was sent.
    sent: Option<Generation>,
}

impl Pushes {
    /// Forgets a generation that the node has not been sent. False if it was, or never is to be.
    pub(super) fn take_back(&mut self, generation: Generation) -> bool {
        let before = self.queue.len();
        if self.sent != Some(generation) {
            (self.queue).retain(|push| *push != Push::Membership(generation));
        }
        self.queue.len() < before
    }
}

/// A delivery whose turn it is.
#[derive(Debug, Clone, PartialEq)]
pub enum Next {
    /// The membership, which [`Job::membership`] makes.
    Membership,
    /// This.
    Order(Box<NodeRequest>),
}

impl Job {
    /// Delivers to a node that has workers of the job, or will have some when it has started them.
    pub(super) fn push(&mut self, part: usize, push: Push) {
        match self.parts[part].hold {
            Hold::Running => self.deliver(part, push),
            Hold::Starting => self.parts[part].pushes.queue.push_back(push),
            _ => {}
        }
    }

    /// As [`Job::push`], unless the same is on its way there.
    pub(super) fn push_once(&mut self, part: usize, push: Push) {
        if !self.parts[part].pushes.queue.contains(&push) {
            self.push(part, push);
        }
    }

    /// Delivers to a node, whatever is there.
    pub(super) fn deliver(&mut self, part: usize, push: Push) {
        self.parts[part].pushes.queue.push_back(push);
        let node = self.parts[part].site.node;
        self.actions.push(Action::Push(node));
    }

    /// The delivery whose turn it is at a node. The answer is [`Event::Pushed`](super::Event::Pushed).
    pub fn next_push(&mut self, node: NodeId) -> Option<Next> {
        let part = self.part(node)?;
        let newest = self.published.as_ref().map(|table| table.generation);
        let pushes = &mut self.parts[part].pushes;
        // Another generation has followed: nobody needs this one.
        let is_old =
            |push: &Push| matches!(push, Push::Membership(number) if Some(*number) != newest);
        while pushes.queue.front().is_some_and(is_old) {
            pushes.queue.pop_front();
        }
        Some(match pushes.queue.front()? {
            Push::Membership(_) => Next::Membership,
            Push::Order(request) => Next::Order(request.clone()),
        })
    }

    /// The membership, as a node gets it, which is to be sent now.
    pub fn membership(&mut self, node: NodeId) -> Option<NodeRequest> {
        let part = self.part(node)?;
        let table = self.table_for(part)?;
        self.parts[part].pushes.sent = Some(table.generation);
        Some(NodeRequest::Membership(table))
    }

    /// A node has taken or refused the first delivery.
    pub(super) fn pushed(&mut self, node: NodeId, answer: Result<NodeReply, Refusal>) {
        let Some(part) = self.part(node) else {
            return self.note(format!("answer of {node}, which has no part in the job"));
        };
        let Some(push) = self.parts[part].pushes.queue.pop_front() else {
            return self.note(format!("answer of {node} to nothing"));
        };
        self.push_answered(part, push, answer);
    }
}
