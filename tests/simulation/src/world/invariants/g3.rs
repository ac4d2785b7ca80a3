//! G-3: no two generations of a job are active at once.

use std::collections::BTreeMap;

use kolo_wire::ids::{Generation, JobId};
use kolo_wire::{GenerationTable, StartWorkers};

use crate::world::World;

/// What generations of each job have done.
#[derive(Debug, Default)]
pub(crate) struct Generations {
    committed: BTreeMap<JobId, Generation>,
    told: BTreeMap<JobId, Generation>,
}

impl Generations {
    /// All members of a generation are at one commit.
    pub(crate) fn committed(&mut self, job: JobId, generation: Generation) -> Result<(), String> {
        let last = self.committed.entry(job).or_default();
        if generation < *last {
            return Err(format!(
                "generation {generation} of {job} commits after generation {last} did"
            ));
        }
        *last = generation;
        Ok(())
    }

    /// The driver is told of a generation.
    pub(crate) fn active(&mut self, table: &GenerationTable) -> Result<(), String> {
        match self.told.insert(table.job, table.generation) {
            Some(before) if before >= table.generation => Err(format!(
                "the driver of {} is told of generation {} after {before}",
                table.job, table.generation
            )),
            _ => Ok(()),
        }
    }

    /// The generation that the driver was told of last.
    pub(crate) fn last(&self, job: JobId) -> Generation {
        self.told.get(&job).copied().unwrap_or_default()
    }
}

/// A process of a job that is started anew at each change is started: none of an older generation is there.
pub(crate) fn follows(world: &World, pid: u32, start: &StartWorkers) -> Result<(), String> {
    let (job, generation) = (start.job, start.generation);
    let old = world.processes.iter().find(|(_, process)| {
        let place = process.model.place();
        process.alive
            && process.model.name.job == job
            && place.is_some_and(|(other, _)| other < generation)
    });
    match old {
        Some((old, _)) => Err(format!(
            "process {pid} of generation {generation} of {job} starts, and process {old} of an older one is there"
        )),
        None => Ok(()),
    }
}
