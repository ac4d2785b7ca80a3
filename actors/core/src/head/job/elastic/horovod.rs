//! A group of Horovod's elastic workers, which keep their process at a change.
//!
//! | Horovod's protocol | here |
//! |---|---|
//! | a new worker comes to the rendezvous for the first time | [`Fact::Ready`]; it waits there |
//! | a worker asks for its rank again | it holds, or takes the generation that is published; it waits there |
//! | the end of a survivor's connections to the others | [`crate::membership::Action::Revoke`] |
//! | a notice to rank 0 that hosts have changed | [`crate::membership::Action::Hold`] |
//! | the answers to all that wait | [`crate::membership::Action::Active`] |
//!
//! A survivor of Horovod 0.28.1 keeps its connections open until the next generation is complete, so another one that waits for it would
//! never ask. Nobody is let in before all nodes have ended the connections: a node that is late would end the next ones.
//!
//! Each process has a door of its own: see [`crate::rendezvous::Door`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_wire::ids::{Generation, NodeId};
use kolo_wire::{GenerationTable, Member};

use super::super::{Action, Base};
use super::facts::Facts;
use crate::env::{self, Env};
use crate::head::job::parts::{Part, Push};
use crate::head::job::seat::{Seat, process_of};
use crate::membership::{Fact, Process};
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
    pub(super) plan: Option<Arc<GenerationTable>>,
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

impl Doors {
    /// A process of the plan is started when its door is open.
    pub(super) fn open(&mut self, job: &mut Base, process: Process, node: NodeId) {
        let Some(table) = &self.plan else {
            return;
        };
        let is_it = |member: &&Member| process_of(member) == process;
        let Some(member) = table.members.iter().find(is_it).cloned() else {
            return job.note(format!("{process} is to be started, and is in no plan"));
        };
        let mut names = env::horovod_hostnames(&table.members);
        let hostname = names.remove(&node).unwrap_or_default();
        job.seats.insert(process.slot, Seat::new(member));
        let known = Known {
            hostname: hostname.clone(),
            address: None,
            asked: None,
            hears: false,
        };
        self.by_process.insert(process, known);
        job.actions.push(Action::OpenDoor(process, node, hostname));
    }

    /// The process is not started yet, and is in no queue.
    pub(super) fn waits(&self, process: Process) -> bool {
        let known = self.by_process.get(&process);
        known.is_some_and(|known| known.address.is_none())
    }

    /// Something has happened at a door. These are the members of the generation that is active.
    pub(super) fn hear(
        &mut self,
        job: &mut Base,
        facts: &mut Facts,
        members: &BTreeSet<Process>,
        (process, news): (Process, DoorNews),
    ) {
        let seat = job.last(process).filter(|seat| seat.is_wanted());
        let node = seat.map(|seat| seat.member.node);
        let (Some(node), Some(known)) = (node, self.by_process.get_mut(&process)) else {
            return;
        };
        match news {
            DoorNews::Opened(Ok(address)) => {
                known.address = Some(address);
                if let Some(part) = job.parts.find(node) {
                    job.parts.queue(part, process);
                }
            }
            DoorNews::Opened(Err(why)) => {
                let why = format!("its rendezvous could not be opened: {why}");
                facts.not_started(job, &[process], &why);
            }
            DoorNews::Arrived => facts.ready(process),
            DoorNews::Asked(generation) => {
                known.asked = Some(generation);
                self.asked(job, facts, members, (process, generation));
            }
            DoorNews::Hears => known.hears = true,
            DoorNews::Noticed(number, taken) if number == self.number => {
                self.is_under_way = false;
                match taken {
                    Ok(()) => self.taken_at = Some(job.now),
                    Err(why) => job.note(format!("{process} has not taken a notice: {why}")),
                }
            }
            DoorNews::Noticed(..) => {}
        }
    }

    /// A member has left its generation, and waits for the next.
    fn asked(
        &mut self,
        job: &Base,
        facts: &mut Facts,
        members: &BTreeSet<Process>,
        (process, generation): (Process, Generation),
    ) {
        let published = job.published.as_deref().map(|table| table.generation);
        if let Some(number) = published.filter(|number| *number > job.generation) {
            return self.acknowledge(job, facts, number, &[process]);
        }
        if generation != job.generation || !members.contains(&process) {
            return;
        }
        if self.held != Some(generation) {
            // The end of another one may be behind it, of which the head hears in a moment.
            let why = format!("{process} could not go on, and asks for its next rank");
            let culprit = None;
            facts.push(Fact::Broken {
                generation,
                culprit,
                why,
            });
        }
        let has_asked = |member: &Process| {
            let known = self.by_process.get(member);
            known.is_some_and(|known| known.asked == Some(generation))
        };
        if members.iter().all(has_asked) {
            let commit = None;
            facts.push(Fact::Holding { generation, commit });
        }
    }

    /// Those of these processes that have asked for their next rank take the generation.
    pub(super) fn acknowledge(
        &mut self,
        job: &Base,
        facts: &mut Facts,
        generation: Generation,
        to: &[Process],
    ) {
        let ends = |part: &Part| part.pushes.queue.iter().any(Push::is_revocation);
        if job.parts.iter().any(ends) {
            self.is_late = true;
            return;
        }
        for process in to.iter().copied() {
            let known = self.by_process.get(&process);
            if known.is_some_and(|known| known.asked.is_some()) {
                facts.push(Fact::Acknowledged {
                    generation,
                    process,
                });
            }
        }
    }

    /// Takes up what had to wait until connections were ended, if that is done.
    pub(super) fn acknowledge_late(&mut self, job: &Base, facts: &mut Facts) {
        let is_late = std::mem::take(&mut self.is_late);
        let table = job.published.as_deref().filter(|_| is_late);
        if let Some(table) = table.filter(|table| table.generation > job.generation) {
            let members: Vec<Process> = table.members.iter().map(process_of).collect();
            self.acknowledge(job, facts, table.generation, &members);
        }
    }

    /// Lets the members of a generation in, which have all come.
    pub(super) fn let_in(&mut self, job: &mut Base, table: &Arc<GenerationTable>) {
        job.fall.hand_over();
        self.held = None;
        self.taken_at = None;
        for member in &table.members {
            if let Some(known) = self.by_process.get_mut(&process_of(member)) {
                known.asked = None;
            }
        }
        job.actions.push(Action::Admit(Arc::clone(table)));
    }

    /// The members of the active generation are to hold at their next commit: rank 0 is told, and tells the others there.
    pub(super) fn give_notice(&mut self, job: &mut Base, active: &GenerationTable) {
        let Some(process) = active.members.first().map(process_of) else {
            return;
        };
        self.held = Some(active.generation);
        let known = self.by_process.get(&process);
        let hears = known.is_some_and(|known| known.hears);
        let is_new = self.taken_at.is_none_or(|at| job.now >= at + AGAIN);
        if !hears || self.is_under_way || !is_new {
            return;
        }
        self.is_under_way = true;
        self.number += 1;
        job.actions.push(Action::Notice(process, self.number));
    }

    /// Closes the doors of processes that are not there any more, or are to end.
    pub(super) fn close(&mut self, job: &mut Base) {
        let before = job.actions.len();
        self.by_process.retain(|process, _| {
            let stays = job.last(*process).is_some_and(|seat| seat.is_wanted());
            if !stays {
                job.actions.push(Action::CloseDoor(*process));
            }
            stays
        });
        if job.actions.len() > before {
            // A notice may have been under way there.
            self.is_under_way = false;
        }
    }

    /// What one process is told of its door.
    pub(super) fn env(&self, member: &Member) -> Env {
        let known = self.by_process.get(&process_of(member));
        let open = known.and_then(|known| Some((&known.hostname, known.address?)));
        open.map_or_else(Env::new, |(hostname, address)| env::door(hostname, address))
    }
}
