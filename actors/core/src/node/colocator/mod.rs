//! The life of one job's part on one node, as a state machine.
//!
//! `Reserved -> Running -> Stopping -> Closing -> Gone`. Requests of the head are methods that can be
//! refused; what workers do comes in through [`Colocator::worker`], time through [`Colocator::tick`].
//! Each gives the [`Action`]s to take, in order. Nothing here does I/O or reads a clock.

mod action;
mod stopping;
#[cfg(test)]
mod tests;
mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kolo_wire::ids::{ClusterId, Generation, JobId, NodeId, Rank, Slot};
use kolo_wire::{GenerationTable, RankFailure, Refusal, RefusalKind, StartWorkers, ToWorker};

pub use self::action::{Action, WorkerEvent};
pub use self::stopping::KILLED;
use super::environment;
use crate::pace::Ration;

/// The longest time to wait for a hello, and the longest grace; longer ones are cut to it.
pub const MAX_WAIT: Duration = Duration::from_secs(24 * 3600);

/// Which node this is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Here {
    /// The cluster.
    pub cluster: ClusterId,
    /// The node's id.
    pub node: NodeId,
    /// Its hostname.
    pub hostname: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    Reserved,
    Running,
    Stopping { step: StopStep, next: Instant },
    Closing { report: bool },
    Gone,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StopStep {
    Notice,
    Term,
    Kill,
}

/// The states of a worker, as the node sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotState {
    /// Its process is being started.
    Spawning,
    /// Its process runs and has not said hello.
    Booting {
        /// When it must have.
        hello_by: Instant,
    },
    /// Its process runs a program that says no hello.
    Running,
    /// It said hello and was welcomed.
    Greeted,
    /// It takes calls.
    Ready,
    /// Its process is gone, or never was.
    Exited,
}

/// Certificates that a worker may ask for at once ...
const MAX_SIGNATURES: u32 = 8;
/// ... and then one in so long. Renewals are hours apart, seconds in tests.
const SIGNATURE_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct Entry {
    rank: Rank,
    pid: u32,
    state: SlotState,
    /// For its certificate and the renewals of it.
    signatures: Ration,
    /// Why the node killed it.
    condemned: Option<String>,
}

impl Entry {
    /// Whether it can be told things.
    fn listens(&self) -> bool {
        matches!(self.state, SlotState::Greeted | SlotState::Ready)
    }
}

/// The state machine. See the module.
#[derive(Debug)]
pub struct Colocator {
    here: Here,
    job: JobId,
    phase: Phase,
    start: Option<StartWorkers>,
    generation: Generation,
    slots: BTreeMap<Slot, Entry>,
    /// The slot of each rank of this node in the current generation.
    ranks: BTreeMap<Rank, Slot>,
    /// Whether the request to start was answered.
    answered: bool,
    /// The digest that all workers must have, and who had it first.
    registry: Option<(Rank, u64)>,
    /// Ranks of the current generation that are gone, on any node.
    losses: BTreeMap<Rank, RankFailure>,
    stop_reason: Option<String>,
    /// The end began with INT.
    interrupted: bool,
    /// The number of the last signal that was sent.
    last_signal: u64,
}

fn refuse<T>(kind: RefusalKind, message: String) -> Result<T, Refusal> {
    Err(Refusal::new(kind, message))
}

fn millis(ms: u64) -> Duration {
    Duration::from_millis(ms).min(MAX_WAIT)
}

impl Colocator {
    /// A job that has a reservation here.
    #[must_use]
    pub fn new(here: Here, job: JobId) -> Self {
        Self {
            here,
            job,
            phase: Phase::Reserved,
            start: None,
            generation: Generation(0),
            slots: BTreeMap::new(),
            ranks: BTreeMap::new(),
            answered: false,
            registry: None,
            losses: BTreeMap::new(),
            stop_reason: None,
            interrupted: false,
            last_signal: 0,
        }
    }

    /// What was started; `None` before.
    #[must_use]
    pub fn started(&self) -> Option<&StartWorkers> {
        self.start.as_ref()
    }

    /// Whether nothing of the job is left.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.phase == Phase::Gone
    }

    /// The state of a worker.
    #[must_use]
    pub fn slot(&self, slot: Slot) -> Option<SlotState> {
        self.slots.get(&slot).map(|entry| entry.state)
    }

    /// When to call [`Colocator::tick`] next, if nothing else happens.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let hello = self
            .slots
            .values()
            .filter_map(|entry| match entry.state {
                SlotState::Booting { hello_by } if entry.condemned.is_none() => Some(hello_by),
                _ => None,
            })
            .min();
        let stop = match self.phase {
            Phase::Stopping { next, .. } => Some(next),
            _ => None,
        };
        [hello, stop].into_iter().flatten().min()
    }

    /// The head starts the workers.
    ///
    /// # Errors
    ///
    /// [`Refusal`] if the job is not in the state `Reserved` or the request contradicts itself.
    pub fn start(&mut self, start: StartWorkers) -> Result<Vec<Action>, Refusal> {
        match self.phase {
            Phase::Reserved => {}
            Phase::Running => {
                return refuse(
                    RefusalKind::Invalid,
                    format!("{} has been started on this node already", self.job),
                );
            }
            _ => return refuse(RefusalKind::Stopped, self.over()),
        }
        self.check(&start)?;
        self.generation = start.generation;
        for slot in &start.slots {
            let rank = slot.member.rank;
            self.ranks.insert(rank, slot.member.slot);
            self.slots.insert(
                slot.member.slot,
                Entry {
                    rank,
                    pid: 0,
                    state: SlotState::Spawning,
                    signatures: Ration::new(MAX_SIGNATURES, SIGNATURE_EVERY),
                    condemned: None,
                },
            );
        }
        self.start = Some(start);
        self.phase = Phase::Running;
        Ok(self.slots.keys().copied().map(Action::Spawn).collect())
    }

    fn check(&self, start: &StartWorkers) -> Result<(), Refusal> {
        let invalid = |message: String| refuse(RefusalKind::Invalid, message);
        if start.job != self.job {
            return invalid(format!("{} is not {}", start.job, self.job));
        }
        if start.slots.is_empty() {
            return invalid(format!("{} starts no worker here", self.job));
        }
        if start.generation == Generation(0) {
            return invalid("generation 0 can't be started; the first is 1".to_owned());
        }
        let mut slots = BTreeSet::new();
        let mut ranks = BTreeSet::new();
        for slot in &start.slots {
            let member = &slot.member;
            if member.node != self.here.node {
                return invalid(format!(
                    "slot {} is for {}, this is {}",
                    member.slot, member.node, self.here.node
                ));
            }
            if member.rank.0 >= start.world_size {
                return invalid(format!(
                    "rank {} is not below the world size {}",
                    member.rank, start.world_size
                ));
            }
            if !slots.insert(member.slot) || !ranks.insert(member.rank) {
                return invalid(format!(
                    "slot {} or rank {} is given twice",
                    member.slot, member.rank
                ));
            }
        }
        if let Some(arg) = start.args.iter().find(|arg| arg.contains('\0')) {
            return invalid(format!(
                "the argument `{}` contains a NUL byte",
                arg.escape_debug()
            ));
        }
        environment::check(start)
    }

    fn over(&self) -> String {
        let reason = self.stop_reason.as_deref().unwrap_or("it was released");
        format!("{} is over on this node: {reason}", self.job)
    }

    /// A generation is complete.
    ///
    /// # Errors
    ///
    /// [`RefusalKind::Stale`] if it is older than the current one, others if it does not fit this job.
    pub fn membership(&mut self, table: GenerationTable) -> Result<Vec<Action>, Refusal> {
        if self.phase != Phase::Running {
            return refuse(RefusalKind::Stopped, self.over());
        }
        if table.job != self.job {
            return refuse(
                RefusalKind::Invalid,
                format!("{} is not {}", table.job, self.job),
            );
        }
        if table.generation < self.generation {
            return refuse(RefusalKind::Stale, self.stale(table.generation));
        }
        let mut ranks = BTreeMap::new();
        for (index, member) in table.members.iter().enumerate() {
            if member.rank.index() != index {
                return refuse(
                    RefusalKind::Invalid,
                    format!("member {index} of the table has rank {}", member.rank),
                );
            }
            if member.node == self.here.node {
                if !self.slots.contains_key(&member.slot) {
                    return refuse(
                        RefusalKind::Invalid,
                        format!("slot {} was not started on this node", member.slot),
                    );
                }
                ranks.insert(member.rank, member.slot);
            }
        }
        if table.generation > self.generation {
            self.generation = table.generation;
            self.losses.clear();
        }
        for (rank, slot) in &ranks {
            if let Some(entry) = self.slots.get_mut(slot) {
                entry.rank = *rank;
            }
        }
        self.ranks = ranks;
        let mut actions = vec![Action::Complete(table.clone())];
        self.tell_all(&ToWorker::Membership(table), &mut actions);
        Ok(actions)
    }

    /// A rank is gone on some node.
    ///
    /// # Errors
    ///
    /// [`RefusalKind::Stale`] if it is of another generation.
    pub fn rank_lost(
        &mut self,
        generation: Generation,
        failure: RankFailure,
    ) -> Result<Vec<Action>, Refusal> {
        if generation != self.generation {
            return refuse(RefusalKind::Stale, self.stale(generation));
        }
        let mut actions = Vec::new();
        self.lose(failure, &mut actions);
        Ok(actions)
    }

    fn stale(&self, given: Generation) -> String {
        format!(
            "generation {given} of {} is not the current one, {}",
            self.job, self.generation
        )
    }

    /// Tells callers and workers of a loss, once.
    fn lose(&mut self, failure: RankFailure, actions: &mut Vec<Action>) {
        if self.losses.contains_key(&failure.rank) {
            return;
        }
        self.losses.insert(failure.rank, failure.clone());
        actions.push(Action::Lost {
            generation: self.generation,
            failure: failure.clone(),
            stopping: self.phase != Phase::Running,
        });
        let message = ToWorker::RankLost {
            generation: self.generation,
            failure,
        };
        self.tell_all(&message, actions);
    }

    fn tell_all(&self, message: &ToWorker, actions: &mut Vec<Action>) {
        for (slot, entry) in &self.slots {
            if entry.listens() {
                actions.push(Action::Tell(*slot, message.clone()));
            }
        }
    }
}
