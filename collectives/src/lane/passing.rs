//! A Unix socket with descriptors beside its bytes.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::task::{Context, Poll};

use kolo_transport::direct::Socket;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// Descriptors that are taken from one message. What is more is closed by the system.
const MOST_DESCRIPTORS: usize = 4;

/// A connected Unix stream socket, and the last descriptor that came on it.
#[derive(Debug)]
pub(super) struct PassingSocket {
    socket: Socket,
    received: Option<OwnedFd>,
}

impl PassingSocket {
    pub(super) fn new(socket: Socket) -> Self {
        Self {
            socket,
            received: None,
        }
    }

    /// The last descriptor that came, if it was not taken yet.
    pub(super) fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.received.take()
    }

    pub(super) fn has_descriptor(&self) -> bool {
        self.received.is_some()
    }

    /// Reads some bytes, and keeps the last descriptor that comes beside them: a plain read would drop it.
    pub(super) fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        let (room, received) = (into.len(), &mut self.received);
        self.socket
            .poll_read_with(cx, room, |socket| receive(socket, into, received))
    }

    /// As [`PassingSocket::poll_read`], of what is there now.
    pub(super) fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        receive(self.socket.as_fd(), into, &mut self.received)
    }

    /// Writes some bytes.
    pub(super) fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let length = parts.iter().map(|part| part.len()).sum();
        self.socket.poll_write_with(cx, length, |socket| {
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
    pub(super) fn poll_write_with(
        &mut self,
        cx: &mut Context<'_>,
        bytes: &[u8],
        descriptor: BorrowedFd<'_>,
    ) -> Poll<io::Result<usize>> {
        self.socket.poll_write_with(cx, bytes.len(), |socket| {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let descriptors = [descriptor];
            let pushed = control.push(SendAncillaryMessage::ScmRights(&descriptors));
            debug_assert!(pushed, "there is room for one descriptor");
            Ok(rustix::net::sendmsg(
                socket,
                &[IoSlice::new(bytes)],
                &mut control,
                SendFlags::NOSIGNAL,
            )?)
        })
    }

    /// Writes one byte if there is room for one.
    pub(super) fn write_byte(&self) -> rustix::io::Result<()> {
        loop {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(&self.socket, &[0], flags) {
                Err(rustix::io::Errno::INTR) => {}
                Ok(_) | Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
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
