//! The head as the HTTP API sees it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kolo_core::head::messages::Caller;
use kolo_transport::identity::Identity;
use kolo_transport::ids::JobId;
use kolo_transport::wire::{
    ClusterInfo, HeadReply, HeadRequest, JobInfo, MetricSum, NodeDrain, Refusal, RefusalKind,
};

use super::shared::Shared;
use crate::http::{BoxFuture, HeadApi};

/// Answers the HTTP API.
pub(super) struct Api {
    shared: Arc<Shared>,
}

impl Api {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// Asks, and takes from the answer what `expect` finds in it.
    fn ask<'a, T: 'a>(
        &'a self,
        request: HeadRequest,
        expect: impl Fn(HeadReply) -> Option<T> + Send + 'a,
    ) -> BoxFuture<'a, Result<T, Refusal>> {
        Box::pin(async move {
            match self.shared.ask(Caller::Http, request).await {
                HeadReply::Refused(refusal) => Err(refusal),
                reply => expect(reply).ok_or_else(|| {
                    Refusal::new(RefusalKind::Internal, "the head gave another answer")
                }),
            }
        })
    }
}

impl HeadApi for Api {
    fn ready(&self) -> bool {
        self.shared.ready.load(Ordering::Acquire) && self.shared.actor.connected()
    }

    fn is_revoked(&self, member: &Identity) -> bool {
        self.shared.trust.is_revoked(member)
    }

    fn is_administrator(&self, member: &Identity) -> bool {
        self.shared.trust.administrator(member).is_ok()
    }

    fn cluster(&self) -> BoxFuture<'_, Result<ClusterInfo, Refusal>> {
        self.ask(HeadRequest::Cluster, |reply| match reply {
            HeadReply::Cluster(cluster) => Some(cluster),
            _ => None,
        })
    }

    fn jobs(&self) -> BoxFuture<'_, Result<Vec<JobInfo>, Refusal>> {
        self.ask(HeadRequest::Jobs, |reply| match reply {
            HeadReply::Jobs(jobs) => Some(jobs),
            _ => None,
        })
    }

    fn job(&self, job: JobId) -> BoxFuture<'_, Result<JobInfo, Refusal>> {
        self.ask(HeadRequest::Job { job }, |reply| match reply {
            HeadReply::Job(info) => Some(info),
            _ => None,
        })
    }

    fn stop(&self, job: JobId) -> BoxFuture<'_, Result<(), Refusal>> {
        self.ask(HeadRequest::Stop { job }, |_| Some(()))
    }

    fn drain(&self, node: String, deadline: Duration) -> BoxFuture<'_, Result<NodeDrain, Refusal>> {
        let deadline_ms = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
        let request = HeadRequest::DrainNode { node, deadline_ms };
        self.ask(request, |reply| match reply {
            HeadReply::Draining(drain) => Some(drain),
            _ => None,
        })
    }

    fn metrics(&self) -> Vec<MetricSum> {
        self.shared.metrics().clone().take()
    }

    fn undrain(&self, node: String) -> BoxFuture<'_, Result<(), Refusal>> {
        self.ask(HeadRequest::UndrainNode { node }, |_| Some(()))
    }
}
