//! The actor of a node, around [`NodeCore`].

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;

use actix::prelude::*;
use kolo_core::node::NodeCore;
use kolo_core::node::messages::{Input, Output};
use kolo_transport::awake::{AwakeClock, TICK};
use tokio::runtime::Handle;

use super::asks::Asks;
use super::homes::Homes;
use super::ports::NodeContext;

/// Messages that may wait for the node's actor. Senders wait when it is full.
const MAILBOX: usize = 256;

/// A node: holds resources for jobs and runs their workers. Whatever happens goes into its [`NodeCore`]; whatever comes out
/// is done here.
pub struct NodeColocator {
    context: Arc<NodeContext>,
    clock: AwakeClock,
    pub(super) core: NodeCore,
    pub(super) asks: Asks,
    homes: Homes,
    timer: Option<SpawnHandle>,
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
            timer: None,
        }
    }

    pub(super) fn step(&mut self, input: Input, ctx: &mut Context<Self>) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            for output in self.core.step(self.clock.now(), input) {
                inputs.extend(self.perform(output, ctx));
            }
        }
        if let Some(timer) = self.timer.take() {
            ctx.cancel_future(timer);
        }
        if let Some(deadline) = self.core.deadline() {
            let wait = self.clock.until(deadline);
            self.timer = Some(ctx.run_later(wait, |actor, ctx| {
                actor.timer = None;
                actor.step(Input::Tick, ctx);
            }));
        }
    }

    /// Does something that takes a while, and steps with its result.
    fn later(&self, work: impl Future<Output = Input> + 'static, ctx: &mut Context<Self>) {
        let done = |input, actor: &mut Self, ctx: &mut Context<Self>| actor.step(input, ctx);
        ctx.spawn(work.into_actor(self).map(done));
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
                self.later(self.homes.find(ask, program, port), ctx);
            }
            Output::StartWarden(stay) => {
                let starting = self.homes.start_warden(stay);
                self.later(starting, ctx);
            }
            Output::CloseWarden(stay) => {
                let closing = self.homes.close_warden(stay);
                self.later(closing, ctx);
            }
            Output::OpenOutput { job, owner, stdin } => {
                self.context.outputs.open_streamed(job, owner, stdin);
            }
            Output::EndOutput(job) => self.homes.end_output(job),
            Output::Open(opening) => {
                calls.open(&opening.start);
                self.homes.open(opening);
            }
            Output::Spawn(spawning) => self.homes.spawn(spawning, ctx.address()),
            Output::Tell(worker, message) => {
                return Vec::from_iter(self.homes.tell(worker, message));
            }
            Output::Link(link) => return self.homes.link(link),
            Output::Sign(worker, csr) => {
                let signing = head.sign(worker.stay.job, worker.slot, csr);
                let signed = async move {
                    let signed = signing.await;
                    Input::Signed { worker, signed }
                };
                self.later(signed, ctx);
            }
            Output::Signal(worker, signal) => {
                ctx.spawn(self.homes.signal(worker, signal).into_actor(self));
            }
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
                    Input::Delivered { session, delivery }
                };
                self.later(sent, ctx);
            }
            Output::Leave { reason } => head.leave(reason),
            Output::Warn(text) => tracing::warn!("{text}"),
        }
        Vec::new()
    }
}

impl Actor for NodeColocator {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(MAILBOX);
    }
}
