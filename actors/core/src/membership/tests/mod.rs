//! A small world around a membership: nodes with room, processes that do what they are told, and a clock.

mod budget;
mod changes;
mod faults;
mod formation;
mod hosts;
mod limits;
mod order;
mod planned;
mod policy;
mod restart;
mod roster;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_wire::ids::{self, NodeId, Rank, Slot};
use kolo_wire::{Exit, GroupFilter as Filter, Kept, OnChange};

use super::*;

/// Seconds.
const fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Milliseconds.
const fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

const fn process(slot: u32, incarnation: u64) -> Process {
    Process {
        slot: Slot(slot),
        incarnation: Incarnation(incarnation),
    }
}

fn location(node: u64) -> Location {
    Location {
        node: NodeId(node),
        host: host(node),
    }
}

fn host(node: u64) -> Host {
    Host::from(format!("h{node}").as_str())
}

fn failed(process: Process) -> Fact {
    exited(process, Exit::Code(1), "boom")
}

fn exited(process: Process, exit: Exit, said: &str) -> Fact {
    Fact::Exited {
        process,
        exit,
        generation: ids::Generation(1),
        said: said.to_owned(),
    }
}

/// A membership whose orders are carried out at once, as far as a test wants that.
#[derive(Clone)]
struct Bed {
    now: Instant,
    membership: Membership,
    /// Room on each node.
    room: BTreeMap<u64, u32>,
    /// Started processes become ready.
    boots: bool,
    /// The group is started anew at each change.
    starts_anew: bool,
    /// A seat is of use again when its process has ended.
    holds_seats: bool,
    /// Processes that take no generation, or do not end.
    hung: BTreeSet<Process>,
    /// Everything that was to be done, in order.
    done: Vec<Action>,
    /// What nobody has carried out yet.
    open: Vec<Action>,
    /// When membership wants to be woken.
    wake: Option<Instant>,
}

impl Bed {
    /// Nodes 1, 2, ... with room for so many processes.
    fn new(limits: Limits, room: &[u32]) -> Self {
        let now = Instant::now();
        let (starts_anew, holds_seats) = (limits.starts_anew(), limits.holds_seats());
        let (membership, open) = Membership::new(now, limits, 7).unwrap();
        let mut bed = Self {
            now,
            membership,
            room: (1..).zip(room.iter().copied()).collect(),
            boots: true,
            starts_anew,
            holds_seats,
            hung: BTreeSet::new(),
            done: Vec::new(),
            open: Vec::new(),
            wake: None,
        };
        bed.note(open);
        bed
    }

    /// As [`Bed::new`], and everything that can be done is done.
    fn up(limits: Limits, room: &[u32]) -> Self {
        let mut bed = Self::new(limits, room);
        bed.settle();
        bed
    }

    fn step(&mut self, fact: Fact) {
        self.steps([fact]);
    }

    /// Facts that come together.
    fn steps<const N: usize>(&mut self, facts: [Fact; N]) {
        let actions = self.membership.step(self.now, facts);
        self.note(actions);
    }

    fn note(&mut self, actions: Vec<Action>) {
        for action in &actions {
            if let Action::Wake(at) = action {
                self.wake = Some(*at);
            }
        }
        self.done.extend(actions.iter().cloned());
        self.open.extend(actions);
    }

    /// A fact, and everything that follows from it at once.
    fn then(&mut self, fact: Fact) {
        self.now += ms(1);
        self.step(fact);
        self.settle();
    }

    /// The last process of a seat.
    fn last(&self, slot: u32) -> Process {
        self.membership.roster().seats()[slot as usize].process()
    }

    /// A process fails, some time after its start.
    fn fail(&mut self, slot: u32) {
        if self.starts_anew {
            self.pass(s(10));
        }
        let fact = failed(self.last(slot));
        self.then(fact);
    }

    /// Time passes, in the steps in which membership wants to be woken.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(at) = self.wake.filter(|at| *at <= end) {
            self.wake = None;
            self.now = self.now.max(at);
            self.steps([]);
            self.settle();
        }
        self.now = end;
    }

    /// Members hold at a commit; 0 if none is known.
    fn hold(&mut self, commit: u64) {
        let generation = self.active().number();
        let commit = Some(commit).filter(|commit| *commit > 0);
        self.then(Fact::Holding { generation, commit });
    }

    fn commit(&mut self, commit: u64, durable: bool) {
        let generation = self.active().number();
        self.then(Fact::Committed {
            generation,
            commit,
            kept: if durable { Kept::Durable } else { Kept::Made },
        });
    }

    /// Carries out what is open, and what follows from it.
    fn settle(&mut self) {
        while !self.open.is_empty() {
            for action in std::mem::take(&mut self.open) {
                self.carry_out(action);
            }
        }
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::Reserve { slots, avoid, .. } => {
                for slot in slots {
                    let mut room = self.room.iter_mut();
                    let fits = |(node, room): &(&u64, &mut u32)| {
                        **room > 0 && !avoid.contains(&host(**node))
                    };
                    match room.find(fits) {
                        Some((node, room)) => {
                            *room -= 1;
                            let location = location(*node);
                            self.step(Fact::Reserved { slot, location });
                        }
                        None => self.step(Fact::Refused {
                            slot,
                            why: "full".to_owned(),
                        }),
                    }
                }
            }
            Action::Start { process, .. } if self.boots => self.ready(process),
            Action::Publish { to, .. } if self.starts_anew => {
                for process in to {
                    if self.boots && !self.hung.contains(&process) {
                        self.ready(process);
                    }
                }
            }
            Action::Stop { process, .. } if self.holds_seats => {
                let ends = !self.hung.contains(&process);
                if ends {
                    self.step(exited(process, Exit::Signal(15), ""));
                }
            }
            Action::Publish { generation, to } => {
                for process in to {
                    if !self.hung.contains(&process) {
                        self.takes(generation.number().0, process);
                    }
                }
            }
            _ => {}
        }
    }

    fn ready(&mut self, process: Process) {
        let addresses = [].into();
        self.step(Fact::Ready { process, addresses });
    }

    /// A process takes a generation.
    fn takes(&mut self, generation: u64, process: Process) {
        let generation = ids::Generation(generation);
        self.step(Fact::Acknowledged {
            generation,
            process,
        });
    }

    fn active(&self) -> Arc<Generation> {
        let told = self.membership.roster().seats();
        let active = self.membership.active();
        Arc::clone(
            active.unwrap_or_else(|| panic!("no generation is active: {told:?}\n{:?}", self.done)),
        )
    }

    /// (slot, incarnation, node, since) of the members, in rank order.
    fn table(&self) -> Vec<(u32, u64, u64, u64)> {
        table(&self.active())
    }

    fn slots(&self) -> Vec<u32> {
        self.table().iter().map(|member| member.0).collect()
    }

    fn number(&self) -> u64 {
        self.active().number().0
    }

    /// How the job has ended.
    fn end(&self) -> Option<(End, &str)> {
        self.done.iter().find_map(|action| match action {
            Action::End { how, why } => Some((*how, why.as_str())),
            _ => None,
        })
    }

    /// The actions since the last call, but for words and times.
    fn news(&mut self) -> Vec<Action> {
        let mut done = std::mem::take(&mut self.done);
        done.retain(|action| !matches!(action, Action::Tell(_) | Action::Wake(_)));
        done
    }
}

fn drain(node: u64) -> Fact {
    let why = "maintenance".to_owned();
    Fact::Drain {
        node: NodeId(node),
        why,
    }
}

fn undrain(node: u64) -> Fact {
    Fact::Undrain { node: NodeId(node) }
}

fn node_lost(node: u64, fenced: Instant) -> Fact {
    Fact::NodeLost {
        node: NodeId(node),
        why: "cable".to_owned(),
        fenced,
    }
}

/// Seats that these nodes hold, from slot 0 on, with a process on its way in each.
fn seated(nodes: &[u64]) -> Roster {
    let now = Instant::now();
    let mut roster = Roster::default();
    let slots = roster.reserve(now, nodes.len(), 1, &BTreeSet::new());
    for (slot, node) in slots.into_iter().zip(nodes) {
        let location = location(*node);
        roster
            .take(now, &Fact::Reserved { slot, location })
            .unwrap();
    }
    roster
}

fn table(generation: &Generation) -> Vec<(u32, u64, u64, u64)> {
    let members = generation.members().iter();
    members
        .map(|member| {
            let Process { slot, incarnation } = member.process;
            (
                slot.0,
                incarnation.0,
                member.location.node.0,
                member.since.0,
            )
        })
        .collect()
}
