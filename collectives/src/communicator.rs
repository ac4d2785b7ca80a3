//! The communicator: collective operations for one rank of a group.

use std::cell::Cell;
use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kolo_transport::ids::{CallId, Generation, JobId, Rank};
use kolo_transport::wire::GenerationTable;
use tokio::runtime::Handle;

use crate::blocking::{Alarm, SleepAlarm, block_on};
use crate::element::{self, Element};
use crate::error::CollectiveError;
use crate::inner::Inner;
use crate::lane::{Connector, Lane, LaneError, LinkHello};
use crate::operation::{Operation, OperationKind, ReduceOp};
use crate::schedule::{Layout, Tuning};

/// Collective operations for one rank of a group. Clones share it.
///
/// Every rank of the group makes the same calls in the same order. Operations of one communicator run one
/// after the other, whichever clones and threads they come from.
///
/// Each operation has two forms. The blocking one is for plain code: the thread sleeps until the operation
/// ends. It must not be called on a thread that the runtime of [`Communicator::new`] needs (a task of a
/// runtime with one thread): then nothing moves until the deadline ends it. The async one, named `.._async`,
/// may be awaited on any executor. Dropping it before its end cancels the operation on all ranks: peers that
/// are in it get [`CollectiveError::PeerFailed`] with this rank's name.
///
/// Every operation has a deadline ([`Communicator::set_timeout`], 60 s at first). When one fails, the
/// caller's buffers are as they were (F-2), and other ranks that are in it fail too, soon and with the same
/// first cause. The communicator stays usable, unless a rank is lost: then the group needs a new generation.
///
/// Memory: scratch of the size of the largest operation so far (times the world size for short ones, which
/// are gathered), kept for the next; after the first operation of a size nothing is allocated.
#[derive(Clone)]
pub struct Communicator {
    inner: Arc<Inner>,
}

/// What [`Communicator::all_gather_varcount`] returns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gathered<T> {
    /// All ranks' elements, in rank order.
    pub values: Vec<T>,
    /// How many of them each rank gave.
    pub counts: Vec<usize>,
}

impl<T> Gathered<T> {
    /// The elements of one rank. Panics if there is no such rank.
    pub fn of(&self, rank: Rank) -> &[T] {
        let start: usize = self.counts[..rank.index()].iter().sum();
        &self.values[start..start + self.counts[rank.index()]]
    }
}

/// Where lanes that peers made are handed in. Does not keep the communicator alive.
#[derive(Clone)]
pub struct Acceptor {
    inner: Weak<Inner>,
}

impl Acceptor {
    /// Hands in a lane to `rank`, which has said [hello](crate::lane::greet) on it. It takes the place of a
    /// lane that is there.
    ///
    /// # Errors
    ///
    /// [`LaneError::Unreachable`] if the communicator is gone, [`LaneError::Refused`] if the group has no such
    /// other rank. The lane is dropped then.
    pub fn accept(&self, rank: Rank, lane: Box<dyn Lane>) -> Result<(), LaneError> {
        let inner = self.inner.upgrade().ok_or_else(|| LaneError::Unreachable {
            reason: "this rank's communicator is gone".to_owned(),
        })?;
        if rank.0 >= inner.world || rank.0 == inner.me {
            return Err(LaneError::Refused {
                reason: format!(
                    "rank {} of a world of {} can't have a link to rank {rank}",
                    inner.me, inner.world
                ),
            });
        }
        inner.arrive(rank.0, Ok(lane));
        Ok(())
    }
}

impl fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acceptor").finish_non_exhaustive()
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.inner.me)
            .field("world_size", &self.inner.world)
            .field("job", &self.inner.job)
            .field("generation", &self.inner.generation)
            .finish_non_exhaustive()
    }
}

impl Communicator {
    /// A communicator for `rank` of `world_size` ranks. Makes no link yet: that happens at first use, through
    /// `connector` (to lower ranks) and [`Communicator::acceptor`] (from higher ones).
    ///
    /// `handle` is a runtime with I/O and time enabled, driven by threads that no operation blocks. It runs
    /// the connector's futures and finishes what a failed operation leaves to be sent.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::Invalid`] if the rank is not in `0..world_size`.
    pub fn new(
        rank: Rank,
        world_size: u32,
        generation: Generation,
        job: JobId,
        connector: Arc<dyn Connector>,
        handle: Handle,
    ) -> Result<Self, CollectiveError> {
        if rank.0 >= world_size {
            return Err(CollectiveError::Invalid {
                reason: format!(
                    "rank {rank} is not in a world of {world_size}: ranks are 0 to world size - 1"
                ),
            });
        }
        let inner = Inner::new(rank.0, world_size, generation, job, connector, handle);
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        Rank(self.inner.me)
    }

    /// The number of ranks.
    pub fn world_size(&self) -> u32 {
        self.inner.world
    }

    /// The generation that this communicator belongs to.
    pub fn generation(&self) -> Generation {
        self.inner.generation
    }

    /// What this rank says on a new link.
    pub fn hello(&self) -> LinkHello {
        LinkHello {
            job: self.inner.job,
            generation: self.inner.generation,
            rank: self.rank(),
        }
    }

    /// Where lanes that higher ranks made are handed in.
    pub fn acceptor(&self) -> Acceptor {
        Acceptor {
            inner: Arc::downgrade(&self.inner),
        }
    }

    /// The time that an operation may take, from its call on. Waiting for its turn counts.
    pub fn timeout(&self) -> Duration {
        self.inner.signals.lock().timeout
    }

    /// Sets [`Communicator::timeout`] for operations that begin from now on, on all clones.
    pub fn set_timeout(&self, timeout: Duration) {
        self.inner.signals.lock().timeout = timeout;
    }

    /// As [`Communicator::set_timeout`], for use in one expression.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        self.set_timeout(timeout);
        self
    }

    /// Which algorithm is used when.
    pub fn tuning(&self) -> Tuning {
        self.inner.signals.lock().tuning
    }

    /// Sets [`Communicator::tuning`] for operations that begin from now on, on all clones. It must be the same
    /// on every rank; operations whose algorithms differ are a [`CollectiveError::Mismatch`].
    pub fn set_tuning(&self, tuning: Tuning) {
        let mut state = self.inner.signals.lock();
        state.tuning = tuning;
        state.settings += 1;
    }

    /// Which ranks share a host: all, if nothing else was set.
    pub fn layout(&self) -> Arc<Layout> {
        Arc::clone(&self.inner.signals.lock().layout)
    }

    /// Sets [`Communicator::layout`] for operations that begin from now on, on all clones. It must be the same
    /// on every rank, as [`Communicator::tuning`]: algorithms are chosen by it.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::Invalid`] if it has another number of ranks.
    pub fn set_layout(&self, layout: Layout) -> Result<(), CollectiveError> {
        if layout.world() != self.inner.world {
            return Err(CollectiveError::Invalid {
                reason: format!(
                    "a layout of {} ranks is not for a communicator of {}",
                    layout.world(),
                    self.inner.world
                ),
            });
        }
        let mut state = self.inner.signals.lock();
        state.layout = Arc::new(layout);
        state.settings += 1;
        Ok(())
    }

    /// Gives the memory of scratch buffers back. The next operation allocates again.
    ///
    /// Does nothing while an operation is under way.
    pub fn release_scratch(&self) {
        if let Ok(mut engine) = self.inner.engine.try_lock() {
            engine.release();
        }
    }

    /// The members of the generation, if they are known.
    pub fn table(&self) -> Option<Arc<GenerationTable>> {
        self.inner.signals.lock().table.clone()
    }

    /// Makes the members of the generation known: errors name their hosts then.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::Invalid`] if it is the table of another job or generation, or of another size.
    pub fn set_table(&self, table: Arc<GenerationTable>) -> Result<(), CollectiveError> {
        let inner = &self.inner;
        if table.job != inner.job
            || table.generation != inner.generation
            || table.world_size() != inner.world
        {
            return Err(CollectiveError::Invalid {
                reason: format!(
                    "the table of {} members of generation {} of {} is not for a communicator of {} ranks of \
                     generation {} of {}",
                    table.world_size(),
                    table.generation,
                    table.job,
                    inner.world,
                    inner.generation,
                    inner.job
                ),
            });
        }
        inner.signals.lock().table = Some(table);
        Ok(())
    }

    /// A user call begins: operations are numbered from 0 again, under this call. All ranks of a collective
    /// operation must be in the same call.
    ///
    /// Calls must come in growing order: frames of lower calls are dropped, and a peer in a higher call has
    /// left this one. An operation of the previous call that is still under way (on another thread) fails with
    /// [`CollectiveError::Aborted`]. Without this function all operations are of call 0.
    pub fn begin_call(&self, call: CallId) {
        self.inner.signals.begin_call(call);
    }

    /// This rank failed in the present call and takes part in no more operations of it: tells the peers, whose
    /// operations in this call fail with [`CollectiveError::PeerFailed`]. If an operation of this call failed
    /// before because of another rank, the peers are told that rank's name instead.
    ///
    /// Linked peers are told at once, and pass it on; so are, over links that are made for it in the background,
    /// the lower ranks at distances 1, 2, 4, ..., which may wait for a link from this one; and peers that link
    /// later when they do. Operations of the call that are still under way here fail with
    /// [`CollectiveError::Aborted`]. Returns without waiting. Does nothing if `call` is not the present call.
    pub fn abort_call(&self, call: CallId, reason: &str) {
        self.inner.abort_call(call.0, reason);
    }

    /// The control plane says that a rank is lost: operations under way and to come fail at once with
    /// [`CollectiveError::PeerLost`].
    pub fn rank_lost(&self, rank: Rank, reason: impl Into<String>) {
        let reason = reason.into();
        self.inner.signals.change(|state| {
            state.lost.entry(rank.0).or_insert(reason);
        });
    }

    /// The error of the last operation that failed in the present call, whatever the caller made of it. Its
    /// [`culprit_rank`](CollectiveError::culprit_rank) says whether a failed call is an echo.
    pub fn last_failure(&self) -> Option<CollectiveError> {
        self.inner.signals.lock().last_failure.clone()
    }

    /// Combines the ranks' values, element by element; every rank gets the result in `data`. All ranks give
    /// the same length. [`ReduceOp`] says what operators do.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`]; `data` is as it was.
    pub fn all_reduce<T: Element>(
        &self,
        data: &mut [T],
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        Self::blocking(async |alarm, started| self.reduce(alarm, started, data, op).await)
    }

    /// As [`Communicator::all_reduce`]. Cancels the operation on all ranks if it is dropped.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`].
    pub async fn all_reduce_async<T: Element>(
        &self,
        data: &mut [T],
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        let started = Instant::now();
        let sleep = pin!(self.inner.sleep());
        self.reduce(&mut SleepAlarm(sleep), started, data, op).await
    }

    /// Copies the root's values to every rank. All ranks give the same length and root.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`]; `data` is as it was.
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: Rank) -> Result<(), CollectiveError> {
        Self::blocking(async |alarm, started| self.spread(alarm, started, data, root).await)
    }

    /// As [`Communicator::broadcast`]. Cancels the operation on all ranks if it is dropped.
    ///
    /// # Errors
    ///
    /// As [`Communicator::broadcast`].
    pub async fn broadcast_async<T: Element>(
        &self,
        data: &mut [T],
        root: Rank,
    ) -> Result<(), CollectiveError> {
        let started = Instant::now();
        let sleep = pin!(self.inner.sleep());
        self.spread(&mut SleepAlarm(sleep), started, data, root)
            .await
    }

    /// Gathers the ranks' values on every rank, in rank order. All ranks give the same length.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`].
    pub fn all_gather<T: Element>(&self, data: &[T]) -> Result<Vec<T>, CollectiveError> {
        let mut all = self.room_for_all(data);
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
        let mut all = self.room_for_all(data);
        let started = Instant::now();
        let sleep = pin!(self.inner.sleep());
        self.gather(&mut SleepAlarm(sleep), started, data, &mut all)
            .await?;
        Ok(all)
    }

    /// As [`Communicator::all_gather`], into a buffer of the world size times the length of `data`.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`], of which [`CollectiveError::Invalid`] for a buffer of another length (the peers
    /// fail too); `all` is as it was.
    pub fn all_gather_into<T: Element>(
        &self,
        data: &[T],
        all: &mut [T],
    ) -> Result<(), CollectiveError> {
        Self::blocking(async |alarm, started| self.gather(alarm, started, data, all).await)
    }

    /// Gathers the ranks' values on every rank, in rank order. Each rank may give another length, 0 included.
    ///
    /// It is two operations: one for the lengths, one for the values.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`].
    pub fn all_gather_varcount<T: Element>(
        &self,
        data: &[T],
    ) -> Result<Gathered<T>, CollectiveError> {
        Self::blocking(async |alarm, started| self.gather_varcount(alarm, started, data).await)
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
        self.gather_varcount(&mut SleepAlarm(sleep), started, data)
            .await
    }

    /// Returns when all ranks have come.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`].
    pub fn barrier(&self) -> Result<(), CollectiveError> {
        Self::blocking(async |alarm, started| self.meet(alarm, started).await)
    }

    /// As [`Communicator::barrier`]. Cancels the operation on all ranks if it is dropped.
    ///
    /// # Errors
    ///
    /// As [`Communicator::barrier`].
    pub async fn barrier_async(&self) -> Result<(), CollectiveError> {
        let started = Instant::now();
        let sleep = pin!(self.inner.sleep());
        self.meet(&mut SleepAlarm(sleep), started).await
    }

    fn blocking<R>(
        operation: impl AsyncFnOnce(&mut crate::blocking::ParkAlarm<'_>, Instant) -> R,
    ) -> R {
        let started = Instant::now();
        let alarm = Cell::new(None);
        block_on(&alarm, |mut alarm| async move {
            operation(&mut alarm, started).await
        })
    }

    fn room_for_all<T: Element>(&self, data: &[T]) -> Vec<T> {
        vec![T::default(); data.len() * self.inner.world as usize]
    }

    async fn reduce<A: Alarm, T: Element>(
        &self,
        alarm: &mut A,
        started: Instant,
        data: &mut [T],
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        let (mut turn, tag) = self.inner.turn(alarm, started, "all_reduce", 1).await?;
        let request = Operation {
            reduce: Some(op),
            ..request::<T>(OperationKind::AllReduce, data.len())
        };
        turn.run(alarm, tag, request, element::bytes_of(data))
            .await?;
        turn.store(data);
        Ok(())
    }

    async fn spread<A: Alarm, T: Element>(
        &self,
        alarm: &mut A,
        started: Instant,
        data: &mut [T],
        root: Rank,
    ) -> Result<(), CollectiveError> {
        let (mut turn, tag) = self.inner.turn(alarm, started, "broadcast", 1).await?;
        let request = Operation {
            root: Some(root.0),
            ..request::<T>(OperationKind::Broadcast, data.len())
        };
        if root.0 >= self.inner.world {
            let world = self.inner.world;
            let reason = format!(
                "broadcast from root {root}: a world of {world} has ranks 0 to {}",
                world - 1
            );
            return Err(turn.refuse(tag, CollectiveError::Invalid { reason }));
        }
        turn.run(alarm, tag, request, element::bytes_of(data))
            .await?;
        if root != self.rank() {
            turn.store(data);
        }
        Ok(())
    }

    async fn gather<A: Alarm, T: Element>(
        &self,
        alarm: &mut A,
        started: Instant,
        data: &[T],
        all: &mut [T],
    ) -> Result<(), CollectiveError> {
        let (mut turn, tag) = self.inner.turn(alarm, started, "all_gather", 1).await?;
        let request = request::<T>(OperationKind::AllGather, data.len());
        if Some(all.len()) != data.len().checked_mul(self.inner.world as usize) {
            let reason = format!(
                "all_gather of {} elements on each of {} ranks into a buffer of {}: it must have {}",
                data.len(),
                self.inner.world,
                all.len(),
                data.len() as u128 * u128::from(self.inner.world)
            );
            return Err(turn.refuse(tag, CollectiveError::Invalid { reason }));
        }
        turn.run(alarm, tag, request, element::bytes_of(data))
            .await?;
        turn.store(all);
        Ok(())
    }

    async fn gather_varcount<A: Alarm, T: Element>(
        &self,
        alarm: &mut A,
        started: Instant,
        data: &[T],
    ) -> Result<Gathered<T>, CollectiveError> {
        // Both numbers at once: a rank that fails in the first half skips the second.
        let (mut turn, tag) = self
            .inner
            .turn(alarm, started, "all_gather_varcount", 2)
            .await?;
        let lengths = request::<T>(OperationKind::AllGatherCounts, 1);
        let mine = [data.len() as u64];
        turn.run(alarm, tag, lengths, bytemuck::cast_slice(&mine))
            .await?;
        let mut of_all = vec![0_u64; self.inner.world as usize];
        turn.store(&mut of_all);
        let counts: Vec<usize> = of_all.iter().map(|length| *length as usize).collect();
        let Some(total) = turn
            .set_offsets(counts.iter().copied())
            .filter(|total| total.checked_mul(size_of::<T>()).is_some())
        else {
            let reason = format!("all_gather_varcount of {of_all:?} elements does not fit memory");
            return Err(turn.refuse(tag.after(), CollectiveError::Invalid { reason }));
        };
        let values = request::<T>(OperationKind::AllGatherVarcount, total);
        turn.run(alarm, tag.after(), values, element::bytes_of(data))
            .await?;
        // Its length is what the peers say.
        let mut gathered = Gathered {
            values: Vec::new(),
            counts,
        };
        if gathered.values.try_reserve_exact(total).is_err() {
            let reason = format!("there is no memory for the {total} gathered elements");
            return Err(CollectiveError::Invalid { reason });
        }
        gathered.values.resize(total, T::default());
        turn.store(&mut gathered.values);
        Ok(gathered)
    }

    async fn meet<A: Alarm>(&self, alarm: &mut A, started: Instant) -> Result<(), CollectiveError> {
        let (mut turn, tag) = self.inner.turn(alarm, started, "barrier", 1).await?;
        turn.run(alarm, tag, Operation::BARRIER, &[]).await
    }
}

fn request<T: Element>(kind: OperationKind, count: usize) -> Operation {
    Operation::new(kind, Some(T::DTYPE), count as u64)
}
