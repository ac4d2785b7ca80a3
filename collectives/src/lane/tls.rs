//! A link between two hosts: TLS 1.3 over TCP, for much data on paths with small packets.

use std::io::IoSlice;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use kolo_transport::ids::Rank;
use kolo_transport::{LinkLost, TlsLink};

use super::{Lane, LaneError, LinkHello, greet};
use crate::group::GroupId;

/// A link over one connection of [`TlsLink`].
#[derive(Debug)]
pub struct TlsLane {
    link: TlsLink,
    /// What the peer said.
    group: GroupId,
}

impl TlsLane {
    /// A link to `peer` over this connection, after both sides have said [hello](greet), for which the peer has at most `limit`.
    /// Both ends call it. The one that accepted the connection takes the peer's rank from its certificate: see
    /// [`rank_of`](super::rank_of).
    ///
    /// Not cancel safe: the connection is closed then.
    ///
    /// # Errors
    ///
    /// [`LaneError`], of which [`LaneError::StaleGeneration`] and [`LaneError::Refused`] say that the peer is
    /// another one than expected, or does not take this side.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime that has time enabled.
    pub async fn open(
        link: TlsLink,
        hello: &LinkHello,
        peer: Rank,
        limit: Duration,
    ) -> Result<Self, LaneError> {
        let mut lane = Self {
            link,
            group: GroupId::WORLD,
        };
        lane.group = greet(&mut lane, hello, Some(peer), limit).await?.group;
        Ok(lane)
    }

    /// The group that the peer named in its hello: where the link belongs, if the peer made it.
    pub fn group(&self) -> GroupId {
        self.group
    }
}

fn ended(error: LinkLost) -> LaneError {
    match error {
        LinkLost::Refused { reason } => LaneError::Refused {
            reason: format!("the peer said {reason}"),
        },
        LinkLost::Tampered { .. } => LaneError::Protocol {
            reason: error.to_string(),
        },
        _ => LaneError::Ended {
            reason: error.to_string(),
        },
    }
}

impl Lane for TlsLane {
    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize, LaneError>> {
        self.link.poll_write(cx, parts).map_err(ended)
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), LaneError>> {
        self.link.poll_flush(cx).map_err(ended)
    }

    fn is_unsent(&self) -> bool {
        self.link.is_unsent()
    }

    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut [u8],
    ) -> Poll<Result<usize, LaneError>> {
        let read = ready!(self.link.poll_read(cx, into));
        Poll::Ready(read.map_err(ended))
    }

    fn kind(&self) -> &'static str {
        "tls"
    }

    fn end_is_final(&self) -> bool {
        self.link.ended_by_peer()
    }

    fn is_leaving(&self) -> bool {
        self.link.is_leaving()
    }
}
