//! The rank order of a generation.

use std::collections::BTreeMap;

use kolo_wire::ids::{NodeId, Slot};

use super::generation::Generation;
use super::seat::Seat;

/// Puts seats into the rank order of a group that is started anew: the ranks of a node follow each other, as launchers of such
/// programs have it. Nodes come in the order of [`arrange`].
#[must_use]
pub(super) fn arrange_by_node<'a>(
    previous: Option<&Generation>,
    seats: impl IntoIterator<Item = &'a Seat>,
) -> Vec<&'a Seat> {
    // A seat without a process has the place of the last one.
    let mut seats = arrange_as(previous, seats, |_| true);
    let node = |seat: &Seat| seat.location.as_ref().map(|location| location.node);
    let mut first: BTreeMap<Option<NodeId>, usize> = BTreeMap::new();
    for (position, seat) in seats.iter().enumerate() {
        first.entry(node(seat)).or_insert(position);
    }
    seats.sort_by_key(|seat| first.get(&node(seat)).copied());
    seats
}

/// Puts seats into rank order.
///
/// Members of `previous` come first, in the order of their ranks there. Ranks are always made here, so the longest-lived
/// come first and rank 0 has the state. New processes follow, node by node: nodes that have a member already in the order
/// of their first rank, then others in the order of their lowest slot; on a node in the order of slots.
///
/// Local and cross ranks follow from this order by the rules for uneven hosts.
#[must_use]
pub fn arrange<'a>(
    previous: Option<&Generation>,
    seats: impl IntoIterator<Item = &'a Seat>,
) -> Vec<&'a Seat> {
    arrange_as(previous, seats, |seat| seat.state.is_there())
}

fn arrange_as<'a>(
    previous: Option<&Generation>,
    seats: impl IntoIterator<Item = &'a Seat>,
    may_be_member: impl Fn(&Seat) -> bool,
) -> Vec<&'a Seat> {
    let rank = |seat: &Seat| {
        let previous = previous.filter(|_| may_be_member(seat));
        let member = previous.and_then(|previous| previous.member(seat.process()));
        member.map(|member| member.rank)
    };
    let (mut old, mut new): (Vec<&Seat>, Vec<&Seat>) =
        seats.into_iter().partition(|seat| rank(seat).is_some());
    old.sort_by_key(|seat| rank(seat));
    new.sort_by_key(|seat| seat.slot);
    // The position of each node: (0, first rank) with members, (1, lowest slot) without.
    let mut nodes: BTreeMap<NodeId, (u8, usize)> = BTreeMap::new();
    for (position, seat) in old.iter().enumerate() {
        if let Some(location) = &seat.location {
            nodes.entry(location.node).or_insert((0, position));
        }
    }
    for (position, seat) in new.iter().enumerate() {
        if let Some(location) = &seat.location {
            nodes.entry(location.node).or_insert((1, position));
        }
    }
    let position = |seat: &Seat| -> (Option<(u8, usize)>, Slot) {
        let node = seat.location.as_ref().map(|location| location.node);
        let node = node.and_then(|node| nodes.get(&node).copied());
        (node, seat.slot)
    };
    new.sort_by_key(|seat| position(seat));
    old.extend(new);
    old
}
