//! What `/proc` says about other processes.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};

/// One process, as it was when it was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) parent: u32,
    pub(crate) group: u32,
    pub(crate) session: u32,
    /// When it started, in clock ticks since boot. With the process id it names a process for ever.
    pub(crate) start: u64,
    /// It has ended, with all its threads, and waits to be reaped.
    pub(crate) dead: bool,
}

impl Process {
    /// The process with this id; `None` if there is none.
    pub(crate) fn read(pid: u32) -> Option<Self> {
        Self::parse(pid, &fs::read(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(pid: u32, stat: &[u8]) -> Option<Self> {
        // The second field is the name in parentheses, in which anything may stand.
        let end = stat.iter().rposition(|byte| *byte == b')')?;
        let rest = std::str::from_utf8(stat.get(end + 1..)?).ok()?;
        let mut fields = rest.split_ascii_whitespace();
        let state = fields.next()?;
        let parent = fields.next()?.parse().ok()?;
        let group = fields.next()?.parse().ok()?;
        let session = fields.next()?.parse().ok()?;
        // Fields 7 to 19 stand between, and 21 behind it.
        let threads: u32 = fields.nth(13)?.parse().ok()?;
        let start = fields.nth(1)?.parse().ok()?;
        Some(Self {
            pid,
            parent,
            group,
            session,
            start,
            // One whose first thread has ended looks dead while its other threads run.
            dead: matches!(state, "Z" | "X" | "x") && threads <= 1,
        })
    }

    /// Sends it a signal, unless its id names another process by now.
    ///
    /// # Errors
    ///
    /// `ESRCH` if it has ended; `EPERM` if it is not ours, for instance because it has changed its user.
    pub(crate) fn signal(&self, signal: Signal) -> Result<(), Errno> {
        let pid = raw(self.pid).ok_or(Errno::SRCH)?;
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        if Self::read(self.pid).is_none_or(|now| now.start != self.start) {
            return Err(Errno::SRCH);
        }
        rustix::process::pidfd_send_signal(pidfd.as_fd(), signal)
    }

    /// Kills it. One that has ended meanwhile is as good, and one that is not ours can't be helped.
    pub(crate) fn kill(&self) {
        self.signal(Signal::KILL).ok();
    }

    /// Whether it does something about a signal.
    pub(crate) fn expects(&self, signal: Signal) -> bool {
        is_expected(&self.status(), signal)
    }

    /// Whether it ignores a signal, or has ended meanwhile.
    pub(crate) fn ignores(&self, signal: Signal) -> bool {
        let status = self.status();
        status.is_empty() || is_in(mask(&status, "SigIgn:"), signal)
    }

    /// Empty if it has ended.
    fn status(&self) -> String {
        fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default()
    }

    /// Whether its environment, as it was when its program started, has this variable with a value that `fits`.
    pub(crate) fn has_variable(&self, name: &str, mut fits: impl FnMut(&[u8]) -> bool) -> bool {
        // Of a process of another user it can't be read.
        let environment = fs::read(format!("/proc/{}/environ", self.pid)).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| {
            variable
                .strip_prefix(name.as_bytes())
                .and_then(|rest| rest.strip_prefix(b"="))
                .is_some_and(&mut fits)
        })
    }
}

/// Whether a process catches a signal, or keeps it back to look for it itself. One that keeps back everything is just about to
/// start another.
fn is_expected(status: &str, signal: Signal) -> bool {
    let blocked = mask(status, "SigBlk:");
    let about_to_fork = is_in(blocked, Signal::SEGV) && is_in(blocked, Signal::CHILD);
    is_in(mask(status, "SigCgt:"), signal) || is_in(blocked, signal) && !about_to_fork
}

/// A set of signals from a `/proc/PID/status`; empty if it is not there.
pub(crate) fn mask(status: &str, name: &str) -> u64 {
    status
        .lines()
        .find_map(|line| u64::from_str_radix(line.strip_prefix(name)?.trim(), 16).ok())
        .unwrap_or_default()
}

fn is_in(mask: u64, signal: Signal) -> bool {
    mask & 1 << (signal.as_raw() - 1) != 0
}

/// A process id as rustix wants it.
pub(crate) fn raw(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw)
}

/// All processes that this one may see.
pub(crate) fn all() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(Process::read)
        .collect()
}

/// The children of this thread's process, which has only this thread; `None` if the kernel does not list them.
///
/// Complete as long as nobody reaps meanwhile, which only this thread could.
pub(crate) fn children() -> Option<Vec<u32>> {
    let list = fs::read_to_string("/proc/thread-self/children").ok()?;
    list.split_ascii_whitespace()
        .map(|pid| pid.parse().ok())
        .collect()
}

/// Those among `all` that are below `root` and live, each with the leader that it belongs to, if it belongs to one.
///
/// A process belongs to the leader above it; if none is above it any more, to the leader whose session or group it is in;
/// and else to that to which its parent belongs. One that has left its session and has lost its parent belongs to nobody.
pub(crate) fn below(
    all: &[Process],
    root: u32,
    leaders: &HashSet<u32>,
) -> Vec<(Process, Option<u32>)> {
    let mut children = HashMap::<u32, Vec<&Process>>::new();
    for process in all {
        children.entry(process.parent).or_default().push(process);
    }
    let mut found = Vec::new();
    let mut open = vec![(root, None)];
    while let Some((parent, inherited)) = open.pop() {
        // Taken out, so that a list that changed while it was read can't lead in circles.
        for child in children.remove(&parent).unwrap_or_default() {
            let own = [child.pid, child.session, child.group];
            let owner = inherited.or_else(|| own.into_iter().find(|id| leaders.contains(id)));
            if !child.dead {
                found.push((*child, owner));
            }
            open.push((child.pid, owner));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_full_of_traps_is_skipped() {
        let stat = b"7 (a) R 1 (\xff) S 4 5 6 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 9876 10 11";
        let process = Process::parse(7, stat).unwrap();
        let expected = Process {
            pid: 7,
            parent: 4,
            group: 5,
            session: 6,
            start: 9876,
            dead: false,
        };
        assert_eq!(process, expected);
        assert_eq!(Process::parse(7, b"7 (a) S 4 5"), None);
        assert_eq!(Process::parse(7, b""), None);
    }

    #[test]
    fn this_process_is_found_below_its_parent() {
        let me = Process::read(std::process::id()).unwrap();
        assert!(!me.dead);
        let found = below(&all(), me.parent, &HashSet::new());
        assert!(found.iter().any(|(process, _)| process.pid == me.pid));
        assert!(found.iter().all(|(process, _)| process.pid != me.parent));
    }

    fn process(pid: u32, parent: u32, group: u32, session: u32) -> Process {
        Process {
            pid,
            parent,
            group,
            session,
            start: 0,
            dead: false,
        }
    }

    #[test]
    fn a_circle_ends() {
        let all = [
            process(2, 1, 0, 0),
            process(1, 2, 0, 0),
            process(3, 2, 0, 0),
        ];
        assert_eq!(below(&all, 1, &HashSet::new()).len(), 3);
    }

    #[test]
    fn everything_below_a_leader_is_its_own_and_so_is_what_it_left_in_its_session() {
        // 10 lives; 20 is gone and has left 21 to 24; 30 is a leader of which nothing is left.
        let all = [
            process(1, 0, 1, 1),
            process(10, 1, 10, 10),
            process(11, 10, 10, 10),
            process(12, 11, 12, 12),
            // It has lost its parent.
            process(13, 1, 10, 10),
            process(21, 1, 20, 20),
            // In a session of its own, below one that is still known.
            process(22, 21, 22, 22),
            process(23, 1, 23, 20),
            // Both.
            process(24, 1, 24, 24),
            process(25, 24, 24, 24),
            process(40, 0, 40, 40),
        ];
        let mut found: Vec<(u32, Option<u32>)> = below(&all, 1, &[10, 20, 30].into())
            .into_iter()
            .map(|(process, owner)| (process.pid, owner))
            .collect();
        found.sort_unstable();
        let expected = [
            (10, Some(10)),
            (11, Some(10)),
            (12, Some(10)),
            (13, Some(10)),
            (21, Some(20)),
            (22, Some(20)),
            (23, Some(20)),
            (24, None),
            (25, None),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn the_dead_are_not_left() {
        let mut all = [process(10, 1, 10, 10), process(11, 1, 10, 10)];
        all[1].dead = true;
        assert_eq!(below(&all, 1, &[10].into()).len(), 1);
    }

    #[test]
    fn a_process_whose_first_thread_has_ended_lives() {
        let stat = |threads: u32| {
            format!("7 (a) Z 4 5 6 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 {threads} 0 9876 10")
        };
        assert!(Process::parse(7, stat(1).as_bytes()).unwrap().dead);
        assert!(!Process::parse(7, stat(2).as_bytes()).unwrap().dead);
    }

    #[test]
    fn who_catches_a_signal_or_keeps_it_back_expects_it() {
        // USR1 is 10, USR2 is 12.
        let is_expected = |blocked: u64, caught: u64, signal: Signal| {
            let status = format!(
                "Name:\tx\nSigBlk:\t{blocked:016x}\nSigIgn:\t0800\nSigCgt:\t{caught:016x}\n"
            );
            is_expected(&status, signal)
        };
        assert!(!is_expected(0, 0, Signal::USR1));
        assert!(is_expected(0, 1 << 9, Signal::USR1));
        assert!(!is_expected(0, 1 << 9, Signal::USR2));
        assert!(is_expected(1 << 11, 0, Signal::USR2));
        // As while a process forks.
        assert!(!is_expected(!0, 0, Signal::USR2));
        assert!(is_expected(!0, 1 << 11, Signal::USR2));
        assert!(is_in(mask("SigIgn:\t0800", "SigIgn:"), Signal::USR2));
        assert_eq!(mask("", "SigIgn:"), 0);
    }

    #[test]
    fn a_variable_is_read_from_the_environment_at_the_start() {
        let me = Process::read(std::process::id()).unwrap();
        let (name, value) = std::env::vars().find(|(name, _)| name == "PATH").unwrap();
        assert!(me.has_variable(&name, |found| found == value.as_bytes()));
        assert!(!me.has_variable("PAT", |_| true));
    }
}
