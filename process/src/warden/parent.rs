//! The daemon as its warden sees it, and its obituary.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::thread::sleep;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{PidfdFlags, getppid, pidfd_open};

use crate::protocol::Will;

/// How long a process may take to die after it has closed its descriptors, which the kernel does just before.
const DYING: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 250_000_000,
};

/// The pauses before each time that it is sent, for datagrams get lost.
const PAUSES: [Duration; 3] = [
    Duration::ZERO,
    Duration::from_millis(20),
    Duration::from_millis(200),
];

/// The daemon, and what is to be said of its death.
#[derive(Debug)]
pub(super) struct Parent {
    /// Nothing if it could not be had: then nothing is known of its death, and nothing is said.
    pidfd: Option<OwnedFd>,
    will: Option<Will>,
}

impl Parent {
    /// The parent of this process.
    pub(super) fn find() -> Self {
        let pidfd = getppid().and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        Self { pidfd, will: None }
    }

    pub(super) fn keep(&mut self, will: Will) {
        self.will = Some(will);
    }

    /// Whether the daemon has closed the socket altogether, as its death does. One that closes the warden in order still listens.
    pub(super) fn has_hung_up(&self, socket: BorrowedFd<'_>) -> bool {
        self.will.is_some() && is_ready(&socket, PollFlags::empty(), &Timespec::default())
    }

    /// Sends the obituary if the daemon is dead, once that is certain.
    pub(super) fn publish(&self) {
        let (Some(pidfd), Some(Will { to, datagram })) = (&self.pidfd, &self.will) else {
            return;
        };
        if !is_ready(pidfd, PollFlags::IN, &DYING) {
            return;
        }
        let any: IpAddr = if to.is_ipv4() {
            Ipv4Addr::UNSPECIFIED.into()
        } else {
            Ipv6Addr::UNSPECIFIED.into()
        };
        // What is not heard costs time: the head waits for as long as without an obituary.
        let Ok(socket) = UdpSocket::bind((any, 0)) else {
            return;
        };
        for pause in PAUSES {
            sleep(pause);
            socket.send_to(datagram, to).ok();
        }
    }
}

/// Whether it gets ready within `limit`. Not if there is an error, which a shortage of memory alone can be.
fn is_ready(fd: &impl std::os::fd::AsFd, flags: PollFlags, limit: &Timespec) -> bool {
    let mut fds = [PollFd::new(fd, flags)];
    rustix::event::poll(&mut fds, Some(limit)).is_ok_and(|ready| ready > 0)
}
