//! What nodes are asked for, and what is delivered to them in order.

use std::time::Duration;

use kolo_wire::ids::NodeId;
use kolo_wire::{NodeReply, NodeRequest, RefusalKind, WorkerSignal};

use super::base::Base;
use super::end::Manner;
use super::messages::{Action, Next, Reply};
use super::parts::{Hold, Push};

impl Base {
    /// Asks a node for something. What was on its way there is pointless now.
    pub(super) fn request(&mut self, part: usize, request: NodeRequest, deadline: Duration) {
        self.parts[part].pushes.queue.clear();
        self.actions.push(Action::Request {
            node: self.parts[part].site.node,
            request: Box::new(request),
            deadline,
        });
    }

    /// Delivers to a node that has workers of the job, or will have some when it has started them.
    pub(super) fn push(&mut self, part: usize, push: impl Into<Push>) {
        match self.parts[part].hold {
            Hold::Running => self.deliver(part, push),
            Hold::Starting => self.parts[part].pushes.queue.push_back(push.into()),
            _ => {}
        }
    }

    /// As [`Base::push`], unless the same is on its way there.
    pub(super) fn push_once(&mut self, part: usize, push: impl Into<Push>) {
        let push = push.into();
        if !self.parts[part].pushes.queue.contains(&push) {
            self.push(part, push);
        }
    }

    /// Delivers to a node, whatever is there.
    pub(super) fn deliver(&mut self, part: usize, push: impl Into<Push>) {
        self.parts[part].pushes.queue.push_back(push.into());
        let node = self.parts[part].site.node;
        self.actions.push(Action::Push(node));
    }

    /// The delivery whose turn it is at a node.
    pub(super) fn next_push(&mut self, node: NodeId) -> Option<Next> {
        let part = self.parts.find(node)?;
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
    pub(super) fn membership(&mut self, node: NodeId) -> Option<NodeRequest> {
        let part = self.parts.find(node)?;
        let table = self.table_for(part)?;
        self.parts[part].pushes.sent = Some(table.generation);
        Some(NodeRequest::Membership(table))
    }

    /// A node has taken or refused the first delivery.
    pub(super) fn pushed(&mut self, node: NodeId) -> Option<(usize, Push)> {
        let Some(part) = self.parts.find(node) else {
            self.note(format!("answer of {node}, which has no part in the job"));
            return None;
        };
        let push = self.parts[part].pushes.queue.pop_front();
        if push.is_none() {
            self.note(format!("answer of {node} to nothing"));
        }
        push.map(|push| (part, push))
    }

    /// A node has taken or refused an order whose answer says nothing else.
    pub(super) fn ordered(
        &mut self,
        part: usize,
        request: &NodeRequest,
        answer: Result<NodeReply, kolo_wire::Refusal>,
    ) {
        if let Err(refusal) = answer {
            let at = self.parts[part].name();
            self.note(format!("{at} refused an order: {refusal}"));
        }
        if let NodeRequest::Signal { .. } = request {
            self.parts[part].signals.under_way = false;
            if self.ending.is_none() {
                self.push_signal(part);
            }
        }
    }

    /// Sends a signal to all workers that run and are not about to be ended.
    pub(super) fn signal(&mut self, signal: WorkerSignal) {
        if !self.is_installed() || self.ending.is_some() {
            return;
        }
        for part in 0..self.parts.len() {
            if self.parts[part].hold == Hold::Running {
                self.parts[part].signals.add(signal);
                self.push_signal(part);
            }
        }
    }

    fn push_signal(&mut self, part: usize) {
        let Some(signal) = self.parts[part].signals.next() else {
            return;
        };
        self.parts.signals += 1;
        let request = NodeRequest::Signal {
            job: self.id,
            signal,
            seq: self.parts.signals,
        };
        self.push(part, request);
    }

    /// Gives back on a node what is there of the job.
    pub(super) fn undo(&mut self, part: usize) {
        let ending = self.ending.as_ref();
        let manner = ending.map_or(Manner::Careful, |ending| ending.manner);
        let going_on = || "the job goes on without this node".to_owned();
        let reason = ending.map_or_else(going_on, |ending| ending.reason.clone());
        let job = self.id;
        let entry = &mut self.parts[part];
        entry.hold = Hold::Undoing;
        let (request, deadline) = if !entry.started {
            let request = NodeRequest::Release { job };
            (request, self.config.request_timeout)
        } else if manner == Manner::Kill {
            (NodeRequest::Kill { job }, self.config.stop_margin)
        } else {
            let request = NodeRequest::Stop {
                job,
                reason,
                interrupt: manner == Manner::Interrupt,
            };
            let grace = Duration::from_millis(self.spec.grace_ms);
            (request, grace * 2 + self.config.stop_margin)
        };
        self.request(part, request, deadline);
    }

    /// A node has answered the request to give back what is there.
    pub(super) fn undone(&mut self, part: usize, reply: Reply) {
        match reply {
            Reply::Answer(NodeReply::Done) => self.free(part),
            Reply::Refused(refusal) if refusal.kind == RefusalKind::NotFound => self.free(part),
            Reply::Answer(_) | Reply::Refused(_) | Reply::Unknown(_) => {
                self.parts.end(part, Hold::Abandoned);
                let node = self.parts[part].site.node;
                self.note(format!("{node} did not confirm the end: {reply:?}"));
                self.actions.push(Action::Abandon(node));
            }
        }
    }

    /// Nothing of the job is left on a node.
    pub(super) fn free(&mut self, part: usize) {
        self.parts.end(part, Hold::Free);
        self.actions.push(Action::Free(self.parts[part].site.node));
    }
}
