//! The operations of a communicator.

mod alike;
mod broadcast;
mod buffer;
mod exchange;
mod gather;
mod grouped;
mod join;
mod object;
mod reduce;
mod scatter;
mod split;
mod start;
mod trace;

use std::time::Instant;

use kolo_transport::ids::Rank;

use crate::blocking::{Alarm, ParkAlarm, Wait, block_on};
use crate::communicator::Communicator;
use crate::element::{self, Element};
use crate::error::CollectiveError;
use crate::group_core::{OpGuard, Quick};
use crate::operation::{Operation, OperationKind, ReduceOp, Tag};

pub use gather::Gathered;
pub use start::Start;

/// What an operation gets from its caller, and where its result goes.
enum Ends<'a, T> {
    /// One buffer for both.
    Over(&'a mut [T]),
    /// Two. The second one is empty on ranks that get nothing.
    Into(&'a [T], &'a mut [T]),
    /// It has no result here.
    Nowhere(&'a [T]),
}

impl<T: Element> Ends<'_, T> {
    #[inline]
    fn input(&self) -> &[u8] {
        match self {
            Self::Over(data) => element::bytes_of(data),
            Self::Into(data, _) | Self::Nowhere(data) => element::bytes_of(data),
        }
    }

    #[inline]
    fn store(&mut self, turn: &mut OpGuard<'_>) {
        match self {
            Self::Over(data) => turn.store_over(data),
            Self::Into(data, result) => turn.store_with(element::bytes_of(data), result),
            Self::Nowhere(_) => {}
        }
    }
}

impl Communicator {
    fn blocking<R>(operation: impl AsyncFnOnce(&mut ParkAlarm<'_>, Instant) -> R) -> R {
        let started = Instant::now();
        let wait = Wait::default();
        block_on(&wait, |mut alarm| async move {
            operation(&mut alarm, started).await
        })
    }

    /// Does an operation, whose buffers fit, the [short way](crate::group_core::GroupCore::quick). `None` if that leads nowhere: then nothing
    /// was done.
    #[inline]
    fn short<T: Element>(
        &self,
        request: &Operation,
        mut data: Ends<'_, T>,
    ) -> Option<Result<(), CollectiveError>> {
        // A turn is not handed around where it ends well: to move it is a tenth of the time of the shortest operations.
        match self.inner.quick(request, &self.options, data.input()) {
            Quick::Done(mut turn) => {
                data.store(&mut turn);
                Some(Ok(()))
            }
            Quick::Begun(turn, tag) => Some(Self::resume(turn, tag, data)),
            Quick::Failed(error) => Some(Err(error)),
            Quick::No => None,
        }
    }

    fn resume<T: Element>(
        mut turn: OpGuard<'_>,
        tag: Tag,
        mut data: Ends<'_, T>,
    ) -> Result<(), CollectiveError> {
        Self::blocking(async |alarm, _| turn.resume(alarm, tag, data.input()).await)?;
        data.store(&mut turn);
        Ok(())
    }

    /// Waits for this operation's turn.
    async fn turn<A: Alarm>(
        &self,
        alarm: &mut A,
        started: Instant,
        kind: OperationKind,
    ) -> Result<(OpGuard<'_>, Tag), CollectiveError> {
        let (mut turn, tag) = self.inner.turn(alarm, started, kind.name()).await?;
        turn.operation = Operation::new(kind, None, 0);
        turn.name = self.options.name;
        turn.asked = self.options.asked.unwrap_or(started);
        Ok((turn, tag))
    }

    /// What an operation needs, or its end: it takes its number, and the peers hear why this rank does not do it.
    async fn or_refuse<A: Alarm, R>(
        &self,
        alarm: &mut A,
        started: Instant,
        kind: OperationKind,
        needed: Result<R, CollectiveError>,
    ) -> Result<R, CollectiveError> {
        match needed {
            Ok(needed) => Ok(needed),
            Err(error) => {
                let (mut turn, tag) = self.turn(alarm, started, kind).await?;
                Err(turn.refuse(tag, error))
            }
        }
    }

    /// As [`Communicator::or_refuse`], on this thread.
    fn or_refuse_now<R>(
        &self,
        kind: OperationKind,
        needed: Result<R, CollectiveError>,
    ) -> Result<R, CollectiveError> {
        match needed {
            Ok(needed) => Ok(needed),
            needed => Self::blocking(async |alarm, started| {
                self.or_refuse(alarm, started, kind, needed).await
            }),
        }
    }

    fn world(&self) -> usize {
        self.inner.world as usize
    }

    fn request<T: Element>(&self, kind: OperationKind, count: usize) -> Operation {
        let mut operation = Operation::new(kind, Some(T::DTYPE), count as u64);
        self.options.apply(&mut operation);
        operation
    }

    fn reduction<T: Element>(&self, kind: OperationKind, count: usize, op: ReduceOp) -> Operation {
        let mut operation = Operation {
            reduce: Some(op),
            ..Operation::new(kind, Some(T::DTYPE), count as u64)
        };
        self.options.apply(&mut operation);
        operation
    }

    /// A root that is there, or why not.
    fn check_root(&self, kind: OperationKind, root: Rank) -> Result<u32, CollectiveError> {
        let world = self.inner.world;
        if root.0 < world {
            return Ok(root.0);
        }
        let way = match kind {
            OperationKind::Broadcast | OperationKind::Scatter | OperationKind::ScatterVarcount => {
                "from"
            }
            _ => "to",
        };
        Err(CollectiveError::Invalid {
            reason: format!(
                "{kind} {way} root {root}: a world of {world} has ranks 0 to {}",
                world - 1
            ),
        })
    }

    /// Returns when all ranks have come.
    ///
    /// ```
    /// # use kolo_collectives::local_group;
    /// let group = local_group(2)?;
    /// std::thread::scope(|scope| {
    ///     for comm in &group {
    ///         scope.spawn(|| comm.barrier());
    ///     }
    /// });
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`].
    pub fn barrier(&self) -> Result<(), CollectiveError> {
        if let Some(done) = self.short(&Operation::BARRIER, Ends::<u8>::Nowhere(&[])) {
            return done;
        }
        Self::blocking(async |alarm, started| self.meet(alarm, started).await)
    }

    /// As [`Communicator::barrier`]. Cancels the operation on all ranks if it is dropped.
    ///
    /// # Errors
    ///
    /// As [`Communicator::barrier`].
    pub async fn barrier_async(&self) -> Result<(), CollectiveError> {
        let started = Instant::now();
        let sleep = std::pin::pin!(self.inner.sleep());
        self.meet(&mut crate::blocking::SleepAlarm(sleep), started)
            .await
    }

    async fn meet<A: Alarm>(&self, alarm: &mut A, started: Instant) -> Result<(), CollectiveError> {
        let (mut turn, tag) = self.turn(alarm, started, OperationKind::Barrier).await?;
        turn.run(alarm, tag, Operation::BARRIER, &[]).await
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

/// So many elements of so many bytes: more than there is memory for.
fn too_many<T>(lengths: &[u64]) -> CollectiveError {
    let size = size_of::<T>();
    let reason = match lengths {
        [length] => format!("{length} elements of {size} bytes do not fit memory"),
        lengths => format!("{lengths:?} elements of {size} bytes do not fit memory"),
    };
    CollectiveError::Invalid { reason }
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

fn wrong_buffer(what: std::fmt::Arguments<'_>, given: usize, wanted: usize) -> CollectiveError {
    CollectiveError::Invalid {
        reason: format!("{what} into a buffer of {given} elements: it must have {wanted}"),
    }
}
