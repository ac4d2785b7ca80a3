//! A link inside one process.

use std::io::IoSlice;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{DuplexStream, duplex};

use super::{Lane, LaneError, stream};

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

impl Lane for MemoryLane {
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
        "memory"
    }

    fn end_is_final(&self) -> bool {
        true
    }
}
