//! Waiting until jobs have ended, so that a node or the head can leave without breaking any.

use actix::{Context, Handler, ResponseFuture};
use kolo_core::head::registry::Session;
use kolo_transport::ids::NodeId;
use kolo_transport::wire::Refusal;
use tokio::sync::oneshot;

use super::actor::HeadActor;
use super::messages::{Drain, DrainNode};

/// Who waits. Each has a deadline of its own and goes away by dropping its end.
#[derive(Debug, Default)]
pub(super) struct Drains {
    nodes: Vec<(NodeId, Session, oneshot::Sender<()>)>,
    head: Vec<oneshot::Sender<()>>,
}

impl HeadActor {
    /// Tells those whose wait is over.
    pub(super) fn settle_drains(&mut self) {
        let mut drains = std::mem::take(&mut self.drains);
        drains.nodes.retain_mut(|(node, session, waiter)| {
            !waiter.is_closed()
                && !self.registry.is_idle(*node)
                && self.is_current(*node, *session).is_ok()
        });
        drains.head.retain_mut(|waiter| !waiter.is_closed());
        if self.jobs.is_empty() {
            drains.head.clear();
        }
        self.drains = drains;
    }
}

/// Nothing is ever sent: who waits is told by the drop.
async fn over(waiter: oneshot::Receiver<()>) {
    waiter.await.ok();
}

impl Handler<DrainNode> for HeadActor {
    type Result = ResponseFuture<Result<(), Refusal>>;

    fn handle(&mut self, message: DrainNode, _: &mut Context<Self>) -> Self::Result {
        let DrainNode { node, session } = message;
        if let Err(refusal) = self.is_current(node, session) {
            return Box::pin(async { Err(refusal) });
        }
        self.registry.drain(node, session);
        tracing::info!(%node, "a node takes no more jobs");
        let (sender, waiter) = oneshot::channel();
        self.drains.nodes.push((node, session, sender));
        self.settle_drains();
        Box::pin(async {
            over(waiter).await;
            Ok(())
        })
    }
}

impl Handler<Drain> for HeadActor {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, Drain { reason }: Drain, _: &mut Context<Self>) -> Self::Result {
        self.stopping = Some(reason);
        let (sender, waiter) = oneshot::channel();
        self.drains.head.push(sender);
        self.settle_drains();
        Box::pin(over(waiter))
    }
}
