//! Processes: they are asked for, start, are lost, and are given up.

use std::time::{Duration, Instant};

use kolo_wire::ids::Slot;
use kolo_wire::span::Span;

use super::super::action::Action;
use super::super::formation::Formation;
use super::super::policy::Purpose;
use super::super::roster::{Departure, Fate};
use super::super::seat::{Loss, Process, Seat, State};
use super::super::units::Units;
use super::Membership;

impl Membership {
    /// Starts the process of a seat that a node holds.
    pub(super) fn start(&mut self, slot: Slot) {
        let seat = self.roster.seat(slot);
        let Some(seat) = seat.filter(|seat| seat.state == State::Booting && !seat.leaving) else {
            return;
        };
        if let Some(location) = seat.location.clone() {
            let process = seat.process();
            self.actions.push(Action::Start { process, location });
        }
    }

    /// Ends a process that is there and is not wanted any more.
    pub(super) fn give_up(&mut self, now: Instant, process: Process, loss: Loss) {
        let why = loss.to_string();
        if let Some(departure) = self.roster.give_up(now, process, loss) {
            self.actions.push(Action::Stop { process, why });
            self.departed(now, vec![departure]);
        }
    }

    /// Processes are not there any more: what that means for the formation, the budget, and the last generation.
    pub(super) fn departed(&mut self, now: Instant, departures: Vec<Departure>) {
        if self.limits.starts_anew() {
            return self.departed_anew(now, departures);
        }
        let mut lost = Vec::new();
        let mut cause = None;
        for departure in departures {
            let process = departure.process;
            if let Some(formation) = &mut self.formation {
                formation.gone(process, &departure.fate);
            }
            let Fate::Lost(loss) = departure.fate else {
                continue;
            };
            let host = departure.host.as_ref();
            let place = host.map_or(String::new(), |host| format!(" on {host}"));
            let previous = self.previous.as_ref();
            let member = previous.and_then(|previous| previous.member(process));
            let rank = member.map(|member| member.rank);
            let is_program = self.limits.holds_seats();
            let what = match rank {
                Some(rank) if is_program => format!("rank {rank}{place}: {loss}"),
                None if is_program => format!("a new worker{place}: {loss}"),
                _ => format!("{process}{place}: {loss}"),
            };
            let (is_failure, may_blame) = loss.is_failure();
            if is_failure {
                let blamed = host.filter(|_| may_blame);
                let since = departure.since;
                self.budget.failed(now, &self.limits, since, blamed, &what);
                // A new worker that fails before it is a member.
                if is_program && rank.is_none() {
                    self.budget.fell(now, Duration::ZERO);
                }
            }
            if let Some(rank) = rank {
                lost.push(rank);
                cause.get_or_insert_with(|| {
                    if is_program {
                        what
                    } else {
                        format!("rank {rank} is lost: {what}")
                    }
                });
            }
        }
        let Some(cause) = cause else {
            return;
        };
        // While a generation is on its way, the one before is over for all who get it.
        let (None, Some(previous)) = (&self.formation, &self.previous) else {
            return;
        };
        // All have heard of the first loss, and the next generation tells of the others.
        if self.gathers_losses(now).is_some() {
            return;
        }
        let generation = previous.number();
        self.budget.idle(now, &cause);
        self.actions.push(Action::Revoke {
            generation,
            lost,
            cause,
        });
    }

    /// Gives up what is late to start, and to end.
    pub(super) fn expire(&mut self, now: Instant) {
        self.expire_ends(now);
        let timeout = self.limits.start_timeout;
        while let Some(seat) = self
            .first_booting()
            .filter(|seat| now >= seat.since + timeout)
        {
            let (process, timeout) = (seat.process(), Span(timeout));
            let why = format!("not ready within the start timeout of {timeout}");
            self.give_up(now, process, Loss::Late(why));
        }
    }

    pub(super) fn first_booting(&self) -> Option<&Seat> {
        self.roster.in_state(State::Booting).next()
    }

    /// Sends away what leaves and is in no generation.
    pub(super) fn dismiss(&mut self, now: Instant) {
        if !self.roster.is_draining() {
            return;
        }
        self.roster.let_go(now);
        let forming = self.formation.as_ref().map(Formation::generation);
        let generations = [self.previous.as_ref(), forming];
        let is_member = |process| {
            let mut generations = generations.into_iter().flatten();
            generations.any(|generation| generation.member(process).is_some())
        };
        let leaving: Vec<(Process, String)> = [State::Booting, State::Ready, State::Active]
            .into_iter()
            .flat_map(|state| self.roster.in_state(state))
            .filter(|seat| seat.leaving && !is_member(seat.process()))
            .map(|seat| (seat.process(), self.roster.drain_reason(seat).to_owned()))
            .collect();
        for (process, why) in leaving {
            self.give_up(now, process, Loss::Left(why));
        }
    }

    /// Starts processes in seats that nodes hold, and looks for nodes for the others.
    pub(super) fn ask(&mut self, now: Instant, purpose: Purpose, count: usize) {
        // A seat that is held gets its process with a generation.
        let held: Vec<Slot> = if self.limits.holds_seats() {
            Vec::new()
        } else {
            let units = Units::new(now, &self.roster, &self.limits, &self.budget);
            units.startable(count).collect()
        };
        let rest = count - held.len();
        for slot in held {
            self.roster.boot(now, slot);
            self.start(slot);
        }
        if rest > 0 {
            let cooling = self.budget.cooling(now);
            self.actions.push(Action::Reserve {
                slots: self
                    .roster
                    .reserve(now, rest, self.limits.per_host, &cooling),
                purpose,
                avoid: cooling.into_iter().collect(),
            });
        }
    }
}
