//! D-2: workers live on while the head is away.

use kolo_wire::ids::JobId;

use crate::world::World;
use crate::world::node::Leaving;

/// A node asks a worker to end.
pub(crate) fn stop(world: &World, node: usize, job: JobId) -> Result<(), String> {
    let Some(daemon) = &world.nodes[node].daemon else {
        return Ok(());
    };
    let is_away = !daemon.registered && daemon.leaving == Leaving::No;
    if is_away && !world.is_elastic(job) && world.has_driver(job) {
        let id = world.nodes[node].id;
        return Err(format!(
            "{id} ends workers of {job} while the head is away, and the driver is there"
        ));
    }
    Ok(())
}
