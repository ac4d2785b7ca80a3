//! Where mutations act: between the cores and their shells.

use std::sync::Arc;

use kolo_core::head::job::Reply;
use kolo_core::head::messages::RequestId;
use kolo_wire::ids::Incarnation;
use kolo_wire::{HeadRequest, NodeEvent, NodeRegistration, NodeReply, NodeRequest, ToWorker};

use crate::link::{Mail, Side};
use crate::mutation::Mutation;
use crate::world::World;

impl World {
    /// The bug is in, and strikes now: half of the time, or always where the protocol makes up for a lost message.
    pub(crate) fn mutates(&mut self, mutation: Mutation) -> bool {
        let repeated = matches!(
            mutation,
            Mutation::SwallowTaken
                | Mutation::ForgetHold
                | Mutation::KeepWorker
                | Mutation::DropRevoke
        );
        self.options.mutation == Some(mutation) && (repeated || self.random.percent(50))
    }

    /// What a node tells the head, as it comes there.
    pub(crate) fn mutated_report(&mut self, mut request: Box<HeadRequest>) -> Box<HeadRequest> {
        if self.options.mutation.is_none() {
            return request;
        }
        if let HeadRequest::Events(events) = request.as_mut() {
            let mut kept = Vec::new();
            for event in std::mem::take(events) {
                let lost = match event {
                    NodeEvent::WorkerExited { .. } => Mutation::LoseExit,
                    NodeEvent::WorkerReady { .. } => Mutation::LoseReady,
                    // A commit says as much.
                    NodeEvent::Taken { .. } | NodeEvent::Committed { .. } => Mutation::SwallowTaken,
                    _ => {
                        kept.push(event);
                        continue;
                    }
                };
                if !self.mutates(lost) {
                    kept.push(event);
                }
            }
            *events = kept;
        }
        request
    }

    pub(crate) fn mutated_registration(
        &mut self,
        mut registration: NodeRegistration,
    ) -> NodeRegistration {
        if self.options.mutation == Some(Mutation::StaleRegistration) {
            registration.jobs.clear();
        }
        registration
    }

    /// A node that has acknowledged an order without doing it.
    pub(crate) fn mutated_order(
        &mut self,
        session: u64,
        id: RequestId,
        request: &NodeRequest,
    ) -> bool {
        let mutation = match request {
            NodeRequest::RankLost { .. } => Mutation::LoseRankLost,
            NodeRequest::Stop { .. } | NodeRequest::Release { .. } => Mutation::ForgetStop,
            NodeRequest::Membership(_) => Mutation::LoseMembership,
            NodeRequest::Revoke { .. } => Mutation::DropRevoke,
            NodeRequest::Hold { .. } => Mutation::ForgetHold,
            NodeRequest::StopWorker { .. } => Mutation::KeepWorker,
            _ => return false,
        };
        let swallowed = self.mutates(mutation);
        if swallowed {
            let reply = Box::new(Reply::Answer(NodeReply::Done));
            self.send(session, Side::Head, Mail::Reply(id, reply));
        }
        swallowed
    }

    pub(crate) fn mutated_request(&mut self, mut request: NodeRequest) -> NodeRequest {
        if let NodeRequest::Start(start) = &mut request
            && start.slots.len() > 1
            && self.mutates(Mutation::HalfStart)
        {
            start.slots.pop();
        }
        request
    }

    /// What a worker is told.
    pub(crate) fn mutated_tell(&mut self, pid: u32, message: ToWorker) -> ToWorker {
        let ToWorker::Membership(table) = message else {
            return message;
        };
        let mut table = Arc::unwrap_or_clone(table);
        if table.members.len() > 1 && self.mutates(Mutation::SwapRanks) {
            let first = table.members[0].local_rank;
            table.members[0].local_rank = table.members[1].local_rank;
            table.members[1].local_rank = first;
            // These are of different hosts.
            let second = table.members[0].cross_rank;
            table.members[0].cross_rank = table.members[1].cross_rank;
            table.members[1].cross_rank = second;
        }
        if self.mutates(Mutation::WrongMember)
            && let Some(last) = table.members.last_mut()
        {
            last.incarnation = Incarnation(last.incarnation.0 + 1);
        }
        if let Some(process) = self.processes.get_mut(&pid) {
            process.tables.push(table.clone());
        }
        ToWorker::Membership(table.into())
    }

    /// A table that a worker is told once more, after a later one.
    pub(crate) fn stale_table(&mut self, pid: u32) -> Option<ToWorker> {
        if !self.mutates(Mutation::StaleTable) {
            return None;
        }
        let tables = &self.processes.get(&pid)?.tables;
        let before = tables.len().checked_sub(2)?;
        Some(ToWorker::Membership(tables[before].clone().into()))
    }

    /// A node that does not look for jobs that it is to end by itself.
    pub(crate) fn mutates_fence(&self, node: usize) -> bool {
        self.options.mutation == Some(Mutation::SkipFence) && self.nodes[node].alone_since.is_some()
    }
}
