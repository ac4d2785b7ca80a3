//! What the actors of a node need of the daemon around them.

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::pin::Pin;

use kolo_transport::ids::{Generation, JobId, Slot};
use kolo_transport::wire::{
    GenerationTable, NodeEvent, RankFailure, Refusal, StartWorkers, ToWorker,
};
use tokio::sync::mpsc;

/// A future that is boxed.
pub type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Completes when a worker's call socket is closed and every result of it is on its way; with the
/// reason if the worker sent what is no result. Dropping it stops nothing.
pub type CallsEnd = BoxFuture<Result<(), String>>;

/// The way to the head.
pub trait HeadLink: Send + Sync {
    /// Tells the head. Events reach it in the order of these calls, as soon as it is there.
    fn report(&self, event: NodeEvent);

    /// Has a worker's signing request signed; gives the certificate in DER. Takes a bounded time.
    fn sign(&self, job: JobId, slot: Slot, csr: Vec<u8>) -> BoxFuture<Result<Vec<u8>, Refusal>>;
}

/// The way of calls from drivers to workers, which does not go through mailboxes.
pub trait CallPlane: Send + Sync {
    /// A job's workers are about to start.
    fn open(&self, start: &StartWorkers);

    /// Takes over a worker's call socket. `control` is for cancelling.
    ///
    /// # Errors
    ///
    /// If the socket can't be used.
    fn connect(
        &self,
        job: JobId,
        slot: Slot,
        socket: UnixStream,
        control: ControlSender,
    ) -> io::Result<CallsEnd>;

    /// A generation is complete; calls must be for it from now on.
    fn complete(&self, table: &GenerationTable);

    /// A rank is gone, on any node; `stopping` if that is because the job is being stopped.
    fn lost(&self, job: JobId, generation: Generation, failure: &RankFailure, stopping: bool);

    /// The job is over.
    fn close(&self, job: JobId);
}

/// Messages that may wait for a worker to read its control socket. It reads it all the time, so that one
/// that lets this many wait is stuck.
const CONTROL_QUEUE: usize = 1024;

/// A worker's control socket takes no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The worker does not read.
    #[error("the worker has not read its control socket for {CONTROL_QUEUE} messages")]
    Full,
    /// The socket is closed.
    #[error("the worker's control socket is closed")]
    Closed,
}

/// Messages to a worker, in order.
#[derive(Debug, Clone)]
pub struct ControlSender(mpsc::Sender<(ToWorker, Vec<OwnedFd>)>);

impl ControlSender {
    /// A sender, and what comes out at the other end.
    #[must_use]
    pub fn channel() -> (Self, mpsc::Receiver<(ToWorker, Vec<OwnedFd>)>) {
        let (sender, receiver) = mpsc::channel(CONTROL_QUEUE);
        (Self(sender), receiver)
    }

    /// Queues a message.
    ///
    /// # Errors
    ///
    /// [`ControlError`].
    pub fn try_send(&self, message: ToWorker) -> Result<(), ControlError> {
        self.try_send_with(message, Vec::new())
    }

    /// Queues a message with file descriptors, which are closed here once they are sent.
    ///
    /// # Errors
    ///
    /// [`ControlError`].
    pub fn try_send_with(&self, message: ToWorker, fds: Vec<OwnedFd>) -> Result<(), ControlError> {
        self.0
            .try_send((message, fds))
            .map_err(|error| match error {
                mpsc::error::TrySendError::Full(_) => ControlError::Full,
                mpsc::error::TrySendError::Closed(_) => ControlError::Closed,
            })
    }
}
