//! The life of one job's part on one node, as a state machine.
//!
//! `Reserved -> Running -> Stopping -> Closing -> Gone`. Requests of the head are methods that can be
//! refused; what workers do comes in through [`Colocator::worker`], time through [`Colocator::tick`].
//! Each gives the [`Output`]s to take, in order; events for the head are in [`Colocator::take_reports`].
//!
//! An elastic job is `Running` as long as the head wants it here, with any number of processes.

mod agent;
mod entry;
mod generations;
mod starting;
mod stopping;
#[cfg(test)]
mod tests;
mod workers;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_wire::ids::{ClusterId, Generation, JobId, NodeId, Slot};
use kolo_wire::{
    GenerationTable, HealthCheck, NodeEvent, RankFailure, Refusal, RefusalKind, StartWorkers,
    ToWorker,
};

use self::agent::NodeAgent;
use self::entry::Entry;
pub use self::entry::SlotState;
use self::entry::Slots;
use self::generations::Present;
use self::starting::Asked;
pub use self::stopping::KILLED;
use self::stopping::Stop;
use super::messages::{AskId, Output, Stay, WorkerId};

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
    /// Each process that is there has a [`Stop`].
    Stopping,
    Closing {
        report: bool,
    },
    Gone,
}

/// The state machine. See the module. It has more than fifteen fields: each is of the job as a whole. Facts of a process, of the group
/// that is present, and of an agent have types of their own.
#[derive(Debug)]
pub struct Colocator {
    here: Arc<Here>,
    stay: Stay,
    job: JobId,
    phase: Phase,
    /// The first start of the process above the workers is under way.
    waits_for_warden: bool,
    /// A health check that waits for the warden, and the reservation that waits for the check.
    check: Option<(AskId, HealthCheck)>,
    /// Its reservation was not committed in time.
    expired: bool,
    /// The newest request to start workers.
    start: Option<Arc<StartWorkers>>,
    /// The GPUs of a static job.
    devices: Vec<String>,
    present: Present,
    slots: Slots,
    /// Requests to start that are not answered.
    asked: Vec<Asked>,
    /// The digest that all workers must have, and the first that had it.
    registry: Option<(String, u64)>,
    /// The devices of each worker of an elastic job that has left its slot empty.
    freed: Vec<Vec<String>>,
    /// The node is leaving: the head has until then to take an elastic job away. And why.
    leaving: Option<(Instant, String)>,
    stop_reason: Option<String>,
    /// The end began with INT.
    interrupted: bool,
    /// The number of the last signal that was sent.
    last_signal: u64,
    /// Of a job that is started anew at each change.
    agent: Option<NodeAgent>,
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
            waits_for_warden: true,
            check: None,
            expired: false,
            start: None,
            devices: Vec::new(),
            present: Present::new(stay),
            slots: Slots::new(),
            asked: Vec::new(),
            registry: None,
            freed: Vec::new(),
            leaving: None,
            stop_reason: None,
            interrupted: false,
            last_signal: 0,
            agent: None,
            reports: Vec::new(),
        }
    }

    /// The events for the head since the last call.
    pub fn take_reports(&mut self) -> Vec<NodeEvent> {
        std::mem::take(&mut self.reports)
    }

    /// The slots of an elastic job that have become empty since the last call: the devices of each.
    pub fn take_freed(&mut self) -> Vec<Vec<String>> {
        std::mem::take(&mut self.freed)
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

    /// Whether no worker is here, nor about to be started.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let waits = self.phase == Phase::Reserved && !self.expired;
        !waits && !self.slots.values().any(Entry::is_present)
    }

    /// The state of the newest worker in a slot.
    #[must_use]
    pub fn slot(&self, slot: Slot) -> Option<SlotState> {
        self.slots.get(&slot).map(|entry| entry.state)
    }

    /// When to call [`Colocator::tick`] next, if nothing else happens.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let entries = self.slots.values();
        let workers =
            entries.flat_map(|entry| [entry.deadline(), entry.stop_deadline(&self.phase)]);
        let leaving = self.leaving.as_ref().map(|(by, _)| *by);
        workers.chain([leaving]).flatten().min()
    }

    /// The members of the job come and go.
    pub(super) fn is_elastic(&self) -> bool {
        self.start.as_ref().is_some_and(|start| start.is_elastic())
    }

    /// The newest process of a slot, if it is this one.
    fn entry_mut(&mut self, worker: WorkerId) -> Option<&mut Entry> {
        let entry = self.slots.get_mut(&worker.slot)?;
        (entry.worker == worker).then_some(entry)
    }

    fn over(&self) -> String {
        let reason = self.stop_reason.as_deref().unwrap_or("it was released");
        format!("{} is over on this node: {reason}", self.job)
    }

    /// A generation is complete.
    ///
    /// # Errors
    ///
    /// [`RefusalKind::Stale`] if it is older than the newest one or has a process that another one has followed, others if it
    /// does not fit this job.
    pub fn membership(
        &mut self,
        table: impl Into<Arc<GenerationTable>>,
    ) -> Result<Vec<Output>, Refusal> {
        let table = table.into();
        if self.phase != Phase::Running {
            return refuse(RefusalKind::Stopped, self.over());
        }
        if table.job != self.job {
            let message = format!("{} is not {}", table.job, self.job);
            return refuse(RefusalKind::Invalid, message);
        }
        let elastic = self.is_elastic();
        self.present
            .complete(table, self.here.node, &mut self.slots, elastic)
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
        let lost = self.present.lose_other(generation, failure)?;
        let mut outputs = Vec::new();
        self.tell_loss(lost, &mut outputs);
        Ok(outputs)
    }

    /// Passes something on to the members of a generation here. Nobody is left in one that is not the newest.
    pub fn tell_members(&self, generation: Generation, message: &ToWorker) -> Vec<Output> {
        self.present.tell_members(&self.slots, generation, message)
    }

    /// A generation is over.
    pub fn revoke(&self, generation: Generation, message: &ToWorker) -> Vec<Output> {
        self.present.revoke(&self.slots, generation, message)
    }

    /// Each loss goes to each worker. Where the job ends, all are told to stop and wait for nobody.
    fn tell_loss(&self, lost: Option<ToWorker>, outputs: &mut Vec<Output>) {
        if let Some(message) = lost.filter(|_| self.phase == Phase::Running) {
            self.tell_all(&message, outputs);
        }
    }

    fn tell_all(&self, message: &ToWorker, outputs: &mut Vec<Output>) {
        let listening = self.slots.values().filter(|entry| entry.listens());
        outputs.extend(listening.map(|entry| Output::Tell(entry.worker, message.clone())));
    }
}
