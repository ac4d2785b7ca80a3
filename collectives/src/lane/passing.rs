//! Bytes of a Unix socket with descriptors beside them.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::task::{Context, Poll};

use kolo_transport::direct::Socket;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// Descriptors that are taken from one message. What is more is closed by the system.
const MOST_DESCRIPTORS: usize = 4;

/// Reads some bytes, and keeps the last descriptor that comes beside them.
pub(super) fn poll_receive(
    socket: &mut Socket,
    cx: &mut Context<'_>,
    into: &mut [u8],
    received: &mut Option<OwnedFd>,
) -> Poll<io::Result<usize>> {
    // A plain read would drop descriptors.
    let room = into.len();
    socket.poll_read_with(cx, room, |socket| receive(socket, into, received))
}

/// Writes some bytes.
pub(super) fn poll_write(
    socket: &mut Socket,
    cx: &mut Context<'_>,
    parts: &[IoSlice<'_>],
) -> Poll<io::Result<usize>> {
    let length = parts.iter().map(|part| part.len()).sum();
    socket.poll_write_with(cx, length, |socket| {
        let mut nothing = SendAncillaryBuffer::default();
        Ok(rustix::net::sendmsg(
            socket,
            parts,
            &mut nothing,
            SendFlags::NOSIGNAL,
        )?)
    })
}

/// Writes some bytes with a descriptor beside the first one.
pub(super) fn poll_send(
    socket: &mut Socket,
    cx: &mut Context<'_>,
    bytes: &[u8],
    descriptor: BorrowedFd<'_>,
) -> Poll<io::Result<usize>> {
    socket.poll_write_with(cx, bytes.len(), |socket| send(socket, bytes, descriptor))
}

pub(super) fn receive(
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
