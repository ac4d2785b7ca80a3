//! The messages that the node's actor takes.

use std::collections::BTreeMap;

use actix::prelude::*;
use kolo_core::node::messages::{AskId, Input};
use kolo_transport::ids::JobId;
use kolo_transport::wire::{NodeReply, NodeRequest, Refusal, RefusalKind, Resources};
use tokio::sync::oneshot;

use super::colocator::NodeColocator;

/// A question to the node.
#[derive(Debug, Message)]
#[rtype(result = "NodeReply")]
pub enum Ask {
    /// A request that concerns a job: see [`Input::Order`].
    Order(Box<NodeRequest>),
    /// End all jobs and take no more. Answered when nothing of them is left.
    StopAll {
        /// Why, for the log and the workers.
        reason: String,
    },
    /// Say at each registration that the node is to stop. Answered when no worker is here, nor about to be started.
    Drain,
    /// Answered when the head has acknowledged all events up to now.
    Flush,
}

/// The questions that are not answered yet.
#[derive(Debug, Default)]
pub(super) struct Asks {
    count: u64,
    open: BTreeMap<AskId, oneshot::Sender<NodeReply>>,
}

impl Asks {
    fn ask(&mut self) -> (AskId, oneshot::Receiver<NodeReply>) {
        self.count += 1;
        let (sender, receiver) = oneshot::channel();
        self.open.insert(AskId(self.count), sender);
        (AskId(self.count), receiver)
    }

    pub(super) fn answer(&mut self, ask: AskId, reply: NodeReply) {
        if let Some(sender) = self.open.remove(&ask)
            && sender.send(reply).is_err()
        {
            tracing::debug!(?ask, "nobody waits for an answer any more");
        }
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

/// Something has happened: see [`Input`].
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Happened(pub Input);

impl Handler<Happened> for NodeColocator {
    type Result = ();

    fn handle(&mut self, Happened(input): Happened, ctx: &mut Self::Context) {
        self.step(input, ctx);
    }
}

/// The jobs and resources of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSnapshot {
    /// The jobs that hold something.
    pub jobs: Vec<JobId>,
    /// What the node has in all.
    pub total: Resources,
    /// What is free.
    pub free: Resources,
    /// Whether the node stops, or is to stop when its jobs have ended.
    pub leaving: bool,
}

/// Asks for the jobs and resources of a node.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "NodeSnapshot")]
pub struct Snapshot;

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
