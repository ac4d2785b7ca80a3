//! Jobs that a node should not have any more.

use std::sync::Arc;
use std::time::Duration;

use actix::fut::wrap_future;
use actix::{ActorFutureExt, AsyncContext, Context};
use kolo_core::head::job::Reply;
use kolo_core::head::registry::Session;
use kolo_core::pace::Backoff;
use kolo_transport::ids::{JobId, NodeId};
use kolo_transport::wire::{NodeReply, NodeRequest, RefusalKind};

use super::HeadActor;

/// How long a node may take to stop a job that it should not have any more.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(30);
/// How long to wait before it is asked again; the pauses grow up to the second.
const CLEANUP_PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(15));

impl HeadActor {
    /// Asks a node to stop a job that it should not have any more, until it confirms or its stay is over.
    pub(super) fn clean_up(
        &mut self,
        ctx: &mut Context<Self>,
        node: NodeId,
        session: Session,
        job: JobId,
    ) {
        if self
            .cleaning
            .entry((node, session))
            .or_default()
            .insert(job)
        {
            let (first, most) = CLEANUP_PAUSES;
            self.ask_to_stop(ctx, node, session, job, Backoff::new(first, most));
        }
    }

    fn ask_to_stop(
        &mut self,
        ctx: &mut Context<Self>,
        node: NodeId,
        session: Session,
        job: JobId,
        mut backoff: Backoff,
    ) {
        let Some(link) = self
            .links
            .get(&node)
            .filter(|(current, _)| *current == session)
            .map(|(_, link)| Arc::clone(link))
        else {
            self.cleaning.remove(&(node, session));
            return;
        };
        let request = NodeRequest::Stop {
            job,
            reason: "the head does not count on it any more".to_owned(),
            interrupt: false,
        };
        let asked = link.request(request, CLEANUP_TIMEOUT);
        ctx.spawn(wrap_future::<_, Self>(asked).map(move |reply, this, ctx| {
            if is_confirmed(&reply) {
                if let Some(jobs) = this.cleaning.get_mut(&(node, session)) {
                    jobs.remove(&job);
                    if jobs.is_empty() {
                        this.cleaning.remove(&(node, session));
                    }
                }
                tracing::info!(%node, %job, "a node has stopped a job of before");
                this.registry.free(job, node);
                this.settle_drains();
                return;
            }
            // Once: it goes on until it works or the node is lost, both of which are logged.
            if backoff.failures() == 0 {
                tracing::warn!(%node, %job, ?reply, "a node does not stop a job; it is asked until it does");
            }
            ctx.run_later(backoff.failed(), move |this, ctx| {
                this.ask_to_stop(ctx, node, session, job, backoff);
            });
        }));
    }
}

fn is_confirmed(reply: &Reply) -> bool {
    match reply {
        Reply::Answer(NodeReply::Done) => true,
        Reply::Refused(refusal) => refusal.kind == RefusalKind::NotFound,
        Reply::Answer(_) | Reply::Unknown(_) => false,
    }
}
