//! F-1, for drivers: a driver that is there is told of each member that a node has reported to be lost; and a job whose driver is
//! gone ends.

use std::collections::{BTreeMap, BTreeSet};

use kolo_wire::ids::{Incarnation, JobId, Slot};
use kolo_wire::{HeadRequest, NodeEvent};

use crate::world::World;

/// What nodes have reported.
#[derive(Debug, Default)]
pub(crate) struct Told {
    exits: BTreeMap<JobId, BTreeSet<(Slot, Incarnation)>>,
}

impl Told {
    pub(crate) fn head_died(&mut self) {
        self.exits.clear();
    }

    /// A node has reported that some worker of the job has failed.
    pub(crate) fn has_exits(&self, job: JobId) -> bool {
        self.exits.contains_key(&job)
    }

    pub(crate) fn reported(&mut self, request: &HeadRequest) {
        let HeadRequest::Events(events) = request else {
            return;
        };
        for event in events {
            if let NodeEvent::WorkerExited {
                job,
                slot,
                incarnation,
                expected: false,
                failure,
                ..
            } = event
                && !failure.exit.is_success()
            {
                let exits = self.exits.entry(*job).or_default();
                exits.insert((*slot, *incarnation));
            }
        }
    }
}

/// Drivers of static jobs that are whole know what nodes have reported long ago.
pub(crate) fn drivers_know(world: &World) -> Result<(), String> {
    for driver in world.drivers.iter().filter(|driver| driver.is_there()) {
        let Some(table) = driver.table.as_ref().filter(|_| !driver.is_elastic()) else {
            continue;
        };
        let exits = world.oracle.told.exits.get(&driver.job);
        let unknown = exits.into_iter().flatten().find(|(slot, _)| {
            let member = table.members.iter().find(|member| member.slot == *slot);
            member.is_some_and(|member| !driver.lost.contains(&member.rank))
        });
        if let Some((slot, _)) = unknown {
            return Err(format!(
                "the driver of {} does not know that slot {slot} is lost",
                driver.job
            ));
        }
    }
    Ok(())
}
