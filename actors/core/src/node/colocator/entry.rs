//! One worker process, as the node sees it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use kolo_wire::ids::{Generation, Incarnation, Rank, Slot};
use kolo_wire::{Account, SlotStart, StartWorkers};

use super::{KILLED, Phase, Stop};
use crate::node::messages::WorkerId;
use crate::pace::Ration;

/// Certificates that a worker may ask for at once ...
const MAX_SIGNATURES: u32 = 8;
/// ... and then one in so long. Renewals are hours apart, seconds in tests.
const SIGNATURE_EVERY: std::time::Duration = std::time::Duration::from_secs(1);

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

/// A process that is started when the older one of its slot has ended.
#[derive(Debug)]
pub(super) struct Successor {
    pub(super) incarnation: Incarnation,
    pub(super) start: Arc<StartWorkers>,
}

/// The newest process of each slot.
pub(super) type Slots = BTreeMap<Slot, Entry>;

/// The newest process of a slot that was started, and its successor if one waits. It has more than fifteen fields: each is a fact of the
/// same process that comes at a time of its own.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) worker: WorkerId,
    /// The request that has its slot.
    pub(super) start: Arc<StartWorkers>,
    /// Its rank. A process in no generation has the number from its start, or the rank that it had last.
    pub(super) rank: Rank,
    /// The last generation that it has said to be in, or was started for.
    pub(super) taken: Generation,
    /// The GPUs of the slot in an elastic job.
    pub(super) devices: Vec<String>,
    pub(super) pid: u32,
    pub(super) state: SlotState,
    /// For its certificate and the renewals of it.
    pub(super) signatures: Ration,
    /// Why the node killed it.
    pub(super) condemned: Option<String>,
    /// Until when the end of a killed process must be seen.
    pub(super) gone_by: Option<Instant>,
    /// It is to end.
    pub(super) stop: Option<Stop>,
    /// The first socket that it closed, and until when its process must have ended.
    pub(super) hang_up: Option<(&'static str, Instant)>,
    /// When its process ended, and the process's own word on that.
    pub(super) account: Option<Box<Account>>,
    /// Its process has ended, and its last output is being read.
    pub(super) ended: bool,
    pub(super) next: Option<Successor>,
    /// The last process of the slot that the head asked for, whether it was ever started or not. None is asked for twice.
    pub(super) last: Incarnation,
}

impl Entry {
    /// A process that is about to be started; `None` if the request does not have its slot.
    pub(super) fn new(
        worker: WorkerId,
        start: Arc<StartWorkers>,
        devices: Vec<String>,
    ) -> Option<Self> {
        let rank = slot_of(&start, worker.slot)?.member.rank;
        // 0, unless the process is started for a generation.
        let taken = if start.is_elastic() {
            start.generation
        } else {
            Generation(0)
        };
        Some(Self {
            worker,
            start,
            rank,
            taken,
            devices,
            pid: 0,
            state: SlotState::Spawning,
            signatures: Ration::new(MAX_SIGNATURES, SIGNATURE_EVERY),
            condemned: None,
            gone_by: None,
            stop: None,
            hang_up: None,
            account: None,
            ended: false,
            next: None,
            last: worker.incarnation,
        })
    }

    /// What the head said of it.
    pub(super) fn seat(&self) -> Option<&SlotStart> {
        slot_of(&self.start, self.worker.slot)
    }

    /// Its process is there, or is about to be.
    pub(super) fn is_present(&self) -> bool {
        self.state != SlotState::Exited
    }

    /// Whether it can be told things.
    pub(super) fn listens(&self) -> bool {
        matches!(self.state, SlotState::Greeted | SlotState::Ready)
    }

    /// The node kills it, for the first reason that there is.
    pub(super) fn condemn(&mut self, now: Instant, reason: String) {
        if self.condemned.is_none() {
            self.condemned = Some(reason);
            self.gone_by = Some(now + KILLED);
        }
    }

    /// Until when it has to do something: say hello, or end once it has hung up or was killed.
    pub(super) fn deadline(&self) -> Option<Instant> {
        if self.ended || !self.is_present() {
            return None;
        }
        if self.condemned.is_some() {
            // A process that is being started gets its KILL later.
            return self.gone_by.filter(|_| self.state != SlotState::Spawning);
        }
        let hello_by = match self.state {
            SlotState::Booting { hello_by } => Some(hello_by),
            _ => None,
        };
        // A worker that is stopping may close its sockets before it ends.
        let hang_up = self.hang_up.filter(|_| self.stop.is_none());
        hello_by.into_iter().chain(hang_up.map(|(_, by)| by)).min()
    }

    /// When the next step of its stop is due. A process that is being started has no signals; while the job runs, it is waited
    /// for.
    pub(super) fn stop_deadline(&self, phase: &Phase) -> Option<Instant> {
        let is_due = self.is_present()
            && (self.state != SlotState::Spawning || matches!(phase, Phase::Stopping));
        let stop = self.stop.as_ref().filter(|_| is_due);
        stop.map(|stop| stop.next)
    }
}

fn slot_of(start: &StartWorkers, slot: Slot) -> Option<&SlotStart> {
    start.slots.iter().find(|other| other.member.slot == slot)
}
