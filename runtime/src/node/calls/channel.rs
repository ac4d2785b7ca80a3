//! The way back to a driver: results and losses, many per write.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Waker};
use std::time::Duration;

use bytes::Bytes;
use kolo_transport::wire::CallReply;
use kolo_transport::{CloseCode, FrameSender, frame};
use tokio::sync::{Notify, watch};

use super::queue::{SendQueue, Taken};

/// Bytes that may wait for a driver before its workers have to.
const QUEUE_LIMIT: usize = 4 << 20;

/// How long a driver may take to read what is there when its channel ends.
const LAST_WORDS: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct Out {
    queue: SendQueue,
    /// The stream, while nobody writes to it. Who takes it writes until the queue is empty, so that no
    /// task has to be woken for a result that comes alone, and results that come together go together.
    sender: Option<FrameSender>,
    /// Who empties the queue ends the stream.
    finishing: bool,
}

/// A driver's channel of calls.
#[derive(Debug)]
pub(super) struct Channel {
    out: Mutex<Out>,
    room: Notify,
    /// Whether it is over; nothing is written then.
    over: watch::Sender<bool>,
}

impl Channel {
    pub(super) fn new(sender: FrameSender) -> Arc<Self> {
        Arc::new(Self {
            out: Mutex::new(Out {
                queue: SendQueue::default(),
                sender: Some(sender),
                finishing: false,
            }),
            room: Notify::new(),
            over: watch::Sender::new(false),
        })
    }

    fn out(&self) -> MutexGuard<'_, Out> {
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a reply. [`Channel::flush`] sends it.
    pub(super) fn push(&self, reply: &CallReply, body: &Bytes) {
        if self.is_over() {
            return;
        }
        let mut out = self.out();
        let written = out
            .queue
            .write(|buffer| frame::encode_head(buffer, reply, body.len()));
        match written {
            Ok(()) => out.queue.share(body),
            Err(error) => {
                drop(out);
                // Only a fault in kolo's own types comes here; without an answer the caller would wait.
                tracing::error!(%error, "a result could not be passed on; the channel is closed");
                self.end();
            }
        }
    }

    /// Sends what is queued, as far as the stream takes it at once; a task of its own sends the rest. If somebody
    /// else is sending, it goes with that. Never waits.
    ///
    /// # Panics
    ///
    /// Outside the transport runtime.
    pub(super) fn flush(self: &Arc<Self>) {
        {
            let out = self.out();
            if out.sender.is_none() || (out.queue.is_empty() && !out.finishing) {
                return;
            }
        }
        let mut writing = Box::pin(self.clone().write_out());
        // Most of the time all goes out here, without another task.
        let mut context = Context::from_waker(Waker::noop());
        if writing.as_mut().poll(&mut context).is_pending() {
            // Polled again there at once, with a waker that wakes it.
            tokio::spawn(writing);
        }
    }

    /// Sends until the queue is empty. If it is dropped half-way, the channel is over.
    async fn write_out(self: Arc<Self>) {
        let Some(sender) = self.out().sender.take() else {
            return;
        };
        let mut turn = Turn {
            channel: &self,
            sender: Some(sender),
        };
        let mut over = self.over.subscribe();
        loop {
            let bytes = {
                let mut out = self.out();
                let Some(bytes) = out.queue.pop() else {
                    let sender = turn.sender.take();
                    if !out.finishing {
                        out.sender = sender;
                        return;
                    }
                    drop(out);
                    if let Some(mut sender) = sender {
                        sender.finish();
                    }
                    return self.end();
                };
                bytes
            };
            let Some(sender) = turn.sender.as_mut() else {
                return;
            };
            let sent = tokio::select! {
                biased;
                sent = send(sender, &bytes) => sent,
                _ = over.wait_for(|over| *over) => false,
            };
            if !sent {
                return;
            }
            let mut out = self.out();
            out.queue.recycle(bytes);
            if out.queue.len() < QUEUE_LIMIT {
                self.room.notify_waiters();
            }
        }
    }

    /// Waits until the queue is short enough for more, or the channel is over. Cancel safe.
    pub(super) async fn room(&self) {
        while !self.has_room() {
            let room = self.room.notified();
            tokio::pin!(room);
            // Registered before the next look, so that no wake-up is missed.
            room.as_mut().enable();
            if self.has_room() {
                return;
            }
            room.await;
        }
    }

    fn has_room(&self) -> bool {
        self.is_over() || self.out().queue.len() < QUEUE_LIMIT
    }

    pub(super) fn is_over(&self) -> bool {
        *self.over.borrow()
    }

    /// Becomes true when the channel is over.
    pub(super) fn over(&self) -> watch::Receiver<bool> {
        self.over.subscribe()
    }

    /// Ends the channel. What is queued is not sent.
    pub(super) fn end(&self) {
        self.over.send_replace(true);
        let mut out = self.out();
        out.queue.clear();
        let sender = out.sender.take();
        drop(out);
        if let Some(mut sender) = sender {
            sender.reset(CloseCode::Cancelled);
        }
        self.room.notify_waiters();
    }

    /// Sends what is queued, ends the stream and then the channel. A driver that does not read for
    /// [`LAST_WORDS`] misses the rest.
    pub(super) async fn finish(self: &Arc<Self>) {
        self.out().finishing = true;
        let mut over = self.over();
        self.flush();
        let sent = over.wait_for(|over| *over);
        if tokio::time::timeout(LAST_WORDS, sent).await.is_err() {
            tracing::debug!("a driver did not read the end of its channel");
        }
        self.end();
    }
}

/// Whether the stream has taken it all.
async fn send(sender: &mut FrameSender, bytes: &Taken) -> bool {
    let sent = match bytes.shared() {
        Some(bytes) => sender.send_chunks(&mut [bytes.clone()]).await,
        None => sender.send_encoded(bytes).await,
    };
    sent.is_ok()
}

/// The turn to write. If it is dropped with the stream in hand, a frame may be half written: the stream is
/// reset and the channel over.
struct Turn<'a> {
    channel: &'a Channel,
    sender: Option<FrameSender>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(mut sender) = self.sender.take() {
            sender.reset(CloseCode::Cancelled);
            self.channel.end();
        }
    }
}
