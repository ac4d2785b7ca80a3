//! What the head's actors need of the world outside.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use kolo_core::head::job::Reply;
use kolo_core::head::messages::Opening;
use kolo_transport::ids::JobId;
use kolo_transport::session::CloseCode;
use kolo_transport::wire::NodeRequest;

/// A future that may move between threads.
pub type SendFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A future that stays on the arbiter that made it.
pub type LocalFuture<T> = Pin<Box<dyn Future<Output = T>>>;

/// The way to one node, for one stay of it in the registry.
pub trait NodeLink: Send + Sync {
    /// Sends a request and waits for the answer, at most for `deadline`. When the future is dropped the node is told that
    /// the answer is not wanted any more.
    fn request(&self, request: NodeRequest, deadline: Duration) -> SendFuture<Reply>;

    /// Ends the connection, so that the node learns that its stay is over.
    fn close(&self, code: CloseCode, reason: &str);
}

/// Opens and closes the plain HTTP rendezvous of jobs.
pub trait RendezvousHost: Send + Sync {
    /// Opens a job's rendezvous. The address that workers connect to, or why there is none.
    fn open(&self, opening: Opening) -> LocalFuture<Result<SocketAddr, String>>;

    /// Closes it, and all else by which members of the job find each other; again when the job has ended. Unknown jobs are fine.
    fn close(&self, job: JobId) -> LocalFuture<()>;
}
