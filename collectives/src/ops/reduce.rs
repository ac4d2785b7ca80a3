//! All-reduce, reduce, reduce-scatter.

use std::ops::Range;

use kolo_transport::ids::Rank;

use super::alike::{Reduce, ReduceScatter};
use super::forms::{Ends, started};
use super::{check_buffer, invalid, make_room};
use crate::communicator::Communicator;
use crate::element::{Element, Elements};
use crate::error::CollectiveError;
use crate::operation::{Operation, OperationKind, ReduceOp};
use crate::schedule::{Counts, Rows};

impl Communicator {
    /// Combines the ranks' values, element by element; every rank gets the result in `data`. All ranks give
    /// the same length. [`ReduceOp`] says what operators do.
    ///
    /// ```
    /// # use kolo_collectives::{ReduceOp, run_local};
    /// run_local(2, |comm| {
    ///     let mut data = [comm.rank().0 as i32, 5];
    ///     assert_eq!(comm.all_reduce(&mut data, ReduceOp::Sum), Ok(()));
    ///     assert_eq!(data, [1, 10]);
    ///
    ///     // One number needs no slice.
    ///     let mut loss = 0.5 + comm.rank().0 as f32;
    ///     assert_eq!(comm.all_reduce(&mut loss, ReduceOp::Average), Ok(()));
    ///     assert_eq!(loss, 1.0);
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`]; `data` is as it was.
    pub fn all_reduce<E: Elements + ?Sized>(
        &self,
        data: &mut E,
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        let data = data.elements_mut();
        let request = self.reduction::<E::Item>(OperationKind::AllReduce, data.len(), op);
        self.once(&request, Ends::Over(data), || Ok(()))
    }

    /// As [`Communicator::all_reduce`]. Cancels the operation on all ranks if it is dropped.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`].
    pub async fn all_reduce_async<E: Elements + ?Sized>(
        &self,
        data: &mut E,
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        let data = data.elements_mut();
        let request = self.reduction::<E::Item>(OperationKind::AllReduce, data.len(), op);
        self.once_async(&request, Ends::Over(data), Ok(())).await
    }

    /// As [`Communicator::all_reduce`], into another buffer of the same length.
    ///
    /// ```
    /// # use kolo_collectives::{ReduceOp, run_local};
    /// run_local(2, |comm| {
    ///     let (data, mut sum) = ([1.5_f32; 4], [0.0; 4]);
    ///     comm.all_reduce_into(&data, &mut sum, ReduceOp::Sum).unwrap();
    ///     assert_eq!((data, sum), ([1.5; 4], [3.0; 4]));
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`], of which [`CollectiveError::Invalid`] for a buffer of another length (the peers
    /// fail too). After another failure `result` may hold anything.
    pub fn all_reduce_into<T: Element>(
        &self,
        data: &[T],
        result: &mut [T],
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        let request = self.reduction::<T>(OperationKind::AllReduce, data.len(), op);
        let (wanted, given) = (data.len(), result.len());
        self.once(&request, Ends::Into(data, result), || {
            check_buffer(format_args!("{request}"), given, wanted)
        })
    }

    /// Combines the ranks' values; the root gets the result in `data`. On the others `data` stays as it is.
    ///
    /// ```
    /// # use kolo_collectives::{ReduceOp, run_local};
    /// # use kolo_collectives::Rank;
    /// run_local(2, |comm| {
    ///     let mut data = [3_u64];
    ///     comm.reduce(&mut data, ReduceOp::Product, Rank(1)).unwrap();
    ///     assert_eq!(data, if comm.rank() == Rank(1) { [9] } else { [3] });
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`]; `data` is as it was. [`ReduceOp::Adasum`] is not defined here.
    pub fn reduce<E: Elements + ?Sized>(
        &self,
        data: &mut E,
        op: ReduceOp,
        root: Rank,
    ) -> Result<(), CollectiveError> {
        let data = data.elements_mut();
        let request = Operation {
            root: Some(root.0),
            ..self.reduction::<E::Item>(OperationKind::Reduce, data.len(), op)
        };
        let ends = if root == self.rank() {
            Ends::Over(data)
        } else {
            Ends::Nowhere(data)
        };
        self.once(&request, ends, || self.check_root(request.kind, root))
    }

    /// Combines the ranks' values; every rank gets its part of the result.
    ///
    /// `rows` is the first dimension of `data`, the same on all ranks; it is split as evenly as can be: the first
    /// `rows % world_size` ranks get one row more ([`Communicator::rows_of`]).
    ///
    /// ```
    /// # use kolo_collectives::{ReduceOp, run_local};
    /// run_local(2, |comm| {
    ///     // Three rows of two: rank 0 gets two of them, rank 1 the last one.
    ///     let mine = comm.reduce_scatter(&[1, 2, 3, 4, 5, 6], 3, ReduceOp::Sum).unwrap();
    ///     assert_eq!(mine, if comm.rank().0 == 0 { vec![2, 4, 6, 8] } else { vec![10, 12] });
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`], of which [`CollectiveError::Invalid`] if `data` is not a whole number of `rows`.
    /// [`ReduceOp::Adasum`] is not defined here.
    pub fn reduce_scatter<T: Element>(
        &self,
        data: &[T],
        rows: usize,
        op: ReduceOp,
    ) -> Result<Vec<T>, CollectiveError> {
        let mut part = Vec::new();
        self.scatter_reduced(data, rows, op, |length| {
            make_room(&mut part, length)?;
            Ok(&mut part[..])
        })?;
        Ok(part)
    }

    /// As [`Communicator::reduce_scatter`], into a buffer of as many elements as this rank's rows have.
    ///
    /// ```
    /// # use kolo_collectives::{ReduceOp, run_local};
    /// run_local(2, |comm| {
    ///     let mut mine = [0_u8; 2];
    ///     comm.reduce_scatter_into(&[1, 2, 3, 4], 2, &mut mine, ReduceOp::Sum).unwrap();
    ///     assert_eq!(mine, [[2, 4], [6, 8]][comm.rank().index()]);
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Communicator::reduce_scatter`], and [`CollectiveError::Invalid`] for a buffer of another length. After another failure
    /// `part` may hold anything.
    pub fn reduce_scatter_into<T: Element>(
        &self,
        data: &[T],
        rows: usize,
        part: &mut [T],
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        self.scatter_reduced(data, rows, op, |length| {
            let rank = self.inner.me;
            let what = format_args!("reduce_scatter of {rows} rows on rank {rank}");
            check_buffer(what, part.len(), length).map(|()| part)
        })
    }

    fn scatter_reduced<'a, T: Element>(
        &self,
        data: &[T],
        rows: usize,
        op: ReduceOp,
        room: impl FnOnce(usize) -> Result<&'a mut [T], CollectiveError>,
    ) -> Result<(), CollectiveError> {
        let request = Operation {
            rows: rows as u64,
            ..self.reduction::<T>(OperationKind::ReduceScatter, data.len(), op)
        };
        let room =
            width(data, rows).and_then(|width| room(self.rows_of(rows, self.rank()).len() * width));
        let room = self.needed(request.kind, room)?;
        self.once(&request, Ends::Into(data, room), || Ok(()))
    }

    /// The rows that a rank of this group gets of a [`Communicator::reduce_scatter`]. Panics if there is no such rank.
    ///
    /// ```
    /// # use kolo_collectives::local_group;
    /// # use kolo_collectives::Rank;
    /// let group = local_group(3)?;
    /// assert_eq!(group[0].rows_of(5, Rank(0)), 0..2);
    /// assert_eq!(group[0].rows_of(5, Rank(2)), 4..5);
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    pub fn rows_of(&self, rows: usize, rank: Rank) -> Range<usize> {
        let world = self.inner.world;
        assert!(rank.0 < world, "a world of {world} has no rank {rank}");
        let split = Rows {
            rows,
            width: 1,
            world,
        };
        let start = split.before(rank.0);
        start..start + split.of(rank.0)
    }
}

started! {
    all_reduce[T: Element](data: Vec<T>, op: ReduceOp) -> Vec<T>,
    |of| of.reduction::<T>(OperationKind::AllReduce, data.len(), op),
    Reduce(data, op)
}

started! {
    reduce[T: Element](data: Vec<T>, op: ReduceOp, root: Rank) -> Vec<T>,
    |of| Operation {
        root: Some(root.0),
        ..of.reduction::<T>(OperationKind::Reduce, data.len(), op)
    },
    |comm, data| comm.reduce(data, op, root)
}

started! {
    reduce_scatter[T: Element](data: Vec<T>, rows: usize, op: ReduceOp) -> Vec<T>,
    |of| Operation {
        rows: rows as u64,
        ..of.reduction::<T>(OperationKind::ReduceScatter, data.len(), op)
    },
    ReduceScatter(data, rows, op)
}

/// Elements of a row.
pub(super) fn width<T>(data: &[T], rows: usize) -> Result<usize, CollectiveError> {
    let width = data.len().checked_div(rows).unwrap_or(0);
    if width * rows == data.len() {
        return Ok(width);
    }
    Err(invalid(format!(
        "reduce_scatter of {} elements in {rows} rows: the elements are a whole number for each row; a vector of n has n rows",
        data.len()
    )))
}
