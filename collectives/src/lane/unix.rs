//! A link between two processes of one host.

use std::fmt::Display;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::task::{Context, Poll};
use std::time::Duration;

use kolo_transport::direct::Socket;
use kolo_transport::ids::Rank;
use kolo_transport::wire::span::Span;
use tokio::runtime::Handle;

use super::passing::PassingSocket;
use super::ring::RingEnd;
use super::{Lane, LaneError, LinkHello, greet};
use crate::group_id::GroupId;
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
    socket: PassingSocket,
    /// What the peer said.
    group: GroupId,
    may_have_rings: bool,
    rings: Option<Box<RingEnd>>,
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
            socket: PassingSocket::new(Socket::new(stream.into(), Handle::current())),
            group: GroupId::WORLD,
            may_have_rings: true,
            rings: None,
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
        let theirs = greet(&mut self, hello, Some(peer), limit).await?;
        self.group = theirs.group;
        tokio::time::timeout(limit, self.settle(hello.rank < peer))
            .await
            .map_err(|_| LaneError::Timeout {
                reason: format!("rank {peer} did not say within {} how data go", Span(limit)),
            })??;
        Ok(self)
    }

    /// The same, with all bytes on the socket. To be called before the sides greet each other; it is enough if one side does.
    #[must_use]
    pub fn without_rings(self) -> Self {
        Self {
            may_have_rings: false,
            ..self
        }
    }

    /// The group that the peer named in its hello: where the link belongs, if the peer made it.
    pub fn group(&self) -> GroupId {
        self.group
    }

    /// Agrees with the peer how data go. One side `offers` rings, the other answers.
    async fn settle(&mut self, offers: bool) -> Result<(), LaneError> {
        let end = if offers {
            let Some((rings, descriptor)) = self.rings_or_log(Rings::create) else {
                return self.say(SOCKET, None).await;
            };
            self.say(RINGS, Some(descriptor)).await?;
            self.hears_rings().await?.then_some((rings, Direction::Out))
        } else {
            if !self.hears_rings().await? {
                return Ok(());
            }
            let offered = self.socket.take_descriptor();
            let rings = offered.and_then(|fd| self.rings_or_log(|| Rings::open(fd.as_fd())));
            let answer = if rings.is_some() { RINGS } else { SOCKET };
            self.say(answer, None).await?;
            rings.map(|rings| (rings, Direction::Back))
        };
        self.rings = end.map(|(rings, out)| Box::new(RingEnd::new(rings, out)));
        Ok(())
    }

    /// `None` if the link is to do without rings, or can't have some.
    fn rings_or_log<T, E: Display>(&self, make: impl FnOnce() -> Result<T, E>) -> Option<T> {
        if !self.may_have_rings {
            return None;
        }
        make()
            .inspect_err(|error| tracing::info!(%error, "a link inside this host has no rings"))
            .ok()
    }

    async fn say(&mut self, word: u8, descriptor: Option<OwnedFd>) -> Result<(), LaneError> {
        let said = poll_fn(|cx| match &descriptor {
            Some(fd) => self.socket.poll_write_with(cx, &[word], fd.as_fd()),
            None => self.socket.poll_write(cx, &[IoSlice::new(&[word])]),
        });
        said.await.map(drop).map_err(|error| ended(&error))
    }

    async fn hears_rings(&mut self) -> Result<bool, LaneError> {
        let mut word = [0];
        let heard = poll_fn(|cx| self.socket.poll_read(cx, &mut word)).await;
        match (heard.map_err(|error| ended(&error))?, word[0]) {
            (0, _) => Err(LaneError::Ended {
                reason: "the peer closed it before it said how data go".to_owned(),
            }),
            (_, RINGS) => Ok(true),
            (_, SOCKET) => Ok(false),
            (_, strange) => Err(LaneError::Protocol {
                reason: format!("a side says how data go by `r` or `s`, not by {strange}"),
            }),
        }
    }
}

impl Lane for UnixLane {
    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize, LaneError>> {
        match &mut self.rings {
            Some(rings) => rings.poll_write(&mut self.socket, cx, parts),
            None => (self.socket.poll_write(cx, parts)).map_err(|error| ended(&error)),
        }
    }

    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut [u8],
    ) -> Poll<Result<usize, LaneError>> {
        match &mut self.rings {
            Some(rings) => rings.poll_read(&mut self.socket, cx, into),
            None => (self.socket.poll_read(cx, into)).map_err(|error| ended(&error)),
        }
    }

    fn poll_write_with(
        &mut self,
        cx: &mut Context<'_>,
        bytes: &[u8],
        descriptor: BorrowedFd<'_>,
    ) -> Poll<Result<usize, LaneError>> {
        match &mut self.rings {
            Some(rings) => rings.poll_write_with(&mut self.socket, cx, bytes, descriptor),
            None => {
                (self.socket.poll_write_with(cx, bytes, descriptor)).map_err(|error| ended(&error))
            }
        }
    }

    fn take_descriptor(&mut self) -> Option<OwnedFd> {
        if let Some(rings) = &mut self.rings
            && !self.socket.has_descriptor()
        {
            // The bytes beside it came into the ring after it was on the socket.
            rings.look(&mut self.socket);
        }
        self.socket.take_descriptor()
    }

    fn kind(&self) -> &'static str {
        match self.rings {
            Some(_) => "shm-ring",
            None => "unix",
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A side that is to come to a way with a socket that says this, with a descriptor beside it. What was agreed on is what is used:
    /// the other end reads the socket alone.
    async fn settle(
        offers: bool,
        says: &[u8],
        descriptor: Option<&OwnedFd>,
    ) -> Result<&'static str, LaneError> {
        let (mine, theirs) = StdUnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let mut theirs = PassingSocket::new(Socket::new(theirs.into(), Handle::current()));
        let mut lane = UnixLane::from_std(mine).unwrap();
        let said = poll_fn(|cx| match descriptor {
            Some(fd) => theirs.poll_write_with(cx, says, fd.as_fd()),
            None => theirs.poll_write(cx, &[IoSlice::new(says)]),
        });
        assert_eq!(said.await.unwrap(), says.len());
        lane.settle(offers).await?;
        let written = poll_fn(|cx| lane.poll_write(cx, &[IoSlice::new(b"data")])).await;
        assert_eq!(written, Ok(4));
        let (mut bytes, mut all) = ([0; 16], Vec::new());
        while let Ok(count) = theirs.read(&mut bytes) {
            all.extend_from_slice(&bytes[..count]);
        }
        assert_eq!(all.ends_with(b"data"), lane.kind() == "unix", "{all:?}");
        Ok(lane.kind())
    }

    #[tokio::test]
    async fn a_side_that_declines_or_offers_no_ring_leaves_the_socket() {
        for offers in [true, false] {
            assert_eq!(settle(offers, b"s", None).await, Ok("unix"));
            let strange = settle(offers, b"x", None).await;
            assert!(
                matches!(strange, Err(LaneError::Protocol { .. })),
                "{strange:?}"
            );
        }
        let (pipe, _write) = rustix::pipe::pipe().unwrap();
        let memory = |length: u64, seal: bool| {
            use rustix::fs::{MemfdFlags, SealFlags};
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let fd = rustix::fs::memfd_create("kolo-test", flags).unwrap();
            rustix::fs::ftruncate(&fd, length).unwrap();
            if seal {
                let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
                rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
            }
            fd
        };
        let (_rings, good) = Rings::create().unwrap();
        let length = rustix::fs::fstat(&good).unwrap().st_size.cast_unsigned();
        for descriptor in [
            None,
            Some(&pipe),
            Some(&memory(length, false)),
            Some(&memory(length - 4096, true)),
            Some(&memory(length, true)),
        ] {
            let settled = settle(false, b"r", descriptor).await;
            assert_eq!(settled, Ok("unix"), "{descriptor:?}");
        }
        assert_eq!(settle(false, b"r", Some(&good)).await, Ok("shm-ring"));
    }
}
