//! Bytes of a Unix socket with descriptors beside them.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::task::{Context, Poll, ready};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// Descriptors that are taken from one message. What is more is closed by the system.
const MOST_DESCRIPTORS: usize = 4;

/// Reads some bytes, and keeps the last descriptor that comes beside them.
pub(super) fn poll_receive(
    socket: &UnixStream,
    cx: &mut Context<'_>,
    into: &mut [u8],
    received: &mut Option<OwnedFd>,
) -> Poll<io::Result<usize>> {
    // A plain read would drop descriptors.
    loop {
        ready!(socket.poll_read_ready(cx))?;
        let read = socket.try_io(Interest::READABLE, || {
            receive(socket.as_fd(), into, received)
        });
        match read {
            Err(error) if is_passing(&error) => {}
            read => return Poll::Ready(read.map(|read| read.count)),
        }
    }
}

/// Writes some bytes with a descriptor beside the first one.
pub(super) fn poll_send(
    socket: &UnixStream,
    cx: &mut Context<'_>,
    bytes: &[u8],
    descriptor: BorrowedFd<'_>,
) -> Poll<io::Result<usize>> {
    loop {
        ready!(socket.poll_write_ready(cx))?;
        let sent = socket.try_io(Interest::WRITABLE, || {
            send(socket.as_fd(), bytes, descriptor)
        });
        match sent {
            Err(error) if is_passing(&error) => {}
            sent => return Poll::Ready(sent),
        }
    }
}

/// Whether to try again.
pub(super) fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

/// What was read.
pub(super) struct Read {
    pub(super) count: usize,
    /// A descriptor was beside it, kept or not: the read ended there, whatever follows.
    pub(super) had_descriptor: bool,
}

pub(super) fn receive(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    received: &mut Option<OwnedFd>,
) -> io::Result<Read> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(into)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    // This process may have no room for it.
    let mut had_descriptor = message.flags.contains(ReturnFlags::CTRUNC);
    for ancillary in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = ancillary {
            // Those that are not kept are closed here.
            for descriptor in descriptors {
                had_descriptor = true;
                *received = Some(descriptor);
            }
        }
    }
    Ok(Read {
        count: message.bytes,
        had_descriptor,
    })
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
