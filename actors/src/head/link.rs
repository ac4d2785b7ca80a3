//! What the head's actors need of the world outside.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use kolo_core::head::job::Reply;
use kolo_core::head::messages::Opening;
use kolo_core::membership::Process;
use kolo_core::rendezvous::{DoorNews, DoorOpening};
use kolo_transport::CloseCode;
use kolo_transport::ids::JobId;
use kolo_transport::wire::{GenerationTable, NodeRequest};

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

/// Takes the news of a door. Whoever has some waits for the end of the future before more is said.
pub type TellNews = Arc<dyn Fn(DoorNews) -> SendFuture<()> + Send + Sync>;

/// Opens and closes the plain HTTP rendezvous of jobs.
pub trait RendezvousHost: Send + Sync {
    /// Opens a job's rendezvous. The address that workers connect to, or why there is none.
    fn open(&self, opening: Opening) -> LocalFuture<Result<SocketAddr, String>>;

    /// Closes it, and all else by which members of the job find each other; again when the job has ended. Unknown jobs are fine.
    fn close(&self, job: JobId) -> LocalFuture<()>;

    /// Opens a rendezvous for one process. All that happens there is told, that it is open first of all.
    fn open_door(&self, opening: DoorOpening, tell: TellNews);

    /// Lets the members of a generation in at their doors.
    fn admit(&self, table: Arc<GenerationTable>);

    /// Tells a process behind its door that hosts have changed.
    fn notice(&self, job: JobId, process: Process, number: u64);

    /// Closes the door of a process.
    fn close_door(&self, job: JobId, process: Process);
}
