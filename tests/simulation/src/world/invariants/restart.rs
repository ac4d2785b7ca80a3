//! Groups that are started anew at each change: one at a time, each with a port of its own, and with a count of restarts that no
//! loss of a node and no new node has raised.

use std::collections::{BTreeMap, BTreeSet};

use kolo_wire::StartWorkers;
use kolo_wire::ids::{Generation, JobId};

/// The groups of each job.
#[derive(Debug, Default)]
pub(crate) struct Restarts(BTreeMap<JobId, Groups>);

#[derive(Debug, Default)]
struct Groups {
    /// The newest one of which a process was started, and the newest one that some node was asked to start.
    newest: Generation,
    ordered: Generation,
    /// Groups since then that were not started, because their rendezvous could not be opened.
    unopened: usize,
    /// The variables that all processes of the newest one have.
    meets: BTreeMap<&'static str, String>,
    /// Where groups have met so far.
    stores: BTreeSet<[String; 2]>,
    /// Generations in which a process has ended of itself, and not well.
    failed: BTreeSet<Generation>,
    /// Generations that the driver was told of.
    active: BTreeSet<Generation>,
}

const STORE: [&str; 2] = ["MASTER_ADDR", "MASTER_PORT"];
const COUNT: &str = "TORCHELASTIC_RESTART_COUNT";

impl Groups {
    /// The most restarts that failures have used up before a generation. One that was never whole has failed, perhaps.
    fn failures(&self, before: Generation) -> usize {
        let all = (1..before.0).map(Generation);
        let has_failed = |it: &Generation| self.failed.contains(it) || !self.active.contains(it);
        all.filter(has_failed).count()
    }

    fn starts(&mut self, start: &StartWorkers) -> Result<(), String> {
        let generation = start.generation;
        let value = |name: &str| start.env.get(name).cloned().unwrap_or_default();
        let meets = [STORE[0], STORE[1], COUNT].map(|name| (name, value(name)));
        let meets = BTreeMap::from(meets);
        if generation == self.newest {
            let other = &self.meets;
            return if *other == meets {
                Ok(())
            } else {
                Err(format!(
                    "processes of generation {generation} have {meets:?} and {other:?}"
                ))
            };
        }
        if generation < self.newest {
            let newest = self.newest;
            return Err(format!(
                "generation {generation} starts a process after generation {newest} did"
            ));
        }
        let count: usize = meets[COUNT].parse().map_err(|_| format!("{meets:?}"))?;
        let failures = self.failures(generation);
        if count > failures {
            return Err(format!(
                "generation {generation} is after {count} restarts, and there were {failures} failures"
            ));
        }
        if !self.stores.insert(STORE.map(value)) {
            return Err(format!(
                "generation {generation} meets where one before has met: {meets:?}"
            ));
        }
        (self.newest, self.meets) = (generation, meets);
        Ok(())
    }
}

impl Restarts {
    /// A process has ended of itself, and not well.
    pub(crate) fn failed(&mut self, job: JobId, generation: Generation) {
        let groups = self.0.entry(job).or_default();
        groups.failed.insert(generation);
    }

    /// A process of a job that is started anew at each change is started.
    pub(crate) fn starts(&mut self, start: &StartWorkers) -> Result<(), String> {
        let groups = self.0.entry(start.job).or_default();
        let started = groups.starts(start);
        started.map_err(|text| format!("{}: {text}", start.job))
    }

    /// The head asks a node to start a part of a generation.
    pub(crate) fn ordered(&mut self, job: JobId, generation: Generation) {
        let groups = self.0.entry(job).or_default();
        if generation > groups.ordered {
            (groups.ordered, groups.unopened) = (generation, 0);
        }
    }

    /// The rendezvous of a group could not be opened.
    pub(crate) fn unopened(&mut self, job: JobId) {
        self.0.entry(job).or_default().unopened += 1;
    }

    /// A driver is told of a generation.
    pub(crate) fn active(&mut self, job: JobId, generation: Generation) {
        let groups = self.0.entry(job).or_default();
        groups.active.insert(generation);
    }

    /// The driver was told of the generation.
    pub(crate) fn was_active(&self, job: JobId, generation: Generation) -> bool {
        let groups = self.0.get(&job);
        groups.is_some_and(|groups| groups.active.contains(&generation))
    }

    /// The job has ended after too many failures: there were more than it was allowed.
    pub(crate) fn check_failures(&self, job: JobId, allowed: u32) -> Result<(), String> {
        let groups = self.0.get(&job);
        let last = groups.map_or(Generation(0), |groups| groups.ordered);
        let failures = groups.map_or(0, |groups| {
            groups.failures(Generation(last.0 + 1)) + groups.unopened
        });
        if failures > allowed as usize {
            return Ok(());
        }
        Err(format!(
            "{job} has ended after too many failures: {failures}, and {allowed} restarts were allowed"
        ))
    }
}
