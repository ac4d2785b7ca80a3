//! Installed programs, which do not call kolo: their processes have their ranks from the start, say nothing to their node, meet by
//! themselves, and end when a peer is gone. Rank 0 writes checkpoints to a disk that all hosts share; the next group goes on there.

use kolo_core::node::messages::Spawning;

use crate::group::Group;
use crate::worker::{Fate, Saved, Worker};
use crate::world::World;
use crate::world::invariants::g3;

impl World {
    /// A node starts a process of an installed program.
    pub(crate) fn program_starts(&mut self, pid: u32, model: &mut Worker, spawning: &Spawning) {
        let (name, start) = (model.name, &spawning.start);
        let mut members = start.slots.iter().map(|slot| &slot.member);
        let Some(member) = members.find(|member| member.slot == name.slot) else {
            let text = format!("slot {} of {} has no rank", name.slot, name.job);
            return self.violation("R-1", text);
        };
        let (rank, size, generation) = (member.rank, start.world_size, start.generation);
        let is_bad = self.driver_of(name.job).is_some_and(|driver| driver.is_bad);
        let fate = if is_bad { Fate::Fails } else { Fate::Works };
        model.start_as(generation, (rank, size), fate);
        let group = self.groups.entry((name.job, generation));
        let group = group.or_insert_with(|| Group::new((0..size).map(|_| None)));
        let started = group.started(rank, size, name);
        self.hold("G-3", started);
        if self.is_elastic(name.job) {
            let started = self.oracle.restarts.starts(start);
            self.hold("restart", started);
            self.hold("G-3", g3::follows(self, pid, start));
        }
    }

    /// The program of a process has started.
    pub(crate) fn program_begins(&mut self, pid: u32) {
        let Some(process) = self.processes.get_mut(&pid) else {
            return;
        };
        if !process.is_ending {
            let saved = self.checkpoints.get(&process.model.name.job).copied();
            let acts = process.model.begin(saved.unwrap_or_default());
            self.act(pid, acts);
        }
    }

    /// A process has a commit, and writes it if it is rank 0.
    pub(crate) fn checkpoint(&mut self, pid: u32, saved: Saved) {
        let Some(process) = self.processes.get(&pid) else {
            return;
        };
        let is_first = (process.model.place()).is_some_and(|(_, rank)| rank.0 == 0);
        if !process.model.is_program() || !is_first {
            return;
        }
        let job = process.model.name.job;
        let last = self.checkpoints.insert(job, saved).unwrap_or_default();
        if saved.generation < last.generation {
            let text = format!(
                "generation {} of {job} writes a checkpoint after generation {} did",
                saved.generation, last.generation
            );
            self.violation("G-1", text);
        }
    }
}
