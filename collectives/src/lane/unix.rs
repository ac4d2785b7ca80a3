//! A link between two processes of one host.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use kolo_transport::direct::Socket;
use kolo_transport::ids::Rank;
use tokio::runtime::Handle;

use super::ring::RingEnd;
use super::{Lane, LaneError, LinkHello, greet, passing};
use crate::group::GroupId;
use crate::shm::rings::{Direction, Rings};

/// What the two sides say about rings, in one byte each.
const RINGS: u8 = b'r';
const SOCKET: u8 = b's';

/// A link over a connected Unix stream socket, such as one end of a socket pair that a node daemon made.
///
/// The side with the lower rank makes two rings of bytes in shared memory, one for each direction, and passes the memory over
/// the socket while both [greet] each other. From then on the data goes through the rings, and the socket only wakes who
/// sleeps. If one side makes none, can't map it, or [does without](UnixLane::without_rings), the socket carries all.
#[derive(Debug)]
pub struct UnixLane {
    stream: Socket,
    /// The last descriptor that came.
    received: Option<OwnedFd>,
    /// What the peer said.
    group: GroupId,
    way: Way,
}

/// How the data go.
#[derive(Debug)]
enum Way {
    /// Over the socket. `may` be changed when the sides greet each other.
    Socket {
        may: bool,
    },
    /// These are offered, with this descriptor until it is sent.
    Offered(Rings, Option<OwnedFd>),
    /// The answer to an offer is to be sent; what was offered is used if that was possible.
    Answering(Option<Rings>),
    Rings(Box<RingEnd>),
}

impl UnixLane {
    /// A link over this socket, which is made non-blocking. Says no hello: see [`UnixLane::open`].
    ///
    /// # Errors
    ///
    /// What the system says, if the socket can't be registered.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime that has I/O enabled. The lane works as long as that runtime runs.
    pub fn from_std(stream: StdUnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream: Socket::new(stream.into(), Handle::current()),
            received: None,
            group: GroupId::WORLD,
            way: Way::Socket { may: true },
        })
    }

    /// A link over this socket to `peer`, after both sides have said [hello](greet). Both ends call it.
    ///
    /// Not cancel safe: the socket is closed then.
    ///
    /// # Errors
    ///
    /// [`LaneError`], of which [`LaneError::StaleGeneration`] and [`LaneError::Refused`] say that the peer is
    /// another one than expected, and [`LaneError::Timeout`] that it said nothing for `limit`.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime that has I/O and time enabled.
    pub async fn open(
        stream: StdUnixStream,
        hello: &LinkHello,
        peer: Rank,
        limit: Duration,
    ) -> Result<Self, LaneError> {
        let lane = Self::from_std(stream).map_err(|error| LaneError::Unreachable {
            reason: format!("the socket to rank {peer} can't be used: {error}"),
        })?;
        lane.greeted(hello, peer, limit).await
    }

    /// The same after both sides have said [hello](greet): the second half of [`UnixLane::open`].
    ///
    /// # Errors
    ///
    /// As [`UnixLane::open`].
    ///
    /// # Panics
    ///
    /// As [`UnixLane::open`].
    pub async fn greeted(
        mut self,
        hello: &LinkHello,
        peer: Rank,
        limit: Duration,
    ) -> Result<Self, LaneError> {
        self.group = greet(&mut self, hello, Some(peer), limit).await?.group;
        Ok(self)
    }

    /// The same, with all bytes on the socket. To be called before the sides greet each other; it is enough if one side does.
    #[must_use]
    pub fn without_rings(self) -> Self {
        let way = match self.way {
            Way::Socket { .. } => Way::Socket { may: false },
            way => way,
        };
        Self { way, ..self }
    }

    /// The group that the peer named in its hello: where the link belongs, if the peer made it.
    pub fn group(&self) -> GroupId {
        self.group
    }

    /// Makes rings, if there may be some.
    fn offer(&mut self, may: bool) {
        if !may {
            self.way = Way::Answering(None);
            return;
        }
        self.way = match Rings::create() {
            Ok((rings, descriptor)) => Way::Offered(rings, Some(descriptor)),
            Err(error) => {
                tracing::info!(%error, "a link inside this host has no rings");
                Way::Answering(None)
            }
        };
    }

    /// Maps what the peer offers.
    fn take(&mut self, may: bool, said: u8) -> Result<(), LaneError> {
        let descriptor = self.received.take();
        self.way = match (said, descriptor) {
            (SOCKET, _) => Way::Socket { may: false },
            (RINGS, descriptor) => {
                let rings = match descriptor.filter(|_| may) {
                    Some(descriptor) => match Rings::open(descriptor.as_fd()) {
                        Ok(rings) => Some(rings),
                        Err(error) => {
                            tracing::info!(%error, "a link inside this host has no rings");
                            None
                        }
                    },
                    None => None,
                };
                Way::Answering(rings)
            }
            (other, _) => return Err(strange(other)),
        };
        Ok(())
    }

    /// Reads one byte.
    fn poll_byte(&mut self, cx: &mut Context<'_>) -> Poll<Result<u8, LaneError>> {
        let mut byte = [0];
        let read = passing::poll_receive(&mut self.stream, cx, &mut byte, &mut self.received);
        match ready!(read) {
            Ok(0) => Poll::Ready(Err(LaneError::Ended {
                reason: "the peer closed it before it said how data go".to_owned(),
            })),
            Ok(_) => Poll::Ready(Ok(byte[0])),
            Err(error) => Poll::Ready(Err(ended(&error))),
        }
    }
}

impl Lane for UnixLane {
    fn poll_settle(&mut self, cx: &mut Context<'_>, first: bool) -> Poll<Result<(), LaneError>> {
        loop {
            match &mut self.way {
                Way::Socket { may } if first => {
                    let may = *may;
                    self.offer(may);
                }
                Way::Socket { may } => {
                    let may = *may;
                    let said = ready!(self.poll_byte(cx))?;
                    self.take(may, said)?;
                    if matches!(self.way, Way::Socket { .. }) {
                        return Poll::Ready(Ok(()));
                    }
                }
                Way::Offered(_, descriptor @ Some(_)) => {
                    if let Some(fd) = descriptor {
                        let sent = passing::poll_send(&mut self.stream, cx, &[RINGS], fd.as_fd());
                        ready!(sent).map_err(|error| ended(&error))?;
                    }
                    *descriptor = None;
                }
                Way::Offered(..) => {
                    let answer = ready!(self.poll_byte(cx))?;
                    let way = std::mem::replace(&mut self.way, Way::Socket { may: false });
                    match (answer, way) {
                        (RINGS, Way::Offered(rings, _)) => {
                            let end = RingEnd::new(rings, Direction::Out);
                            self.way = Way::Rings(Box::new(end));
                        }
                        (SOCKET, _) => {}
                        (other, _) => return Poll::Ready(Err(strange(other))),
                    }
                    return Poll::Ready(Ok(()));
                }
                Way::Answering(rings) => {
                    let said = [if rings.is_some() { RINGS } else { SOCKET }];
                    let parts = [IoSlice::new(&said)];
                    ready!(passing::poll_write(&mut self.stream, cx, &parts))
                        .map_err(|error| ended(&error))?;
                    self.way = match rings.take() {
                        Some(rings) => Way::Rings(Box::new(RingEnd::new(rings, Direction::Back))),
                        None => Way::Socket { may: false },
                    };
                    return Poll::Ready(Ok(()));
                }
                Way::Rings(_) => return Poll::Ready(Ok(())),
            }
        }
    }

    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize, LaneError>> {
        match &mut self.way {
            Way::Rings(rings) => {
                rings.poll_write((&mut self.stream, &mut self.received), cx, parts)
            }
            _ => passing::poll_write(&mut self.stream, cx, parts).map_err(|error| ended(&error)),
        }
    }

    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut [u8],
    ) -> Poll<Result<usize, LaneError>> {
        match &mut self.way {
            Way::Rings(rings) => rings.poll_read((&mut self.stream, &mut self.received), cx, into),
            _ => passing::poll_receive(&mut self.stream, cx, into, &mut self.received)
                .map_err(|error| ended(&error)),
        }
    }

    fn poll_write_with(
        &mut self,
        cx: &mut Context<'_>,
        bytes: &[u8],
        descriptor: BorrowedFd<'_>,
    ) -> Poll<Result<usize, LaneError>> {
        match &mut self.way {
            Way::Rings(rings) => {
                let link = (&mut self.stream, &mut self.received);
                rings.poll_write_with(link, cx, bytes, descriptor)
            }
            _ => passing::poll_send(&mut self.stream, cx, bytes, descriptor)
                .map_err(|error| ended(&error)),
        }
    }

    fn take_descriptor(&mut self) -> Option<OwnedFd> {
        if let (None, Way::Rings(rings)) = (&self.received, &mut self.way) {
            // Its bytes were in the ring after it was on the socket.
            rings.look(&self.stream, &mut self.received);
        }
        self.received.take()
    }

    fn kind(&self) -> &'static str {
        match self.way {
            Way::Rings(_) => "shm-ring",
            _ => "unix",
        }
    }

    fn end_is_final(&self) -> bool {
        true
    }
}

fn ended(error: &io::Error) -> LaneError {
    LaneError::Ended {
        reason: error.to_string(),
    }
}

fn strange(said: u8) -> LaneError {
    LaneError::Protocol {
        reason: format!("a side says how data go by `r` or `s`, not by {said}"),
    }
}
