//! Supervision of worker processes: the warden, spawning, exit and stop.
//!
//! A daemon does not start workers itself. It starts a *warden* ([`Warden::start`]): its own program again,
//! small and single-threaded, which forks the workers, watches them and reports how they end. This gives
//! three things:
//!
//! - A fork costs what the small warden weighs, not what the daemon weighs.
//! - No worker outlives its daemon (O-1). When the daemon dies, even by `kill -9`, its socket to the warden ends;
//!   the warden then kills all that is below it and exits. As a subreaper it inherits every process that lost
//!   its parent, so one that left its process group and session is found as well. When the warden
//!   itself is killed, the kernel kills the workers (`PR_SET_PDEATHSIG`), and the daemon what they have started, which it
//!   knows by its mark (an environment variable) and, if it [adopts](adopt_orphans), by its place.
//! - A worker's end is complete: what it has left behind is known, gets signals as it does, and is waited for or killed.
//!
//! A program that may host a node begins its `main` with [`run_if_warden`]. One that does not, and is started as a warden, dies
//! with the daemon that has started it.
//! A launcher that may be stopped by its terminal works behind a *front* ([`divide`]).
//!
//! What is out of reach: a process that gained other privileges (set-user-ID). When the warden itself is killed: a process that
//! has left its worker's session *and* has wiped out its environment, unless the daemon adopts. When the warden is killed
//! together with its daemon: whoever left the worker's session, until a daemon of the same name
//! [sweeps](sweep_left_by), unless a service manager or container ends all.
//!
//! Linux only, 5.4 or later, with `/proc` mounted.
#![deny(unsafe_code)]

mod connections;
mod error;
mod folder;
mod front;
mod procfs;
mod protocol;
mod request;
mod signal;
mod supervisor;
mod sweep;
mod sys;
mod warden;

pub use connections::end_connections;
pub use error::SpawnError;
pub use folder::take_file;
pub use front::{Side, divide, ignores};
pub use protocol::WARDEN_FD_VAR;
pub use request::{FIRST_FD, LAST_FD, MAX_FDS, SpawnRequest};
pub use signal::Signal;
pub use supervisor::{Child, SignalError, Warden};
pub use sweep::{adopt_orphans, sweep_left_by};
pub use warden::run_if_warden;

/// Gives memory that the heap holds and nobody uses back to the system. The C library keeps most of it otherwise. Takes some
/// milliseconds for each 100 MiB. Other C libraries than glibc do it by themselves.
pub fn give_back_memory() {
    sys::trim_heap();
}

/// A pipe: read end and write end, both close-on-exec and blocking.
///
/// # Errors
///
/// If there are no descriptors left.
pub fn pipe() -> std::io::Result<(std::os::fd::OwnedFd, std::os::fd::OwnedFd)> {
    Ok(rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?)
}
