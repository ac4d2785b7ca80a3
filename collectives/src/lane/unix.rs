//! A link between two processes of one host.

use std::io::{self, IoSlice};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use kolo_transport::ids::Rank;
use tokio::net::UnixStream;

use super::{Lane, LaneError, LinkHello, greet, stream};

/// A link over a connected Unix stream socket, such as one end of a socket pair that a node daemon made.
#[derive(Debug)]
pub struct UnixLane {
    stream: UnixStream,
}

impl UnixLane {
    /// A link over this socket, which is made non-blocking. Says no hello: see [`UnixLane::open`].
    ///
    /// # Errors
    ///
    /// What the system says, if the socket can't be registered.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime that has I/O enabled. The lane works as long as that runtime runs.
    pub fn from_std(stream: StdUnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream: UnixStream::from_std(stream)?,
        })
    }

    /// A link over this socket to `peer`, after both sides have said [hello](greet). Both ends call it.
    ///
    /// Not cancel safe: the socket is closed then.
    ///
    /// # Errors
    ///
    /// [`LaneError`], of which [`LaneError::StaleGeneration`] and [`LaneError::Refused`] say that the peer is
    /// another one than expected, and [`LaneError::Timeout`] that it said nothing for `limit`.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime that has I/O and time enabled.
    pub async fn open(
        stream: StdUnixStream,
        hello: &LinkHello,
        peer: Rank,
        limit: Duration,
    ) -> Result<Self, LaneError> {
        let mut lane = Self::from_std(stream).map_err(|error| LaneError::Unreachable {
            reason: format!("the socket to rank {peer} can't be used: {error}"),
        })?;
        greet(&mut lane, hello, Some(peer), limit).await?;
        Ok(lane)
    }
}

impl Lane for UnixLane {
    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize, LaneError>> {
        stream::poll_write(Pin::new(&mut self.stream), cx, parts)
    }

    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut [u8],
    ) -> Poll<Result<usize, LaneError>> {
        stream::poll_read(Pin::new(&mut self.stream), cx, into)
    }

    fn kind(&self) -> &'static str {
        "unix"
    }

    // The other end is closed when the peer's process is gone, or its communicator.
    fn end_is_final(&self) -> bool {
        true
    }
}
