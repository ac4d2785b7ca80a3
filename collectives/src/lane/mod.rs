//! Links between two ranks.
//!
//! A [`Lane`] is a connected, ordered, reliable link to one peer that carries bytes both ways. It is polled,
//! so that one thread can drive many lanes and both directions without a task or an allocation for each
//! message, and so that two ranks which send to each other at once can't block each other.

mod bell;
mod door;
mod ended;
mod hello;
mod memory;
mod passing;
mod quic;
mod ring;
mod tls;
mod unix;

use std::fmt;
use std::future::Future;
use std::io::IoSlice;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use kolo_transport::ids::{Generation, Rank};

use crate::group_id::GroupId;

pub use door::{Door, Incoming, LaneChoice, ParseLaneChoiceError, Take, Terms, rank_of};
pub(crate) use ended::EndedLane;
pub use hello::{LinkHello, greet};
pub use memory::MemoryLane;
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
        /// The peer's, if it has said so. If it is lower than this rank's, the peer may come after yet.
        theirs: Option<Generation>,
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

impl LaneError {
    /// Whether the peer is there, but in a generation before this rank's: the peer has yet to hear of a loss, and is waited for.
    pub(crate) fn is_behind(&self, own: &LinkHello) -> bool {
        matches!(self, Self::StaleGeneration { theirs: Some(theirs), .. } if *theirs < own.generation)
    }

    /// Whether there is no peer, be it that the peer is not there yet.
    pub(crate) fn says_nobody_is_there(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Ended { .. })
    }
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

    /// The kind, for logs: `memory`, `unix`, `shm-ring`, `quic`, `tls`.
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
///
/// Who the peer is must be known before a lane is handed in: on one host a socket that only this user can reach says enough,
/// between hosts there are certificates.
///
/// Workers of a job have one ready. A program that has other ways to its ranks writes its own, here over sockets that both sides
/// have from a common parent:
///
/// ```
/// use std::collections::HashMap;
/// use std::os::unix::net::UnixStream;
/// use std::sync::{Arc, Mutex};
/// use std::time::Duration;
///
/// use kolo_collectives::lane::{Connecting, UnixLane};
/// use kolo_collectives::{Communicator, Connector, Generation, JobId, Lane, LaneError, LinkHello, Rank, ReduceOp};
///
/// const LIMIT: Duration = Duration::from_secs(20);
///
/// #[derive(Debug)]
/// struct Sockets {
///     own: LinkHello,
///     to_lower: Mutex<HashMap<Rank, UnixStream>>,
/// }
///
/// impl Connector for Sockets {
///     fn connect(&self, peer: Rank) -> Connecting {
///         let (own, socket) = (self.own, self.to_lower.lock().unwrap().remove(&peer));
///         Box::pin(async move {
///             let unreachable = || LaneError::Unreachable { reason: format!("no socket to rank {peer} is left") };
///             let lane = UnixLane::open(socket.ok_or_else(unreachable)?, &own, peer, LIMIT).await?;
///             Ok(Box::new(lane) as Box<dyn Lane>)
///         })
///     }
/// }
///
/// let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
/// let (mine, theirs) = UnixStream::pair()?;
/// let comm = |rank, to_lower| {
///     let (job, generation, rank) = (JobId(1), Generation(1), Rank(rank));
///     let to_lower = Mutex::new(HashMap::from_iter(to_lower));
///     let connector = Arc::new(Sockets { own: LinkHello::new(job, generation, rank), to_lower });
///     Communicator::new(rank, 2, generation, job, connector, runtime.handle().clone())
/// };
/// let (zero, one) = (comm(0, None)?, comm(1, Some((Rank(0), theirs)))?);
/// // The lower rank gets its end from whoever has it.
/// let (own, acceptor) = (zero.hello(), zero.acceptor());
/// runtime.spawn(async move {
///     let lane = UnixLane::open(mine, &own, Rank(1), LIMIT).await?;
///     acceptor.accept_group(lane.group(), Rank(1), Box::new(lane))
/// });
/// std::thread::scope(|scope| {
///     for comm in [&zero, &one] {
///         scope.spawn(|| assert_eq!(comm.all_gather(&[comm.rank().0]), Ok(vec![0, 1])));
///     }
/// });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Connector: Send + Sync + fmt::Debug {
    /// Makes a link to `peer`, whose rank is lower than this one's. The returned lane has said
    /// [hello](greet). Runs as a task on the communicator's runtime handle; it must end by itself, with an
    /// error if nothing else. What is to be done is done there and not in this call, which may come under a lock. An error ends the operation that needs the link, so a peer that may only not be there yet is
    /// worth waiting for here. It may be called again for the same peer after a failure, but for one that says that nobody is there
    /// (as in [`Connector::request`]), if there was a link before.
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

    /// Asks `peer`, whose rank is higher than this one's, to make its link to this rank in a group: an operation of this rank
    /// waits for it, and the peer, which does something else, is to say what. The peer's side hands the request in by
    /// [`Acceptor::requested`](crate::Acceptor::requested). One attempt is enough; it is repeated while the operation waits.
    /// The future runs as a task on the communicator's runtime handle. An error that says that nobody is there
    /// ([`LaneError::Unreachable`], [`LaneError::Ended`]) is taken as the end of the peer if there was a link to it before.
    ///
    /// `None` (the default) means that there is no way to do that: then less is known of ranks that have never had a link to
    /// this one.
    fn request(&self, _peer: Rank, _group: GroupId) -> Option<Requesting> {
        None
    }

    /// How long after the end of a link the word of the authority may take to come: of whoever watches the processes of the
    /// ranks, and says by [`Communicator::rank_lost`](crate::Communicator::rank_lost) or
    /// [`Communicator::revoke`](crate::Communicator::revoke) why they end. Until then the end of a link is a suspicion, and ends no operation.
    ///
    /// Zero (the default) means that nobody watches them: the end of a link is the only word there is. More than an hour counts as an hour.
    fn word_within(&self) -> Duration {
        Duration::ZERO
    }

    /// Whether all these ranks of the job run on this host, so that they can share memory: then each has a link to each
    /// other one, and the lowest passes a descriptor over its links. All ranks say the same; where one can't, all do
    /// without. Asked once for each group, before its first operation; the future runs as a task on the communicator's
    /// runtime handle. `None` (the default) means no.
    fn is_one_host(&self, _ranks: &[Rank]) -> Option<OneHost> {
        None
    }
}

/// What [`Connector::request`] returns.
pub type Requesting = Pin<Box<dyn Future<Output = Result<(), LaneError>> + Send>>;

/// What [`Connector::is_one_host`] returns.
pub type OneHost = Pin<Box<dyn Future<Output = bool> + Send>>;
