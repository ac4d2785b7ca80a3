//! How an operation is done, and where its data are.

use std::ops::Range;

use super::super::buffer::Buffers;
use super::super::map::{AREA, MOST_RANKS};
use super::asked::{is_given_as_it_is, length, rows};
use super::limits::{WITHHELD, flat};
use super::pieces::Piecewise;
use super::rounds::Rounds;
use super::seat::Seat;
use super::staging;
use super::stream::{Stream, window};
use crate::operation::{Operation, OperationKind, ReduceOp};
use crate::schedule::Counts;

/// How an operation is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Nothing but agreement: the operation itself goes over the links.
    Agree,
    Flat,
    Slices,
    /// Piece by piece, through a window.
    Stream(Stream),
    /// Piece by piece, in rounds.
    Rounds(Rounds),
    /// Slices, of buffers that are in the memory: see [`super::buffer`].
    Buffers(Buffers),
}

/// How an operation is done, and how many bytes this rank gives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan(pub(super) Way, pub(super) usize);

impl Way {
    /// How an operation is done by so many ranks that share memory, more than there are processors if it is `crowded`. Pure: all
    /// ranks say the same. Buffers in the memory have a way of their own.
    #[inline]
    pub(super) fn of(operation: &Operation, world: usize, crowded: bool) -> Self {
        if operation.is_join() || operation.reduce == Some(ReduceOp::Adasum) {
            return Self::Agree;
        }
        let Some(bytes) = usize::try_from(operation.count)
            .ok()
            .and_then(|count| count.checked_mul(operation.element_size()))
            .filter(|bytes| *bytes <= (AREA - staging::BEFORE) / world)
        else {
            return Self::Agree;
        };
        if let Some(stream) = Stream::of(operation, world) {
            return Self::Stream(stream);
        }
        // Ranks that wait for each other's turn on a processor have no use for short turns.
        if let Some(rounds) = Rounds::of(operation, world).filter(|_| !crowded) {
            return Self::Rounds(rounds);
        }
        match operation.kind {
            OperationKind::AllReduce | OperationKind::Reduce if bytes * world > flat(world) => {
                Self::Slices
            }
            OperationKind::AllReduce
            | OperationKind::Reduce
            | OperationKind::ReduceScatter
            | OperationKind::AllGather
            | OperationKind::AllGatherCounts
            | OperationKind::Barrier
            | OperationKind::Gather
            | OperationKind::Broadcast
            | OperationKind::Scatter
            | OperationKind::AllToAll
            | OperationKind::AllGatherVarcount
            | OperationKind::GatherVarcount => Self::Flat,
            _ => Self::Agree,
        }
    }

    /// If it is done piece by piece.
    #[inline]
    pub(super) fn piecewise(&self) -> Option<&dyn Piecewise> {
        match self {
            Self::Stream(stream) => Some(stream),
            Self::Rounds(rounds) => Some(rounds),
            Self::Agree | Self::Flat | Self::Slices | Self::Buffers(_) => None,
        }
    }

    /// What it is called in documentation.
    fn name(self) -> Option<&'static str> {
        match self {
            Self::Agree => None,
            Self::Flat => Some("flat"),
            Self::Slices | Self::Buffers(_) => Some("slices"),
            Self::Stream(_) => Some("pieces"),
            Self::Rounds(_) => Some("rounds"),
        }
    }
}

/// How an operation is done by so many ranks of one host that share memory: `flat`, `slices`, `pieces` or `rounds`, as the
/// documentation of collectives explains them. `None` if it goes over links, or so many ranks share none.
///
/// ```
/// use kolo_collectives::element::DType;
/// use kolo_collectives::operation::{Operation, OperationKind};
/// use kolo_collectives::{ReduceOp, way_in_shared_memory};
///
/// let sum = |count| Operation {
///     reduce: Some(ReduceOp::Sum),
///     ..Operation::new(OperationKind::AllReduce, Some(DType::F32), count)
/// };
/// assert_eq!(way_in_shared_memory(&sum(1), 2, 2), Some("flat"));
/// assert_eq!(way_in_shared_memory(&sum(2 << 20), 2, 2), Some("slices"));
/// assert_eq!(way_in_shared_memory(&sum(8 << 20), 2, 2), Some("rounds"));
/// // They share processors.
/// assert_eq!(way_in_shared_memory(&sum(8 << 20), 4, 2), Some("slices"));
/// ```
#[must_use]
pub fn way_in_shared_memory(
    operation: &Operation,
    ranks: u32,
    processors: usize,
) -> Option<&'static str> {
    if !(2..=MOST_RANKS).contains(&ranks) {
        return None;
    }
    let world = ranks as usize;
    Way::of(operation, world, world > processors).name()
}

/// How an operation is done, and how many bytes this rank gives.
#[inline]
pub(super) fn plan(seat: &Seat, operation: &Operation, forced: bool, offsets: &[usize]) -> Plan {
    let agree = Plan(Way::Agree, 0);
    if forced {
        return agree;
    }
    let way = Way::of(operation, seat.world, seat.map.is_crowded());
    let bytes = match way {
        Way::Stream(stream) if stream.gives(seat.me) => window(seat.world),
        Way::Agree | Way::Buffers(_) | Way::Stream(_) => 0,
        Way::Rounds(rounds) => rounds.window(seat.world),
        Way::Slices => length(operation),
        Way::Flat => match given_flat(seat, operation, offsets) {
            Some(bytes) => bytes,
            None => return agree,
        },
    };
    Plan(way, bytes)
}

/// `None` if the lengths of others are not known.
#[inline]
fn given_flat(seat: &Seat, operation: &Operation, offsets: &[usize]) -> Option<usize> {
    let bytes = length(operation);
    let is_root = operation.root == Some(seat.me as u32);
    let only_root = |bytes| if is_root { bytes } else { 0 };
    // None if a rank gives nothing.
    let needed = |bytes: usize| {
        let withheld = withheld(seat, operation, Way::Flat, bytes).len();
        if withheld == bytes { 0 } else { bytes }
    };
    Some(match operation.kind {
        OperationKind::Gather => needed(bytes),
        OperationKind::Broadcast => only_root(bytes),
        OperationKind::Scatter => only_root(bytes * seat.world),
        OperationKind::AllToAll => bytes * seat.world,
        OperationKind::AllGatherVarcount | OperationKind::GatherVarcount => {
            let Some(&[start, end]) = offsets.get(seat.me..seat.me + 2) else {
                return None;
            };
            needed((end - start) * operation.element_size())
        }
        _ => bytes,
    })
}

/// The bytes of its data that a rank does not give, for nobody else needs them. Empty for lengths at which that does not
/// pay.
pub(super) fn withheld(seat: &Seat, operation: &Operation, way: Way, bytes: usize) -> Range<usize> {
    let (me, world) = (seat.me, seat.world);
    if way == Way::Slices {
        return seat.slice(me, bytes);
    }
    if bytes < WITHHELD || !is_given_as_it_is(operation) {
        return 0..0;
    }
    match operation.kind {
        OperationKind::ReduceScatter => {
            let own = rows(operation, world).span(me as u32);
            let size = operation.element_size();
            own.start * size..own.end() * size
        }
        OperationKind::AllToAll | OperationKind::Scatter => {
            let each = bytes / world;
            me * each..(me + 1) * each
        }
        // Only the root has a result.
        OperationKind::Gather | OperationKind::GatherVarcount
            if operation.root == Some(me as u32) =>
        {
            0..bytes
        }
        _ => 0..0,
    }
}
