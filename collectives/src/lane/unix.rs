//! A link between two processes of one host.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use kolo_transport::ids::Rank;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use tokio::io::Interest;
use tokio::net::UnixStream;

use super::{Lane, LaneError, LinkHello, greet, stream};
use crate::group::GroupId;

/// A link over a connected Unix stream socket, such as one end of a socket pair that a node daemon made.
#[derive(Debug)]
pub struct UnixLane {
    stream: UnixStream,
    /// The last descriptor that came.
    received: Option<OwnedFd>,
    /// What the peer said.
    group: GroupId,
}

/// Descriptors that are taken from one message. What is more is closed by the system.
const MOST_DESCRIPTORS: usize = 4;

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
            stream: UnixStream::from_std(stream)?,
            received: None,
            group: GroupId::WORLD,
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
        let mut lane = Self::from_std(stream).map_err(|error| LaneError::Unreachable {
            reason: format!("the socket to rank {peer} can't be used: {error}"),
        })?;
        lane.group = greet(&mut lane, hello, Some(peer), limit).await?.group;
        Ok(lane)
    }

    /// The group that the peer named in its hello: where the link belongs, if the peer made it.
    pub fn group(&self) -> GroupId {
        self.group
    }
}

impl Lane for UnixLane {
    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize, LaneError>> {
        stream::poll_write(Pin::new(&mut self.stream), cx, parts)
    }

    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut [u8],
    ) -> Poll<Result<usize, LaneError>> {
        // A plain read would drop descriptors.
        loop {
            ready!(self.stream.poll_read_ready(cx)).map_err(|error| ended(&error))?;
            let received = &mut self.received;
            let socket = &self.stream;
            let read = socket.try_io(Interest::READABLE, || {
                receive(socket.as_fd(), into, received)
            });
            match read {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => return Poll::Ready(read.map_err(|error| ended(&error))),
            }
        }
    }

    fn poll_write_with(
        &mut self,
        cx: &mut Context<'_>,
        bytes: &[u8],
        descriptor: BorrowedFd<'_>,
    ) -> Poll<Result<usize, LaneError>> {
        loop {
            ready!(self.stream.poll_write_ready(cx)).map_err(|error| ended(&error))?;
            let socket = &self.stream;
            let sent = socket.try_io(Interest::WRITABLE, || {
                send(socket.as_fd(), bytes, descriptor)
            });
            match sent {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                sent => return Poll::Ready(sent.map_err(|error| ended(&error))),
            }
        }
    }

    fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.received.take()
    }

    fn kind(&self) -> &'static str {
        "unix"
    }

    // The other end is closed when the peer's process is gone, or its communicator.
    fn end_is_final(&self) -> bool {
        true
    }
}

fn ended(error: &io::Error) -> LaneError {
    LaneError::Ended {
        reason: error.to_string(),
    }
}

fn receive(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    received: &mut Option<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(into)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    for ancillary in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = ancillary {
            // Those that are not kept are closed here.
            for descriptor in descriptors {
                *received = Some(descriptor);
            }
        }
    }
    Ok(message.bytes)
}

fn send(socket: BorrowedFd<'_>, bytes: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    let pushed = control.push(SendAncillaryMessage::ScmRights(&descriptors));
    debug_assert!(pushed, "there is room for one descriptor");
    let sent = rustix::net::sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    Ok(sent)
}
