//! What all connections of a head share.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use actix::Addr;
use kolo_actors::head::{Beats, Coordinator, ask};
use kolo_core::agent::MetricSums;
use kolo_core::head::messages::{Caller, Question};
use kolo_transport::TransportRuntime;
use kolo_transport::wire::{HeadReply, HeadRequest};
use tokio::sync::mpsc;

use super::trust::Trust;

/// How long a peer may take to read its answer.
pub(super) const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// What all connections share.
pub(super) struct Shared {
    pub(super) actor: Addr<Coordinator>,
    pub(super) beats: Beats,
    pub(super) trust: Arc<Trust>,
    pub(super) runtime: TransportRuntime,
    /// Whether jobs are taken.
    pub(super) ready: AtomicBool,
    /// Numbers of connections so far.
    pub(super) sessions: AtomicU64,
    pub(super) lease: Duration,
    /// Its state folder.
    pub(super) state: Option<PathBuf>,
    /// How long a peer may take to send its request after it has opened the stream.
    pub(super) read_timeout: Duration,
    pub(super) farewell: Mutex<Option<mpsc::Sender<()>>>,
    /// What the agents of all nodes have measured since the start of the head.
    pub(super) metrics: Mutex<MetricSums>,
}

impl Shared {
    /// Held by whoever has still something to tell a driver.
    pub(super) fn farewell(&self) -> Option<mpsc::Sender<()>> {
        self.farewell
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// The head's answer, with what its actor does not know.
    pub(super) async fn ask(&self, caller: Caller, request: HeadRequest) -> HeadReply {
        let question = Question::Request(caller, Box::new(request));
        let mut reply = ask(&self.actor, question).await;
        if let HeadReply::Cluster(cluster) = &mut reply {
            cluster.revoked = self.trust.revoked();
            cluster.time_ms = SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)
                .map_or(0, |since| since.as_millis() as u64);
        }
        reply
    }

    pub(super) fn metrics(&self) -> MutexGuard<'_, MetricSums> {
        self.metrics.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on the farewells that are still held are waited for.
    pub(super) fn no_more_farewells(&self) {
        *self.farewell.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
