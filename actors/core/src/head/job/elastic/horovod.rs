//! A group of Horovod's elastic workers, which keep their process at a change.
//!
//! | Horovod's protocol | here |
//! |---|---|
//! | a new worker comes to the rendezvous for the first time | [`Fact::Ready`]; it waits there |
//! | a worker asks for its rank again | it holds, or takes the generation that is published; it waits there |
//! | the end of a survivor's connections to the others | [`membership::Action::Revoke`] |
//! | a notice to rank 0 that hosts have changed | [`membership::Action::Hold`] |
//! | the answers to all that wait | [`membership::Action::Active`] |
//!
//! A survivor of Horovod 0.28.1 keeps its connections open until the next generation is complete, so another one that waits for it would
//! never ask. Nobody is let in before all nodes have ended the connections: a node that is late would end the next ones.
//!
//! Each process has a door of its own: see [`crate::rendezvous::Door`].

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_wire::ids::{Generation, NodeId};
use kolo_wire::{GenerationTable, Member, OnChange, RefusalKind, WorkerState};

use super::super::push::Push;
use super::super::{Action, Job, Part, Seat};
use super::process_of;
use crate::env::{self, Env, JobEnv};
use crate::membership::{self, Fact, Process};
use crate::rendezvous::DoorNews;

/// After a notice that was taken had no effect for so long, it is given again. A worker may have taken it when nobody listened.
const AGAIN: Duration = Duration::from_secs(10);

/// The door of a process, as the head knows it.
#[derive(Debug)]
struct Known {
    hostname: String,
    /// Nothing until it is open.
    address: Option<SocketAddr>,
    /// The process waits there for a later generation than this one.
    asked: Option<Generation>,
    hears: bool,
}

/// The doors of a job, and what is told through them.
#[derive(Debug, Default)]
pub(super) struct Doors {
    by_process: BTreeMap<Process, Known>,
    /// The group for which processes are started.
    plan: Option<Arc<GenerationTable>>,
    /// The generation whose members were asked to hold.
    held: Option<Generation>,
    /// The number of the last notice: a worker counts only those with a higher number than before.
    number: u64,
    is_under_way: bool,
    /// When the last one was taken, since the last generation.
    taken_at: Option<Instant>,
    /// The published generation is to be acknowledged when no node has connections to end any more.
    is_late: bool,
}

impl Job {
    /// Its processes speak Horovod's elastic protocol.
    pub(in crate::head::job) fn is_planned(&self) -> bool {
        let elastic = self.spec.elastic.as_ref();
        elastic.is_some_and(|elastic| elastic.on_change == OnChange::Horovod)
    }

    fn doors(&mut self) -> Option<&mut Doors> {
        self.elastic
            .as_deref_mut()
            .map(|elastic| &mut elastic.doors)
    }

    fn door(&mut self, process: Process) -> Option<&mut Known> {
        self.doors()?.by_process.get_mut(&process)
    }

    /// The group for which processes are started.
    pub(in crate::head::job) fn planned_table(&self) -> Option<&GenerationTable> {
        self.elastic.as_deref()?.doors.plan.as_deref()
    }

    /// New processes are to be started for this generation.
    pub(super) fn plan(&mut self, generation: &membership::Generation) {
        match self.table_of(generation) {
            Ok(table) => {
                if let Some(doors) = self.doors() {
                    doors.plan = Some(Arc::new(table));
                }
            }
            Err(error) => self.fail(RefusalKind::Internal, error),
        }
    }

    /// A process of the plan is started when its door is open.
    pub(super) fn open_door(&mut self, process: Process, node: NodeId) {
        let Some(table) = self.planned_table() else {
            return;
        };
        let is_it = |member: &&Member| process_of(member) == process;
        let Some(member) = table.members.iter().find(is_it).cloned() else {
            return self.note(format!("{process} is to be started, and is in no plan"));
        };
        let mut names = env::horovod_hostnames(&table.members);
        let hostname = names.remove(&node).unwrap_or_default();
        self.seats.insert(process.slot, Seat::new(member));
        let known = Known {
            hostname: hostname.clone(),
            address: None,
            asked: None,
            hears: false,
        };
        if let Some(doors) = self.doors() {
            doors.by_process.insert(process, known);
        }
        self.actions.push(Action::OpenDoor(process, node, hostname));
    }

    /// The process is not started yet, and is in no queue.
    pub(super) fn waits_for_door(&self, process: Process) -> bool {
        let elastic = self.elastic.as_deref();
        let known = elastic.and_then(|elastic| elastic.doors.by_process.get(&process));
        known.is_some_and(|known| known.address.is_none())
    }

    /// Something has happened at a door.
    pub(in crate::head::job) fn door_news(&mut self, process: Process, news: DoorNews) {
        let seat = self.seats.get(&process.slot);
        let is_there = seat.is_some_and(|seat| {
            let is_wanted = seat.exit.is_none() && seat.state != WorkerState::Stopping;
            seat.process() == process && is_wanted
        });
        let node = seat.map(|seat| seat.member.node);
        let (Some(node), true, true) = (node, is_there, self.door(process).is_some()) else {
            return;
        };
        match news {
            DoorNews::Opened(Ok(address)) => {
                if let Some(known) = self.door(process) {
                    known.address = Some(address);
                }
                if let Some(part) = self.part(node) {
                    self.parts[part].flow.queue.push(process);
                    self.pend(node);
                }
            }
            DoorNews::Opened(Err(why)) => {
                let why = format!("its rendezvous could not be opened: {why}");
                self.not_started(&[process], &why);
            }
            DoorNews::Arrived => {
                let addresses = [].into();
                self.fact(Fact::Ready { process, addresses });
            }
            DoorNews::Asked(generation) => self.asked(process, generation),
            DoorNews::Hears => {
                if let Some(known) = self.door(process) {
                    known.hears = true;
                }
            }
            DoorNews::Noticed(number, taken) => self.answered_notice(process, number, taken),
        }
    }

    /// A member has left its generation, and waits for the next.
    fn asked(&mut self, process: Process, generation: Generation) {
        if let Some(known) = self.door(process) {
            known.asked = Some(generation);
        }
        let published = self.published.as_deref().map(|table| table.generation);
        if let Some(number) = published.filter(|number| *number > self.generation) {
            return self.acknowledge(number, &[process]);
        }
        let Some(elastic) = self.elastic.as_deref() else {
            return;
        };
        if generation != self.generation || !elastic.is_member(process) {
            return;
        }
        let doors = &elastic.doors;
        let has_asked = |member: &Process| {
            let known = doors.by_process.get(member);
            known.is_some_and(|known| known.asked == Some(generation))
        };
        let all = elastic.members.iter().all(has_asked);
        if doors.held != Some(generation) {
            // The end of another one may be behind it, of which the head hears in a moment.
            let why = format!("{process} could not go on, and asks for its next rank");
            let culprit = None;
            self.fact(Fact::Broken {
                generation,
                culprit,
                why,
            });
        }
        if all {
            let commit = None;
            self.fact(Fact::Holding { generation, commit });
        }
    }

    /// Those of these processes that have asked for their next rank take the generation.
    pub(super) fn acknowledge(&mut self, generation: Generation, to: &[Process]) {
        let ends = |part: &Part| part.pushes.queue.iter().any(Push::is_revocation);
        if self.parts.iter().any(ends) {
            if let Some(doors) = self.doors() {
                doors.is_late = true;
            }
            return;
        }
        for process in to.iter().copied() {
            if self
                .door(process)
                .is_some_and(|known| known.asked.is_some())
            {
                self.fact(Fact::Acknowledged {
                    generation,
                    process,
                });
            }
        }
    }

    /// The generation that members are in when this one is over: Horovod's workers are let into one when it is active.
    pub(super) fn inside(&self, over: Generation) -> Generation {
        if self.is_planned() {
            self.generation
        } else {
            over
        }
    }

    /// Takes up what had to wait until connections were ended, if that is done.
    pub(super) fn acknowledge_late(&mut self) {
        let is_late = self.doors().map(|doors| std::mem::take(&mut doors.is_late));
        let table = self.published.clone().filter(|_| is_late == Some(true));
        if let Some(table) = table.filter(|table| table.generation > self.generation) {
            let members: Vec<Process> = table.members.iter().map(process_of).collect();
            self.acknowledge(table.generation, &members);
        }
    }

    /// Lets the members of a generation in, which have all come.
    pub(super) fn let_in(&mut self, table: &Arc<GenerationTable>) {
        if !self.is_planned() {
            return;
        }
        let fall = std::mem::take(&mut self.fall).told();
        if let Some(elastic) = &mut self.elastic {
            elastic.fell = fall.map(Box::new);
            elastic.doors.held = None;
            elastic.doors.taken_at = None;
            for member in &table.members {
                if let Some(known) = elastic.doors.by_process.get_mut(&process_of(member)) {
                    known.asked = None;
                }
            }
        }
        self.actions.push(Action::Admit(Arc::clone(table)));
    }

    /// Members are to hold at their next commit: rank 0 is told, and tells the others there.
    pub(super) fn give_notice(&mut self, generation: Generation) {
        let now = self.now;
        let table = self.elastic.as_deref().and_then(super::Elastic::active);
        let first = table.filter(|table| table.generation == generation);
        let first = first
            .and_then(|table| table.members.first())
            .map(process_of);
        let Some((process, doors)) = first.zip(self.doors()) else {
            return;
        };
        doors.held = Some(generation);
        let hears = doors
            .by_process
            .get(&process)
            .is_some_and(|known| known.hears);
        let is_new = doors.taken_at.is_none_or(|at| now >= at + AGAIN);
        if !hears || doors.is_under_way || !is_new {
            return;
        }
        doors.is_under_way = true;
        doors.number += 1;
        let number = doors.number;
        self.actions.push(Action::Notice(process, number));
    }

    fn answered_notice(&mut self, process: Process, number: u64, taken: Result<(), String>) {
        let now = self.now;
        let Some(doors) = self.doors().filter(|doors| doors.number == number) else {
            return;
        };
        doors.is_under_way = false;
        match taken {
            Ok(()) => doors.taken_at = Some(now),
            Err(why) => self.note(format!("{process} has not taken a notice: {why}")),
        }
    }

    /// Closes the doors of processes that are not there any more, or are to end.
    pub(super) fn close_doors(&mut self) {
        let seats = &self.seats;
        let Some(elastic) = &mut self.elastic else {
            return;
        };
        let mut closed = Vec::new();
        elastic.doors.by_process.retain(|process, _| {
            let seat = seats.get(&process.slot);
            let stays = seat.is_some_and(|seat| {
                let is_wanted = seat.exit.is_none() && seat.state != WorkerState::Stopping;
                seat.process() == *process && is_wanted
            });
            if !stays {
                closed.push(*process);
            }
            stays
        });
        if closed.is_empty() {
            return;
        }
        // A notice may have been under way there.
        elastic.doors.is_under_way = false;
        self.actions
            .extend(closed.into_iter().map(Action::CloseDoor));
    }

    /// What the new processes of a plan have in common.
    pub(in crate::head::job) fn planned_env(&self, common: JobEnv) -> JobEnv {
        let Some(table) = self.planned_table() else {
            return common;
        };
        let nodes: std::collections::BTreeSet<NodeId> =
            table.members.iter().map(|member| member.node).collect();
        JobEnv {
            generation: table.generation,
            world_size: table.world_size(),
            nodes: nodes.len() as u32,
            hostnames: env::horovod_hostnames(&table.members),
            ..common
        }
    }

    /// What one process is told of its door.
    pub(in crate::head::job) fn door_env(&self, member: &Member) -> Env {
        let elastic = self.elastic.as_deref();
        let known = elastic.and_then(|elastic| elastic.doors.by_process.get(&process_of(member)));
        let Some((known, address)) = known.and_then(|known| Some((known, known.address?))) else {
            return Env::new();
        };
        env::door(&known.hostname, address)
    }
}
