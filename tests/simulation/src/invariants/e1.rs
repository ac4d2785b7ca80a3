//! E-1: a commit that all members have is never lost while one of them lives.

use std::collections::{BTreeMap, BTreeSet};

use kolo_wire::ids::JobId;
use kolo_wire::{GenerationTable, Handover};

use crate::process::Process;
use crate::worker::{Name, Progress, Saved};
use crate::world::World;

/// The commits of all jobs.
#[derive(Debug, Default)]
pub(crate) struct Commits {
    has: BTreeMap<(JobId, u64, u64), BTreeSet<Name>>,
    /// The last commit that all members of a generation have had, and its members.
    last: BTreeMap<JobId, (Saved, BTreeSet<Name>)>,
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

    fn last(&self, job: JobId) -> Option<Saved> {
        self.last.get(&job).map(|(saved, _)| *saved)
    }
}

impl World {
    /// Some process that lives has the commit.
    fn has_holder(&self, job: JobId, last: Saved) -> bool {
        let mut all = self.processes.values().filter(|process| process.alive);
        all.any(|process| process.model.name.job == job && process.model.saved() >= last)
    }

    /// A generation is active: rank 0 has the last commit that all had, unless it is read from where it outlives all.
    pub(crate) fn check_state(&mut self, table: &GenerationTable) {
        if table.handover == Handover::Restore {
            return;
        }
        let Some(last) = self.oracle.commits.last(table.job) else {
            return;
        };
        // A job may begin anew if all that have committed are gone before the head has heard of that.
        if !self.has_holder(table.job, last) {
            return;
        }
        let Some(first) = table.members.first() else {
            return;
        };
        let name = Name::of(table.job, first);
        let pid = self.names.get(&name);
        let saved = pid
            .and_then(|pid| self.processes.get(pid))
            .map(|process| process.model.saved());
        if saved.is_none_or(|saved| saved.progress < last.progress) {
            let text = format!(
                "generation {} of {} has a rank 0 (slot {}) with the state of step {}, and step {} was committed by all",
                table.generation,
                table.job,
                first.slot,
                saved.unwrap_or_default().progress.steps,
                last.progress.steps
            );
            self.violation("E-1", text);
        }
    }
}
