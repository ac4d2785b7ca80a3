//! A link between two hosts: TLS 1.3 over TCP, the default.

use std::io::IoSlice;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use kolo_transport::ids::Rank;
use kolo_transport::{LinkLost, TlsLink};

use super::{Lane, LaneError, LinkHello, greet};
use crate::group_id::GroupId;

/// A link over one connection of [`TlsLink`].
#[derive(Debug)]
struct TlsLane(TlsLink);

/// A link to `peer` over this connection, after both sides have said [hello](greet), for which the peer has at most `limit`. Both ends
/// call it. Also returns the group that the peer named: where the link belongs, if the peer made it.
///
/// Not cancel safe: the connection is closed then.
pub(super) async fn open(
    link: TlsLink,
    own: &LinkHello,
    peer: Rank,
    limit: Duration,
) -> Result<(Box<dyn Lane>, GroupId), LaneError> {
    let mut lane = TlsLane(link);
    let group = greet(&mut lane, own, Some(peer), limit).await?.group;
    Ok((Box::new(lane), group))
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
        self.0.poll_write(cx, parts).map_err(ended)
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), LaneError>> {
        self.0.poll_flush(cx).map_err(ended)
    }

    fn is_unsent(&self) -> bool {
        self.0.is_unsent()
    }

    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut [u8],
    ) -> Poll<Result<usize, LaneError>> {
        let read = ready!(self.0.poll_read(cx, into));
        Poll::Ready(read.map_err(ended))
    }

    fn kind(&self) -> &'static str {
        "tls"
    }

    fn end_is_final(&self) -> bool {
        self.0.ended_by_peer()
    }
}
