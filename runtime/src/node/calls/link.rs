//! The node's end of a worker's call socket.

use std::collections::VecDeque;
use std::io;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use kolo_actors::node::ControlSender;
use kolo_core::membership::Process;
use kolo_transport::frame::{FrameError, FrameReader, Limits};
use kolo_transport::ids::CallId;
use kolo_transport::wire::{CallReply, WorkerResult};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::Notify;

use super::channel::Channel;
use super::queue::SendQueue;

/// Bytes that may wait for a worker before its callers have to.
const QUEUE_LIMIT: usize = 4 << 20;

/// A call that a worker has and has not answered.
#[derive(Debug)]
struct InFlight {
    call: CallId,
    channel: Arc<Channel>,
    cancel: Cancel,
}

/// Whether anybody waits for a call that a worker has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cancel {
    /// Somebody does.
    No,
    /// Nobody, and the worker is to be told.
    Wanted,
    /// Nobody, and the worker is told.
    Told,
}

/// How many calls are looked up at once to tell the worker that they are cancelled.
const CANCELS: usize = 64;

#[derive(Debug, Default)]
struct Out {
    queue: SendQueue,
    /// In the order in which the calls were sent, which is that of the results but for cancelled ones.
    in_flight: VecDeque<InFlight>,
    closed: bool,
}

impl Out {
    /// The next calls of which the worker is to be told that they are cancelled.
    fn next_cancels(&mut self) -> Vec<CallId> {
        let wanted = |one: &&mut InFlight| one.cancel == Cancel::Wanted;
        let calls = self.in_flight.iter_mut().filter(wanted).take(CANCELS);
        calls
            .map(|one| {
                one.cancel = Cancel::Told;
                one.call
            })
            .collect()
    }
}

/// What [`Link::send`] did with a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    /// It is queued; [`Link::flush`] puts it on the socket.
    Queued,
    /// The worker takes no calls any more.
    Closed,
}

/// One worker.
#[derive(Debug)]
pub(super) struct Link {
    process: Process,
    socket: OwnedWriteHalf,
    control: ControlSender,
    out: Mutex<Out>,
    /// The socket is full and the writing task has to go on.
    full: Notify,
    /// There is a call to cancel.
    cancelling: Notify,
    /// There is room in the queue again, or no use for it.
    room: Notify,
}

impl Link {
    /// Takes over the call socket of a worker. Must be called inside the runtime that is to drive it.
    pub(super) fn new(
        process: Process,
        socket: StdUnixStream,
        control: ControlSender,
    ) -> io::Result<(Arc<Self>, Incoming)> {
        socket.set_nonblocking(true)?;
        let (read, write) = UnixStream::from_std(socket)?.into_split();
        let link = Arc::new(Self {
            process,
            socket: write,
            control,
            out: Mutex::default(),
            full: Notify::new(),
            cancelling: Notify::new(),
            room: Notify::new(),
        });
        let incoming = Incoming {
            link: link.clone(),
            reader: FrameReader::new(read, Limits::CALLS),
            touched: Vec::new(),
        };
        Ok((link, incoming))
    }

    pub(super) fn process(&self) -> Process {
        self.process
    }

    fn out(&self) -> MutexGuard<'_, Out> {
        // Nothing panics while it is held; if it did, the queue is still whole.
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a call whose frame, but for its body, is `head`.
    pub(super) fn send(
        &self,
        call: CallId,
        channel: &Arc<Channel>,
        head: &[u8],
        body: &Bytes,
    ) -> Sent {
        let mut out = self.out();
        if out.closed {
            return Sent::Closed;
        }
        out.queue.copy(head);
        out.queue.share(body);
        out.in_flight.push_back(InFlight {
            call,
            channel: channel.clone(),
            cancel: Cancel::No,
        });
        Sent::Queued
    }

    /// Writes as much as the socket takes. The writing task does the rest.
    pub(super) fn flush(&self) {
        if !self.write(&mut self.out()) {
            self.full.notify_one();
        }
    }

    /// Whether nothing is left to write.
    fn write(&self, out: &mut Out) -> bool {
        while !out.queue.is_empty() {
            match self.socket.try_write(out.queue.front()) {
                Ok(count) => out.queue.consume(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The worker is gone or has closed its end; its calls end with its loss.
                Err(_) => {
                    out.closed = true;
                    out.queue.clear();
                    self.wake_all();
                }
            }
        }
        true
    }

    /// Wakes whoever waits for something that a closed link never does.
    fn wake_all(&self) {
        self.full.notify_one();
        self.cancelling.notify_one();
        self.room.notify_waiters();
    }

    /// Does what has to wait for the worker, until the link is closed.
    pub(super) async fn serve(self: Arc<Self>) {
        tokio::join!(self.write_rest(), self.send_cancels());
    }

    /// Tells the worker which calls are cancelled, as fast as it takes it.
    async fn send_cancels(&self) {
        loop {
            let calls = {
                let mut out = self.out();
                if out.closed {
                    return;
                }
                out.next_cancels()
            };
            if calls.is_empty() {
                self.cancelling.notified().await;
            }
            for call in calls {
                if let Err(error) = self.control.cancel(call).await {
                    tracing::debug!(process = %self.process, %call, %error, "a call could not be cancelled");
                    return;
                }
            }
        }
    }

    /// Writes what the socket did not take at once.
    async fn write_rest(&self) {
        loop {
            self.full.notified().await;
            loop {
                let ready = self.socket.writable().await;
                let mut out = self.out();
                let done = ready.is_err() || self.write(&mut out);
                if out.queue.len() < QUEUE_LIMIT || out.closed {
                    self.room.notify_waiters();
                }
                if out.closed || ready.is_err() {
                    return;
                }
                if done {
                    break;
                }
            }
        }
    }

    /// Waits until the queue is short enough for more, or the link is closed. Cancel safe.
    pub(super) async fn room(&self) {
        loop {
            let room = self.room.notified();
            tokio::pin!(room);
            // Registered before the look, so that no wake-up is missed.
            room.as_mut().enable();
            if self.has_room() {
                return;
            }
            room.await;
        }
    }

    /// Whether [`Link::room`] has nothing to wait for.
    pub(super) fn has_room(&self) -> bool {
        let out = self.out();
        out.closed || out.queue.len() < QUEUE_LIMIT
    }

    /// Tells the worker that nobody waits for a call of this channel any more.
    pub(super) fn cancel(&self, call: CallId, channel: &Arc<Channel>) {
        self.cancel_where(|one| one.call == call && Arc::ptr_eq(&one.channel, channel));
    }

    /// Cancels every call of a channel.
    pub(super) fn cancel_all(&self, channel: &Arc<Channel>) {
        self.cancel_where(|one| Arc::ptr_eq(&one.channel, channel));
    }

    fn cancel_where(&self, is: impl Fn(&InFlight) -> bool) {
        let mut out = self.out();
        for one in &mut out.in_flight {
            if one.cancel == Cancel::No && is(one) {
                one.cancel = Cancel::Wanted;
            }
        }
        drop(out);
        self.cancelling.notify_one();
    }

    /// No more calls. Those that were not answered never will be.
    pub(super) fn close(&self) {
        let mut out = self.out();
        out.closed = true;
        out.queue.clear();
        out.in_flight.clear();
        drop(out);
        self.wake_all();
    }

    /// Takes a call off the list; `None` if the worker does not have it.
    fn answered(&self, call: CallId) -> Option<Arc<Channel>> {
        let mut out = self.out();
        let index = out.in_flight.iter().position(|one| one.call == call)?;
        out.in_flight.remove(index).map(|one| one.channel)
    }
}

/// What a worker sends over its call socket.
#[derive(Debug)]
pub(super) struct Incoming {
    link: Arc<Link>,
    reader: FrameReader<OwnedReadHalf>,
    /// Channels with results that are not on their way yet.
    touched: Vec<Arc<Channel>>,
}

impl Incoming {
    /// Passes results on until the worker's end is closed.
    ///
    /// # Errors
    ///
    /// What the worker sent that is no result.
    pub(super) async fn run(mut self) -> Result<(), String> {
        let result = loop {
            match self.reader.next::<WorkerResult>().await {
                Ok(Some(frame)) => self.pass_on(frame.head, &frame.body),
                // A worker that was killed in the middle of a result has its own way to tell.
                Ok(None) | Err(FrameError::Truncated { .. } | FrameError::Io(_)) => break Ok(()),
                Err(error) => break Err(format!("its call socket: {error}")),
            }
            // What came with one read goes out with one write.
            if !self.reader.is_ready() {
                self.flush().await;
            }
        };
        self.flush().await;
        result
    }

    fn pass_on(&mut self, result: WorkerResult, body: &Bytes) {
        let WorkerResult {
            call,
            generation,
            outcome,
        } = result;
        let process = self.link.process;
        let Some(channel) = self.link.answered(call) else {
            tracing::debug!(%process, %call, "a result for no call");
            return;
        };
        let reply = CallReply::Result {
            call,
            slot: process.slot,
            generation,
            outcome,
        };
        channel.push(&reply, body);
        if !self
            .touched
            .iter()
            .any(|other| Arc::ptr_eq(other, &channel))
        {
            self.touched.push(channel);
        }
    }

    async fn flush(&mut self) {
        for channel in self.touched.drain(..) {
            channel.flush();
            channel.room().await;
        }
    }
}
