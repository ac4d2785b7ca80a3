//! What the system has yet to send of what a connection was given: there is no safe function that tells.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::io;
use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::ioctl::{Getter, Opcode, ioctl};

/// `SIOCOUTQNSD` of Linux's `sockios.h`.
const UNSENT: Opcode = 0x894b;

/// Bytes in the send queue of a TCP socket that were never sent, and may be. Those that were, and are not acknowledged, do not
/// count.
pub(super) fn unsent(tcp: BorrowedFd<'_>) -> io::Result<usize> {
    // SAFETY: an opcode of Linux, which has written an `int` where that is meant to go when it returns 0, and does no more.
    let bytes: c_int = unsafe { ioctl(tcp, Getter::<UNSENT, c_int>::new()) }?;
    let bytes = usize::try_from(bytes).unwrap_or(0);
    if bytes == 0 {
        return Ok(0);
    }
    // A connection that was reset sends nothing more, and the count stays.
    let mut socket = [PollFd::from_borrowed_fd(tcp, PollFlags::empty())];
    let looked = poll(&mut socket, Some(&Timespec::default()));
    let ends = PollFlags::HUP | PollFlags::ERR;
    let is_over = looked.is_ok() && socket[0].revents().intersects(ends);
    Ok(if is_over { 0 } else { bytes })
}
