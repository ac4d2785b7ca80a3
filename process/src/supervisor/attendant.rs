//! The task that reads what the warden says, and cleans up after it.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_transport::wire::Exit;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::WaitOptions;
use tokio::sync::watch;

use super::host::Host;
use super::{Running, Shared, Starting};
use crate::child::{Child, Process, Signal};
use crate::procfs;
use crate::protocol::FromWarden;

/// How long a warden that was told to close may take. It gives up by itself after 5 s.
const CLOSING: Duration = Duration::from_secs(10);

/// How long a warden may take from closing its socket to its end.
const ENDING: Duration = Duration::from_secs(5);

/// How long the processes of a warden that was killed may take to die.
const DYING: Duration = Duration::from_secs(5);

/// Owns the warden's process. Dropped with the runtime before it is done, it still ends all processes, without waiting.
#[derive(Debug)]
pub(super) struct Attendant {
    shared: Arc<Shared>,
    host: Host,
    gone: watch::Sender<bool>,
}

impl Attendant {
    pub(super) fn new(shared: Arc<Shared>, host: Host, gone: watch::Sender<bool>) -> Self {
        Self { shared, host, gone }
    }

    pub(super) async fn run(mut self) {
        if !self.listen().await {
            self.host.kill();
        }
        let left = self.lose();
        if !left.is_empty() {
            tracing::error!(
                pid = self.shared.pid,
                processes = left.len(),
                "the warden was lost; its processes are killed"
            );
            // Only if the runtime is ending is this not done; the kernel kills them all the same.
            tokio::task::spawn_blocking(move || mop_up(&left))
                .await
                .ok();
        }
        self.host.reap(ENDING).await;
        self.gone.send_replace(true);
    }

    /// Until the warden's socket ends: `true`. `false` if it can't be trusted any more.
    async fn listen(&self) -> bool {
        let mut closing = self.shared.closing.subscribe();
        let overdue = async {
            // The sender lives as long as `shared`.
            closing.wait_for(|closing| *closing).await.ok();
            tokio::time::sleep(CLOSING).await;
        };
        tokio::pin!(overdue);
        loop {
            let received = tokio::select! {
                received = self.shared.socket.recv::<FromWarden>() => received,
                () = &mut overdue => {
                    tracing::error!(pid = self.shared.pid, after = ?CLOSING, "the warden does not close");
                    return false;
                }
            };
            match received {
                Ok(Some((message, fds))) => self.take(message, fds),
                Ok(None) => return true,
                Err(error) => {
                    tracing::error!(pid = self.shared.pid, %error, "the warden can't be understood");
                    return false;
                }
            }
        }
    }

    fn take(&self, message: FromWarden, mut fds: Vec<OwnedFd>) {
        match message {
            FromWarden::Spawned { id, pid } => self.spawned(id, pid, fds.pop()),
            FromWarden::Failed { id, step, errno } => {
                let starting = self.shared.table().starting.remove(&id);
                if let Some(Starting { subject, reply }) = starting {
                    // Nobody waits: nothing was started either.
                    reply.send(Err(subject.failure(step, errno))).ok();
                }
            }
            FromWarden::Exited { id, exit } => {
                let running = self.shared.table().running.remove(&id);
                if let Some(running) = running {
                    running.exit.send_replace(Some(exit));
                }
            }
            FromWarden::Fault { reason } => {
                tracing::error!(pid = self.shared.pid, reason, "the warden reports a fault");
            }
            FromWarden::Up { .. } => {
                tracing::warn!(pid = self.shared.pid, "the warden says twice that it is up");
            }
        }
    }

    fn spawned(&self, id: u64, pid: u32, pidfd: Option<OwnedFd>) {
        let starting = self.shared.table().starting.remove(&id);
        let Some(pidfd) = pidfd else {
            // Without room for its descriptor the process can't be watched over.
            if let Some(group) = procfs::raw(pid) {
                rustix::process::kill_process_group(group, rustix::process::Signal::KILL).ok();
            }
            if let Some(Starting { subject, reply }) = starting {
                let reason = "too many open files in the daemon (ulimit -n)".to_owned();
                reply.send(Err(subject.resources(reason))).ok();
            }
            return;
        };
        let process = Arc::new(Process { pid, pidfd });
        let (exit_tx, exit) = watch::channel(None);
        let running = Running {
            process: process.clone(),
            exit: exit_tx,
        };
        self.shared.table().running.insert(id, running);
        let child = Child {
            process: process.clone(),
            exit,
            warden: Arc::downgrade(&self.shared),
            id,
        };
        let unwanted = match starting {
            Some(Starting { reply, .. }) => reply.send(Ok(child)).is_err(),
            None => true,
        };
        if unwanted {
            kill(&process);
        }
    }

    /// Ends all that is open, and begins to kill what still runs.
    fn lose(&self) -> Vec<Running> {
        let (starting, running) = {
            let mut table = self.shared.table();
            table.lost = true;
            (
                std::mem::take(&mut table.starting),
                std::mem::take(&mut table.running),
            )
        };
        for Starting { subject, reply } in starting.into_values() {
            reply.send(Err(subject.warden_lost())).ok();
        }
        let running: Vec<Running> = running.into_values().collect();
        for running in &running {
            kill(&running.process);
        }
        running
    }
}

impl Drop for Attendant {
    fn drop(&mut self) {
        // Without effect after a complete run.
        self.lose();
        self.shared.close();
    }
}

fn kill(process: &Process) {
    if let Err(error) = process.signal(Signal::Kill) {
        tracing::debug!(%error, "killing a process");
    }
}

/// Makes sure that the processes of a warden that was killed are dead, and says so. The kernel kills each of them (it
/// signals the death of a parent); what else is in their groups and sessions is killed here. Blocks.
fn mop_up(left: &[Running]) {
    let leaders: HashSet<u32> = left.iter().map(|running| running.process.pid).collect();
    for process in procfs::all() {
        if !process.dead && leaders.contains(&process.session) {
            process.kill();
        }
    }
    let deadline = Instant::now() + DYING;
    for running in left {
        let rest = deadline.saturating_duration_since(Instant::now());
        let rest = Timespec::try_from(rest).unwrap_or_default();
        let mut fds = [PollFd::new(&running.process.pidfd, PollFlags::IN)];
        if !rustix::event::poll(&mut fds, Some(&rest)).is_ok_and(|ready| ready > 0) {
            let pid = running.process.pid;
            tracing::error!(pid, after = ?DYING, "a killed process has not ended");
        }
        // A daemon that is the first process of its container inherits it.
        if let Some(pid) = procfs::raw(running.process.pid) {
            rustix::process::waitpid(Some(pid), WaitOptions::NOHANG).ok();
        }
        running.exit.send_replace(Some(Exit::Unknown));
    }
}
