//! The life of a job, as a state machine without I/O and clock: the core of the Coordinator.
//!
//! ```text
//! reserve on all nodes -> programs, rendezvous -> start on all -> all ready -> membership to all -> healthy
//!        |                       |                    |                            |                 |
//!        +-----------------------+---- undo what was done: release or stop on every node <-----------+
//! ```
//!
//! [`Job::step`] takes what happened and gives what to do. Whoever drives it answers every
//! [`Action::Request`] with one [`Event::Replied`] within its deadline; then every job ends, and every node that
//! was asked to hold something is released, or named in [`Action::Abandon`], or lost (G-2).
//!
//! What all jobs have, and how they end, is of `Base`. A job that never changes its members takes its course as `Fixed`, and one
//! whose members come and go as `Elastic`.

mod base;
mod elastic;
mod end;
mod fall;
mod fixed;
#[cfg(test)]
pub(crate) mod fixtures;
mod messages;
mod network;
mod parts;
mod push;
mod report;
mod room;
mod seat;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_horovod;
#[cfg(test)]
mod tests_limits;
#[cfg(test)]
mod tests_network;
#[cfg(test)]
mod tests_restart;

use std::time::Instant;

use kolo_wire::ids::{DriverId, Generation, JobId, NodeId, Slot};
use kolo_wire::{JobSpec, NodeRequest, Refusal, RefusalKind};

use self::base::{Base, Phase, Rendezvous};
use self::elastic::Elastic;
#[cfg(test)]
pub(super) use self::end::MAX_REASON;
use self::fixed::Fixed;
pub use self::messages::{Action, Event, GroupState, JobConfig, Next, Reply, Seating, Site};
use self::room::check_table;
pub(super) use self::room::most_on;
use crate::head::limits::limits;
use crate::interfaces::Plan;

/// The state machine.
#[derive(Debug)]
pub struct Job {
    base: Base,
    course: Course,
}

/// How it goes on.
#[derive(Debug)]
enum Course {
    /// The members are the same from the start to the end.
    Fixed(Fixed),
    /// Members come and go.
    Elastic(Box<Elastic>),
}

impl Job {
    /// A job with a placement. The actions are the reservations on all nodes.
    ///
    /// The sites of an elastic job have as many workers as there is room for, and at most the most that it may have.
    ///
    /// # Errors
    ///
    /// [`RefusalKind::Internal`] if the sites don't make a group; [`crate::placement::place`] gives none such.
    /// [`RefusalKind::Invalid`] if their hostnames are too long, or the limits of an elastic job make no sense.
    pub fn submit(
        now: Instant,
        id: JobId,
        owner: DriverId,
        spec: JobSpec,
        sites: Vec<Site>,
        config: JobConfig,
    ) -> Result<(Self, Vec<Action>), Refusal> {
        check_table(&sites)?;
        let mut base = Base::new(now, id, owner, spec, config);
        let limits = (base.spec.elastic.as_ref()).map(|elastic| limits(elastic, &base.spec));
        let course = match limits {
            None => Course::Fixed(Fixed::begin(&mut base, sites)?),
            Some(limits) => {
                let begun = Elastic::begin(&mut base, limits, sites);
                let begun =
                    begun.map_err(|error| Refusal::new(RefusalKind::Invalid, error.to_string()))?;
                Course::Elastic(Box::new(begun))
            }
        };
        let actions = std::mem::take(&mut base.actions);
        Ok((Self { base, course }, actions))
    }

    /// What to do now that `event` has happened.
    pub fn step(&mut self, now: Instant, event: Event) -> Vec<Action> {
        let Self { base, course } = self;
        base.now = now;
        match course {
            Course::Fixed(fixed) => fixed.hear(base, event),
            Course::Elastic(elastic) => elastic.hear(base, event),
        }
        if let Some((state, reason)) = base.finish() {
            if let Course::Elastic(elastic) = course {
                elastic.tell_end(base, state, reason);
            }
            base.tell_end();
        }
        std::mem::take(&mut base.actions)
    }

    /// Lets the job, which never changes its members, end where its workers would start, as a success if they could. No program of
    /// its driver is waited for. To be said before the first [`Job::step`].
    pub fn run_dry(&mut self) {
        if let Course::Fixed(fixed) = &mut self.course {
            (fixed.is_dry_run, fixed.has_program) = (true, true);
        }
    }

    /// Whether no worker of it ever starts.
    #[must_use]
    pub fn is_dry_run(&self) -> bool {
        matches!(&self.course, Course::Fixed(fixed) if fixed.is_dry_run)
    }

    /// What connects the nodes, or how to find out. To be said before the first [`Job::step`]; without it the nodes are
    /// reached where they registered. Of an elastic job, to be said again before an [`Event::Placed`] with nodes that are new to it.
    pub fn connect_by(&mut self, plan: Plan) {
        self.base.connect_by(plan);
    }

    /// When to give [`Event::Tick`] at the latest, if nothing happens before.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        match &self.course {
            Course::Fixed(fixed) => fixed.deadline(&self.base),
            Course::Elastic(elastic) => elastic.deadline(&self.base),
        }
    }

    /// The delivery whose turn it is at a node. The answer is [`Event::Pushed`].
    pub fn next_push(&mut self, node: NodeId) -> Option<Next> {
        self.base.next_push(node)
    }

    /// The membership, as a node gets it, which is to be sent now.
    pub fn membership(&mut self, node: NodeId) -> Option<NodeRequest> {
        self.base.membership(node)
    }

    /// What was submitted.
    #[must_use]
    pub fn spec(&self) -> &JobSpec {
        &self.base.spec
    }

    /// Whether the node may have a certificate made for the worker in `slot`, and for which generation (S-2).
    ///
    /// # Errors
    ///
    /// A refusal if the slot is not on that node, or its worker is not running.
    pub fn may_sign(&self, node: NodeId, slot: Slot) -> Result<Generation, Refusal> {
        self.base.may_sign(node, slot)
    }

    fn elastic(&self) -> Option<&Elastic> {
        match &self.course {
            Course::Elastic(elastic) => Some(elastic),
            Course::Fixed(_) => None,
        }
    }
}
