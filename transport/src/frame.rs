//! [Frames](kolo_wire::frame) on a stream.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
pub use kolo_wire::frame::{
    Decoder, Frame, InvalidFrame, Limits, PREFIX, decode_head, encode, encode_head,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::end::{CloseCode, ConnectionLost};
use crate::wire::span::Span;

/// A body up to so many bytes is copied behind its head, to write both at once.
const SMALL_BODY: usize = 64 * 1024;

/// Why no frame came or went.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The frame itself is wrong.
    #[error(transparent)]
    Invalid(#[from] InvalidFrame),
    /// The stream ended inside a frame.
    #[error("the stream ended after {got} bytes of a frame")]
    Truncated {
        /// Bytes of the frame that had come.
        got: usize,
    },
    /// The stream failed: the process at the other end of a socket is gone.
    #[error("the stream failed: {0}")]
    Io(String),
    /// The peer reset the stream, or does not read it any more.
    #[error("the peer ended the stream: {0}")]
    Reset(CloseCode),
    /// The connection ended.
    #[error(transparent)]
    Lost(#[from] ConnectionLost),
    /// The frame did not come in time.
    #[error("no whole frame came within {}", Span(*after))]
    TimedOut {
        /// The deadline.
        after: Duration,
    },
}

/// Frames from a stream.
#[derive(Debug)]
pub struct FrameReader<R> {
    stream: R,
    decoder: Decoder,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    /// Reads frames up to `limits` from `stream`.
    pub fn new(stream: R, limits: Limits) -> Self {
        Self {
            stream,
            decoder: Decoder::new(limits),
        }
    }

    /// Accepts longer (or only shorter) frames from here on.
    pub fn set_limits(&mut self, limits: Limits) {
        self.decoder.set_limits(limits);
    }

    /// Whether [`FrameReader::next`] has an answer without reading from the stream.
    pub fn is_ready(&self) -> bool {
        self.decoder.is_ready()
    }

    /// The next frame; `None` if the stream ended between two frames.
    ///
    /// Cancel safe: bytes that were read are kept for the next call.
    ///
    /// # Errors
    ///
    /// [`FrameError`]; after [`InvalidFrame::Malformed`] the next frame can be read.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<Frame<T>>, FrameError> {
        loop {
            if let Some(frame) = self.decoder.next()? {
                return Ok(Some(frame));
            }
            if !self.fill().await? {
                return Ok(None);
            }
        }
    }

    /// As [`FrameReader::next`], with the head left encoded.
    ///
    /// # Errors
    ///
    /// [`FrameError`].
    pub async fn next_raw(&mut self) -> Result<Option<Frame<Bytes>>, FrameError> {
        loop {
            if let Some(frame) = self.decoder.next_raw()? {
                return Ok(Some(frame));
            }
            if !self.fill().await? {
                return Ok(None);
            }
        }
    }

    /// The next frame, of which there must be one.
    ///
    /// # Errors
    ///
    /// [`FrameError`]; a stream that has ended is [`FrameError::Truncated`].
    pub async fn expect<T: DeserializeOwned>(&mut self) -> Result<Frame<T>, FrameError> {
        self.next().await?.ok_or(FrameError::Truncated { got: 0 })
    }

    async fn fill(&mut self) -> Result<bool, FrameError> {
        let buffer = self.decoder.buffer();
        match self.stream.read_buf(buffer).await {
            Ok(0) if buffer.is_empty() => Ok(false),
            Ok(0) => Err(FrameError::Truncated { got: buffer.len() }),
            Ok(_) => Ok(true),
            Err(error) => Err(io(error)),
        }
    }

    /// The stream, for instance to stop it.
    pub fn stream_mut(&mut self) -> &mut R {
        &mut self.stream
    }
}

/// Frames to a stream.
#[derive(Debug)]
pub struct FrameWriter<W> {
    stream: W,
    scratch: BytesMut,
}

impl<W: AsyncWrite + Unpin> FrameWriter<W> {
    /// Writes frames to `stream`.
    pub fn new(stream: W) -> Self {
        Self {
            stream,
            scratch: BytesMut::new(),
        }
    }

    /// Writes one frame.
    ///
    /// Not cancel safe: a frame that is dropped half-way leaves the stream out of step.
    ///
    /// # Errors
    ///
    /// [`FrameError::Io`] if the stream is gone, [`InvalidFrame::Encode`].
    pub async fn send<T: Serialize>(&mut self, head: &T, body: &[u8]) -> Result<(), FrameError> {
        self.scratch.clear();
        encode_head(&mut self.scratch, head, body.len())?;
        // One write for what is small; a large body is not copied.
        if body.len() <= SMALL_BODY {
            self.scratch.extend_from_slice(body);
            self.write_scratch().await
        } else {
            self.write_scratch().await?;
            self.stream.write_all(body).await.map_err(io)?;
            self.stream.flush().await.map_err(io)
        }
    }

    /// Writes frames that are encoded already.
    ///
    /// # Errors
    ///
    /// [`FrameError::Io`].
    pub async fn send_encoded(&mut self, frames: &[u8]) -> Result<(), FrameError> {
        self.stream.write_all(frames).await.map_err(io)?;
        self.stream.flush().await.map_err(io)
    }

    async fn write_scratch(&mut self) -> Result<(), FrameError> {
        self.stream.write_all(&self.scratch).await.map_err(io)?;
        self.stream.flush().await.map_err(io)
    }

    /// The stream, for instance to finish or reset it.
    pub fn stream_mut(&mut self) -> &mut W {
        &mut self.stream
    }

    /// The stream, to look at it.
    pub fn stream_ref(&self) -> &W {
        &self.stream
    }
}

pub(crate) fn io(error: std::io::Error) -> FrameError {
    classify(&error).unwrap_or_else(|| FrameError::Io(error.to_string()))
}

/// The typed reason behind an error of a QUIC stream, if it is one.
fn classify(error: &std::io::Error) -> Option<FrameError> {
    let source = error.get_ref()?;
    if let Some(read) = source.downcast_ref::<quinn::ReadError>() {
        return Some(match read {
            quinn::ReadError::Reset(code) => FrameError::Reset((*code).into()),
            quinn::ReadError::ConnectionLost(lost) => FrameError::Lost(lost.clone().into()),
            other => FrameError::Io(other.to_string()),
        });
    }
    let write = source.downcast_ref::<quinn::WriteError>()?;
    Some(match write {
        quinn::WriteError::Stopped(code) => FrameError::Reset((*code).into()),
        quinn::WriteError::ConnectionLost(lost) => FrameError::Lost(lost.clone().into()),
        other => FrameError::Io(other.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::SubmitFrame;

    #[tokio::test]
    async fn a_stream_that_ends_inside_a_frame_says_so() {
        let mut bytes = BytesMut::new();
        encode(&mut bytes, &SubmitFrame::Stop, b"body").unwrap();
        let mut reader = FrameReader::new(&bytes[..bytes.len() - 1], Limits::CALLS);
        let error = reader.next::<SubmitFrame>().await.unwrap_err();
        assert_eq!(
            error,
            FrameError::Truncated {
                got: bytes.len() - 1
            }
        );
        let mut reader = FrameReader::new(&bytes[..], Limits::CALLS);
        assert!(reader.next::<SubmitFrame>().await.unwrap().is_some());
        assert!(reader.next::<SubmitFrame>().await.unwrap().is_none());
    }
}
