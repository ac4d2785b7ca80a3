//! The start of workers: which are new, which wait for an older one, and when a request is answered.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use kolo_wire::ids::{Generation, Incarnation, Slot};
use kolo_wire::{
    Exit, HealthCheck, Member, NodeEvent, NodeReply, RankFailure, Refusal, RefusalKind,
    StartWorkers,
};

use super::agent::NodeAgent;
use super::entry::{Entry, Successor};
use super::{Colocator, Phase, SlotState, refuse};
use crate::node::environment;
use crate::node::messages::{AskId, Opening, Output, Spawning};

/// A request to start workers that is not answered.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) ask: AskId,
    workers: Vec<(Slot, Incarnation)>,
}

impl Colocator {
    /// A health check is to be run, below the warden once that is there.
    pub fn check_health(&mut self, ask: AskId, check: HealthCheck) -> Vec<Output> {
        if self.waits_for_warden {
            self.check = Some((ask, check));
            return Vec::new();
        }
        let stay = self.stay;
        vec![Output::Check { ask, stay, check }]
    }

    /// The slots of a request that have no process, and are to get one.
    ///
    /// # Errors
    ///
    /// [`Refusal`] if the job is over, or is static and runs, or the request contradicts itself.
    pub fn admit(&self, start: &StartWorkers) -> Result<Vec<Slot>, Refusal> {
        match (&self.phase, &self.leaving) {
            (Phase::Running, Some((_, reason))) => {
                return refuse(
                    RefusalKind::Stopped,
                    format!("this node is leaving and starts no worker: {reason}"),
                );
            }
            (Phase::Reserved, _) => {}
            (Phase::Running, _) if self.is_elastic() && start.is_elastic() => {}
            (Phase::Running, _) => {
                return refuse(
                    RefusalKind::Invalid,
                    format!("{} has been started on this node already", self.job),
                );
            }
            _ => return refuse(RefusalKind::Stopped, self.over()),
        }
        self.check(start)?;
        let members = start.slots.iter().map(|slot| &slot.member);
        let is_new = |member: &&Member| {
            let entry = self.slots.get(&member.slot);
            entry.is_none_or(|entry| !entry.is_present() && entry.last < member.incarnation)
        };
        Ok(members.filter(is_new).map(|member| member.slot).collect())
    }

    /// The head starts workers. Answered when each has a process or has failed to get one. `devices` has the GPUs of each slot that
    /// [`Colocator::admit`] gives; of a static job, one list for all workers.
    ///
    /// # Errors
    ///
    /// As [`Colocator::admit`]; nothing is started then.
    pub fn start(
        &mut self,
        now: Instant,
        ask: AskId,
        start: StartWorkers,
        devices: Vec<Vec<String>>,
    ) -> Result<Vec<Output>, Refusal> {
        self.admit(&start)?;
        let start = Arc::new(start);
        let workers = start.slots.iter();
        let workers: Vec<_> = workers
            .map(|slot| (slot.member.slot, slot.member.incarnation))
            .collect();
        let mut outputs = vec![Output::Open(Opening {
            stay: self.stay,
            ask,
            start: start.clone(),
        })];
        self.start = Some(start.clone());
        self.phase = Phase::Running;
        let mut devices = devices.into_iter();
        if !start.is_elastic() {
            self.devices = devices.next().unwrap_or_default();
        }
        if has_ranks(&start) {
            self.present.number = start.generation;
        }
        for process in &workers {
            self.start_process(now, *process, &start, &mut devices, &mut outputs);
        }
        self.asked.push(Asked { ask, workers });
        self.answer_starts(&mut outputs);
        NodeAgent::publish(&mut self.agent, now, &start);
        self.attend(now, &mut outputs);
        Ok(outputs)
    }

    /// One process is to be started: at once, when the older one of its slot has ended, or not again.
    fn start_process(
        &mut self,
        now: Instant,
        (slot, incarnation): (Slot, Incarnation),
        start: &Arc<StartWorkers>,
        devices: &mut impl Iterator<Item = Vec<String>>,
        outputs: &mut Vec<Output>,
    ) {
        let newest = self.slots.get_mut(&slot);
        if newest
            .as_ref()
            .is_some_and(|entry| entry.last >= incarnation)
        {
            return;
        }
        if let Some(entry) = newest.filter(|entry| entry.is_present()) {
            entry.last = incarnation;
            let start = start.clone();
            let older = entry.next.replace(Successor { incarnation, start });
            if let Some(older) = older {
                self.never_started(slot, older.incarnation);
            }
            return self.replace(now, slot, outputs);
        }
        self.enter(
            slot,
            incarnation,
            start.clone(),
            devices.next().unwrap_or_default(),
        );
        if !start.is_elastic()
            && let Some(entry) = self.slots.get(&slot)
        {
            self.present.ranks.insert(entry.rank, slot);
        }
        self.spawn(slot, outputs);
    }

    /// A process is to be started in a slot that has none.
    fn enter(
        &mut self,
        slot: Slot,
        incarnation: Incarnation,
        start: Arc<StartWorkers>,
        devices: Vec<String>,
    ) {
        let worker = self.stay.worker(slot, incarnation);
        if let Some(entry) = Entry::new(worker, start, devices) {
            self.slots.insert(slot, entry);
        }
    }

    /// The process of a slot has ended: its successor is started, or the slot is empty.
    pub(super) fn succeed(&mut self, slot: Slot, outputs: &mut Vec<Output>) {
        if !self.is_elastic() {
            return;
        }
        let Some(entry) = self.slots.get_mut(&slot) else {
            return;
        };
        let devices = std::mem::take(&mut entry.devices);
        let next = entry.next.take();
        if let (Some(next), Phase::Running) = (next, &self.phase) {
            self.enter(slot, next.incarnation, next.start, devices);
            self.spawn(slot, outputs);
        } else {
            self.freed.push(devices);
        }
    }

    /// Starts a process, once the first start of a warden is over. If there is none then, the shell starts another.
    pub(super) fn spawn(&mut self, slot: Slot, outputs: &mut Vec<Output>) {
        let Some(entry) = self.slots.get_mut(&slot) else {
            return;
        };
        if entry.state != SlotState::Spawning {
            return;
        }
        if self.waits_for_warden {
            return;
        }
        // One that is to end before it has a process gets none.
        if entry.stop.is_some() {
            return self.exited(slot, Exit::Code(1), Vec::new(), outputs);
        }
        outputs.push(Output::Spawn(Spawning {
            worker: entry.worker,
            start: entry.start.clone(),
            devices: if entry.start.is_elastic() {
                entry.devices.clone()
            } else {
                self.devices.clone()
            },
        }));
    }

    /// A process that waited for an older one is not wanted any more.
    pub(super) fn never_started(&mut self, slot: Slot, incarnation: Incarnation) {
        let Some(entry) = self.slots.get(&slot) else {
            return;
        };
        let failure = RankFailure {
            rank: entry.rank,
            node: self.here.node,
            hostname: self.here.hostname.clone(),
            pid: 0,
            exit: Exit::Code(1),
            reason: Some(
                "it was given up before the older process of its slot had ended".to_owned(),
            ),
            stderr_tail: Vec::new(),
            account: None,
        };
        self.reports.push(NodeEvent::WorkerExited {
            job: self.job,
            slot,
            failure,
            expected: true,
            incarnation,
            generation: Generation(0),
        });
    }

    /// Answers the requests to start whose workers all have a process, or will never get one.
    pub(super) fn answer_starts(&mut self, outputs: &mut Vec<Output>) {
        let slots = &self.slots;
        let is_open = |(slot, incarnation): &(Slot, Incarnation)| {
            slots.get(slot).is_some_and(|entry| {
                let spawns =
                    entry.worker.incarnation == *incarnation && entry.state == SlotState::Spawning;
                let waits = |next: &Successor| next.incarnation == *incarnation;
                spawns || entry.next.as_ref().is_some_and(waits)
            })
        };
        let answered = self
            .asked
            .extract_if(.., |asked| !asked.workers.iter().any(is_open));
        for Asked { ask, workers } in answered {
            let pid = |(slot, incarnation): &(Slot, Incarnation)| {
                let entry = slots.get(slot);
                let entry = entry.filter(|entry| entry.worker.incarnation == *incarnation);
                (*slot, entry.map_or(0, |entry| entry.pid))
            };
            let pids = workers.iter().map(pid).collect();
            let reply = NodeReply::Started { pids };
            outputs.push(Output::Answer { ask, reply });
        }
    }

    fn check(&self, start: &StartWorkers) -> Result<(), Refusal> {
        let invalid = |message: String| refuse(RefusalKind::Invalid, message);
        if start.job != self.job {
            return invalid(format!("{} is not {}", start.job, self.job));
        }
        if start.slots.is_empty() {
            return invalid(format!("{} starts no worker here", self.job));
        }
        let has_ranks = has_ranks(start);
        if has_ranks && start.generation == Generation(0) {
            return invalid("generation 0 can't be started; the first is 1".to_owned());
        }
        if has_ranks && start.generation < self.present.number {
            return self.present.stale(start.generation);
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
            if has_ranks && member.rank.0 >= start.world_size {
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
}

/// Workers are started as ranks of a generation. A program that is installed joins none: it is started for one.
fn has_ranks(start: &StartWorkers) -> bool {
    !start.is_elastic() || start.installed.is_some()
}
