//! One call in flight: its ranks, what came from them, and who waits.

use std::time::{Duration, Instant};

use bytes::Bytes;
use kolo_transport::ids::{CallId, Rank};

use super::failure::{CallError, RankError};

/// Who waits for a call: one for all ranks, or one for each.
#[derive(Debug)]
pub(crate) enum Waiters<W> {
    /// Woken when every rank has returned, or at the first cause of a failure.
    Whole(W),
    /// One for each rank of the call, in its order. None once it has its answer, or is gone.
    Each(Vec<Option<W>>),
}

/// A waiter's answer. It has one body for each of the waiter's ranks.
#[derive(Debug, PartialEq)]
pub(crate) struct Completion<W> {
    pub(crate) waiter: W,
    pub(crate) result: Result<Vec<Bytes>, CallError>,
}

/// What follows from an event.
#[derive(Debug, PartialEq)]
pub(crate) struct Effects<W> {
    /// Waiters to wake.
    pub(crate) completions: Vec<Completion<W>>,
    /// Calls to cancel, and on which ranks.
    pub(crate) cancels: Vec<(CallId, Vec<Rank>)>,
}

impl<W> Default for Effects<W> {
    fn default() -> Self {
        Self {
            completions: Vec::new(),
            cancels: Vec::new(),
        }
    }
}

#[derive(Debug)]
pub(super) enum Slot {
    Waiting,
    Returned(Bytes),
    Failed(RankError),
}

#[derive(Debug)]
pub(super) struct Entry<W> {
    pub(super) name: String,
    pub(super) ranks: Vec<Rank>,
    pub(super) slots: Vec<Slot>,
    /// Indices of failed slots in the order in which they came.
    pub(super) failed: Vec<usize>,
    /// Slots that wait.
    pub(super) missing: usize,
    pub(super) waiters: Waiters<W>,
    pub(super) sent: Instant,
    /// It waits behind another call, and the user knows.
    pub(super) is_told: bool,
    pub(super) deadline: Option<(Instant, Duration)>,
    pub(super) echo_until: Option<Instant>,
}

impl<W> Entry<W> {
    pub(super) fn index(&self, rank: Rank) -> Option<usize> {
        self.ranks.binary_search(&rank).ok()
    }

    /// The index of a rank that has no result.
    pub(super) fn waiting(&self, rank: Rank) -> Option<usize> {
        let index = self.index(rank)?;
        matches!(self.slots[index], Slot::Waiting).then_some(index)
    }

    pub(super) fn ranks_waiting(&self) -> Vec<Rank> {
        let waiting = |(rank, slot): (&Rank, &Slot)| matches!(slot, Slot::Waiting).then_some(*rank);
        self.ranks
            .iter()
            .zip(&self.slots)
            .filter_map(waiting)
            .collect()
    }

    /// Takes one rank's waiter away. Gives the rank if its result is not wanted now, and whether nobody waits.
    pub(super) fn forget(&mut self, rank: Rank) -> (Vec<Rank>, bool) {
        let waiting = self.waiting(rank).is_some();
        let index = self.index(rank);
        let Waiters::Each(waiters) = &mut self.waiters else {
            return (Vec::new(), false);
        };
        let wanted = index.and_then(|index| waiters[index].take()).is_some();
        let unwanted = if wanted && waiting {
            vec![rank]
        } else {
            Vec::new()
        };
        (unwanted, waiters.iter().all(Option::is_none))
    }

    pub(super) fn has_waiter(&self, index: usize) -> bool {
        match &self.waiters {
            Waiters::Whole(_) => true,
            Waiters::Each(waiters) => waiters[index].is_some(),
        }
    }

    pub(super) fn fail(&mut self, index: usize, error: RankError) {
        self.slots[index] = Slot::Failed(error);
        self.failed.push(index);
        self.missing -= 1;
    }

    /// The error with this first cause and all other failures of the call.
    pub(super) fn error(&self, first: &RankError) -> CallError {
        let others = self
            .failed
            .iter()
            .filter_map(|&index| match &self.slots[index] {
                Slot::Failed(error) if error.rank != first.rank => Some(error.clone()),
                _ => None,
            });
        CallError::failed(&self.name, first.clone(), others.collect())
    }

    /// The error whose first cause is, for want of a better one, this slot's.
    pub(super) fn failed_by(&self, index: usize) -> CallError {
        match &self.slots[index] {
            Slot::Failed(error) => self.error(error),
            _ => CallError::NoRanks {
                call: self.name.clone(),
            },
        }
    }

    /// The error of one rank's waiter.
    pub(super) fn failed_on(&self, index: usize, first: &RankError) -> CallError {
        let own = match &self.slots[index] {
            Slot::Failed(error) if error.rank != first.rank => vec![error.clone()],
            _ => Vec::new(),
        };
        CallError::failed(&self.name, first.clone(), own)
    }

    pub(super) fn complete_whole(self, effects: &mut Effects<W>) {
        let bodies = self.slots.into_iter().filter_map(|slot| match slot {
            Slot::Returned(body) => Some(body),
            _ => None,
        });
        if let Waiters::Whole(waiter) = self.waiters {
            effects.completions.push(Completion {
                waiter,
                result: Ok(bodies.collect()),
            });
        }
    }

    /// Everybody who still waits gets this error.
    pub(super) fn complete_rest(self, error: &CallError, effects: &mut Effects<W>) {
        let waiters = match self.waiters {
            Waiters::Whole(waiter) => vec![Some(waiter)],
            Waiters::Each(waiters) => waiters,
        };
        effects
            .completions
            .extend(waiters.into_iter().flatten().map(|waiter| Completion {
                waiter,
                result: Err(error.clone()),
            }));
    }
}
