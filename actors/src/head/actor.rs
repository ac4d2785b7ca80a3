//! The head's actor: the node registry, and the Coordinators of all jobs.

mod cleaning;
mod placing;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use actix::fut::wrap_future;
use actix::{
    Actor, ActorFutureExt, Addr, AsyncContext, Context, Handler, MessageResult, ResponseFuture,
};
use futures_util::future::join_all;
use kolo_core::head::history::{History, MAX_LISTED, shorten};
use kolo_core::head::job::{Event, JobConfig};
use kolo_core::head::registry::{NodeRegistry, Session};
use kolo_core::interfaces::{Key, ProbeCache};
use kolo_transport::Flood;
use kolo_transport::awake::{AwakeClock, TICK};
use kolo_transport::ids::{ClusterId, Generation, JobId, NodeId};
use kolo_transport::session::CloseCode;
use kolo_transport::wire::{ClusterInfo, JobInfo, NodeEvent, Refusal, RefusalKind};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::coordinator::Coordinator;
use super::drain::Drains;
use super::link::{NodeLink, RendezvousHost};
use super::messages::{
    GetCluster, GetEnd, GetJob, GetJobs, Gone, Happened, Heard, Info, JobEnd, MaySign, MaySignHere,
    News, Register, Report, Shutdown, StopJob, Submit, Submitted,
};
use super::probing::Probes;

/// Jobs that a node is asked to stop at one time on top of those that it named when it registered. One that
/// reports more jobs that nobody knows is told so, and no more.
pub(super) const MAX_CLEANING: usize = 4096;
/// Messages that may wait; senders of more wait themselves.
const MAILBOX: usize = 1024;

/// What the head's actor must know.
#[derive(Clone)]
pub struct HeadSettings {
    /// The cluster.
    pub cluster: ClusterId,
    /// A node that is not heard for so long counts as lost.
    pub lease: Duration,
    /// Settings of every job.
    pub job: JobConfig,
    /// Opens rendezvous.
    pub rendezvous: Arc<dyn RendezvousHost>,
    /// Is told the number of living nodes at every change.
    pub alive: watch::Sender<usize>,
}

impl fmt::Debug for HeadSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeadSettings")
            .field("cluster", &self.cluster)
            .field("lease", &self.lease)
            .field("job", &self.job)
            .finish_non_exhaustive()
    }
}

pub(super) struct RunningJob {
    /// For what its network is valid.
    key: Option<Key>,
    number: u64,
    coordinator: Addr<Coordinator>,
}

/// Owns the registry, places jobs, and routes what comes to their Coordinators.
pub struct HeadActor {
    pub(super) settings: HeadSettings,
    started: Instant,
    /// For leases, and for deadlines of jobs.
    pub(super) clock: AwakeClock,
    pub(super) registry: NodeRegistry,
    pub(super) links: HashMap<NodeId, (Session, Arc<dyn NodeLink>)>,
    pub(super) jobs: HashMap<JobId, RunningJob>,
    next_number: u64,
    history: History,
    /// What nodes are asked to stop, until they have confirmed or their stay is over.
    cleaning: HashMap<(NodeId, Session), HashSet<JobId>>,
    /// Complaints about nodes that report too much.
    overflowing: Flood,
    pub(super) stopping: Option<String>,
    /// What connects which nodes.
    pub(super) networks: ProbeCache,
    pub(super) probes: Probes,
    /// Who waits until jobs have ended.
    pub(super) drains: Drains,
}

impl fmt::Debug for HeadActor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeadActor")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

impl HeadActor {
    /// A head without nodes and jobs. Make and start it on the arbiter on which all Coordinators will live.
    ///
    /// # Panics
    ///
    /// Outside of an arbiter's runtime, where it can't be started either.
    #[must_use]
    pub fn new(settings: HeadSettings) -> Self {
        Self {
            registry: NodeRegistry::new(settings.lease),
            clock: AwakeClock::start(&Handle::current(), TICK.min(settings.lease / 10)),
            settings,
            started: Instant::now(),
            links: HashMap::new(),
            jobs: HashMap::new(),
            next_number: 1,
            history: History::default(),
            cleaning: HashMap::new(),
            overflowing: Flood::new("jobs that nobody knows were reported", 1),
            stopping: None,
            networks: ProbeCache::default(),
            probes: Probes::default(),
            drains: Drains::default(),
        }
    }

    /// Looks for leases that have run out, again and again.
    fn watch_leases(&self, ctx: &mut Context<Self>) {
        // A node that registers meanwhile has a whole lease before it.
        let next = self.registry.next_expiry();
        let wait = next.map_or(self.settings.lease, |next| self.clock.until(next));
        ctx.run_later(wait, |this, ctx| {
            for (node, session, silent) in this.registry.expired(this.clock.now()) {
                let reason = format!("no heartbeat for {:.1} s", silent.as_secs_f64());
                this.node_lost(ctx, node, session, &reason);
            }
            this.watch_leases(ctx);
        });
    }

    fn node_lost(&mut self, ctx: &mut Context<Self>, node: NodeId, session: Session, reason: &str) {
        let Some(jobs) = self.registry.lose(node, session) else {
            return;
        };
        tracing::warn!(%node, reason, jobs = jobs.len(), "a node is lost");
        if let Some((_, link)) = self.links.remove(&node) {
            link.close(CloseCode::LeaseExpired, reason);
        }
        self.tell_jobs_of_loss(ctx, node, &jobs, reason);
        self.count_alive();
        self.settle_drains();
    }

    fn tell_jobs_of_loss(
        &self,
        ctx: &mut Context<Self>,
        node: NodeId,
        jobs: &[JobId],
        reason: &str,
    ) {
        for job in jobs {
            if let Some(job) = self.jobs.get(job) {
                let reason = reason.to_owned();
                let told = job
                    .coordinator
                    .send(Happened(Event::NodeLost { node, reason }));
                // A Coordinator that is gone has ended its job.
                ctx.spawn(wrap_future::<_, Self>(told).map(|_, _, _| ()));
            }
        }
    }

    fn count_alive(&self) {
        self.settings
            .alive
            .send_replace(self.registry.alive_count());
    }

    /// The Coordinator that must hear of an event. Events of jobs that have ended are dealt with here.
    fn concerned(
        &mut self,
        ctx: &mut Context<Self>,
        node: NodeId,
        session: Session,
        event: &NodeEvent,
    ) -> Option<Addr<Coordinator>> {
        let job = match event {
            NodeEvent::WorkerReady { job, .. }
            | NodeEvent::WorkerExited { job, .. }
            | NodeEvent::JobGone { job }
            | NodeEvent::JobLeft { job, .. } => *job,
        };
        if let Some(running) = self.jobs.get(&job) {
            return Some(running.coordinator.clone());
        }
        if matches!(event, NodeEvent::JobGone { .. }) {
            self.registry.free(job, node);
            self.settle_drains();
        } else if self.history.find(job).is_none() {
            let cleaning = self.cleaning.get(&(node, session)).map_or(0, HashSet::len);
            if cleaning < MAX_CLEANING {
                tracing::debug!(%node, %job, "a node reports a job that nobody knows; it is to stop it");
                self.clean_up(ctx, node, session, job);
            } else {
                self.overflowing.line(
                    || tracing::warn!(%node, %job, "a node reports too many jobs that nobody knows"),
                );
            }
        }
        None
    }

    pub(super) fn is_current(&self, node: NodeId, session: Session) -> Result<(), Refusal> {
        match self.registry.alive(node) {
            Some((_, current)) if current == session => Ok(()),
            _ => Err(Refusal::new(
                RefusalKind::Forbidden,
                format!("{node} is not registered, or counts as lost; register again"),
            )),
        }
    }
}

/// Stops a job. The errors of a Coordinator that is gone are the end of its job, which is what was asked for.
async fn stop(coordinator: &Addr<Coordinator>, reason: String) -> JobEnd {
    let end = coordinator.send(GetEnd).await.unwrap_or(JobEnd(None));
    coordinator
        .send(Happened(Event::Stop { reason }))
        .await
        .ok();
    end
}

fn unknown_job(job: JobId) -> Refusal {
    Refusal::new(
        RefusalKind::NotFound,
        format!("the head knows no {job}; `kolo jobs` lists those that it knows"),
    )
}

impl Actor for HeadActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(MAILBOX);
        self.watch_leases(ctx);
    }
}

impl Handler<Register> for HeadActor {
    type Result = Result<Session, Refusal>;

    fn handle(&mut self, message: Register, ctx: &mut Self::Context) -> Self::Result {
        let Register { registration, link } = message;
        let (node, hostname) = (registration.node, registration.hostname.clone());
        let resources = registration.resources.to_string();
        let admission = self.registry.register(self.clock.now(), registration)?;
        let session = admission.session;
        tracing::info!(%node, hostname, resources, "a node has registered");
        if let Some((_, old)) = self.links.insert(node, (session, link)) {
            old.close(CloseCode::Duplicate, "the node has registered again");
        }
        if admission.replaced.is_some() {
            let reason = "the node has registered again";
            self.tell_jobs_of_loss(ctx, node, &admission.stale, reason);
        }
        for job in admission.stale {
            self.clean_up(ctx, node, session, job);
        }
        self.count_alive();
        Ok(session)
    }
}

impl Handler<Heard> for HeadActor {
    type Result = bool;

    fn handle(&mut self, message: Heard, _: &mut Self::Context) -> bool {
        self.registry
            .beat(self.clock.now(), message.node, message.session)
    }
}

impl Handler<Gone> for HeadActor {
    type Result = ();

    fn handle(&mut self, message: Gone, ctx: &mut Self::Context) {
        self.node_lost(ctx, message.node, message.session, &message.reason);
    }
}

impl Handler<Report> for HeadActor {
    type Result = ResponseFuture<Result<(), Refusal>>;

    fn handle(&mut self, message: Report, ctx: &mut Self::Context) -> Self::Result {
        let Report {
            node,
            session,
            events,
        } = message;
        if let Err(refusal) = self.is_current(node, session) {
            return Box::pin(async { Err(refusal) });
        }
        let news: Vec<_> = events
            .into_iter()
            .filter_map(|event| {
                let coordinator = self.concerned(ctx, node, session, &event)?;
                Some((coordinator, Happened(Event::Node { node, event })))
            })
            .collect();
        Box::pin(async move {
            // One by one, so that they keep their order also where a mailbox is full.
            for (coordinator, event) in news {
                // It has ended meanwhile, and so asked for nothing more.
                coordinator.send(event).await.ok();
            }
            Ok(())
        })
    }
}

impl Handler<MaySign> for HeadActor {
    type Result = ResponseFuture<Result<Generation, Refusal>>;

    fn handle(&mut self, message: MaySign, _: &mut Self::Context) -> Self::Result {
        let MaySign {
            node,
            session,
            job,
            slot,
        } = message;
        let asked = self.is_current(node, session).and_then(|()| {
            let running = self.jobs.get(&job).ok_or_else(|| unknown_job(job))?;
            Ok(running.coordinator.send(MaySignHere { node, slot }))
        });
        Box::pin(async move { asked?.await.unwrap_or_else(|_| Err(unknown_job(job))) })
    }
}

impl Handler<Submit> for HeadActor {
    type Result = Result<Submitted, Refusal>;

    fn handle(&mut self, message: Submit, ctx: &mut Self::Context) -> Self::Result {
        self.place_job(ctx, message)
    }
}

impl Handler<GetCluster> for HeadActor {
    type Result = MessageResult<GetCluster>;

    fn handle(&mut self, _: GetCluster, _: &mut Self::Context) -> Self::Result {
        let now = Instant::now();
        MessageResult(ClusterInfo {
            cluster: self.settings.cluster,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_ms: now.saturating_duration_since(self.started).as_millis() as u64,
            nodes: self.registry.info(self.clock.now()),
            running_jobs: self.jobs.len() as u32,
            // Known to who keeps it.
            revoked: Vec::new(),
            time_ms: SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)
                .map_or(0, |since| since.as_millis() as u64),
        })
    }
}

impl Handler<GetJobs> for HeadActor {
    type Result = ResponseFuture<Vec<JobInfo>>;

    fn handle(&mut self, _: GetJobs, _: &mut Self::Context) -> Self::Result {
        let asked: Vec<_> = self
            .jobs
            .values()
            .map(|job| {
                let (number, info) = (job.number, job.coordinator.send(Info));
                async move { Some((number, info.await.ok()?)) }
            })
            .collect();
        let mut all = self.history.all();
        Box::pin(async move {
            all.extend(join_all(asked).await.into_iter().flatten());
            all.sort_unstable_by_key(|(number, _)| std::cmp::Reverse(*number));
            let mut jobs: Vec<_> = all.into_iter().map(|(_, info)| info).collect();
            for job in &mut jobs {
                // Large, and to be had for each job by itself.
                job.network = None;
            }
            shorten(&mut jobs, MAX_LISTED);
            jobs
        })
    }
}

impl Handler<GetJob> for HeadActor {
    type Result = ResponseFuture<Result<JobInfo, Refusal>>;

    fn handle(&mut self, GetJob(job): GetJob, ctx: &mut Self::Context) -> Self::Result {
        if let Some(info) = self.history.find(job) {
            let info = info.clone();
            return Box::pin(async { Ok(info) });
        }
        let Some(running) = self.jobs.get(&job) else {
            return Box::pin(async move { Err(unknown_job(job)) });
        };
        let (asked, this) = (running.coordinator.send(Info), ctx.address());
        Box::pin(async move {
            match asked.await {
                Ok(info) => Ok(info),
                // It has ended just now, so the history has it.
                Err(_) => match this.send(GetJob(job)).await {
                    Ok(answer) => answer,
                    Err(_) => Err(unknown_job(job)),
                },
            }
        })
    }
}

impl Handler<StopJob> for HeadActor {
    type Result = ResponseFuture<Result<JobEnd, Refusal>>;

    fn handle(&mut self, message: StopJob, _: &mut Self::Context) -> Self::Result {
        let StopJob { job, reason } = message;
        let Some(running) = self.jobs.get(&job) else {
            let known = self.history.find(job).is_some();
            return Box::pin(async move {
                if known {
                    Ok(JobEnd(None))
                } else {
                    Err(unknown_job(job))
                }
            });
        };
        let coordinator = running.coordinator.clone();
        Box::pin(async move { Ok(stop(&coordinator, reason).await) })
    }
}

impl Handler<Shutdown> for HeadActor {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, Shutdown { reason }: Shutdown, _: &mut Self::Context) -> Self::Result {
        self.stopping = Some(reason.clone());
        let ends: Vec<_> = self
            .jobs
            .values()
            .map(|job| {
                let coordinator = job.coordinator.clone();
                let reason = reason.clone();
                async move { stop(&coordinator, reason).await.wait().await }
            })
            .collect();
        Box::pin(async move {
            join_all(ends).await;
        })
    }
}

impl Handler<News> for HeadActor {
    type Result = ();

    fn handle(&mut self, news: News, ctx: &mut Self::Context) {
        for node in news.free {
            self.registry.free(news.job, node);
        }
        // Also below, when the job has ended.
        self.settle_drains();
        for node in news.abandoned {
            if let Some((_, session)) = self.registry.alive(node) {
                self.clean_up(ctx, node, session, news.job);
            }
        }
        if let Some(network) = news.learned
            && let Some(key) = self.jobs.get(&news.job).and_then(|job| job.key.clone())
        {
            self.networks.put(Instant::now(), key, network);
        }
        let Some(info) = news.finished else {
            return;
        };
        tracing::info!(
            job = %news.job,
            state = %info.state,
            reason = info.reason.as_deref().unwrap_or_default(),
            "a job has ended"
        );
        if let Some(job) = self.jobs.remove(&news.job) {
            self.history.push(job.number, info);
        }
        self.settle_drains();
    }
}
