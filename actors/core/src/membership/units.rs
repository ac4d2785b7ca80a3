//! Units: a job may take room in units of several seats, each on a node of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use kolo_wire::ids::Slot;

use super::budget::Budget;
use super::limits::Limits;
use super::roster::Roster;
use super::seat::{Process, Seat, State};

/// Cuts seats down to at most `most`, in whole units: those whose first seats come first. The order stays.
pub(super) fn whole<'a>(unit: u32, most: u32, mut seats: Vec<&'a Seat>) -> Vec<&'a Seat> {
    let most = most as usize;
    if unit <= 1 {
        seats.truncate(most);
        return seats;
    }
    let mut there: BTreeMap<u32, usize> = BTreeMap::new();
    for seat in &seats {
        *there.entry(seat.slot.0 / unit).or_default() += 1;
    }
    let unit_of = |seat: &&'a Seat| seat.slot.0 / unit;
    let mut taken = BTreeSet::new();
    for number in seats.iter().map(unit_of) {
        let is_whole = there.get(&number) == Some(&(unit as usize));
        if is_whole && (taken.len() + 1) * unit as usize <= most {
            taken.insert(number);
        }
    }
    seats.retain(|seat| taken.contains(&unit_of(seat)));
    seats
}

/// The units in which processes are lost, by their use.
#[derive(Debug, Default)]
pub(super) struct Units {
    /// Units that lack processes which can be started at once, and the processes that are there.
    partial: usize,
    there: usize,
    /// The seats that they lack.
    missing: Vec<Slot>,
    /// Processes of units that lack others which can't be started there now, or of which there are enough.
    pub(super) stranded: Vec<Process>,
    /// Seats of units without any process, unit by unit: first those where processes can be started at once.
    idle: Vec<Slot>,
    /// So many of these come first.
    startable: usize,
}

impl Units {
    pub(super) fn new(now: Instant, roster: &Roster, limits: &Limits, budget: &Budget) -> Self {
        let size = limits.per_host;
        let cooling = budget.cooling(now);
        let mut lost: BTreeMap<u32, Vec<&Seat>> = BTreeMap::new();
        for seat in roster.in_state(State::Lost) {
            lost.entry(seat.slot.0 / size).or_default().push(seat);
        }
        let mut units = Self::default();
        let mut partial: Vec<(Vec<Slot>, Vec<Process>)> = Vec::new();
        let mut idle: Vec<(bool, Vec<Slot>)> = Vec::new();
        for (unit, lost) in lost {
            let is_startable = lost.iter().all(|seat| seat.is_startable(&cooling));
            let slots: Vec<Slot> = lost.iter().map(|seat| seat.slot).collect();
            if slots.len() == size as usize {
                idle.push((!is_startable, slots));
                continue;
            }
            let seats = (unit * size..(unit + 1) * size).map(Slot);
            let seats = seats.filter_map(|slot| roster.seat(slot));
            let there = seats.filter(|seat| seat.state.is_there() && !seat.leaving);
            let there: Vec<Process> = there.map(Seat::process).collect();
            if is_startable {
                partial.push((slots, there));
            } else {
                units.stranded.extend(there);
            }
        }
        // Without a group each may be of use: its processes may be the only ones that have the state.
        if budget.idle_since().is_none() {
            let there: usize = partial.iter().map(|(_, there)| there.len()).sum();
            let whole = (roster.staying() - there - units.stranded.len()) / size as usize;
            partial.sort_by_key(|(missing, _)| missing.len());
            let kept = limits.units().saturating_sub(whole).min(partial.len());
            let rest = partial.drain(kept..).flat_map(|(_, there)| there);
            units.stranded.extend(rest);
        }
        units.partial = partial.len();
        for (missing, there) in partial {
            units.there += there.len();
            units.missing.extend(missing);
        }
        idle.sort_by_key(|(is_cold, _)| *is_cold);
        let startable = idle.iter().take_while(|(is_cold, _)| !is_cold);
        units.startable = startable.map(|(_, slots)| slots.len()).sum();
        units.idle = idle.into_iter().flat_map(|(_, slots)| slots).collect();
        units
    }

    /// How many processes are to be started for `wanted` in whole units, if `have` are there or on their way and not stranded.
    pub(super) fn needed(&self, size: u32, have: usize, wanted: usize) -> usize {
        let size = size as usize;
        let units = (have - self.there) / size + self.partial;
        self.missing.len() + size * (wanted / size).saturating_sub(units)
    }

    /// The seats where up to so many processes can be started at once: first those that make a unit whole.
    pub(super) fn startable(&self, count: usize) -> impl Iterator<Item = Slot> {
        let idle = &self.idle[..self.startable];
        self.missing.iter().chain(idle).copied().take(count)
    }

    /// The seats where no process is to be started if so many are needed.
    pub(super) fn idle(&self, needed: usize) -> &[Slot] {
        let kept = needed.saturating_sub(self.missing.len());
        self.idle.get(kept..).unwrap_or_default()
    }
}
