//! Gathers, on every rank and on one.

use std::pin::pin;
use std::time::Instant;

use kolo_transport::ids::Rank;

use super::{Ends, fits, make_room, too_many, wrong_buffer, zeros};
use crate::blocking::{Alarm, SleepAlarm};
use crate::communicator::Communicator;
use crate::element::{self, Element};
use crate::error::CollectiveError;
use crate::operation::{Operation, OperationKind};

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
    /// # use kolo_collectives::local_group;
    /// let group = local_group(2)?;
    /// std::thread::scope(|scope| {
    ///     for comm in &group {
    ///         scope.spawn(move || {
    ///             let mine = [comm.rank().0; 2];
    ///             assert_eq!(comm.all_gather(&mine), Ok(vec![0, 0, 1, 1]));
    ///         });
    ///     }
    /// });
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`CollectiveError`].
    pub fn all_gather<T: Element>(&self, data: &[T]) -> Result<Vec<T>, CollectiveError> {
        let all = self.room_for_all(data);
        let mut all = self.or_refuse_now(OperationKind::AllGather, all)?;
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
        let started = Instant::now();
        let alarm = &mut SleepAlarm(pin!(self.inner.sleep()));
        let (kind, all) = (OperationKind::AllGather, self.room_for_all(data));
        let mut all = self.or_refuse(alarm, started, kind, all).await?;
        self.gather_all(alarm, started, data, &mut all).await?;
        Ok(all)
    }

    /// As [`Communicator::all_gather`], into a buffer of the world size times the length of `data`.
    ///
    /// ```
    /// # use kolo_collectives::local_group;
    /// let group = local_group(2)?;
    /// std::thread::scope(|scope| {
    ///     for comm in &group {
    ///         scope.spawn(move || {
    ///             let mut all = [0; 2];
    ///             comm.all_gather_into(&[comm.rank().0 + 7], &mut all).unwrap();
    ///             assert_eq!(all, [7, 8]);
    ///         });
    ///     }
    /// });
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
        if Some(all.len()) == data.len().checked_mul(self.world())
            && let Some(done) = self.short(&request, Ends::Into(data, all))
        {
            return done;
        }
        Self::blocking(async |alarm, started| self.gather_all(alarm, started, data, all).await)
    }

    /// Gathers the ranks' values on every rank, in rank order. Each rank may give another length, 0 included.
    ///
    /// It has two parts: one for the lengths, one for the values.
    ///
    /// ```
    /// # use kolo_collectives::local_group;
    /// # use kolo_collectives::Rank;
    /// let group = local_group(2)?;
    /// std::thread::scope(|scope| {
    ///     for comm in &group {
    ///         scope.spawn(move || {
    ///             let mine = vec![1.5; comm.rank().index()];
    ///             let gathered = comm.all_gather_varcount(&mine).unwrap();
    ///             assert_eq!(gathered.counts, [0, 1]);
    ///             assert_eq!(gathered.of(Rank(1)), [1.5]);
    ///         });
    ///     }
    /// });
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
        let sleep = pin!(self.inner.sleep());
        let mut all = Gathered::default();
        let kind = OperationKind::AllGatherVarcount;
        self.gather_varcount_on(
            &mut SleepAlarm(sleep),
            started,
            data,
            &mut all,
            (kind, None),
        )
        .await?;
        Ok(all)
    }

    /// As [`Communicator::all_gather_varcount`], into what an earlier one returned: memory is used again.
    ///
    /// ```
    /// # use kolo_collectives::{Gathered, local_group};
    /// let group = local_group(2)?;
    /// std::thread::scope(|scope| {
    ///     for comm in &group {
    ///         scope.spawn(move || {
    ///             let mut all = Gathered::default();
    ///             for round in 0..3 {
    ///                 comm.all_gather_varcount_into(&vec![round; comm.rank().index()], &mut all).unwrap();
    ///                 assert_eq!((&all.values[..], &all.counts[..]), (&[round][..], &[0, 1][..]));
    ///             }
    ///         });
    ///     }
    /// });
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
        Self::blocking(async |alarm, started| {
            self.gather_varcount_on(alarm, started, data, all, (kind, None))
                .await
        })
    }

    /// Gathers the ranks' values on the root, in rank order; the others get `None`. All ranks give the same length.
    ///
    /// ```
    /// # use kolo_collectives::local_group;
    /// # use kolo_collectives::Rank;
    /// let group = local_group(2)?;
    /// std::thread::scope(|scope| {
    ///     for comm in &group {
    ///         scope.spawn(move || {
    ///             let all = comm.gather(&[comm.rank().0], Rank(0)).unwrap();
    ///             assert_eq!(all, (comm.rank() == Rank(0)).then_some(vec![0, 1]));
    ///         });
    ///     }
    /// });
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
        let all = self.room_for_all(data);
        let mut all = self.or_refuse_now(OperationKind::Gather, all)?;
        self.gather_into(data, &mut all, root)?;
        Ok(Some(all))
    }

    /// As [`Communicator::gather`], into a buffer that has the world size times the length of `data` on the root. On the
    /// others it may be empty, and stays as it is.
    ///
    /// ```
    /// # use kolo_collectives::local_group;
    /// # use kolo_collectives::Rank;
    /// let group = local_group(2)?;
    /// std::thread::scope(|scope| {
    ///     for comm in &group {
    ///         scope.spawn(move || {
    ///             let mut all = if comm.rank() == Rank(1) { vec![0; 2] } else { vec![] };
    ///             comm.gather_into(&[comm.rank().0], &mut all, Rank(1)).unwrap();
    ///             assert!(all.is_empty() || all == [0, 1]);
    ///         });
    ///     }
    /// });
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
        let kind = OperationKind::Gather;
        let request = Operation {
            root: Some(root.0),
            ..self.request::<T>(kind, data.len())
        };
        let result = if root == self.rank() { all } else { &mut [] };
        let wanted = data.len().saturating_mul(self.world());
        let fits = root != self.rank() || result.len() == wanted;
        if fits && let Some(done) = self.short(&request, Ends::Into(data, result)) {
            return done;
        }
        Self::blocking(async |alarm, started| {
            let (mut turn, tag) = self.turn(alarm, started, kind).await?;
            if let Err(error) = self.check_root(kind, root) {
                return Err(turn.refuse(tag, error));
            }
            if !fits {
                let error = wrong_buffer(format_args!("{request}"), result.len(), wanted);
                return Err(turn.refuse(tag, error));
            }
            turn.run_into(alarm, tag, request, data, result).await
        })
    }

    /// As [`Communicator::gather`], where each rank may give another length. It has two parts.
    ///
    /// ```
    /// # use kolo_collectives::local_group;
    /// # use kolo_collectives::Rank;
    /// let group = local_group(2)?;
    /// std::thread::scope(|scope| {
    ///     for comm in &group {
    ///         scope.spawn(move || {
    ///             let mine = vec!['a' as u8; 1 + comm.rank().index()];
    ///             let all = comm.gather_varcount(&mine, Rank(0)).unwrap();
    ///             assert_eq!(all.map(|all| all.counts), (comm.rank() == Rank(0)).then_some(vec![1, 2]));
    ///         });
    ///     }
    /// });
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
        Self::blocking(async |alarm, started| {
            self.gather_varcount_on(alarm, started, data, all, (kind, Some(root)))
                .await
        })
    }

    fn room_for_all<T: Element>(&self, data: &[T]) -> Result<Vec<T>, CollectiveError> {
        zeros(data.len().saturating_mul(self.world()))
    }

    async fn gather_all<A: Alarm, T: Element>(
        &self,
        alarm: &mut A,
        started: Instant,
        data: &[T],
        all: &mut [T],
    ) -> Result<(), CollectiveError> {
        let kind = OperationKind::AllGather;
        let (mut turn, tag) = self.turn(alarm, started, kind).await?;
        let request = self.request::<T>(kind, data.len());
        if Some(all.len()) != data.len().checked_mul(self.world()) {
            let what = format_args!(
                "all_gather of {} elements on each of {} ranks",
                data.len(),
                self.world()
            );
            let error = wrong_buffer(what, all.len(), data.len().saturating_mul(self.world()));
            return Err(turn.refuse(tag, error));
        }
        turn.run_into(alarm, tag, request, data, all).await
    }

    async fn gather_varcount_on<A: Alarm, T: Element>(
        &self,
        alarm: &mut A,
        started: Instant,
        data: &[T],
        all: &mut Gathered<T>,
        (kind, root): (OperationKind, Option<Rank>),
    ) -> Result<(), CollectiveError> {
        let (mut turn, tag) = self.turn(alarm, started, kind).await?;
        let root = match root.map(|root| self.check_root(kind, root)).transpose() {
            Ok(root) => root,
            Err(error) => return Err(turn.refuse(tag, error)),
        };
        let lengths = self
            .lengths::<_, T>(alarm, &mut turn, tag, (kind, root), &[data.len() as u64])
            .await?;
        let counts = lengths.iter().map(|length| *length as usize);
        let Some(total) = turn
            .engine()
            .set_offsets(counts)
            .filter(|total| fits::<T>(*total))
        else {
            return Err(turn.refuse(tag.next_part(), too_many::<T>(&lengths)));
        };
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
