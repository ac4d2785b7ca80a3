//! What lanes over tokio's byte streams share.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::LaneError;

pub(super) fn poll_write<S: AsyncWrite>(
    stream: Pin<&mut S>,
    cx: &mut Context<'_>,
    parts: &[IoSlice<'_>],
) -> Poll<Result<usize, LaneError>> {
    match ready!(stream.poll_write_vectored(cx, parts)) {
        Ok(0) => Poll::Ready(Err(LaneError::Ended {
            reason: "nothing can be written any more".to_owned(),
        })),
        Ok(count) => Poll::Ready(Ok(count)),
        Err(error) => Poll::Ready(Err(ended(&error))),
    }
}

pub(super) fn poll_read<S: AsyncRead>(
    stream: Pin<&mut S>,
    cx: &mut Context<'_>,
    into: &mut [u8],
) -> Poll<Result<usize, LaneError>> {
    let mut buffer = ReadBuf::new(into);
    match ready!(stream.poll_read(cx, &mut buffer)) {
        Ok(()) => Poll::Ready(Ok(buffer.filled().len())),
        Err(error) => Poll::Ready(Err(ended(&error))),
    }
}

fn ended(error: &io::Error) -> LaneError {
    LaneError::Ended {
        reason: error.to_string(),
    }
}
