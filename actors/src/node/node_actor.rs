//! The actor that owns a node's resources and its jobs.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use kolo_core::node::colocator::Here;
use kolo_core::node::inventory::Inventory;
use kolo_transport::awake::{AwakeClock, TICK};
use kolo_transport::ids::{Generation, JobId, Slot};
use kolo_transport::wire::{
    GenerationTable, NodeEvent, RankFailure, Refusal, RefusalKind, Resources, StartWorkers,
    WorkerSignal,
};
use tokio::runtime::Handle;

use super::colocator_actor::{
    JobMembership, JobRankLost, KillJob, LeaseEnded, NodeColocator, SignalJob, StartJob, StopJob,
};
use super::output::Outputs;
use super::ports::{CallPlane, HeadLink};
use super::worker_actor::Launch;

/// Messages that may wait for the node's actor. Senders wait when it is full.
const MAILBOX: usize = 256;

/// What all actors of a node share.
pub struct NodeContext {
    /// Which node this is.
    pub here: Here,
    /// The IP address under which other nodes reach this one.
    pub ip: IpAddr,
    /// The cluster's CA certificate in DER, for workers that get a certificate.
    pub authority: Vec<u8>,
    /// Whether a job that holds no GPU must not see those that are here.
    pub hides_gpus: bool,
    /// The program that wardens are started from; its `main` calls [`kolo_process::run_if_warden`] first.
    pub warden_exe: PathBuf,
    /// Where sockets and pipes of workers are served: not on an actor's thread.
    pub runtime: Handle,
    /// The way to the head.
    pub head: Arc<dyn HeadLink>,
    /// The way of calls.
    pub calls: Arc<dyn CallPlane>,
    /// The output of workers.
    pub outputs: Arc<Outputs>,
}

impl std::fmt::Debug for NodeContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeContext")
            .field("here", &self.here)
            .field("ip", &self.ip)
            .finish_non_exhaustive()
    }
}

struct Job {
    actor: Addr<NodeColocator>,
    incarnation: u64,
}

/// A node: its resources, and one colocator for each job that holds some.
pub struct NodeActor {
    context: Arc<NodeContext>,
    /// For leases and deadlines, of its jobs' actors too.
    clock: AwakeClock,
    inventory: Inventory,
    jobs: BTreeMap<JobId, Job>,
    /// Tells apart two lives of one job here.
    incarnations: u64,
    timer: Option<SpawnHandle>,
    /// Set when the node stops: it takes no more jobs.
    stopping: Option<String>,
}

impl std::fmt::Debug for NodeActor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeActor")
            .field("context", &self.context)
            .field("inventory", &self.inventory)
            .finish_non_exhaustive()
    }
}

impl NodeActor {
    /// A node with these resources and no jobs. Make it on the arbiter on which it is started.
    ///
    /// # Panics
    ///
    /// Outside of an arbiter's runtime, where it can't be started either.
    #[must_use]
    pub fn new(context: Arc<NodeContext>, inventory: Inventory) -> Self {
        Self {
            context,
            clock: AwakeClock::start(&Handle::current(), TICK),
            inventory,
            jobs: BTreeMap::new(),
            incarnations: 0,
            timer: None,
            stopping: None,
        }
    }

    fn job(&self, job: JobId) -> Result<&Job, Refusal> {
        self.jobs.get(&job).ok_or_else(|| {
            Refusal::new(
                RefusalKind::NotFound,
                format!("{job} holds nothing on this node"),
            )
        })
    }

    fn expire(&mut self, ctx: &mut Context<Self>) {
        for job in self.inventory.expire(self.clock.now()) {
            tracing::warn!(%job, "a reservation was not committed in time and is released");
            // From here on it is only what is left to be cleaned up.
            if let Some(ended) = self.jobs.remove(&job) {
                let told = ended.actor.send(LeaseEnded).into_actor(self);
                ctx.spawn(told.map(|_, _, _| ()));
            }
        }
        self.schedule(ctx);
    }

    fn schedule(&mut self, ctx: &mut Context<Self>) {
        if let Some(timer) = self.timer.take() {
            ctx.cancel_future(timer);
        }
        if let Some(next) = self.inventory.next_expiry() {
            let wait = self.clock.until(next);
            self.timer = Some(ctx.run_later(wait, |actor, ctx| {
                actor.timer = None;
                actor.expire(ctx);
            }));
        }
    }

    /// Stops a job; the future is done when nothing of it is left.
    fn stop(&self, job: JobId, reason: String, interrupt: bool) -> ResponseFuture<()> {
        let Some(job) = self.jobs.get(&job) else {
            return Box::pin(async {});
        };
        let asked = job.actor.send(StopJob { reason, interrupt });
        Box::pin(async move {
            // Either error says that it is gone.
            if let Ok(gone) = asked.await {
                drop(gone.await);
            }
        })
    }
}

impl Actor for NodeActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(MAILBOX);
    }
}

/// Hold resources for a job, all or nothing, until the lease ends.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<(), Refusal>")]
pub struct Reserve {
    /// The job.
    pub job: JobId,
    /// What each worker holds.
    pub per_worker: Resources,
    /// Number of workers.
    pub workers: u32,
    /// How long it is held without a start.
    pub lease: Duration,
}

impl Handler<Reserve> for NodeActor {
    type Result = Result<(), Refusal>;

    fn handle(&mut self, message: Reserve, ctx: &mut Self::Context) -> Self::Result {
        if let Some(reason) = &self.stopping {
            return Err(Refusal::new(
                RefusalKind::Stopped,
                format!("this node is stopping: {reason}"),
            ));
        }
        let Reserve {
            job,
            per_worker,
            workers,
            lease,
        } = message;
        self.inventory
            .reserve(self.clock.now(), job, &per_worker, workers, lease)?;
        if !self.jobs.contains_key(&job) {
            self.incarnations += 1;
            let incarnation = self.incarnations;
            let actor = NodeColocator::new(
                (self.context.clone(), self.clock.clone()),
                ctx.address(),
                job,
                incarnation,
            )
            .start();
            self.jobs.insert(job, Job { actor, incarnation });
        }
        self.schedule(ctx);
        Ok(())
    }
}

/// Commit a job's reservation and start its workers. Answered with their process ids when every one runs
/// or has failed to start.
#[derive(Debug, Message)]
#[rtype(result = "Result<Vec<(Slot, u32)>, Refusal>")]
pub struct Start {
    /// What to start.
    pub start: StartWorkers,
    /// Its program.
    pub program: Launch,
}

impl Handler<Start> for NodeActor {
    type Result = ResponseFuture<Result<Vec<(Slot, u32)>, Refusal>>;

    fn handle(&mut self, Start { start, program }: Start, ctx: &mut Self::Context) -> Self::Result {
        let job = start.job;
        let workers = start.slots.len() as u32;
        let committed = self
            .inventory
            .commit(self.clock.now(), job, workers)
            .map(|holding| holding.devices.clone())
            .map_err(Refusal::from);
        self.schedule(ctx);
        let (devices, actor) = match committed
            .and_then(|devices| self.job(job).map(|job| (devices, job.actor.clone())))
        {
            Ok(ready) => ready,
            Err(refusal) => return Box::pin(async { Err(refusal) }),
        };
        Box::pin(async move {
            let over =
                || Refusal::new(RefusalKind::Stopped, format!("{job} was stopped meanwhile"));
            let asked = actor
                .send(StartJob {
                    start,
                    program,
                    devices,
                })
                .await;
            match asked {
                Ok(Ok(answer)) => answer.await.unwrap_or_else(|_| Err(over())),
                Ok(Err(refusal)) => {
                    // It can't be started, so it must not hold anything (G-2).
                    let stop = StopJob {
                        reason: refusal.message.clone(),
                        interrupt: false,
                    };
                    if let Ok(gone) = actor.send(stop).await {
                        drop(gone.await);
                    }
                    Err(refusal)
                }
                Err(_) => Err(over()),
            }
        })
    }
}

/// A generation of a job is complete.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<(), Refusal>")]
pub struct Membership(pub GenerationTable);

impl Handler<Membership> for NodeActor {
    type Result = ResponseFuture<Result<(), Refusal>>;

    fn handle(&mut self, Membership(table): Membership, _: &mut Self::Context) -> Self::Result {
        let asked = self
            .job(table.job)
            .map(|job| job.actor.send(JobMembership(table)));
        Box::pin(async move { asked?.await.unwrap_or_else(|_| Err(gone())) })
    }
}

/// A rank of a job is gone, on some node.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<(), Refusal>")]
pub struct RankLost {
    /// The job.
    pub job: JobId,
    /// The generation that had it.
    pub generation: Generation,
    /// What is known.
    pub failure: RankFailure,
}

impl Handler<RankLost> for NodeActor {
    type Result = ResponseFuture<Result<(), Refusal>>;

    fn handle(&mut self, message: RankLost, _: &mut Self::Context) -> Self::Result {
        let asked = self.job(message.job).map(|job| {
            job.actor.send(JobRankLost {
                generation: message.generation,
                failure: message.failure,
            })
        });
        Box::pin(async move { asked?.await.unwrap_or_else(|_| Err(gone())) })
    }
}

fn gone() -> Refusal {
    Refusal::new(RefusalKind::NotFound, "the job has just ended on this node")
}

/// End a job, reserved or running. Answered when nothing of it is left, at once if there is no such job.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct Stop {
    /// The job.
    pub job: JobId,
    /// Why, for the log and the workers.
    pub reason: String,
    /// By INT first, if its program is installed here.
    pub interrupt: bool,
}

impl Handler<Stop> for NodeActor {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, message: Stop, _: &mut Self::Context) -> Self::Result {
        self.stop(message.job, message.reason, message.interrupt)
    }
}

/// A signal for all workers of a job whose program is installed here.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "Result<(), Refusal>")]
pub struct SendSignal {
    /// The job.
    pub job: JobId,
    /// Which.
    pub signal: WorkerSignal,
    /// Its number: one that came before is not sent again.
    pub seq: u64,
}

impl Handler<SendSignal> for NodeActor {
    type Result = ResponseFuture<Result<(), Refusal>>;

    fn handle(&mut self, message: SendSignal, _: &mut Self::Context) -> Self::Result {
        let SendSignal { job, signal, seq } = message;
        let asked = self
            .job(job)
            .map(|job| job.actor.send(SignalJob { seq, signal }));
        Box::pin(async move { asked?.await.unwrap_or_else(|_| Err(gone())) })
    }
}

/// Kill a job's workers at once. Answered when nothing of it is left, at once if there is no such job.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct Kill {
    /// The job.
    pub job: JobId,
}

impl Handler<Kill> for NodeActor {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, Kill { job }: Kill, _: &mut Self::Context) -> Self::Result {
        let Some(job) = self.jobs.get(&job) else {
            return Box::pin(async {});
        };
        let asked = job.actor.send(KillJob);
        Box::pin(async move {
            // Either error says that it is gone.
            if let Ok(gone) = asked.await {
                drop(gone.await);
            }
        })
    }
}

/// End all jobs and take no more. Answered when nothing of them is left.
#[derive(Debug, Clone, Message)]
#[rtype(result = "()")]
pub struct StopAll {
    /// Why, for the log and the workers.
    pub reason: String,
}

impl Handler<StopAll> for NodeActor {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, StopAll { reason }: StopAll, _: &mut Self::Context) -> Self::Result {
        self.stopping = Some(reason.clone());
        for job in self.jobs.keys() {
            let (job, reason) = (*job, reason.clone());
            self.context.head.report(NodeEvent::JobLeft { job, reason });
        }
        let all: Vec<_> = self
            .jobs
            .keys()
            .map(|job| self.stop(*job, reason.clone(), false))
            .collect();
        Box::pin(async move {
            futures_util::future::join_all(all).await;
        })
    }
}

/// What a node holds for jobs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSnapshot {
    /// The jobs that hold something.
    pub jobs: Vec<JobId>,
    /// What the node has in all.
    pub total: Resources,
    /// What is free.
    pub free: Resources,
}

/// What does the node hold?
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "NodeSnapshot")]
pub struct Snapshot;

impl Handler<Snapshot> for NodeActor {
    type Result = MessageResult<Snapshot>;

    fn handle(&mut self, _: Snapshot, _: &mut Self::Context) -> Self::Result {
        MessageResult(NodeSnapshot {
            jobs: self.jobs.keys().copied().collect(),
            total: self.inventory.total().clone(),
            free: self.inventory.free().clone(),
        })
    }
}

/// Nothing of a job is left.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub(super) struct Gone {
    pub(super) job: JobId,
    pub(super) incarnation: u64,
}

impl Handler<Gone> for NodeActor {
    type Result = ();

    fn handle(&mut self, Gone { job, incarnation }: Gone, ctx: &mut Self::Context) {
        let current = self
            .jobs
            .get(&job)
            .is_some_and(|entry| entry.incarnation == incarnation);
        // Otherwise its lease had ended, and the job may be here again.
        if current {
            self.jobs.remove(&job);
            self.inventory.release(job);
            self.schedule(ctx);
        }
    }
}
