//! Links between two ranks.
//!
//! A [`Lane`] is a connected, ordered, reliable link to one peer that carries bytes both ways. It is polled,
//! so that one thread can drive many lanes and both directions without a task or an allocation for each
//! message, and so that two ranks which send to each other at once can't block each other.

mod hello;
mod memory;
mod network;
mod quic;
mod stream;
mod tls;
mod unix;

use std::fmt;
use std::future::Future;
use std::io::IoSlice;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::task::{Context, Poll};

use kolo_transport::ids::Rank;

use crate::group::GroupId;

pub use hello::{LinkHello, greet};
pub use memory::MemoryLane;
pub use network::{LaneChoice, NetworkLanes, ParseLaneChoiceError, accept_quic, accept_tls};
pub use quic::{QuicLane, rank_of};
pub use tls::TlsLane;
pub use unix::UnixLane;

/// Why a link can't be used (any further).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaneError {
    /// The peer closed the link or its process is gone.
    #[error("the link ended: {reason}")]
    Ended {
        /// What the lane saw.
        reason: String,
    },
    /// The peer is not there, or there is no way to it.
    #[error("{reason}")]
    Unreachable {
        /// Why not.
        reason: String,
    },
    /// The peer belongs to another generation (G-1). Wait for this rank's own new table.
    #[error("the link is of another generation: {reason}")]
    StaleGeneration {
        /// Both generations.
        reason: String,
    },
    /// The peer is not who it should be, or is of another job.
    #[error("the link was refused: {reason}")]
    Refused {
        /// What differs.
        reason: String,
    },
    /// What came is not of this protocol.
    #[error("the link broke the protocol: {reason}")]
    Protocol {
        /// What came.
        reason: String,
    },
    /// It took too long.
    #[error("the link was not ready in time: {reason}")]
    Timeout {
        /// What was waited for.
        reason: String,
    },
}

/// A connected link to one peer.
///
/// Contract: bytes come out at the other end in the order in which they were written, all of them, or the
/// link ends. What was accepted by [`Lane::poll_write`] is on its way when [`Lane::poll_flush`] says so, and needs
/// no further call from then on. A lane holds a bounded amount of unread bytes and then returns `Pending` from writes until the peer reads.
pub trait Lane: Send + fmt::Debug {
    /// Takes some of the bytes, from the first part on, and says how many (never 0 if there are any).
    ///
    /// # Errors
    ///
    /// [`LaneError::Ended`] when nothing can be written any more. There may still be bytes to read.
    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize, LaneError>>;

    /// Ready when what was accepted by [`Lane::poll_write`] needs no further call to be sent. Most lanes accept nothing else.
    ///
    /// # Errors
    ///
    /// As [`Lane::poll_write`].
    fn poll_flush(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), LaneError>> {
        Poll::Ready(Ok(()))
    }

    /// Whether [`Lane::poll_flush`] has something to do.
    fn is_unsent(&self) -> bool {
        false
    }

    /// Fills some of `into`, which is not empty, and says how much. 0 means that the peer has ended the link.
    ///
    /// # Errors
    ///
    /// [`LaneError::Ended`] when the link broke.
    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut [u8],
    ) -> Poll<Result<usize, LaneError>>;

    /// As [`Lane::poll_write`] of one part, with a descriptor beside its first byte.
    ///
    /// # Errors
    ///
    /// [`LaneError::Ended`] as [`Lane::poll_write`]; [`LaneError::Unreachable`] from lanes that can't.
    fn poll_write_with(
        &mut self,
        _cx: &mut Context<'_>,
        _bytes: &[u8],
        _descriptor: BorrowedFd<'_>,
    ) -> Poll<Result<usize, LaneError>> {
        Poll::Ready(Err(LaneError::Unreachable {
            reason: format!("a {} link carries no descriptors", self.kind()),
        }))
    }

    /// The last descriptor that came beside bytes that were read, if it was not taken yet.
    fn take_descriptor(&mut self) -> Option<OwnedFd> {
        None
    }

    /// The kind, for logs: `memory`, `unix`, `quic`, `tls`.
    fn kind(&self) -> &'static str;

    /// Whether the end of this link, which a read has just reported, means that the peer is gone for good. A
    /// link through a network may break while both sides live, and may be made again.
    fn end_is_final(&self) -> bool {
        false
    }
}

/// What [`Connector::connect`] returns.
pub type Connecting = Pin<Box<dyn Future<Output = Result<Box<dyn Lane>, LaneError>> + Send>>;

/// How a communicator reaches its peers.
///
/// There is one link for each pair of ranks that need one. The **higher** rank of the pair makes it, through
/// its connector, at first use. The **lower** rank gets its end by [`Acceptor::accept`](crate::Acceptor::accept),
/// from whoever listens there.
pub trait Connector: Send + Sync + fmt::Debug {
    /// Makes a link to `peer`, whose rank is lower than this one's. The returned lane has said
    /// [hello](greet). Runs as a task on the communicator's runtime handle; it must end by itself, with an
    /// error if nothing else. It may be called again for the same peer after a failure.
    fn connect(&self, peer: Rank) -> Connecting;

    /// As [`Connector::connect`], a link of its own for a [group](crate::Communicator::group). Ranks are those of the job
    /// here too. The hello names the group ([`LinkHello::of_group`]), and the other side hands the lane in by
    /// [`Acceptor::accept_group`](crate::Acceptor::accept_group).
    ///
    /// Without it there are no groups: this method refuses.
    fn connect_group(&self, peer: Rank, group: GroupId) -> Connecting {
        let refused = LaneError::Unreachable {
            reason: format!(
                "this connector makes no links for groups, such as {group} with rank {peer}"
            ),
        };
        Box::pin(std::future::ready(Err(refused)))
    }

    /// Whether all these ranks of the job run on this host, so that they can share memory: then each has a link to each
    /// other one, and the lowest passes a descriptor over its links. All ranks say the same; where one can't, all do
    /// without. Asked once for each group, before its first operation; the future runs as a task on the communicator's
    /// runtime handle. `None` (the default) means no.
    fn is_one_host(&self, _ranks: &[Rank]) -> Option<OneHost> {
        None
    }
}

/// What [`Connector::is_one_host`] returns.
pub type OneHost = Pin<Box<dyn Future<Output = bool> + Send>>;
