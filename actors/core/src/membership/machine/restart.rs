//! How a group is stopped that is started anew at each change.

use std::sync::Arc;
use std::time::Instant;

use super::super::seat::{Loss, Process, State};
use super::{Action, Membership};

impl Membership {
    /// Stops the whole group, or what there is of the next one.
    pub(super) fn restart(&mut self, now: Instant, why: &str) {
        if let Some(formation) = self.formation.take() {
            self.previous = Some(Arc::clone(formation.generation()));
        }
        self.budget.idle(now, why);
        for process in self.roster.stop_all(now) {
            let why = why.to_owned();
            self.actions.push(Action::Stop { process, why });
        }
    }

    /// When a process that was told to end must have ended, the first of them.
    pub(super) fn first_end(&self) -> Option<(Process, Instant)> {
        let timeout = self.limits.stop_timeout()?;
        let seat = self.roster.in_state(State::Stopping).next()?;
        Some((seat.process(), seat.since + timeout))
    }

    /// Gives up what is late to end.
    pub(super) fn expire_ends(&mut self, now: Instant) {
        while let Some((process, _)) = self.first_end().filter(|(_, by)| now >= *by) {
            let why = "its end was not seen in time".to_owned();
            self.give_up(now, process, Loss::Left(why));
        }
    }
}
