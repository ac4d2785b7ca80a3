//! One bidirectional stream of plain bytes.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::AsyncWrite as _;

use super::writer::Writer;
use crate::end::CloseCode;
use crate::frame::{FrameError, io};
use crate::runtime::TransportRuntime;

/// A bidirectional stream without frames, for a data plane that has its own. It is polled, so that one task can
/// drive many streams in both directions.
///
/// Dropping it ends the sending side as [`ByteStream::finish`] does, and tells the peer to stop. See
/// [`ByteStream::linger`] for an end that loses nothing.
#[derive(Debug)]
pub struct ByteStream {
    send: Writer,
    recv: quinn::RecvStream,
    /// Keeps the runtime alive as long as the stream is used.
    runtime: TransportRuntime,
}

impl ByteStream {
    pub(crate) fn new(
        (send, recv): (quinn::SendStream, quinn::RecvStream),
        runtime: &TransportRuntime,
    ) -> Self {
        Self {
            send: Writer::new(send),
            recv,
            runtime: runtime.clone(),
        }
    }

    /// Takes some of `bytes` and says how many; not 0 unless `bytes` is empty. What was taken is delivered
    /// without a further call. Pending while the peer does not read; the last waker is woken.
    ///
    /// # Errors
    ///
    /// [`FrameError::Reset`] if the peer stopped the stream, [`FrameError::Lost`], [`FrameError::Io`].
    pub fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize, FrameError>> {
        let written = Pin::new(&mut self.send).poll_write(cx, bytes);
        written.map_err(io)
    }

    /// Fills some of `into` and says how much; 0 at the end of the stream. The last waker is woken.
    ///
    /// # Errors
    ///
    /// [`FrameError::Reset`] if the peer reset the stream, [`FrameError::Lost`], [`FrameError::Io`].
    pub fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut [u8],
    ) -> Poll<Result<usize, FrameError>> {
        self.recv
            .poll_read(cx, into)
            .map_err(|error| io(error.into()))
    }

    /// Says that nothing follows. What was sent is still delivered. Does nothing if the stream has ended.
    pub fn finish(&mut self) {
        // An error only says that it has ended already.
        drop(self.send.stream_mut().finish());
    }

    /// Lets go of the stream in the background, once the peer has all that was sent, or after `limit`. Dropping it
    /// together with its connection loses what is still on its way.
    pub fn linger(mut self, limit: Duration) {
        self.finish();
        let runtime = self.runtime.clone();
        let waiting = runtime.clone();
        runtime.handle().spawn(async move {
            // How it ended does not matter: it is over.
            drop(waiting.timeout(limit, self.send.stream().stopped()).await);
        });
    }

    /// Ends both directions at once. The peer sees `code`; what it has not read yet may be lost.
    pub fn abort(&mut self, code: CloseCode) {
        drop(self.send.stream_mut().reset(code.varint()));
        drop(self.recv.stop(code.varint()));
    }
}
