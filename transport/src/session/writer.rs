//! The sending half of a QUIC stream.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};

use bytes::Bytes;
use quinn::{StoppedError, VarInt, WriteError};
use tokio::io::AsyncWrite;

type Stopped = dyn Future<Output = Result<Option<VarInt>, StoppedError>> + Send + Sync;

/// A stream to write to. A write that waits for room also hears that the peer stops the stream.
///
/// quinn-proto 0.11 wakes for that only a writer that waits already. A writer may begin to wait a moment later, with the stream's
/// window and the connection's (or its buffer for sending) full. That writer is never woken: a stopped stream gets no more room.
pub(super) struct Writer {
    stream: quinn::SendStream,
    /// Since the first write that had no room.
    stopped: Option<Pin<Box<Stopped>>>,
}

impl Writer {
    pub(super) fn new(stream: quinn::SendStream) -> Self {
        Self {
            stream,
            stopped: None,
        }
    }

    pub(super) fn stream(&self) -> &quinn::SendStream {
        &self.stream
    }

    pub(super) fn stream_mut(&mut self) -> &mut quinn::SendStream {
        &mut self.stream
    }

    /// Gives the stream what it has room for. Returns how many chunks were taken whole; the first one left is cut to what is left
    /// of it.
    pub(super) fn poll_chunks(
        &mut self,
        cx: &mut Context<'_>,
        chunks: &mut [Bytes],
    ) -> Poll<Result<usize, WriteError>> {
        // The future keeps nothing that it has not told, so that it may be dropped.
        let written = pin!(self.stream.write_chunks(chunks)).poll(cx);
        let written = written.map_ok(|written| written.chunks);
        self.unless_stopped(cx, written)
    }

    /// What a write came to; if it waits, also for the end of the stream.
    fn unless_stopped<R>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<Result<R, WriteError>>,
    ) -> Poll<Result<R, WriteError>> {
        if written.is_ready() {
            return written;
        }
        let stream = &self.stream;
        let stopped = self
            .stopped
            .get_or_insert_with(|| Box::pin(stream.stopped()));
        let Poll::Ready(end) = stopped.as_mut().poll(cx) else {
            return Poll::Pending;
        };
        self.stopped = None;
        Poll::Ready(Err(match end {
            Ok(Some(code)) => WriteError::Stopped(code),
            Ok(None) => WriteError::ClosedStream,
            Err(error) => error.into(),
        }))
    }
}

impl AsyncWrite for Writer {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buffer);
        self.unless_stopped(cx, written).map_err(io::Error::from)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        AsyncWrite::poll_flush(Pin::new(&mut self.stream), cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        AsyncWrite::poll_shutdown(Pin::new(&mut self.stream), cx)
    }
}

impl fmt::Debug for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.stream.fmt(f)
    }
}
