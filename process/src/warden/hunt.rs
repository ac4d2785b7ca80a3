//! Killing what workers leave behind.
//!
//! A worker leads a session and a process group. What it starts is in them, unless it leaves on purpose. What leaves and
//! loses its parent becomes a child of the warden, because the warden is a subreaper: a *stranger*. While other workers
//! live, a stranger outside the dead worker's session may belong to any of them and is let be; when the last
//! worker is gone, all strangers go.

use std::collections::HashSet;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, Signal};

use super::Warden;
use crate::procfs::{self, Process};
use crate::protocol::FromWarden;
use crate::sys::{self, Dead};

/// How long the warden waits at its end for what it killed. Only a process in an uninterruptible wait takes longer, and
/// that has its `SIGKILL` pending: it dies when its wait ends.
const LAST_WAIT: Duration = Duration::from_secs(5);

/// How often it looks again meanwhile, if nothing happens: a process that forked away in the middle of a look shows
/// in the next.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// How many looks one hunt takes. One more than there are generations of processes that fork between two looks.
const MAX_LOOKS: usize = 64;

impl Warden {
    /// Kills what is left of the group and session that `leader` led. It has ended and is not reaped.
    pub(super) fn kill_rest(&self, leader: Pid) {
        kill_group(leader);
        if self.has_strangers() {
            let id = leader.as_raw_nonzero().get().unsigned_abs();
            self.hunt(|process| process.session == id || process.group == id);
        }
    }

    /// Whether somebody is left of the group and session that `leader` led, or may be: it has been reaped.
    pub(super) fn has_left(&self, leader: Pid) -> bool {
        let group = rustix::process::test_kill_process_group(leader);
        // One that may not be signalled is there.
        group != Err(rustix::io::Errno::SRCH) || self.has_strangers()
    }

    /// Kills what a worker that has ended was allowed to leave behind.
    pub(super) fn release(&mut self, id: u64) {
        let Some(leader) = self.lingering.remove(&id) else {
            return;
        };
        // As long as somebody is left the number is that of no other process. If nobody is it may be, even a worker's.
        if !self.workers.contains_key(&leader) {
            self.hunt(|process| process.session == leader || process.group == leader);
        }
        self.kill_strangers_of_nobody();
    }

    /// Kills everything that is below the warden and no worker, if there is no worker left whose it might be.
    pub(super) fn kill_strangers_of_nobody(&self) {
        if self.workers.is_empty() && self.lingering.is_empty() && self.has_strangers() {
            self.hunt(|process| !self.workers.contains_key(&process.pid));
        }
    }

    /// Kills everything below the warden and waits until it is gone, but not for ever.
    pub(super) fn kill_everything(&mut self) {
        let deadline = Instant::now() + LAST_WAIT;
        for pid in self.workers.keys() {
            if let Some(pid) = procfs::raw(*pid) {
                // One that has not come to `setsid` yet has no group.
                kill(pid);
                kill_group(pid);
            }
        }
        loop {
            self.reap();
            self.outbox.flush(self.socket.as_fd());
            if sys::peek_dead() == Dead::NoChildren && self.outbox.is_empty() {
                return;
            }
            if self.has_strangers() {
                self.hunt(|_| true);
            }
            if Instant::now() >= deadline {
                self.confess();
                return;
            }
            let mut fds = vec![PollFd::new(&self.signals, PollFlags::IN)];
            if !self.outbox.is_empty() {
                fds.push(PollFd::new(&self.socket, PollFlags::OUT));
            }
            let pause = Timespec {
                tv_sec: 0,
                tv_nsec: i64::from(LOOK_AGAIN.subsec_nanos()),
            };
            // An error is a shortage of memory: the loop goes on until its deadline.
            rustix::event::poll(&mut fds, Some(&pause)).ok();
        }
    }

    /// Tells the daemon who is left.
    fn confess(&mut self) {
        let left = procfs::children().unwrap_or_default();
        let reason =
            format!("processes {left:?} were killed and have not ended after {LAST_WAIT:?}");
        self.tell(&FromWarden::Fault { reason }, None);
        self.outbox.flush(self.socket.as_fd());
    }

    /// Whether a child lives that is no worker. Without a list of children the answer is yes.
    fn has_strangers(&self) -> bool {
        procfs::children().is_none_or(|children| {
            children
                .into_iter()
                .filter(|pid| !self.workers.contains_key(pid))
                .any(|pid| Process::read(pid).is_some_and(|process| !process.dead))
        })
    }

    /// Kills those below the warden whom `which` names, until a look finds nobody new.
    fn hunt(&self, which: impl Fn(&Process) -> bool) {
        let me = self.pid.as_raw_nonzero().get().unsigned_abs();
        let own_group = rustix::process::getpgrp()
            .as_raw_nonzero()
            .get()
            .unsigned_abs();
        let mut killed = HashSet::new();
        for _ in 0..MAX_LOOKS {
            let all = procfs::all();
            let mut fresh: Vec<Process> = procfs::below(&all, me)
                .into_iter()
                .filter(|process| !process.dead && which(process))
                .collect();
            fresh.retain(|process| killed.insert((process.pid, process.start)));
            if fresh.is_empty() {
                return;
            }
            let mut groups = HashSet::new();
            for process in fresh {
                // A group at once, because one that forks all the time outruns a look at single processes. A
                // group below the warden has members below the warden only.
                if process.group != own_group
                    && groups.insert(process.group)
                    && !self.workers.contains_key(&process.group)
                    && let Some(group) = procfs::raw(process.group)
                {
                    kill_group(group);
                }
                process.kill();
            }
        }
    }
}

/// Kills a process. Nobody there is what is wanted; not allowed (a process with other privileges) can't be helped.
pub(super) fn kill(pid: Pid) {
    rustix::process::kill_process(pid, Signal::KILL).ok();
}

/// As [`kill`], for a group.
fn kill_group(group: Pid) {
    rustix::process::kill_process_group(group, Signal::KILL).ok();
}
