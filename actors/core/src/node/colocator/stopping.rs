//! Time and the end: notice or INT, TERM, KILL, and nothing left.

use std::time::{Duration, Instant};

use kolo_wire::ids::Slot;
use kolo_wire::{Exit, Refusal, RefusalKind, ToWorker, WorkerSignal};

use super::{Action, Colocator, Phase, SlotState, StopStep, millis, refuse};

/// How long after their KILL the ends of workers are waited for. Who has not reported them by then (the warden
/// stands still, or a process can't be killed for now) is not asked any more: closing has an end of its own.
pub const KILLED: Duration = Duration::from_secs(5);

impl Colocator {
    /// The job is to end: notice, TERM, KILL. Again is fine.
    pub fn stop(&mut self, now: Instant, reason: &str) -> Vec<Action> {
        let mut actions = Vec::new();
        match self.phase {
            Phase::Reserved => {
                self.stop_reason = Some(reason.to_owned());
                self.phase = Phase::Closing { report: false };
                actions.push(Action::Close);
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
                    match entry.state {
                        SlotState::Greeted | SlotState::Ready => actions.push(Action::Tell(
                            *slot,
                            ToWorker::Stop {
                                reason: reason.to_owned(),
                            },
                        )),
                        // It would not understand a notice yet, and has nothing to lose.
                        SlotState::Booting { .. } => actions.push(Action::Terminate(*slot)),
                        SlotState::Running if self.interrupted => {
                            actions.push(Action::Interrupt(*slot));
                        }
                        SlotState::Spawning | SlotState::Running | SlotState::Exited => {}
                    }
                }
                self.close_if_empty(&mut actions);
                actions.extend(self.tick(now));
            }
            Phase::Stopping { .. } | Phase::Closing { .. } | Phase::Gone => {}
        }
        actions
    }

    /// As [`Colocator::stop`], for an installed program: INT, TERM, KILL, in one grace time.
    pub fn interrupt(&mut self, now: Instant, reason: &str) -> Vec<Action> {
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
    pub fn signal(&mut self, seq: u64, signal: WorkerSignal) -> Result<Vec<Action>, Refusal> {
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
            .map(|(slot, _)| Action::Signal(*slot, signal))
            .collect())
    }

    /// The job is to end at once: KILL, also to what is being stopped.
    pub fn kill_all(&mut self, now: Instant, reason: &str) -> Vec<Action> {
        let mut actions = Vec::new();
        match self.phase {
            Phase::Running => self.stop_reason = Some(reason.to_owned()),
            Phase::Stopping { step, .. } if step != StopStep::Kill => {}
            _ => return self.stop(now, reason),
        }
        self.phase = Phase::Stopping {
            step: StopStep::Kill,
            next: now + KILLED,
        };
        for (slot, entry) in &self.slots {
            if !matches!(entry.state, SlotState::Spawning | SlotState::Exited) {
                actions.push(Action::Kill(*slot));
            }
        }
        self.close_if_empty(&mut actions);
        actions
    }

    /// The lease of the reservation has ended.
    pub fn expire(&mut self) -> Vec<Action> {
        if self.phase != Phase::Reserved {
            return Vec::new();
        }
        self.stop_reason = Some("its lease has ended".to_owned());
        self.phase = Phase::Closing { report: true };
        vec![Action::Close]
    }

    /// Nothing of the job is left: the answer to [`Action::Close`].
    pub fn closed(&mut self) -> Vec<Action> {
        let Phase::Closing { report } = self.phase else {
            return Vec::new();
        };
        self.phase = Phase::Gone;
        vec![Action::Gone { report }]
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        let timeout = self
            .start
            .as_ref()
            .map_or(0, |start| start.hello_timeout_ms);
        for (slot, entry) in &mut self.slots {
            if let SlotState::Booting { hello_by } = entry.state
                && hello_by <= now
                && entry.condemned.is_none()
            {
                entry.condemned = Some(format!(
                    "it did not say hello within {:?}; its program must call `kolo::main` or \
                     `run_if_worker` before anything that takes long",
                    millis(timeout)
                ));
                actions.push(Action::Kill(*slot));
            }
        }
        while let Phase::Stopping { step, next } = self.phase
            && step != StopStep::Kill
            && next <= now
        {
            let (step, action): (_, fn(Slot) -> Action) = match step {
                StopStep::Notice => (StopStep::Term, Action::Terminate),
                StopStep::Term | StopStep::Kill => (StopStep::Kill, Action::Kill),
            };
            for (slot, entry) in &self.slots {
                if !matches!(entry.state, SlotState::Spawning | SlotState::Exited) {
                    actions.push(action(*slot));
                }
            }
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
            self.give_up(&mut actions);
        }
        actions
    }

    /// Workers whose end is still not known after their KILL count as ended, so that the job closes.
    fn give_up(&mut self, actions: &mut Vec<Action>) {
        let silent: Vec<Slot> = self
            .slots
            .iter()
            .filter(|(_, entry)| entry.state != SlotState::Exited)
            .map(|(slot, _)| *slot)
            .collect();
        for slot in silent {
            let reason = format!("its end was not seen within {KILLED:?} after its KILL");
            self.condemn(slot, reason);
            self.exited(slot, Exit::Unknown, Vec::new(), actions);
        }
    }

    /// Whether the workers run a program that is installed here.
    pub(super) fn runs_installed(&self) -> bool {
        self.start
            .as_ref()
            .is_some_and(|start| start.installed.is_some())
    }

    /// How long a worker has to end by itself once it was told to.
    #[must_use]
    pub fn grace(&self) -> Duration {
        millis(self.start.as_ref().map_or(0, |start| start.grace_ms))
    }

    pub(super) fn close_if_empty(&mut self, actions: &mut Vec<Action>) {
        if matches!(self.phase, Phase::Stopping { .. })
            && self
                .slots
                .values()
                .all(|entry| entry.state == SlotState::Exited)
        {
            self.phase = Phase::Closing { report: true };
            actions.push(Action::Close);
        }
    }
}
