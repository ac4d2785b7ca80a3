//! Ends the workers of jobs while the head is away: those that nobody is there for, and those of elastic jobs.

use std::sync::Arc;
use std::time::Duration;

use actix::Addr;
use kolo_actors::node::{Ask, NodeColocator};
use kolo_core::fence;
use kolo_core::node::orphans::{Cause, Head, Orphans};
use kolo_transport::AwakeClock;
use kolo_transport::ids::JobId;
use kolo_transport::wire::NodeRequest;

use super::calls::Calls;
use super::uplink::Uplink;

/// Watches until it is dropped. While this process stands still nobody counts as gone: they may come back just then.
pub(super) async fn watch(
    (timeout, clock): (Duration, AwakeClock),
    uplink: Arc<Uplink>,
    calls: Arc<Calls>,
    node: Addr<NodeColocator>,
) {
    let mut orphans = Orphans::new(timeout);
    let mut connection = uplink.connection();
    let mut drivers = calls.changes();
    loop {
        // Looked at before it is asked for, so that no change is missed.
        drivers.mark_unchanged();
        let head = Head {
            is_there: connection.borrow_and_update().is_some(),
            lease: uplink.lease(),
        };
        for (job, cause) in orphans.step(clock.now(), head, calls.present_jobs()) {
            tokio::spawn(end(node.clone(), job, cause));
        }
        let deadline = orphans.next_deadline();
        let over = async {
            match deadline {
                Some(deadline) => clock.sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // One that has come back counts before the time.
            biased;
            changed = connection.changed() => if changed.is_err() { return },
            changed = drivers.changed() => if changed.is_err() { return },
            () = over => {}
        }
    }
}

/// Ends the workers of a job. The head counts on the end of those of an elastic job.
async fn end(node: Addr<NodeColocator>, job: JobId, cause: Cause) {
    let (reason, limit) = match cause {
        Cause::Alone(time) => (
            format!("its driver and the head have both been gone for {time:?}"),
            None,
        ),
        Cause::CutOff(time) => (
            format!(
                "this node has been cut off from the head for {time:?}, and the job goes on without the node"
            ),
            Some(fence::NOTICE),
        ),
    };
    tracing::warn!(%job, reason, "a job is ended");
    let stop = NodeRequest::Stop {
        job,
        reason,
        interrupt: false,
    };
    let stopped = node.send(Ask::Order(Box::new(stop)));
    let stopped = async { stopped.await.is_ok() };
    let in_time = match limit {
        None => Some(stopped.await),
        Some(limit) => tokio::time::timeout(limit, stopped).await.ok(),
    };
    let is_there = if let Some(is_there) = in_time {
        is_there
    } else {
        let kill = Ask::Order(Box::new(NodeRequest::Kill { job }));
        node.send(kill).await.is_ok()
    };
    if !is_there {
        tracing::debug!(%job, "the node is stopping, and the job with it");
    }
}
