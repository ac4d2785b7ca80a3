//! What is left of a lane of which all is read.

use std::io::IoSlice;
use std::task::{Context, Poll};

use super::{Lane, LaneError};

/// In the place of a lane that has ended and is kept for what it is known of: it holds no socket.
#[derive(Debug)]
pub(crate) struct EndedLane {
    kind: &'static str,
    end_is_final: bool,
}

impl EndedLane {
    /// Of a lane whose end was read.
    pub(crate) fn of(lane: &dyn Lane) -> Self {
        Self {
            kind: lane.kind(),
            end_is_final: lane.end_is_final(),
        }
    }
}

impl Lane for EndedLane {
    fn poll_write(
        &mut self,
        _cx: &mut Context<'_>,
        _parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize, LaneError>> {
        Poll::Ready(Err(LaneError::Ended {
            reason: "it has ended before".to_owned(),
        }))
    }

    fn poll_read(
        &mut self,
        _cx: &mut Context<'_>,
        _into: &mut [u8],
    ) -> Poll<Result<usize, LaneError>> {
        Poll::Ready(Ok(0))
    }

    fn kind(&self) -> &'static str {
        self.kind
    }

    fn end_is_final(&self) -> bool {
        self.end_is_final
    }
}
