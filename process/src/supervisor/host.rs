//! The warden as a child process of the daemon: started, waited for, and cleaned up after.
//!
//! A thread of its own starts it, waits for its end, and kills what it may have left. It has to be one that stays: until the
//! program has shown that it is a warden it dies with its parent (`PR_SET_PDEATHSIG`), and the parent is the thread.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitOptions};
use tokio::sync::{oneshot, watch};
use tokio::time::timeout;

use crate::protocol::WARDEN_FD_VAR;
use crate::sweep::{self, MARK_VAR};
use crate::sys::{self, Step};

/// How long a program may take from closing its socket to its end, and to the end of what it has left.
const EXIT_DEADLINE: Duration = Duration::from_secs(3);

/// How long a killed one may take to be gone with all that it has left.
const KILL_DEADLINE: Duration = Duration::from_secs(10);

/// What the thread needs; it calls nothing that needs more.
const STACK: usize = 256 << 10;

type Spawned = (Host, Pid, watch::Sender<Option<ExitStatus>>);

/// The process of a warden. However it is dropped, the process is reaped and nothing of it is left.
#[derive(Debug)]
pub(super) struct Host {
    pid: u32,
    pidfd: OwnedFd,
    /// How it ended, once that is known and what it left is gone.
    ended: watch::Receiver<Option<ExitStatus>>,
    /// It said that it is a warden: it ends when its socket ends, and must not be killed before.
    is_warden: Arc<AtomicBool>,
}

impl Host {
    /// Starts the program with its end of the socket as standard input.
    pub(super) async fn start(
        exe: &Path,
        socket: OwnedFd,
        mark: String,
    ) -> Result<Self, (Step, io::Error)> {
        let environment = environment(&mark);
        let program =
            CString::new(exe.as_os_str().as_bytes()).map_err(|error| (Step::Exec, error.into()))?;
        let (reply, answer) = oneshot::channel();
        let life = move || {
            let (host, pid, ended) = match spawn(&program, &environment, socket) {
                Ok(spawned) => spawned,
                Err(failed) => return drop(reply.send(Err(failed))),
            };
            let number = host.pid;
            let is_warden = host.is_warden.clone();
            // If nobody waits for it, it is dropped here, which ends it.
            reply.send(Ok(host)).ok();
            // A warden that ends in order has seen the end of everything below it.
            let in_order = ends_well(pid) && is_warden.load(Ordering::Acquire);
            if !in_order {
                // Not reaped yet, so the number is still that of its session.
                sweep::sweep(&mark, number);
            }
            let reap = || rustix::process::waitpid(Some(pid), WaitOptions::empty());
            let status = sweep::reaping(number, reap);
            // A program that ignores `SIGCHLD` is not told how its children end.
            let status = status
                .ok()
                .flatten()
                .map_or(0, |(_, status)| status.as_raw());
            ended.send_replace(Some(ExitStatus::from_raw(status)));
        };
        std::thread::Builder::new()
            .name("kolo-keeper".to_owned())
            .stack_size(STACK)
            .spawn(life)
            .map_err(|error| (Step::Fork, error))?;
        let gone = |_| (Step::Fork, io::Error::other("its thread has ended"));
        answer.await.map_err(gone)?
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    pub(super) fn is_a_warden(&mut self) {
        self.is_warden.store(true, Ordering::Release);
    }

    /// Kills it.
    pub(super) fn kill(&self) {
        // It may have ended.
        rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL).ok();
    }

    /// Waits until it has ended and nothing of it is left; `None` if it had to be killed for that.
    pub(super) async fn reap(&mut self) -> Option<ExitStatus> {
        let pid = self.pid;
        let mut ended = self.ended.clone();
        if let Ok(status) = timeout(EXIT_DEADLINE, ended.wait_for(Option::is_some)).await {
            return status.ok().and_then(|status| *status);
        }
        if self.is_warden.load(Ordering::Acquire) {
            tracing::error!(pid, after = ?EXIT_DEADLINE, "a warden has not ended and is killed");
        }
        self.kill();
        let killed = timeout(KILL_DEADLINE, ended.wait_for(Option::is_some)).await;
        if killed.is_err() {
            tracing::error!(pid, "a killed warden, or what it has left, has not ended");
        }
        None
    }

    /// In words, for a program that closed its socket without a word.
    pub(super) async fn how_it_ended(&mut self) -> String {
        match self.reap().await {
            Some(status) => format!("ended with {status}"),
            None => "closed its socket".to_owned(),
        }
    }
}

/// Starts it, from the thread that will wait for its end.
fn spawn(
    program: &CStr,
    environment: &[u8],
    socket: OwnedFd,
) -> Result<Spawned, (Step, io::Error)> {
    let descriptors = |error: io::Error| (Step::Descriptors, error);
    let null = File::options()
        .write(true)
        .open("/dev/null")
        .map_err(descriptors)?;
    // Standard input may be closed in this process, so that its number is given to others.
    let lift = |fd: BorrowedFd<'_>| {
        rustix::io::fcntl_dupfd_cloexec(fd, 3).map_err(|error| descriptors(error.into()))
    };
    let (socket, null) = (lift(socket.as_fd())?, lift(null.as_fd())?);
    let exec = sys::Exec {
        program,
        argv: b"kolo-warden\0",
        env: environment,
        cwd: None,
        fds: &[(socket.as_fd(), 0), (null.as_fd(), 1)],
    };
    sweep::starting(|| {
        let pid = sys::spawn_and_wait(&exec)?;
        let pidfd = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(error) => {
                rustix::process::kill_process(pid, Signal::KILL).ok();
                rustix::process::waitpid(Some(pid), WaitOptions::empty()).ok();
                return Err(descriptors(error.into()));
            }
        };
        let (ended, ended_receiver) = watch::channel(None);
        let host = Host {
            pid: pid.as_raw_nonzero().get().unsigned_abs(),
            pidfd,
            ended: ended_receiver,
            is_warden: Arc::default(),
        };
        Ok((host.pid, (host, pid, ended)))
    })
}

/// Waits for its end without reaping it. Whether it ended with 0.
fn ends_well(pid: Pid) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    loop {
        match rustix::process::waitid(WaitId::Pid(pid), options) {
            Ok(Some(status)) => return status.exit_status() == Some(0),
            Ok(None) | Err(Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if !self.is_warden.load(Ordering::Acquire) {
            // It may be any program, which would run on.
            self.kill();
        }
    }
}

/// This process's environment and what makes a program a warden, each with a zero byte behind it.
fn environment(mark: &str) -> Vec<u8> {
    let mut all = format!("{MARK_VAR}={mark}\0{WARDEN_FD_VAR}=0\0").into_bytes();
    for (name, value) in std::env::vars_os() {
        if name == MARK_VAR || name == WARDEN_FD_VAR {
            continue;
        }
        all.extend_from_slice(name.as_bytes());
        all.push(b'=');
        all.extend_from_slice(value.as_bytes());
        all.push(0);
    }
    all
}
