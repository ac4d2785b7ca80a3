//! The Coordinator: the actor around [`HeadCore`].

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use actix::{Actor, Addr, AsyncContext, Context, Handler};
use kolo_core::head::HeadCore;
use kolo_core::head::messages::{
    AskId, Input, LinkEnd, Now, Output, Question, RequestId, Settings,
};
use kolo_transport::CloseCode;
use kolo_transport::awake::{AwakeClock, TICK};
use kolo_transport::wire::HeadReply;
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio::task::AbortHandle;

use super::beats::Beats;
use super::link::{RendezvousHost, TellNews};
use super::log;
use super::messages::{Happened, Way, stopping};
use super::ways::Ways;
use crate::later::{Timer, later};

/// Messages that may wait; senders of more wait themselves.
const MAILBOX: usize = 1024;

/// Carries messages between [`HeadCore`] and the world.
pub struct Coordinator {
    core: HeadCore,
    clock: AwakeClock,
    beats: Beats,
    timer: Timer,
    ways: Ways,
    requests: BTreeMap<RequestId, AbortHandle>,
    rendezvous: Arc<dyn RendezvousHost>,
    alive: watch::Sender<usize>,
}

impl Coordinator {
    /// A head without nodes and jobs. At every change it tells `alive` the number of living nodes.
    ///
    /// # Panics
    ///
    /// Outside of an arbiter's runtime, where it can't be started either.
    #[must_use]
    pub fn new(
        settings: Settings,
        rendezvous: Arc<dyn RendezvousHost>,
        alive: watch::Sender<usize>,
    ) -> Self {
        let clock = AwakeClock::start(&Handle::current(), TICK.min(settings.lease / 10));
        Self {
            core: HeadCore::new(Instant::now(), settings),
            beats: Beats::new(clock.clone()),
            clock,
            timer: Timer::default(),
            ways: Ways::default(),
            requests: BTreeMap::new(),
            rendezvous,
            alive,
        }
    }

    /// Where nodes are heard.
    #[must_use]
    pub fn beats(&self) -> Beats {
        self.beats.clone()
    }

    fn step(&mut self, ctx: &mut Context<Self>, input: Input) {
        let now = Now {
            awake: self.clock.now(),
            real: Instant::now(),
        };
        // First of all, or a lease would run out over beats that have come.
        let heard = Input::Heard(self.beats.take());
        for input in [heard, input] {
            for output in self.core.step(now, input) {
                self.carry_out(ctx, output);
            }
        }
        let wanted = (&self.clock, self.core.deadline());
        self.timer.set(ctx, wanted, |this: &mut Self, ctx| {
            this.timer.rang();
            this.step(ctx, Input::Tick);
        });
    }

    fn carry_out(&mut self, ctx: &mut Context<Self>, output: Output) {
        match output {
            Output::Send(request, message, deadline) => {
                if let Some(link) = self.ways.link(request.session) {
                    let asked = link.request(*message, deadline);
                    let replied =
                        async move { Happened::from(Input::Replied(request, asked.await)) };
                    self.requests.insert(request, later(ctx, replied));
                }
            }
            Output::Cancel(request) => {
                if let Some(replied) = self.requests.remove(&request) {
                    replied.abort();
                }
            }
            Output::CloseLink(session, end, reason) => {
                let code = match end {
                    LinkEnd::Lost => CloseCode::LeaseExpired,
                    LinkEnd::Replaced => CloseCode::Duplicate,
                };
                if let Some(link) = self.ways.link(session) {
                    link.close(code, &reason);
                }
            }
            Output::Tell(job, event) => {
                if !self.ways.tell(job, *event) {
                    tracing::warn!(%job, "the driver does not read the events of the job, and counts as gone");
                    ctx.notify(Happened::from(Input::DriverGone(job)));
                }
            }
            Output::Answer(ask, reply) => self.ways.answer(ask, *reply),
            Output::OpenRendezvous(opening) => {
                let (job, opened) = (opening.job, self.rendezvous.open(opening));
                let opened =
                    async move { Happened::from(Input::RendezvousOpened(job, opened.await)) };
                later(ctx, opened);
            }
            Output::CloseRendezvous(job) => {
                actix::spawn(self.rendezvous.close(job));
            }
            Output::OpenDoor(opening) => {
                let (job, process, this) = (opening.job, opening.process, ctx.address());
                let tell: TellNews = Arc::new(move |news| {
                    let told = this.send(Happened::from(Input::Door(job, process, news)));
                    // An actor that is gone needs no news.
                    Box::pin(async move { told.await.unwrap_or_default() })
                });
                self.rendezvous.open_door(opening, tell);
            }
            Output::Admit(table) => self.rendezvous.admit(table),
            Output::Notice(job, process, number) => self.rendezvous.notice(job, process, number),
            Output::CloseDoor(job, process) => self.rendezvous.close_door(job, process),
            Output::Log(line) => log::write(&line),
            Output::Alive(count) => {
                self.alive.send_replace(count);
            }
        }
    }
}

impl fmt::Debug for Coordinator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Coordinator").finish_non_exhaustive()
    }
}

impl Actor for Coordinator {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(MAILBOX);
    }
}

impl Handler<Happened> for Coordinator {
    type Result = ();

    fn handle(&mut self, Happened { input, way }: Happened, ctx: &mut Self::Context) {
        for ask in way.map(|way| self.ways.open(way)).unwrap_or_default() {
            self.step(ctx, Input::Forget(ask));
        }
        match &input {
            Input::Replied(request, _) => drop(self.requests.remove(request)),
            Input::Disconnected { session, .. } => self.ways.unlink(*session),
            _ => {}
        }
        self.step(ctx, input);
    }
}

/// Asks the head, and waits for the answer. When the future is dropped, the question is forgotten in time.
pub async fn ask(head: &Addr<Coordinator>, question: Question) -> HeadReply {
    static ASKED: AtomicU64 = AtomicU64::new(0);
    let ask = AskId(ASKED.fetch_add(1, Ordering::Relaxed));
    let (answer, answered) = oneshot::channel();
    let asked = head.send(Happened {
        input: Input::Asked { ask, question },
        way: Some(Way::Answer(ask, answer)),
    });
    let reply = match asked.await {
        Ok(()) => answered.await.ok(),
        Err(_) => None,
    };
    reply.unwrap_or_else(|| HeadReply::Refused(stopping()))
}
