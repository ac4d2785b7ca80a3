//! What user code knows of the worker that it runs in.

mod generations;
mod running;
mod session;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use kolo_collectives::{CollectiveError, Communicator};
use kolo_transport::ids::{
    CallId, CrossRank, Generation, Incarnation, JobId, LocalRank, NodeId, Slot,
};
use kolo_transport::wire::Member;

use crate::__private::Ended;
use crate::elastic::{self, Elastic, ElasticError, Interrupt, State};
use generations::Generations;
pub(crate) use running::Running;
pub(crate) use session::Session;

/// The worker that user code runs in: its ranks, its job, its communicator and the call that runs now.
///
/// Functions, constructors and methods get a `&Context`. A clone is cheap and may be kept, for instance in an
/// executable, or given to a thread; it always tells of the call that runs at the moment. Ranks and communicators are those of
/// one generation of the job, for as long as the clone lives: the communicator of a generation that is over is
/// [revoked](Communicator::revoke).
#[derive(Clone)]
pub struct Context {
    inner: Arc<Inner>,
}

struct Inner {
    job: JobId,
    member: Member,
    comm: Communicator,
    running: Arc<Running>,
    /// It outlives the generation. None in tests.
    session: Weak<Session>,
    interrupt: Interrupt,
    /// The members are to begin with what outlives all members, and no elastic loop has done so.
    restores: AtomicBool,
    members: Members,
    local: OnceLock<Communicator>,
    cross: OnceLock<Communicator>,
}

/// Where the ranks are: algorithms are chosen by it, so no operation may begin before it is known.
#[derive(Debug, Default)]
struct Members {
    known: OnceLock<Formed>,
    lock: Mutex<()>,
    news: Condvar,
}

/// How a generation came about.
#[derive(Debug)]
struct Formed {
    cause: String,
    at: Instant,
}

/// The members of a job are told to all its workers before the driver may call them; they are on their way, if anything.
const MEMBERS: Duration = Duration::from_secs(10);

impl Members {
    fn wait(&self) {
        if self.known.get().is_some() {
            return;
        }
        let mut lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let until = Instant::now() + MEMBERS;
        while self.known.get().is_none() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                // The first operation says what is wrong.
                return;
            }
            lock = self
                .news
                .wait_timeout(lock, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn learn(&self, cause: &str) {
        let lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.known.get_or_init(|| Formed {
            cause: cause.to_owned(),
            at: Instant::now(),
        });
        drop(lock);
        self.news.notify_all();
    }
}

impl Context {
    pub(crate) fn new(
        member: Member,
        comm: Communicator,
        job: JobId,
        session: Option<&Arc<Session>>,
    ) -> Self {
        Self {
            inner: Arc::new(Inner {
                job,
                member,
                comm,
                running: session.map_or_else(Arc::default, |session| Arc::clone(&session.running)),
                session: session.map_or_else(Weak::new, Arc::downgrade),
                interrupt: Interrupt::default(),
                restores: AtomicBool::new(false),
                members: Members::default(),
                local: OnceLock::new(),
                cross: OnceLock::new(),
            }),
        }
    }

    /// The first elastic loop of this generation begins with a checkpoint: no member has the last commit. Said before the members
    /// are known.
    pub(crate) fn must_restore(&self) {
        self.inner.restores.store(true, Ordering::Release);
    }

    /// Whether an elastic loop that begins must begin with a checkpoint. True once, on all ranks in the same loop.
    pub(crate) fn take_restore(&self) -> bool {
        self.inner.members.wait();
        self.inner.restores.swap(false, Ordering::AcqRel)
    }

    /// The communicator knows the members, and where they are.
    pub(crate) fn members_known(&self, cause: &str) {
        self.inner.members.learn(cause);
    }

    /// Nothing is to wait in this generation any more, for its members neither.
    pub(crate) fn revoke(&self, reason: &str) {
        self.inner.comm.revoke(reason);
        self.members_known("");
    }

    /// By which elastic loops hear that this generation is about to end.
    pub(crate) fn interrupt(&self) -> &Interrupt {
        &self.inner.interrupt
    }

    /// All ranks of this generation have the state of one of them, as a commit. `is_worth` says that somebody had committed before.
    pub(crate) fn received(&self, commit: u64, is_worth: bool) {
        if let Some(session) = self.inner.session.upgrade() {
            session.received(self.generation(), commit, is_worth);
        }
    }

    /// All ranks have made a commit in this generation.
    pub(crate) fn committed(&self, commit: u64) {
        if let Some(session) = self.inner.session.upgrade() {
            session.committed(self.generation(), commit);
        }
    }

    /// All ranks of this generation know that a commit is on disk.
    pub(crate) fn durable(&self, commit: u64) {
        if let Some(session) = self.inner.session.upgrade() {
            session.durable(self.generation(), commit);
        }
    }

    /// A context without a worker around it, for tests of functions and executables. Its ranks are those of `comm`, as
    /// if all were on one node; get communicators from [`kolo_collectives::local_group`].
    ///
    /// ```
    /// use kolo::Context;
    /// use kolo::collectives::{CollectiveError, ReduceOp, local_group};
    ///
    /// #[kolo::function]
    /// fn sum(ctx: &Context, mine: i64) -> Result<i64, CollectiveError> {
    ///     let mut data = [mine];
    ///     ctx.comm().all_reduce(&mut data, ReduceOp::Sum)?;
    ///     Ok(data[0])
    /// }
    ///
    /// # fn main() -> Result<(), CollectiveError> {
    /// let contexts: Vec<Context> = local_group(3)?.into_iter().map(Context::for_tests).collect();
    /// std::thread::scope(|scope| {
    ///     for ctx in &contexts {
    ///         scope.spawn(move || assert_eq!(sum::call(ctx, ctx.rank() as i64), Ok(3)));
    ///     }
    /// });
    /// # Ok(())
    /// # }
    /// ```
    pub fn for_tests(comm: Communicator) -> Self {
        let rank = comm.rank();
        let member = Member {
            rank,
            local_rank: LocalRank(rank.0),
            local_size: comm.world_size(),
            cross_rank: CrossRank(0),
            cross_size: 1,
            slot: Slot(rank.0),
            node: NodeId(0),
            hostname: "localhost".to_owned(),
            address: None,
            incarnation: Incarnation::FIRST,
        };
        let job = comm.hello().job;
        let context = Self::new(member, comm, job, None);
        context.members_known("");
        context
    }

    /// This worker's number in the job: `0..world_size`.
    pub fn rank(&self) -> usize {
        self.inner.member.rank.index()
    }

    /// This worker's number on its node: `0..local_size`.
    pub fn local_rank(&self) -> usize {
        self.inner.member.local_rank.0 as usize
    }

    /// The number of this worker's node among the nodes that have its local rank: `0..cross_size`.
    pub fn cross_rank(&self) -> usize {
        self.inner.member.cross_rank.0 as usize
    }

    /// Workers in the job.
    pub fn world_size(&self) -> usize {
        self.inner.comm.world_size() as usize
    }

    /// Workers of the job on this node.
    pub fn local_size(&self) -> usize {
        self.inner.member.local_size as usize
    }

    /// Nodes that have a worker with this local rank. The same for all ranks if every node has as many workers.
    pub fn cross_size(&self) -> usize {
        self.inner.member.cross_size as usize
    }

    /// The job.
    pub fn job(&self) -> JobId {
        self.inner.job
    }

    /// The membership of the job that this worker belongs to. It starts at 1.
    pub fn generation(&self) -> Generation {
        self.inner.comm.generation()
    }

    /// Why this generation of the job came about, in words for people. Empty in a static job.
    pub fn cause(&self) -> &str {
        self.formed().map_or("", |formed| &formed.cause)
    }

    /// When this worker heard who the members of this generation are.
    pub fn formed_at(&self) -> Instant {
        self.formed().map_or_else(Instant::now, |formed| formed.at)
    }

    fn formed(&self) -> Option<&Formed> {
        self.inner.members.wait();
        self.inner.members.known.get()
    }

    /// The node's hostname. Two nodes may have the same.
    pub fn hostname(&self) -> &str {
        &self.inner.member.hostname
    }

    /// The node, unique in the cluster.
    pub fn node(&self) -> NodeId {
        self.inner.member.node
    }

    /// The communicator of the job: collective operations with the other ranks.
    ///
    /// It makes its links at first use. An operation that can't be done returns an error that names the rank
    /// which is lost, late or failed; see [`CollectiveError`](kolo_collectives::CollectiveError). All ranks must make
    /// the same operations in the same order, within calls that run on all ranks.
    pub fn comm(&self) -> &Communicator {
        self.inner.members.wait();
        &self.inner.comm
    }

    /// The communicator of the ranks on this node, in rank order: the rank there is [`Context::local_rank`]. Made at first
    /// use; it works at the same time as [`Context::comm`] and others.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::Invalid`] if the members of the job are not known yet.
    ///
    /// ```
    /// use kolo::Context;
    /// use kolo::collectives::{CollectiveError, ReduceOp};
    ///
    /// /// The largest sum of a node.
    /// #[kolo::function]
    /// fn busiest(ctx: &Context, mine: f64) -> Result<f64, CollectiveError> {
    ///     let mut data = [mine];
    ///     ctx.local()?.all_reduce(&mut data, ReduceOp::Sum)?;
    ///     // Every node has a rank 0, whatever its size.
    ///     if ctx.local_rank() == 0 {
    ///         ctx.cross()?.all_reduce(&mut data, ReduceOp::Max)?;
    ///     }
    ///     ctx.local()?.broadcast(&mut data, kolo::Rank(0))?;
    ///     Ok(data[0])
    /// }
    /// ```
    pub fn local(&self) -> Result<&Communicator, CollectiveError> {
        made_once(&self.inner.local, || self.comm().local())
    }

    /// The communicator of the ranks that have this rank's [local rank](Context::local_rank) on their nodes: the rank there
    /// is [`Context::cross_rank`]. Made at first use.
    ///
    /// # Errors
    ///
    /// As [`Context::local`].
    pub fn cross(&self) -> Result<&Communicator, CollectiveError> {
        made_once(&self.inner.cross, || self.comm().cross())
    }

    /// Runs a loop that outlives changes of the group: [`elastic::run`](crate::elastic::run) with the generations of this worker's
    /// job. All ranks of a call run it, in the same place, each with a state of the same parts.
    ///
    /// In an elastic job the loop goes on when the group has changed: back at the last commit after a rank was lost, or right
    /// after a commit at which all ranks have stopped for a host that joins or is drained. Ranks, sizes and communicators are new then:
    /// use those of the context that the loop is given, and nothing made from an earlier one. Settings of a communicator, such as
    /// [`set_timeout`](Communicator::set_timeout), hold for one generation: set them where the loop begins. The call is answered when
    /// the loop has ended, in whichever generation.
    ///
    /// In a static job, and in a context [for tests](Self::for_tests), there is one generation. A loop whose rank was lost
    /// returns its own error, with the state back at the last commit.
    ///
    /// # Errors
    ///
    /// Those of `body`, and [`ElasticError`]. If no generation follows, [`NoGeneration`](crate::elastic::NoGeneration) says why.
    ///
    /// # Panics
    ///
    /// Those of `body`.
    ///
    /// ```
    /// use kolo::elastic::{State, Value};
    /// use kolo::prelude::*;
    ///
    /// #[derive(serde::Serialize, serde::Deserialize)]
    /// struct Progress {
    ///     step: u32,
    ///     sum: f64,
    /// }
    ///
    /// #[kolo::function]
    /// fn work(ctx: &Context, steps: u32) -> Result<f64> {
    ///     let mut state = State::new(Value(Progress { step: 0, sum: 0.0 }));
    ///     ctx.elastic(&mut state, |ctx, state| {
    ///         while state.step < steps {
    ///             let mut one = [1.0];
    ///             ctx.comm().all_reduce(&mut one, ReduceOp::Average)?;
    ///             state.sum += one[0];
    ///             state.step += 1;
    ///             state.commit(ctx)?;
    ///         }
    ///         Ok(state.sum)
    ///     })
    /// }
    ///
    /// let comm = kolo::collectives::local_group(1)?.remove(0);
    /// assert_eq!(work::call(&Context::for_tests(comm), 5)?, 5.0);
    /// # Ok::<(), kolo::Error>(())
    /// ```
    pub fn elastic<T, R, E>(
        &self,
        state: &mut State<T>,
        body: impl FnMut(&Context, &mut State<T>) -> Result<R, E>,
    ) -> Result<R, E>
    where
        T: Elastic,
        E: From<ElasticError>,
    {
        let mut generations = Generations::new(self.inner.session.upgrade(), self);
        elastic::run(&mut generations, state, body)
    }

    /// Whether nobody wants the result of the call that runs now: its caller cancelled it, or its deadline has
    /// passed. Synchronous code that runs long looks from time to time and returns; async code is dropped at its
    /// next await point by itself.
    pub fn is_cancelled(&self) -> bool {
        self.inner.running.is_stopped()
    }

    /// Until when the call that runs now must end; `None` if it may take any time.
    pub fn deadline(&self) -> Option<Instant> {
        self.inner.running.deadline()
    }

    pub(crate) fn running(&self) -> &Running {
        &self.inner.running
    }

    /// A call begins on this rank.
    pub(crate) fn begin_call(&self, call: CallId) {
        self.inner.comm.begin_call(call);
    }

    /// An operation failed because a rank is lost or can't be reached, or because the generation was over.
    pub(crate) fn lost_a_rank(&self) -> bool {
        matches!(
            self.inner.comm.last_failure(),
            Some(
                CollectiveError::PeerLost { .. }
                    | CollectiveError::Connect { .. }
                    | CollectiveError::Revoked { .. }
            )
        )
    }

    /// A call ended on this rank. If it failed, its peers in collective operations learn it, and the failure
    /// names the rank that it is an echo of, or says that the job ends.
    pub(crate) fn end_call(&self, call: CallId, mut ended: Ended, stopping: bool) -> Ended {
        if let Err(failure) = &mut ended {
            let comm = &self.inner.comm;
            failure.caused_by = comm.last_failure().and_then(|error| error.culprit_rank());
            failure.stopping = stopping;
            let reason = failure.message.lines().next().unwrap_or_default();
            comm.abort_call(call, reason);
        }
        ended
    }
}

/// A group that is made at first use. It counts how often it was made, so it must be once.
fn made_once(
    place: &OnceLock<Communicator>,
    make: impl FnOnce() -> Result<Communicator, CollectiveError>,
) -> Result<&Communicator, CollectiveError> {
    static MAKING: Mutex<()> = Mutex::new(());
    if let Some(made) = place.get() {
        return Ok(made);
    }
    let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(made) = place.get() {
        return Ok(made);
    }
    let made = make()?;
    Ok(place.get_or_init(|| made))
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("job", &self.inner.job)
            .field("generation", &self.generation())
            .field("member", &self.inner.member)
            .field("world_size", &self.world_size())
            .finish_non_exhaustive()
    }
}
