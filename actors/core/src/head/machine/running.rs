//! The head's knowledge of a job that has not ended.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Instant;

use kolo_wire::JobInfo;
use kolo_wire::ids::NodeId;

use crate::head::job::Job;
use crate::head::messages::{AskId, Now};
use crate::head::outbox::{Outbox, Tables};
use crate::head::registry::Session;

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
