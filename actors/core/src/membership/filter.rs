//! Filters: which sizes and shapes of a group are wanted.

use std::collections::BTreeMap;
use std::fmt;

use super::seat::{Host, Seat};

/// One wish about the members of a generation. A filter leaves seats out and changes no order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filter {
    /// The number of members is a multiple of this. The last ones are left out.
    DivisibleBy(u32),
    /// Each host takes part with exactly this many members, or with none.
    WholeHosts(u32),
    /// At most this many members. The last ones are left out.
    Max(u32),
}

impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DivisibleBy(count) => write!(f, "divisible_by({count})"),
            Self::WholeHosts(count) => write!(f, "whole_hosts({count})"),
            Self::Max(count) => write!(f, "max({count})"),
        }
    }
}

impl Filter {
    /// The number in it. 0 makes no sense.
    #[must_use]
    pub fn count(self) -> u32 {
        match self {
            Self::DivisibleBy(count) | Self::WholeHosts(count) | Self::Max(count) => count,
        }
    }

    fn apply(self, mut seats: Vec<&Seat>) -> Vec<&Seat> {
        let count = self.count().max(1) as usize;
        match self {
            Self::DivisibleBy(_) => seats.truncate(seats.len() - seats.len() % count),
            Self::Max(_) => seats.truncate(count),
            Self::WholeHosts(_) => {
                let mut there: BTreeMap<Option<&Host>, usize> = BTreeMap::new();
                for seat in &seats {
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
        seats
    }
}

/// Applies filters in order, again and again until no filter leaves out more. The result meets all of them.
///
/// `seats` are in rank order, and so is the result.
#[must_use]
pub(super) fn apply<'a>(filters: &[Filter], mut seats: Vec<&'a Seat>) -> Vec<&'a Seat> {
    loop {
        let before = seats.len();
        for filter in filters {
            seats = filter.apply(seats);
        }
        if seats.len() == before {
            return seats;
        }
    }
}

/// Some number of members passes the filters, on hosts that are as large as is needed.
#[must_use]
pub(super) fn has_size(filters: &[Filter], mut sizes: impl Iterator<Item = u32>) -> bool {
    sizes.any(|size| {
        filters.iter().all(|filter| match *filter {
            Filter::DivisibleBy(count) | Filter::WholeHosts(count) => size.is_multiple_of(count),
            Filter::Max(count) => size <= count,
        })
    })
}
