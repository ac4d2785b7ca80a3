//! Jobs whose program is installed on the hosts: any executable.
//!
//! Their workers say no hello. Each is ready when it runs; the job succeeds when all have exited with code 0, and the first
//! that ends otherwise ends the group.

use kolo_wire::ids::Slot;
use kolo_wire::{NodeRequest, Refusal, WorkerSignal, WorkerState};

use super::report::listed;
use super::{Hold, Job, Manner, Part, Push, Signals};

impl Job {
    pub(super) fn is_installed(&self) -> bool {
        self.spec.installed.is_some()
    }

    /// Ends the job if its program can't run on some of the hosts. All have answered.
    pub(super) fn check_installed(&mut self) {
        let mut problems: Vec<(&Refusal, Vec<String>)> = Vec::new();
        for part in &self.parts {
            let Some(problem) = &part.problem else {
                continue;
            };
            let at = part.site.hostname.clone();
            match problems.iter_mut().find(|(known, _)| *known == problem) {
                Some((_, hosts)) => hosts.push(at),
                None => problems.push((problem, vec![at])),
            }
        }
        let Some((first, _)) = problems.first() else {
            return;
        };
        let kind = first.kind;
        let texts: Vec<String> = problems
            .iter()
            .map(|(problem, hosts)| format!("{} (on {})", problem.message, listed(hosts)))
            .collect();
        self.fail(kind, texts.join("; "));
    }

    /// A worker runs, or has run: there is nothing else to wait for.
    pub(super) fn installed_ready(&mut self, slot: Slot) {
        let seat = self.seats.get_mut(&slot);
        if let Some(seat) = seat.filter(|seat| seat.state == WorkerState::Starting) {
            seat.state = WorkerState::Ready;
            self.ready += 1;
        }
    }

    /// Ends the job because its driver was interrupted.
    pub(super) fn interrupt(&mut self) {
        if self.is_installed() && self.ending.is_none() {
            self.manner = Manner::Interrupt;
        }
        self.stop("its driver was interrupted".to_owned(), true);
    }

    /// Sends a signal to all workers that run and are not about to be ended.
    pub(super) fn signal(&mut self, signal: WorkerSignal) {
        if !self.is_installed() || self.ending.is_some() {
            return;
        }
        if matches!(signal, WorkerSignal::User1 | WorkerSignal::User2) {
            self.noticed();
        }
        for part in 0..self.parts.len() {
            if self.parts[part].hold == Hold::Running {
                self.parts[part].signals.add(signal);
                self.push_signal(part);
            }
        }
    }

    /// The node has taken what was pushed to it.
    pub(super) fn signalled(&mut self, part: usize) {
        self.parts[part].signals.under_way = false;
        if self.ending.is_none() {
            self.push_signal(part);
        }
    }

    fn push_signal(&mut self, part: usize) {
        let Some(signal) = self.parts[part].signals.next() else {
            return;
        };
        self.signals += 1;
        let request = NodeRequest::Signal {
            job: self.id,
            signal,
            seq: self.signals,
        };
        self.push(part, Push::order(request));
    }

    /// Ends what is left without any grace.
    pub(super) fn kill(&mut self) {
        if std::mem::replace(&mut self.manner, Manner::Kill) == Manner::Kill {
            return;
        }
        let is_stopping = |part: &Part| part.hold == Hold::Undoing && part.started;
        let parts = (0..).zip(&self.parts);
        let stopping: Vec<usize> = parts
            .filter(|(_, part)| is_stopping(part))
            .map(|(part, _)| part)
            .collect();
        self.stop("its driver has ended it at once".to_owned(), true);
        for part in stopping {
            self.deliver(part, Push::order(NodeRequest::Kill { job: self.id }));
        }
    }
}

impl Signals {
    fn add(&mut self, signal: WorkerSignal) {
        let undone = match signal {
            WorkerSignal::Stop => Some(WorkerSignal::Continue),
            WorkerSignal::Continue => Some(WorkerSignal::Stop),
            WorkerSignal::User1 | WorkerSignal::User2 => None,
        };
        // The later of the two is what is wanted.
        self.waiting
            .retain(|other| *other != signal && Some(*other) != undone);
        self.waiting.push(signal);
    }

    fn next(&mut self) -> Option<WorkerSignal> {
        if self.under_way || self.waiting.is_empty() {
            return None;
        }
        self.under_way = true;
        Some(self.waiting.remove(0))
    }
}
