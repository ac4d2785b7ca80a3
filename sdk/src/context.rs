//! What user code knows of the worker that it runs in.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use kolo_collectives::Communicator;
use kolo_transport::ids::{CallId, CrossRank, Generation, JobId, LocalRank, NodeId, Slot};
use kolo_transport::wire::Member;

use crate::__private::Ended;
use crate::worker::Running;

/// The worker that user code runs in: its ranks, its job, its communicator and the call that runs now.
///
/// Functions, constructors and methods get a `&Context`. A clone is cheap and may be kept, for instance in an
/// executable, or given to a thread; it always tells of the call that runs at the moment.
#[derive(Clone)]
pub struct Context {
    inner: Arc<Inner>,
}

struct Inner {
    job: JobId,
    member: Member,
    comm: Communicator,
    running: Running,
}

impl Context {
    pub(crate) fn new(member: Member, comm: Communicator, job: JobId) -> Self {
        Self {
            inner: Arc::new(Inner {
                job,
                member,
                comm,
                running: Running::default(),
            }),
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
        };
        let job = comm.hello().job;
        Self::new(member, comm, job)
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
        &self.inner.comm
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

    /// A call ended on this rank. If it failed, its peers in collective operations learn it, and the failure
    /// names the rank that it is an echo of.
    pub(crate) fn end_call(&self, call: CallId, mut ended: Ended) -> Ended {
        if let Err(failure) = &mut ended {
            let comm = &self.inner.comm;
            failure.caused_by = comm.last_failure().and_then(|error| error.culprit_rank());
            let reason = failure.message.lines().next().unwrap_or_default();
            comm.abort_call(call, reason);
        }
        ended
    }
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
