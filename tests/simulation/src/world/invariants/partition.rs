//! A partition: the side without the head stops within its lease, and nothing of it is accepted later.

use std::collections::BTreeSet;
use std::time::Duration;

use kolo_core::fence;
use kolo_wire::ids::JobId;

use crate::knobs::{SECOND, Time};
use crate::world::World;

impl World {
    /// A node still does not reach the head. Workers of elastic jobs have ended there in time, whether they could work or not.
    pub(crate) fn check_alone(&mut self, node: usize) {
        let there = self.processes.values();
        let there = there.filter(|process| process.alive && process.node == node);
        let jobs: BTreeSet<JobId> = there.map(|process| process.model.name.job).collect();
        for job in jobs {
            let alone = self.is_fenced(job, node);
            self.hold("partition", alone);
        }
    }

    /// Whether a worker of an elastic job may run on a node now.
    pub(crate) fn is_fenced(&self, job: JobId, node: usize) -> Result<(), String> {
        let Some(since) = self.nodes[node].alone_since else {
            return Ok(());
        };
        let frozen = self.nodes[node].frozen;
        let lease = Duration::from_micros(self.knobs.lease);
        // Then the notice ends, and after it all processes.
        let ended = fence::of_node(lease) + fence::NOTICE;
        let limit = ended.as_micros() as Time + SECOND + frozen;
        if self.is_elastic(job) && self.now > since + limit {
            return Err(format!(
                "{job} runs on {}, which has been without the head for {} s",
                self.nodes[node].id,
                (self.now - since) / SECOND
            ));
        }
        Ok(())
    }
}
