//! Processes that are started for one generation, with the ranks that they have in it.

use std::sync::Arc;
use std::time::Instant;

use kolo_wire::ids::{self, Slot};

use super::super::seat::Process;
use super::{Action, Generation, Membership};

impl Membership {
    /// Makes a generation of these seats and starts the processes that it lacks. It is formed when all of them are ready.
    pub(super) fn plan(&mut self, now: Instant, slots: &[Slot], cause: String) {
        let is_live = |slot: &Slot| {
            self.roster
                .seat(*slot)
                .is_some_and(|seat| seat.state.is_live())
        };
        let new: Vec<Slot> = slots
            .iter()
            .copied()
            .filter(|slot| !is_live(slot))
            .collect();
        for slot in &new {
            self.roster.boot(now, *slot);
        }
        let seats = slots.iter().filter_map(|slot| self.roster.seat(*slot));
        // It may have a later number in the end.
        let number = ids::Generation(self.last.0 + 1);
        let previous = self.previous.as_deref();
        let committed = self.budget.committed_in();
        let generation = Arc::new(Generation::new(number, cause, seats, previous, committed));
        self.plan = Some(Arc::clone(&generation));
        self.actions.push(Action::Plan(generation));
        for slot in new {
            self.start(slot);
        }
    }

    /// Gives the plan up, and the processes that were started for it.
    pub(super) fn cancel(&mut self, now: Instant, why: &str) {
        for process in self.take_plan() {
            if self.roster.stop(now, process) {
                let why = why.to_owned();
                self.actions.push(Action::Stop { process, why });
            }
        }
    }

    /// A generation is published. The processes that were started for it have taken it: it was theirs from the start.
    pub(super) fn new_have_taken(&mut self) {
        let plan = self.plan.as_deref();
        let new = plan.map_or(Vec::new(), |plan| self.new_in(plan));
        if let Some(formation) = &mut self.formation {
            let number = formation.generation().number();
            for process in new {
                formation.taken(number, process);
            }
        }
    }

    /// A generation is active. If it has new processes, it is the plan.
    pub(super) fn realised(&mut self, generation: &Generation) {
        let is_new = |plan: &Arc<Generation>| {
            let mut new = plan.members().iter().map(|member| member.process);
            new.all(|process| generation.member(process).is_some())
        };
        self.plan.take_if(|plan| is_new(plan));
    }

    fn take_plan(&mut self) -> Vec<Process> {
        let plan = self.plan.take();
        plan.iter().flat_map(|plan| self.new_in(plan)).collect()
    }

    fn new_in(&self, plan: &Generation) -> Vec<Process> {
        let is_member = |process| {
            let previous = self.previous.as_deref();
            previous.is_some_and(|previous| previous.member(process).is_some())
        };
        let processes = plan.members().iter().map(|member| member.process);
        processes.filter(|process| !is_member(*process)).collect()
    }
}
