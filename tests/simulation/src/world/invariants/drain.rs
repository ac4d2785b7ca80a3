//! A node that is drained has no worker of an elastic job after the deadline.

use crate::knobs::{MS, Time};
use crate::world::World;

/// Members that are still there are ended after it.
pub(crate) const DEADLINE: Time = 3000 * MS;

pub(crate) fn left(world: &World) -> Result<(), String> {
    let left = world.processes.iter().find(|(_, process)| {
        process.alive
            && world.nodes[process.node].drained
            && world.is_elastic(process.model.name.job)
    });
    match left {
        Some((pid, process)) => Err(format!(
            "process {pid} of {} is on host-{}, which was drained long ago",
            process.model.name.job,
            process.node + 1
        )),
        None => Ok(()),
    }
}
