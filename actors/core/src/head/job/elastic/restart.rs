//! A group that is started anew at each change: its processes are started with the ranks of their generation.
//!
//! Before that the group gets a port for torch's store, which no group before had, and a rendezvous of its own for Horovod.

use std::sync::Arc;
use std::time::Duration;

use kolo_wire::ids::{Generation, NodeId, Slot};
use kolo_wire::{JobEvent, NodeReply, NodeRequest, OnChange, Refusal, RefusalKind};

use super::super::{Action, Hold, Job, Push, Rendezvous, Seat};
use super::process_of;
use crate::env::{self, JobEnv};
use crate::head::milliseconds;
use crate::membership::Fact;

/// The generation that is published and whose processes are not started yet.
#[derive(Debug)]
pub(super) struct Forming {
    generation: Generation,
    /// The node of rank 0, where a port for torch's store must be free.
    master: NodeId,
}

impl Job {
    /// All processes are stopped at a change, and the next ones started.
    pub(in crate::head::job) fn starts_anew(&self) -> bool {
        self.on_change() == OnChange::Restart
    }

    /// What happens to processes at a change.
    pub(in crate::head::job) fn on_change(&self) -> OnChange {
        let elastic = self.spec.elastic.as_ref();
        elastic.map(|elastic| elastic.on_change).unwrap_or_default()
    }

    /// The generation that was published is to be started, once it has what its processes need.
    pub(super) fn prepare_group(&mut self) {
        let Some(table) = self.published.clone() else {
            return;
        };
        let Some(master) = table.members.first().map(|member| member.node) else {
            return;
        };
        let Some(part) = self.part(master) else {
            return self.note(format!("the node of rank 0 is lost, {master}"));
        };
        let generation = table.generation;
        // A port that was found before the first group may be taken by now.
        if generation > Generation(1) || self.parts[part].free_port == 0 {
            self.parts[part].free_port = 0;
            self.ask_for_port(part);
        }
        if let Some(elastic) = &mut self.elastic {
            elastic.nodes.clear();
            for member in &table.members {
                let next = elastic.nodes.len() as u32;
                elastic.nodes.entry(member.node).or_insert(next);
            }
            elastic.forming = Some(Forming { generation, master });
        }
        self.open_for_group();
        self.start_group();
    }

    /// All processes got a signal that asks them to prepare for their end: they have the grace time for that.
    pub(in crate::head::job) fn noticed(&mut self) {
        if self.starts_anew() {
            let until = self.now + Duration::from_millis(self.spec.grace_ms);
            self.fact(Fact::Noticed { until });
        }
    }

    /// A node is to find a port that no group before had.
    fn ask_for_port(&mut self, part: usize) {
        let push = Push::order(NodeRequest::FreePort { job: self.id });
        if self.parts[part].hold == Hold::Reserved {
            self.deliver(part, push);
        } else {
            self.push_once(part, push);
        }
    }

    /// A node has answered the question for a port.
    pub(super) fn port_answered(&mut self, part: usize, answer: Result<NodeReply, Refusal>) {
        let why = match answer {
            Ok(NodeReply::FreePort(port)) if port > 0 => {
                self.parts[part].free_port = port;
                return self.start_group();
            }
            Ok(_) => "it found none".to_owned(),
            Err(refusal) => refusal.message,
        };
        let node = self.parts[part].site.node;
        let forming = self.elastic.as_deref();
        let forming = forming.and_then(|elastic| elastic.forming.as_ref());
        if forming.is_some_and(|forming| forming.master == node) {
            let at = self.place_name(part);
            self.group_not_started(&format!("{at} gave no free port for MASTER_PORT: {why}"));
        }
    }

    /// The generation that is on its way can't be started: one more attempt that has failed.
    fn group_not_started(&mut self, why: &str) {
        let forming = self.elastic.as_mut();
        let forming = forming.and_then(|elastic| elastic.forming.take());
        let table = self.published.as_deref().filter(|_| forming.is_some());
        if let Some(first) = table.and_then(|table| table.members.first()) {
            self.not_started(&[process_of(first)], why);
        }
    }

    /// The rendezvous of a group could not be opened.
    pub(in crate::head::job) fn group_meets_nowhere(&mut self, why: &str) {
        self.rendezvous = Rendezvous::Wanted;
        // It may be that of a group that was given up.
        self.open_for_group();
        if self.rendezvous == Rendezvous::Wanted {
            self.group_not_started(&format!("its rendezvous could not be opened: {why}"));
        }
    }

    /// Opens a rendezvous for the members of the generation that is to be started. Nobody of an older one finds it.
    pub(in crate::head::job) fn open_for_group(&mut self) {
        let Some(elastic) = self.elastic.as_deref_mut() else {
            return;
        };
        let (Some(forming), Some(table)) = (&elastic.forming, &self.published) else {
            return;
        };
        let is_open = elastic.met == forming.generation;
        // While one opens, this is looked at again when it has.
        if is_open || matches!(self.rendezvous, Rendezvous::NotWanted | Rendezvous::Opening) {
            return;
        }
        elastic.met = forming.generation;
        let members = table.members.clone();
        self.rendezvous = Rendezvous::Opening;
        self.actions.push(Action::OpenRendezvous(members));
    }

    /// Starts the processes of the generation that was published, if everything for them is there.
    pub(in crate::head::job) fn start_group(&mut self) {
        let Some(elastic) = self.elastic.as_deref() else {
            return;
        };
        let meets = match self.rendezvous {
            Rendezvous::NotWanted => true,
            Rendezvous::Open(_) => elastic
                .forming
                .as_ref()
                .is_some_and(|forming| forming.generation == elastic.met),
            Rendezvous::Wanted | Rendezvous::Opening => false,
        };
        let master = elastic.forming.as_ref().map(|forming| forming.master);
        let Some(part) = master.and_then(|node| self.part(node)).filter(|_| meets) else {
            return;
        };
        if self.parts[part].free_port == 0 {
            return;
        }
        let port = std::mem::take(&mut self.parts[part].free_port);
        let Some(elastic) = self.elastic.as_deref_mut() else {
            return;
        };
        elastic.forming = None;
        elastic.master_port = port;
        if let Some(fall) = std::mem::take(&mut self.fall).told() {
            elastic.fell = Some(Box::new(fall));
        }
        let Some(table) = self.published.clone() else {
            return;
        };
        for member in Arc::unwrap_or_clone(table).members {
            let process = process_of(&member);
            let node = member.node;
            let Some(part) = self.part(node) else {
                self.note(format!("{process} has no node to start on"));
                continue;
            };
            self.seats.insert(member.slot, Seat::new(member));
            self.parts[part].flow.queue.push(process);
            self.pend(node);
        }
    }

    /// The group is over: what was to be started is not, and the driver hears why.
    pub(super) fn group_fell(&mut self, why: String, is_failure: bool, stopped: u32) {
        let failure = self.fall.cause().cloned().filter(|_| is_failure);
        let Some(elastic) = &mut self.elastic else {
            return;
        };
        elastic.forming = None;
        let most = self.spec.elastic.as_ref();
        let most = most.map_or(0, |elastic| elastic.restarts_without_progress);
        let restart = elastic.membership.budget().without_progress() + 1;
        let failure = failure.map(|mut failure| {
            failure.stderr_tail.clear();
            Box::new(failure)
        });
        self.actions.push(Action::Tell(JobEvent::Fell {
            why,
            failure,
            stopped,
            restart: is_failure.then_some((restart, most)),
        }));
    }

    /// Tells the driver that a group waits for room, whenever the number of workers is another one for which there is some.
    pub(super) fn tell_shortage(&mut self) {
        let now = self.now;
        let Some(elastic) = self.elastic.as_mut().filter(|_| self.ending.is_none()) else {
            return;
        };
        let Some(until) = elastic.membership.next_group_by() else {
            elastic.short_of = None;
            return;
        };
        let Some(room) = elastic.membership.shortage() else {
            return;
        };
        if elastic.short_of.replace(room) != Some(room) {
            let needed = self.spec.elastic.as_ref().map_or(0, |elastic| elastic.min);
            self.actions.push(Action::Tell(JobEvent::Waits {
                room,
                needed,
                for_ms: milliseconds(until.saturating_duration_since(now)),
            }));
        }
    }

    /// Whether the job waits for more room than it has.
    #[must_use]
    pub fn is_short(&self) -> bool {
        let elastic = self.elastic.as_deref().filter(|_| self.ending.is_none());
        let waits = elastic.is_some_and(|elastic| elastic.membership.next_group_by().is_some());
        let held: u32 = self.held().map(|(_, workers)| workers).sum();
        let needed = self.spec.elastic.as_ref().map_or(0, |elastic| elastic.min);
        waits && held < needed
    }

    /// The installed program can't run on a node. Before the first group that is an error of the job, as in one that never changes;
    /// later the job goes on without the node. A node that is not healthy is no error at any time.
    pub(super) fn is_error_of_job(&self, problem: &Refusal) -> bool {
        let is_of_program = self.is_installed() && problem.kind != RefusalKind::Unplaceable;
        is_of_program && self.generation == Generation(0) && self.ending.is_none()
    }

    /// A process runs: there is nothing else to wait for.
    pub(in crate::head::job) fn process_runs(&mut self, slot: Slot) {
        let Some(seat) = self.seats.get(&slot).filter(|seat| seat.exit.is_none()) else {
            return;
        };
        let process = seat.process();
        let addresses = [].into();
        self.fact(Fact::Ready { process, addresses });
    }

    /// The environment that all processes of the published generation have in common.
    pub(in crate::head::job) fn group_env(&self, common: JobEnv) -> JobEnv {
        let elastic = self.elastic.as_deref().filter(|_| self.starts_anew());
        let (Some(elastic), Some(table)) = (elastic, self.published.as_deref()) else {
            return common;
        };
        let limits = self.spec.elastic.as_deref();
        let first = table.members.first();
        let master = first.and_then(|member| self.part(member.node));
        JobEnv {
            generation: table.generation,
            world_size: table.world_size(),
            nodes: elastic.nodes.len() as u32,
            master: master.map_or(common.master, |part| self.ip_of(part)),
            master_port: elastic.master_port,
            restarts: elastic.membership.budget().without_progress(),
            max_restarts: limits.map_or(0, |limits| limits.restarts_without_progress),
            hostnames: env::horovod_hostnames(&table.members),
            ..common
        }
    }

    /// The number of the generation that was published last.
    pub(in crate::head::job) fn group_number(&self) -> Generation {
        let table = self.published.as_deref();
        table.map_or(Generation(0), |table| table.generation)
    }

    /// The number of a node in the group, where nodes count by their ranks; or its number in the job.
    pub(in crate::head::job) fn group_rank(&self, node: NodeId, part: usize) -> u32 {
        let elastic = self.elastic.as_deref();
        let rank = elastic.and_then(|elastic| elastic.nodes.get(&node).copied());
        rank.unwrap_or(part as u32)
    }
}
