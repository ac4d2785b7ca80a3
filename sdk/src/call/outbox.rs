//! What goes to one node.
//!
//! A call is written to the stream by the task that makes it: no other thread has to wake up for it. Only what
//! the stream has no room for waits here for a task of its own.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use kolo_transport::frame::FrameError;
use kolo_transport::runtime::{Sends, Turn};
use kolo_transport::session::FrameSender;
use tokio::sync::{Notify, OwnedSemaphorePermit};

/// Cancellations that wait while a node does not read. Beyond that they are dropped: they are advice, and a
/// result that nobody waits for is ignored.
const MOST_WAITING_CANCELS: usize = 4096;

/// One of the calls that may be in flight.
pub(crate) type Permit = Arc<OwnedSemaphorePermit>;

/// Where encoded frames go.
pub(crate) trait Sink: Send + 'static {
    /// As [`FrameSender::poll_send_chunks`].
    fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        chunks: &mut [Bytes],
    ) -> Poll<Result<usize, FrameError>>;

    /// As [`TransportRuntime::turn`](kolo_transport::TransportRuntime::turn).
    fn turn(&self, _sends: Sends) -> Option<Turn> {
        None
    }

    /// As [`TransportRuntime::awaited`](kolo_transport::TransportRuntime::awaited).
    fn awaited(&self) {}
}

impl Sink for FrameSender {
    fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        chunks: &mut [Bytes],
    ) -> Poll<Result<usize, FrameError>> {
        self.poll_send_chunks(cx, chunks)
    }

    fn turn(&self, sends: Sends) -> Option<Turn> {
        Some(self.runtime().turn(sends))
    }

    fn awaited(&self) {
        self.runtime().awaited();
    }
}

/// Frames to one node.
pub(crate) struct Outbox {
    sink: Box<dyn Sink>,
    waiting: VecDeque<Waiting>,
    /// Wakes the task that empties `waiting`.
    wake: Arc<Notify>,
    failed: Option<FrameError>,
}

struct Waiting {
    chunk: Bytes,
    /// Kept until the chunk is written, so that what waits is bounded by the calls that may be in flight.
    _permit: Option<Permit>,
}

impl Outbox {
    pub(crate) fn new(sink: impl Sink) -> Self {
        Self {
            sink: Box::new(sink),
            waiting: VecDeque::new(),
            wake: Arc::new(Notify::new()),
            failed: None,
        }
    }

    /// To be held while a call is sent, and until nothing is locked.
    pub(crate) fn turn(&self, sends: Sends) -> Option<Turn> {
        self.sink.turn(sends)
    }

    /// A call that was sent is awaited now.
    pub(crate) fn awaited(&self) {
        self.sink.awaited();
    }

    /// What the task that calls [`Outbox::poll_flush`] waits for.
    pub(crate) fn wake(&self) -> Arc<Notify> {
        Arc::clone(&self.wake)
    }

    /// Writes a frame: at once as far as the stream takes it and nothing is before it.
    pub(crate) fn push(&mut self, mut chunks: [Bytes; 2], permit: Option<&Permit>) {
        if self.failed.is_some() {
            return;
        }
        let mut rest = &mut chunks[..];
        if self.waiting.is_empty() {
            // The flushing task sleeps, so the stream holds no waker that this one could replace.
            let mut cx = Context::from_waker(Waker::noop());
            while let Some(first) = rest.iter().position(|chunk| !chunk.is_empty()) {
                rest = &mut rest[first..];
                match self.sink.poll_send(&mut cx, rest) {
                    Poll::Ready(Ok(_)) => {}
                    Poll::Ready(Err(error)) => return self.fail(error),
                    Poll::Pending => break,
                }
            }
        }
        let before = self.waiting.len();
        self.waiting.extend(
            rest.iter_mut()
                .filter(|chunk| !chunk.is_empty())
                .map(|chunk| Waiting {
                    chunk: std::mem::take(chunk),
                    _permit: permit.cloned(),
                }),
        );
        if before == 0 && !self.waiting.is_empty() {
            self.wake.notify_one();
        }
    }

    /// As [`Outbox::push`], for what may be lost.
    pub(crate) fn push_advice(&mut self, chunk: Bytes) {
        if self.waiting.len() < MOST_WAITING_CANCELS {
            self.push([chunk, Bytes::new()], None);
        }
    }

    fn fail(&mut self, error: FrameError) {
        self.failed = Some(error);
        self.waiting.clear();
        self.wake.notify_one();
    }

    /// Writes what waits. Ready when nothing waits any more.
    ///
    /// # Errors
    ///
    /// If the stream has failed. It takes nothing any more then.
    pub(crate) fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), FrameError>> {
        while let Some(front) = self.waiting.front_mut() {
            match self
                .sink
                .poll_send(cx, std::slice::from_mut(&mut front.chunk))
            {
                Poll::Ready(Ok(_)) => {
                    if front.chunk.is_empty() {
                        self.waiting.pop_front();
                    }
                }
                Poll::Ready(Err(error)) => self.fail(error),
                Poll::Pending => return Poll::Pending,
            }
        }
        Poll::Ready(self.failed.clone().map_or(Ok(()), Err))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use bytes::BytesMut;
    use tokio::sync::Semaphore;

    use super::*;

    #[derive(Default)]
    struct Pipe {
        room: usize,
        taken: BytesMut,
        waker: Option<Waker>,
        broken: bool,
    }

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Pipe>>);

    impl Shared {
        fn open(&self, room: usize) {
            let mut pipe = self.0.lock().unwrap();
            pipe.room += room;
            if let Some(waker) = pipe.waker.take() {
                waker.wake();
            }
        }
    }

    impl Sink for Shared {
        fn poll_send(
            &mut self,
            cx: &mut Context<'_>,
            chunks: &mut [Bytes],
        ) -> Poll<Result<usize, FrameError>> {
            let mut pipe = self.0.lock().unwrap();
            if pipe.broken {
                return Poll::Ready(Err(FrameError::Io("gone".to_owned())));
            }
            if pipe.room == 0 {
                pipe.waker = Some(cx.waker().clone());
                return Poll::Pending;
            }
            let mut whole = 0;
            for chunk in chunks {
                let count = chunk.len().min(pipe.room);
                pipe.room -= count;
                pipe.taken.extend_from_slice(&chunk.split_to(count));
                whole += usize::from(chunk.is_empty());
            }
            Poll::Ready(Ok(whole))
        }
    }

    fn frame(text: &'static str) -> [Bytes; 2] {
        let (head, body) = text.split_at(text.len() / 2);
        [
            Bytes::from_static(head.as_bytes()),
            Bytes::from_static(body.as_bytes()),
        ]
    }

    #[tokio::test]
    async fn frames_keep_their_order_when_the_stream_blocks() {
        let pipe = Shared::default();
        let outbox = Arc::new(Mutex::new(Outbox::new(pipe.clone())));
        let wake = outbox.lock().unwrap().wake();
        let permits = Arc::new(Semaphore::new(3));
        pipe.open(5);
        for text in ["abcd", "efgh", "ijkl"] {
            let permit = Arc::new(Arc::clone(&permits).try_acquire_owned().unwrap());
            outbox.lock().unwrap().push(frame(text), Some(&permit));
        }
        // The first frame went out whole; the others hold their permits until they are written.
        assert_eq!(permits.available_permits(), 1);
        let flush = tokio::spawn({
            let outbox = Arc::clone(&outbox);
            async move {
                wake.notified().await;
                std::future::poll_fn(|cx| outbox.lock().unwrap().poll_flush(cx)).await
            }
        });
        for _ in 0..7 {
            tokio::task::yield_now().await;
            pipe.open(1);
        }
        flush.await.unwrap().unwrap();
        assert_eq!(permits.available_permits(), 3);
        assert_eq!(&pipe.0.lock().unwrap().taken[..], b"abcdefghijkl");
    }

    #[test]
    fn a_stream_that_fails_keeps_nothing() {
        let pipe = Shared::default();
        let mut outbox = Outbox::new(pipe.clone());
        outbox.push(frame("abcd"), None);
        pipe.0.lock().unwrap().broken = true;
        let mut cx = Context::from_waker(Waker::noop());
        assert!(matches!(
            outbox.poll_flush(&mut cx),
            Poll::Ready(Err(FrameError::Io(_)))
        ));
        assert!(outbox.waiting.is_empty());
        outbox.push(frame("efgh"), None);
        assert!(outbox.waiting.is_empty());
    }

    #[test]
    fn cancellations_that_wait_are_bounded() {
        let mut outbox = Outbox::new(Shared::default());
        for _ in 0..2 * MOST_WAITING_CANCELS {
            outbox.push_advice(Bytes::from_static(b"cancel"));
        }
        assert_eq!(outbox.waiting.len(), MOST_WAITING_CANCELS);
        outbox.push(frame("call"), None);
        assert_eq!(outbox.waiting.len(), MOST_WAITING_CANCELS + 2);
    }
}
