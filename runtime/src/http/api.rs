//! What the HTTP API needs of the head.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use kolo_transport::identity::Identity;
use kolo_transport::ids::JobId;
use kolo_transport::wire::{ClusterInfo, JobInfo, MetricSum, NodeDrain, Refusal};

/// A future on the heap, so that [`HeadApi`] can be a trait object.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The head, as the HTTP API sees it.
///
/// Answers are refused with a [`Refusal`], whose kind becomes the status code: `NotFound` is 404, `Invalid` is
/// 400, `Forbidden` is 403, `Timeout` is 504, `Busy` and `Stopped` are 503, what is not a fault of the caller is 500.
/// Each call must end by itself: the API gives up after 30 seconds, and drops the future.
pub trait HeadApi: Send + Sync {
    /// Whether the head takes jobs now: its state is loaded and its endpoint listens.
    fn ready(&self) -> bool;

    /// Whether a member was put out of the cluster, so that its certificate counts no more.
    fn is_revoked(&self, _: &Identity) -> bool {
        false
    }

    /// Whether a member administers the cluster.
    fn is_administrator(&self, _: &Identity) -> bool {
        false
    }

    /// What the agents of all nodes have measured since the start of the head.
    fn metrics(&self) -> Vec<MetricSum>;

    /// The whole cluster.
    fn cluster(&self) -> BoxFuture<'_, Result<ClusterInfo, Refusal>>;

    /// All jobs that the head remembers, the newest first.
    fn jobs(&self) -> BoxFuture<'_, Result<Vec<JobInfo>, Refusal>>;

    /// One job; `NotFound` if the head does not know it.
    fn job(&self, job: JobId) -> BoxFuture<'_, Result<JobInfo, Refusal>>;

    /// Stops a job. Done when it has ended; a job that has ended already is done at once.
    fn stop(&self, job: JobId) -> BoxFuture<'_, Result<(), Refusal>>;

    /// Drains a node, named by its id or hostname: elastic jobs have this time to leave. Done at once.
    fn drain(&self, node: String, deadline: Duration) -> BoxFuture<'_, Result<NodeDrain, Refusal>>;

    /// Lets a node take work again.
    fn undrain(&self, node: String) -> BoxFuture<'_, Result<(), Refusal>>;
}
