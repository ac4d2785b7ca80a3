//! The worker process: the user's program, started again by a node.
//!
//! The main thread reads calls from one socket, runs the user's code right there and writes results. A second
//! thread has the control socket: membership, losses, cancellation, the notice to stop; and it moves the data
//! plane. A third writes results that wait behind a long call, once there are any.

mod calls;
mod control;
mod dispatch;
mod failure;
mod links;
mod listener;
mod logging;
mod object;
mod outbox;
mod panics;
mod plane;
mod renewals;
mod reply;
#[cfg(test)]
mod tests;

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kolo_transport::{FrameError, TransportRuntime};

pub(crate) use self::panics::trimmed;
#[doc(hidden)]
pub use self::reply::Reply;

use self::calls::{LoopEnd, LoopError};
use self::control::{Control, Verdict};
use self::dispatch::Dispatcher;
use self::failure::ControlError;
use crate::entry::{self, Role, WORKER_FDS};
use crate::registry::Registry;

/// Exit codes. They follow `sysexits.h`.
const EXIT_NODE_GONE: i32 = 69;
const EXIT_PROTOCOL: i32 = 70;

/// How long the main thread waits for the control thread's view when the call socket ended.
const VERDICT: Duration = Duration::from_secs(2);

/// Threads of the second kind: one has the shortest round trips, and leaves the other cores to user code.
const CONTROL_THREADS: usize = 1;

/// If a node started this process as a worker (or as its warden): is one, and never returns. Otherwise does nothing.
///
/// [`#[kolo::main]`](macro@crate::main) calls it. A program with a `main` of its own calls it before anything else: before
/// it starts threads or processes, reads its arguments or prints. A program that has not called it can start no workers:
/// see [`EntryError`](crate::error::EntryError).
///
/// The exit code is 0 after a notice to stop, and another with a line on standard error if the node is gone or is
/// not understood.
///
/// Standard error of a worker goes to the driver's screen. Events of `tracing`, and records of `log`, go there too, from level `info` on
/// (kolo's own from `warn`), or as the variable `RUST_LOG` says. A program with a subscriber of its own gives
/// [`#[kolo::main(init = function)]`](macro@crate::main) the function that sets it.
pub fn run_if_worker() {
    run_if_worker_with(&mut || {});
}

/// As [`run_if_worker`], and calls `init` in a worker before anything of the user's.
pub(crate) fn run_if_worker_with(init: &mut dyn FnMut()) {
    kolo_process::run_if_warden();
    let Some(given) = std::env::var_os(WORKER_FDS) else {
        entry::entered(Role::Driver);
        return;
    };
    entry::entered(Role::Worker);
    let outcome = given
        .to_str()
        .ok_or_else(|| Fatal::Environment {
            given: given.to_string_lossy().into_owned(),
        })
        .and_then(|given| {
            let sockets = take_sockets(given)?;
            init();
            logging::start();
            work(sockets)
        });
    let code = match outcome {
        Ok(()) => 0,
        Err(error) => {
            complain(&error);
            error.code()
        }
    };
    std::process::exit(code);
}

/// Why a worker ends without a notice.
#[derive(Debug, thiserror::Error)]
enum Fatal {
    #[error(
        "{WORKER_FDS} is `{given}`; it is set by kolo's node daemon and names two Unix sockets, such as `3,4`"
    )]
    Environment { given: String },
    #[error("{0}")]
    Registry(&'static crate::registry::RegistryError),
    #[error("the system gives no thread for the control socket: {0}")]
    Runtime(std::io::Error),
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error(transparent)]
    Calls(#[from] LoopError),
    #[error("the node closed the call socket")]
    Closed,
}

impl Fatal {
    fn code(&self) -> i32 {
        match self {
            Self::Control(ControlError::NodeGone) | Self::Closed => EXIT_NODE_GONE,
            _ => EXIT_PROTOCOL,
        }
    }
}

/// One line for the job's log. Standard error may be gone with the node.
fn complain(error: &dyn std::fmt::Display) {
    drop(writeln!(std::io::stderr(), "kolo worker: {error}"));
}

/// Ends a driver whose program can't take part in any job.
pub(crate) fn refuse(error: &dyn std::fmt::Display) -> ! {
    drop(writeln!(std::io::stderr(), "kolo: {error}"));
    std::process::exit(EXIT_PROTOCOL);
}

struct Sockets {
    calls: UnixStream,
    control: OwnedFd,
}

/// Takes over the descriptors that the node passed, and removes the variable, so that programs which this one
/// starts are no workers.
#[allow(unsafe_code)]
fn take_sockets(given: &str) -> Result<Sockets, Fatal> {
    use std::os::fd::{BorrowedFd, FromRawFd, RawFd};

    let wrong = || Fatal::Environment {
        given: given.to_owned(),
    };
    let (calls, control) = given.split_once(',').ok_or_else(wrong)?;
    let number = |text: &str| {
        text.parse::<RawFd>()
            .ok()
            .filter(|number| *number > 2)
            .ok_or_else(wrong)
    };
    let (calls, control) = (number(calls)?, number(control)?);
    if calls == control {
        return Err(wrong());
    }
    // SAFETY: `run_if_worker` is documented to be called before there are other threads, and in workers kolo's own
    // `main` does so; so no thread reads the environment now.
    unsafe { std::env::remove_var(WORKER_FDS) };
    for number in [calls, control] {
        // SAFETY: the descriptor is only borrowed for this call, in which nothing is closed. If it is not open, the
        // clone fails.
        let there = unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned();
        // Only a Unix socket has an address of that family.
        let is_unix = there
            .map(UnixStream::from)
            .is_ok_and(|socket| socket.local_addr().is_ok());
        if !is_unix {
            return Err(wrong());
        }
    }
    // SAFETY: both are open, as was just seen. The node passed them to this process to own: the variable that names
    // them is gone, so nobody takes them a second time.
    let (calls, control) = unsafe { (OwnedFd::from_raw_fd(calls), OwnedFd::from_raw_fd(control)) };
    // They were inherited, so they would be by programs that user code starts. A clone is close-on-exec.
    let calls = calls.try_clone().map_err(|_| wrong())?;
    Ok(Sockets {
        calls: UnixStream::from(calls),
        control,
    })
}

fn work(sockets: Sockets) -> Result<(), Fatal> {
    let registry = Registry::get().map_err(Fatal::Registry)?;
    let runtime = TransportRuntime::new(CONTROL_THREADS).map_err(Fatal::Runtime)?;
    let clone = |socket: &UnixStream| {
        socket
            .try_clone()
            .map_err(|error| Fatal::Calls(LoopError::Io(error)))
    };
    let control = control::start(
        &runtime,
        sockets.control,
        clone(&sockets.calls)?,
        registry.digest(),
        |error| {
            complain(error);
            let code = match error {
                ControlError::NodeGone => EXIT_NODE_GONE,
                _ => EXIT_PROTOCOL,
            };
            std::process::exit(code);
        },
    );
    serve(registry, &runtime, &control, sockets.calls)
}

/// The main thread's part.
fn serve(
    registry: &'static Registry,
    runtime: &TransportRuntime,
    control: &Control,
    calls: UnixStream,
) -> Result<(), Fatal> {
    // The control thread has the deadlines.
    let Ok(()) = control.ready.recv() else {
        return verdict(control);
    };
    let session = &control.session;
    let mut dispatcher = Dispatcher::new(registry, Arc::clone(session));
    let writer = calls
        .try_clone()
        .map_err(|error| Fatal::Calls(LoopError::Io(error)))?;
    let end = calls::serve(calls, writer, &mut dispatcher, &session.stopping);
    let ended = match end {
        Ok(LoopEnd::Stopped) => Ok(()),
        Err(LoopError::Protocol(error)) if !matches!(error, FrameError::Truncated { .. }) => {
            Err(LoopError::Protocol(error).into())
        }
        // The node is gone, or it was about to say stop: its sockets may end in any order.
        Ok(LoopEnd::Closed) | Err(_) => verdict(control),
    };
    dispatcher.drop_all();
    control.close(runtime);
    ended
}

/// What the control thread knows of the end.
fn verdict(control: &Control) -> Result<(), Fatal> {
    // After a notice to stop, whatever ends is as it should be.
    if control.session.stopping.load(Ordering::Acquire) {
        return Ok(());
    }
    match control.verdict.recv_timeout(VERDICT) {
        Ok(Verdict::Stop) => Ok(()),
        Ok(Verdict::Failed(error)) => Err(error.into()),
        Err(_) => Err(Fatal::Closed),
    }
}
