//! The messages that the node's actor takes.

use std::collections::BTreeMap;

use actix::Message;
use kolo_core::node::messages::{AskId, Input};
use kolo_transport::ids::JobId;
use kolo_transport::wire::{NodeReply, NodeRequest, Resources};
use tokio::sync::oneshot;

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
    pub(super) fn ask(&mut self) -> (AskId, oneshot::Receiver<NodeReply>) {
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

/// Something has happened: see [`Input`].
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Happened(pub Input);

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
