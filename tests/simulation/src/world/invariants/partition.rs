//! A partition: the side without the head stops within its lease, and nothing of it is accepted later.

use std::collections::BTreeSet;
use std::time::Duration;

use kolo_core::fence;
use kolo_wire::ids::JobId;

use crate::knobs::{SECOND, Time};
use crate::world::World;

/// A node still does not reach the head. Workers of elastic jobs have ended there in time, whether they could work or not.
pub(crate) fn alone(world: &World, node: usize) -> Result<(), String> {
    let there = world.processes.values();
    let there = there.filter(|process| process.alive && process.node == node);
    let jobs: BTreeSet<JobId> = there.map(|process| process.model.name.job).collect();
    jobs.into_iter()
        .try_for_each(|job| fenced(world, job, node))
}

/// A worker of an elastic job may run on a node now.
pub(crate) fn fenced(world: &World, job: JobId, node: usize) -> Result<(), String> {
    let Some(since) = world.nodes[node].alone_since else {
        return Ok(());
    };
    let frozen = world.nodes[node].frozen;
    let lease = Duration::from_micros(world.knobs.lease);
    // Then the notice ends, and after it all processes.
    let ended = fence::of_node(lease) + fence::NOTICE;
    let limit = ended.as_micros() as Time + SECOND + frozen;
    if world.is_elastic(job) && world.now > since + limit {
        return Err(format!(
            "{job} runs on {}, which has been without the head for {} s",
            world.nodes[node].id,
            (world.now - since) / SECOND
        ));
    }
    Ok(())
}
