//! Operations on several buffers at once: all succeed or none.

use super::forms::{or_refuse, started};
use super::reduce::width;
use super::{Gathered, invalid, make_room, room, set_offsets, too_many, total};
use crate::communicator::Communicator;
use crate::element::{self, Element};
use crate::error::CollectiveError;
use crate::operation::{Operation, OperationKind, ReduceOp};
use crate::reduce;
use crate::schedule::{Counts as _, Rows};
use crate::shape;

/// Most buffers of an operation that takes a number or a part for each.
const MOST: usize = u16::MAX as usize;

fn check_count(count: usize, what: &str) -> Result<(), CollectiveError> {
    if count <= MOST {
        return Ok(());
    }
    Err(invalid(format!(
        "{count} buffers {what}: give {MOST} at most"
    )))
}

impl Communicator {
    /// As [`Communicator::all_reduce`], of several buffers in one operation: all succeed or none. The ranks give as many
    /// buffers, of the same lengths. It takes the time of one operation on all elements. (With [`ReduceOp::Adasum`], which
    /// looks at each buffer as a whole, it is one operation for each.)
    ///
    /// ```
    /// # use kolo_collectives::{ReduceOp, run_local};
    /// run_local(2, |comm| {
    ///     let (mut weights, mut bias) = ([1.0_f32; 6], [2.0_f32; 2]);
    ///     comm.all_reduce_grouped(&mut [&mut weights, &mut bias], ReduceOp::Sum).unwrap();
    ///     assert_eq!((weights, bias), ([2.0; 6], [4.0; 2]));
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`]; all buffers are as they were.
    pub fn all_reduce_grouped<T: Element>(
        &self,
        buffers: &mut [&mut [T]],
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        if op == ReduceOp::Adasum {
            return self.all_reduce_each(buffers, op);
        }
        let request = self.grouped::<T>(buffers.iter().map(|buffer| buffer.len()), op);
        self.in_turn(request.kind, async |alarm, turn, tag| {
            let parts = || buffers.iter().map(|buffer| element::bytes_of(buffer));
            if !turn.run_parts(alarm, tag, request, parts).await? {
                return Ok(());
            }
            let mut at = 0;
            for buffer in buffers {
                let end = at + buffer.len();
                reduce::store(buffer, request.wire, turn.result(at, end));
                at = end;
            }
            Ok(())
        })
    }

    /// One operation for each buffer. If one fails, those before it get back what was in them.
    fn all_reduce_each<T: Element>(
        &self,
        buffers: &mut [&mut [T]],
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        let kind = OperationKind::AllReduce;
        self.in_turn(kind, async |alarm, turn, mut tag| {
            let count = buffers.len();
            or_refuse(turn, tag, check_count(count, "by adasum"))?;
            let shape = shape::of_each(buffers.iter().map(|buffer| buffer.len()));
            if count == 0 {
                // Others may have some.
                let request = Operation {
                    shape,
                    ..self.reduction::<T>(kind, 0, op)
                };
                return turn.run(alarm, tag, request, &[]).await;
            }
            // For all of them at once: the others hear that there is no room here before anything is overwritten.
            let lengths = buffers.iter().map(|buffer| buffer.len());
            let kept = lengths.map(room).collect::<Result<Vec<Vec<T>>, _>>();
            let mut kept = or_refuse(turn, tag, kept)?;
            for index in 0..count {
                let buffer = &mut *buffers[index];
                let request = Operation {
                    shape,
                    rows: (count - index) as u64,
                    ..self.reduction::<T>(kind, buffer.len(), op)
                };
                kept[index].extend_from_slice(buffer);
                let done = turn.run_in_place(alarm, tag, request, buffer, true).await;
                if let Err(error) = done {
                    for (buffer, was) in buffers.iter_mut().zip(&kept[..=index]) {
                        buffer.copy_from_slice(was);
                    }
                    return Err(error);
                }
                tag = tag.next_part();
            }
            Ok(())
        })
    }

    /// The operation for several buffers together.
    pub(crate) fn grouped<T: Element>(
        &self,
        lengths: impl Iterator<Item = usize> + Clone,
        op: ReduceOp,
    ) -> Operation {
        let sum = lengths.clone().sum();
        let mut request = self.reduction::<T>(OperationKind::AllReduce, sum, op);
        request.shape = shape::of_each(lengths);
        request
    }

    /// As [`Communicator::all_gather_varcount`], of several buffers: all succeed or none. The ranks give as many buffers, 65,535
    /// at most, of any lengths; results are in the order of the buffers. It takes the time of one operation on all elements,
    /// and packs and unpacks them.
    ///
    /// ```
    /// # use kolo_collectives::run_local;
    /// # use kolo_collectives::Rank;
    /// run_local(2, |comm| {
    ///     let me = comm.rank().0;
    ///     let (ids, scores) = (vec![me; 2], vec![10 + me; comm.rank().index()]);
    ///     let all = comm.all_gather_grouped(&[&ids, &scores]).unwrap();
    ///     assert_eq!(all[0].values, [0, 0, 1, 1]);
    ///     assert_eq!((&all[1].values[..], &all[1].counts[..]), (&[11][..], &[0, 1][..]));
    ///     assert_eq!(all[1].of(Rank(1)), [11]);
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`], of which [`CollectiveError::Mismatch`] if the ranks give different numbers of buffers.
    pub fn all_gather_grouped<T: Element>(
        &self,
        buffers: &[&[T]],
    ) -> Result<Vec<Gathered<T>>, CollectiveError> {
        let kind = OperationKind::AllGatherVarcount;
        self.in_turn(kind, async |alarm, turn, tag| {
            let count = buffers.len();
            or_refuse(turn, tag, check_count(count, "to gather"))?;
            let own: Vec<u64> = buffers.iter().map(|buffer| buffer.len() as u64).collect();
            let lengths = self
                .lengths::<_, T>(alarm, turn, tag, (kind, None), &own)
                .await?;
            let of_rank = |rank: usize| &lengths[rank * count..][..count];
            let sums: Vec<u64> = (0..self.world())
                .map(|rank| total(of_rank(rank)) as u64)
                .collect();
            let sum = set_offsets::<T>(turn, tag.next_part(), &sums)?;
            let mut given = Vec::new();
            or_refuse(turn, tag.next_part(), make_room(&mut given, total(&own)))?;
            let mut rest = &mut given[..];
            for buffer in buffers {
                let (place, behind) = rest.split_at_mut(buffer.len());
                place.copy_from_slice(buffer);
                rest = behind;
            }
            let values = Operation {
                rows: count as u64,
                ..self.request::<T>(kind, sum)
            };
            let input = element::bytes_of(&given);
            turn.run(alarm, tag.next_part(), values, input).await?;
            // Not before: memory is touched here that a peer says it fills.
            let mut packed = Vec::new();
            make_room(&mut packed, sum)?;
            turn.store_with(input, &mut packed);
            let mut all = vec![Gathered::default(); count];
            for (index, all) in all.iter_mut().enumerate() {
                let counts = (0..self.world()).map(|rank| of_rank(rank)[index] as usize);
                all.counts.extend(counts);
                let length: usize = all.counts.iter().sum();
                if all.values.try_reserve_exact(length).is_err() {
                    return Err(too_many::<T>(&[length as u64]));
                }
            }
            let mut rest = &packed[..];
            for rank in 0..self.world() {
                for (all, length) in all.iter_mut().zip(of_rank(rank)) {
                    let (values, behind) = rest.split_at(*length as usize);
                    all.values.extend_from_slice(values);
                    rest = behind;
                }
            }
            turn.engine().lengths = lengths;
            Ok(all)
        })
    }

    /// As [`Communicator::reduce_scatter`], of several buffers in one operation: all succeed or none. Each comes with the number
    /// of its rows, and all ranks give the same lengths and rows; this rank's rows come back in the order of the buffers. It takes
    /// the time of one operation on all elements, and packs and unpacks them. Where rows can't be split evenly, time and memory are
    /// as if all ranks got as much as the one that gets most: large buffers of fewer rows than ranks are better by themselves.
    ///
    /// ```
    /// # use kolo_collectives::{ReduceOp, run_local};
    /// run_local(2, |comm| {
    ///     let (weights, bias) = ([1, 2, 3, 4], [5, 6, 7]);
    ///     let mine = comm.reduce_scatter_grouped(&[(&weights, 2), (&bias, 3)], ReduceOp::Sum);
    ///     let of_rank = [[vec![2, 4], vec![10, 12]], [vec![6, 8], vec![14]]];
    ///     assert_eq!(mine.unwrap(), of_rank[comm.rank().index()]);
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`], of which [`CollectiveError::Invalid`] if a buffer is not a whole number of its rows.
    /// [`ReduceOp::Adasum`] is not defined here.
    pub fn reduce_scatter_grouped<T: Element>(
        &self,
        buffers: &[(&[T], usize)],
        op: ReduceOp,
    ) -> Result<Vec<Vec<T>>, CollectiveError> {
        self.in_turn(OperationKind::ReduceScatter, async |alarm, turn, tag| {
            let world = self.inner.world;
            let splits = buffers.iter().map(|(data, rows)| {
                let (rows, width) = (*rows, width(data, *rows)?);
                Ok(Rows { rows, width, world })
            });
            let splits: Vec<Rows> = or_refuse(turn, tag, splits.collect())?;
            // Rank 0 gets the most of each.
            let most: usize = splits.iter().map(|split| split.of(0)).sum();
            let lengths = buffers.iter().map(|(data, rows)| (data.len(), *rows));
            let request = self.rows_grouped::<T>(lengths, op);
            // One row for each rank.
            let mut packed = Vec::new();
            let length = most.saturating_mul(self.world());
            or_refuse(turn, tag, make_room(&mut packed, length))?;
            for (rank, mut row) in (0..world).zip(packed.chunks_mut(most.max(1))) {
                for ((data, _), split) in buffers.iter().zip(&splits) {
                    let (place, behind) = row.split_at_mut(split.of(rank));
                    place.copy_from_slice(&data[split.before(rank)..][..place.len()]);
                    row = behind;
                }
            }
            let mut mine = Vec::new();
            or_refuse(turn, tag, make_room(&mut mine, most))?;
            turn.run_into(alarm, tag, request, &packed, &mut mine)
                .await?;
            let mut rest = &mine[..];
            let parts = splits.iter().map(|split| {
                let (part, behind) = rest.split_at(split.of(self.inner.me));
                rest = behind;
                part.to_vec()
            });
            Ok(parts.collect())
        })
    }

    /// The operation for several buffers, of which each has a length and a number of rows.
    pub(crate) fn rows_grouped<T: Element>(
        &self,
        buffers: impl Iterator<Item = (usize, usize)> + Clone,
        op: ReduceOp,
    ) -> Operation {
        let world = self.inner.world;
        let shares = buffers.clone().map(|(length, rows)| {
            let width = length.checked_div(rows).unwrap_or(0);
            let split = Rows { rows, width, world };
            split.of(0)
        });
        let count = shares.sum::<usize>().saturating_mul(world as usize);
        Operation {
            rows: u64::from(world),
            shape: shape::of_each(buffers.flat_map(|(length, rows)| [length, rows])),
            ..self.reduction::<T>(OperationKind::ReduceScatter, count, op)
        }
    }
}

started! {
    all_reduce_grouped[T: Element](buffers: Vec<Vec<T>>, op: ReduceOp) -> Vec<Vec<T>>,
    |of| Operation {
        // Not to be fused with others.
        rows: buffers.len().max(1) as u64,
        ..of.grouped::<T>(buffers.iter().map(Vec::len), op)
    },
    |comm, buffers| {
        let mut parts: Vec<&mut [T]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
        comm.all_reduce_grouped(&mut parts, op)
    }
}

started! {
    all_gather_grouped[T: Element](buffers: Vec<Vec<T>>) -> Vec<Gathered<T>>,
    |of| Operation {
        rows: buffers.len() as u64,
        ..of.request::<T>(OperationKind::AllGatherVarcount, 0)
    },
    |comm| {
        let buffers: Vec<&[T]> = buffers.iter().map(Vec::as_slice).collect();
        comm.all_gather_grouped(&buffers)
    }
}

started! {
    reduce_scatter_grouped[T: Element](buffers: Vec<(Vec<T>, usize)>, op: ReduceOp) -> Vec<Vec<T>>,
    |of| Operation {
        // Not to be fused with others.
        rows: Operation::OF_SEVERAL,
        ..of.rows_grouped::<T>(buffers.iter().map(|(data, rows)| (data.len(), *rows)), op)
    },
    |comm| {
        let buffers = buffers.iter().map(|(data, rows)| (data.as_slice(), *rows));
        comm.reduce_scatter_grouped(&buffers.collect::<Vec<_>>(), op)
    }
}
