//! What the actors of a node need of the daemon around them.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use kolo_core::agent::Metric;
use kolo_core::node::colocator::Here;
use kolo_core::node::messages::{Delivery, Loss, Wanted, WorkerId};
use kolo_transport::ObituarySecret;
use kolo_transport::ids::{CallId, JobId, Slot};
use kolo_transport::wire::{GenerationTable, NodeEvent, Refusal, StartWorkers, ToWorker};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};

use super::launch::Launch;
use super::output::Outputs;

/// A future that is boxed.
pub type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Completes when a worker's call socket is closed and every result of it is on its way; with the
/// reason if the worker sent what is no result. Dropping it stops nothing.
pub type CallsEnd = BoxFuture<Result<(), String>>;

/// What all actors of a node share.
pub struct NodeContext {
    /// Which node this is.
    pub here: Here,
    /// The IP address under which other nodes reach this one.
    pub ip: IpAddr,
    /// Whether a job that holds no GPU must not see those that are here.
    pub hides_gpus: bool,
    /// The program that wardens are started from; its `main` calls [`kolo_process::run_if_warden`] first.
    pub warden_exe: PathBuf,
    /// Where sockets and pipes of workers are served: not on an actor's thread.
    pub runtime: Handle,
    /// The way to the head.
    pub head: Arc<dyn HeadLink>,
    /// Where the head gets this daemon's obituary.
    pub head_address: SocketAddr,
    /// What makes it true.
    pub obituary: ObituarySecret,
    /// Number of wardens that there are or may be.
    pub wardens: watch::Sender<usize>,
    /// The way of calls.
    pub calls: Arc<dyn CallPlane>,
    /// The programs that are here.
    pub programs: Arc<dyn ProgramFinder>,
    /// The output of workers.
    pub outputs: Arc<Outputs>,
}

impl std::fmt::Debug for NodeContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeContext")
            .field("here", &self.here)
            .field("ip", &self.ip)
            .finish_non_exhaustive()
    }
}

/// The programs on this host.
pub trait ProgramFinder: Send + Sync {
    /// Looks for a program; `None` if it has not been sent here. Takes a bounded time.
    fn find(&self, program: Wanted) -> BoxFuture<Result<Option<Launch>, Refusal>>;

    /// A TCP port that is free; 0 if there is none.
    fn free_port(&self) -> u16;
}

/// The way to the head.
pub trait HeadLink: Send + Sync {
    /// Tells the head, over the connection that is there. Takes a bounded time.
    fn send(&self, events: Vec<NodeEvent>) -> BoxFuture<Delivery>;

    /// The connection that is there is of no use any more; why.
    fn leave(&self, reason: String);

    /// Takes what an agent has measured. Tells the head of it in its own time.
    fn put_metrics(&self, metrics: &[Metric]);

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
        worker: WorkerId,
        socket: UnixStream,
        control: ControlSender,
    ) -> io::Result<CallsEnd>;

    /// A generation is complete; calls must be for it from now on.
    fn complete(&self, table: &GenerationTable);

    /// A rank is lost, on any node.
    fn lost(&self, loss: &Loss);

    /// The job is over.
    fn close(&self, job: JobId);
}

/// Messages that may wait for a worker to read its control socket. It reads it all the time, so that one
/// that lets this many wait is stuck.
const CONTROL_QUEUE: usize = 1024;

/// Calls to cancel that may wait. Who cancels more waits, so that drivers who cancel much take no room from the rest.
const CANCEL_QUEUE: usize = 64;

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

type Message = (ToWorker, Vec<OwnedFd>);

/// Messages to a worker, in order; but calls are cancelled on a lane of their own, behind all others.
#[derive(Debug, Clone)]
pub struct ControlSender {
    messages: mpsc::Sender<Message>,
    cancels: mpsc::Sender<CallId>,
}

/// The other end of a [`ControlSender`].
#[derive(Debug)]
pub struct ControlReceiver {
    messages: mpsc::Receiver<Message>,
    cancels: mpsc::Receiver<CallId>,
}

impl ControlReceiver {
    /// The next message and its descriptors; `None` when no sender is left. Cancel safe.
    pub async fn recv(&mut self) -> Option<Message> {
        tokio::select! {
            biased;
            message = self.messages.recv() => message,
            Some(call) = self.cancels.recv() => Some((ToWorker::Cancel { call }, Vec::new())),
        }
    }
}

impl ControlSender {
    /// A sender, and what comes out at the other end.
    #[must_use]
    pub fn channel() -> (Self, ControlReceiver) {
        let (messages, message_receiver) = mpsc::channel(CONTROL_QUEUE);
        let (cancels, cancel_receiver) = mpsc::channel(CANCEL_QUEUE);
        let receiver = ControlReceiver {
            messages: message_receiver,
            cancels: cancel_receiver,
        };
        (Self { messages, cancels }, receiver)
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
        self.messages
            .try_send((message, fds))
            .map_err(|error| match error {
                mpsc::error::TrySendError::Full(_) => ControlError::Full,
                mpsc::error::TrySendError::Closed(_) => ControlError::Closed,
            })
    }

    /// Queues the cancelling of a call, and waits while there is no room. Cancel safe: it is queued or not.
    ///
    /// # Errors
    ///
    /// [`ControlError::Closed`].
    pub async fn cancel(&self, call: CallId) -> Result<(), ControlError> {
        let sent = self.cancels.send(call).await;
        sent.map_err(|_| ControlError::Closed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn calls_to_cancel_take_no_room_from_the_rest_and_wait_behind_it() {
        let (sender, mut receiver) = ControlSender::channel();
        for call in 0..CANCEL_QUEUE as u64 {
            sender.cancel(CallId(call)).await.unwrap();
        }
        let more = sender.cancel(CallId(1000));
        tokio::pin!(more);
        assert!(futures_util::poll!(more.as_mut()).is_pending());
        let stop = |reason: usize| ToWorker::Stop {
            reason: reason.to_string(),
        };
        for number in 0..CONTROL_QUEUE {
            sender.try_send(stop(number)).unwrap();
        }
        assert_eq!(sender.try_send(stop(0)), Err(ControlError::Full));
        for number in 0..CONTROL_QUEUE {
            assert_eq!(receiver.recv().await.unwrap().0, stop(number));
        }
        for call in 0..CANCEL_QUEUE as u64 {
            let call = CallId(call);
            assert_eq!(receiver.recv().await.unwrap().0, ToWorker::Cancel { call });
        }
        more.await.unwrap();
        drop(receiver);
        assert_eq!(sender.cancel(CallId(0)).await, Err(ControlError::Closed));
        assert_eq!(sender.try_send(stop(0)), Err(ControlError::Closed));
    }
}
