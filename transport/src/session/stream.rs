//! One bidirectional stream of frames.

use std::future::{Future, poll_fn};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::writer::Writer;
use crate::end::{CloseCode, StreamEnd};
use crate::frame::{Frame, FrameError, FrameReader, FrameWriter, Limits, encode_head};
use crate::runtime::TransportRuntime;

/// A bidirectional stream. Its halves may be moved out and used in different tasks.
#[derive(Debug)]
pub struct Stream {
    /// Frames to the peer.
    pub send: FrameSender,
    /// Frames from the peer.
    pub recv: FrameReceiver,
}

impl Stream {
    pub(crate) fn new(
        (send, recv): (quinn::SendStream, quinn::RecvStream),
        limits: Limits,
        runtime: &TransportRuntime,
    ) -> Self {
        Self {
            send: FrameSender {
                writer: FrameWriter::new(Writer::new(send)),
                runtime: runtime.clone(),
            },
            recv: FrameReceiver {
                reader: FrameReader::new(recv, limits),
                runtime: runtime.clone(),
            },
        }
    }

    /// Ends both directions at once. The peer sees `code`; what it has not read yet may be lost.
    pub fn abort(&mut self, code: CloseCode) {
        self.send.reset(code);
        self.recv.stop(code);
    }
}

/// The sending half of a [`Stream`].
///
/// Dropping it ends the stream as [`FrameSender::finish`] does. To tell the peer that something is missing,
/// [`FrameSender::reset`] it first.
#[derive(Debug)]
pub struct FrameSender {
    writer: FrameWriter<Writer>,
    /// Keeps the runtime alive as long as the stream is used.
    runtime: TransportRuntime,
}

impl FrameSender {
    /// The runtime that the stream runs on.
    pub fn runtime(&self) -> &TransportRuntime {
        &self.runtime
    }

    /// Sends one frame: `head` and `body`. Returns when the stream has taken it, which is not when the peer
    /// has it; waits while the peer does not read.
    ///
    /// Not cancel safe: reset the stream if this future is dropped before it is done.
    ///
    /// # Errors
    ///
    /// [`FrameError::Reset`] if the peer stopped the stream, [`FrameError::Lost`],
    /// [`FrameError::Invalid`].
    pub async fn send<T: Serialize>(&mut self, head: &T, body: &[u8]) -> Result<(), FrameError> {
        self.writer.send(head, body).await
    }

    /// As [`FrameSender::send`], without a copy of the body.
    ///
    /// # Errors
    ///
    /// As [`FrameSender::send`].
    pub async fn send_bytes<T: Serialize>(
        &mut self,
        head: &T,
        body: Bytes,
    ) -> Result<(), FrameError> {
        let mut prefix = BytesMut::with_capacity(256);
        encode_head(&mut prefix, head, body.len())?;
        self.send_chunks(&mut [prefix.freeze(), body]).await
    }

    /// Sends frames that are encoded already, without a copy.
    ///
    /// # Errors
    ///
    /// As [`FrameSender::send`].
    pub async fn send_chunks(&mut self, chunks: &mut [Bytes]) -> Result<(), FrameError> {
        let mut taken = 0;
        while taken < chunks.len() {
            taken += poll_fn(|cx| self.poll_send_chunks(cx, &mut chunks[taken..])).await?;
        }
        Ok(())
    }

    /// Gives the stream as many bytes of encoded frames as it takes without waiting: all, or what its window
    /// has room for. Returns how many chunks were taken whole; the first one left is cut to what is left of it.
    ///
    /// Pending if it takes nothing now; then `cx` is woken when it does, or when the peer stops the stream. Only the last such waker is kept, so
    /// one task at a time may wait.
    ///
    /// # Errors
    ///
    /// As [`FrameSender::send`].
    pub fn poll_send_chunks(
        &mut self,
        cx: &mut Context<'_>,
        chunks: &mut [Bytes],
    ) -> Poll<Result<usize, FrameError>> {
        let taken = self.writer.stream_mut().poll_chunks(cx, chunks);
        taken.map_err(|error| crate::frame::io(error.into()))
    }

    /// Sends frames that are encoded already, by [`crate::frame::encode`]: many in one write.
    ///
    /// # Errors
    ///
    /// As [`FrameSender::send`].
    pub async fn send_encoded(&mut self, frames: &[u8]) -> Result<(), FrameError> {
        self.writer.send_encoded(frames).await
    }

    fn stream(&mut self) -> &mut quinn::SendStream {
        self.writer.stream_mut().stream_mut()
    }

    /// Says that nothing follows. What was sent is still delivered. Does nothing if the stream has ended.
    pub fn finish(&mut self) {
        // An error only says that it has ended already.
        drop(self.stream().finish());
    }

    /// Ends the stream at once; the peer's next read fails with `code`. Does nothing if the stream has ended.
    pub fn reset(&mut self, code: CloseCode) {
        drop(self.stream().reset(code.varint()));
    }

    /// Streams with a higher priority go first; 0 is the start value. Does nothing if the stream has ended.
    pub fn set_priority(&mut self, priority: i32) {
        drop(self.stream().set_priority(priority));
    }

    /// Waits until the peer does not want any more: how a request's handler learns that it was cancelled.
    ///
    /// The future does not borrow the sender. Cancel safe.
    pub fn stopped(&self) -> impl Future<Output = StreamEnd> + Send + 'static {
        let stopped = self.writer.stream_ref().stream().stopped();
        async move {
            match stopped.await {
                Ok(Some(code)) => StreamEnd::Stopped(code.into()),
                Ok(None) => StreamEnd::Delivered,
                Err(quinn::StoppedError::ConnectionLost(lost)) => StreamEnd::Lost(lost.into()),
                // There is no 0-RTT here.
                Err(quinn::StoppedError::ZeroRttRejected) => {
                    StreamEnd::Stopped(CloseCode::Internal)
                }
            }
        }
    }
}

/// The receiving half of a [`Stream`].
///
/// Dropping it before the end tells the peer to stop, with [`CloseCode::Done`].
#[derive(Debug)]
pub struct FrameReceiver {
    reader: FrameReader<quinn::RecvStream>,
    runtime: TransportRuntime,
}

impl FrameReceiver {
    /// The next frame; `None` if the stream ended between two frames. Cancel safe.
    ///
    /// # Errors
    ///
    /// [`FrameError`]; after [`FrameError::Invalid`] of a malformed head the next frame can be read.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<Frame<T>>, FrameError> {
        self.reader.next().await
    }

    /// As [`FrameReceiver::next`], with the head left encoded. Cancel safe.
    ///
    /// # Errors
    ///
    /// [`FrameError`].
    pub async fn next_raw(&mut self) -> Result<Option<Frame<Bytes>>, FrameError> {
        self.reader.next_raw().await
    }

    /// The next frame, of which there must be one. Cancel safe.
    ///
    /// # Errors
    ///
    /// [`FrameError`]; a stream that has ended is [`FrameError::Truncated`].
    pub async fn expect<T: DeserializeOwned>(&mut self) -> Result<Frame<T>, FrameError> {
        self.reader.expect().await
    }

    /// As [`FrameReceiver::expect`], within `limit`. For the first frame of every stream: a peer that sends a
    /// byte a second must not hold a handler for ever.
    ///
    /// # Errors
    ///
    /// [`FrameError`]; [`FrameError::TimedOut`].
    pub async fn expect_within<T: DeserializeOwned>(
        &mut self,
        limit: Duration,
    ) -> Result<Frame<T>, FrameError> {
        self.runtime
            .timeout(limit, self.reader.expect())
            .await
            .unwrap_or(Err(FrameError::TimedOut { after: limit }))
    }

    /// Whether [`FrameReceiver::next`] has an answer without reading from the stream.
    pub fn is_ready(&self) -> bool {
        self.reader.is_ready()
    }

    /// Accepts longer (or only shorter) frames from here on.
    pub fn set_limits(&mut self, limits: Limits) {
        self.reader.set_limits(limits);
    }

    /// Tells the peer to send no more, and why. Does nothing if the stream has ended.
    pub fn stop(&mut self, code: CloseCode) {
        drop(self.reader.stream_mut().stop(code.varint()));
    }
}
