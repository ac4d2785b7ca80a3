//! Time and the end: notice or INT, TERM, KILL, and nothing left.

use std::time::{Duration, Instant};

use kolo_wire::ids::Slot;
use kolo_wire::{Exit, NodeEvent, NodeReply, Refusal, RefusalKind, ToWorker, WorkerSignal};

use super::{Colocator, Phase, SlotState, StopStep, WardenState, millis, refuse};
use crate::node::messages::{Output, Signal};

/// How long after their KILL the ends of workers are waited for. Who has not reported them by then (the warden
/// stands still, or a process can't be killed for now) is not asked any more: closing has an end of its own.
pub const KILLED: Duration = Duration::from_secs(5);

impl Colocator {
    /// The job is to end: notice, TERM, KILL. Again is fine.
    pub fn stop(&mut self, now: Instant, reason: &str) -> Vec<Output> {
        let mut outputs = Vec::new();
        if let Some(ask) = self.asked.take() {
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
                self.stop_reason = Some(reason.to_owned());
                // A program that is not kolo's understands no notice: TERM is the first that it hears, or INT.
                let next = match self.runs_installed() {
                    true if self.interrupted => now + self.interrupt_time(),
                    true => now,
                    false => now + self.grace(),
                };
                self.phase = Phase::Stopping {
                    step: StopStep::Notice,
                    next,
                };
                for (slot, entry) in &self.slots {
                    let worker = self.stay.worker(*slot);
                    match entry.state {
                        SlotState::Greeted | SlotState::Ready => outputs.push(Output::Tell(
                            worker,
                            ToWorker::Stop {
                                reason: reason.to_owned(),
                            },
                        )),
                        // It would not understand a notice yet, and has nothing to lose.
                        SlotState::Booting { .. } => {
                            outputs.push(Output::Signal(worker, Signal::Terminate));
                        }
                        SlotState::Running if self.interrupted => {
                            outputs.push(Output::Signal(worker, Signal::Interrupt));
                        }
                        SlotState::Spawning | SlotState::Running | SlotState::Exited => {}
                    }
                }
                self.close_if_empty(&mut outputs);
                outputs.extend(self.tick(now));
            }
            Phase::Stopping { .. } | Phase::Closing { .. } | Phase::Gone => {}
        }
        outputs
    }

    /// As [`Colocator::stop`], for an installed program: INT, TERM, KILL, in one grace time.
    pub fn interrupt(&mut self, now: Instant, reason: &str) -> Vec<Output> {
        self.interrupted |= self.phase == Phase::Running && self.runs_installed();
        self.stop(now, reason)
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
            .iter()
            .filter(|(_, entry)| entry.state == SlotState::Running)
            .map(|(slot, _)| Output::Signal(self.stay.worker(*slot), Signal::Pass(signal)))
            .collect())
    }

    /// The job is to end at once: KILL, also to what is being stopped.
    pub fn kill_all(&mut self, now: Instant, reason: &str) -> Vec<Output> {
        let mut outputs = Vec::new();
        match self.phase {
            Phase::Running => self.stop_reason = Some(reason.to_owned()),
            Phase::Stopping { step, .. } if step != StopStep::Kill => {}
            _ => return self.stop(now, reason),
        }
        self.phase = Phase::Stopping {
            step: StopStep::Kill,
            next: now + KILLED,
        };
        self.signal_all(Signal::Kill, &mut outputs);
        self.close_if_empty(&mut outputs);
        outputs
    }

    fn signal_all(&self, signal: Signal, outputs: &mut Vec<Output>) {
        for (slot, entry) in &self.slots {
            if !matches!(entry.state, SlotState::Spawning | SlotState::Exited) {
                outputs.push(Output::Signal(self.stay.worker(*slot), signal));
            }
        }
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

    /// The warden runs, or failed to start.
    pub fn warden(&mut self, started: Result<(), String>) -> Vec<Output> {
        let mut outputs = Vec::new();
        self.warden = match &started {
            Ok(()) => WardenState::Up,
            Err(reason) => WardenState::Failed(reason.clone()),
        };
        match (&self.phase, started) {
            (Phase::Reserved | Phase::Gone, _) => {}
            (Phase::Closing { .. }, _) => outputs.push(Output::CloseWarden(self.stay)),
            (Phase::Running, Ok(())) => self.spawn_all(&mut outputs),
            // A job that ends before it has a process starts none.
            (Phase::Stopping { .. }, Ok(())) => self.exit_all(Exit::Code(1), &mut outputs),
            (_, Err(reason)) => self.fail_all(&reason, &mut outputs),
        }
        outputs
    }

    /// No worker can be started.
    pub(super) fn fail_all(&mut self, reason: &str, outputs: &mut Vec<Output>) {
        let slots: Vec<Slot> = self.slots.keys().copied().collect();
        for slot in slots {
            self.condemn(slot, reason.to_owned());
        }
        self.exit_all(Exit::Code(1), outputs);
    }

    /// All workers whose end is not known count as ended.
    fn exit_all(&mut self, exit: Exit, outputs: &mut Vec<Output>) {
        let slots: Vec<Slot> = self.slots.keys().copied().collect();
        for slot in slots {
            self.exited(slot, exit, Vec::new(), outputs);
        }
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
        let timeout = self
            .start
            .as_ref()
            .map_or(0, |start| start.hello_timeout_ms);
        for (slot, entry) in &mut self.slots {
            if entry.deadline(&self.phase).is_none_or(|by| by > now) {
                continue;
            }
            entry.condemned = Some(match entry.hang_up.filter(|(_, by)| *by <= now) {
                Some((socket, _)) => format!("it closed its {socket} socket and went on running"),
                None => format!(
                    "it did not say hello within {:?}; its program must call `kolo::main` or \
                     `run_if_worker` before anything that takes long",
                    millis(timeout)
                ),
            });
            outputs.push(Output::Signal(self.stay.worker(*slot), Signal::Kill));
        }
        while let Phase::Stopping { step, next } = self.phase
            && step != StopStep::Kill
            && next <= now
        {
            let (step, signal) = match step {
                StopStep::Notice => (StopStep::Term, Signal::Terminate),
                StopStep::Term | StopStep::Kill => (StopStep::Kill, Signal::Kill),
            };
            self.signal_all(signal, &mut outputs);
            self.phase = Phase::Stopping {
                step,
                next: match step {
                    StopStep::Kill => next.max(now) + KILLED,
                    StopStep::Term if self.interrupted => {
                        next + self.grace().saturating_sub(self.interrupt_time())
                    }
                    StopStep::Notice | StopStep::Term => next + self.grace(),
                },
            };
        }
        if let Phase::Stopping { step, next } = self.phase
            && step == StopStep::Kill
            && next <= now
        {
            self.give_up(&mut outputs);
        }
        outputs
    }

    /// Workers whose end is still not known after their KILL count as ended, so that the job closes.
    fn give_up(&mut self, outputs: &mut Vec<Output>) {
        let reason = format!("its end was not seen within {KILLED:?} after its KILL");
        for entry in self.slots.values_mut() {
            entry.condemned.get_or_insert_with(|| reason.clone());
        }
        self.exit_all(Exit::Unknown, outputs);
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
        if matches!(self.phase, Phase::Stopping { .. })
            && self
                .slots
                .values()
                .all(|entry| entry.state == SlotState::Exited)
        {
            self.close(true, outputs);
        }
    }

    /// No worker is left.
    fn close(&mut self, report: bool, outputs: &mut Vec<Output>) {
        self.phase = Phase::Closing { report };
        outputs.push(Output::CloseCalls(self.job));
        // One that is starting is closed when it runs.
        if self.warden != WardenState::Starting {
            outputs.push(Output::CloseWarden(self.stay));
        }
    }
}
