//! D-2: workers live on while the head is away.

use kolo_wire::ids::JobId;

use crate::world::World;
use crate::world::node::Leaving;

impl World {
    /// A node asks a worker to end.
    pub(crate) fn check_stop(&mut self, node: usize, job: JobId) {
        let Some(daemon) = &self.nodes[node].daemon else {
            return;
        };
        let is_away = !daemon.registered && daemon.leaving == Leaving::No;
        if is_away && !self.is_elastic(job) && self.has_driver(job) {
            let id = self.nodes[node].id;
            let text = format!(
                "{id} ends workers of {job} while the head is away, and the driver is there"
            );
            self.violation("D-2", text);
        }
    }
}
