//! Finding and killing what workers leave behind.
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
    /// Kills workers and everything below them.
    pub(super) fn kill(&mut self, leaders: &HashSet<u32>) {
        for leader in leaders {
            if let Some(worker) = self.workers.get_mut(leader) {
                worker.killed = true;
            }
            if let Some(pid) = procfs::raw(*leader)
                && self.workers.contains_key(leader)
            {
                kill_group(pid);
            }
        }
        self.hunt(leaders, |owner| {
            owner.is_some_and(|owner| leaders.contains(&owner))
        });
        for leader in leaders {
            if let Some(id) = self.ended.remove(leader) {
                self.tell(&FromWarden::Gone { id }, None);
            }
        }
        self.kill_strangers_of_nobody();
    }

    /// Those of `ended`, workers that were reaped, of which somebody is left or may be.
    pub(super) fn left(&self, ended: &HashSet<u32>) -> HashSet<u32> {
        // What a dead worker has left is below one that lost its parent.
        if !self.has_strangers() {
            return HashSet::new();
        }
        let mut leaders = self.leaders();
        leaders.extend(ended);
        let mut left = HashSet::new();
        for (_, owner) in self.look(&leaders) {
            match owner {
                Some(owner) => left.insert(owner),
                None => return ended.clone(),
            };
        }
        left.retain(|leader| ended.contains(leader));
        left
    }

    /// Kills everything that is below the warden and no worker, if there is no worker left whose it might be.
    pub(super) fn kill_strangers_of_nobody(&self) {
        if self.workers.is_empty() && self.ended.is_empty() && self.has_strangers() {
            self.hunt(&HashSet::new(), |_| true);
        }
    }

    /// The workers that live, and those that have left others behind.
    pub(super) fn leaders(&self) -> HashSet<u32> {
        self.workers
            .keys()
            .chain(self.ended.keys())
            .copied()
            .collect()
    }

    /// Who lives below the warden, and which of the leaders each belongs to.
    pub(super) fn look(&self, leaders: &HashSet<u32>) -> Vec<(Process, Option<u32>)> {
        let me = self.pid.as_raw_nonzero().get().unsigned_abs();
        procfs::below(&procfs::all(), me, leaders)
    }

    /// Kills everything below the warden and waits until it is gone, but not for ever. Whether it is.
    pub(super) fn kill_everything(&mut self) -> bool {
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
                return true;
            }
            if self.has_strangers() {
                self.hunt(&HashSet::new(), |_| true);
            }
            if Instant::now() >= deadline {
                self.confess();
                return false;
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

    /// Whether there is a child that is no worker. Without a list of children the answer is yes. One that has ended counts: its
    /// own children may have come here after the list was read.
    pub(super) fn has_strangers(&self) -> bool {
        procfs::children().is_none_or(|children| {
            let is_stranger = |pid| !self.workers.contains_key(&pid);
            children.into_iter().any(is_stranger)
        })
    }

    /// Kills those below the warden whose owner `which` accepts, until a look finds nobody new. `also` are leaders that are
    /// reaped already.
    pub(super) fn hunt(&self, also: &HashSet<u32>, which: impl Fn(Option<u32>) -> bool) {
        let own_group = own_group();
        let mut leaders = self.leaders();
        leaders.extend(also);
        let mut killed = HashSet::new();
        for _ in 0..MAX_LOOKS {
            let mut fresh = self.look(&leaders);
            fresh.retain(|(process, owner)| {
                which(*owner) && killed.insert((process.pid, process.start))
            });
            if fresh.is_empty() {
                return;
            }
            let mut groups = HashSet::new();
            for (process, _) in fresh {
                // A group at once, because one that forks all the time outruns a look at single processes. A
                // group below the warden has members of one worker only.
                if process.group != own_group
                    && groups.insert(process.group)
                    && let Some(group) = procfs::raw(process.group)
                {
                    kill_group(group);
                }
                process.kill();
            }
        }
    }
}

/// In which the warden is, and a child that has not come to `setsid` yet.
pub(super) fn own_group() -> u32 {
    let group = rustix::process::getpgrp();
    group.as_raw_nonzero().get().unsigned_abs()
}

/// Kills a process. Nobody there is what is wanted; not allowed (a process with other privileges) can't be helped.
pub(super) fn kill(pid: Pid) {
    rustix::process::kill_process(pid, Signal::KILL).ok();
}

/// As [`kill`], for a group.
fn kill_group(group: Pid) {
    rustix::process::kill_process_group(group, Signal::KILL).ok();
}
