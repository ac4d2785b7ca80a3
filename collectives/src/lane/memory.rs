//! A link inside one process.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead as _, AsyncWrite as _, DuplexStream, ReadBuf, duplex};

use super::{Lane, LaneError};

/// A link between two communicators of one process: what [`local_group`](crate::local_group) uses.
///
/// Needs no runtime. It holds at most its capacity of unread bytes in each direction.
#[derive(Debug)]
pub struct MemoryLane {
    stream: DuplexStream,
}

impl MemoryLane {
    /// Unread bytes that [`local_group`](crate::local_group)'s links hold in each direction: 256 KiB.
    pub const CAPACITY: usize = 256 << 10;

    /// The two ends of a link that holds up to `capacity` unread bytes (at least 1) in each direction.
    #[must_use]
    pub fn pair(capacity: usize) -> (Self, Self) {
        let (a, b) = duplex(capacity.max(1));
        (Self { stream: a }, Self { stream: b })
    }
}

fn ended(error: &io::Error) -> LaneError {
    LaneError::Ended {
        reason: error.to_string(),
    }
}

impl Lane for MemoryLane {
    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize, LaneError>> {
        match ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, parts)) {
            Ok(0) => Poll::Ready(Err(LaneError::Ended {
                reason: "nothing can be written any more".to_owned(),
            })),
            written => Poll::Ready(written.map_err(|error| ended(&error))),
        }
    }

    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut [u8],
    ) -> Poll<Result<usize, LaneError>> {
        let mut buffer = ReadBuf::new(into);
        let read = ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buffer));
        Poll::Ready(match read {
            Ok(()) => Ok(buffer.filled().len()),
            Err(error) => Err(ended(&error)),
        })
    }

    fn kind(&self) -> &'static str {
        "memory"
    }

    fn end_is_final(&self) -> bool {
        true
    }
}
