//! The head's knowledge of jobs that have not ended.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::ops::{Deref, DerefMut};
use std::time::Instant;

use kolo_wire::JobInfo;
use kolo_wire::counted::Counted;
use kolo_wire::ids::{JobId, NodeId};

use crate::head::job::Job;
use crate::head::messages::{AskId, Now};
use crate::head::outbox::{Outbox, Tables};
use crate::head::registry::Session;
use crate::placement::Share;

/// A node that has a part in a job.
#[derive(Debug, Clone, Copy)]
pub(super) struct Contact {
    pub(super) session: Session,
    /// The address that it is reached at.
    pub(super) ip: IpAddr,
    /// The head's own address as the node reaches it.
    pub(super) local: Option<IpAddr>,
}

/// A job that has not ended.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) job: Job,
    /// Counts all jobs.
    pub(super) number: u64,
    pub(super) since: Instant,
    pub(super) contacts: BTreeMap<NodeId, Contact>,
    pub(super) outboxes: BTreeMap<NodeId, Outbox>,
    pub(super) tables: Tables,
    pub(super) trials: Trials,
    /// Answered when it has ended.
    pub(super) stops: Vec<AskId>,
}

impl Running {
    /// The job, as people see it.
    pub(super) fn info(&self, now: Now) -> JobInfo {
        let mut info = self
            .job
            .info(now.real.saturating_duration_since(self.since));
        if let Some(membership) = &mut info.membership {
            membership.left_out = self.job.left_out(now.awake);
        }
        info
    }

    /// As [`Running::info`], without all that grows with the number of workers and nodes.
    pub(super) fn outline(&self, now: Instant) -> JobInfo {
        self.job.outline(now.saturating_duration_since(self.since))
    }

    /// An address of this host that all nodes of the job reach: one that a node on another host uses, if there is one.
    pub(super) fn local_ip(&self) -> Option<IpAddr> {
        let seen = || self.contacts.values().filter_map(|contact| contact.local);
        let outside = seen().filter(|ip| !ip.is_loopback()).min();
        outside.or_else(|| seen().min())
    }
}

/// The nodes on which an elastic job has not started anything.
///
/// A node that refuses the job, or that nothing connects with its other nodes, is freed at once. That is no news of room for this
/// job: it would be asked again and again.
#[derive(Debug, Default)]
pub(super) struct Trials {
    /// Nodes that were asked.
    fresh: BTreeSet<NodeId>,
    /// Nodes that were of no use. They are left out until something changes there.
    pub(super) unfit: BTreeSet<NodeId>,
}

impl Trials {
    pub(super) fn begin(&mut self, node: NodeId) {
        self.fresh.insert(node);
    }

    /// Workers are started there, nobody knows what is there, the job itself leaves the node out for a while, or the reservation has
    /// ended there while the job waited for others.
    pub(super) fn passed(&mut self, node: NodeId) {
        self.fresh.remove(&node);
    }

    /// The job has nothing there any more. Whether it never started anything there.
    pub(super) fn left(&mut self, node: NodeId) -> bool {
        let failed = self.fresh.remove(&node);
        if failed {
            self.unfit.insert(node);
        }
        failed
    }
}

/// All jobs that have not ended.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    running: BTreeMap<JobId, Running>,
    /// Jobs that were taken.
    pub(super) count: u64,
    /// Jobs that are to hear that there may be room, by their numbers.
    pub(super) offered: BTreeSet<(u64, JobId)>,
}

impl Deref for Jobs {
    type Target = BTreeMap<JobId, Running>;

    fn deref(&self) -> &Self::Target {
        &self.running
    }
}

impl DerefMut for Jobs {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.running
    }
}

impl Jobs {
    /// There may be more room for a job: it is told at the end of this step.
    pub(super) fn tell(&mut self, id: JobId) {
        if let Some(running) = self.running.get(&id) {
            self.offered.insert((running.number, id));
        }
    }

    /// There may be more room on a node: all jobs that wait for some are told at the end of this step, except one.
    pub(super) fn offer(&mut self, node: NodeId, except: Option<JobId>) {
        for (id, running) in &mut self.running {
            if except != Some(*id) {
                running.trials.unfit.remove(&node);
                if running.job.wants_room() {
                    self.offered.insert((running.number, *id));
                }
            }
        }
    }

    /// While several jobs wait for room, none takes some that is too little for the job to start. Says so if that is why there is none.
    pub(super) fn give_way(&self, id: JobId, shares: &mut Vec<Share>) -> String {
        let running = self.get(&id).filter(|running| running.job.is_short());
        let Some((running, min)) =
            running.and_then(|running| Some((running, running.job.spec().elastic.as_ref()?.min)))
        else {
            return String::new();
        };
        let held: u32 = running.job.held().map(|(_, workers)| workers).sum();
        let more: u32 = shares.iter().map(|share| share.workers).sum();
        let waits = |(other, running): (&JobId, &Running)| *other != id && running.job.is_short();
        if more == 0 || held + more >= min || !self.iter().any(waits) {
            return String::new();
        }
        shares.clear();
        format!(
            "there is room for {} of at least {min}; other jobs wait for room, too",
            Counted(held + more, "worker")
        )
    }

    /// A job has been given all the room that there is. If several wait for more, the youngest gives back what is too little for it.
    pub(super) fn youngest_of_several(&self, id: JobId) -> Option<JobId> {
        let waiting = self.iter().filter(|(_, running)| running.job.is_short());
        if !self.get(&id)?.job.is_short() || waiting.clone().count() < 2 {
            return None;
        }
        let holds = |running: &Running| running.job.held().any(|(_, workers)| workers > 0);
        let holds = waiting.filter(|(_, running)| holds(running));
        let youngest = holds.max_by_key(|(_, running)| running.number);
        youngest.map(|(job, _)| *job)
    }
}
