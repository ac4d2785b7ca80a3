//! What daemon and warden say to each other, as frames of [`kolo_transport::local`]. Both are the same program, so
//! there is no need to be compatible.

use std::net::SocketAddr;
use std::os::fd::RawFd;

use kolo_transport::wire::Exit;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use crate::child::Signal;

/// Version of these messages; the warden says it first. It differs only when a daemon is given the warden of
/// another version.
pub(crate) const PROTOCOL: u32 = 5;

/// To the warden. The end of the stream means: kill everything and exit.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ToWarden {
    /// Start a process. Descriptors: stdout, stderr, then one for each of its `numbers`.
    Spawn(Spawn),
    /// Send a signal to a process that was spawned and to what is below it. See [`Child::signal`](crate::Child::signal).
    Signal {
        /// Which request.
        id: u64,
        /// Which signal.
        signal: Signal,
    },
    /// Remove this directory at the end. See [`Warden::folder`](crate::Warden::folder).
    Folder(ByteBuf),
    /// Say this when the daemon has died and nothing is left. See [`Warden::will`](crate::Warden::will).
    Will(Will),
}

/// An obituary, and where it goes.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Will {
    /// A UDP socket.
    pub(crate) to: SocketAddr,
    /// The datagram.
    pub(crate) datagram: ByteBuf,
}

/// What to start. See [`SpawnRequest`](crate::SpawnRequest).
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Spawn {
    /// The daemon's number for it.
    pub(crate) id: u64,
    /// Path.
    pub(crate) program: ByteBuf,
    /// Arguments, each with a zero byte behind it: as `execve` wants them.
    pub(crate) argv: ByteBuf,
    /// `NAME=value`, each with a zero byte behind it.
    pub(crate) env: ByteBuf,
    /// Directory.
    pub(crate) cwd: Option<ByteBuf>,
    /// Numbers of the further descriptors; standard input, if one is given, is the last.
    pub(crate) numbers: Vec<RawFd>,
}

/// From the warden.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum FromWarden {
    /// First message.
    Up {
        /// [`PROTOCOL`].
        protocol: u32,
    },
    /// The program runs. Descriptor: its pidfd.
    Spawned {
        /// Which request.
        id: u64,
        /// Its process id, group and session.
        pid: u32,
    },
    /// It could not be started.
    Failed {
        /// Which request.
        id: u64,
        /// What failed.
        step: Step,
        /// How: an `errno`.
        errno: i32,
    },
    /// A process that had been spawned has ended.
    Exited {
        /// Which request.
        id: u64,
        /// How.
        exit: Exit,
        /// Whether others are left below it; [`FromWarden::Gone`] follows then.
        left: bool,
    },
    /// What such a process has left behind has ended too, or was killed.
    Gone {
        /// Which request.
        id: u64,
    },
    /// For the daemon's log.
    Fault {
        /// What went wrong.
        reason: String,
    },
}

/// The steps of a start that can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Step {
    /// Taking over the descriptors in the warden.
    Descriptors,
    /// `fork` and what the warden needs to watch the process.
    Fork,
    /// `setsid`, `prctl`, placing descriptors.
    Prepare,
    /// `chdir`.
    Directory,
    /// `execve`.
    Exec,
}

impl Step {
    /// As a byte, for the pipe between a child and the warden.
    pub(crate) const fn code(self) -> u8 {
        self as u8
    }

    /// The step of a byte; what is not known counts as [`Step::Prepare`].
    pub(crate) fn from_code(code: u8) -> Self {
        let all = [Self::Descriptors, Self::Fork, Self::Directory, Self::Exec];
        let known = all.into_iter().find(|step| step.code() == code);
        known.unwrap_or(Self::Prepare)
    }
}
