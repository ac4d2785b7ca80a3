//! How many processes and how much room a job wants.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Instant;

use kolo_wire::ids::Slot;

use super::{Choice, Decision, Process, Purpose, Seat, State, Units, View, decision};

impl View<'_> {
    /// Processes that stay, and those that are on their way, as far as they are of use. Where seats are held: seats.
    fn have(&self) -> usize {
        if self.limits.holds_seats() {
            return self.usable();
        }
        let stranded = self.units.as_ref().map_or(0, |units| units.stranded.len());
        self.roster.staying() - stranded
    }

    /// How many more processes are needed for so many.
    fn needed(&self, wanted: usize) -> usize {
        match &self.units {
            Some(units) => units.needed(self.limits.per_host, self.have(), wanted),
            None => wanted.saturating_sub(self.have()),
        }
    }

    /// More processes, if the job wants some and may get some.
    pub(super) fn ask(&self) -> Option<Decision> {
        if self.roster.count(State::Returned) > 0 || !self.budget.has_resets(self.limits) {
            return None;
        }
        let have = self.have();
        let max = self.limits.max as usize;
        let has_lost = || self.roster.count(State::Lost) + self.roster.leaving() > 0;
        let (wanted, purpose) = if have >= max {
            (self.limits.all(), Purpose::Spare)
        } else if has_lost() {
            (max, Purpose::Replace)
        } else {
            (max, Purpose::Grow)
        };
        let missing = self.needed(wanted);
        // After a refusal only seats that are held already, until a host has cooled down or somebody offers room.
        let has_room = self
            .roster
            .refused()
            .is_none_or(|at| self.budget.has_warmed(at, self.now));
        let count = if has_room || missing == 0 {
            missing
        } else if self.limits.holds_seats() {
            0
        } else {
            let units = Units::new(self.now, self.roster, self.limits, self.budget);
            units.startable(missing).count()
        };
        if count == 0 {
            return None;
        }
        let wish = match purpose {
            Purpose::Grow => format!("grow to {max}"),
            Purpose::Replace => format!("replace what is lost or leaves, up to {max}"),
            Purpose::Spare => format!("have spares, {} in all", self.limits.spares),
        };
        Some(decision(
            Choice::Ask { purpose, count },
            format!("processes there or on their way: {have}; {count} more to {wish}"),
        ))
    }

    /// Processes that nobody needs: there are more than members and spares, or they can't be in a group where they are. Looked for
    /// while a group is active. The youngest go first, and none of a unit that has members.
    pub(super) fn surplus(&self) -> Option<Decision> {
        let there = self.have() - self.roster.count(State::Reserving);
        let mut more = there.saturating_sub(self.limits.all());
        let stranded = self.units.iter().flat_map(|units| &units.stranded);
        let mut gone: Vec<Process> = stranded.copied().collect();
        gone.retain(|process| {
            self.previous
                .is_none_or(|last| last.member(*process).is_none())
        });
        if more > 0 {
            let unit = |seat: &Seat| seat.slot.0 / self.limits.per_host;
            let states = [State::Booting, State::Ready];
            let seats = states
                .into_iter()
                .flat_map(|state| self.roster.in_state(state));
            let mut idle: BTreeMap<u32, (Instant, Vec<Process>)> = BTreeMap::new();
            for seat in seats.filter(|seat| !seat.leaving && !gone.contains(&seat.process())) {
                let entry = idle.entry(unit(seat)).or_insert((seat.since, Vec::new()));
                entry.0 = entry.0.max(seat.since);
                entry.1.push(seat.process());
            }
            for seat in self.roster.in_state(State::Active) {
                idle.remove(&unit(seat));
            }
            let mut idle: Vec<_> = idle.into_iter().collect();
            idle.sort_by_key(|(unit, (since, _))| Reverse((*since, *unit)));
            for (_, (_, processes)) in idle {
                if processes.len() <= more {
                    more -= processes.len();
                    gone.extend(processes);
                }
            }
        }
        if gone.is_empty() {
            return None;
        }
        let reason = format!(
            "processes that nobody needs end: {}; members and spares are {} at most",
            gone.len(),
            self.limits.all()
        );
        Some(decision(Choice::Dismiss(gone), reason))
    }

    /// Room that is booked for lost processes and not needed any more. Looked for while a group is active. Whole nodes that are
    /// left are given back by other means.
    pub(super) fn booked(&self) -> Option<Decision> {
        if self.roster.count(State::Returned) > 0 {
            return None;
        }
        let has_resets = self.budget.has_resets(self.limits);
        let needed = if has_resets {
            self.needed(self.limits.all())
        } else {
            0
        };
        if self.roster.count(State::Lost) <= needed {
            return None;
        }
        let is_booked = |slot: &Slot| {
            let seat = self.roster.seat(*slot);
            seat.is_some_and(|seat| {
                let has_ended = !self.roster.is_unseen(seat.process());
                seat.location.is_some() && !seat.leaving && has_ended
            })
        };
        let slots: Vec<Slot> = if has_resets {
            // As a whole, so that they stay units.
            let units = Units::new(self.now, self.roster, self.limits, self.budget);
            let idle = units.idle(needed).chunks(self.limits.per_host as usize);
            let idle = idle.filter(|unit| unit.iter().all(is_booked));
            idle.flatten().copied().collect()
        } else {
            // No process is started any more.
            let lost = self.roster.in_state(State::Lost).map(|seat| seat.slot);
            lost.filter(is_booked).collect()
        };
        if slots.is_empty() {
            return None;
        }
        let reason = format!("room of lost processes that nobody needs: {}", slots.len());
        Some(decision(Choice::GiveBack(slots), reason))
    }
}
