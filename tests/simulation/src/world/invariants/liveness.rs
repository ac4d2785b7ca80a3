//! Liveness: when all faults are over, every job that can becomes whole and works, and at the end everything has ended.

use std::collections::BTreeMap;

use kolo_wire::ids::JobId;
use kolo_wire::{GroupFilter, JobState, RefusalKind};

use crate::knobs::{FAULTS, SECOND, Time};
use crate::worker::Name;
use crate::world::World;
use crate::world::driver::{Driver, Plan, View};

/// When each job has committed last.
#[derive(Debug, Default)]
pub(crate) struct Progress(BTreeMap<JobId, Time>);

impl Progress {
    pub(crate) fn commit(&mut self, job: JobId, now: Time) {
        self.0.insert(job, now);
    }
}

impl Driver {
    /// A group is as large as it may be.
    pub(crate) fn check_size(&self, table: &kolo_wire::GenerationTable) -> Result<(), String> {
        let size = table.world_size();
        match self.limits() {
            Some(limits)
                if !(limits.min..=limits.max).contains(&size)
                    || !size.is_multiple_of(self.unit())
                    || limits.filters.iter().any(|filter| match filter {
                        GroupFilter::Max(most) => size > *most,
                        GroupFilter::DivisibleBy(count) => !size.is_multiple_of(*count),
                        GroupFilter::WholeHosts(_) => false,
                    }) =>
            {
                Err(format!(
                    "{} has {size} members; allowed are {} to {} in steps of {}, {:?}",
                    self.job,
                    limits.min,
                    limits.max,
                    self.unit(),
                    limits.filters
                ))
            }
            _ => Ok(()),
        }
    }
}

impl World {
    /// Nothing has gone wrong for long.
    pub(crate) fn check_service(&mut self) {
        self.check_drivers_know();
        self.check_answers();
        for driver in 0..self.drivers.len() {
            if let Err(text) = self.serves(&self.drivers[driver]) {
                return self.violation("liveness", text);
            }
        }
    }

    fn serves(&self, driver: &Driver) -> Result<(), String> {
        let job = driver.job;
        match &driver.view {
            View::Submitted | View::Whole if driver.is_bad && driver.alive => {
                return Err(format!("{job} fails again and again, and does not end"));
            }
            View::Submitted if self.now > driver.since + 40 * SECOND => {
                return Err(format!("{job} has no group and no end after 40 s"));
            }
            // What can't be placed fails.
            View::Ended(JobState::Failed, Some(refusal))
                if driver.since > FAULTS + SECOND
                    && driver.table.is_none()
                    && refusal.kind != RefusalKind::Unplaceable
                    && !refusal.message.contains("no room") =>
            {
                return Err(format!(
                    "{job} was submitted to a cluster that is well, and failed: {refusal}"
                ));
            }
            _ => {}
        }
        if driver.view != View::Whole || !driver.alive {
            return Ok(());
        }
        let Some(table) = &driver.table else {
            return Ok(());
        };
        if driver.is_elastic() {
            return self.serves_elastic(driver, table);
        }
        // A static job works as long as it has lost nobody.
        if driver.lost.is_empty() && driver.plan == Plan::Stay {
            self.works(job)?;
        }
        Ok(())
    }

    fn works(&self, job: JobId) -> Result<(), String> {
        let last = self.oracle.progress.0.get(&job).copied();
        let patience = self.knobs.step * 4 + 4 * SECOND;
        if last.is_none_or(|last| last + patience < self.now) {
            let last = last.map(|last| last / SECOND);
            return Err(format!(
                "{job} makes no commits: the last one was at {last:?} s"
            ));
        }
        Ok(())
    }

    fn serves_elastic(
        &self,
        driver: &Driver,
        table: &kolo_wire::GenerationTable,
    ) -> Result<(), String> {
        let job = driver.job;
        self.is_whole(table)?;
        // A job that may not change any more or has a filter leaves room free.
        let grows = |it: &&kolo_wire::Elastic| it.filters.is_empty() && it.max_resets.is_none();
        let (size, max) = (
            table.world_size(),
            driver.limits().filter(grows).map_or(0, |it| it.max),
        );
        let has_room = (0..self.nodes.len()).find(|node| self.has_room(driver, *node));
        if let Some(node) = has_room.filter(|_| size < max) {
            let node = self.nodes[node].id;
            return Err(format!(
                "{job} has {size} members of {max}, and {node} has room for {} more",
                driver.unit()
            ));
        }
        if driver.plan == Plan::Stay {
            self.works(job)?;
        }
        Ok(())
    }

    /// A node has room for more workers of a job.
    fn has_room(&self, driver: &Driver, node: usize) -> bool {
        let Some(daemon) = &self.nodes[node].daemon else {
            return false;
        };
        let mut there = self.processes.values().filter(|process| process.alive);
        let is_there =
            there.any(|process| process.node == node && process.model.name.job == driver.job);
        let unit = driver.unit();
        let free = daemon.core.free().cpus.0 / 1000;
        free >= u64::from(unit) && !(driver.takes_hosts() && is_there)
    }

    /// All members of a generation live, and are in it.
    fn is_whole(&self, table: &kolo_wire::GenerationTable) -> Result<(), String> {
        for member in &table.members {
            let process = self.process_of(&Name::of(table.job, member));
            let place = process
                .filter(|process| process.alive)
                .and_then(|process| process.model.place());
            if place.is_none_or(|(generation, _)| generation != table.generation) {
                return Err(format!(
                    "rank {} of generation {} of {} is not there",
                    member.rank, table.generation, table.job
                ));
            }
        }
        Ok(())
    }

    /// All jobs have ended.
    pub(crate) fn check_quiet(&mut self) {
        let open = self.drivers.iter().find(|driver| driver.is_there());
        if let Some(driver) = open {
            let text = format!("{} does not end: {:?}", driver.job, driver.view);
            return self.violation("liveness", text);
        }
        if let Some((job, _)) = self.head.rendezvous.first_key_value() {
            let text = format!("the rendezvous of {job} is left open");
            return self.violation("liveness", text);
        }
        self.check_conserved();
        self.check_answers();
    }
}
