//! The operations of a communicator.

mod alike;
mod barrier;
mod broadcast;
mod buffer;
mod exchange;
mod forms;
mod gather;
mod grouped;
mod join;
mod object;
mod reduce;
mod scatter;
mod split;
mod start;
mod trace;

use kolo_transport::ids::Rank;

use crate::blocking::Alarm;
use crate::communicator::Communicator;
use crate::element::Element;
use crate::error::CollectiveError;
use crate::group_core::OpGuard;
use crate::operation::{Operation, OperationKind, ReduceOp, Tag};
use forms::or_refuse;

pub use gather::Gathered;
pub use start::Start;

impl Communicator {
    fn world(&self) -> usize {
        self.inner.world as usize
    }

    /// An operation without operator.
    fn request<T: Element>(&self, kind: OperationKind, count: usize) -> Operation {
        let mut operation = Operation::new(kind, Some(T::DTYPE), count as u64);
        self.options.apply(&mut operation);
        operation
    }

    fn rooted<T: Element>(&self, kind: OperationKind, count: usize, root: Rank) -> Operation {
        Operation {
            root: Some(root.0),
            ..self.request::<T>(kind, count)
        }
    }

    fn reduction<T: Element>(&self, kind: OperationKind, count: usize, op: ReduceOp) -> Operation {
        let mut operation = Operation {
            reduce: Some(op),
            ..Operation::new(kind, Some(T::DTYPE), count as u64)
        };
        self.options.apply(&mut operation);
        operation
    }

    /// Whether there is such a root.
    fn check_root(&self, kind: OperationKind, root: Rank) -> Result<(), CollectiveError> {
        let world = self.inner.world;
        if root.0 < world {
            return Ok(());
        }
        let way = kind.root().unwrap_or_default();
        Err(invalid(format!(
            "{kind} {way} root {root}: a world of {world} has ranks 0 to {}",
            world - 1
        )))
    }

    /// Lengths of all ranks, as many of each as this one gives, gathered for an operation on different lengths. `root` is that of
    /// the operation.
    async fn lengths<A: Alarm, T: Element>(
        &self,
        alarm: &mut A,
        turn: &mut OpGuard<'_>,
        tag: Tag,
        (kind, root): (OperationKind, Option<u32>),
        own: &[u64],
    ) -> Result<Vec<u64>, CollectiveError> {
        let count = own.len();
        let request = match kind {
            OperationKind::AllGatherVarcount => Operation {
                shape: self.options.mark(),
                ..Operation::new(OperationKind::AllGatherCounts, Some(T::DTYPE), count as u64)
            },
            _ => Operation {
                root,
                ..Operation::lengths(OperationKind::AllGather, kind, T::DTYPE, count as u64)
            },
        };
        let input = bytemuck::cast_slice(own);
        turn.run(alarm, tag, request, input).await?;
        let mut all = std::mem::take(&mut turn.engine().lengths);
        all.clear();
        all.resize(self.world() * count, 0);
        turn.store_with(input, &mut all);
        Ok(all)
    }
}

/// Whether so many elements are possible, and sums of a few such lengths.
fn fits<T>(total: usize) -> bool {
    let bytes = total.checked_mul(size_of::<T>());
    bytes.is_some_and(|bytes| bytes <= isize::MAX as usize >> 3)
}

/// The sum of lengths. Too large a one is one that nothing fits.
fn total(lengths: &[u64]) -> usize {
    let sum = lengths
        .iter()
        .fold(0, |sum: u64, length| sum.saturating_add(*length));
    usize::try_from(sum).unwrap_or(usize::MAX)
}

/// Sets where the elements of each rank begin, of which these are the lengths. Returns how many there are in all. The lengths are the
/// peers' words: there may be no memory for so many.
fn set_offsets<T: Element>(
    turn: &mut OpGuard<'_>,
    tag: Tag,
    lengths: &[u64],
) -> Result<usize, CollectiveError> {
    let counts = lengths.iter().map(|length| *length as usize);
    let total = turn.engine().set_offsets(counts);
    let total = total.filter(|total| fits::<T>(*total));
    or_refuse(turn, tag, total.ok_or_else(|| too_many::<T>(lengths)))
}

/// So many elements of so many bytes: more than there is memory for.
fn too_many<T>(lengths: &[u64]) -> CollectiveError {
    let size = size_of::<T>();
    invalid(match lengths {
        [length] => format!("{length} elements of {size} bytes do not fit memory"),
        lengths => format!("{lengths:?} elements of {size} bytes do not fit memory"),
    })
}

/// Makes `into` as long as that, of neutral values. Fails if there is not so much memory: the length may be a peer's.
fn make_room<T: Element>(into: &mut Vec<T>, length: usize) -> Result<(), CollectiveError> {
    let more = length.saturating_sub(into.len());
    if !fits::<T>(length) || into.try_reserve(more).is_err() {
        return Err(too_many::<T>(&[length as u64]));
    }
    into.clear();
    into.resize(length, T::default());
    Ok(())
}

/// So many neutral values. Fails if there is not so much memory.
fn zeros<T: Element>(length: usize) -> Result<Vec<T>, CollectiveError> {
    // It is asked for and given back, and then taken as zeros, which the system has at hand.
    if !fits::<T>(length) || Vec::<T>::new().try_reserve_exact(length).is_err() {
        return Err(too_many::<T>(&[length as u64]));
    }
    Ok(vec![T::default(); length])
}

/// An empty vector with room for so many values. Fails if there is not so much memory.
fn room<T>(length: usize) -> Result<Vec<T>, CollectiveError> {
    let mut room = Vec::new();
    match room.try_reserve_exact(length) {
        Ok(()) => Ok(room),
        Err(_) => Err(too_many::<T>(&[length as u64])),
    }
}

/// Whether a buffer has the length that it must have.
fn check_buffer(
    what: std::fmt::Arguments<'_>,
    given: usize,
    wanted: usize,
) -> Result<(), CollectiveError> {
    if given == wanted {
        return Ok(());
    }
    Err(invalid(format!(
        "{what} into a buffer of {given} elements: it must have {wanted}"
    )))
}

fn invalid(reason: String) -> CollectiveError {
    CollectiveError::Invalid { reason }
}
