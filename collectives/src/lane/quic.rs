//! A link between two hosts: one QUIC stream between two workers' endpoints, with mutual TLS.
//!
//! No system ends such a link in the place of a process that was killed: the control plane says that the peer is lost, or QUIC's idle
//! timeout does.

use std::io::IoSlice;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use kolo_transport::ids::Rank;
use kolo_transport::wire::span::Span;
use kolo_transport::{ByteStream, CloseCode, Connection, ConnectionLost, FrameError};

use super::{Lane, LaneError, LinkHello, greet};
use crate::group_id::GroupId;

/// How long a dropped link still tries to deliver what was sent on it.
const LINGER: Duration = Duration::from_secs(2);

/// A link over one bidirectional stream of a connection between two workers.
#[derive(Debug)]
struct QuicLane {
    /// `None` while it is dropped.
    stream: Option<ByteStream>,
    /// The peer itself ended the link: not the network.
    ended_by_peer: bool,
}

/// Makes a link to `peer` on a connection to its endpoint, which the link keeps.
pub(super) async fn dial(
    connection: &Connection,
    own: &LinkHello,
    peer: Rank,
    limit: Duration,
) -> Result<(Box<dyn Lane>, GroupId), LaneError> {
    open(connection.open_bytes(), own, peer, limit).await
}

/// Takes the link that `peer` makes on a connection that was accepted from its endpoint.
pub(super) async fn take(
    connection: &Connection,
    own: &LinkHello,
    peer: Rank,
    limit: Duration,
) -> Result<(Box<dyn Lane>, GroupId), LaneError> {
    open(connection.accept_bytes(), own, peer, limit).await
}

/// Waits for the stream and for the peer's [hello](greet), for at most `limit` each. If there is no link, the stream is reset with
/// a typed code.
async fn open(
    stream: impl Future<Output = Result<ByteStream, ConnectionLost>>,
    own: &LinkHello,
    peer: Rank,
    limit: Duration,
) -> Result<(Box<dyn Lane>, GroupId), LaneError> {
    let stream = tokio::time::timeout(limit, stream)
        .await
        .map_err(|_| LaneError::Timeout {
            reason: format!("no stream within {}", Span(limit)),
        })?
        .map_err(|error| LaneError::Ended {
            reason: error.to_string(),
        })?;
    let mut lane = QuicLane {
        stream: Some(stream),
        ended_by_peer: false,
    };
    match greet(&mut lane, own, Some(peer), limit).await {
        Ok(theirs) => Ok((Box::new(lane), theirs.group)),
        Err(error) => {
            if let Some(mut stream) = lane.stream.take() {
                stream.abort(code_of(&error));
            }
            Err(error)
        }
    }
}

/// The reason that a peer gets if its link is not made.
pub(super) fn code_of(error: &LaneError) -> CloseCode {
    match error {
        LaneError::StaleGeneration { .. } => CloseCode::StaleGeneration,
        LaneError::Refused { .. } => CloseCode::Forbidden,
        LaneError::Timeout { .. } => CloseCode::Deadline,
        _ => CloseCode::Protocol,
    }
}

impl Drop for QuicLane {
    fn drop(&mut self) {
        // The last frames of an operation that has ended here may not have reached the peer.
        if let Some(stream) = self.stream.take()
            && !self.ended_by_peer
        {
            stream.linger(LINGER);
        }
    }
}

fn ended(error: FrameError) -> LaneError {
    let reason = "the peer reset the stream".to_owned();
    match error {
        FrameError::Reset(CloseCode::StaleGeneration) => LaneError::StaleGeneration {
            theirs: None,
            reason,
        },
        FrameError::Reset(CloseCode::Forbidden) => LaneError::Refused { reason },
        other => LaneError::Ended {
            reason: other.to_string(),
        },
    }
}

impl Lane for QuicLane {
    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize, LaneError>> {
        let first = parts.iter().find(|part| !part.is_empty());
        match (first, &mut self.stream) {
            (Some(part), Some(stream)) => stream.poll_write(cx, part).map_err(ended),
            _ => Poll::Ready(Ok(0)),
        }
    }

    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut [u8],
    ) -> Poll<Result<usize, LaneError>> {
        let Some(stream) = &mut self.stream else {
            return Poll::Ready(Ok(0));
        };
        let read = ready!(stream.poll_read(cx, into));
        self.ended_by_peer = match &read {
            Ok(count) => *count == 0,
            // Not a reset: only the process that has made the connection can send one, and so it lives. It may have been
            // stopped for so long that it gave the connection up.
            Err(FrameError::Lost(lost)) => matches!(lost, ConnectionLost::Closed { .. }),
            Err(error) => matches!(error, FrameError::Reset(_)),
        };
        Poll::Ready(read.map_err(ended))
    }

    fn kind(&self) -> &'static str {
        "quic"
    }

    fn end_is_final(&self) -> bool {
        self.ended_by_peer
    }
}
