//! Gathers, on every rank and on one.

use std::pin::pin;
use std::time::Instant;

use kolo_transport::ids::Rank;

use super::alike::Gather;
use super::forms::{Ends, or_refuse, started};
use super::{check_buffer, make_room, set_offsets, zeros};
use crate::blocking::{Alarm, SleepAlarm};
use crate::communicator::Communicator;
use crate::element::{self, Element};
use crate::error::CollectiveError;
use crate::group_core::OpGuard;
use crate::operation::{Operation, OperationKind, Tag};

/// What operations return whose parts have different lengths.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Gathered<T> {
    /// The elements that came from all ranks, in rank order.
    pub values: Vec<T>,
    /// How many of them came from each rank.
    pub counts: Vec<usize>,
}

impl<T> Gathered<T> {
    /// The elements of one rank. Panics if there is no such rank.
    pub fn of(&self, rank: Rank) -> &[T] {
        let start: usize = self.counts[..rank.index()].iter().sum();
        &self.values[start..start + self.counts[rank.index()]]
    }
}

impl<T: Element> Gathered<T> {
    /// Makes room. Nothing is allocated if it had as much before.
    pub(super) fn prepare(&mut self, counts: &[u64], total: usize) -> Result<(), CollectiveError> {
        make_room(&mut self.values, total)?;
        self.counts.clear();
        self.counts
            .extend(counts.iter().map(|count| *count as usize));
        Ok(())
    }
}

impl Communicator {
    /// Gathers the ranks' values on every rank, in rank order. All ranks give the same length.
    ///
    /// ```
    /// # use kolo_collectives::run_local;
    /// run_local(2, |comm| {
    ///     let mine = [comm.rank().0; 2];
    ///     assert_eq!(comm.all_gather(&mine), Ok(vec![0, 0, 1, 1]));
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`].
    pub fn all_gather<T: Element>(&self, data: &[T]) -> Result<Vec<T>, CollectiveError> {
        let mut all = self.room_for_all(OperationKind::AllGather, data)?;
        self.all_gather_into(data, &mut all)?;
        Ok(all)
    }

    /// As [`Communicator::all_gather`]. Cancels the operation on all ranks if it is dropped.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_gather`].
    pub async fn all_gather_async<T: Element>(
        &self,
        data: &[T],
    ) -> Result<Vec<T>, CollectiveError> {
        let request = self.request::<T>(OperationKind::AllGather, data.len());
        let (mut all, checked) = match zeros(data.len().saturating_mul(self.world())) {
            Ok(all) => (all, Ok(())),
            Err(error) => (Vec::new(), Err(error)),
        };
        self.once_async(&request, Ends::Into(data, &mut all), checked)
            .await?;
        Ok(all)
    }

    /// As [`Communicator::all_gather`], into a buffer of the world size times the length of `data`.
    ///
    /// ```
    /// # use kolo_collectives::run_local;
    /// run_local(2, |comm| {
    ///     let mut all = [0; 2];
    ///     comm.all_gather_into(&[comm.rank().0 + 7], &mut all).unwrap();
    ///     assert_eq!(all, [7, 8]);
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`], of which [`CollectiveError::Invalid`] for a buffer of another length (the peers
    /// fail too). After a failure `all` may hold anything.
    pub fn all_gather_into<T: Element>(
        &self,
        data: &[T],
        all: &mut [T],
    ) -> Result<(), CollectiveError> {
        let request = self.request::<T>(OperationKind::AllGather, data.len());
        let (length, given, world) = (data.len(), all.len(), self.world());
        self.once(&request, Ends::Into(data, all), || {
            let what = format_args!("all_gather of {length} elements on each of {world} ranks");
            check_buffer(what, given, length.saturating_mul(world))
        })
    }

    /// Gathers the ranks' values on every rank, in rank order. Each rank may give another length, 0 included.
    ///
    /// It has two parts: one for the lengths, one for the values.
    ///
    /// ```
    /// # use kolo_collectives::run_local;
    /// # use kolo_collectives::Rank;
    /// run_local(2, |comm| {
    ///     let mine = vec![1.5; comm.rank().index()];
    ///     let gathered = comm.all_gather_varcount(&mine).unwrap();
    ///     assert_eq!(gathered.counts, [0, 1]);
    ///     assert_eq!(gathered.of(Rank(1)), [1.5]);
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`].
    pub fn all_gather_varcount<T: Element>(
        &self,
        data: &[T],
    ) -> Result<Gathered<T>, CollectiveError> {
        let mut all = Gathered::default();
        self.all_gather_varcount_into(data, &mut all)?;
        Ok(all)
    }

    /// As [`Communicator::all_gather_varcount`]. Cancels the operation on all ranks if it is dropped.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_gather_varcount`].
    pub async fn all_gather_varcount_async<T: Element>(
        &self,
        data: &[T],
    ) -> Result<Gathered<T>, CollectiveError> {
        let started = Instant::now();
        let alarm = &mut SleepAlarm(pin!(self.inner.sleep()));
        let kind = OperationKind::AllGatherVarcount;
        let (mut turn, tag) = self.turn(alarm, started, kind).await?;
        let mut all = Gathered::default();
        self.gather_parts(alarm, &mut turn, tag, data, &mut all, None)
            .await?;
        Ok(all)
    }

    /// As [`Communicator::all_gather_varcount`], into what an earlier one returned: memory is used again.
    ///
    /// ```
    /// # use kolo_collectives::{Gathered, run_local};
    /// run_local(2, |comm| {
    ///     let mut all = Gathered::default();
    ///     for round in 0..3 {
    ///         comm.all_gather_varcount_into(&vec![round; comm.rank().index()], &mut all).unwrap();
    ///         assert_eq!((&all.values[..], &all.counts[..]), (&[round][..], &[0, 1][..]));
    ///     }
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`]; `all` is as it was.
    pub fn all_gather_varcount_into<T: Element>(
        &self,
        data: &[T],
        all: &mut Gathered<T>,
    ) -> Result<(), CollectiveError> {
        let kind = OperationKind::AllGatherVarcount;
        self.in_turn(kind, async |alarm, turn, tag| {
            self.gather_parts(alarm, turn, tag, data, all, None).await
        })
    }

    /// Gathers the ranks' values on the root, in rank order; the others get `None`. All ranks give the same length.
    ///
    /// ```
    /// # use kolo_collectives::run_local;
    /// # use kolo_collectives::Rank;
    /// run_local(2, |comm| {
    ///     let all = comm.gather(&[comm.rank().0], Rank(0)).unwrap();
    ///     assert_eq!(all, (comm.rank() == Rank(0)).then_some(vec![0, 1]));
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`].
    pub fn gather<T: Element>(
        &self,
        data: &[T],
        root: Rank,
    ) -> Result<Option<Vec<T>>, CollectiveError> {
        if root != self.rank() {
            self.gather_into(data, &mut [], root)?;
            return Ok(None);
        }
        let mut all = self.room_for_all(OperationKind::Gather, data)?;
        self.gather_into(data, &mut all, root)?;
        Ok(Some(all))
    }

    /// As [`Communicator::gather`], into a buffer that has the world size times the length of `data` on the root. On the
    /// others it may be empty, and stays as it is.
    ///
    /// ```
    /// # use kolo_collectives::run_local;
    /// # use kolo_collectives::Rank;
    /// run_local(2, |comm| {
    ///     let mut all = if comm.rank() == Rank(1) { vec![0; 2] } else { vec![] };
    ///     comm.gather_into(&[comm.rank().0], &mut all, Rank(1)).unwrap();
    ///     assert!(all.is_empty() || all == [0, 1]);
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Communicator::gather`], and [`CollectiveError::Invalid`] for a buffer of another length. After a failure `all` may
    /// hold anything.
    pub fn gather_into<T: Element>(
        &self,
        data: &[T],
        all: &mut [T],
        root: Rank,
    ) -> Result<(), CollectiveError> {
        let request = self.rooted::<T>(OperationKind::Gather, data.len(), root);
        let all = if root == self.rank() { all } else { &mut [] };
        let (length, given) = (data.len(), all.len());
        self.once(&request, Ends::Into(data, all), || {
            self.check_root(request.kind, root)?;
            if root != self.rank() {
                return Ok(());
            }
            let wanted = length.saturating_mul(self.world());
            check_buffer(format_args!("{request}"), given, wanted)
        })
    }

    /// As [`Communicator::gather`], where each rank may give another length. It has two parts.
    ///
    /// ```
    /// # use kolo_collectives::run_local;
    /// # use kolo_collectives::Rank;
    /// run_local(2, |comm| {
    ///     let mine = vec!['a' as u8; 1 + comm.rank().index()];
    ///     let all = comm.gather_varcount(&mine, Rank(0)).unwrap();
    ///     assert_eq!(all.map(|all| all.counts), (comm.rank() == Rank(0)).then_some(vec![1, 2]));
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`].
    pub fn gather_varcount<T: Element>(
        &self,
        data: &[T],
        root: Rank,
    ) -> Result<Option<Gathered<T>>, CollectiveError> {
        let mut all = Gathered::default();
        self.gather_varcount_into(data, &mut all, root)?;
        Ok((root == self.rank()).then_some(all))
    }

    /// As [`Communicator::gather_varcount`], into what an earlier one returned: memory is used again. On ranks that are
    /// not the root it stays as it is.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`]; `all` is as it was.
    pub fn gather_varcount_into<T: Element>(
        &self,
        data: &[T],
        all: &mut Gathered<T>,
        root: Rank,
    ) -> Result<(), CollectiveError> {
        let kind = OperationKind::GatherVarcount;
        self.in_turn(kind, async |alarm, turn, tag| {
            or_refuse(turn, tag, self.check_root(kind, root))?;
            self.gather_parts(alarm, turn, tag, data, all, Some(root.0))
                .await
        })
    }

    fn room_for_all<T: Element>(
        &self,
        kind: OperationKind,
        data: &[T],
    ) -> Result<Vec<T>, CollectiveError> {
        self.needed(kind, zeros(data.len().saturating_mul(self.world())))
    }

    /// Both parts of a gather of different lengths: to this root, or to all.
    async fn gather_parts<A: Alarm, T: Element>(
        &self,
        alarm: &mut A,
        turn: &mut OpGuard<'_>,
        tag: Tag,
        data: &[T],
        all: &mut Gathered<T>,
        root: Option<u32>,
    ) -> Result<(), CollectiveError> {
        let kind = turn.operation.kind;
        let lengths = self
            .lengths::<_, T>(alarm, turn, tag, (kind, root), &[data.len() as u64])
            .await?;
        let total = set_offsets::<T>(turn, tag.next_part(), &lengths)?;
        let values = Operation {
            root,
            ..self.request::<T>(kind, total)
        };
        let input = element::bytes_of(data);
        turn.run(alarm, tag.next_part(), values, input).await?;
        // Not before: memory is touched here that a peer says it fills.
        if root.is_none_or(|root| root == self.inner.me) {
            all.prepare(&lengths, total)?;
            turn.store_with(input, &mut all.values);
        }
        turn.engine().lengths = lengths;
        Ok(())
    }
}

started! {
    all_gather[T: Element](data: Vec<T>) -> Vec<T>,
    |of| of.request::<T>(OperationKind::AllGather, data.len()),
    Gather(data)
}

started! {
    all_gather_varcount[T: Element](data: Vec<T>) -> Gathered<T>,
    |of| of.request::<T>(OperationKind::AllGatherVarcount, 0),
    |comm| comm.all_gather_varcount(&data)
}

started! {
    gather[T: Element](data: Vec<T>, root: Rank) -> Option<Vec<T>>,
    |of| of.rooted::<T>(OperationKind::Gather, data.len(), root),
    |comm| comm.gather(&data, root)
}

started! {
    gather_varcount[T: Element](data: Vec<T>, root: Rank) -> Option<Gathered<T>>,
    |of| of.rooted::<T>(OperationKind::GatherVarcount, 0, root),
    |comm| comm.gather_varcount(&data, root)
}
