//! Liveness: when all faults are over, every job that can becomes whole and works, and at the end everything has ended.

use std::collections::BTreeMap;

use kolo_wire::ids::JobId;
use kolo_wire::{GenerationTable, GroupFilter, JobState, RefusalKind};

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
    pub(crate) fn check_size(&self, table: &GenerationTable) -> Result<(), String> {
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

/// Nothing has gone wrong for long.
pub(crate) fn service(world: &World) -> Result<(), String> {
    let mut drivers = world.drivers.iter();
    drivers.try_for_each(|driver| serves(world, driver))
}

fn serves(world: &World, driver: &Driver) -> Result<(), String> {
    let job = driver.job;
    match &driver.view {
        View::Submitted | View::Whole if driver.is_bad && driver.alive => {
            return Err(format!("{job} fails again and again, and does not end"));
        }
        View::Submitted if world.now > driver.since + 40 * SECOND => {
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
        serves_elastic(world, driver, table)?;
    } else if !driver.lost.is_empty() {
        // A static job works as long as it has lost nobody.
        return Ok(());
    }
    if driver.plan == Plan::Stay {
        works(world, job)?;
    }
    Ok(())
}

fn works(world: &World, job: JobId) -> Result<(), String> {
    let last = world.oracle.progress.0.get(&job).copied();
    let patience = world.knobs.step * 4 + 4 * SECOND;
    if last.is_none_or(|last| last + patience < world.now) {
        let last = last.map(|last| last / SECOND);
        return Err(format!(
            "{job} makes no commits: the last one was at {last:?} s"
        ));
    }
    Ok(())
}

/// The group is whole, and has no room to grow.
fn serves_elastic(world: &World, driver: &Driver, table: &GenerationTable) -> Result<(), String> {
    is_whole(world, table)?;
    // A job that may not change any more or has a filter leaves room free.
    let grows = |it: &&kolo_wire::Elastic| it.filters.is_empty() && it.max_resets.is_none();
    let (size, max) = (
        table.world_size(),
        driver.limits().filter(grows).map_or(0, |it| it.max),
    );
    let has_room = (0..world.nodes.len()).find(|node| has_room(world, driver, *node));
    match has_room.filter(|_| size < max) {
        Some(node) => Err(format!(
            "{} has {size} members of {max}, and {} has room for {} more",
            driver.job,
            world.nodes[node].id,
            driver.unit()
        )),
        None => Ok(()),
    }
}

/// A node has room for more workers of a job.
fn has_room(world: &World, driver: &Driver, node: usize) -> bool {
    let Some(daemon) = &world.nodes[node].daemon else {
        return false;
    };
    let mut there = world.processes.values().filter(|process| process.alive);
    let is_there =
        there.any(|process| process.node == node && process.model.name.job == driver.job);
    let unit = driver.unit();
    let free = daemon.core.free().cpus.0 / 1000;
    free >= u64::from(unit) && !(driver.takes_hosts() && is_there)
}

/// All members of a generation live, and are in it.
fn is_whole(world: &World, table: &GenerationTable) -> Result<(), String> {
    for member in &table.members {
        let process = world.process_of(&Name::of(table.job, member));
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
pub(crate) fn quiet(world: &World) -> Result<(), String> {
    let open = world.drivers.iter().find(|driver| driver.is_there());
    if let Some(driver) = open {
        return Err(format!("{} does not end: {:?}", driver.job, driver.view));
    }
    match world.head.rendezvous.first_key_value() {
        Some((job, _)) => Err(format!("the rendezvous of {job} is left open")),
        None => Ok(()),
    }
}
