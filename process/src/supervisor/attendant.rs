//! The task that reads what the warden says, tells it what to do, and cleans up after it.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_transport::wire::Exit;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::WaitOptions;
use tokio::sync::watch;

use super::child::{Child, Life, Process};
use super::host::Host;
use super::{Running, Shared, Starting};
use crate::folder;
use crate::procfs;
use crate::protocol::FromWarden;

/// How long a warden that was told to close may take. It gives up by itself after 5 s.
const CLOSING: Duration = Duration::from_secs(10);

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
        let in_order = tokio::select! {
            in_order = self.listen() => in_order,
            () = self.shared.pass_on() => false,
        };
        if !in_order {
            self.host.kill();
        }
        let left = self.lose();
        if !left.is_empty() {
            tracing::error!(
                pid = self.shared.pid,
                processes = left.len(),
                "the warden was lost; its processes are killed"
            );
        }
        // Whoever sees to the warden's process kills what it has left.
        self.host.reap().await;
        let folder = self.shared.folder.get().cloned();
        if !left.is_empty() || folder.is_some() {
            // Only if the runtime is ending is this not done; the kernel kills them all the same.
            tokio::task::spawn_blocking(move || {
                see_the_end(&left);
                // Without effect if the warden has ended in order.
                folder.as_deref().map(folder::remove);
            })
            .await
            .ok();
        }
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
            FromWarden::Exited { id, exit, left } => {
                let mut table = self.shared.table();
                if left {
                    if let Some(running) = table.running.get(&id) {
                        running.life.send_replace(Life::Ended(exit));
                    }
                } else if let Some(running) = table.running.remove(&id) {
                    running.life.send_replace(Life::Gone(exit));
                }
            }
            FromWarden::Gone { id } => {
                let running = self.shared.table().running.remove(&id);
                if let Some(running) = running {
                    running.is_gone();
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
        let (life_tx, life) = watch::channel(Life::Running);
        let running = Running {
            process: process.clone(),
            life: life_tx,
            orders: 0,
        };
        self.shared.table().running.insert(id, running);
        let child = Child {
            process: process.clone(),
            life,
            warden: Arc::downgrade(&self.shared),
            id,
        };
        let unwanted = match starting {
            Some(Starting { reply, .. }) => reply.send(Ok(child)).is_err(),
            None => true,
        };
        if unwanted {
            process.kill();
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
            running.process.kill();
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

impl Running {
    /// Nothing is left of it. How it ended is known, if the warden has seen that.
    fn is_gone(&self) {
        self.life
            .send_modify(|life| *life = Life::Gone(life.exit().unwrap_or(Exit::Unknown)));
    }
}

/// Waits for the end of the processes of a warden that was lost, and says so. The kernel kills each of them (it signals the
/// death of a parent); what is in their sessions and has no mark any more is killed here. Blocks.
fn see_the_end(left: &[Running]) {
    // A session whose leader had ended before may be another one by now.
    let leaders: HashSet<u32> = left
        .iter()
        .filter(|running| *running.life.borrow() == Life::Running)
        .map(|running| running.process.pid)
        .collect();
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
        running.is_gone();
    }
}
