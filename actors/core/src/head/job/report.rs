//! What people see of a job.

use std::time::{Duration, Instant};

use kolo_wire::ids::Generation;
use kolo_wire::{JobInfo, LeftOut};

use super::Job;
use super::seat::Seat;
use super::{Phase, Rendezvous};

impl Job {
    /// The job, as the API and `kolo` show it, at this age.
    #[must_use]
    pub fn info(&self, age: Duration) -> JobInfo {
        let mut seats: Vec<&Seat> = self.base.seats.values().collect();
        if let Some(elastic) = self.elastic() {
            elastic.sort(&mut seats);
        }
        JobInfo {
            workers: seats.into_iter().map(Seat::info).collect(),
            nodes: self.base.placed_nodes(),
            network: self.base.net.report().cloned(),
            membership: self.elastic().map(|elastic| Box::new(elastic.info())),
            ..self.outline(age)
        }
    }

    /// As [`Job::info`], without all that grows with the number of workers and nodes.
    pub(in crate::head) fn outline(&self, age: Duration) -> JobInfo {
        let job = &self.base;
        JobInfo {
            state: job.state,
            generation: if job.phase == Phase::Up {
                job.generation
            } else {
                Generation(0)
            },
            age_ms: age.as_millis() as u64,
            reason: job.ending.as_ref().map(|ending| ending.reason.clone()),
            rendezvous: match job.rendezvous {
                Rendezvous::Open(address) if !job.is_finished() => Some(address),
                _ => None,
            },
            ..JobInfo::new(job.id, job.spec.name.clone(), job.owner)
        }
    }

    /// How many workers and nodes [`Job::info`] lists.
    pub(in crate::head) fn size(&self) -> usize {
        self.base.seats.len() + self.base.parts.len()
    }

    /// The hosts that get no new worker of an elastic job at this time.
    #[must_use]
    pub fn left_out(&self, now: Instant) -> Vec<LeftOut> {
        let elastic = self.elastic().filter(|_| self.base.ending.is_none());
        elastic.map_or_else(Vec::new, |elastic| elastic.left_out(now))
    }
}
