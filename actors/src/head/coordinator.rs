//! The Coordinator actor: one for each job, a thin shell around [`Job`].

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::fut::wrap_future;
use actix::{
    Actor, ActorContext, ActorFutureExt, Addr, AsyncContext, Context, Handler, MessageResult,
    SpawnHandle,
};
use kolo_core::head::job::{Action, Event, Job, Reply};
use kolo_core::interfaces::{Key, Network};
use kolo_core::pace::Backoff;
use kolo_transport::AwakeClock;
use kolo_transport::ids::NodeId;
use kolo_transport::wire::{JobEvent, NodeRequest, Refusal};
use tokio::sync::{mpsc, watch};

use super::actor::HeadActor;
use super::link::{NodeLink, RendezvousHost};
use super::messages::{GetEnd, Happened, Info, JobEnd, MaySignHere, News};
use super::probing::{Probes, Search};

/// How long a node may take for one push before it is tried again.
const PUSH_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to wait after a push that did not work: at first, and at most.
const PUSH_PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));
/// On top of a request's own deadline, for a link that does not keep it.
const OVERTIME: Duration = Duration::from_secs(1);

/// A node that has a part in the job.
pub(super) struct Contact {
    pub(super) link: Arc<dyn NodeLink>,
    pub(super) ip: IpAddr,
}

/// What is being delivered to one node.
struct Outbox {
    waiting: VecDeque<NodeRequest>,
    /// The delivery of the first one, or the pause before it is tried again.
    delivery: Option<SpawnHandle>,
    backoff: Backoff,
}

impl Default for Outbox {
    fn default() -> Self {
        let (first, most) = PUSH_PAUSES;
        Self {
            waiting: VecDeque::new(),
            delivery: None,
            backoff: Backoff::new(first, most),
        }
    }
}

/// With whom it shares what its network is found to be.
pub(super) struct Sharing {
    pub(super) probes: Probes,
    pub(super) key: Option<Key>,
    /// Whether a probe that has begun already does not count.
    pub(super) anew: bool,
}

/// Drives one job: from its placement to its end.
pub struct Coordinator {
    job: Job,
    clock: AwakeClock,
    /// When the job was submitted, by the real clock: people see its age.
    since: Instant,
    first_actions: Vec<Action>,
    contacts: HashMap<NodeId, Contact>,
    head: Addr<HeadActor>,
    driver: mpsc::Sender<JobEvent>,
    rendezvous: Arc<dyn RendezvousHost>,
    search: Sharing,
    /// What was found out, for the next job.
    learned: Option<Arc<Network>>,
    outboxes: HashMap<NodeId, Outbox>,
    timer: Option<(Instant, SpawnHandle)>,
    /// Dropped at the end.
    ended: watch::Sender<()>,
}

impl fmt::Debug for Coordinator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Coordinator")
            .field("job", &self.job.id())
            .finish_non_exhaustive()
    }
}

impl Coordinator {
    pub(super) fn new(
        (job, first_actions): (Job, Vec<Action>),
        clock: AwakeClock,
        contacts: HashMap<NodeId, Contact>,
        head: Addr<HeadActor>,
        driver: mpsc::Sender<JobEvent>,
        rendezvous: Arc<dyn RendezvousHost>,
        search: Sharing,
    ) -> Self {
        Self {
            search,
            job,
            clock,
            since: Instant::now(),
            first_actions,
            contacts,
            head,
            driver,
            rendezvous,
            learned: None,
            outboxes: HashMap::new(),
            timer: None,
            ended: watch::Sender::new(()),
        }
    }

    fn step(&mut self, ctx: &mut Context<Self>, event: Event) {
        let actions = self.job.step(self.clock.now(), event);
        self.act(ctx, actions);
    }

    fn act(&mut self, ctx: &mut Context<Self>, actions: Vec<Action>) {
        let mut news = News {
            job: self.job.id(),
            free: Vec::new(),
            abandoned: Vec::new(),
            finished: None,
            learned: self.learned.take(),
        };
        let mut told = Vec::new();
        for action in actions {
            match action {
                Action::Request {
                    node,
                    request,
                    deadline,
                } => self.request(ctx, node, *request, deadline),
                Action::Push { node, request } => {
                    let outbox = self.outboxes.entry(node).or_default();
                    outbox.waiting.push_back(*request);
                    self.deliver(ctx, node);
                }
                Action::Tell(event) => told.push(event),
                Action::Discover(discovery, limit) => {
                    let links = self
                        .contacts
                        .iter()
                        .map(|(node, contact)| (*node, Arc::clone(&contact.link)))
                        .collect();
                    let search = Search {
                        discovery: *discovery,
                        key: self.search.key.clone(),
                        anew: self.search.anew,
                    };
                    let limit = (self.clock.clone(), limit);
                    let found = self.search.probes.clone().find(search, links, limit);
                    ctx.spawn(wrap_future::<_, Self>(found).map(|found, this, ctx| {
                        if let Ok(network) = &found {
                            this.learned = Some(Arc::clone(network));
                        }
                        this.step(ctx, Event::Discovered(found));
                    }));
                }
                Action::OpenRendezvous(members) => {
                    let peers = self.contacts.values().map(|contact| contact.ip).collect();
                    let local = self.local_ip();
                    let opening = self.rendezvous.open(self.job.id(), members, peers, local);
                    ctx.spawn(wrap_future::<_, Self>(opening).map(|opened, this, ctx| {
                        this.step(ctx, Event::Rendezvous(opened));
                    }));
                }
                // The actor may stop before it is closed.
                Action::CloseRendezvous => {
                    actix::spawn(self.rendezvous.close(self.job.id()));
                }
                Action::Free(node) => news.free.push(node),
                Action::Abandon(node) => news.abandoned.push(node),
                Action::Note(text) => tracing::info!(job = %self.job.id(), "{text}"),
                Action::Finished => news.finished = Some(self.job.info(self.since.elapsed())),
            }
        }
        self.set_timer(ctx);
        if news.free.is_empty()
            && news.abandoned.is_empty()
            && news.finished.is_none()
            && news.learned.is_none()
        {
            self.tell(told);
            return;
        }
        // The head hears it first: a driver that is told of the end may want what is free now.
        let finished = news.finished.is_some();
        let sent = self.head.send(news);
        ctx.wait(wrap_future::<_, Self>(sent).map(move |sent, this, ctx| {
            if let Err(error) = sent {
                tracing::warn!(job = %this.job.id(), %error, "the head's registry is gone");
            }
            this.tell(told);
            if finished {
                // Nobody is told any more that it runs: what is asked for it from now on is not opened again.
                actix::spawn(this.rendezvous.close(this.job.id()));
                ctx.stop();
            }
        }));
    }

    /// An address of this host that all nodes of the job reach: one that a node on another host uses, if there is one.
    fn local_ip(&self) -> Option<IpAddr> {
        let seen = || {
            self.contacts
                .values()
                .filter_map(|contact| contact.link.local_ip())
        };
        seen()
            .filter(|ip| !ip.is_loopback())
            .min()
            .or_else(|| seen().min())
    }

    /// Sends a request that has the node for itself: what was to be delivered before is pointless now.
    fn request(
        &mut self,
        ctx: &mut Context<Self>,
        node: NodeId,
        request: NodeRequest,
        deadline: Duration,
    ) {
        self.drop_outbox(ctx, node);
        let asked = self.ask(node, request, deadline);
        ctx.spawn(wrap_future::<_, Self>(asked).map(move |reply, this, ctx| {
            this.step(ctx, Event::Replied { node, reply });
        }));
    }

    fn ask(
        &self,
        node: NodeId,
        request: NodeRequest,
        deadline: Duration,
    ) -> impl Future<Output = Reply> + 'static {
        let asked = self
            .contacts
            .get(&node)
            .map(|contact| contact.link.request(request, deadline));
        let clock = self.clock.clone();
        async move {
            let Some(asked) = asked else {
                return Reply::Unknown("there is no connection to it".to_owned());
            };
            clock
                .timeout(deadline + OVERTIME, asked)
                .await
                .unwrap_or_else(|| Reply::Unknown(format!("no answer within {deadline:?}")))
        }
    }

    fn drop_outbox(&mut self, ctx: &mut Context<Self>, node: NodeId) {
        let Some(outbox) = self.outboxes.remove(&node) else {
            return;
        };
        if let Some(delivery) = outbox.delivery {
            ctx.cancel_future(delivery);
        }
        let failures = outbox.backoff.failures();
        if failures > 0 {
            tracing::info!(job = %self.job.id(), %node, failures, "a push is given up: it is pointless now");
        }
    }

    /// Delivers the first in a node's outbox unless that is under way.
    fn deliver(&mut self, ctx: &mut Context<Self>, node: NodeId) {
        let Some(request) = self
            .outboxes
            .get(&node)
            .filter(|outbox| outbox.delivery.is_none())
            .and_then(|outbox| outbox.waiting.front().cloned())
        else {
            return;
        };
        let membership = matches!(request, NodeRequest::Membership(_));
        let asked = self.ask(node, request, PUSH_TIMEOUT);
        let handle = ctx.spawn(wrap_future::<_, Self>(asked).map(move |reply, this, ctx| {
            let job = this.job.id();
            let Some(outbox) = this.outboxes.get_mut(&node) else {
                return;
            };
            outbox.delivery = None;
            let refusal = match reply {
                Reply::Unknown(reason) => {
                    // Once: its end is logged too.
                    if outbox.backoff.failures() == 0 {
                        tracing::warn!(%job, %node, reason, "a push does not work; it is tried until it does");
                    }
                    let pause = outbox.backoff.failed();
                    outbox.delivery = Some(ctx.run_later(pause, move |this, ctx| {
                        if let Some(outbox) = this.outboxes.get_mut(&node) {
                            outbox.delivery = None;
                        }
                        this.deliver(ctx, node);
                    }));
                    return;
                }
                Reply::Answer(_) => None,
                Reply::Refused(refusal) => Some(refusal),
            };
            let failures = outbox.backoff.worked();
            if failures > 0 {
                tracing::info!(%job, %node, failures, "a push works again");
            }
            outbox.waiting.pop_front();
            this.deliver(ctx, node);
            this.step(
                ctx,
                Event::Pushed {
                    node,
                    membership,
                    refusal,
                },
            );
        }));
        if let Some(outbox) = self.outboxes.get_mut(&node) {
            outbox.delivery = Some(handle);
        }
    }

    fn tell(&self, events: Vec<JobEvent>) {
        for event in events {
            match self.driver.try_send(event) {
                // A driver that is gone is known by the end of its stream.
                Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => {}
                Err(mpsc::error::TrySendError::Full(event)) => {
                    tracing::error!(job = %self.job.id(), ?event, "the driver's queue is too short");
                }
            }
        }
    }

    fn set_timer(&mut self, ctx: &mut Context<Self>) {
        let wanted = self.job.deadline();
        if self.timer.map(|(at, _)| at) == wanted {
            return;
        }
        if let Some((_, handle)) = self.timer.take() {
            ctx.cancel_future(handle);
        }
        if let Some(at) = wanted {
            let delay = self.clock.until(at);
            let handle = ctx.run_later(delay, |this, ctx| {
                this.timer = None;
                this.step(ctx, Event::Tick);
            });
            self.timer = Some((at, handle));
        }
    }
}

impl Actor for Coordinator {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let actions = std::mem::take(&mut self.first_actions);
        self.act(ctx, actions);
    }
}

impl Handler<Happened> for Coordinator {
    type Result = ();

    fn handle(&mut self, Happened(event): Happened, ctx: &mut Self::Context) {
        if let Event::NodeLost { node, .. } = &event {
            self.drop_outbox(ctx, *node);
        }
        self.step(ctx, event);
    }
}

impl Handler<Info> for Coordinator {
    type Result = MessageResult<Info>;

    fn handle(&mut self, _: Info, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.job.info(self.since.elapsed()))
    }
}

impl Handler<MaySignHere> for Coordinator {
    type Result = Result<kolo_transport::ids::Generation, Refusal>;

    fn handle(&mut self, message: MaySignHere, _: &mut Self::Context) -> Self::Result {
        self.job.may_sign(message.node, message.slot)
    }
}

impl Handler<GetEnd> for Coordinator {
    type Result = MessageResult<GetEnd>;

    fn handle(&mut self, _: GetEnd, _: &mut Self::Context) -> Self::Result {
        MessageResult(JobEnd(Some(self.ended.subscribe())))
    }
}
