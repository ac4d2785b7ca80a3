//! Scatters.

use kolo_transport::ids::Rank;

use super::{Ends, fits, make_room, too_many, wrong_buffer};
use crate::communicator::Communicator;
use crate::element::{self, Element};
use crate::error::CollectiveError;
use crate::operation::{Operation, OperationKind};

impl Communicator {
    /// Every rank gets its part, of equal length, of the root's values: part i goes to rank i. The others' `data` is not
    /// looked at; `length` is that of a part.
    ///
    /// ```
    /// # use kolo_collectives::local_group;
    /// # use kolo_collectives::Rank;
    /// let group = local_group(2)?;
    /// std::thread::scope(|scope| {
    ///     for comm in &group {
    ///         scope.spawn(move || {
    ///             let all: &[i32] = if comm.rank() == Rank(0) { &[1, 2, 3, 4] } else { &[] };
    ///             let mine = comm.scatter(all, 2, Rank(0)).unwrap();
    ///             assert_eq!(mine, if comm.rank() == Rank(0) { [1, 2] } else { [3, 4] });
    ///         });
    ///     }
    /// });
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
        if let Err(error) = make_room(&mut part, length) {
            return Self::blocking(async |alarm, started| {
                let (mut turn, tag) = self.turn(alarm, started, OperationKind::Scatter).await?;
                Err(turn.refuse(tag, error))
            });
        }
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
        let kind = OperationKind::Scatter;
        let request = Operation {
            root: Some(root.0),
            ..self.request::<T>(kind, part.len())
        };
        let input = if root == self.rank() { data } else { &[] };
        let fits = root != self.rank() || Some(data.len()) == part.len().checked_mul(self.world());
        if fits && let Some(done) = self.short(&request, Ends::Into(input, part)) {
            return done;
        }
        Self::blocking(async |alarm, started| {
            let (mut turn, tag) = self.turn(alarm, started, kind).await?;
            if let Err(error) = self.check_root(kind, root) {
                return Err(turn.refuse(tag, error));
            }
            if !fits {
                let reason = format!(
                    "{request}: the root gave {} elements, which is not {} for each of {} ranks",
                    data.len(),
                    part.len(),
                    self.world()
                );
                return Err(turn.refuse(tag, CollectiveError::Invalid { reason }));
            }
            turn.run_into(alarm, tag, request, input, part).await
        })
    }

    /// Every rank gets its part of the root's values; `counts` says how many elements each rank gets, in rank order. The
    /// others' `data` and `counts` are not looked at. It has two parts: one for the counts, one for the values.
    ///
    /// ```
    /// # use kolo_collectives::local_group;
    /// # use kolo_collectives::Rank;
    /// let group = local_group(2)?;
    /// std::thread::scope(|scope| {
    ///     for comm in &group {
    ///         scope.spawn(move || {
    ///             let mine = match comm.rank() {
    ///                 Rank(0) => comm.scatter_varcount(&[1.0, 2.0, 3.0], &[1, 2], Rank(0)),
    ///                 _ => comm.scatter_varcount(&[], &[], Rank(0)),
    ///             };
    ///             assert_eq!(mine.unwrap().len(), comm.rank().index() + 1);
    ///         });
    ///     }
    /// });
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
        Self::blocking(async |alarm, started| {
            let (kind, world) = (OperationKind::ScatterVarcount, self.world());
            let (mut turn, tag) = self.turn(alarm, started, kind).await?;
            let root = match self.check_root(kind, root) {
                Ok(root) => root,
                Err(error) => return Err(turn.refuse(tag, error)),
            };
            let is_root = root == self.inner.me;
            let sum = counts
                .iter()
                .try_fold(0_usize, |sum, count| sum.checked_add(*count));
            if is_root && counts.len() != world {
                let what = format_args!("the counts of {kind} on {world} ranks");
                return Err(turn.refuse(tag, wrong_buffer(what, counts.len(), world)));
            }
            if is_root && sum != Some(data.len()) {
                let reason = format!(
                    "{kind} of {counts:?} elements: the root gave {} elements in all",
                    data.len()
                );
                return Err(turn.refuse(tag, CollectiveError::Invalid { reason }));
            }
            let request = Operation {
                root: Some(root),
                ..Operation::lengths(OperationKind::Broadcast, kind, T::DTYPE, world as u64)
            };
            let mut lengths = std::mem::take(&mut turn.engine().lengths);
            lengths.clear();
            lengths.extend(counts.iter().take(world).map(|count| *count as u64));
            lengths.resize(world, 0);
            turn.run(alarm, tag, request, bytemuck::cast_slice(&lengths))
                .await?;
            turn.store(&mut lengths);
            let all = lengths.iter().map(|length| *length as usize);
            let Some(total) = turn
                .engine()
                .set_offsets(all)
                .filter(|total| fits::<T>(*total))
            else {
                return Err(turn.refuse(tag.next_part(), too_many::<T>(&lengths)));
            };
            let values = Operation {
                root: Some(root),
                ..self.request::<T>(kind, total)
            };
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
