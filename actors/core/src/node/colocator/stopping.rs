//! Time and the end: notice or INT, TERM, KILL, and nothing left. A process that ends alone takes the same steps as one that ends
//! with its job.

use std::time::{Duration, Instant};

use kolo_wire::ids::{Incarnation, Slot};
use kolo_wire::{Exit, NodeEvent, NodeReply, Refusal, RefusalKind, ToWorker, WorkerSignal};

use super::starting::Asked;
use super::{Colocator, Phase, SlotState, millis, refuse};
use crate::node::messages::{Output, Signal};

/// How long after their KILL the ends of workers are waited for. Who has not reported them by then (the warden
/// stands still, or a process can't be killed for now) is not asked any more: closing has an end of its own.
pub const KILLED: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum StopStep {
    Notice,
    Term,
    Kill,
}

/// How far the end of one process is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stop {
    pub(super) step: StopStep,
    pub(super) next: Instant,
    /// Why, for the report of its exit.
    pub(super) reason: String,
}

impl Colocator {
    /// The job is to end: notice, TERM, KILL. Again is fine.
    pub fn stop(&mut self, now: Instant, reason: &str) -> Vec<Output> {
        let mut outputs = Vec::new();
        for Asked { ask, .. } in self.asked.drain(..) {
            let message = format!("{} was stopped while it started: {reason}", self.job);
            let reply = NodeReply::Refused(Refusal::new(RefusalKind::Stopped, message));
            outputs.push(Output::Answer { ask, reply });
        }
        match self.phase {
            Phase::Reserved => {
                self.stop_reason = Some(reason.to_owned());
                self.close(false, &mut outputs);
            }
            Phase::Running => {
                self.begin_end(now, reason);
                for slot in self.all_slots() {
                    self.stop_process(now, slot, reason, &mut outputs);
                }
                self.close_if_empty(&mut outputs);
                outputs.extend(self.tick(now));
            }
            Phase::Stopping | Phase::Closing { .. } | Phase::Gone => {}
        }
        outputs
    }

    /// The whole job ends from now on. Nothing is started any more.
    fn begin_end(&mut self, now: Instant, reason: &str) {
        self.stop_reason = Some(reason.to_owned());
        if let Some(agent) = &mut self.agent {
            agent.end(now, reason);
        }
        self.phase = Phase::Stopping;
        self.leaving = None;
        for slot in self.all_slots() {
            self.drop_successor(slot);
        }
    }

    fn drop_successor(&mut self, slot: Slot) {
        let entry = self.slots.get_mut(&slot);
        if let Some(next) = entry.and_then(|entry| entry.next.take()) {
            self.never_started(slot, next.incarnation);
        }
    }

    /// One process is to end, unless it is ending: notice, TERM, KILL.
    pub(super) fn stop_process(
        &mut self,
        now: Instant,
        slot: Slot,
        reason: &str,
        outputs: &mut Vec<Output>,
    ) {
        // A program that is not kolo's understands no notice: TERM is the first that it hears, or INT.
        let (installed, interrupted) = (self.runs_installed(), self.interrupted);
        let next = match installed {
            true if interrupted => now + self.interrupt_time(),
            true => now,
            false => now + self.grace(),
        };
        let entry = self.slots.get_mut(&slot);
        let Some(entry) = entry.filter(|entry| entry.is_present() && entry.stop.is_none()) else {
            return;
        };
        entry.stop = Some(Stop {
            step: StopStep::Notice,
            next,
            reason: reason.to_owned(),
        });
        let worker = entry.worker;
        match entry.state {
            SlotState::Greeted | SlotState::Ready => {
                let reason = reason.to_owned();
                outputs.push(Output::Tell(worker, ToWorker::Stop { reason }));
            }
            // It would not understand a notice yet, and has nothing to lose.
            SlotState::Booting { .. } => outputs.push(Output::Signal(worker, Signal::Terminate)),
            SlotState::Running if interrupted => {
                outputs.push(Output::Signal(worker, Signal::Interrupt));
            }
            SlotState::Spawning | SlotState::Running | SlotState::Exited => {}
        }
    }

    /// One worker of an elastic job is to end: notice, TERM, KILL. A process that is not there, or ends already, is fine. Of a group
    /// that is started anew all workers here end.
    pub fn stop_worker(
        &mut self,
        now: Instant,
        (slot, incarnation): (Slot, Incarnation),
        why: &str,
    ) -> Vec<Output> {
        let mut outputs = Vec::new();
        let Some(entry) = self.slots.get(&slot) else {
            return outputs;
        };
        let waits = |next: &super::entry::Successor| next.incarnation == incarnation;
        if entry.next.as_ref().is_some_and(waits) {
            self.drop_successor(slot);
            self.answer_starts(&mut outputs);
        } else if entry.worker.incarnation == incarnation {
            let process = (slot, incarnation);
            let agent = self.agent.as_mut();
            if !agent.is_some_and(|agent| agent.ends_group(process, why)) {
                self.stop_process(now, slot, why, &mut outputs);
            }
            outputs.extend(self.tick(now));
        }
        outputs
    }

    /// A newer process of its slot waits for its end: KILL.
    pub(super) fn replace(&mut self, now: Instant, slot: Slot, outputs: &mut Vec<Output>) {
        let reason = "a newer process of its slot is started";
        self.kill_process(now, slot, reason, outputs);
    }

    /// As [`Colocator::stop`], for an installed program: INT, TERM, KILL, in one grace time.
    pub fn interrupt(&mut self, now: Instant, reason: &str) -> Vec<Output> {
        self.interrupted |= self.phase == Phase::Running && self.runs_installed();
        self.stop(now, reason)
    }

    /// The node leaves. The head has the grace of an elastic job to take it away, if it hears of it; then the job is stopped.
    pub fn leave(&mut self, now: Instant, reason: &str, head_hears: bool) -> Vec<Output> {
        if !(head_hears && self.is_elastic() && self.phase == Phase::Running) {
            return self.stop(now, reason);
        }
        let by = now + self.grace();
        self.leaving.get_or_insert((by, reason.to_owned()));
        self.tick(now)
    }

    /// How long after INT a worker that has not ended gets TERM: who saves something at INT has most of the grace time,
    /// who knows TERM alone has some of it.
    fn interrupt_time(&self) -> Duration {
        self.grace() * 3 / 4
    }

    /// A signal for all workers of an installed program. `seq` counts signals: one that came before is not sent again.
    ///
    /// # Errors
    ///
    /// [`Refusal`] if the workers are of a program that was sent here.
    pub fn signal(&mut self, seq: u64, signal: WorkerSignal) -> Result<Vec<Output>, Refusal> {
        if self.phase != Phase::Running || seq <= self.last_signal {
            return Ok(Vec::new());
        }
        if !self.runs_installed() {
            return refuse(
                RefusalKind::Invalid,
                format!(
                    "{} runs a program of kolo's own, which gets no signals",
                    self.job
                ),
            );
        }
        self.last_signal = seq;
        Ok(self
            .slots
            .values()
            .filter(|entry| entry.state == SlotState::Running)
            .map(|entry| Output::Signal(entry.worker, Signal::Pass(signal)))
            .collect())
    }

    /// The job is to end at once: KILL, also to what is being stopped.
    pub fn kill_all(&mut self, now: Instant, reason: &str) -> Vec<Output> {
        let mut outputs = Vec::new();
        match self.phase {
            Phase::Running => self.begin_end(now, reason),
            Phase::Stopping => {}
            _ => return self.stop(now, reason),
        }
        for slot in self.all_slots() {
            self.kill_process(now, slot, reason, &mut outputs);
        }
        self.close_if_empty(&mut outputs);
        outputs
    }

    /// One process is to end at once, unless it had its KILL.
    fn kill_process(&mut self, now: Instant, slot: Slot, reason: &str, outputs: &mut Vec<Output>) {
        let entry = self.slots.get_mut(&slot);
        let Some(entry) = entry.filter(|entry| entry.is_present()) else {
            return;
        };
        let stop = entry.stop.get_or_insert_with(|| Stop {
            step: StopStep::Notice,
            next: now,
            reason: reason.to_owned(),
        });
        if stop.step == StopStep::Kill {
            return;
        }
        stop.step = StopStep::Kill;
        stop.next = now + KILLED;
        if entry.state != SlotState::Spawning {
            outputs.push(Output::Signal(entry.worker, Signal::Kill));
        }
    }

    pub(super) fn all_slots(&self) -> Vec<Slot> {
        self.slots.keys().copied().collect()
    }

    /// The lease of the reservation has ended before a start.
    pub fn expire(&mut self) -> Vec<Output> {
        self.expired = true;
        // Now, for the job may be here again before the warden has ended.
        let mut outputs = vec![Output::EndOutput(self.job)];
        if self.phase == Phase::Reserved {
            self.stop_reason = Some("its lease has ended".to_owned());
            self.close(true, &mut outputs);
        }
        outputs
    }

    /// The warden runs, or failed to start. A failure may pass: whoever needs a warden later has another one started.
    pub fn warden(&mut self, started: Result<(), String>) -> Vec<Output> {
        let mut outputs = Vec::new();
        self.waits_for_warden = false;
        if let Err(reason) = started {
            let text = format!("no warden was started for {}: {reason}", self.job);
            outputs.push(Output::Warn(text));
        }
        if let Some((ask, check)) = self.check.take() {
            outputs.extend(self.check_health(ask, check));
        }
        match self.phase {
            Phase::Reserved | Phase::Gone => {}
            Phase::Closing { .. } => outputs.push(Output::CloseWarden(self.stay)),
            Phase::Running | Phase::Stopping => {
                for slot in self.all_slots() {
                    self.spawn(slot, &mut outputs);
                }
            }
        }
        outputs
    }

    /// Nothing of the job is left: the answer to [`Output::CloseWarden`].
    pub fn closed(&mut self) -> Vec<Output> {
        let Phase::Closing { report } = self.phase else {
            return Vec::new();
        };
        self.phase = Phase::Gone;
        if report {
            self.reports.push(NodeEvent::JobGone { job: self.job });
        }
        if self.expired {
            return Vec::new();
        }
        vec![Output::EndOutput(self.job)]
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Instant) -> Vec<Output> {
        let mut outputs = Vec::new();
        if let Some((_, reason)) = self.leaving.take_if(|(by, _)| *by <= now) {
            return self.stop(now, &reason);
        }
        for slot in self.all_slots() {
            self.expect(now, slot, &mut outputs);
            self.press(now, slot, &mut outputs);
        }
        self.attend(now, &mut outputs);
        outputs
    }

    /// Tells the agent what it waits for, and stops the group that is over for it.
    pub(super) fn attend(&mut self, now: Instant, outputs: &mut Vec<Output>) {
        while let Some(agent) = &mut self.agent
            && let Some((group, why)) = agent.attend(now, &self.slots)
        {
            for (slot, incarnation) in group {
                let entry = self.slots.get(&slot);
                if entry.is_some_and(|entry| entry.worker.incarnation == incarnation) {
                    self.stop_process(now, slot, &why, outputs);
                    self.press(now, slot, outputs);
                }
            }
        }
        let said = self.agent.as_mut().and_then(|agent| agent.said(self.job));
        outputs.extend(said);
    }

    /// A process that had to do something by now is killed. One whose end is still not known after that counts as ended (F-1).
    fn expect(&mut self, now: Instant, slot: Slot, outputs: &mut Vec<Output>) {
        let entry = self.slots.get_mut(&slot);
        let is_late = |by: Instant| by <= now;
        let Some(entry) = entry.filter(|entry| entry.deadline().is_some_and(is_late)) else {
            return;
        };
        if let Some(reason) = &mut entry.condemned {
            reason.push_str("; ");
            reason.push_str(&not_seen());
            return self.not_seen(slot, outputs);
        }
        let reason = match entry.hang_up.filter(|(_, by)| is_late(*by)) {
            Some((socket, _)) => format!("it closed its {socket} socket and went on running"),
            None => format!(
                "it did not say hello within {:?}; its program must call `kolo::main` or \
                 `run_if_worker` before anything that takes long",
                millis(entry.start.hello_timeout_ms)
            ),
        };
        entry.condemn(now, reason);
        outputs.push(Output::Signal(entry.worker, Signal::Kill));
    }

    /// A process that is to end gets the signals that are due. One whose end is still not known after its KILL counts as ended, so
    /// that the job closes, and that the next process of its slot starts.
    pub(super) fn press(&mut self, now: Instant, slot: Slot, outputs: &mut Vec<Output>) {
        let (grace, interrupted) = (self.grace(), self.interrupted);
        let rest = grace.saturating_sub(self.interrupt_time());
        let Some(entry) = self.slots.get_mut(&slot) else {
            return;
        };
        while entry.stop_deadline(&self.phase).is_some_and(|by| by <= now)
            && let Some(stop) = &mut entry.stop
        {
            let (step, signal) = match stop.step {
                StopStep::Notice => (StopStep::Term, Signal::Terminate),
                StopStep::Term => (StopStep::Kill, Signal::Kill),
                StopStep::Kill => {
                    entry.condemned.get_or_insert_with(not_seen);
                    return self.not_seen(slot, outputs);
                }
            };
            stop.next = match step {
                StopStep::Kill => stop.next.max(now) + KILLED,
                StopStep::Term if interrupted => stop.next + rest,
                StopStep::Notice | StopStep::Term => stop.next + grace,
            };
            stop.step = step;
            if entry.state != SlotState::Spawning {
                outputs.push(Output::Signal(entry.worker, signal));
            }
        }
    }

    /// The end of a process was not seen after its KILL.
    fn not_seen(&mut self, slot: Slot, outputs: &mut Vec<Output>) {
        if self.is_elastic()
            && self.runs_installed()
            && let Some(entry) = self.slots.get(&slot)
        {
            self.reports.push(NodeEvent::WorkerUnseen {
                job: self.job,
                slot,
                incarnation: entry.worker.incarnation,
            });
        }
        self.exited(slot, Exit::Unknown, Vec::new(), outputs);
    }

    /// Whether the workers run a program that is installed here.
    pub(super) fn runs_installed(&self) -> bool {
        self.start
            .as_ref()
            .is_some_and(|start| start.installed.is_some())
    }

    /// How long a worker has to end by itself once it was told to.
    pub(super) fn grace(&self) -> Duration {
        millis(self.start.as_ref().map_or(0, |start| start.grace_ms))
    }

    pub(super) fn close_if_empty(&mut self, outputs: &mut Vec<Output>) {
        if self.phase == Phase::Stopping && self.slots.values().all(|entry| !entry.is_present()) {
            self.close(true, outputs);
        }
    }

    /// No worker is left.
    fn close(&mut self, report: bool, outputs: &mut Vec<Output>) {
        self.phase = Phase::Closing { report };
        outputs.push(Output::CloseCalls(self.job));
        // One that is starting is closed when it runs.
        if !self.waits_for_warden {
            outputs.push(Output::CloseWarden(self.stay));
        }
    }
}

fn not_seen() -> String {
    format!("its end was not seen within {KILLED:?} after its KILL")
}
