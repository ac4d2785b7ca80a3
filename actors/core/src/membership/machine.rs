//! Roster, policy and formation, tied together.

mod doubt;
mod plan;
mod processes;
mod restart;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_wire::Kept;
use kolo_wire::ids;
use kolo_wire::span::Span;

use super::action::Action;
use super::budget::Budget;
use super::fact::Fact;
use super::formation::{Due, Formation, Outcome, REPEAT};
use super::generation::Generation;
use super::limits::{Limits, LimitsError};
use super::policy::{Choice, decide};
use super::roster::{Roster, Stale};
use super::seat::{Loss, Process, Seat, State};
use doubt::Doubts;

/// The membership of one job. It has one field more than fifteen: the roster, the policy's memory and the formation are types of their
/// own, and the rest belongs to the job.
#[derive(Debug, Clone)]
pub struct Membership {
    limits: Limits,
    roster: Roster,
    budget: Budget,
    /// The number of the last generation that was published.
    last: ids::Generation,
    /// The generation in which the job began. It begins anew if all members are lost before the first commit.
    began: ids::Generation,
    /// The last generation that was active, or the first one that was given up. Without the members of which a later
    /// attempt makes it uncertain that they have the state.
    previous: Option<Arc<Generation>>,
    formation: Option<Formation>,
    /// A process of a group that is started anew has failed. It counts when nothing of the group is left: until then a lost node may
    /// turn out to be behind it.
    failed: Option<restart::Failure>,
    /// The group is started anew for this reason, when all facts of the step are known.
    broken: Option<String>,
    /// The generation for which processes were started: see [`Limits::is_planned`].
    plan: Option<Arc<Generation>>,
    /// Members were asked to hold. When to ask again, and why.
    hold: Option<(Instant, String)>,
    doubts: Doubts,
    /// The reason that was told last.
    told: String,
    woken_at: Option<Instant>,
    has_ended: bool,
    actions: Vec<Action>,
}

impl Membership {
    /// The membership of a new job, and the first things to do. `seed` is random.
    ///
    /// # Errors
    ///
    /// [`LimitsError`] if the limits make no sense.
    pub fn new(
        now: Instant,
        limits: Limits,
        seed: u64,
    ) -> Result<(Self, Vec<Action>), LimitsError> {
        limits.check()?;
        let mut membership = Self {
            roster: Roster::new(limits.on_change),
            limits,
            budget: Budget::new(now, seed),
            last: ids::Generation(0),
            began: ids::Generation(0),
            previous: None,
            formation: None,
            failed: None,
            broken: None,
            plan: None,
            hold: None,
            doubts: Doubts::default(),
            told: String::new(),
            woken_at: None,
            has_ended: false,
            actions: Vec::new(),
        };
        let actions = membership.step(now, []);
        Ok((membership, actions))
    }

    /// What to do now that this has happened. Facts that come together are best given together: nodes that are lost at the same
    /// time are one change then, and not one for each.
    pub fn step(&mut self, now: Instant, facts: impl IntoIterator<Item = Fact>) -> Vec<Action> {
        if !self.has_ended {
            let stopping = self.roster.count(State::Stopping);
            for fact in facts {
                self.take(now, &fact);
            }
            self.expire(now);
            if let Some(cause) = self.broken.take() {
                self.restart(now, &cause);
            }
            if stopping > 0 && self.roster.count(State::Stopping) == 0 {
                self.budget.emptied(now);
            }
            self.count_failure(now);
            self.resolve_doubt(now);
            self.proceed(now);
        }
        std::mem::take(&mut self.actions)
    }

    /// The seats.
    #[must_use]
    pub fn roster(&self) -> &Roster {
        &self.roster
    }

    /// What is used up of the limits.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// The generation that is active. Nothing while a change is under way.
    #[must_use]
    pub fn active(&self) -> Option<&Arc<Generation>> {
        let is_active = self.budget.idle_since().is_none();
        self.previous.as_ref().filter(|_| is_active)
    }

    fn take(&mut self, now: Instant, fact: &Fact) {
        match self.roster.take(now, fact) {
            Ok(departures) => self.departed(now, departures),
            Err(Stale(what)) => {
                return self.actions.push(Action::Tell(format!("ignored: {what}")));
            }
        }
        match fact {
            Fact::Reserved { slot, .. } => self.start(*slot),
            Fact::Explained { why } => {
                if let Some(failed) = &mut self.failed {
                    failed.what.clone_from(why);
                }
                match &mut self.broken {
                    Some(broken) => broken.clone_from(why),
                    None => self.budget.explained(why),
                }
            }
            Fact::Unhealthy { host, why } => self.budget.unhealthy(now, &self.limits, host, why),
            // One that runs is in the generation that it was started for.
            Fact::Ready { process, .. } if self.limits.starts_anew() => {
                if let Some(formation) = &mut self.formation {
                    formation.taken(formation.generation().number(), *process);
                }
            }
            Fact::Acknowledged {
                generation,
                process,
            } => {
                if let Some(formation) = &mut self.formation {
                    formation.taken(*generation, *process);
                }
            }
            Fact::Committed {
                generation,
                commit,
                kept,
            } => {
                // Nothing is lost with the state that a job begins with.
                if *kept == Kept::Received && self.budget.commit().is_none() {
                    self.taken(*generation);
                } else {
                    self.committed(*generation, *commit, *kept);
                }
            }
            Fact::Broken {
                generation,
                culprit,
                why,
            } => {
                let active = self.active().map(Arc::clone);
                let active = active.filter(|active| active.number() == *generation);
                if let Some(active) = active {
                    self.doubts.add(now, &active, *culprit, why);
                }
            }
            Fact::Holding { generation, commit } => {
                if let Some(commit) = commit {
                    self.committed(*generation, *commit, Kept::Received);
                }
                let holds = self
                    .active()
                    .is_some_and(|active| active.number() == *generation);
                if holds {
                    self.budget.idle(now, "its members hold");
                    // They hold because none of them could go on.
                    if let Some(why) = self.doubts.hold(*generation) {
                        self.budget.broke(&why);
                    }
                }
            }
            _ => {}
        }
    }

    /// All members of a generation have a commit, so all of them have taken it.
    fn taken(&mut self, generation: ids::Generation) {
        if let Some(formation) = &mut self.formation {
            formation.committed(generation);
        }
    }

    fn committed(&mut self, generation: ids::Generation, commit: u64, kept: Kept) {
        self.taken(generation);
        // The word of a commit may come late, and of a generation that was given up: all its members have committed.
        if (self.began..=self.last).contains(&generation) {
            self.budget.committed(generation, commit, kept);
            self.doubts.forgive();
        }
    }

    /// Gives up the generation in which a member can't go on.
    fn resolve_doubt(&mut self, now: Instant) {
        let active = self.active().map(Arc::clone);
        let due = self.doubts.due(now, active.as_deref());
        let (Some(active), Some((why, culprit))) = (active, due) else {
            return;
        };
        let generation = active.number();
        self.budget.idle(now, &why);
        self.budget.broke(&why);
        let given_up = format!("generation {generation} is given up: {why}");
        self.actions.push(Action::Tell(given_up));
        self.actions.push(Action::Revoke {
            generation,
            lost: Vec::new(),
            cause: why.clone(),
        });
        if let Some(process) = culprit {
            self.give_up(now, process, Loss::Late(why));
        }
    }

    /// Decides and acts until there is nothing to do before something happens.
    fn proceed(&mut self, now: Instant) {
        let next = loop {
            self.dismiss(now);
            let Some(formation) = &mut self.formation else {
                if let Some(until) = self.gathers_losses(now) {
                    break Some(until);
                }
                match self.decide(now) {
                    ControlFlow::Break(next) => break next,
                    ControlFlow::Continue(()) => continue,
                }
            };
            match formation.outcome() {
                Outcome::Whole => self.activate(now),
                Outcome::Broken => self.abandon(now),
                Outcome::Waiting => match formation.due(now) {
                    Due::Publish(to) => {
                        let generation = Arc::clone(formation.generation());
                        self.actions.push(Action::Publish { generation, to });
                        self.new_have_taken();
                    }
                    Due::Late(late) => {
                        let number = formation.generation().number();
                        let limit = Span(self.limits.ack_timeout);
                        for process in late {
                            let why = format!("did not take generation {number} within {limit}");
                            self.give_up(now, process, Loss::Late(why));
                        }
                    }
                    Due::Nothing(next) => break Some(next),
                },
            }
        };
        if !self.has_ended {
            self.wake(now, next);
        }
    }

    /// The nodes of a large group are seldom lost one by one, and each generation costs as much as the group is large. So a
    /// microsecond for each member goes by before the next one is decided.
    fn gathers_losses(&self, now: Instant) -> Option<Instant> {
        const LARGE: usize = 1000;
        let members = self.previous.as_ref()?.members().len();
        let until = self.budget.idle_since()? + Duration::from_micros(members as u64);
        (members >= LARGE && now < until).then_some(until)
    }

    /// Asks the policy and does what it says. It breaks if nothing is left to do now, with the time of the next look.
    fn decide(&mut self, now: Instant) -> ControlFlow<Option<Instant>> {
        let previous = self.previous.as_deref();
        let plan = self.plan.as_deref();
        let decision = decide(
            now,
            &self.roster,
            &self.limits,
            &self.budget,
            previous,
            plan,
        );
        if decision.reason != self.told {
            self.told.clone_from(&decision.reason);
            self.actions.push(Action::Tell(decision.reason.clone()));
        }
        match decision.choice {
            Choice::Keep => ControlFlow::Break(None),
            Choice::WaitUntil(next) => ControlFlow::Break(Some(next)),
            Choice::Ask { purpose, count } => {
                self.ask(now, purpose, count);
                ControlFlow::Continue(())
            }
            Choice::Dismiss(processes) => {
                for process in processes {
                    self.give_up(now, process, Loss::Left(decision.reason.clone()));
                }
                ControlFlow::Continue(())
            }
            Choice::GiveBack(slots) => {
                self.roster.vacate(now, &slots);
                self.actions.push(Action::GiveBack { slots });
                ControlFlow::Continue(())
            }
            Choice::Hold => {
                self.hold.get_or_insert((now, decision.reason));
                ControlFlow::Break(None)
            }
            Choice::Plan(seats) => {
                self.plan(now, &seats, decision.reason);
                ControlFlow::Continue(())
            }
            Choice::Cancel => {
                self.cancel(now, &decision.reason);
                ControlFlow::Continue(())
            }
            Choice::Restart => {
                self.restart(now, &decision.reason);
                ControlFlow::Continue(())
            }
            Choice::Form(processes) => {
                self.form(now, &processes, decision.reason);
                ControlFlow::Continue(())
            }
            Choice::End(how) => {
                self.has_ended = true;
                let why = decision.reason;
                self.actions.push(Action::End { how, why });
                ControlFlow::Break(None)
            }
        }
    }

    fn form(&mut self, now: Instant, processes: &[Process], cause: String) {
        self.last = ids::Generation(self.last.0 + 1);
        let mut timeout = self.limits.ack_timeout;
        if self.limits.starts_anew() {
            timeout = self.limits.start_timeout;
            for process in processes {
                self.roster.boot(now, process.slot);
            }
        }
        let seats = processes
            .iter()
            .filter_map(|process| self.roster.seat(process.slot));
        let previous = self.previous.as_deref();
        let is_old =
            |process: &Process| previous.is_some_and(|last| last.member(*process).is_some());
        if self.budget.commit().is_none() && !processes.iter().any(is_old) {
            self.began = self.last;
        }
        let generation = Arc::new(Generation::new(
            self.last,
            cause,
            seats,
            previous,
            self.budget.committed_in(),
        ));
        // Whoever may be in an older generation is told, those that an attempt in between has left out included.
        let is_old = |seat: &&Seat| {
            let was_there = previous.is_some_and(|last| last.member(seat.process()).is_some());
            seat.state == State::Active || was_there
        };
        let old = self.roster.live().filter(is_old).map(Seat::process);
        self.formation = Some(Formation::new(now, generation, old, timeout));
    }

    fn activate(&mut self, now: Instant) {
        let Some(formation) = self.formation.take() else {
            return;
        };
        let generation = Arc::clone(formation.generation());
        self.roster.activate(now, &generation);
        self.realised(&generation);
        self.budget.formed(generation.needs_restore());
        self.hold = None;
        self.previous = Some(Arc::clone(&generation));
        self.actions.push(Action::Active(generation));
    }

    /// Gives up the generation that is on its way. Perhaps all its members had taken it, and went on (E-1): from now on only
    /// those of the members before that were in it count as having the state.
    fn abandon(&mut self, now: Instant) {
        if self.limits.starts_anew() {
            let cause = self.formation.as_ref().map(|formation| formation.lost().1);
            let cause = cause.unwrap_or_default().to_owned();
            return self.restart(now, &cause);
        }
        let Some(formation) = self.formation.take() else {
            return;
        };
        let attempt = formation.generation();
        let (lost, cause) = formation.lost();
        self.actions.push(Action::Revoke {
            generation: attempt.number(),
            lost: lost.to_vec(),
            cause: cause.to_owned(),
        });
        if self.limits.is_planned() {
            // Nobody goes on before the generation is active.
            return;
        }
        let narrowed = self
            .previous
            .as_ref()
            .map(|previous| previous.narrowed(attempt));
        self.previous = match narrowed {
            Some(previous) if !previous.members().is_empty() => Some(Arc::new(previous)),
            _ => Some(Arc::clone(attempt)),
        };
    }

    /// Asks members to hold, and asks to be woken at the first time at which something is to be done.
    fn wake(&mut self, now: Instant, next: Option<Instant>) {
        let mut times: Vec<Instant> = next.into_iter().collect();
        times.extend(self.doubts.until());
        if self.budget.idle_since().is_some() {
            self.hold = None;
        }
        if let (Some((at, why)), Some(previous)) = (&mut self.hold, &self.previous) {
            if now >= *at {
                *at = now + REPEAT;
                let (generation, why) = (previous.number(), why.clone());
                self.actions.push(Action::Hold { generation, why });
            }
            times.push(*at);
        }
        times.extend(self.first_end().map(|(_, by)| by));
        times.extend(
            self.first_booting()
                .map(|seat| seat.since + self.limits.start_timeout),
        );
        if self.roster.refused().is_some() || self.limits.per_host > 1 {
            times.extend(self.budget.next_warm(now));
        }
        let first = times.into_iter().min();
        if let Some(at) = first.filter(|_| first != self.woken_at) {
            self.actions.push(Action::Wake(at));
        }
        self.woken_at = first;
    }
}
