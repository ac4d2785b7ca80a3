//! Requests to nodes that have no reply yet.

use std::collections::BTreeMap;
use std::time::Duration;

use kolo_wire::ids::{JobId, NodeId};

use super::messages::RequestId;
use super::probes::ProbeId;
use super::registry::Session;

/// On top of a request's own deadline, for a link that does not keep it.
pub(super) const OVERTIME: Duration = Duration::from_secs(1);

/// What a request is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A step of a job's life.
    Job(JobId, NodeId),
    /// The delivery of a push.
    Push(JobId, NodeId),
    /// The end of a job that the node should not have.
    Clean(NodeId, JobId),
    /// An order of a probe.
    Probe(ProbeId, NodeId),
}

/// An open request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Open {
    pub(super) purpose: Purpose,
    pub(super) deadline: Duration,
}

/// All open requests.
#[derive(Debug, Default)]
pub(super) struct Requests {
    open: BTreeMap<RequestId, Open>,
    count: u64,
}

impl Requests {
    pub(super) fn open(
        &mut self,
        session: Session,
        purpose: Purpose,
        deadline: Duration,
    ) -> RequestId {
        self.count += 1;
        let request = RequestId {
            session,
            number: self.count,
        };
        self.open.insert(request, Open { purpose, deadline });
        request
    }

    pub(super) fn close(&mut self, request: RequestId) -> Option<Open> {
        self.open.remove(&request)
    }

    pub(super) fn get(&self, request: RequestId) -> Option<&Open> {
        self.open.get(&request)
    }

    /// One for this is open over a connection.
    pub(super) fn has(&self, session: Session, purpose: Purpose) -> bool {
        let open = self.of(session).into_iter();
        open.filter_map(|request| self.get(request))
            .any(|open| open.purpose == purpose)
    }

    /// Those over one connection.
    pub(super) fn of(&self, session: Session) -> Vec<RequestId> {
        let all = |number| RequestId { session, number };
        let range = self.open.range(all(0)..=all(u64::MAX));
        range.map(|(request, _)| *request).collect()
    }
}
