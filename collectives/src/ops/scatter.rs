//! Scatters.

use kolo_transport::ids::Rank;

use super::forms::{Ends, or_refuse, started};
use super::{check_buffer, invalid, make_room, set_offsets};
use crate::communicator::Communicator;
use crate::element::{self, Element};
use crate::error::CollectiveError;
use crate::operation::{Operation, OperationKind};

impl Communicator {
    /// Every rank gets its part, of equal length, of the root's values: part i goes to rank i. The others' `data` is not
    /// looked at; `length` is that of a part.
    ///
    /// ```
    /// # use kolo_collectives::run_local;
    /// # use kolo_collectives::Rank;
    /// run_local(2, |comm| {
    ///     let all: &[i32] = if comm.rank() == Rank(0) { &[1, 2, 3, 4] } else { &[] };
    ///     let mine = comm.scatter(all, 2, Rank(0)).unwrap();
    ///     assert_eq!(mine, if comm.rank() == Rank(0) { [1, 2] } else { [3, 4] });
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`], of which [`CollectiveError::Invalid`] if the root's data has another length than `length`
    /// times the world size.
    pub fn scatter<T: Element>(
        &self,
        data: &[T],
        length: usize,
        root: Rank,
    ) -> Result<Vec<T>, CollectiveError> {
        let mut part = Vec::new();
        self.needed(OperationKind::Scatter, make_room(&mut part, length))?;
        self.scatter_into(data, &mut part, root)?;
        Ok(part)
    }

    /// As [`Communicator::scatter`], into a buffer of the length of a part.
    ///
    /// # Errors
    ///
    /// As [`Communicator::scatter`]; `part` may hold some of the values then.
    pub fn scatter_into<T: Element>(
        &self,
        data: &[T],
        part: &mut [T],
        root: Rank,
    ) -> Result<(), CollectiveError> {
        let request = self.rooted::<T>(OperationKind::Scatter, part.len(), root);
        let (given, length, world) = (data.len(), part.len(), self.world());
        let is_root = root == self.rank();
        let input = if is_root { data } else { &[] };
        self.once(&request, Ends::Into(input, part), || {
            self.check_root(request.kind, root)?;
            if !is_root || Some(given) == length.checked_mul(world) {
                return Ok(());
            }
            Err(invalid(format!(
                "{request}: the root gave {given} elements, which is not {length} for each of {world} ranks"
            )))
        })
    }

    /// Every rank gets its part of the root's values; `counts` says how many elements each rank gets, in rank order. The
    /// others' `data` and `counts` are not looked at. It has two parts: one for the counts, one for the values.
    ///
    /// ```
    /// # use kolo_collectives::run_local;
    /// # use kolo_collectives::Rank;
    /// run_local(2, |comm| {
    ///     let mine = match comm.rank() {
    ///         Rank(0) => comm.scatter_varcount(&[1.0, 2.0, 3.0], &[1, 2], Rank(0)),
    ///         _ => comm.scatter_varcount(&[], &[], Rank(0)),
    ///     };
    ///     assert_eq!(mine.unwrap().len(), comm.rank().index() + 1);
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`], of which [`CollectiveError::Invalid`] if the root's counts are not one for each rank, or their
    /// sum is not the length of its data.
    pub fn scatter_varcount<T: Element>(
        &self,
        data: &[T],
        counts: &[usize],
        root: Rank,
    ) -> Result<Vec<T>, CollectiveError> {
        let mut part = Vec::new();
        self.scatter_varcount_into(data, counts, &mut part, root)?;
        Ok(part)
    }

    /// As [`Communicator::scatter_varcount`], into what an earlier one returned: memory is used again.
    ///
    /// # Errors
    ///
    /// As [`Communicator::scatter_varcount`]; `part` is as it was.
    pub fn scatter_varcount_into<T: Element>(
        &self,
        data: &[T],
        counts: &[usize],
        part: &mut Vec<T>,
        root: Rank,
    ) -> Result<(), CollectiveError> {
        let (kind, world) = (OperationKind::ScatterVarcount, self.world());
        self.in_turn(kind, async |alarm, turn, tag| {
            let is_root = root == self.rank();
            let checked = self.check_root(kind, root).and_then(|()| {
                if is_root {
                    check_counts(counts, data.len(), world)?;
                }
                Ok(())
            });
            or_refuse(turn, tag, checked)?;
            let request = Operation {
                root: Some(root.0),
                ..Operation::lengths(OperationKind::Broadcast, kind, T::DTYPE, world as u64)
            };
            let mut lengths = std::mem::take(&mut turn.engine().lengths);
            lengths.clear();
            lengths.extend(counts.iter().take(world).map(|count| *count as u64));
            lengths.resize(world, 0);
            turn.run(alarm, tag, request, bytemuck::cast_slice(&lengths))
                .await?;
            turn.store(&mut lengths);
            let total = set_offsets::<T>(turn, tag.next_part(), &lengths)?;
            let values = self.rooted::<T>(kind, total, root);
            let input = if is_root { data } else { &[] };
            turn.run(alarm, tag.next_part(), values, element::bytes_of(input))
                .await?;
            // Not before: memory is touched here that the root says it fills.
            make_room(part, lengths[self.inner.me as usize] as usize)?;
            turn.store(part);
            turn.engine().lengths = lengths;
            Ok(())
        })
    }
}

/// Whether the root's counts are one for each rank, and those of all its elements.
fn check_counts(counts: &[usize], given: usize, world: usize) -> Result<(), CollectiveError> {
    let kind = OperationKind::ScatterVarcount;
    let what = format_args!("the counts of {kind} on {world} ranks");
    check_buffer(what, counts.len(), world)?;
    let mut counted = counts.iter();
    if counted.try_fold(0_usize, |sum, count| sum.checked_add(*count)) == Some(given) {
        return Ok(());
    }
    Err(invalid(format!(
        "{kind} of {counts:?} elements: the root gave {given} elements in all"
    )))
}

started! {
    scatter[T: Element](data: Vec<T>, length: usize, root: Rank) -> Vec<T>,
    |of| of.rooted::<T>(OperationKind::Scatter, length, root),
    |comm| comm.scatter(&data, length, root)
}

started! {
    scatter_varcount[T: Element](data: Vec<T>, counts: Vec<usize>, root: Rank) -> Vec<T>,
    |of| of.rooted::<T>(OperationKind::ScatterVarcount, 0, root),
    |comm| comm.scatter_varcount(&data, &counts, root)
}
