//! The actor that holds one job's part on this node: its reservation, its warden, its workers.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use kolo_core::node::colocator::{Action, Colocator, SlotState, WorkerEvent};
use kolo_core::node::environment::{self, Place};
use kolo_process::{Signal, Warden};
use kolo_transport::AwakeClock;
use kolo_transport::ids::{Generation, JobId, Rank, Slot};
use kolo_transport::wire::{
    GenerationTable, NodeEvent, RankFailure, Refusal, RefusalKind, StartWorkers, ToWorker,
    WorkerSignal,
};
use tokio::sync::{oneshot, watch};

use super::node_actor::{Gone, NodeActor, NodeContext};
use super::output::Output;
use super::ports::{ControlError, ControlSender};
use super::worker_actor::{Launch, SignalWorker, Stopping, WardenState, Worker, WorkerPlan};

/// Messages that may wait for a colocator. Senders wait when it is full.
const MAILBOX: usize = 256;

/// How long a job's output waits for its driver after the job's end.
const UNCLAIMED: Duration = Duration::from_secs(30);

struct Member {
    actor: Addr<Worker>,
    control: ControlSender,
    stopping: Arc<watch::Sender<Stopping>>,
}

/// What a start needs beside the head's request.
struct Means {
    program: Launch,
    devices: Vec<String>,
    output: Arc<Output>,
}

type StartReply = oneshot::Sender<Result<Vec<(Slot, u32)>, Refusal>>;

/// Holds one job's part on this node. Translates messages to events of [`Colocator`] and its actions to
/// messages.
pub(super) struct NodeColocator {
    context: Arc<NodeContext>,
    clock: AwakeClock,
    node: Addr<NodeActor>,
    job: JobId,
    incarnation: u64,
    core: Colocator,
    warden: watch::Sender<WardenState>,
    means: Option<Means>,
    members: BTreeMap<Slot, Member>,
    start_reply: Option<StartReply>,
    waiting_for_end: Vec<oneshot::Sender<()>>,
    timer: Option<SpawnHandle>,
}

impl NodeColocator {
    pub(super) fn new(
        (context, clock): (Arc<NodeContext>, AwakeClock),
        node: Addr<NodeActor>,
        job: JobId,
        incarnation: u64,
    ) -> Self {
        Self {
            core: Colocator::new(context.here.clone(), job),
            context,
            clock,
            node,
            job,
            incarnation,
            warden: watch::Sender::new(None),
            means: None,
            members: BTreeMap::new(),
            start_reply: None,
            waiting_for_end: Vec::new(),
            timer: None,
        }
    }

    fn perform(&mut self, actions: Vec<Action>, ctx: &mut Context<Self>) {
        for action in actions {
            self.act(action, ctx);
        }
        if let Some(timer) = self.timer.take() {
            ctx.cancel_future(timer);
        }
        if let Some(deadline) = self.core.next_deadline() {
            let wait = self.clock.until(deadline);
            self.timer = Some(ctx.run_later(wait, |actor, ctx| {
                actor.timer = None;
                let actions = actor.core.tick(actor.clock.now());
                actor.perform(actions, ctx);
            }));
        }
    }

    fn act(&mut self, action: Action, ctx: &mut Context<Self>) {
        match action {
            Action::Spawn(slot) => self.spawn(slot, ctx),
            Action::Started(pids) => {
                if let Some(reply) = self.start_reply.take()
                    && reply.send(Ok(pids)).is_err()
                {
                    tracing::debug!(job = %self.job, "nobody waits for the answer to a start");
                }
            }
            Action::Report(event) => self.context.head.report(event),
            Action::Tell(slot, message) => self.tell(slot, message, ctx),
            Action::Link {
                first,
                second,
                generation,
            } => self.link(first, second, generation, ctx),
            Action::Sign(slot, csr) => self.sign(slot, csr, ctx),
            Action::Interrupt(slot) => self.signal(slot, Signal::Interrupt, ctx),
            Action::Signal(slot, signal) => {
                let signal = match signal {
                    WorkerSignal::User1 => Signal::User1,
                    WorkerSignal::User2 => Signal::User2,
                    WorkerSignal::Stop => Signal::Stop,
                    WorkerSignal::Continue => Signal::Continue,
                };
                self.signal(slot, signal, ctx);
            }
            Action::Terminate(slot) => self.signal(slot, Signal::Terminate, ctx),
            Action::Kill(slot) => self.signal(slot, Signal::Kill, ctx),
            Action::Lost {
                generation,
                failure,
                stopping,
            } => {
                tracing::info!(job = %self.job, %generation, stopping, %failure, "a rank is gone");
                self.context
                    .calls
                    .lost(self.job, generation, &failure, stopping);
            }
            Action::Complete(table) => self.context.calls.complete(&table),
            Action::Close => self.close(ctx),
            Action::Gone { report } => self.gone(report, ctx),
        }
    }

    fn gone(&mut self, report: bool, ctx: &mut Context<Self>) {
        // What it held is free before anyone learns that it is gone.
        let freed = self
            .node
            .send(Gone {
                job: self.job,
                incarnation: self.incarnation,
            })
            .into_actor(self);
        ctx.wait(freed.map(move |_, actor, ctx| {
            if report {
                actor
                    .context
                    .head
                    .report(NodeEvent::JobGone { job: actor.job });
            }
            for waiting in actor.waiting_for_end.drain(..) {
                if waiting.send(()).is_err() {
                    tracing::debug!(job = %actor.job, "nobody waits for its end any more");
                }
            }
            ctx.stop();
        }));
    }

    fn spawn(&mut self, slot: Slot, ctx: &mut Context<Self>) {
        let (Some(means), Some(start)) = (&self.means, self.core.started()) else {
            return;
        };
        let Some(slot_start) = start.slots.iter().find(|other| other.member.slot == slot) else {
            return;
        };
        let (control, messages) = ControlSender::channel();
        let stopping = Arc::new(watch::Sender::new(Stopping::No));
        let place = Place {
            cluster: self.context.here.cluster,
            ip: self.context.ip,
            devices: (self.context.hides_gpus || !means.devices.is_empty())
                .then_some(&means.devices),
        };
        let plan = WorkerPlan {
            job: self.job,
            slot,
            rank: slot_start.member.rank,
            generation: start.generation,
            program: means.program.clone(),
            argv0: match &start.installed {
                Some(installed) => installed.program.clone(),
                None => start.program.name.clone(),
            },
            args: start.args.clone(),
            env: environment::worker(std::env::vars_os(), start, slot_start, place),
            control: control.clone(),
            messages,
            warden: self.warden.subscribe(),
            output: means.output.clone(),
            linger: self.core.grace(),
            stopping: stopping.clone(),
        };
        let actor = Worker::new(self.context.clone(), ctx.address(), plan).start();
        let member = Member {
            actor,
            control,
            stopping,
        };
        self.members.insert(slot, member);
    }

    fn tell(&mut self, slot: Slot, message: ToWorker, ctx: &mut Context<Self>) {
        let Some(member) = self.members.get(&slot) else {
            return;
        };
        if matches!(message, ToWorker::Stop { .. }) {
            // Before it can obey.
            member.stopping.send_if_modified(|stopping| {
                let first = *stopping == Stopping::No;
                *stopping = (*stopping).max(Stopping::Told);
                first
            });
        }
        // It is asked again, and a worker that stands still is not to end because others wait for it.
        let may_be_lost = matches!(message, ToWorker::LinkRequested { .. });
        match member.control.try_send(message) {
            // It is gone, which its supervisor tells.
            Ok(()) | Err(ControlError::Closed) => {}
            Err(ControlError::Full) if may_be_lost => {}
            Err(error) => self.fault(slot, error, ctx),
        }
    }

    fn fault(&mut self, slot: Slot, error: ControlError, ctx: &mut Context<Self>) {
        let event = WorkerEvent::Fault {
            reason: error.to_string(),
        };
        let actions = self.core.worker(self.clock.now(), slot, event);
        self.perform(actions, ctx);
    }

    fn link(
        &mut self,
        first: (Slot, Rank),
        second: (Slot, Rank),
        generation: Generation,
        ctx: &mut Context<Self>,
    ) {
        let (one, other) = match UnixStream::pair() {
            Ok(pair) => pair,
            Err(error) => {
                // Both wait for it, each with a deadline of its own.
                tracing::error!(job = %self.job, %error, "no sockets for two workers");
                return;
            }
        };
        for ((slot, _), (_, peer), socket) in [(first, second, one), (second, first, other)] {
            let Some(member) = self.members.get(&slot) else {
                continue;
            };
            let message = ToWorker::Peer {
                rank: peer,
                generation,
            };
            match member.control.try_send_with(message, vec![socket.into()]) {
                Ok(()) | Err(ControlError::Closed) => {}
                Err(error) => self.fault(slot, error, ctx),
            }
        }
    }

    fn sign(&mut self, slot: Slot, csr: Vec<u8>, ctx: &mut Context<Self>) {
        let signed = self.context.head.sign(self.job, slot, csr);
        ctx.spawn(
            signed
                .into_actor(self)
                .map(move |signed, actor, ctx| match signed {
                    Ok(certificate) => {
                        let message = ToWorker::Certificate {
                            certificate,
                            authority: actor.context.authority.clone(),
                        };
                        actor.tell(slot, message, ctx);
                    }
                    // It has one that is good for a while, and asks again.
                    Err(refusal) if actor.core.slot(slot) == Some(SlotState::Ready) => {
                        tracing::warn!(job = %actor.job, %slot, %refusal, "a worker's certificate was not renewed");
                    }
                    Err(refusal) => {
                        let event = WorkerEvent::Fault {
                            reason: format!("the head gave it no certificate: {refusal}"),
                        };
                        let actions = actor.core.worker(actor.clock.now(), slot, event);
                        actor.perform(actions, ctx);
                    }
                }),
        );
    }

    fn signal(&mut self, slot: Slot, signal: Signal, ctx: &mut Context<Self>) {
        let Some(member) = self.members.get(&slot) else {
            return;
        };
        let sent = member.actor.send(SignalWorker(signal)).into_actor(self);
        ctx.spawn(sent.map(move |sent, _, _| {
            if let Err(error) = sent {
                // The worker's actor ends when its process has.
                tracing::debug!(%slot, %error, "a worker had ended before its signal");
            }
        }));
    }

    /// No worker begins to write any more.
    fn end_output(&self) {
        self.context.outputs.end(self.job);
        // A driver that does not come for it can't be waited for.
        if let Some(output) = self.context.outputs.get(self.job)
            && output.stream().is_some()
        {
            self.context.runtime.spawn(async move {
                tokio::time::sleep(UNCLAIMED).await;
                output.abandon();
            });
        }
    }

    fn close(&mut self, ctx: &mut Context<Self>) {
        self.context.calls.close(self.job);
        let mut warden = self.warden.subscribe();
        let state = self.warden.clone();
        let job = self.job;
        let closed = async move {
            // It may still be starting.
            if warden.wait_for(Option::is_some).await.is_err() {
                return;
            }
            // Those that start workers give up on an empty state, so that this is the last clone soon.
            let over = Some(Err("the job is over".to_owned()));
            if let Some(Ok(warden)) = state.send_replace(over) {
                close_warden(warden).await;
            }
            tracing::debug!(%job, "nothing of the job is left");
        };
        ctx.spawn(closed.into_actor(self).map(|(), actor, ctx| {
            actor.end_output();
            let actions = actor.core.closed();
            actor.perform(actions, ctx);
        }));
    }
}

impl Actor for NodeColocator {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(MAILBOX);
        // At once, so that it is there when the job starts.
        let state = self.warden.clone();
        let exe = self.context.warden_exe.clone();
        let owner = self.context.here.node.to_string();
        let job = self.job;
        self.context.runtime.spawn(async move {
            let warden = Warden::start(&exe, &owner).await;
            if let Err(error) = &warden {
                tracing::error!(%job, %error, "a job has no warden");
            }
            state.send_replace(Some(
                warden.map(Arc::new).map_err(|error| error.to_string()),
            ));
        });
    }
}

/// Start the workers.
#[derive(Message)]
#[rtype(result = "Result<oneshot::Receiver<Result<Vec<(Slot, u32)>, Refusal>>, Refusal>")]
pub(super) struct StartJob {
    pub(super) start: StartWorkers,
    pub(super) program: Launch,
    pub(super) devices: Vec<String>,
}

impl Handler<StartJob> for NodeColocator {
    type Result = Result<oneshot::Receiver<Result<Vec<(Slot, u32)>, Refusal>>, Refusal>;

    fn handle(&mut self, message: StartJob, ctx: &mut Self::Context) -> Self::Result {
        let actions = self.core.start(message.start)?;
        if let Some(start) = self.core.started() {
            self.context.calls.open(start);
        }
        self.means = Some(Means {
            program: message.program,
            devices: message.devices,
            output: self.context.outputs.open(self.job),
        });
        let (reply, answer) = oneshot::channel();
        self.start_reply = Some(reply);
        self.perform(actions, ctx);
        Ok(answer)
    }
}

/// A generation is complete.
#[derive(Message)]
#[rtype(result = "Result<(), Refusal>")]
pub(super) struct JobMembership(pub(super) GenerationTable);

impl Handler<JobMembership> for NodeColocator {
    type Result = Result<(), Refusal>;

    fn handle(
        &mut self,
        JobMembership(table): JobMembership,
        ctx: &mut Self::Context,
    ) -> Self::Result {
        let actions = self.core.membership(table)?;
        self.perform(actions, ctx);
        Ok(())
    }
}

/// A rank is gone.
#[derive(Message)]
#[rtype(result = "Result<(), Refusal>")]
pub(super) struct JobRankLost {
    pub(super) generation: Generation,
    pub(super) failure: RankFailure,
}

impl Handler<JobRankLost> for NodeColocator {
    type Result = Result<(), Refusal>;

    fn handle(&mut self, message: JobRankLost, ctx: &mut Self::Context) -> Self::Result {
        let actions = self.core.rank_lost(message.generation, message.failure)?;
        self.perform(actions, ctx);
        Ok(())
    }
}

/// A signal for the job's workers.
#[derive(Message)]
#[rtype(result = "Result<(), Refusal>")]
pub(super) struct SignalJob {
    pub(super) seq: u64,
    pub(super) signal: WorkerSignal,
}

impl Handler<SignalJob> for NodeColocator {
    type Result = Result<(), Refusal>;

    fn handle(&mut self, message: SignalJob, ctx: &mut Self::Context) -> Self::Result {
        let actions = self.core.signal(message.seq, message.signal)?;
        self.perform(actions, ctx);
        Ok(())
    }
}

/// End the job; the receiver is answered when nothing is left.
#[derive(Message)]
#[rtype(result = "oneshot::Receiver<()>")]
pub(super) struct StopJob {
    pub(super) reason: String,
    /// By INT first.
    pub(super) interrupt: bool,
}

impl Handler<StopJob> for NodeColocator {
    type Result = MessageResult<StopJob>;

    fn handle(&mut self, message: StopJob, ctx: &mut Self::Context) -> Self::Result {
        let StopJob { reason, interrupt } = message;
        let (sender, receiver) = oneshot::channel();
        // If it is gone already, the sender is dropped, which says the same.
        if !self.core.is_gone() {
            self.waiting_for_end.push(sender);
        }
        let actions = if interrupt {
            self.core.interrupt(self.clock.now(), &reason)
        } else {
            self.core.stop(self.clock.now(), &reason)
        };
        if let Some(reply) = self.start_reply.take() {
            let refusal = Refusal::new(
                RefusalKind::Stopped,
                format!("{} was stopped while it started: {reason}", self.job),
            );
            if reply.send(Err(refusal)).is_err() {
                tracing::debug!(job = %self.job, "nobody waits for the answer to a start");
            }
        }
        self.perform(actions, ctx);
        MessageResult(receiver)
    }
}

/// Kill the job's workers; the receiver is answered when nothing is left.
#[derive(Message)]
#[rtype(result = "oneshot::Receiver<()>")]
pub(super) struct KillJob;

impl Handler<KillJob> for NodeColocator {
    type Result = MessageResult<KillJob>;

    fn handle(&mut self, _: KillJob, ctx: &mut Self::Context) -> Self::Result {
        let (sender, receiver) = oneshot::channel();
        if !self.core.is_gone() {
            self.waiting_for_end.push(sender);
        }
        let actions = self.core.kill_all(self.clock.now(), "it was killed");
        self.perform(actions, ctx);
        MessageResult(receiver)
    }
}

/// The reservation's lease has ended.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct LeaseEnded;

impl Handler<LeaseEnded> for NodeColocator {
    type Result = ();

    fn handle(&mut self, _: LeaseEnded, ctx: &mut Self::Context) {
        let actions = self.core.expire();
        self.perform(actions, ctx);
    }
}

/// Something happened to a worker.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct FromSlot {
    pub(super) slot: Slot,
    pub(super) event: WorkerEvent,
}

impl Handler<FromSlot> for NodeColocator {
    type Result = ();

    fn handle(&mut self, FromSlot { slot, event }: FromSlot, ctx: &mut Self::Context) {
        let actions = self.core.worker(self.clock.now(), slot, event);
        self.perform(actions, ctx);
    }
}

/// Ends a warden whose workers have ended, with whatever else is left of them.
async fn close_warden(warden: Arc<Warden>) {
    match Arc::try_unwrap(warden) {
        Ok(warden) => warden.close().await,
        // A start that is just ending holds it; the last one to drop it ends it.
        Err(warden) => drop(warden),
    }
}
