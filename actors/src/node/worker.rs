//! The actor that supervises one worker process.

use std::sync::Arc;

use actix::prelude::*;
use kolo_core::node::messages::WorkerId;
use kolo_process::{Child, Signal, SignalError};
use tokio::sync::watch;

use super::asks::Happened;
use super::launch::Launch;
use super::leftovers::Stopping;
use super::ports::NodeContext;
use super::supervisor::{Running, Supervisor, WorkerPlan};
use super::warden::JobWarden;

/// Supervises one worker process: starts it, watches it, tells its colocator, signals it.
pub(super) struct Worker {
    context: Arc<NodeContext>,
    node: Recipient<Happened>,
    id: WorkerId,
    plan: Option<(JobWarden, WorkerPlan)>,
    child: Option<Child>,
    stopping: Arc<watch::Sender<Stopping>>,
}

impl Worker {
    pub(super) fn new(
        context: Arc<NodeContext>,
        node: Recipient<Happened>,
        warden: JobWarden,
        plan: WorkerPlan,
    ) -> Self {
        Self {
            context,
            node,
            id: plan.worker,
            stopping: plan.stopping.clone(),
            plan: Some((warden, plan)),
            child: None,
        }
    }
}

impl Actor for Worker {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let Some((warden, plan)) = self.plan.take() else {
            return;
        };
        let supervisor = Supervisor {
            context: self.context.clone(),
            node: self.node.clone(),
            actor: ctx.address().recipient(),
            worker: self.id,
        };
        let life = async move {
            match plan.program.clone() {
                Launch::Sent(program) => supervisor.run_sent(warden, plan, program).await,
                Launch::Installed(file) => supervisor.run_installed(warden, plan, &file).await,
            }
        };
        ctx.spawn(life.into_actor(self).map(|(), _, ctx| {
            ctx.stop();
        }));
    }
}

impl Handler<Running> for Worker {
    type Result = ();

    fn handle(&mut self, Running(child): Running, _: &mut Self::Context) {
        self.child = Some(child);
    }
}

/// Send a signal to the process and to what is below it; what reaches whom is said by [`Child::signal`]. The first that asks
/// it to end begins its stop: what it leaves behind from then on has time until the KILL.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub(super) struct SignalWorker(pub(super) Signal);

impl Handler<SignalWorker> for Worker {
    type Result = ();

    fn handle(&mut self, SignalWorker(signal): SignalWorker, _: &mut Self::Context) {
        let Some(child) = &self.child else { return };
        // Before the signal: a worker that ends of it at once must be seen to have ended in a stop, or what is below it is killed.
        if signal.is_notice() {
            self.stopping.send_replace(Stopping::Signalled);
        }
        match child.signal(signal) {
            Ok(()) | Err(SignalError::Ended { .. }) => {}
            Err(error) => {
                tracing::error!(slot = %self.id.slot, %error, ?signal, "a worker was not signalled");
            }
        }
    }
}
