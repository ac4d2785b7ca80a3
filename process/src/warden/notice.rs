//! Passing on signals to workers and what is below them.

use std::collections::{HashMap, HashSet};

use rustix::io::Errno;

use super::Warden;
use super::hunt::own_group;
use crate::procfs::{self, Process};
use crate::protocol::FromWarden;
use crate::signal::{Meaning, Signal};

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
            Meaning::User => topmost(reached, |process| process.expects(signal.raw()))
                .into_iter()
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

impl Warden {
    /// Sends `SIGTERM` to what workers have left behind where nobody hears the notice that it had. A shell starts what it does
    /// not wait for with `SIGINT` ignored; without this such a process would use up the time of a Ctrl-C. As long as somebody
    /// is there who does hear it, that one may need the others to end well.
    pub(super) fn notice_the_deaf(&mut self) {
        const INTERRUPT: Signal = Signal::Interrupt;
        let is_interrupt = |noticed: &(u32, u64, Signal)| noticed.2 == INTERRUPT;
        if self.ended.is_empty() || !self.noticed.iter().any(is_interrupt) {
            return;
        }
        let below = self.look(&self.leaders());
        let deaf = |leader: &u32| {
            let left = reached(Meaning::Notice, &below, &[*leader].into());
            let had = |signal, members: &Vec<Process>| !is_new(&self.noticed, signal, members);
            groups(&left).values().all(|members| {
                let ignores = |process: &Process| process.ignores(INTERRUPT.raw());
                had(INTERRUPT, members) && members.iter().all(ignores)
            })
        };
        let ids: HashSet<u64> = self
            .ended
            .iter()
            .filter(|(leader, _)| deaf(leader))
            .map(|(_, id)| *id)
            .collect();
        if !ids.is_empty() {
            self.signal(Signal::Terminate, &ids);
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

/// Those that `expects` accepts and that are below no other such one: what a program has started, and what has its handlers
/// until it runs a program of its own, is the program's business.
fn topmost(processes: Vec<Process>, expects: impl Fn(&Process) -> bool) -> Vec<Process> {
    let parents: HashMap<u32, u32> = processes.iter().map(|p| (p.pid, p.parent)).collect();
    let expecting: HashSet<u32> = processes
        .iter()
        .filter(|process| expects(process))
        .map(|process| process.pid)
        .collect();
    let is_below_another = |process: &Process| {
        let mut above = process.parent;
        // As many steps as there are processes, if a list that changed while it was read has a circle.
        for _ in 0..parents.len() {
            if expecting.contains(&above) {
                return true;
            }
            match parents.get(&above) {
                Some(parent) => above = *parent,
                None => return false,
            }
        }
        false
    };
    processes
        .into_iter()
        .filter(|process| expecting.contains(&process.pid) && !is_below_another(process))
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
    fn a_signal_of_users_stops_at_the_first_on_its_way_down_that_expects_it() {
        let below = |pid, parent| Process {
            parent,
            ..process(pid, 10)
        };
        // A shell; the program and what it has forked; another program below a second shell.
        let all = vec![
            below(10, 1),
            below(11, 10),
            below(12, 11),
            below(13, 12),
            below(20, 10),
            below(21, 20),
        ];
        let expecting = [11, 13, 21];
        let reached = topmost(all, |process| expecting.contains(&process.pid));
        let pids: Vec<u32> = reached.iter().map(|process| process.pid).collect();
        assert_eq!(pids, [11, 21]);
        let circle = vec![below(1, 2), below(2, 1)];
        assert_eq!(topmost(circle, |_| false), []);
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
