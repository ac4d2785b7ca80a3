//! The life of one worker process, whatever its program is.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use kolo_core::node::messages::{Input, WorkerEvent, WorkerId};
use kolo_process::{Child, SpawnError};
use kolo_transport::ids::Generation;
use kolo_transport::wire::{Exit, OutputChunk, Stdio};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::asks::Happened;
use super::author::Author;
use super::launch::Launch;
use super::leftovers::Stopping;
use super::pipe;
use super::ports::{ControlReceiver, ControlSender, NodeContext};
use super::stream::OutputStream;

/// Lines of standard error that go with the news of a loss.
pub(super) const STDERR_TAIL: usize = 20;

/// What a worker is made of.
#[derive(Debug)]
pub(super) struct WorkerPlan {
    pub(super) worker: WorkerId,
    pub(super) generation: Generation,
    pub(super) program: Launch,
    pub(super) argv0: String,
    pub(super) args: Vec<String>,
    pub(super) env: Vec<(OsString, OsString)>,
    pub(super) control: ControlSender,
    pub(super) messages: ControlReceiver,
    /// Whose output it is.
    pub(super) author: Arc<Author>,
    /// How long what it has left behind may live on when it has ended well and was not asked to, as long as that holds its
    /// output.
    pub(super) linger: Duration,
    /// Shared with the colocator, which sets it before it tells the worker.
    pub(super) stopping: Arc<watch::Sender<Stopping>>,
}

/// The process runs.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct Running(pub(super) Child);

/// A worker's life, from its start to the last of its output.
pub(super) struct Supervisor {
    pub(super) context: Arc<NodeContext>,
    pub(super) node: Recipient<Happened>,
    pub(super) actor: Recipient<Running>,
    pub(super) worker: WorkerId,
}

/// Why a process was not started, and what it counts as ended with: see
/// [`RankFailure::was_not_started`](kolo_transport::wire::RankFailure::was_not_started).
#[derive(Debug)]
pub(super) struct NotStarted {
    exit: Exit,
    reason: String,
}

impl From<String> for NotStarted {
    fn from(reason: String) -> Self {
        let exit = Exit::Code(1);
        Self { exit, reason }
    }
}

impl From<SpawnError> for NotStarted {
    fn from(error: SpawnError) -> Self {
        let code = match error {
            SpawnError::NotFound { .. } => 127,
            SpawnError::NotExecutable { .. }
            | SpawnError::NotAProgram { .. }
            | SpawnError::Busy { .. }
            | SpawnError::BadDirectory { .. }
            | SpawnError::TooLarge { .. } => 126,
            _ => 1,
        };
        Self {
            exit: Exit::Code(code),
            reason: error.to_string(),
        }
    }
}

impl From<NotStarted> for WorkerEvent {
    fn from(NotStarted { exit, reason }: NotStarted) -> Self {
        Self::SpawnFailed { exit, reason }
    }
}

impl Supervisor {
    pub(super) async fn tell(&self, event: WorkerEvent) {
        let worker = self.worker;
        let happened = Happened(Input::Worker { worker, event });
        // A node that is gone has killed everything and wants to know nothing.
        if self.node.send(happened).await.is_err() {
            tracing::debug!(slot = %worker.slot, "an event of a worker came after the end of the node");
        }
    }

    /// Reads a pipe that the worker writes to, until its end.
    pub(super) fn read(&self, plan: &WorkerPlan, pipe: OwnedFd, stream: Stdio) -> JoinHandle<()> {
        let author = plan.author.clone();
        let head = OutputChunk {
            rank: author.rank(),
            generation: plan.generation,
            stream,
            time_ms: 0,
        };
        let sender = author.output().stream().and_then(OutputStream::sender);
        let reading = pipe::read(pipe, head, author, sender);
        self.context.runtime.spawn(reading)
    }

    /// Makes the process known to its actor, before anyone can want it signalled. False if the actor is gone.
    pub(super) async fn introduce(&self, child: &Child) -> bool {
        self.actor.send(Running(child.clone())).await.is_ok()
    }
}
