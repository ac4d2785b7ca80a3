//! Output of a job that goes to its driver without loss.
//!
//! A reader for each pipe cuts what it reads behind the last line end and puts it into one short queue for the job. When
//! the queue is full the readers wait, then the pipes fill, and the workers wait: nothing is dropped, and nothing grows.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use kolo_transport::ids::DriverId;
use kolo_transport::wire::{OutputChunk, Refusal, RefusalKind};
use tokio::sync::{mpsc, oneshot};

/// Chunks of a job that wait for its driver.
const QUEUE: usize = 8;

/// A piece of output.
pub type Chunk = (OutputChunk, Bytes);

/// What a driver takes: the job's output, and the input of rank 0.
#[derive(Debug)]
pub struct Taken {
    /// The output; it ends when all of it has come.
    pub chunks: mpsc::Receiver<Chunk>,
    /// The write end of the standard input of rank 0, once it runs here, if it gets one at all.
    pub stdin: Option<oneshot::Receiver<OwnedFd>>,
}

/// The way of one job's output to its driver.
#[derive(Debug)]
pub(super) struct OutputStream {
    owner: DriverId,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// `None` once no more readers begin.
    sender: Option<mpsc::Sender<Chunk>>,
    stdin: Option<oneshot::Sender<OwnedFd>>,
    /// `None` once it is taken.
    taken: Option<Taken>,
}

impl OutputStream {
    pub(super) fn new(owner: DriverId, stdin: bool) -> Self {
        let (sender, chunks) = mpsc::channel(QUEUE);
        let (stdin_sender, stdin) = stdin.then(oneshot::channel).unzip();
        Self {
            owner,
            state: Mutex::new(State {
                sender: Some(sender),
                stdin: stdin_sender,
                taken: Some(Taken { chunks, stdin }),
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For one more reader; `None` after the end.
    pub(super) fn sender(&self) -> Option<mpsc::Sender<Chunk>> {
        self.state().sender.clone()
    }

    /// Gives the write end of rank 0's standard input to whoever has taken the stream.
    pub(super) fn give_stdin(&self, pipe: OwnedFd) {
        if let Some(sender) = self.state().stdin.take() {
            // A driver that is gone has no input: the pipe is closed, which is its end.
            drop(sender.send(pipe));
        }
    }

    pub(super) fn take(&self, driver: DriverId) -> Result<Taken, Refusal> {
        if driver != self.owner {
            return Err(Refusal::new(
                RefusalKind::Forbidden,
                "only the driver that submitted the job may take its output; `kolo logs` shows what is kept of it",
            ));
        }
        self.state().taken.take().ok_or_else(|| {
            Refusal::new(
                RefusalKind::Invalid,
                "the output of the job has been taken already; it can be taken once",
            )
        })
    }

    /// Whether its driver may still come for it.
    pub(super) fn is_awaited(&self) -> bool {
        self.state().taken.is_some()
    }

    /// No more readers begin.
    pub(super) fn end(&self) {
        let mut state = self.state();
        state.sender = None;
        state.stdin = None;
    }

    /// Nobody will take it: readers throw away what they still read.
    pub(super) fn abandon(&self) {
        self.end();
        self.state().taken = None;
    }
}
