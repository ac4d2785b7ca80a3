//! A link between two hosts: one QUIC stream between two workers' endpoints, with mutual TLS.

use std::io::IoSlice;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use kolo_transport::ids::Rank;
use kolo_transport::wire::GenerationTable;
use kolo_transport::{ByteStream, CloseCode, Connection, ConnectionLost, FrameError, Identity};

use super::{Lane, LaneError, LinkHello, greet};
use crate::group::GroupId;

/// How long a dropped link still tries to deliver what was sent on it.
const LINGER: Duration = Duration::from_secs(2);

/// A link over one bidirectional stream of a connection between two workers.
#[derive(Debug)]
pub struct QuicLane {
    /// `None` while it is dropped.
    stream: Option<ByteStream>,
    /// The peer itself ended the link: not the network.
    ended_by_peer: bool,
    /// What the peer said.
    group: GroupId,
}

impl QuicLane {
    /// Makes a link to `peer` on a connection to its endpoint, which was made with
    /// [`Expect::worker`](kolo_transport::Expect::worker) of the peer's slot. The link keeps the connection.
    ///
    /// Waits for the peer's [hello](greet) for at most `limit`.
    ///
    /// # Errors
    ///
    /// [`LaneError`], of which [`LaneError::StaleGeneration`] and [`LaneError::Refused`] say that the peer is
    /// another one than expected. The stream is reset then, with a typed code.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime that has time enabled.
    pub async fn connect(
        connection: &Connection,
        hello: &LinkHello,
        peer: Rank,
        limit: Duration,
    ) -> Result<Self, LaneError> {
        let stream = tokio::time::timeout(limit, connection.open_bytes())
            .await
            .map_err(|_| late(limit))?
            .map_err(lost)?;
        Self::greeted(stream, hello, peer, limit).await
    }

    /// Takes the link that `peer` makes on a connection that was accepted from its endpoint. Who it is comes
    /// from its certificate: see [`rank_of`].
    ///
    /// # Errors
    ///
    /// As [`QuicLane::connect`].
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime that has time enabled.
    pub async fn accept(
        connection: &Connection,
        hello: &LinkHello,
        peer: Rank,
        limit: Duration,
    ) -> Result<Self, LaneError> {
        let stream = tokio::time::timeout(limit, connection.accept_bytes())
            .await
            .map_err(|_| late(limit))?
            .map_err(lost)?;
        Self::greeted(stream, hello, peer, limit).await
    }

    /// The group that the peer named in its hello: where the link belongs, if the peer made it.
    pub fn group(&self) -> GroupId {
        self.group
    }

    async fn greeted(
        stream: ByteStream,
        hello: &LinkHello,
        peer: Rank,
        limit: Duration,
    ) -> Result<Self, LaneError> {
        let mut lane = Self {
            stream: Some(stream),
            ended_by_peer: false,
            group: GroupId::WORLD,
        };
        match greet(&mut lane, hello, Some(peer), limit).await {
            Ok(theirs) => {
                lane.group = theirs.group;
                Ok(lane)
            }
            Err(error) => {
                let code = match &error {
                    LaneError::StaleGeneration { .. } => CloseCode::StaleGeneration,
                    LaneError::Refused { .. } => CloseCode::Forbidden,
                    LaneError::Timeout { .. } => CloseCode::Deadline,
                    _ => CloseCode::Protocol,
                };
                if let Some(mut stream) = lane.stream.take() {
                    stream.abort(code);
                }
                Err(error)
            }
        }
    }
}

/// The rank of an authenticated worker, by the slot in its certificate.
///
/// # Errors
///
/// [`LaneError::Refused`] if it is no worker of this table's job, or in none of its slots.
pub fn rank_of(peer: &Identity, table: &GenerationTable) -> Result<Rank, LaneError> {
    let refused = |reason: String| LaneError::Refused { reason };
    let (job, slot) = peer
        .worker()
        .ok_or_else(|| refused(format!("{peer} is no worker")))?;
    if job != table.job {
        return Err(refused(format!("{peer} is not of {}", table.job)));
    }
    table
        .members
        .iter()
        .find(|member| member.slot == slot)
        .map(|member| member.rank)
        .ok_or_else(|| refused(format!("{peer} is not in generation {}", table.generation)))
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

fn lost(error: ConnectionLost) -> LaneError {
    LaneError::Ended {
        reason: error.to_string(),
    }
}

fn late(limit: Duration) -> LaneError {
    LaneError::Timeout {
        reason: format!("no stream within {} s", limit.as_secs_f64()),
    }
}

fn ended(error: FrameError) -> LaneError {
    match error {
        FrameError::Reset(CloseCode::StaleGeneration) => LaneError::StaleGeneration {
            theirs: None,
            reason: "the peer reset the stream".to_owned(),
        },
        FrameError::Reset(CloseCode::Forbidden) => LaneError::Refused {
            reason: "the peer reset the stream".to_owned(),
        },
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

    fn departures(&self) -> Option<u64> {
        self.stream.as_ref().map(ByteStream::departures)
    }

    fn ends_late(&self) -> bool {
        true
    }
}
