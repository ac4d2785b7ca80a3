//! What daemon and warden say to each other, as frames of [`kolo_transport::local`]. Both are the same program, so
//! there is no need to be compatible.

use std::net::SocketAddr;
use std::os::fd::RawFd;

use kolo_transport::wire::Exit;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use crate::signal::Signal;
use crate::sys::Step;

/// Version of these messages; the warden says it first. It differs only when a daemon is given the warden of
/// another version.
pub(crate) const PROTOCOL: u32 = 5;

/// The environment variable that makes a program a warden. Its value is the number of the socket to the daemon,
/// which is standard input: 0.
pub const WARDEN_FD_VAR: &str = "KOLO_WARDEN_FD";

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
