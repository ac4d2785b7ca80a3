//! The life of one job's part on one node, as a state machine.
//!
//! `Reserved -> Running -> Stopping -> Closing -> Gone`. Requests of the head are methods that can be
//! refused; what workers do comes in through [`Colocator::worker`], time through [`Colocator::tick`].
//! Each gives the [`Output`]s to take, in order; events for the head are in [`Colocator::take_reports`].

mod stopping;
#[cfg(test)]
mod tests;
mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_wire::ids::{ClusterId, Generation, JobId, NodeId, Rank, Slot};
use kolo_wire::{
    GenerationTable, NodeEvent, RankFailure, Refusal, RefusalKind, StartWorkers, ToWorker,
};

pub use self::stopping::KILLED;
use super::environment;
use super::messages::{AskId, Loss, Opening, Output, Stay};
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
    /// The cluster's CA certificate in DER, for workers that get a certificate.
    pub authority: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    Reserved,
    Running,
    Stopping { step: StopStep, next: Instant },
    Closing { report: bool },
    Gone,
}

/// The process above the workers.
#[derive(Debug, Clone, PartialEq, Eq)]
enum WardenState {
    Starting,
    Up,
    /// Why it does not run.
    Failed(String),
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
    /// The first socket that it closed, and until when its process must have ended.
    hang_up: Option<(&'static str, Instant)>,
    /// Its process has ended, and its last output is being read.
    ended: bool,
}

impl Entry {
    /// Whether it can be told things.
    fn listens(&self) -> bool {
        matches!(self.state, SlotState::Greeted | SlotState::Ready)
    }

    /// Until when it has to do something: say hello, or end once it has hung up.
    fn deadline(&self, phase: &Phase) -> Option<Instant> {
        if self.ended || self.condemned.is_some() || self.state == SlotState::Exited {
            return None;
        }
        match self.state {
            SlotState::Booting { hello_by } => Some(hello_by),
            _ => None,
        }
        .into_iter()
        // A worker that is stopping may close its sockets before it ends.
        .chain(
            self.hang_up
                .filter(|_| *phase == Phase::Running)
                .map(|(_, by)| by),
        )
        .min()
    }
}

/// The state machine. See the module.
#[derive(Debug)]
pub struct Colocator {
    here: Arc<Here>,
    stay: Stay,
    job: JobId,
    phase: Phase,
    warden: WardenState,
    /// Its reservation was not committed in time.
    expired: bool,
    start: Option<Arc<StartWorkers>>,
    generation: Generation,
    slots: BTreeMap<Slot, Entry>,
    /// The slot of each rank of this node in the current generation.
    ranks: BTreeMap<Rank, Slot>,
    /// The request to start, until it is answered.
    asked: Option<AskId>,
    /// The digest that all workers must have, and who had it first.
    registry: Option<(Rank, u64)>,
    /// Ranks of the current generation that are gone, on any node.
    losses: BTreeMap<Rank, RankFailure>,
    stop_reason: Option<String>,
    /// The end began with INT.
    interrupted: bool,
    /// The number of the last signal that was sent.
    last_signal: u64,
    /// Events for the head.
    reports: Vec<NodeEvent>,
}

fn refuse<T>(kind: RefusalKind, message: String) -> Result<T, Refusal> {
    Err(Refusal::new(kind, message))
}

/// A time that the head gives in milliseconds, cut to [`MAX_WAIT`].
#[must_use]
pub fn millis(ms: u64) -> Duration {
    Duration::from_millis(ms).min(MAX_WAIT)
}

impl Colocator {
    /// A job that has a reservation here.
    #[must_use]
    pub fn new(here: Arc<Here>, stay: Stay) -> Self {
        Self {
            here,
            stay,
            job: stay.job,
            phase: Phase::Reserved,
            warden: WardenState::Starting,
            expired: false,
            start: None,
            generation: Generation(0),
            slots: BTreeMap::new(),
            ranks: BTreeMap::new(),
            asked: None,
            registry: None,
            losses: BTreeMap::new(),
            stop_reason: None,
            interrupted: false,
            last_signal: 0,
            reports: Vec::new(),
        }
    }

    /// The events for the head since the last call.
    pub fn take_reports(&mut self) -> Vec<NodeEvent> {
        std::mem::take(&mut self.reports)
    }

    /// Whether its lease has ended: the job may be here again, as another stay.
    #[must_use]
    pub fn is_expired(&self) -> bool {
        self.expired
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
        let workers = self
            .slots
            .values()
            .filter_map(|entry| entry.deadline(&self.phase))
            .min();
        let stop = match self.phase {
            Phase::Stopping { next, .. } => Some(next),
            _ => None,
        };
        [workers, stop].into_iter().flatten().min()
    }

    /// The head starts the workers, which use these GPUs. Answered when each has a process or has failed to get one.
    ///
    /// # Errors
    ///
    /// [`Refusal`] if the job is not in the state `Reserved` or the request contradicts itself.
    pub fn start(
        &mut self,
        ask: AskId,
        start: StartWorkers,
        devices: Vec<String>,
    ) -> Result<Vec<Output>, Refusal> {
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
                    hang_up: None,
                    ended: false,
                },
            );
        }
        let start = Arc::new(start);
        self.start = Some(start.clone());
        self.asked = Some(ask);
        self.phase = Phase::Running;
        let mut outputs = vec![Output::Open(Opening {
            stay: self.stay,
            ask,
            start,
            devices,
        })];
        match self.warden.clone() {
            WardenState::Starting => {}
            WardenState::Up => self.spawn_all(&mut outputs),
            WardenState::Failed(reason) => self.fail_all(&reason, &mut outputs),
        }
        Ok(outputs)
    }

    fn spawn_all(&self, outputs: &mut Vec<Output>) {
        let workers = self.slots.keys().map(|slot| self.stay.worker(*slot));
        outputs.extend(workers.map(Output::Spawn));
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
    pub fn membership(&mut self, table: GenerationTable) -> Result<Vec<Output>, Refusal> {
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
        let mut outputs = vec![Output::Complete(table.clone())];
        self.tell_all(&ToWorker::Membership(table), &mut outputs);
        Ok(outputs)
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
    ) -> Result<Vec<Output>, Refusal> {
        if generation != self.generation {
            return refuse(RefusalKind::Stale, self.stale(generation));
        }
        let mut outputs = Vec::new();
        self.lose(failure, &mut outputs);
        Ok(outputs)
    }

    fn stale(&self, given: Generation) -> String {
        format!(
            "generation {given} of {} is not the current one, {}",
            self.job, self.generation
        )
    }

    /// Tells callers and workers of a loss, once.
    fn lose(&mut self, failure: RankFailure, outputs: &mut Vec<Output>) {
        if self.losses.contains_key(&failure.rank) {
            return;
        }
        self.losses.insert(failure.rank, failure.clone());
        outputs.push(Output::Lost(Loss {
            job: self.job,
            generation: self.generation,
            failure: failure.clone(),
            stopping: self.phase != Phase::Running,
        }));
        let message = ToWorker::RankLost {
            generation: self.generation,
            failure,
        };
        self.tell_all(&message, outputs);
    }

    fn tell_all(&self, message: &ToWorker, outputs: &mut Vec<Output>) {
        for (slot, entry) in &self.slots {
            if entry.listens() {
                outputs.push(Output::Tell(self.stay.worker(*slot), message.clone()));
            }
        }
    }
}
