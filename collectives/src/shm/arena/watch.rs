//! What the others do while this rank waits for them.

use std::sync::atomic::Ordering;

use kolo_transport::ids::Rank;

use super::super::rules;
use super::super::ticket::{parity, read_record};
use super::way::Way;
use super::{Arena, Open, Stage, Used};
use crate::error::CollectiveError;
use crate::operation::Operation;
use crate::schedule::Algorithm;

impl Arena {
    /// Whether the operation can't end without this rank.
    pub(crate) fn lacks(&self, rank: u32) -> bool {
        let Some(open) = &self.open else { return false };
        let (seat, rank) = (&self.seat, rank as usize);
        let lacks = || match open.way {
            Way::Slices | Way::Buffers(_) => {
                seat.map.second(rank).load(Ordering::SeqCst) != open.ticket
            }
            Way::Stream(_) | Way::Rounds(_) => {
                // Before it begins, whatever comes of it needs all.
                let has_begun = open.stage == Stage::Streaming || self.all_have_given(open);
                !has_begun || (open.way.piecewise()).is_some_and(|pieces| pieces.lacks(seat, rank))
            }
            Way::Agree | Way::Flat => false,
        };
        let flag = seat.map.front(rank, parity(open.tag));
        open.stage != Stage::Ready && (!rules::has_given(flag, open.ticket) || lacks())
    }

    /// The ranks that are waited for.
    pub(crate) fn late(&self) -> Vec<Rank> {
        let Some(open) = &self.open else {
            return Vec::new();
        };
        let (seat, map, parity) = (&self.seat, &self.seat.map, parity(open.tag));
        let ranks = |is_late: &dyn Fn(usize) -> bool| -> Vec<Rank> {
            let late = seat.others().filter(|rank| is_late(*rank));
            late.map(|rank| Rank(rank as u32)).collect()
        };
        // The first ones, or the others if there are none.
        let either = |first: &dyn Fn(usize) -> bool, other: &dyn Fn(usize) -> bool| {
            let late = ranks(first);
            if late.is_empty() { ranks(other) } else { late }
        };
        match (open.stage, open.way.piecewise()) {
            (Stage::Held, _) => {
                let held = |used: Used, rank: usize| {
                    let flag = map.front(rank, used.parity);
                    rules::holds(flag, map.done(rank, used.parity), used.ticket)
                };
                ranks(&|rank| self.given.before(open).any(|used| held(used, rank)))
            }
            (Stage::Given, _) => {
                let flag = |rank| map.front(rank, parity);
                // Who was here and gave up is not late, if anybody is.
                let gone = |rank| rules::is_gone(flag(rank), open.ticket);
                let late = |rank| !rules::has_given(flag(rank), open.ticket) && !gone(rank);
                either(&late, &gone)
            }
            (_, Some(pieces)) => either(&|rank| pieces.is_slow(seat, rank), &|rank| {
                pieces.lacks(seat, rank)
            }),
            _ => ranks(&|rank| map.second(rank).load(Ordering::SeqCst) != open.ticket),
        }
    }

    /// Looks at what the ranks do that have not come: `Err` if one of them asks for something else, or will not come.
    pub(crate) fn observe(&mut self) -> Result<(), CollectiveError> {
        let Some(mut open) = self.open.filter(|open| open.stage == Stage::Given) else {
            return Ok(());
        };
        let own = parity(open.tag);
        let mut joins = open.operation.is_join();
        let mut missing = false;
        for rank in self.seat.others() {
            if rules::has_given(self.seat.map.front(rank, own), open.ticket) {
                continue;
            }
            let at = [0, 1]
                .into_iter()
                .filter_map(|parity| read_record(&self.seat.map, rank, parity))
                .max_by_key(|(tag, _)| *tag);
            let Some((tag, theirs)) = at else {
                missing = true;
                continue;
            };
            // It may have come just now, and be further by now. Then its flag stays until this rank has left.
            if rules::has_given(self.seat.map.front(rank, own), open.ticket) {
                continue;
            }
            if tag > open.tag {
                return Err(CollectiveError::PeerLeft {
                    rank: Rank(rank as u32),
                    reason: format!(
                        "it is in {tag} while this rank is in {}, {}",
                        open.tag, open.operation
                    ),
                });
            }
            if tag < open.tag {
                missing = true;
            } else if theirs.is_join() || open.operation.is_join() {
                joins = true;
            } else if theirs == open.operation {
                // It gave the same operation up, and says why on its link.
                missing = true;
            } else {
                return Err(self.mismatch(&open, rank, &theirs));
            }
        }
        if joins && !missing {
            open.stage = Stage::Elsewhere;
            self.open = Some(open);
        }
        Ok(())
    }

    fn mismatch(&self, open: &Open, rank: usize, theirs: &Operation) -> CollectiveError {
        let (mut asked, mut other_asked) = (open.operation.to_string(), theirs.to_string());
        if asked == other_asked {
            // Only how it is done differs: the ranks have different tuning, or one gave a buffer.
            let by = |operation: &Operation| match operation.algorithm {
                Algorithm::Local if operation.segment != 0 => {
                    format!("{operation} of a shared buffer")
                }
                Algorithm::Local => format!("{operation} in shared memory"),
                algorithm => format!("{operation} by the {algorithm} algorithm"),
            };
            (asked, other_asked) = (by(&open.operation), by(theirs));
        }
        CollectiveError::Mismatch {
            rank: Rank(self.seat.me as u32),
            asked,
            other: Rank(rank as u32),
            other_asked,
        }
    }
}
