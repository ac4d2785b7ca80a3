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

/// Limits that are [`Limits::elastic`] but for a change.
fn with(min: u32, max: u32, change: impl FnOnce(&mut Limits)) -> Limits {
    let mut limits = Limits::elastic(min, max);
    change(&mut limits);
    limits
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

fn reserved(slot: u32, node: u64) -> Fact {
    let (slot, location) = (Slot(slot), location(node));
    Fact::Reserved { slot, location }
}

fn refused(slot: Slot) -> Fact {
    let why = "full".to_owned();
    Fact::Refused { slot, why }
}

fn ready(process: Process) -> Fact {
    let addresses = [].into();
    Fact::Ready { process, addresses }
}

fn failed(process: Process) -> Fact {
    exited(process, Exit::Code(1), "boom")
}

fn returned(process: Process) -> Fact {
    exited(process, Exit::Code(0), "")
}

fn exited(process: Process, exit: Exit, said: &str) -> Fact {
    Fact::Exited {
        process,
        exit,
        generation: ids::Generation(1),
        said: said.to_owned(),
    }
}

fn drain(node: u64) -> Fact {
    let (node, why) = (NodeId(node), "maintenance".to_owned());
    Fact::Drain { node, why }
}

fn undrain(node: u64) -> Fact {
    Fact::Undrain { node: NodeId(node) }
}

fn node_lost(node: u64, fenced: Instant) -> Fact {
    let (node, why) = (NodeId(node), "cable".to_owned());
    Fact::NodeLost { node, why, fenced }
}

fn stop(process: Process, why: &str) -> Action {
    let why = why.to_owned();
    Action::Stop { process, why }
}

fn start(process: Process, node: u64) -> Action {
    let location = location(node);
    Action::Start { process, location }
}

fn give_back(slots: &[u32]) -> Action {
    let slots = slots.iter().copied().map(Slot).collect();
    Action::GiveBack { slots }
}

fn is_hold(action: &Action) -> bool {
    matches!(action, Action::Hold { .. })
}

/// A membership whose orders are carried out at once, as far as a test wants that.
#[derive(Clone)]
struct Bed {
    now: Instant,
    limits: Limits,
    membership: Membership,
    /// Room on each node.
    room: BTreeMap<u64, u32>,
    /// Started processes become ready.
    boots: bool,
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
        let (membership, open) = Membership::new(now, limits.clone(), 7).unwrap();
        let mut bed = Self {
            now,
            limits,
            membership,
            room: (1..).zip(room.iter().copied()).collect(),
            boots: true,
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

    /// As [`Bed::up`], but no process that is started becomes ready by itself.
    fn slow(limits: Limits, room: &[u32]) -> Self {
        let mut bed = Self::new(limits, room);
        bed.boots = false;
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
        self.all([fact]);
    }

    /// As [`Bed::then`], of facts that come together.
    fn all<const N: usize>(&mut self, facts: [Fact; N]) {
        self.now += ms(1);
        self.steps(facts);
        self.settle();
    }

    /// The last process of a seat.
    fn last(&self, slot: u32) -> Process {
        self.membership.roster().seats()[slot as usize].process()
    }

    /// A process fails, some time after its start.
    fn fail(&mut self, slot: u32) {
        if self.limits.starts_anew() {
            self.pass(s(10));
        }
        let fact = failed(self.last(slot));
        self.then(fact);
    }

    /// A node has room.
    fn offer(&mut self, node: u64, room: u32) {
        self.room.insert(node, room);
        self.then(Fact::Offered);
    }

    /// A process says that it is ready.
    fn boot(&mut self, slot: u32) {
        self.step(ready(self.last(slot)));
        self.settle();
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

    fn commit(&mut self, commit: u64) {
        let generation = self.number();
        self.commits(generation, commit, Kept::Made);
    }

    fn commits(&mut self, generation: u64, commit: u64, kept: Kept) {
        let generation = ids::Generation(generation);
        self.then(Fact::Committed {
            generation,
            commit,
            kept,
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
                    let fact = match room.find(fits) {
                        Some((node, room)) => {
                            *room -= 1;
                            reserved(slot.0, *node)
                        }
                        None => refused(slot),
                    };
                    self.step(fact);
                }
            }
            Action::Start { process, .. } if self.boots => self.step(ready(process)),
            Action::Stop { process, .. }
                if self.limits.holds_seats() && !self.hung.contains(&process) =>
            {
                self.step(exited(process, Exit::Signal(15), ""));
            }
            Action::Publish { generation, to } => {
                for process in to {
                    match self.limits.starts_anew() {
                        _ if self.hung.contains(&process) => {}
                        true if self.boots => self.step(ready(process)),
                        true => {}
                        false => self.takes(generation.number().0, process),
                    }
                }
            }
            _ => {}
        }
    }

    /// A process takes a generation.
    fn takes(&mut self, generation: u64, process: Process) {
        let generation = ids::Generation(generation);
        self.step(Fact::Acknowledged {
            generation,
            process,
        });
    }

    fn is_idle(&self) -> bool {
        self.membership.active().is_none()
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

    /// (slot, incarnation) of the members, in rank order.
    fn members(&self) -> Vec<(u32, u64)> {
        members(&self.active())
    }

    fn slots(&self) -> Vec<u32> {
        self.table().iter().map(|member| member.0).collect()
    }

    fn number(&self) -> u64 {
        self.active().number().0
    }

    /// Restarts that are used up.
    fn restarts(&self) -> u32 {
        self.membership.budget().without_progress()
    }

    /// How the job has ended.
    fn end(&self) -> Option<(End, &str)> {
        self.done.iter().find_map(|action| match action {
            Action::End { how, why } => Some((*how, why.as_str())),
            _ => None,
        })
    }

    fn how(&self) -> Option<End> {
        self.end().map(|(how, _)| how)
    }

    fn count(&self, is_it: impl Fn(&Action) -> bool) -> usize {
        self.done.iter().filter(|action| is_it(action)).count()
    }

    /// (slot, incarnation) of the processes that were to end.
    fn stopped(&self) -> Vec<(u32, u64)> {
        let stops = self.done.iter().filter_map(|action| match action {
            Action::Stop { process, .. } => Some((process.slot.0, process.incarnation.0)),
            _ => None,
        });
        stops.collect()
    }

    /// The actions since the last call, but for words and times.
    fn news(&mut self) -> Vec<Action> {
        let mut done = std::mem::take(&mut self.done);
        done.retain(|action| !matches!(action, Action::Tell(_) | Action::Wake(_)));
        done
    }
}

/// Seats that these nodes hold, from slot 0 on, with a process on its way in each.
fn seated(nodes: &[u64]) -> Roster {
    let now = Instant::now();
    let mut roster = Roster::default();
    roster.reserve(now, nodes.len(), 1, &BTreeSet::new());
    for (slot, node) in (0..).zip(nodes) {
        roster.take(now, &reserved(slot, *node)).unwrap();
    }
    roster
}

/// The first generation, of all seats whose process is ready.
fn first(seats: &[&Seat]) -> Generation {
    let number = ids::Generation(1);
    let seats = seats.iter().copied();
    Generation::new(number, String::new(), seats, None, ids::Generation(0))
}

fn table(generation: &Generation) -> Vec<(u32, u64, u64, u64)> {
    let members = generation.members().iter();
    let row = |member: &Member| {
        let Process { slot, incarnation } = member.process;
        let node = member.location.node.0;
        (slot.0, incarnation.0, node, member.since.0)
    };
    members.map(row).collect()
}

fn members(generation: &Generation) -> Vec<(u32, u64)> {
    let table = table(generation);
    table.iter().map(|member| (member.0, member.1)).collect()
}
