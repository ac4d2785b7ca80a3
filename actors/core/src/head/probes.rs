//! Probes of network interfaces that are under way, those that wait for them, and what is known from before.
//!
//! All that want to know the same wait for the probe that runs, so that nodes are not probed by many at once. A probe
//! that nobody waits for any more ends.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_wire::ids::{JobId, NodeId};
use kolo_wire::{NetworkReport, NodeReply, ProbeResult};

use super::job::Reply;
use super::messages::{AskId, RequestId};
use crate::interfaces::{Discovery, Key, Network, ProbeCache, Step};

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

/// A discovery that is wanted.
#[derive(Debug)]
pub(super) struct Search {
    pub(super) discovery: Discovery,
    /// For what the result is valid; `None` if it is of use for nobody else.
    pub(super) key: Option<Key>,
    /// Whether a probe that has begun already does not count.
    pub(super) anew: bool,
    /// How long each address may take.
    pub(super) limit: Duration,
}

#[derive(Debug)]
struct Probe {
    search: Search,
    since: Instant,
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
    /// Waits for the probe that runs, if there is one; else begins one. The first step is of a new one.
    pub(super) fn find(
        &mut self,
        now: Instant,
        search: Search,
        waiter: Waiter,
    ) -> Option<(ProbeId, Step)> {
        // The one that began last.
        let same = |probe: &&mut Probe| search.key.is_some() && probe.search.key == search.key;
        if !search.anew
            && let Some(probe) = self.running.values_mut().rev().find(same)
        {
            probe.waiting.insert(waiter);
            return None;
        }
        self.count += 1;
        let id = ProbeId(self.count);
        let mut probe = Probe {
            search,
            since: now,
            waiting: BTreeSet::from([waiter]),
            requests: BTreeSet::new(),
        };
        let step = probe.search.discovery.start();
        self.running.insert(id, probe);
        Some((id, step))
    }

    /// How long each address may take.
    pub(super) fn limit(&self, id: ProbeId) -> Duration {
        let probe = self.running.get(&id);
        probe.map_or(Duration::ZERO, |probe| probe.search.limit)
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
        probe.search.discovery.answered(node, results(reply))
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
                if let Some(key) = probe.search.key {
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
        Reply::Answer(_) => Err("its answer is none to a probe".to_owned()),
        Reply::Refused(refusal) => Err(refusal.message),
        Reply::Unknown(reason) => Err(reason),
    }
}
