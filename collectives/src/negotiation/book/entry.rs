//! A named operation that members have asked for, and what operations have in common.

use std::time::{Duration, Instant};

use kolo_transport::ids::Rank;

use crate::error::CollectiveError;
use crate::negotiation::messages::Join;
use crate::operation::{Operation, OperationKind, ReduceOp};
use crate::times::COLLECT;

#[derive(Debug)]
pub(super) struct Entry {
    /// By member.
    pub(super) asked: Vec<Option<Operation>>,
    pub(super) since: Instant,
    pub(super) deadline: Instant,
    pub(super) limit: Duration,
    /// When the missing members are asked next what they do.
    pub(super) ask_at: Instant,
    pub(super) stall: Stall,
    pub(super) is_ready: bool,
    pub(super) call: u64,
    /// The highest [epoch](super::Request::epoch) of the requests.
    pub(super) epoch: u64,
    /// When it is ready: the members that take part without data, and by which of their joins.
    pub(super) followers: Vec<(u32, u64)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stall {
    Not,
    Asked(Instant),
    Reported,
}

impl Entry {
    /// When the clock brings something about it, if it is not ready by then.
    pub(super) fn alarm(&self, stall_after: Duration, asks_from: Option<Instant>) -> Instant {
        let stall = match self.stall {
            Stall::Not => self.since.checked_add(stall_after),
            Stall::Asked(at) => Some(at + COLLECT),
            Stall::Reported => None,
        };
        let ask_at = asks_from.map_or(self.ask_at, |from| from.max(self.ask_at));
        let first = self.deadline.min(ask_at);
        stall.map_or(first, |stall| stall.min(first))
    }

    /// By member.
    pub(super) fn who_asked(&self) -> impl Iterator<Item = bool> {
        self.asked.iter().map(Option::is_some)
    }

    pub(super) fn missing(&self, joined: &[Option<Join>]) -> Vec<u32> {
        let have_not_asked = self.without_data(joined);
        have_not_asked
            .filter(|(_, join)| join.is_none())
            .map(|(rank, _)| rank)
            .collect()
    }

    /// The operation is done without the data of members that have none.
    pub(super) fn set_followers(&mut self, joined: &[Option<Join>]) {
        let followers = self.without_data(joined);
        self.followers = followers
            .filter_map(|(rank, join)| Some((rank, join?.serial)))
            .collect();
    }

    /// The members that have not asked, and those joins of theirs that count here: not of another call, nor over when another
    /// member asked.
    fn without_data(&self, joined: &[Option<Join>]) -> impl Iterator<Item = (u32, Option<Join>)> {
        (0..)
            .zip(self.asked.iter().zip(joined))
            .filter(|(_, (asked, _))| asked.is_none())
            .map(|(rank, (_, joined))| {
                let counts = |join: &Join| join.call == self.call && join.since >= self.epoch;
                (rank, joined.filter(counts))
            })
    }

    /// The operation that all asked for.
    ///
    /// Fails with the first two members that ask for different ones.
    pub(super) fn judge(&self, name: &str) -> Result<Option<Operation>, CollectiveError> {
        let mut asked = (0..)
            .zip(&self.asked)
            .filter_map(|(rank, asked)| Some((Rank(rank), (*asked)?)));
        let Some((rank, first)) = asked.next() else {
            return Ok(None);
        };
        match asked.find(|(_, other)| *other != first) {
            None => Ok(Some(first)),
            Some((other, theirs)) => Err(CollectiveError::Mismatch {
                rank,
                asked: format!("{first} named `{name}`"),
                other,
                other_asked: theirs.to_string(),
            }),
        }
    }
}

/// What operations have in common that can be fused: all but lengths and shapes. None if this one can't be.
pub(in crate::negotiation) fn likeness(operation: &Operation, world: u32) -> Option<Operation> {
    let alike = match operation.kind {
        // Several buffers are by themselves.
        OperationKind::AllReduce => {
            operation.rows == 0 && operation.reduce != Some(ReduceOp::Adasum)
        }
        OperationKind::AllGather => operation.rows == 0,
        // With fewer rows than ranks most of what is fused would be padding.
        OperationKind::ReduceScatter => {
            operation.rows >= u64::from(world)
                && operation.rows != Operation::OF_SEVERAL
                && operation.count.is_multiple_of(operation.rows)
        }
        _ => false,
    };
    // One that fails by itself would let others fail.
    (alike && operation.check(world).is_ok()).then_some(Operation {
        count: 0,
        rows: 0,
        shape: 0,
        ..*operation
    })
}

/// Bytes of the longest buffer that an operation has, or its part of one if it is fused.
pub(super) fn weight(operation: &Operation, world: u32) -> u64 {
    match operation.kind {
        OperationKind::AllGather => operation.bytes().saturating_mul(u64::from(world)),
        // Rows that can't be split evenly are packed as if all ranks got as many as the one that gets most.
        OperationKind::ReduceScatter => {
            let width = operation.bytes().checked_div(operation.rows).unwrap_or(0);
            let rows = operation.rows.div_ceil(u64::from(world));
            width.saturating_mul(rows).saturating_mul(u64::from(world))
        }
        _ => operation.bytes(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DType;

    #[test]
    fn what_is_packed_weighs_as_much_as_it_takes() {
        let of = |kind, count, rows| Operation {
            rows,
            reduce: Some(ReduceOp::Sum),
            ..Operation::new(kind, Some(DType::F32), count)
        };
        let weigh = |kind, count, rows| weight(&of(kind, count, rows), 4);
        assert_eq!(weigh(OperationKind::AllReduce, 10, 0), 40);
        assert_eq!(weigh(OperationKind::AllGather, 10, 0), 160);
        // 5 rows of 3: each rank gets room for 2.
        assert_eq!(weigh(OperationKind::ReduceScatter, 15, 5), 4 * 2 * 3 * 4);
        assert_eq!(weigh(OperationKind::ReduceScatter, 24, 8), 4 * 24);
        assert_eq!(weigh(OperationKind::ReduceScatter, 24, 0), 0);
        assert_eq!(weigh(OperationKind::ReduceScatter, u64::MAX, 1), u64::MAX);
    }
}
