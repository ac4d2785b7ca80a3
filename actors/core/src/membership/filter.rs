//! Filters: which sizes and shapes of a group are wanted.

use std::collections::BTreeMap;

use kolo_wire::GroupFilter;

use super::seat::{Host, Seat};

/// Leaves seats out until the filter is met, the last ones first, and changes no order.
fn leave_out(filter: GroupFilter, seats: &mut Vec<&Seat>) {
    let count = filter.count().max(1) as usize;
    match filter {
        GroupFilter::DivisibleBy(_) => seats.truncate(seats.len() - seats.len() % count),
        GroupFilter::Max(_) => seats.truncate(count),
        GroupFilter::WholeHosts(_) => {
            let mut there: BTreeMap<Option<&Host>, usize> = BTreeMap::new();
            for seat in seats.iter() {
                *there.entry(seat.host()).or_default() += 1;
            }
            let mut taken: BTreeMap<Option<&Host>, usize> = BTreeMap::new();
            seats.retain(|seat| {
                let taken = taken.entry(seat.host()).or_default();
                *taken += 1;
                there[&seat.host()] >= count && *taken <= count
            });
        }
    }
}

/// Applies filters in order, again and again until no filter leaves out more. The result meets all of them.
///
/// `seats` are in rank order, and so is the result.
#[must_use]
pub(super) fn apply<'a>(filters: &[GroupFilter], mut seats: Vec<&'a Seat>) -> Vec<&'a Seat> {
    loop {
        let before = seats.len();
        for filter in filters {
            leave_out(*filter, &mut seats);
        }
        if seats.len() == before {
            return seats;
        }
    }
}

/// Some number of members passes the filters, on hosts that are as large as is needed.
#[must_use]
pub(super) fn has_size(filters: &[GroupFilter], mut sizes: impl Iterator<Item = u32>) -> bool {
    sizes.any(|size| filters.iter().all(|filter| filter.passes(size)))
}
