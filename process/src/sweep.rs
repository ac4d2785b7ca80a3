//! Killing what a warden that was itself killed has left, and what an earlier daemon has.
//!
//! A warden finds everything below it by its place in the tree of processes. When it is killed, the kernel kills its workers;
//! what they have started gets other parents. It is found again by two signs:
//!
//! - The *mark*: each warden has one, in its own environment and in that of every worker, from where it is inherited. It
//!   begins with the name of the daemon.
//! - In a process that [`adopts`](adopt_orphans): the place. What loses its parent becomes a child of that process, if no warden
//!   is between. All of it is in sessions that workers have made, for each worker leads one.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::WaitOptions;

use crate::procfs::{self, Process};

/// The environment variable with the mark.
pub(crate) const MARK_VAR: &str = "KOLO_MARK";

/// How long a sweep goes on, and waits for those that it has killed.
const DYING: Duration = Duration::from_secs(5);

/// How often it looks meanwhile.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Whether orphans become children of this process.
static ADOPTS: AtomicBool = AtomicBool::new(false);

/// The wardens that this process has started and has not reaped, by process id.
static WARDENS: Mutex<Vec<u32>> = Mutex::new(Vec::new());

fn wardens() -> MutexGuard<'static, Vec<u32>> {
    WARDENS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The mark of another warden of this daemon.
pub(crate) fn mark(owner: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{owner}/{}.{number}", std::process::id())
}

/// Orphans below this process become its children (it is a *subreaper*), and those that a killed warden leaves are killed,
/// whatever has become of their environment.
///
/// For a daemon that starts nothing but wardens, and so not for a program of a user: an orphan in a session of its own that is
/// not below a warden is taken for one of a worker, and is killed when a warden is lost. The first process of a container has
/// orphans of everybody: there the mark alone counts.
///
/// # Errors
///
/// If the system knows no subreapers.
pub fn adopt_orphans() -> std::io::Result<()> {
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    ADOPTS.store(std::process::id() != 1, Ordering::Release);
    Ok(())
}

/// Kills what an earlier daemon of this name has left on this machine: its wardens, and what they have started; removes the
/// [directories](crate::Warden::folder) of the wardens. Gives how many processes that were. Blocks for the milliseconds until they are gone; for at most 5 s, if one can't be killed.
///
/// No warden of this name may be in use. A process that has other privileges, or whose environment was wiped out, is not
/// found.
pub fn sweep_left_by(owner: &str) -> usize {
    let prefix = format!("{owner}/");
    let killed =
        kill(|process| process.has_variable(MARK_VAR, |mark| mark.starts_with(prefix.as_bytes())));
    crate::folder::sweep(owner);
    killed
}

/// Starts a warden, whose id `start` gives beside its result, so that no sweep takes it for an orphan.
pub(crate) fn starting<T, E>(start: impl FnOnce() -> Result<(u32, T), E>) -> Result<T, E> {
    let mut wardens = wardens();
    let (pid, started) = start()?;
    wardens.push(pid);
    Ok(started)
}

/// Reaps a warden that has ended. Until its number is free no other one can have it.
pub(crate) fn reaping<T>(pid: u32, reap: impl FnOnce() -> T) -> T {
    let mut wardens = wardens();
    let reaped = reap();
    wardens.retain(|other| *other != pid);
    reaped
}

/// Kills what the warden with this mark has left. It led the session, has ended, and is not reaped.
pub(crate) fn sweep(mark: &str, session: u32) {
    kill(|process| {
        process.session == session
            || process.has_variable(MARK_VAR, |found| found == mark.as_bytes())
    });
    if ADOPTS.load(Ordering::Acquire) {
        sweep_orphans();
    }
}

/// Kills those that `which` names, until none of them is left.
fn kill(which: impl Fn(&Process) -> bool) -> usize {
    let me = std::process::id();
    let deadline = Instant::now() + DYING;
    let mut killed = HashSet::new();
    loop {
        // One that is dying has no environment any more.
        let left: Vec<Process> = procfs::all()
            .into_iter()
            .filter(|process| !process.dead && process.pid != me)
            .filter(|process| killed.contains(&(process.pid, process.start)) || which(process))
            .collect();
        if left.is_empty() {
            break;
        }
        if Instant::now() >= deadline {
            tracing::error!(after = ?DYING, left = left.len(), "processes were killed and have not ended");
            break;
        }
        let mut is_new = false;
        for process in left {
            if killed.insert((process.pid, process.start)) {
                process.kill();
                is_new = true;
            }
        }
        if !is_new {
            std::thread::sleep(LOOK_AGAIN);
        }
    }
    killed.len()
}

/// Kills and reaps all that has become a child of this process without being one of its own, and what is below.
fn sweep_orphans() {
    let deadline = Instant::now() + DYING;
    while Instant::now() < deadline {
        let (all, known) = {
            // No warden is being started while the lock is held.
            let wardens = wardens();
            (procfs::all(), wardens.clone())
        };
        let orphans = orphans(&all, std::process::id(), &known);
        if orphans.is_empty() {
            return;
        }
        for process in orphans {
            process.kill();
            if let Some(pid) = procfs::raw(process.pid) {
                // Only a child of this process can be reaped here, and the others are in time.
                rustix::process::waitpid(Some(pid), WaitOptions::NOHANG).ok();
            }
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    tracing::error!(after = ?DYING, "orphans of a killed warden were killed and have not ended");
}

/// Those below the process `me` that are not below its wardens, and are not of its own session or below such a one.
fn orphans(all: &[Process], me: u32, wardens: &[u32]) -> Vec<Process> {
    let Some(own) = all.iter().find(|process| process.pid == me) else {
        return Vec::new();
    };
    let mut found: Vec<Process> = Vec::new();
    let mut open: Vec<u32> = Vec::new();
    let is_orphan = |process: &&Process| {
        process.parent == me && process.session != own.session && !wardens.contains(&process.pid)
    };
    for process in all.iter().filter(is_orphan) {
        found.push(*process);
        open.push(process.pid);
    }
    while let Some(parent) = open.pop() {
        for process in all.iter().filter(|process| process.parent == parent) {
            if found.iter().all(|other| other.pid != process.pid) {
                found.push(*process);
                open.push(process.pid);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orphans_are_neither_wardens_nor_of_the_own_session() {
        let process = |pid, parent, session| Process {
            pid,
            parent,
            group: session,
            session,
            start: 0,
            dead: false,
        };
        let all = [
            process(1, 0, 1),
            process(5, 1, 5),
            // A warden, and what is below it.
            process(10, 5, 10),
            process(11, 10, 11),
            // A child of its own, and what that has started.
            process(20, 5, 5),
            process(21, 20, 21),
            // An orphan, and what is below it.
            process(30, 5, 30),
            process(31, 30, 31),
            // Of somebody else.
            process(40, 1, 40),
        ];
        let found: Vec<u32> = orphans(&all, 5, &[10])
            .into_iter()
            .map(|process| process.pid)
            .collect();
        assert_eq!(found, [30, 31]);
        assert_eq!(orphans(&all, 6, &[10]), []);
    }

    #[test]
    fn every_mark_is_another_one_and_begins_with_its_owner() {
        let (one, other) = (mark("node-1"), mark("node-1"));
        assert_ne!(one, other);
        assert!(one.starts_with("node-1/"));
    }
}
