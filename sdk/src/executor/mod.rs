//! A group of workers, as the driver holds it.

mod builder;
mod changes;
mod job;
mod nodes;
mod output;
mod recovery;
mod start;
mod upload;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kolo_transport::ids::{Generation, JobId, Rank};
use kolo_transport::wire::{CallOp, Exit, GenerationTable, JobState};
use tokio::sync::watch;

pub use builder::ExecutorBuilder;
pub use output::Output;
pub use recovery::{GenerationChanges, Recovered};

use crate::call::{All, Call, Create, One, RankCall, Ranks, Scope, Target};
use crate::cluster::Cluster;
use crate::error::ShutdownError;
use crate::executable::Executable;
use crate::function::{ArgumentTuple, Function, IntoArgs, Marked};
pub use crate::options::{Amount, Count};
use job::{JobEnd, JobStatus, stop_limit};

/// A running group of workers: one process per rank, each with this program's functions and executables.
///
/// Clones share the group. [`shutdown`](Executor::shutdown) ends it; so does dropping the last clone, without waiting.
/// Handles, [`ExecutorOn`] and futures of calls do not keep it running. In the list of jobs a group that was shut down has
/// `succeeded`, if it lost no worker before; one that was dropped is `stopped`. Futures of calls may be awaited on any async
/// runtime.
///
/// # Elastic groups
///
/// A group whose [`workers`](ExecutorBuilder::workers) have bounds is *elastic*: it shrinks when workers are lost, grows when nodes
/// join the cluster, and replaces what is missing. Each membership is a *generation* with ranks `0..n` of its own.
///
/// There are two ways to use such a group.
///
/// *The workers drive.* An awaited [`run`](Executor::run) of a function with an elastic loop spans generations. Ranks that stay go on in
/// their loop. Each process that joins gets the same call. The call ends as in Horovod. Once a rank has returned, no process gets the
/// call any more; the results are those of all ranks of that generation, in rank order. The call fails if a rank returns an error of its
/// own, if a rank is lost after another has returned, and if the job ends: because too few workers were left for too long, say.
///
/// *The driver drives.* All other calls belong to one generation, also those of [`submit`](Executor::submit). If that is over, they fail
/// with [`CallError::GenerationOver`](crate::CallError::GenerationOver). [`recovered`](Executor::recovered) waits for the next
/// generation, where the driver calls again.
///
/// A change without a loss, such as growth, cuts no call: the generation ends between two calls, when the values of executables are at
/// their last commits. A `run` that comes then goes to the next generation.
///
/// Values of executables outlive generations, if their type is [`#[kolo::executable(elastic)]`](macro@crate::executable). After a change
/// they are back at their last commit, and their handles tell the number of that.
///
/// [`generations`](Executor::generations) tells what changes, and why.
///
/// # Example
///
/// ```no_run
/// use kolo::prelude::*;
///
/// #[kolo::function]
/// fn greet(ctx: &Context, name: String) -> String {
///     format!("{name} from {} of {}", ctx.rank(), ctx.world_size())
/// }
///
/// # async fn example() -> kolo::Result<()> {
/// let cluster = Cluster::connect_or_local().await?;
/// let executor = Executor::builder().workers(4).start(&cluster).await?;
/// let all: Vec<String> = executor.run(greet, "hello".to_owned()).await?;
/// let one: String = executor.on(Rank(2)).run(greet, "hello".to_owned()).await?;
/// for call in executor.submit(greet, "hello".to_owned()) {
///     println!("{}: {}", call.rank(), call.await?);
/// }
/// executor.shutdown().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Executor {
    inner: Arc<Inner>,
}

struct Inner {
    cluster: Cluster,
    job: JobId,
    target: Target,
    status: watch::Receiver<JobStatus>,
    /// Set, or dropped, to stop the job.
    stop: watch::Sender<bool>,
    grace: Duration,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.target.close("its executor was dropped");
        // That `stop` goes stops the job.
    }
}

/// How a worker ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerExit {
    /// Its rank.
    pub rank: Rank,
    /// The hostname of its node.
    pub hostname: String,
    /// Its process id there; 0 if the head does not know it.
    pub pid: u32,
    /// How its process ended; `None` if the head does not know it.
    pub exit: Option<Exit>,
}

impl Executor {
    /// Describes a group.
    pub fn builder() -> ExecutorBuilder {
        ExecutorBuilder::default()
    }

    pub(crate) fn new(
        cluster: Cluster,
        job: JobId,
        target: Target,
        status: watch::Receiver<JobStatus>,
        stop: watch::Sender<bool>,
        grace: Duration,
    ) -> Self {
        Self {
            inner: Arc::new(Inner {
                cluster,
                job,
                target,
                status,
                stop,
                grace,
            }),
        }
    }

    /// Calls a [`#[kolo::function]`](macro@crate::function) on all ranks. Await it for all results in rank order.
    ///
    /// On an elastic group, a call that is awaited goes on from one generation to the next: see
    /// [elastic groups](Executor#elastic-groups).
    pub fn run<F: Function<Args: ArgumentTuple>, Proof>(
        &self,
        function: impl Marked<Proof, Function = F>,
        args: impl IntoArgs<F::Args>,
    ) -> Call<All, F::Output> {
        self.over(All).run(function, args).spanning()
    }

    /// Calls a function on all ranks and gives one future per rank: [`Executor::run`] and then [`Call::submit`].
    pub fn submit<F: Function<Args: ArgumentTuple>, Proof>(
        &self,
        function: impl Marked<Proof, Function = F>,
        args: impl IntoArgs<F::Args>,
    ) -> Vec<RankCall<F::Output>> {
        self.run(function, args).submit()
    }

    /// Makes a value of a [`#[kolo::executable]`](macro@crate::executable) type on every rank. Await it for the handle that
    /// has the type's methods.
    ///
    /// An elastic group takes types that are [`Elastic`](crate::elastic::Elastic): see [the macro](macro@crate::executable#in-an-elastic-group).
    pub fn create<T: Executable<Args: ArgumentTuple>>(
        &self,
        args: impl IntoArgs<T::Args>,
    ) -> Create<T> {
        Create::new(&self.inner.target, args.into_args().encode())
    }

    /// The group, called on one rank.
    pub fn on(&self, rank: Rank) -> ExecutorOn<One> {
        self.over(One(rank))
    }

    /// The group, called on these ranks. Their order does not matter: results come in rank order.
    pub fn on_ranks(&self, ranks: &[Rank]) -> ExecutorOn<Ranks> {
        self.over(Ranks::from(ranks))
    }

    fn over<S>(&self, scope: S) -> ExecutorOn<S> {
        ExecutorOn {
            target: self.inner.target.clone(),
            scope,
        }
    }

    /// Number of ranks, in the newest generation.
    pub fn world_size(&self) -> usize {
        self.inner.target.now().world_size()
    }

    /// The newest generation. It is always the first, unless the group is elastic.
    pub fn generation(&self) -> Generation {
        self.inner.target.now().generation()
    }

    /// The job's id, for `kolo logs` and the like.
    pub fn job(&self) -> JobId {
        self.inner.job
    }

    /// The members of the newest generation in rank order, with their ranks and nodes.
    pub fn table(&self) -> Arc<GenerationTable> {
        Arc::clone(self.inner.target.now().members())
    }

    /// The cluster that it runs on.
    pub fn cluster(&self) -> &Cluster {
        &self.inner.cluster
    }

    /// Waits until the group has ended by itself or by somebody else: all workers are gone, or an operator stopped it. While
    /// the head is away it is not known whether it has. Cancel safe.
    pub async fn ended(&self) {
        let mut status = self.inner.status.clone();
        // An error means that nobody will ever tell more.
        drop(
            status
                .wait_for(|status| matches!(status, JobStatus::Ended(_)))
                .await,
        );
    }

    /// Ends the group: takes no more calls, tells the workers to finish the call that runs and exit, and after the grace
    /// time makes them. Returns when nothing of it is left, with how each worker ended, in rank order. May be called again,
    /// with the same answer.
    ///
    /// Takes at most three times the [`grace`](ExecutorBuilder::grace) and 25 s, and next to nothing if no call runs. Cancel
    /// safe: the group goes on to end when the future is dropped.
    ///
    /// # Errors
    ///
    /// [`ShutdownError`]: the group had failed, or its end is not known.
    pub async fn shutdown(&self) -> Result<Vec<WorkerExit>, ShutdownError> {
        let inner = &self.inner;
        let job = inner.job;
        inner.target.close("the group was shut down");
        inner.stop.send_replace(true);
        let mut status = inner.status.clone();
        // Its task always says how it ended, within the limit that it keeps itself.
        let limit = stop_limit(inner.grace) + Duration::from_secs(5);
        let ended = inner.cluster.runtime().timeout(limit, async {
            loop {
                match &*status.borrow_and_update() {
                    JobStatus::Ended(end) => break Ok(end.clone()),
                    JobStatus::HeadLost { reason } => {
                        break Err(ShutdownError::HeadLost {
                            job,
                            reason: reason.clone(),
                        });
                    }
                    JobStatus::Running => {}
                }
                if status.changed().await.is_err() {
                    break Err(ShutdownError::TimedOut {
                        job,
                        after: stop_limit(inner.grace),
                    });
                }
            }
        });
        let timed_out = ShutdownError::TimedOut { job, after: limit };
        let JobEnd {
            state,
            reason,
            failure,
        } = ended.await.unwrap_or(Err(timed_out))?;
        if state == JobState::Failed {
            let failure = failure.map(Box::new);
            return Err(ShutdownError::Failed {
                job,
                state,
                reason,
                failure,
            });
        }
        Ok(self.exits().await)
    }

    /// How the workers ended, as far as the head knows.
    async fn exits(&self) -> Vec<WorkerExit> {
        let workers = match self.inner.cluster.job(self.inner.job).await {
            Ok(info) => info.workers,
            Err(error) => {
                tracing::debug!(job = %self.inner.job, %error, "how the workers ended is not known");
                Vec::new()
            }
        };
        let exit = |member: &kolo_transport::wire::Member| {
            let process = |member: &kolo_transport::wire::Member| (member.slot, member.incarnation);
            let mut workers = workers.iter();
            let info = workers.find(|info| process(&info.member) == process(member));
            WorkerExit {
                rank: member.rank,
                hostname: member.hostname.clone(),
                pid: info.map_or(0, |info| info.pid),
                exit: info.and_then(|info| info.exit),
            }
        };
        self.table().members.iter().map(exit).collect()
    }
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executor")
            .field("job", &self.inner.job)
            .field("world_size", &self.world_size())
            .finish_non_exhaustive()
    }
}

/// An [`Executor`] whose calls go to some ranks; made by [`Executor::on`] and [`Executor::on_ranks`].
///
/// It does not keep the group running.
#[derive(Debug, Clone)]
pub struct ExecutorOn<S> {
    target: Target,
    scope: S,
}

impl<S: Scope> ExecutorOn<S> {
    /// Calls a function on these ranks.
    pub fn run<F: Function<Args: ArgumentTuple>, Proof>(
        &self,
        function: impl Marked<Proof, Function = F>,
        args: impl IntoArgs<F::Args>,
    ) -> Call<S, F::Output> {
        // The value only names its type.
        drop(function);
        let op = CallOp::Function {
            name: F::NAME.to_owned(),
        };
        let args = args.into_args().encode();
        Call::new(
            self.target.clone(),
            self.scope.clone(),
            F::NAME.to_owned(),
            op,
            args,
        )
    }

    /// Calls a function on these ranks and gives one future per rank.
    pub fn submit<F: Function<Args: ArgumentTuple>, Proof>(
        &self,
        function: impl Marked<Proof, Function = F>,
        args: impl IntoArgs<F::Args>,
    ) -> Vec<RankCall<F::Output>> {
        self.run(function, args).submit()
    }
}

#[cfg(test)]
mod tests;
