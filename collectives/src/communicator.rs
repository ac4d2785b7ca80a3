//! The communicator: collective operations for one rank of a group.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use kolo_transport::ids::{CallId, Generation, Rank};
use kolo_transport::wire::GenerationTable;

use crate::error::CollectiveError;
use crate::group_core::GroupCore;
use crate::group_id::GroupId;
use crate::lane::{Lane, LaneError, LinkHello};
use crate::operation::Tag;
use crate::options::Options;
use crate::rank_shared::RankShared;
use crate::record::{Counters, Record};
use crate::schedule::{Layout, Tuning};
use crate::stall::StallReport;

/// Collective operations for one rank of a group. Clones share it. Each operation has a module of its own, with the methods that are
/// its forms.
///
/// Every rank of the group makes the same calls in the same order. Operations of one communicator run one
/// after the other, whichever clones and threads they come from; those of different groups run at once.
///
/// Each operation has three forms:
///
/// * Blocking: `comm.all_reduce(&mut data, op)`. The thread sleeps until the operation ends. It must not be one that
///   the runtime of [`Communicator::new`] needs (a task of a runtime with one thread): then nothing moves until the
///   deadline ends it.
/// * [Handles](crate::Handle): [`comm.start().all_reduce(data, op)`](Communicator::start) takes the data, runs by itself
///   and gives it back; a handle can be polled, waited for and awaited. [`comm.named(name)`](Communicator::named) is the
///   same for operations that are started in another order on each rank.
/// * Into a buffer of the caller: those in place, and those called `.._into`. They allocate nothing after the first
///   operation of a size.
///
/// Some also have an async form on borrowed data, called `.._async`, which may be awaited on any executor. Dropping it
/// before its end cancels the operation on all ranks: peers that are in it get [`CollectiveError::PeerFailed`] with this
/// rank's name.
///
/// [`comm.with(options)`](Communicator::with) sets scale factors and compression for all of them.
///
/// Every operation has a deadline ([`Communicator::set_timeout`], 60 s at first). When one fails, the
/// caller's inputs are as they were (F-2; a buffer for the result alone may hold anything, and so may a broadcast's on
/// ranks that are not the root), and other ranks that are in it fail too, soon and with the same first cause. The
/// communicator stays usable, unless a rank is lost: then the group needs a new generation.
///
/// Memory: scratch of the size of the largest operation so far (times the world size for short ones, which
/// are gathered), kept for the next; after the first operation of a size nothing is allocated, unless ranks wait for each other
/// for more than 0.1 s: then what has come already is held, 32 MiB at most, or 512 KiB for each link.
#[derive(Clone)]
pub struct Communicator {
    pub(crate) inner: Arc<GroupCore>,
    pub(crate) options: Options,
}

/// Where lanes that peers made are handed in. Does not keep the communicator alive.
#[derive(Clone)]
pub struct Acceptor {
    rank_shared: Weak<RankShared>,
}

impl Acceptor {
    /// Hands in a lane to `rank`, which has said [hello](crate::lane::greet) on it, for the group of all ranks. It takes
    /// the place of a lane that is there. One from a lower rank, which has no link to make, only [asks](Acceptor::requested) for
    /// one.
    ///
    /// # Errors
    ///
    /// [`LaneError::Unreachable`] if the communicator is gone, [`LaneError::Refused`] if the group has no such
    /// other rank. The lane is dropped then.
    pub fn accept(&self, rank: Rank, lane: Box<dyn Lane>) -> Result<(), LaneError> {
        self.accept_group(GroupId::WORLD, rank, lane)
    }

    /// As [`Acceptor::accept`], for the group that the peer named in its [hello](LinkHello::group). The rank is one of
    /// all ranks. If this rank has not made the group yet, the lane is kept until it does.
    ///
    /// # Errors
    ///
    /// As [`Acceptor::accept`], and [`LaneError::Refused`] if thousands of lanes are kept already.
    pub fn accept_group(
        &self,
        group: GroupId,
        rank: Rank,
        lane: Box<dyn Lane>,
    ) -> Result<(), LaneError> {
        self.rank_shared()?.accept(group, rank, lane)
    }

    /// Says that `rank`, which is lower than this one, asks for the link to it in the group, which is this rank's to make: see
    /// [`Connector::request`](crate::Connector::request). In a group that this rank has not made the link is made, too, so that the other one hears that.
    ///
    /// # Errors
    ///
    /// As [`Acceptor::accept`], and [`LaneError::Refused`] if the rank is not lower, or too many of its links wait for groups already.
    pub fn requested(&self, group: GroupId, rank: Rank) -> Result<(), LaneError> {
        self.rank_shared()?.requested(group, rank)
    }

    fn rank_shared(&self) -> Result<Arc<RankShared>, LaneError> {
        self.rank_shared
            .upgrade()
            .ok_or_else(|| LaneError::Unreachable {
                reason: "this rank's communicator is gone".to_owned(),
            })
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
            .field("group", &self.inner.id)
            .field("job", &self.inner.job)
            .field("generation", &self.inner.generation)
            .finish_non_exhaustive()
    }
}

impl Communicator {
    pub(crate) fn of(inner: Arc<GroupCore>) -> Self {
        Self {
            inner,
            options: Options::default(),
        }
    }

    /// The same communicator, whose operations are done with these options. It shares everything else.
    #[must_use]
    pub fn with(&self, options: Options) -> Self {
        Self {
            inner: Arc::clone(&self.inner),
            options,
        }
    }

    /// What operations are done with.
    pub fn options(&self) -> Options {
        self.options
    }

    /// This rank, in this group.
    pub fn rank(&self) -> Rank {
        Rank(self.inner.me)
    }

    /// The number of ranks of this group.
    pub fn world_size(&self) -> u32 {
        self.inner.world
    }

    /// The generation that this communicator belongs to.
    pub fn generation(&self) -> Generation {
        self.inner.generation
    }

    /// What this rank says on a new link.
    pub fn hello(&self) -> LinkHello {
        let rank = Rank(self.inner.rank_shared.me);
        LinkHello::new(self.inner.job, self.inner.generation, rank)
            .of_world(self.inner.rank_shared.world)
            .of_group(self.inner.id)
    }

    /// Where lanes that higher ranks made are handed in, of this group and all others of this rank.
    pub fn acceptor(&self) -> Acceptor {
        Acceptor {
            rank_shared: Arc::downgrade(&self.inner.rank_shared),
        }
    }

    /// The time that an operation may take, from its call on. Waiting for its turn counts. Over links a rank asks at the end of
    /// it who is still there, and fails 0.5 to 4 s later, with the name of who is not.
    pub fn timeout(&self) -> Duration {
        self.inner.signals.lock().timeout
    }

    /// Sets [`Communicator::timeout`] for operations that begin from now on, on all clones.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use kolo_collectives::{CollectiveError, local_group};
    /// use kolo_collectives::Rank;
    ///
    /// let group = local_group(2)?;
    /// group[0].set_timeout(Duration::from_millis(10));
    /// // Rank 1 does not come.
    /// let error = group[0].barrier().unwrap_err();
    /// assert!(matches!(error, CollectiveError::Deadline { .. }));
    /// assert_eq!(error.culprit_rank(), Some(Rank(1)));
    /// assert!(error.is_retryable());
    /// # Ok::<(), CollectiveError>(())
    /// ```
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
        self.inner.signals.lock().choice.tuning
    }

    /// Sets [`Communicator::tuning`] for operations that begin from now on, named ones and sends included, on all clones. It must be the same
    /// on every rank; operations whose algorithms differ are a [`CollectiveError::Mismatch`].
    pub fn set_tuning(&self, tuning: Tuning) {
        let layout = self.layout();
        self.inner.signals.lock().choose_by(tuning, layout);
        self.inner.retune();
    }

    /// Which ranks share a host: all, if nothing else was set.
    pub fn layout(&self) -> Arc<Layout> {
        Arc::clone(&self.inner.signals.lock().choice.layout)
    }

    /// Sets [`Communicator::layout`] for operations that begin from now on, on all clones. It must be the same
    /// on every rank, as [`Communicator::tuning`]: algorithms are chosen by it.
    ///
    /// ```
    /// use kolo_collectives::{Layout, local_group};
    ///
    /// let group = local_group(4)?;
    /// // Ranks 0 and 1 are on one host, 2 and 3 on another one.
    /// let layout = Layout::of_hosts(&["a", "a", "b", "b"]);
    /// for comm in &group {
    ///     comm.set_layout(layout.clone())?;
    /// }
    /// assert_eq!(group[3].layout().hosts(), 2);
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
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
        let tuning = self.tuning();
        self.inner
            .signals
            .lock()
            .choose_by(tuning, Arc::new(layout));
        self.inner.retune();
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

    /// A user call begins, in all groups of this rank: operations are numbered from 0 again, under this call. All ranks of a collective
    /// operation must be in the same call.
    ///
    /// Calls must come in growing order: frames of lower calls are dropped, and a peer in a higher call has
    /// left this one. An operation of the previous call that is still under way (on another thread) fails with
    /// [`CollectiveError::Aborted`]. Without this function all operations are of call 0.
    ///
    /// ```
    /// use kolo_collectives::local_group;
    /// use kolo_collectives::CallId;
    ///
    /// let group = local_group(2)?;
    /// for comm in &group {
    ///     comm.begin_call(CallId(1));
    /// }
    /// // Rank 1 can't do its part.
    /// group[1].abort_call(CallId(1), "no more memory");
    /// let error = group[0].barrier().unwrap_err();
    /// assert!(error.to_string().contains("no more memory"));
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    pub fn begin_call(&self, call: CallId) {
        self.inner.rank_shared.begin_call(call);
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
        self.inner.rank_shared.abort_call(call.0, reason);
    }

    /// The control plane says that a rank (one of all) is lost: operations under way and to come fail at once with
    /// [`CollectiveError::PeerLost`], in all groups that it is in.
    pub fn rank_lost(&self, rank: Rank, reason: impl Into<String>) {
        self.inner.rank_shared.rank_lost(rank.0, &reason.into());
    }

    /// Nothing is to work any more, in no group of this rank: its job ends, say. Operations under way and to come, with names or
    /// without, fail at once with [`CollectiveError::Revoked`]; if a rank was lost before, with its name. There is no way back.
    ///
    /// ```
    /// use kolo_collectives::local_group;
    ///
    /// let group = local_group(2)?;
    /// let waiting = group[0].start().barrier();
    /// group[0].revoke("the job ends");
    /// let error = waiting.wait().unwrap_err();
    /// assert!(error.to_string().ends_with("the job ends"));
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    pub fn revoke(&self, reason: &str) {
        self.inner.rank_shared.revoke(reason);
    }

    /// Whether it was [revoked](Self::revoke).
    pub fn is_revoked(&self) -> bool {
        self.inner.signals.lock().lost.revoked().is_some()
    }

    /// The error of the last operation that failed in the present call, in whichever group, whatever the caller made of
    /// it. Its
    /// [`culprit_rank`](CollectiveError::culprit_rank) says whether a failed call is an echo.
    pub fn last_failure(&self) -> Option<CollectiveError> {
        let call = self.inner.signals.lock().call;
        self.inner.rank_shared.last_failure(call)
    }

    /// The last 4096 operations of this rank, in all its groups, oldest first: what was asked, when, how it was done and
    /// what came of it.
    ///
    /// ```
    /// use kolo_collectives::local_group;
    ///
    /// let group = local_group(1)?;
    /// group[0].barrier()?;
    /// let records = group[0].records();
    /// assert_eq!(records[0].operation.to_string(), "barrier");
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    pub fn records(&self) -> Vec<Record> {
        self.inner.rank_shared.recorder.records()
    }

    /// What this rank's operations came to, in all its groups: by operation, kind of lane, and peer.
    ///
    /// ```
    /// use kolo_collectives::local_group;
    /// use kolo_collectives::operation::OperationKind;
    ///
    /// let group = local_group(1)?;
    /// group[0].all_gather(&[1_u32; 25])?;
    /// let counters = group[0].counters();
    /// let (_, gathers) = counters.operations.iter().find(|(kind, _)| *kind == OperationKind::AllGather).unwrap();
    /// assert_eq!((gathers.done, gathers.bytes), (1, 100));
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    pub fn counters(&self) -> Counters {
        self.inner.rank_shared.recorder.counters()
    }

    /// An operation that has waited for so long (60 s at first) is reported once: as a warning in the log, in
    /// [`Communicator::stalls`], and to [`Communicator::on_stall`]. It goes on, until its [deadline](Self::timeout) if
    /// that is later. For operations that begin from now on, in all groups of this rank.
    pub fn set_stall_after(&self, after: Duration) {
        self.inner.rank_shared.stalls.set_after(after);
    }

    /// The last reports of operations that waited for long, oldest first, of all groups of this rank.
    pub fn stalls(&self) -> Vec<StallReport> {
        self.inner.rank_shared.stalls.reports()
    }

    /// Calls this function with every report from now on, in place of another one. It is called by the thread that
    /// waits, so it should be short. A panic in it is logged; the operation goes on.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use kolo_collectives::local_group;
    ///
    /// let group = local_group(1)?;
    /// group[0].set_stall_after(Duration::from_secs(10));
    /// group[0].on_stall(|report| eprintln!("{report}"));
    /// assert!(group[0].stalls().is_empty());
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    pub fn on_stall(&self, callback: impl Fn(&StallReport) + Send + Sync + 'static) {
        self.inner
            .rank_shared
            .stalls
            .set_callback(Some(Arc::new(callback)));
    }

    /// The tag that the next operation will have, for tests and diagnosis.
    pub fn next_tag(&self) -> Tag {
        self.inner.signals.lock().next_tag()
    }
}
