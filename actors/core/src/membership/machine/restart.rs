//! How a group is stopped that is started anew at each change.

use std::sync::Arc;
use std::time::Instant;

use super::super::roster::{Departure, Fate};
use super::super::seat::{Host, Loss, Process, State};
use super::{Action, Formation, Membership};

/// A process of a group has failed.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    at: Instant,
    /// Since when the process was as far as it was.
    since: Instant,
    blamed: Option<Host>,
    pub(super) what: String,
}

impl Membership {
    /// Nothing is left of a group that is started anew, and the next one is not formed. When the wait for it ends.
    #[must_use]
    pub fn next_group_by(&self) -> Option<Instant> {
        let since = self.budget.idle_since()?;
        let is_empty = self.formation.is_none() && self.roster.count(State::Stopping) == 0;
        let waits = is_empty && self.limits.starts_anew() && !self.has_ended;
        waits.then(|| since + self.limits.start_timeout)
    }

    /// For how many workers there is room, if these are too few, and all nodes have answered.
    #[must_use]
    pub fn shortage(&self) -> Option<u32> {
        self.next_group_by()?;
        let held = self.roster.in_state(State::Held);
        let held = held.filter(|seat| !seat.leaving).count() as u32;
        let has_heard = self.roster.count(State::Reserving) == 0;
        (has_heard && held < self.limits.min).then_some(held)
    }

    /// Processes are not there any more. The first failure of a group ends it. A lost node counts for more: its peers may fail before
    /// the head hears of it, and cost nothing then.
    pub(super) fn departed_anew(&mut self, now: Instant, departures: Vec<Departure>) {
        for departure in departures {
            let process = departure.process;
            if let Some(formation) = &mut self.formation {
                formation.gone(process, &departure.fate);
            }
            let Fate::Lost(loss) = departure.fate else {
                continue;
            };
            let forming = self.formation.as_ref().map(Formation::generation);
            let current = forming.or(self.previous.as_ref());
            let Some(member) = current.and_then(|current| current.member(process)) else {
                continue;
            };
            let (rank, host) = (member.rank, &member.location.host);
            let what = format!("rank {rank} on {host}: {loss}");
            let (is_failure, may_blame) = loss.is_failure();
            if !is_failure {
                let is_node = matches!(loss, Loss::Node { .. });
                if is_node && self.failed.take().is_some() {
                    self.budget.explained(&what);
                    self.broken = Some(what);
                } else {
                    self.broken.get_or_insert(what);
                }
                continue;
            }
            let blamed = departure.host.filter(|_| may_blame);
            if self.broken.is_none() && self.failed.is_none() {
                self.broken = Some(what.clone());
                self.failed = Some(Failure {
                    at: now,
                    since: departure.since,
                    blamed,
                    what,
                });
            }
        }
    }

    /// Stops the whole group, or what there is of the next one.
    pub(super) fn restart(&mut self, now: Instant, why: &str) {
        let is_new = self.formation.is_some() || self.budget.idle_since().is_none();
        if let Some(formation) = self.formation.take() {
            self.previous = Some(Arc::clone(formation.generation()));
            self.budget.explained(why);
        }
        self.budget.idle(now, why);
        let stopped = self.roster.stop_all(now);
        if is_new {
            self.actions.push(Action::Fall {
                why: why.to_owned(),
                is_failure: self.failed.is_some(),
                stopped: stopped.len() as u32,
            });
        }
        for process in stopped {
            let why = why.to_owned();
            self.actions.push(Action::Stop { process, why });
        }
    }

    /// Counts the failure that has ended the group, when nothing of the group is left.
    pub(super) fn count_failure(&mut self, now: Instant) {
        if self.roster.count(State::Stopping) > 0 {
            return;
        }
        let Some(failure) = self.failed.take() else {
            return;
        };
        let Failure {
            at,
            since,
            blamed,
            what,
        } = failure;
        let limits = &self.limits;
        self.budget
            .failed(at, limits, since, blamed.as_ref(), &what);
        self.budget.fell(now, at.saturating_duration_since(since));
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
