//! A group that is started anew at each change: its processes are started with the ranks of their generation.
//!
//! Before that the group gets a port for torch's store, which no group before had, and a rendezvous of its own for Horovod.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use kolo_wire::ids::{Generation, NodeId};
use kolo_wire::{GenerationTable, NodeReply, NodeRequest, Refusal};

use super::super::{Action, Base, Rendezvous};
use super::facts::Facts;
use crate::head::job::parts::Hold;
use crate::head::job::seat::{Seat, process_of};

/// The generation that is published and whose processes are not started yet.
#[derive(Debug)]
struct Forming {
    generation: Generation,
    /// The node of rank 0, where a port for torch's store must be free.
    master: NodeId,
}

/// The group that is started next, or was last.
#[derive(Debug, Default)]
pub(super) struct Anew {
    forming: Option<Forming>,
    /// Its nodes, in the order of their ranks.
    nodes: BTreeMap<NodeId, u32>,
    /// The generation for which the rendezvous was opened last.
    met: Generation,
    /// The port of torch's store in the generation that was started last.
    pub(super) master_port: u16,
}

impl Anew {
    /// The number of a node in the group, where nodes count by their ranks.
    pub(super) fn number(&self, node: NodeId) -> Option<u32> {
        self.nodes.get(&node).copied()
    }

    /// The generation that was published is to be started, once it has what its processes need.
    pub(super) fn prepare(&mut self, job: &mut Base, table: &GenerationTable) {
        let Some(master) = table.members.first().map(|member| member.node) else {
            return;
        };
        let Some(part) = job.parts.find(master) else {
            return job.note(format!("the node of rank 0 is lost, {master}"));
        };
        let generation = table.generation;
        // A port that was found before the first group may be taken by now.
        if generation > Generation(1) || job.parts[part].free_port == 0 {
            job.parts[part].free_port = 0;
            let request = NodeRequest::FreePort { job: job.id };
            if job.parts[part].hold == Hold::Reserved {
                job.deliver(part, request);
            } else {
                job.push_once(part, request);
            }
        }
        self.nodes.clear();
        for member in &table.members {
            let next = self.nodes.len() as u32;
            self.nodes.entry(member.node).or_insert(next);
        }
        self.forming = Some(Forming { generation, master });
        self.open(job);
        self.start(job);
    }

    /// The group is over: what was to be started is not.
    pub(super) fn fell(&mut self) {
        self.forming = None;
    }

    /// A node has answered the question for a port.
    pub(super) fn port_answered(
        &mut self,
        job: &mut Base,
        facts: &mut Facts,
        part: usize,
        answer: Result<NodeReply, Refusal>,
    ) {
        let why = match answer {
            Ok(NodeReply::FreePort(port)) if port > 0 => {
                job.parts[part].free_port = port;
                return self.start(job);
            }
            Ok(_) => "it found none".to_owned(),
            Err(refusal) => refusal.message,
        };
        let node = job.parts[part].site.node;
        let forming = self.forming.as_ref();
        if forming.is_some_and(|forming| forming.master == node) {
            let at = job.parts[part].name();
            let why = format!("{at} gave no free port for MASTER_PORT: {why}");
            self.not_started(job, facts, &why);
        }
    }

    /// The generation that is on its way can't be started: one more attempt that has failed.
    fn not_started(&mut self, job: &mut Base, facts: &mut Facts, why: &str) {
        let forming = self.forming.take();
        let table = job.published.as_deref().filter(|_| forming.is_some());
        if let Some(first) = table.and_then(|table| table.members.first()) {
            let process = process_of(first);
            facts.not_started(job, &[process], why);
        }
    }

    /// A rendezvous was opened, or could not be. It may be that of a group that was given up.
    pub(super) fn rendezvous_opened(
        &mut self,
        job: &mut Base,
        facts: &mut Facts,
        opened: Result<SocketAddr, String>,
    ) {
        match opened {
            Ok(address) => {
                job.rendezvous = Rendezvous::Open(address);
                self.open(job);
                self.start(job);
            }
            Err(why) => {
                job.rendezvous = Rendezvous::Wanted;
                self.open(job);
                if job.rendezvous == Rendezvous::Wanted {
                    let why = format!("its rendezvous could not be opened: {why}");
                    self.not_started(job, facts, &why);
                }
            }
        }
    }

    /// Opens a rendezvous for the members of the generation that is to be started. Nobody of an older one finds it.
    fn open(&mut self, job: &mut Base) {
        let (Some(forming), Some(table)) = (&self.forming, &job.published) else {
            return;
        };
        let is_open = self.met == forming.generation;
        // While one opens, this is looked at again when it has.
        if is_open || matches!(job.rendezvous, Rendezvous::NotWanted | Rendezvous::Opening) {
            return;
        }
        self.met = forming.generation;
        let members = table.members.clone();
        job.rendezvous = Rendezvous::Opening;
        job.actions.push(Action::OpenRendezvous(members));
    }

    /// Starts the processes of the generation that was published, if everything for them is there.
    fn start(&mut self, job: &mut Base) {
        let Some(forming) = &self.forming else {
            return;
        };
        let meets = match job.rendezvous {
            Rendezvous::NotWanted => true,
            Rendezvous::Open(_) => forming.generation == self.met,
            Rendezvous::Wanted | Rendezvous::Opening => false,
        };
        let master = job.parts.find(forming.master).filter(|_| meets);
        let master = master.filter(|part| job.parts[*part].free_port > 0);
        let (Some(part), Some(table)) = (master, job.published.clone()) else {
            return;
        };
        self.forming = None;
        self.master_port = std::mem::take(&mut job.parts[part].free_port);
        job.fall.hand_over();
        for member in Arc::unwrap_or_clone(table).members {
            let process = process_of(&member);
            let Some(part) = job.parts.find(member.node) else {
                job.note(format!("{process} has no node to start on"));
                continue;
            };
            job.seats.insert(member.slot, Seat::new(member));
            job.parts.queue(part, process);
        }
    }
}
