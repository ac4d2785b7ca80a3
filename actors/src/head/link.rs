//! What the head's actors need of the world outside.

use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::time::Duration;

use kolo_core::head::job::Reply;
use kolo_transport::ids::JobId;
use kolo_transport::session::CloseCode;
use kolo_transport::wire::{Member, NodeRequest};

/// A future that may move between threads.
pub type SendFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A future that stays on the arbiter that made it.
pub type LocalFuture<T> = Pin<Box<dyn Future<Output = T>>>;

/// The way to one node, for one stay of it in the registry.
pub trait NodeLink: Send + Sync {
    /// Sends a request and waits for the answer, at most for `deadline`. When the future is dropped the node is told that
    /// the answer is not wanted any more.
    fn request(&self, request: NodeRequest, deadline: Duration) -> SendFuture<Reply>;

    /// The head's own address as the node reaches it, if that is known.
    fn local_ip(&self) -> Option<IpAddr>;

    /// Ends the connection, so that the node learns that its stay is over.
    fn close(&self, code: CloseCode, reason: &str);
}

/// Opens and closes the plain HTTP rendezvous of jobs.
pub trait RendezvousHost: Send + Sync {
    /// Opens a job's rendezvous for these members, who come from `peers`. The address that workers connect to,
    /// or why there is none. `local` is an address of this host that all of them reach, if one is known.
    fn open(
        &self,
        job: JobId,
        members: Vec<Member>,
        peers: Vec<IpAddr>,
        local: Option<IpAddr>,
    ) -> LocalFuture<Result<SocketAddr, String>>;

    /// Closes it, and all else by which members of the job find each other; again when the job has ended. Unknown jobs are fine.
    fn close(&self, job: JobId) -> LocalFuture<()>;
}
