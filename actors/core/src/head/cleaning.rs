//! Jobs that nodes should not have any more: each node is asked to stop them until it confirms or its stay is over.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kolo_wire::ids::JobId;
use kolo_wire::{NodeReply, RefusalKind};

use super::job::Reply;
use super::registry::Session;
use crate::pace::{Backoff, Ration};

/// Jobs that a node is asked to stop at one time on top of those that it named when it registered. A node that reports
/// more jobs that nobody knows is not asked to stop those.
pub(super) const MOST: usize = 4096;
/// How long a node may take to stop one of them.
pub(super) const LIMIT: Duration = Duration::from_secs(30);
/// How long to wait before the node is asked again; the pauses grow up to the second.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(15));

/// By stay, what its node is asked to stop.
#[derive(Debug)]
pub(super) struct Cleaning {
    stays: BTreeMap<Session, BTreeMap<JobId, Backoff>>,
    /// Complaints about nodes that report too much.
    complaints: Ration,
}

impl Default for Cleaning {
    fn default() -> Self {
        Self {
            stays: BTreeMap::new(),
            complaints: Ration::new(1, Duration::from_secs(10)),
        }
    }
}

impl Cleaning {
    /// Whether to complain about a node that reports too much, which it may do without end.
    pub(super) fn complains(&mut self, now: Instant) -> bool {
        self.complaints.take(now)
    }

    /// One more. False if the node is being asked already.
    pub(super) fn begin(&mut self, session: Session, job: JobId) -> bool {
        let (first, most) = PAUSES;
        let jobs = self.stays.entry(session).or_default();
        jobs.insert(job, Backoff::new(first, most)).is_none()
    }

    /// Whether the node is being asked to stop the job.
    pub(super) fn is_asked(&self, session: Session, job: JobId) -> bool {
        let jobs = self.stays.get(&session);
        jobs.is_some_and(|jobs| jobs.contains_key(&job))
    }

    pub(super) fn is_full(&self, session: Session) -> bool {
        self.stays.get(&session).map_or(0, BTreeMap::len) >= MOST
    }

    /// The node has not confirmed. How often that happened before, and how long to wait until it is asked again; `None`
    /// if there is nothing to ask any more.
    pub(super) fn failed(&mut self, session: Session, job: JobId) -> Option<(u32, Duration)> {
        let backoff = self.stays.get_mut(&session)?.get_mut(&job)?;
        Some((backoff.failures(), backoff.failed()))
    }

    pub(super) fn confirmed(&mut self, session: Session, job: JobId) {
        if let Some(jobs) = self.stays.get_mut(&session) {
            jobs.remove(&job);
            if jobs.is_empty() {
                self.stays.remove(&session);
            }
        }
    }

    /// The stay is over. What was being asked for.
    pub(super) fn end(&mut self, session: Session) -> impl Iterator<Item = JobId> + use<> {
        self.stays.remove(&session).unwrap_or_default().into_keys()
    }
}

/// Whether a reply to a stop says that nothing is left.
pub(super) fn is_confirmed(reply: &Reply) -> bool {
    match reply {
        Reply::Answer(NodeReply::Done) => true,
        Reply::Refused(refusal) => refusal.kind == RefusalKind::NotFound,
        Reply::Answer(_) | Reply::Unknown(_) => false,
    }
}
