//! How an operation is done, and where its data are.

use std::ops::Range;

use super::super::map::{AREA, MOST_RANKS};
use super::Arena;
use super::rounds::Rounds;
use super::staging;
use super::stream::{Stream, window};
use crate::operation::{Operation, OperationKind, ReduceOp};
use crate::schedule::{Counts, Rows};

/// Reductions whose inputs have more bytes than this, all ranks' together, are done in slices.
const FLAT: usize = 96 << 10;
/// As [`FLAT`], of two ranks: each of them reads and writes as much in slices, or more, and waits twice.
const FLAT_OF_TWO: usize = 8 << 20;

/// The longest reductions that are flat, in bytes of all ranks' inputs.
fn flat(world: usize) -> usize {
    if world == 2 { FLAT_OF_TWO } else { FLAT }
}

/// From so many bytes on a rank withholds what it alone needs. Fewer fit the line of a flag, or cost next to nothing.
const WITHHELD_FROM: usize = 4 << 10;

// Lengths, which are stored over what was given, are never withheld.
const _: () = assert!(8 * (MOST_RANKS as usize) < WITHHELD_FROM);

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

/// The two halves of a buffer, as places in the heap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Buffers {
    pub(crate) input: usize,
    pub(crate) output: usize,
}

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

impl Arena {
    /// How an operation is done, and how many bytes this rank gives.
    #[inline]
    pub(super) fn plan(&self, operation: &Operation, forced: bool, offsets: &[usize]) -> Plan {
        let agree = Plan(Way::Agree, 0);
        if forced {
            return agree;
        }
        let way = Way::of(operation, self.world, self.map.is_crowded());
        let bytes = match way {
            Way::Stream(stream) if stream.gives(self.me) => window(self.world),
            Way::Agree | Way::Buffers(_) | Way::Stream(_) => 0,
            Way::Rounds(rounds) => rounds.window(self.world),
            Way::Slices => Self::length(operation),
            Way::Flat => match self.given_flat(operation, offsets) {
                Some(bytes) => bytes,
                None => return agree,
            },
        };
        Plan(way, bytes)
    }

    /// `None` if the lengths of others are not known.
    #[inline]
    fn given_flat(&self, operation: &Operation, offsets: &[usize]) -> Option<usize> {
        let bytes = Self::length(operation);
        let is_root = operation.root == Some(self.me as u32);
        let only_root = |bytes| if is_root { bytes } else { 0 };
        Some(match operation.kind {
            OperationKind::Gather => self.needed(operation, bytes),
            OperationKind::Broadcast => only_root(bytes),
            OperationKind::Scatter => only_root(bytes * self.world),
            OperationKind::AllToAll => bytes * self.world,
            OperationKind::AllGatherVarcount | OperationKind::GatherVarcount => {
                let Some(&[start, end]) = offsets.get(self.me..self.me + 2) else {
                    return None;
                };
                self.needed(operation, (end - start) * operation.element_size())
            }
            _ => bytes,
        })
    }

    /// Whether it is not done here, but over the links when all have agreed.
    pub(crate) fn only_agrees(
        &self,
        operation: &Operation,
        forced: bool,
        offsets: &[usize],
    ) -> bool {
        self.plan(operation, forced, offsets).0 == Way::Agree
    }

    /// How an operation is done, if it is done [without any pieces](Arena::streams) or links.
    #[inline]
    pub(crate) fn plan_short(&self, operation: &Operation, offsets: &[usize]) -> Option<Plan> {
        let plan = self.plan(operation, false, offsets);
        matches!(plan.0, Way::Flat | Way::Slices).then_some(plan)
    }

    /// The part of a reduction that a rank combines, in bytes.
    #[inline]
    pub(super) fn slice(&self, rank: usize, length: usize) -> Range<usize> {
        let each = length.div_ceil(self.world).next_multiple_of(64);
        (rank * each).min(length)..((rank + 1) * each).min(length)
    }

    /// Bytes for which there has to be room: none if a rank gives nothing.
    fn needed(&self, operation: &Operation, bytes: usize) -> usize {
        let withheld = self.withheld(operation, Way::Flat, bytes).len();
        if withheld == bytes { 0 } else { bytes }
    }

    /// The bytes of its data that a rank does not give, for nobody else needs them. Empty for lengths at which that does not
    /// pay.
    pub(super) fn withheld(&self, operation: &Operation, way: Way, bytes: usize) -> Range<usize> {
        let (me, world) = (self.me, self.world);
        if way == Way::Slices {
            return self.slice(me, bytes);
        }
        if bytes < WITHHELD_FROM || !is_given_as_it_is(operation) {
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

    #[inline]
    pub(super) fn length(operation: &Operation) -> usize {
        operation.count as usize * operation.element_size()
    }
}

/// Who gets which elements of a reduce-scatter.
pub(super) fn rows(operation: &Operation, world: usize) -> Rows {
    let rows = operation.rows.max(1) as usize;
    Rows {
        rows,
        width: operation.count as usize / rows,
        world: world as u32,
    }
}

/// Whether what others see is what the caller gave.
#[inline]
pub(super) fn is_given_as_it_is(operation: &Operation) -> bool {
    operation.wire.is_none() && operation.prescale.is_one()
}
