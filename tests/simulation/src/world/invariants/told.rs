//! F-1, for drivers: a driver that is there is told of each member that a node has reported to be lost; and a job whose driver is
//! gone ends.

use std::collections::{BTreeMap, BTreeSet};

use kolo_wire::ids::{Incarnation, JobId, Slot};
use kolo_wire::{HeadRequest, JobEvent, NodeEvent};

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

impl World {
    /// The head tells a driver something.
    pub(crate) fn check_told(&mut self, event: &JobEvent) {
        if let JobEvent::Healthy { table, .. } | JobEvent::Generation { table, .. } = event {
            self.check_ranks(table);
            self.check_order(table);
            self.check_whole(table);
            if matches!(event, JobEvent::Generation { .. }) {
                self.oracle.restarts.active(table.job, table.generation);
                self.check_state(table);
                let checked = self.driver_of(table.job).map(|it| it.check_size(table));
                self.hold("liveness", checked.unwrap_or(Ok(())));
            }
            self.counts.generations += 1;
            let active = self.oracle.generations.active(table);
            self.hold("G-3", active);
        }
    }

    /// Drivers of static jobs that are whole know what nodes have reported long ago.
    pub(crate) fn check_drivers_know(&mut self) {
        for driver in self.drivers.iter().filter(|driver| driver.is_there()) {
            let Some(table) = driver.table.as_ref().filter(|_| !driver.is_elastic()) else {
                continue;
            };
            let exits = self.oracle.told.exits.get(&driver.job);
            let unknown = exits.into_iter().flatten().find(|(slot, _)| {
                let member = table.members.iter().find(|member| member.slot == *slot);
                member.is_some_and(|member| !driver.lost.contains(&member.rank))
            });
            if let Some((slot, _)) = unknown {
                let text = format!(
                    "the driver of {} does not know that slot {slot} is lost",
                    driver.job
                );
                return self.violation("F-1", text);
            }
        }
    }
}
