//! Probes of network interfaces that are under way, those that wait for them, and what is known from before.
//!
//! All that want to know the same wait for the probe that runs, or, if a probe that has begun does not count, for the next, which
//! begins when that one has ended. So nodes are not probed by many at once. A probe that nobody waits for any more ends.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_wire::ids::{JobId, NodeId};
use kolo_wire::{NetworkReport, NodeReply, ProbeResult};

use super::job::Reply;
use super::messages::{AskId, RequestId};
use crate::interfaces::{Discovery, Key, Network, ProbeCache, Step};

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
    /// Those that wait for the end of one with the same key.
    next: BTreeMap<Key, (Search, BTreeSet<Waiter>)>,
    count: u64,
    pub(super) cache: ProbeCache,
}

impl Probes {
    /// Whether a question that needs a probe of its own has to come later.
    pub(super) fn is_busy_for(&self, search: &Search) -> bool {
        let is_shared = search.key.as_ref().is_some_and(|key| self.runs(key));
        !is_shared && self.running.len() + self.next.len() >= MAX_PROBES
    }

    fn runs(&self, key: &Key) -> bool {
        let mut running = self.running.values();
        running.any(|probe| probe.search.key.as_ref() == Some(key))
    }

    /// Waits for the probe that runs, or for the next, if there is one; else begins one. The first step is of a new one.
    pub(super) fn find(
        &mut self,
        now: Instant,
        search: Search,
        waiter: Waiter,
    ) -> Option<(ProbeId, Step)> {
        let same = |probe: &&mut Probe| search.key.is_some() && probe.search.key == search.key;
        let Some(probe) = self.running.values_mut().find(same) else {
            return Some(self.begin(now, search, BTreeSet::from([waiter])));
        };
        match search.key.clone() {
            Some(key) if search.anew => {
                let next = self.next.entry(key);
                let (_, waiting) = next.or_insert_with(|| (search, BTreeSet::new()));
                waiting.insert(waiter);
            }
            _ => drop(probe.waiting.insert(waiter)),
        }
        None
    }

    fn begin(
        &mut self,
        now: Instant,
        mut search: Search,
        waiting: BTreeSet<Waiter>,
    ) -> (ProbeId, Step) {
        self.count += 1;
        let id = ProbeId(self.count);
        let step = search.discovery.start();
        let probe = Probe {
            search,
            since: now,
            waiting,
            requests: BTreeSet::new(),
        };
        self.running.insert(id, probe);
        (id, step)
    }

    /// Begins a probe that waits for none any more.
    pub(super) fn begin_next(&mut self, now: Instant) -> Option<(ProbeId, Step)> {
        let key = self.next.keys().find(|key| !self.runs(key))?.clone();
        let (search, waiting) = self.next.remove(&key)?;
        Some(self.begin(now, search, waiting))
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
        self.next.retain(|_, (_, waiting)| {
            waiting.remove(&waiter);
            !waiting.is_empty()
        });
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
