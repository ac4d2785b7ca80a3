//! Messages to the daemon that the socket does not take yet.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytes::{Buf, BytesMut};
use kolo_transport::local;

use crate::protocol::FromWarden;

#[derive(Debug, Default)]
pub(super) struct Outbox {
    waiting: VecDeque<(BytesMut, Option<OwnedFd>)>,
}

impl Outbox {
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn push(&mut self, message: &FromWarden, fd: Option<OwnedFd>) {
        let frame = local::encode(message, usize::from(fd.is_some()))
            .expect("these messages are short, of plain types and have one descriptor at most");
        self.waiting.push_back((frame, fd));
    }

    /// Sends what the socket takes. If the daemon is gone, there is nobody to tell: all is dropped.
    pub(super) fn flush(&mut self, socket: BorrowedFd<'_>) {
        while let Some((frame, fd)) = self.waiting.front_mut() {
            let fds: Vec<BorrowedFd<'_>> = fd.iter().map(AsFd::as_fd).collect();
            match local::send_some(socket, frame, &fds) {
                Ok(sent) => {
                    frame.advance(sent);
                    *fd = None;
                    if frame.is_empty() {
                        self.waiting.pop_front();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => self.waiting.clear(),
            }
        }
    }
}
