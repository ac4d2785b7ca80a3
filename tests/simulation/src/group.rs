//! The data plane of one generation: operations in which all members meet.

use std::collections::{BTreeMap, BTreeSet};

use kolo_wire::ids::Rank;

use crate::worker::{Ending, Name, Offer, Saved};

/// What comes of a rank's coming to an operation.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Meeting {
    /// It waits, as the first one or not.
    Waits { first: bool },
    /// All are there: the operation ends so on each rank.
    Complete(Ending),
    /// Ranks came for different things.
    Mismatch(String),
}

/// The members of a generation, as its first member has heard of them.
#[derive(Debug)]
pub(crate) struct Group {
    /// By rank. Installed programs know each other when they have met: until then some are missing.
    pub(crate) members: Vec<Option<Name>>,
    operations: BTreeMap<u64, BTreeMap<u32, Offer>>,
    /// Members whose links have ended.
    pub(crate) left: BTreeSet<Rank>,
}

impl Group {
    pub(crate) fn new(members: impl IntoIterator<Item = Option<Name>>) -> Self {
        Self {
            members: members.into_iter().collect(),
            operations: BTreeMap::new(),
            left: BTreeSet::new(),
        }
    }

    /// A process is started as a rank of a group of this size.
    pub(crate) fn started(&mut self, rank: Rank, size: u32, name: Name) -> Result<(), String> {
        let all = self.members.len();
        match self.members.get_mut(rank.index()) {
            Some(member @ None) if all == size as usize => *member = Some(name),
            other => {
                return Err(format!(
                    "slot {} is started as rank {rank} of {size}; there are {all} ranks, and this one is {other:?}",
                    name.slot
                ));
            }
        }
        Ok(())
    }

    /// The processes that are known, in rank order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &Name> {
        self.members.iter().flatten()
    }

    /// A rank comes to an operation. If not all reach each other now, none gets through.
    pub(crate) fn join(
        &mut self,
        rank: Rank,
        operation: u64,
        offer: Offer,
        connected: bool,
    ) -> Meeting {
        let offers = self.operations.entry(operation).or_default();
        if let Some((other, there)) = offers.first_key_value()
            && there.kind() != offer.kind()
        {
            let (here, there) = (offer.kind(), there.kind());
            return Meeting::Mismatch(format!(
                "rank {rank} comes to operation {operation} for a {here}, and rank {other} for a {there}"
            ));
        }
        let first = offers.is_empty();
        offers.insert(rank.0, offer);
        if offers.len() < self.members.len() || !self.left.is_empty() || !connected {
            return Meeting::Waits { first };
        }
        let offers = self.operations.remove(&operation).unwrap_or_default();
        conclude(&offers)
    }

    /// The ranks that wait in an operation, and the lowest rank that has not come to it.
    pub(crate) fn waiting(&self, operation: u64) -> Option<(Vec<Rank>, Option<Rank>)> {
        let offers = self.operations.get(&operation)?;
        let waiting = offers.keys().copied().map(Rank).collect();
        let mut all = 0..self.members.len() as u32;
        let late = all.find(|rank| !offers.contains_key(rank));
        Some((waiting, late.map(Rank)))
    }

    /// All operations that some rank waits in.
    pub(crate) fn open(&self) -> Vec<u64> {
        self.operations.keys().copied().collect()
    }
}

/// The common end of an operation to which all have come.
fn conclude(offers: &BTreeMap<u32, Offer>) -> Meeting {
    Meeting::Complete(match offers.values().next() {
        Some(Offer::Meet { .. }) => {
            let all = || {
                offers.values().filter_map(|offer| match offer {
                    Offer::Meet { saved, live } => Some((saved, live)),
                    _ => None,
                })
            };
            let id = |saved: &Saved| (saved.generation, saved.number);
            // The lowest rank that has the last one.
            let Some((last, live)) = all().rev().max_by_key(|(saved, _)| id(saved)) else {
                return Meeting::Mismatch("nobody has met".to_owned());
            };
            Ending::Met {
                last: *last,
                live: *live,
                differ: last.number == 0 || all().any(|(saved, _)| id(saved) != id(last)),
            }
        }
        Some(Offer::Receive) => Ending::Received,
        Some(Offer::Step { .. }) => Ending::Stepped {
            sum: offers.values().fold(0, |all, offer| match offer {
                Offer::Step { sum } => all.wrapping_add(*sum),
                _ => all,
            }),
        },
        Some(Offer::Commit { number, .. }) => {
            let mut hold = false;
            for (rank, offer) in offers {
                let Offer::Commit {
                    number: other,
                    hold: wants,
                } = offer
                else {
                    continue;
                };
                if other != number {
                    return Meeting::Mismatch(format!(
                        "rank {rank} has {other} commits, and rank 0 has {number}"
                    ));
                }
                hold |= wants;
            }
            Ending::Committed { hold }
        }
        None => return Meeting::Mismatch("nobody has met".to_owned()),
    })
}
