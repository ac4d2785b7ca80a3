//! What is under way between an elastic job and one of its nodes.

use kolo_wire::ids::Slot;
use kolo_wire::{NodeReply, NodeRequest, Refusal};

use super::super::{Job, Push};
use super::process_of;
use crate::membership::Process;

/// What is under way between the job and a node.
#[derive(Debug, Default)]
pub(in crate::head::job) struct Flow {
    /// Seats that are given to the node, and about which membership has not heard yet.
    pub(super) asking: Vec<Slot>,
    /// Processes that are to be started.
    pub(super) queue: Vec<Process>,
    /// Processes in the request to start that is under way.
    pub(in crate::head::job) starting: Vec<Process>,
    /// The how-manieth word of the driver says that the node has the program.
    pub(super) program: u64,
    /// A request is under way whose answer is still to come, though the node was lost.
    pub(in crate::head::job) is_owed: bool,
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

impl Job {
    /// A node has taken or refused what was delivered to it.
    pub(in crate::head::job) fn push_answered(
        &mut self,
        part: usize,
        push: Push,
        answer: Result<NodeReply, Refusal>,
    ) {
        let at = self.place_name(part);
        let request = match push {
            Push::Order(request) => *request,
            Push::Membership(generation) => {
                match answer {
                    Ok(_) => self.parts[part].has_membership = true,
                    // It is repeated, and its members are late in the end.
                    Err(refusal) if self.is_elastic() => self.note(format!(
                        "{at} did not take generation {generation}: {refusal}"
                    )),
                    Err(Refusal { kind, message }) => {
                        self.fail(kind, format!("{at} did not take the membership: {message}"));
                    }
                }
                return;
            }
        };
        match (request, answer) {
            (NodeRequest::Start(start), Ok(NodeReply::Started { pids })) => {
                let node = self.parts[part].site.node;
                for process in start.slots.iter().map(|slot| process_of(&slot.member)) {
                    let seat = self.seats.get(&process.slot);
                    let is_last = seat.is_some_and(|seat| seat.process() == process);
                    let started = pids.iter().find(|(slot, _)| *slot == process.slot);
                    if let Some((slot, pid)) = started.filter(|_| is_last) {
                        self.worker_started(node, *slot, *pid);
                    }
                }
            }
            (NodeRequest::Start(start), Err(refusal)) => {
                let members = start.slots.iter().map(|slot| &slot.member);
                let processes: Vec<Process> = members.map(process_of).collect();
                self.not_started(&processes, &format!("{at} did not start it: {refusal}"));
            }
            (NodeRequest::FreePort { .. }, answer) => self.port_answered(part, answer),
            (request, answer) => {
                if let Err(refusal) = answer {
                    self.note(format!("{at} refused an order: {refusal}"));
                }
                if let NodeRequest::Signal { .. } = request {
                    self.signalled(part);
                }
            }
        }
    }
}
