//! Ends jobs whose driver and head have both been gone for too long.

use std::sync::Arc;
use std::time::Duration;

use actix::Addr;
use kolo_actors::node::{Ask, NodeColocator};
use kolo_core::node::orphans::Orphans;
use kolo_transport::AwakeClock;
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
    let mut head = uplink.connection();
    let mut drivers = calls.changes();
    loop {
        // Looked at before it is asked for, so that no change is missed.
        drivers.mark_unchanged();
        let head_is_there = head.borrow_and_update().is_some();
        for job in orphans.step(clock.now(), head_is_there, calls.drivers()) {
            let reason = format!("its driver and the head have both been gone for {timeout:?}");
            tracing::warn!(%job, reason, "a job is ended");
            let stop = node.send(Ask::Order(Box::new(NodeRequest::Stop {
                job,
                reason,
                interrupt: false,
            })));
            tokio::spawn(async move {
                if stop.await.is_err() {
                    tracing::debug!(%job, "the node is stopping, and the job with it");
                }
            });
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
            changed = head.changed() => if changed.is_err() { return },
            changed = drivers.changed() => if changed.is_err() { return },
            () = over => {}
        }
    }
}
