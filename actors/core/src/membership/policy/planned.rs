//! The policy for a group whose survivors go on, and whose new processes are started with their ranks.

use std::time::Instant;

use kolo_wire::ids::Slot;

use super::super::generation::Generation;
use super::super::seat::{Process, Seat, State};
use super::{Choice, Decision, View, decision, form};

impl<'a> View<'a> {
    /// What is to be done, unless the job ends or asks for room.
    ///
    /// The rules:
    /// - Survivors of a loss go on at once. Nobody waits for new processes, unless too few are left.
    /// - One group at a time has new processes on their way. They start while the members work. When all of them are ready the members
    ///   hold, and the group is formed as it was planned.
    /// - A loss on the way makes the plan void: the ranks have changed. Its new processes end, and another group is planned.
    pub(super) fn planned(&self) -> Decision {
        if let Some(plan) = self.plan.filter(|plan| !self.is_sound(plan)) {
            let reason = format!(
                "a group of {} can't be formed as it was planned",
                plan.members().len()
            );
            return decision(Choice::Cancel, reason);
        }
        if let Some(strays) = self.strays() {
            return strays;
        }
        match self.budget.idle_since() {
            Some(since) => self.form_planned(since),
            None => self.room_left().unwrap_or_else(|| self.change_planned()),
        }
    }

    /// All that the plan counts on is there or on its way, and each member that stays is in it.
    fn is_sound(&self, plan: &Generation) -> bool {
        let is_there = |process: Process| {
            let seat = self.roster.seat(process.slot);
            seat.is_some_and(|seat| {
                seat.process() == process && seat.state.is_there() && !seat.leaving
            })
        };
        let mut members = plan.members().iter().map(|member| member.process);
        let mut staying = self.candidates().filter(|seat| !seat.leaving);
        members.all(is_there) && staying.all(|seat| plan.member(seat.process()).is_some())
    }

    /// Processes that are in no group, as no rule lets them into one.
    fn strays(&self) -> Option<Decision> {
        let is_wanted = |process| {
            let mut groups = [self.previous, self.plan].into_iter().flatten();
            groups.any(|group| group.member(process).is_some())
        };
        let ready = self.roster.in_state(State::Ready).map(Seat::process);
        let strays: Vec<Process> = ready.filter(|process| !is_wanted(*process)).collect();
        let reason = format!("processes that are in no group end: {}", strays.len());
        (!strays.is_empty()).then(|| decision(Choice::Dismiss(strays), reason))
    }

    /// The processes of a plan, once all of them are ready.
    fn ready(&self, plan: &Generation) -> Option<Vec<&'a Seat>> {
        let members = plan.members().iter();
        let seats = members.map(|member| {
            let is_live = self.roster.is_live(member.process);
            self.roster.seat(member.process.slot).filter(|_| is_live)
        });
        seats.collect()
    }

    /// No other group is planned while processes are on their way, or end. Each has a deadline of its own.
    fn wait_to_plan(&self) -> Option<Decision> {
        let reason = match self.plan {
            Some(plan) => format!("processes start for a group of {}", plan.members().len()),
            None if self.roster.count(State::Stopping) > 0 => {
                "processes end that were started for a group that can't be formed any more"
                    .to_owned()
            }
            None => return None,
        };
        Some(decision(Choice::Keep, reason))
    }

    /// The seats of the best group there could be, in rank order: members that stay, and held seats.
    pub(super) fn best_planned(&self) -> Vec<&'a Seat> {
        let staying = self.candidates().filter(|seat| !seat.leaving);
        self.shaped(staying.chain(self.startable()))
    }

    /// No group is active: form one, plan one, wait, or give up.
    fn form_planned(&self, since: Instant) -> Decision {
        let deadline = since + self.limits.start_timeout;
        let survivors = self.survivors();
        if let Some(wait) = self.wait_for_unseen(survivors, deadline) {
            return wait;
        }
        let planned = self.plan.and_then(|plan| self.ready(plan));
        let best = planned.or_else(|| {
            let best = self.best();
            (survivors > 0 && self.is_enough(&best)).then_some(best)
        });
        if let Some(best) = best {
            return decision(form(&best), self.cause(&best));
        }
        if let Some(wait) = self.wait_to_plan() {
            return wait;
        }
        let best = self.best_planned();
        if best.len() < self.limits.min as usize {
            return self.too_few(best.len(), deadline);
        }
        if let Some(wait) = self.gather_room(best.len(), deadline) {
            return wait;
        }
        self.plan_group(&best, self.cause(&best))
    }

    /// Plans a group, after a pause if workers have failed soon after their start.
    fn plan_group(&self, best: &[&Seat], cause: String) -> Decision {
        match self.budget.pause(self.now) {
            Some(end) => decision(
                Choice::WaitUntil(end),
                "a pause: workers have failed soon after their start",
            ),
            None => decision(Choice::Plan(slots(best)), cause),
        }
    }

    /// A group is active: keep it, plan another one, or ask it to hold for that.
    fn change_planned(&self) -> Decision {
        if let Some(keep) = self.settled("members", "reset_limit") {
            return keep;
        }
        if let Some(seats) = self.plan.and_then(|plan| self.ready(plan)) {
            return decision(Choice::Hold, self.cause(&seats));
        }
        if let Some(wait) = self.wait_to_plan() {
            return wait;
        }
        let leaving = self.candidates().filter(|seat| seat.leaving).count();
        let best = match self.better("members", leaving) {
            Ok(best) => best,
            Err(keep) => return keep,
        };
        let cause = self.cause(&best);
        if best.iter().all(|seat| seat.state.is_live()) {
            return decision(Choice::Hold, cause);
        }
        self.plan_group(&best, cause)
    }
}

fn slots(seats: &[&Seat]) -> Vec<Slot> {
    seats.iter().map(|seat| seat.slot).collect()
}
