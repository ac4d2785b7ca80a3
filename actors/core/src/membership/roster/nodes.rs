//! Nodes: they are left and lost, with the seats that they hold.

use std::time::Instant;

use kolo_wire::ids::{NodeId, Slot};

use super::super::seat::{Loss, Seat, State};
use super::{Departure, Roster, Unseen};

impl Roster {
    /// A node that leaves is not to be used: its seats without a process are lost.
    pub fn let_go(&mut self, now: Instant) {
        let held = self.in_state(State::Held).filter(|seat| seat.leaving);
        for slot in held.map(|seat| seat.slot).collect::<Vec<_>>() {
            self.empty(now, slot);
        }
    }

    /// No node holds these seats any more, in which there is no process.
    pub fn vacate(&mut self, now: Instant, slots: &[Slot]) {
        for slot in slots {
            if let Some(seat) = self.seats.get_mut(slot.0 as usize) {
                seat.location = None;
                self.set(now, *slot, State::Vacant);
            }
        }
    }

    pub(super) fn node_lost(
        &mut self,
        now: Instant,
        node: NodeId,
        why: &str,
        fenced: Instant,
    ) -> Vec<Departure> {
        self.draining.remove(&node);
        for unseen in self.unseen.values_mut() {
            if unseen.node == Some(node) {
                unseen.until = Some(unseen.until.map_or(fenced, |until| until.min(fenced)));
            }
        }
        let is_there = |seat: &&Seat| {
            let location = seat.location.as_ref();
            location.is_some_and(|location| location.node == node)
        };
        let slots: Vec<Slot> = self
            .seats
            .iter()
            .filter(is_there)
            .map(|seat| seat.slot)
            .collect();
        let mut departures = Vec::new();
        for slot in slots {
            let seat = &mut self.seats[slot.0 as usize];
            if seat.state.is_there() {
                let until = Some(fenced);
                let node = Some(node);
                self.unseen.insert(seat.process(), Unseen { node, until });
                let why = why.to_owned();
                departures.push(self.lose(now, slot, Loss::Node { why, fenced }));
            }
            let seat = &mut self.seats[slot.0 as usize];
            seat.location = None;
            seat.leaving = false;
            if seat.state == State::Held {
                self.empty(now, slot);
            }
        }
        departures
    }

    pub(super) fn mark(&mut self, node: NodeId, leaving: bool) {
        for seat in &mut self.seats {
            let location = seat.location.as_ref();
            if location.is_some_and(|location| location.node == node) {
                seat.leaving = leaving;
            }
        }
    }
}
