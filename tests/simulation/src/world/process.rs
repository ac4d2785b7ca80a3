//! Worker processes: they boot, work in operations of all members, and end.

use std::net::SocketAddr;

use kolo_core::node::messages::{Input, Spawning, WorkerEvent, WorkerId};
use kolo_wire::ids::{Generation, JobId, Rank};
use kolo_wire::{Exit, FromWorker, Kept, ToWorker};

use crate::group::{Group, Meeting};
use crate::knobs::{AGAIN, MS, SECOND, Time};
use crate::mutation::Mutation;
use crate::queue::Event;
use crate::worker::{Act, Ending, Name, Offer, Worker, names};
use crate::world::World;

/// How long the word of an authority is awaited after a link has ended.
const SUSPICION: (Time, Time) = (600 * MS, SECOND);

/// A process, also one that has ended.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) node: usize,
    /// The life of the daemon that has started it.
    life: u64,
    worker: WorkerId,
    pub(crate) model: Worker,
    pub(crate) alive: bool,
    /// It does not end when it is asked to.
    pub(crate) stubborn: bool,
    /// It was told to end.
    pub(crate) is_ending: bool,
    told: Time,
    said: Time,
    /// The table before the last one that it was given.
    pub(crate) tables: Vec<kolo_wire::GenerationTable>,
}

impl Process {
    pub(crate) fn new(node: usize, life: u64, worker: WorkerId, model: Worker) -> Self {
        Self {
            node,
            life,
            worker,
            model,
            alive: true,
            stubborn: false,
            is_ending: false,
            told: 0,
            said: 0,
            tables: Vec::new(),
        }
    }
}

impl World {
    /// A node starts a process.
    pub(crate) fn spawn(&mut self, node: usize, spawning: &Spawning) {
        let worker = spawning.worker;
        let name = Name {
            job: worker.stay.job,
            slot: worker.slot,
            incarnation: worker.incarnation,
        };
        let life = self.nodes[node].life;
        let spawned = self.moment();
        if self.has_mishap() {
            let event = WorkerEvent::SpawnFailed {
                exit: Exit::Code(1),
                reason: "no more processes".to_owned(),
            };
            let input = Box::new(Input::Worker { worker, event });
            return self.later(spawned, Event::Shell(node, life, input));
        }
        self.pids += 1;
        let pid = self.pids;
        self.trace.note(self.now, || {
            let Name {
                slot, incarnation, ..
            } = name;
            format!(
                "host-{}: process {pid} is slot {slot}, incarnation {incarnation} of {}",
                node + 1,
                name.job
            )
        });
        let started = self.oracle.seats.started(name, pid);
        self.hold("seat", started);
        let address = SocketAddr::from(([10, 1, 0, 1], (pid % 60_000) as u16 + 1));
        let steps = self.steps_of(name.job);
        let takes_stale = self.options.mutation == Some(Mutation::StaleTable);
        let mut model = Worker::new(name, address, steps, takes_stale);
        let is_program = spawning.start.installed.is_some();
        if is_program {
            self.program_starts(pid, &mut model, spawning);
        }
        let stubborn = self.random.percent(self.knobs.mishap);
        let mut process = Process::new(node, life, worker, model);
        process.stubborn = stubborn;
        self.processes.insert(pid, process);
        self.names.insert(name, pid);
        if let Some(daemon) = self.daemon(node) {
            daemon.processes.insert(worker, pid);
        }
        let event = WorkerEvent::Spawned { pid };
        let input = Box::new(Input::Worker { worker, event });
        self.later(spawned, Event::Shell(node, life, input));
        let mut boot = spawned + self.random.between(5, 300) * MS;
        // So long that the members of a generation without it know of its predecessor's end by a revocation alone.
        if self.now >= AGAIN {
            boot += 2 * SECOND;
        }
        if self.has_mishap() {
            // It ends before it says hello, or never says it. Of an installed program nobody would see that.
            if is_program || self.random.percent(70) {
                self.later(boot, Event::Exit(pid, Exit::Code(3)));
            }
        } else if is_program {
            self.later(boot, Event::Begins(pid));
        } else {
            self.later(boot, Event::Said(pid, Box::new(Worker::hello(pid))));
        }
    }

    /// A node says something to a process, in order.
    pub(crate) fn tell(&mut self, pid: u32, message: ToWorker) {
        let delay = self.random.below(2 * MS);
        let message = self.mutated_tell(pid, message);
        let now = self.now;
        let Some(process) = self.processes.get_mut(&pid) else {
            return;
        };
        process.told = process.told.max(now + delay);
        let at = process.told;
        let is_table = matches!(message, ToWorker::Membership(_));
        self.queue.push(at, Event::Tell(pid, Box::new(message)));
        if is_table && let Some(again) = self.stale_table(pid) {
            self.queue.push(at, Event::Tell(pid, Box::new(again)));
        }
    }

    /// A process hears its node.
    pub(crate) fn process_hears(&mut self, pid: u32, message: &ToWorker) {
        let Some(process) = self.processes.get_mut(&pid) else {
            return;
        };
        if let ToWorker::Stop { .. } = message {
            process.is_ending = true;
            if !process.stubborn {
                let after = self.random.below(200 * MS);
                self.later(after, Event::Exit(pid, Exit::Code(0)));
            }
            return;
        }
        let acts = process.model.hear(message);
        self.act(pid, acts);
    }

    /// A node hears a process.
    pub(crate) fn process_said(&mut self, pid: u32, message: FromWorker) {
        let Some(process) = self.processes.get(&pid) else {
            return;
        };
        if matches!(message, FromWorker::Hello { .. }) && !process.alive {
            return;
        }
        let (node, life, worker) = (process.node, process.life, process.worker);
        let event = WorkerEvent::Said(message);
        if self.is_alive(node, life) {
            self.node_step(node, Input::Worker { worker, event });
        }
    }

    pub(crate) fn worked(&mut self, pid: u32, generation: Generation, operation: u64) {
        if let Some(process) = self.processes.get_mut(&pid) {
            let acts = process.model.worked(generation, operation);
            self.act(pid, acts);
        }
    }

    pub(crate) fn operation_ends(
        &mut self,
        pid: u32,
        generation: Generation,
        operation: u64,
        ending: Ending,
    ) {
        let Some(process) = self.processes.get(&pid) else {
            return;
        };
        let job = process.model.name.job;
        let is_broken =
            (self.groups.get(&(job, generation))).is_some_and(|group| !group.left.is_empty());
        // A rank that has gone may have kept the result from some of the others.
        let ending = if is_broken && self.random.percent(50) {
            Ending::Failed {
                culprit: None,
                reason: "a link has ended",
            }
        } else {
            ending
        };
        if let Some(process) = self.processes.get_mut(&pid) {
            let acts = process.model.ended(generation, operation, &ending);
            self.act(pid, acts);
        }
    }

    pub(crate) fn process_waited(&mut self, pid: u32, generation: Generation) {
        if let Some(process) = self.processes.get_mut(&pid) {
            let acts = process.model.waited(generation);
            self.act(pid, acts);
        }
    }

    /// A process ends, and its node is told.
    pub(crate) fn process_ends(&mut self, pid: u32, exit: Exit) {
        let Some(process) = self.processes.get_mut(&pid) else {
            return;
        };
        if !std::mem::replace(&mut process.alive, false) {
            return;
        }
        let (name, place) = (process.model.name, process.model.place());
        let is_failure = !process.is_ending && !exit.is_success();
        let is_through = process.model.is_through();
        self.trace
            .note(self.now, || format!("process {pid} ends: {exit}"));
        if let Some((generation, _)) = place.filter(|_| is_failure) {
            self.oracle.restarts.failed(name.job, generation);
        }
        if let Some((generation, rank)) = place.filter(|_| !is_through) {
            self.links_end(name.job, generation, rank);
        }
        self.warden_tells(pid, exit);
    }

    /// The warden of a process says how it has ended.
    pub(crate) fn warden_tells(&mut self, pid: u32, exit: Exit) {
        let Some(process) = self.processes.get(&pid) else {
            return;
        };
        let (node, life, worker) = (process.node, process.life, process.worker);
        if !self.is_alive(node, life) {
            return;
        }
        let mut after = self.moment();
        for event in [
            WorkerEvent::Ended,
            WorkerEvent::Exited {
                exit,
                stderr_tail: vec!["the last line".to_owned()],
            },
        ] {
            let input = Box::new(Input::Worker { worker, event });
            self.later(after, Event::Shell(node, life, input));
            after += self.random.below(5 * MS) + 1;
        }
    }

    /// A rank is in a generation no more: who waits for it there hears that in the end.
    fn links_end(&mut self, job: JobId, generation: Generation, rank: Rank) {
        let Some(group) = self.groups.get_mut(&(job, generation)) else {
            return;
        };
        if !group.left.insert(rank) {
            return;
        }
        for operation in group.open() {
            self.suspect(job, generation, operation, rank);
        }
    }

    /// All that wait in an operation find their link to a rank ended.
    fn suspect(&mut self, job: JobId, generation: Generation, operation: u64, rank: Rank) {
        let Some(group) = self.groups.get(&(job, generation)) else {
            return;
        };
        let waiting = group.waiting(operation).map(|(waiting, _)| waiting);
        let ending = Ending::Failed {
            culprit: Some(rank),
            reason: "a link has ended",
        };
        self.end_operation(job, generation, operation, waiting, &ending, SUSPICION);
    }

    fn end_operation(
        &mut self,
        job: JobId,
        generation: Generation,
        operation: u64,
        ranks: Option<Vec<Rank>>,
        ending: &Ending,
        (least, most): (Time, Time),
    ) {
        let Some(group) = self.groups.get(&(job, generation)) else {
            return;
        };
        let ranks = ranks.unwrap_or_default();
        let members = ranks.iter().filter_map(|rank| {
            let name = group.members[rank.index()].as_ref()?;
            self.names.get(name).copied()
        });
        for pid in members.collect::<Vec<u32>>() {
            let mut after = self.random.between(least, most);
            if self.has_mishap() {
                after += self.random.below(2 * SECOND);
            }
            let event = Event::Operation(pid, generation, operation, ending.clone());
            self.later(after, event);
        }
    }

    /// Nobody waits any longer.
    pub(crate) fn patience_ends(&mut self, job: JobId, generation: Generation, operation: u64) {
        let Some(group) = self.groups.get(&(job, generation)) else {
            return;
        };
        if let Some((waiting, culprit)) = group.waiting(operation) {
            let ending = Ending::Failed {
                culprit,
                reason: "the time limit is over",
            };
            self.end_operation(job, generation, operation, Some(waiting), &ending, (0, MS));
        }
    }

    pub(crate) fn act(&mut self, pid: u32, acts: Vec<Act>) {
        let Some(process) = self.processes.get(&pid) else {
            return;
        };
        let (name, node) = (process.model.name, process.node);
        let rank = process.model.place().map(|(_, rank)| rank);
        for act in acts {
            match act {
                Act::Say(message) => self.say(pid, message),
                Act::Enter(table) => self.enters(pid, name, &table),
                Act::Leave(generation) | Act::Fails(generation) => {
                    let group = self.groups.get(&(name.job, generation));
                    let rank = group.and_then(|group| {
                        let mut members = (0..).zip(&group.members);
                        members.find(|(_, member)| **member == Some(name))
                    });
                    if let Some((rank, _)) = rank {
                        self.links_end(name.job, generation, Rank(rank));
                    }
                }
                Act::Join(generation, operation, offer) => {
                    if let Some(rank) = rank {
                        self.joins(name.job, generation, operation, rank, offer);
                    }
                }
                Act::Work(generation, operation) => {
                    self.check_fence(name.job, node);
                    let mut after = self.knobs.step + self.random.below(20 * MS);
                    if self.has_mishap() {
                        after += self.random.below(5 * SECOND);
                    }
                    self.later(after, Event::Worked(pid, generation, operation));
                }
                Act::Wait(generation, limit) => {
                    self.later(limit * MS, Event::Waited(pid, generation));
                }
                Act::Epoch(progress) => self.check_epoch(progress),
                Act::Has(saved) => {
                    self.checkpoint(pid, saved);
                    let members = self.groups.get(&(name.job, Generation(saved.generation)));
                    let members = members.map_or(0, |group| group.members.len());
                    if self.oracle.commits.has(name, saved, members) {
                        self.counts.commits += 1;
                        self.oracle.progress.commit(name.job, self.now);
                    }
                }
                Act::Exit(exit) => {
                    let after = self.random.below(20 * MS);
                    self.later(after, Event::Exit(pid, exit));
                }
            }
        }
    }

    fn say(&mut self, pid: u32, message: FromWorker) {
        let delay = self.random.below(2 * MS);
        let now = self.now;
        let Some(process) = self.processes.get_mut(&pid) else {
            return;
        };
        process.said = process.said.max(now + delay);
        let at = process.said;
        self.queue.push(at, Event::Said(pid, Box::new(message)));
    }

    /// A process is in a generation from now on.
    fn enters(&mut self, pid: u32, name: Name, table: &kolo_wire::GenerationTable) {
        let (job, generation) = (table.job, table.generation);
        self.check_ranks(table);
        let entered = self.oracle.fences.entered(name, generation);
        self.hold("G-1", entered);
        let members = || names(table).into_iter().map(Some);
        let group = self.groups.entry((job, generation));
        let group = group.or_insert_with(|| Group::new(members()));
        if !group.members.iter().copied().eq(members()) {
            let text = format!("{job} has two different generations {generation}");
            self.violation("G-3", text);
        }
        if self.options.mutation == Some(Mutation::CommitEarly) {
            // Later than all before.
            let commit = generation.0 * 1000;
            self.say(
                pid,
                FromWorker::Committed {
                    generation,
                    commit,
                    kept: Kept::Made,
                },
            );
        }
    }

    /// All members of a generation reach each other.
    fn is_connected(&self, group: &Group) -> bool {
        let nodes = || {
            let pids = group.names().filter_map(|name| self.names.get(name));
            pids.filter_map(|pid| Some(self.processes.get(pid)?.node))
        };
        let first = nodes().next();
        let is_one_host = nodes().all(|node| Some(node) == first);
        is_one_host || !nodes().any(|node| self.nodes[node].isolated)
    }

    /// All that have the state die before new members get it.
    fn kill_holders(&mut self, job: JobId, generation: Generation) {
        let Some(group) = self.groups.get(&(job, generation)) else {
            return;
        };
        let pids = group.names().filter_map(|name| self.names.get(name));
        let holders: Vec<u32> = pids
            .filter(|pid| {
                let process = self.processes.get(*pid);
                process.is_some_and(|process| process.model.saved().number > 0)
            })
            .copied()
            .collect();
        for pid in holders {
            self.later(MS / 20, Event::Exit(pid, Exit::Signal(9)));
        }
    }

    fn joins(
        &mut self,
        job: JobId,
        generation: Generation,
        operation: u64,
        rank: Rank,
        offer: Offer,
    ) {
        let key = (job, generation);
        let is_commit = matches!(offer, Offer::Commit { .. });
        let connected = (self.groups.get(&key)).is_some_and(|group| self.is_connected(group));
        let Some(group) = self.groups.get_mut(&key) else {
            return;
        };
        match group.join(rank, operation, offer, connected) {
            Meeting::Waits { first } => {
                if let Some(gone) = group.left.first().copied() {
                    self.suspect(job, generation, operation, gone);
                } else if first {
                    let patience = Event::Patience(job, generation, operation);
                    self.later(self.knobs.patience, patience);
                }
            }
            Meeting::Mismatch(text) => self.violation("agreement", format!("{job}: {text}")),
            Meeting::Complete(ending) => {
                if let Ending::Met { live, differ, .. } = &ending {
                    let is_fatal = *differ && generation.0 > 1 && self.has_ill_luck();
                    let commits = &self.oracle.commits;
                    let living =
                        |name: &Name| self.process_of(name).filter(|it| commits.counts(it));
                    let checked = commits.met(job, *live, living);
                    self.hold("E-1", checked);
                    if is_fatal {
                        self.kill_holders(job, generation);
                    }
                }
                if is_commit {
                    let checked = self.oracle.generations.committed(job, generation);
                    self.hold("G-3", checked);
                }
                let all = (self.groups.get(&key)).map(|group| group.members.len() as u32);
                let all = all.map(|all| (0..all).map(Rank).collect());
                let soon = (MS / 10, 5 * MS);
                self.end_operation(job, generation, operation, all, &ending, soon);
            }
        }
    }
}
