//! The actor of a node, around [`NodeCore`].

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use actix::prelude::*;
use kolo_core::agent::{METRICS_GROUP, MetricHandler};
use kolo_core::env::GLOO_TIMEOUT;
use kolo_core::node::NodeCore;
use kolo_core::node::messages::{Found, Input, Output};
use kolo_transport::awake::{AwakeClock, TICK};
use kolo_transport::wire::{NodeReply, Refusal, RefusalKind};
use tokio::runtime::Handle;

use super::asks::{Ask, Asks, Happened, NodeSnapshot, Snapshot};
use super::homes::Homes;
use super::ports::NodeContext;
use crate::agent::TracingMetrics;
use crate::later::{Timer, later};

/// Messages that may wait for the node's actor. Senders wait when it is full.
const MAILBOX: usize = 256;

/// The longest that a node waits for the ends of Horovod's connections.
const HANG_UP: Duration = Duration::from_secs(1);

/// A node: holds resources for jobs and runs their workers. Whatever happens goes into its [`NodeCore`]; whatever comes out
/// is done here.
pub struct NodeColocator {
    context: Arc<NodeContext>,
    clock: AwakeClock,
    core: NodeCore,
    asks: Asks,
    homes: Homes,
    timer: Timer,
}

impl std::fmt::Debug for NodeColocator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("NodeColocator").field(&self.core).finish()
    }
}

impl NodeColocator {
    /// An actor around a core. Make it on the arbiter on which it is started.
    ///
    /// # Panics
    ///
    /// Outside of an arbiter's runtime, where it can't be started either.
    #[must_use]
    pub fn new(context: Arc<NodeContext>, core: NodeCore) -> Self {
        Self {
            clock: AwakeClock::start(&Handle::current(), TICK),
            core,
            asks: Asks::default(),
            homes: Homes::new(context.clone()),
            context,
            timer: Timer::default(),
        }
    }

    fn step(&mut self, input: Input, ctx: &mut Context<Self>) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            for output in self.core.step(self.clock.now(), input) {
                inputs.extend(self.perform(output, ctx));
            }
        }
        let wanted = (&self.clock, self.core.deadline());
        self.timer.set(ctx, wanted, |this: &mut Self, ctx| {
            this.timer.rang();
            this.step(Input::Tick, ctx);
        });
    }

    /// Does what the core wants; what is wrong with it at once.
    fn perform(&mut self, output: Output, ctx: &mut Context<Self>) -> Vec<Input> {
        let NodeContext { head, calls, .. } = &*self.context;
        match output {
            Output::Answer { ask, reply } => {
                self.homes.forget(ask);
                self.asks.answer(ask, reply);
            }
            Output::Find { ask, program, port } => {
                let finding = self.homes.find(ask, program, port);
                later(ctx, async move { Happened(finding.await) });
            }
            Output::Check { ask, stay, check } => {
                let checking = self.homes.check((ask, stay), check);
                later(ctx, async move { Happened(checking.await) });
            }
            Output::FindPort { ask } => {
                return vec![Input::Found {
                    ask,
                    program: Found::NotSent,
                    free_port: self.context.programs.free_port(),
                }];
            }
            Output::StartWarden(stay) => {
                let starting = self.homes.start_warden(stay);
                later(ctx, async move { Happened(starting.await) });
            }
            Output::CloseWarden(stay) => {
                let closing = self.homes.close_warden(stay);
                later(ctx, async move { Happened(closing.await) });
            }
            Output::OpenOutput { job, owner, stdin } => {
                self.context.outputs.open_streamed(job, owner, stdin);
            }
            Output::EndOutput(job) => self.homes.end_output(job),
            Output::Open(opening) => {
                calls.open(&opening.start);
                self.homes.open(opening);
            }
            Output::Spawn(spawning) => self.homes.spawn(spawning, ctx.address().recipient()),
            Output::Tell(worker, message) => {
                return Vec::from_iter(self.homes.tell(worker, message));
            }
            Output::Link(link) => return self.homes.link(link),
            Output::Sign(worker, csr) => {
                let signing = head.sign(worker.stay.job, worker.slot, csr);
                let signed = async move {
                    let signed = signing.await;
                    Happened(Input::Signed { worker, signed })
                };
                later(ctx, signed);
            }
            Output::Signal(worker, signal) => {
                actix::spawn(self.homes.signal(worker, signal));
            }
            Output::HangUp { pids } => hang_up(pids),
            Output::Complete(table) => {
                self.homes.complete(&table);
                calls.complete(&table);
            }
            Output::Lost(loss) => calls.lost(&loss),
            Output::CloseCalls(job) => calls.close(job),
            Output::Send { session, events } => {
                tracing::debug!(session, ?events, "for the head");
                let sending = head.send(events);
                let sent = async move {
                    let delivery = sending.await;
                    Happened(Input::Delivered { session, delivery })
                };
                later(ctx, sent);
            }
            Output::Leave { reason } => head.leave(reason),
            Output::Agent { job, metrics, log } => {
                let _job = tracing::info_span!("agent", %job).entered();
                for metric in &metrics {
                    TracingMetrics.put_metric(METRICS_GROUP, metric);
                }
                head.put_metrics(&metrics);
                for line in log {
                    TracingMetrics.log(&line);
                }
            }
            Output::Warn(text) => tracing::warn!("{text}"),
        }
        Vec::new()
    }
}

/// Ends Horovod's connections in processes and in what is below them. A process that the kernel holds up may hold up who looks at it: so a
/// thread looks, and ends nothing any more when it is not waited for.
fn hang_up(pids: Vec<u32>) {
    let limit = Arc::new(Mutex::new(false));
    let (tell, hear) = mpsc::channel();
    let is_late = Arc::clone(&limit);
    let look = move || {
        let ended = kolo_process::end_connections(&pids, GLOO_TIMEOUT, &is_late);
        // Nobody hears of it after the limit.
        let _ = tell.send(ended);
    };
    let spawned = std::thread::Builder::new()
        .name("kolo-hang-up".to_owned())
        .spawn(look);
    let ended = spawned.and_then(|_| {
        hear.recv_timeout(HANG_UP).unwrap_or_else(|_| {
            *limit.lock().unwrap_or_else(PoisonError::into_inner) = true;
            Err(io::ErrorKind::TimedOut.into())
        })
    });
    match ended {
        Ok(ended) => tracing::debug!(ended, "ended connections of Horovod"),
        Err(error) => tracing::warn!(
            %error,
            "can't end connections of Horovod, so its workers may notice a loss by {GLOO_TIMEOUT} alone"
        ),
    }
}

impl Actor for NodeColocator {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(MAILBOX);
    }
}

impl Handler<Ask> for NodeColocator {
    type Result = ResponseFuture<NodeReply>;

    fn handle(&mut self, message: Ask, ctx: &mut Self::Context) -> Self::Result {
        let (ask, answer) = self.asks.ask();
        let input = match message {
            Ask::Order(request) => Input::Order { ask, request },
            Ask::StopAll { reason } => Input::StopAll { ask, reason },
            Ask::Drain => Input::Drain { ask },
            Ask::Flush => Input::Flush { ask },
        };
        self.step(input, ctx);
        Box::pin(async {
            answer.await.unwrap_or_else(|_| {
                let refusal = Refusal::new(RefusalKind::Stopped, "this node is stopping");
                NodeReply::Refused(refusal)
            })
        })
    }
}

impl Handler<Happened> for NodeColocator {
    type Result = ();

    fn handle(&mut self, Happened(input): Happened, ctx: &mut Self::Context) {
        self.step(input, ctx);
    }
}

impl Handler<Snapshot> for NodeColocator {
    type Result = MessageResult<Snapshot>;

    fn handle(&mut self, _: Snapshot, _: &mut Self::Context) -> Self::Result {
        MessageResult(NodeSnapshot {
            jobs: self.core.jobs().collect(),
            total: self.core.total().clone(),
            free: self.core.free().clone(),
            leaving: self.core.is_leaving(),
        })
    }
}
