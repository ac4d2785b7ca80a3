//! E-1: a commit that all members have is never lost while one of them lives on a node that the head has not lost. A job may begin
//! anew if the head has heard of no commit, and those that have one are dead, or cut off and about to be ended.

use std::collections::{BTreeMap, BTreeSet};

use kolo_wire::ids::{Generation, Incarnation, JobId, Slot};
use kolo_wire::{GenerationTable, Handover, HeadRequest, NodeEvent, StartWorkers};

use super::g3::Generations;
use crate::group::Group;
use crate::worker::{Name, Progress, Saved};
use crate::world::World;
use crate::world::process::Process;

/// The commits of all jobs.
#[derive(Debug, Default)]
pub(crate) struct Commits {
    has: BTreeMap<(JobId, u64, u64), BTreeSet<Name>>,
    /// The last commit that all members of a generation have had, and its members.
    last: BTreeMap<JobId, (Saved, BTreeSet<Name>)>,
    /// Processes that the head does not count on any more: it has lost their node, or that has said that nothing of the job is left.
    given_up: BTreeSet<Name>,
    /// The last process of each slot that the head wanted.
    newest: BTreeMap<(JobId, Slot), Incarnation>,
    /// Members whose word of a commit the head has heard.
    heard: BTreeMap<(JobId, Generation), BTreeSet<Name>>,
    /// Generations of which all members have said that they have a commit.
    known: BTreeSet<(JobId, Generation)>,
}

impl Commits {
    /// A member of a group of this size has a commit. True if all have it now.
    pub(crate) fn has(&mut self, name: Name, saved: Saved, members: usize) -> bool {
        let key = (name.job, saved.generation, saved.number);
        let names = self.has.entry(key).or_default();
        names.insert(name);
        if names.len() < members {
            return false;
        }
        let names = self.has.remove(&key).unwrap_or_default();
        let last = self.last.entry(name.job).or_default();
        if last.0 < saved {
            *last = (saved, names);
        }
        self.has
            .retain(|(job, generation, _), _| *job != name.job || *generation >= saved.generation);
        true
    }

    /// The members of a generation have agreed on the state to go on from.
    pub(crate) fn met<'a>(
        &self,
        job: JobId,
        state: Progress,
        living: impl Fn(&Name) -> Option<&'a Process>,
    ) -> Result<(), String> {
        let Some((last, names)) = self.last.get(&job) else {
            return Ok(());
        };
        let holder = names
            .iter()
            .find(|name| living(name).is_some_and(|it| it.model.saved() >= *last));
        match holder {
            Some(holder) if state < last.progress => Err(format!(
                "{job} goes on from step {}, and slot {} has the commit of step {}, which all had",
                state.steps, holder.slot, last.progress.steps
            )),
            _ => Ok(()),
        }
    }

    /// The head asks a node to start processes. What it hears of older ones does not count any more.
    pub(crate) fn ordered(&mut self, start: &StartWorkers) {
        for slot in &start.slots {
            let member = &slot.member;
            let key = (start.job, member.slot);
            self.newest.insert(key, member.incarnation);
        }
    }

    /// The head hears that a member of a group of this size has a commit. The word of a process that it has given up does not count.
    fn hears(&mut self, name: Name, generation: Generation, members: usize) {
        let is_newest = self.newest.get(&(name.job, name.slot)) == Some(&name.incarnation);
        if self.given_up.contains(&name) || !is_newest {
            return;
        }
        let names = self.heard.entry((name.job, generation)).or_default();
        names.insert(name);
        if names.len() == members {
            self.known.insert((name.job, generation));
        }
    }

    fn last(&self, job: JobId) -> Option<Saved> {
        self.last.get(&job).map(|(saved, _)| *saved)
    }

    /// The head hears of commits. Those of generations that are over do not count.
    pub(crate) fn reported(
        &mut self,
        request: &HeadRequest,
        generations: &Generations,
        groups: &BTreeMap<(JobId, Generation), Group>,
    ) {
        let HeadRequest::Events(events) = request else {
            return;
        };
        for event in events {
            let NodeEvent::Committed {
                job,
                slot,
                incarnation,
                generation,
                ..
            } = *event
            else {
                continue;
            };
            let name = Name {
                job,
                slot,
                incarnation,
            };
            let is_over = generation < generations.last(job);
            let group = groups.get(&(job, generation));
            if let Some(group) = group.filter(|_| !is_over) {
                self.hears(name, generation, group.members.len());
            }
        }
    }

    /// The head counts on no process of a node any more, or on none of a job there.
    pub(crate) fn give_up<'a>(
        &mut self,
        processes: impl Iterator<Item = &'a Process>,
        node: usize,
        job: Option<JobId>,
    ) {
        let names = processes
            .filter(|it| it.node == node)
            .map(|it| it.model.name);
        let given_up = names.filter(|name| job.is_none_or(|job| name.job == job));
        self.given_up.extend(given_up);
    }

    /// A process lives, and the head may count on it.
    pub(crate) fn counts(&self, process: &Process) -> bool {
        process.alive && !self.given_up.contains(&process.model.name)
    }
}

/// Some process that lives and counts has the commit, and has not gone on from another one in the new generation.
fn has_holder(world: &World, table: &GenerationTable, last: Saved) -> bool {
    world.processes.values().any(|process| {
        let saved = process.model.saved();
        world.oracle.commits.counts(process)
            && process.model.name.job == table.job
            && saved >= last
            && saved.generation < table.generation.0
    })
}

/// A generation is active: rank 0 has the last commit that all had, unless it is read from where it outlives all.
pub(crate) fn state(world: &World, table: &GenerationTable) -> Result<(), String> {
    let commits = &world.oracle.commits;
    let last = commits
        .last(table.job)
        .filter(|_| table.handover != Handover::Restore);
    let (Some(last), Some(first)) = (last, table.members.first()) else {
        return Ok(());
    };
    let before = (table.job, Generation(0))..(table.job, table.generation);
    let mut known = commits.known.range(before);
    let is_known = known.any(|(job, known)| world.oracle.restarts.was_active(*job, *known));
    let process = world.process_of(&Name::of(table.job, first));
    // A program reads its checkpoint when it begins.
    let is_program = process.is_some_and(|process| process.model.is_program());
    let saved = process.map(|process| process.model.saved());
    let has_it = saved.is_some_and(|saved| saved.progress >= last.progress);
    if has_it || is_program || !(is_known || has_holder(world, table, last)) {
        return Ok(());
    }
    Err(format!(
        "generation {} of {} has a rank 0 (slot {}) with the state of step {}, and step {} was committed by all",
        table.generation,
        table.job,
        first.slot,
        saved.unwrap_or_default().progress.steps,
        last.progress.steps
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_of_a_member_that_was_given_up_is_not_heard() {
        let (job, generation) = (JobId(1), Generation(1));
        let [first, last] = [0, 1].map(|slot| Name {
            job,
            slot: Slot(slot),
            incarnation: Incarnation::FIRST,
        });
        let is_known = |given_up: &[Name], newest: Incarnation| {
            let mut commits = Commits::default();
            commits.newest.insert((job, first.slot), Incarnation::FIRST);
            commits.newest.insert((job, last.slot), newest);
            commits.hears(first, generation, 2);
            commits.given_up.extend(given_up);
            commits.hears(last, generation, 2);
            commits.known.contains(&(job, generation))
        };
        assert!(is_known(&[], Incarnation::FIRST));
        // It was given up after its word had come.
        assert!(is_known(&[first], Incarnation::FIRST));
        assert!(!is_known(&[last], Incarnation::FIRST));
        assert!(!is_known(&[], Incarnation(Incarnation::FIRST.0 + 1)));
    }
}
