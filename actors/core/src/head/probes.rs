//! Probes of network interfaces that are under way, those that wait for them, and what is known from before.
//!
//! All that want to know the same wait for one probe, unless it must begin anew for them. A probe that nobody waits for any more
//! ends.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use kolo_wire::ids::{JobId, NodeId};
use kolo_wire::{NetworkReport, NodeReply, ProbeResult};

use super::job::Reply;
use super::messages::{AskId, RequestId};
use crate::interfaces::{Discovery, Network, ProbeCache, Step};

/// As many probes may be wanted at a time before no more are begun for questions. Each job has one of its own at most.
const MAX_PROBES: usize = 16;

/// What connects the nodes, or the report that says why nothing does.
pub(super) type Found = Result<Arc<Network>, NetworkReport>;

/// Names a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ProbeId(u64);

/// The side that waits for a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Waiter {
    Job(JobId),
    Ask(AskId),
}

#[derive(Debug)]
struct Probe {
    discovery: Discovery,
    since: Instant,
    /// Another one for the same has begun later: what this one finds is of use only for those that wait for it.
    is_old: bool,
    waiting: BTreeSet<Waiter>,
    requests: BTreeSet<RequestId>,
}

/// All probes.
#[derive(Debug, Default)]
pub(super) struct Probes {
    running: BTreeMap<ProbeId, Probe>,
    count: u64,
    pub(super) cache: ProbeCache,
}

impl Probes {
    /// The newest probe for the same.
    fn newest(&mut self, discovery: &Discovery) -> Option<&mut Probe> {
        let mut running = self.running.values_mut();
        running.find(|probe| !probe.is_old && probe.discovery.key() == discovery.key())
    }

    /// Whether a question that needs a probe of its own has to come later.
    pub(super) fn is_busy_for(&mut self, discovery: &Discovery, anew: bool) -> bool {
        self.running.len() >= MAX_PROBES && (anew || self.newest(discovery).is_none())
    }

    /// Waits for the probe that runs, or begins one. The first step is of a new one.
    pub(super) fn find(
        &mut self,
        now: Instant,
        mut discovery: Discovery,
        anew: bool,
        waiter: Waiter,
    ) -> Option<(ProbeId, Step)> {
        if let Some(probe) = self.newest(&discovery) {
            if !anew {
                probe.waiting.insert(waiter);
                return None;
            }
            probe.is_old = true;
        }
        self.count += 1;
        let id = ProbeId(self.count);
        let step = discovery.start();
        let probe = Probe {
            discovery,
            since: now,
            is_old: false,
            waiting: BTreeSet::from([waiter]),
            requests: BTreeSet::new(),
        };
        self.running.insert(id, probe);
        Some((id, step))
    }

    /// An order was sent.
    pub(super) fn sent(&mut self, id: ProbeId, request: RequestId) {
        if let Some(probe) = self.running.get_mut(&id) {
            probe.requests.insert(request);
        }
    }

    /// A node has replied to an order.
    pub(super) fn replied(
        &mut self,
        id: ProbeId,
        request: RequestId,
        node: NodeId,
        reply: Reply,
    ) -> Step {
        let Some(probe) = self.running.get_mut(&id) else {
            return Step::Wait;
        };
        probe.requests.remove(&request);
        probe.discovery.answered(node, results(reply))
    }

    /// A probe is done. Its result, and those that wait for it.
    pub(super) fn done(
        &mut self,
        (real, now): (Instant, Instant),
        id: ProbeId,
        found: Result<Network, NetworkReport>,
    ) -> Option<(Found, BTreeSet<Waiter>)> {
        let probe = self.running.remove(&id)?;
        let took = real.saturating_duration_since(probe.since).as_millis();
        let took_ms = u64::try_from(took).unwrap_or(u64::MAX);
        let found = match found {
            Ok(mut network) => {
                network.report.took_ms = took_ms;
                let network = Arc::new(network);
                if !probe.is_old {
                    let key = probe.discovery.key().clone();
                    self.cache.put(now, key, Arc::clone(&network));
                }
                Ok(network)
            }
            Err(mut report) => {
                report.took_ms = took_ms;
                Err(report)
            }
        };
        Some((found, probe.waiting))
    }

    /// Waits for nothing any more. The requests of probes that nobody waits for now.
    pub(super) fn leave(&mut self, waiter: Waiter) -> Vec<RequestId> {
        let mut unwanted = Vec::new();
        self.running.retain(|_, probe| {
            let left = probe.waiting.remove(&waiter) && probe.waiting.is_empty();
            if left {
                unwanted.extend(&probe.requests);
            }
            !left
        });
        unwanted
    }
}

fn results(reply: Reply) -> Result<Vec<ProbeResult>, String> {
    match reply {
        Reply::Answer(NodeReply::Probed(results)) => Ok(results),
        other => Err(other.unexpected()),
    }
}
