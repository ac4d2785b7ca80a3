//! The head as the HTTP API sees it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kolo_actors::head::messages::{GetCluster, GetJob, GetJobs, StopJob};
use kolo_transport::identity::Identity;
use kolo_transport::ids::JobId;
use kolo_transport::wire::{ClusterInfo, JobInfo, Refusal};

use super::serve::{Shared, stopped};
use crate::http::{BoxFuture, HeadApi};

/// Answers the HTTP API.
pub(super) struct Api {
    shared: Arc<Shared>,
}

impl Api {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }
}

impl HeadApi for Api {
    fn ready(&self) -> bool {
        self.shared.ready.load(Ordering::Acquire) && self.shared.actor.connected()
    }

    fn is_revoked(&self, member: &Identity) -> bool {
        self.shared.trust.is_revoked(member)
    }

    fn cluster(&self) -> BoxFuture<'_, Result<ClusterInfo, Refusal>> {
        let asked = self.shared.actor.send(GetCluster);
        Box::pin(async {
            let mut cluster = asked.await.map_err(stopped)?;
            cluster.revoked = self.shared.trust.revoked();
            Ok(cluster)
        })
    }

    fn jobs(&self) -> BoxFuture<'_, Result<Vec<JobInfo>, Refusal>> {
        let asked = self.shared.actor.send(GetJobs);
        Box::pin(async { asked.await.map_err(stopped) })
    }

    fn job(&self, job: JobId) -> BoxFuture<'_, Result<JobInfo, Refusal>> {
        let asked = self.shared.actor.send(GetJob(job));
        Box::pin(async { asked.await.map_err(stopped)? })
    }

    fn stop(&self, job: JobId) -> BoxFuture<'_, Result<(), Refusal>> {
        let reason = "it was asked for over HTTP".to_owned();
        let asked = self.shared.actor.send(StopJob { job, reason });
        Box::pin(async {
            asked.await.map_err(stopped)??.wait().await;
            Ok(())
        })
    }
}
