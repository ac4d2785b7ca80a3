//! Passing on signals to workers and what is below them.

use std::collections::{HashMap, HashSet};

use rustix::io::Errno;

use super::Warden;
use super::hunt::own_group;
use crate::child::{Meaning, Signal};
use crate::procfs::{self, Process};
use crate::protocol::FromWarden;

impl Warden {
    /// Sends a signal to workers, by request. See [`Child::signal`](crate::Child::signal).
    pub(super) fn signal(&mut self, signal: Signal, ids: &HashSet<u64>) {
        let workers = self.workers.iter().map(|(pid, worker)| (*pid, worker.id));
        let ended = self.ended.iter().map(|(pid, id)| (*pid, *id));
        let leaders: HashSet<u32> = workers
            .chain(ended)
            .filter(|(_, id)| ids.contains(id))
            .map(|(pid, _)| pid)
            .collect();
        if leaders.is_empty() {
            return;
        }
        if signal.meaning() == Meaning::Kill {
            return self.kill(&leaders);
        }
        let mut below = self.look(&self.leaders());
        below.retain(|(process, _)| process.group != own_group());
        let reached = reached(signal.meaning(), &below, &leaders);
        let refused: Vec<u32> = match signal.meaning() {
            Meaning::User => reached
                .into_iter()
                .filter(|process| process.expects(signal.raw()))
                .filter(|process| process.signal(signal.raw()) == Err(Errno::PERM))
                .map(|process| process.pid)
                .collect(),
            Meaning::Control | Meaning::Kill => send(&groups(&reached), &[signal]),
            Meaning::Notice => {
                let alive: HashSet<_> = below.iter().map(|(p, _)| (p.pid, p.start)).collect();
                self.noticed
                    .retain(|(pid, start, _)| alive.contains(&(*pid, *start)));
                let mut groups = groups(&reached);
                groups.retain(|_, members| is_new(&self.noticed, signal, members));
                let members = groups.values().flatten();
                self.noticed
                    .extend(members.map(|process| (process.pid, process.start, signal)));
                // One that stands still can't obey.
                send(&groups, &[signal, Signal::Continue])
            }
        };
        if !refused.is_empty() {
            let reason = format!(
                "{signal:?} does not reach {refused:?}: they are of another user, or have other privileges"
            );
            self.tell(&FromWarden::Fault { reason }, None);
        }
    }
}

/// Who is reached by a signal to these leaders.
fn reached(
    meaning: Meaning,
    below: &[(Process, Option<u32>)],
    leaders: &HashSet<u32>,
) -> Vec<Process> {
    let is_reached = |owner: &Option<u32>| match owner {
        Some(owner) => leaders.contains(owner),
        // Whose it is nobody knows.
        None => meaning != Meaning::User,
    };
    below
        .iter()
        .filter(|(_, owner)| is_reached(owner))
        .map(|(process, _)| *process)
        .collect()
}

/// By process group, for a signal to a group also reaches those that are forked meanwhile.
fn groups(processes: &[Process]) -> HashMap<u32, Vec<Process>> {
    let mut groups = HashMap::<u32, Vec<Process>>::new();
    for process in processes {
        groups.entry(process.group).or_default().push(*process);
    }
    groups
}

/// Whether nobody in a group has had this signal. What a process forks after it, to save with for instance, is in its group.
fn is_new(noticed: &HashSet<(u32, u64, Signal)>, signal: Signal, members: &[Process]) -> bool {
    members
        .iter()
        .all(|process| !noticed.contains(&(process.pid, process.start, signal)))
}

/// Gives the groups that may not be signalled.
fn send(groups: &HashMap<u32, Vec<Process>>, signals: &[Signal]) -> Vec<u32> {
    let mut refused = Vec::new();
    for group in groups.keys() {
        let Some(pid) = procfs::raw(*group) else {
            continue;
        };
        for signal in signals {
            // That nobody is there any more is what is wanted.
            if rustix::process::kill_process_group(pid, signal.raw()) == Err(Errno::PERM) {
                refused.push(*group);
                break;
            }
        }
    }
    refused
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, group: u32) -> Process {
        Process {
            pid,
            parent: 1,
            group,
            session: group,
            start: u64::from(pid),
            dead: false,
        }
    }

    #[test]
    fn a_notice_reaches_what_belongs_to_nobody_and_a_signal_of_users_does_not() {
        let below = [
            (process(10, 10), Some(10)),
            (process(20, 20), Some(20)),
            (process(30, 30), None),
        ];
        for (meaning, expected) in [
            (Meaning::Notice, &[10, 30][..]),
            (Meaning::Control, &[10, 30]),
            (Meaning::User, &[10]),
        ] {
            let reached = reached(meaning, &below, &[10].into());
            let pids: Vec<u32> = reached.iter().map(|process| process.pid).collect();
            assert_eq!(pids, expected, "{meaning:?}");
        }
    }

    #[test]
    fn a_group_in_which_somebody_has_had_a_signal_does_not_get_it_again() {
        let members = [process(10, 10), process(11, 10)];
        let noticed = [(11, 11, Signal::Interrupt)].into();
        assert!(!is_new(&noticed, Signal::Interrupt, &members));
        assert!(is_new(&noticed, Signal::Terminate, &members));
        // Another process of that number.
        assert!(is_new(
            &[(11, 7, Signal::Interrupt)].into(),
            Signal::Interrupt,
            &members
        ));
    }

    #[test]
    fn processes_are_taken_together_by_group() {
        let groups = groups(&[process(10, 10), process(11, 10), process(12, 12)]);
        assert_eq!(groups[&10].len(), 2);
        assert_eq!(groups[&12], [process(12, 12)]);
    }
}
