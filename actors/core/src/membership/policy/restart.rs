//! The policy for a group that is started anew at each change, as torchelastic's agents do.

use std::time::Instant;

use kolo_wire::counted::Counted;
use kolo_wire::ids::Slot;

use super::super::end::End;
use super::super::seat::{Seat, State};
use super::{Choice, Decision, View, decision, form};

impl<'a> View<'a> {
    /// What is to be done.
    ///
    /// The rules:
    /// - A failure, a lost node, a node that leaves, and room for more: each stops the whole group at once. There is no safe point.
    /// - Once a member has returned, nothing but a loss stops the others.
    /// - The next group is formed when no process is left that could be seen, and none unseen for certain.
    /// - A failure uses up a restart. Without one left the job ends.
    pub(super) fn anew(&self) -> Decision {
        if let Some(end) = self.end_anew() {
            return end;
        }
        if let Some(ask) = self.ask() {
            return ask;
        }
        match self.budget.idle_since() {
            Some(since) => self.start_anew(since),
            None => self.room_left().unwrap_or_else(|| self.change_anew()),
        }
    }

    fn end_anew(&self) -> Option<Decision> {
        let end = |how, reason: String| Some(decision(Choice::End(how), reason));
        let is_idle = self.budget.idle_since().is_some();
        let returned = self.roster.count(State::Returned);
        if !is_idle && returned > 0 && self.roster.count(State::Active) == 0 {
            let reason = format!("all workers have returned: {returned}");
            return end(End::Succeeded, reason);
        }
        if let Some((how, reason)) = self.budget.exceeded(self.now, self.limits) {
            return end(how, reason);
        }
        if is_idle && self.budget.has_formed() && !self.budget.has_resets(self.limits) {
            let (resets, why) = (self.budget.resets(), self.budget.idle_why());
            let reason = format!(
                "changes of the membership: {resets}, which is the limit (--reset-limit), and {why}"
            );
            return end(End::ResetLimit, reason);
        }
        None
    }

    /// Seats that this group or the next one can use, those included that nodes are asked for. Whole units count.
    pub(super) fn usable(&self) -> usize {
        let cooling = self.budget.cooling(self.now);
        let is_warm = |seat: &Seat| seat.host().is_none_or(|host| !cooling.contains(host));
        let is_of_use = |seat: &Seat| match seat.state {
            State::Reserving => true,
            State::Held => !seat.leaving && is_warm(seat),
            State::Booting | State::Ready | State::Active | State::Stopping => !seat.leaving,
            State::Vacant | State::Returned | State::Lost => false,
        };
        let unit = self.limits.per_host as usize;
        let units = self.roster.seats().chunks(unit);
        units.filter(|unit| unit.iter().all(is_of_use)).count() * unit
    }

    /// Seats in which a process may be started now.
    pub(super) fn startable(&self) -> impl Iterator<Item = &'a Seat> {
        let cooling = self.budget.cooling(self.now);
        let held = self.roster.in_state(State::Held);
        held.filter(move |seat| {
            !seat.leaving && seat.host().is_none_or(|host| !cooling.contains(host))
        })
    }

    /// No group runs: wait for the end of the last one, and start the next.
    fn start_anew(&self, since: Instant) -> Decision {
        let stopping = self.roster.count(State::Stopping);
        if stopping > 0 {
            // Each has a deadline of its own.
            let why = self.budget.idle_why();
            let reason =
                format!("the group is stopped, and is started anew when all have ended: {why}");
            return decision(Choice::Keep, reason);
        }
        let deadline = since + self.limits.start_timeout;
        if let Some(wait) = self.wait_for_unseen(0, deadline) {
            return wait;
        }
        let ready = self.startable().count();
        let best = self.shaped(self.startable());
        if best.len() < self.limits.min as usize {
            let room = self.give_way();
            return room.unwrap_or_else(|| self.too_few(ready, deadline));
        }
        if let Some(wait) = self.gather_room(best.len(), deadline) {
            return wait;
        }
        if let Some(end) = self.budget.pause(self.now) {
            let why = self.budget.idle_why();
            return decision(
                Choice::WaitUntil(end),
                format!(
                    "groups have ended soon after their start, and the next one is started after a pause: {why}"
                ),
            );
        }
        decision(form(&best), self.cause_anew(best.len()))
    }

    /// Hosts that are asked for room may join a group of this size.
    pub(super) fn gather_room(&self, size: usize, deadline: Instant) -> Option<Decision> {
        let first = self.startable().map(|seat| seat.since).min();
        let why = "enough hosts have room, others are asked and may join";
        self.gather(first, size, deadline, why)
    }

    /// Gives back the room of all seats in which there is no process.
    fn give_back(&self, why: impl FnOnce(usize) -> String) -> Option<Decision> {
        let held = self.roster.in_state(State::Held);
        let slots: Vec<Slot> = held.map(|seat| seat.slot).collect();
        let reason = why(slots.len());
        (!slots.is_empty()).then(|| decision(Choice::GiveBack(slots), reason))
    }

    /// Room for too few, for which another job waits.
    fn give_way(&self) -> Option<Decision> {
        if !self.roster.is_contended() || self.roster.count(State::Reserving) > 0 {
            return None;
        }
        self.give_back(|room| {
            format!(
                "room for {}, fewer than the job needs, is given back: other jobs wait for room",
                Counted(room, "worker")
            )
        })
    }

    /// Room that the group does not use: others have replaced processes whose end was seen late, or it may not change any more.
    pub(super) fn room_left(&self) -> Option<Decision> {
        if !self.budget.has_resets(self.limits) {
            return self.give_back(|room| {
                format!("room that a group does not need which may not change any more: {room}")
            });
        }
        let is_full = self.members().len() >= self.limits.max as usize;
        if !is_full || self.roster.leaving() > 0 || self.roster.count(State::Returned) > 0 {
            return None;
        }
        self.give_back(|room| format!("room that a full group does not need: {room}"))
    }

    /// Nothing is changed any more: members have returned, or no change is left.
    pub(super) fn settled(&self, who: &str, limit: &str) -> Option<Decision> {
        let members = self.members().len();
        let returned = self.roster.count(State::Returned);
        let reason = if returned > 0 {
            format!("{who} that have returned: {returned} of {members}")
        } else if !self.budget.has_resets(self.limits) {
            format!("{who}: {members}; the limit of changes is reached ({limit})")
        } else {
            return None;
        };
        Some(decision(Choice::Keep, reason))
    }

    /// The best group that there could be with seats that are held, if it is better than the one that runs, or some of that leave.
    /// Others that may join are waited for.
    pub(super) fn better(&self, who: &str, leaving: usize) -> Result<Vec<&'a Seat>, Decision> {
        let members = self.members().len();
        let keep = |reason: String| Err(decision(Choice::Keep, reason));
        let max = self.limits.max as usize;
        if leaving == 0 && (members >= max || self.roster.count(State::Held) == 0) {
            return keep(format!("{who}: {members} of at most {max}"));
        }
        let best = self.best_planned();
        if best.len() < self.limits.min as usize || (leaving == 0 && best.len() <= members) {
            return keep(format!(
                "{who}: {members}; nobody could replace or join them"
            ));
        }
        let new = best.iter().filter(|seat| !seat.state.is_live());
        let window = self.window(new.map(|seat| seat.since).min(), best.len());
        if let Some(end) = window.filter(|_| leaving == 0) {
            let could = best.len();
            return Err(decision(
                Choice::WaitUntil(end),
                format!("{who}: {members}, could be {could}; others are asked and may join, too"),
            ));
        }
        Ok(best)
    }

    /// A group runs: keep it, or stop it for a change.
    fn change_anew(&self) -> Decision {
        if let Some(keep) = self.settled("workers", "--reset-limit") {
            return keep;
        }
        if let Err(keep) = self.better("workers", self.roster.leaving()) {
            return keep;
        }
        let leaves = self
            .roster
            .in_state(State::Active)
            .find(|seat| seat.leaving);
        let why = match (leaves, leaves.and_then(Seat::host)) {
            (Some(seat), Some(host)) => {
                format!("{host} leaves: {}", self.roster.drain_reason(seat))
            }
            _ => "there is room for more".to_owned(),
        };
        decision(Choice::Restart, why)
    }

    /// Why the next group is of this size.
    fn cause_anew(&self, size: usize) -> String {
        let members = self.members().len();
        if members == 0 {
            return match size {
                1 => "the first worker".to_owned(),
                _ => format!("the first {size} workers"),
            };
        }
        let (used, most) = (
            self.budget.without_progress(),
            self.limits.restarts_without_progress,
        );
        let why = self.budget.idle_why();
        format!(
            "{members} -> {}, failures so far {used} of {most}: {why}",
            Counted(size, "worker")
        )
    }
}
