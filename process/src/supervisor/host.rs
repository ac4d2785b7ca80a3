//! The warden as a child process of the daemon: started, waited for, never left as a zombie.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use tokio::time::timeout;

use crate::procfs;
use crate::warden::WARDEN_FD_VAR;

/// How long a program that closed its socket may take to exit.
const EXIT_DEADLINE: Duration = Duration::from_secs(2);

/// The process of a warden. However it is dropped, the process is reaped.
#[derive(Debug)]
pub(super) struct Host {
    pid: u32,
    /// `None` once it is reaped or another thread sees to it.
    child: Option<Child>,
    /// It said that it is a warden: it ends when its socket ends, and must not be killed before.
    is_warden: bool,
}

impl Host {
    /// Starts the program with its end of the socket as standard input.
    ///
    /// Nothing is asked for that would make the standard library fork (a hook before `execve`): a fork of a large daemon
    /// is slow. And the socket is never without close-on-exec in the daemon, where another thread may be forking.
    pub(super) async fn start(exe: PathBuf, socket: OwnedFd) -> io::Result<Self> {
        // The call returns when the program is loaded, which a slow file system can delay.
        let started = tokio::task::spawn_blocking(move || {
            let child = Command::new(exe)
                .arg0("kolo-warden")
                .env(WARDEN_FD_VAR, "0")
                .stdin(Stdio::from(socket))
                .stdout(Stdio::null())
                .spawn()?;
            Ok(Self {
                pid: child.id(),
                child: Some(child),
                is_warden: false,
            })
        });
        started.await.map_err(io::Error::other)?
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    pub(super) fn is_a_warden(&mut self) {
        self.is_warden = true;
    }

    /// Kills it.
    pub(super) fn kill(&mut self) {
        if let Some(child) = &mut self.child
            && let Err(error) = child.kill()
        {
            tracing::warn!(pid = self.pid, %error, "killing a warden");
        }
    }

    /// Waits until it has ended and reaps it; `None` if it had to be killed after `deadline`.
    pub(super) async fn reap(&mut self, deadline: Duration) -> Option<ExitStatus> {
        let child = self.child.take()?;
        let pid = self.pid;
        let is_warden = self.is_warden;
        // In the closure as a whole, so that a runtime that ends before it runs leaves no zombie.
        let mut host = Self {
            pid,
            child: Some(child),
            is_warden,
        };
        let mut waiting = tokio::task::spawn_blocking(move || host.child.take()?.wait().ok());
        if let Ok(status) = timeout(deadline, &mut waiting).await {
            return status.ok().flatten();
        }
        tracing::error!(pid, after = ?deadline, "a warden has not ended and is killed");
        // Not reaped yet, so the number is still its own.
        if let Some(pid) = procfs::raw(pid) {
            rustix::process::kill_process(pid, Signal::KILL).ok();
        }
        if timeout(EXIT_DEADLINE, waiting).await.is_err() {
            tracing::error!(pid, "a killed warden has not ended");
        }
        None
    }

    /// In words, for a program that closed its socket without a word.
    pub(super) async fn how_it_ended(&mut self) -> String {
        match self.reap(EXIT_DEADLINE).await {
            Some(status) => format!("ended with {status}"),
            None => "closed its socket".to_owned(),
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else {
            return;
        };
        if !self.is_warden {
            // It may be any program, which would run on.
            child.kill().ok();
        }
        // Its socket is closed or about to be. A thread of its own, because there may be no runtime any more.
        let reaper = std::thread::Builder::new().name("kolo-reaper".to_owned());
        let pid = self.pid;
        if let Err(error) = reaper.spawn(move || child.wait()) {
            tracing::warn!(pid, %error, "no thread to reap a warden");
        }
    }
}
