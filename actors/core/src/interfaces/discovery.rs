//! The probe as a state machine: who tries what, and what came of it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use kolo_wire::ids::NodeId;
use kolo_wire::{
    InterfaceSelection, NetworkReport, Probe, ProbeFailure, ProbeResult, ProbeTarget, Refusal,
};

use super::candidates::{Family, Site, site};
use super::resolve;
use super::seen::{Resolver, Seen, Seens};
use super::{Host, Key, Network};

/// The most probes of all pairs of nodes, whose results take some 100 MB then: 200 nodes with 13 addresses, 700 with one.
const MOST_PROBES: usize = 1 << 19;

/// What a node is to try.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// The node that tries.
    pub node: NodeId,
    /// The addresses.
    pub targets: Vec<ProbeTarget>,
}

impl Order {
    /// The longest that the node can take for it, if each address may take `limit`.
    #[must_use]
    pub fn deadline(&self, limit: Duration) -> Duration {
        let waves = self.targets.len().div_ceil(Probe::AT_ONCE).max(1);
        limit.saturating_mul(u32::try_from(waves).unwrap_or(u32::MAX)) + Duration::from_secs(5)
    }
}

/// What comes after an answer.
#[derive(Debug, PartialEq)]
pub enum Step {
    /// Other answers.
    Wait,
    /// More to try. Every order must be answered once.
    Probe(Vec<Order>),
    /// The end: what connects the nodes, or a report whose problem says that nothing does.
    Done(Box<Result<Network, NetworkReport>>),
}

/// Finds out what connects some nodes.
#[derive(Debug, Clone, PartialEq)]
pub struct Discovery {
    key: Key,
    sites: Vec<Site>,
    index: BTreeMap<NodeId, usize>,
    selection: InterfaceSelection,
    /// What each prober was asked: target and candidate, in the order of its targets.
    asked: BTreeMap<usize, Vec<(usize, usize)>>,
    /// Of each pair that was tried.
    seen: Seens,
    /// Whether each node tries all others.
    all_pairs: bool,
}

impl Discovery {
    pub(super) fn new(hosts: Vec<Host>, selection: &InterfaceSelection) -> Result<Self, Refusal> {
        let key = Key::new(hosts.iter(), selection);
        let sites = hosts
            .into_iter()
            .map(|host| site(host, selection))
            .collect::<Result<Vec<_>, _>>()?;
        let index = (0..sites.len())
            .map(|index| (sites[index].host.node, index))
            .collect();
        Ok(Self {
            key,
            sites,
            index,
            selection: selection.clone(),
            asked: BTreeMap::new(),
            seen: BTreeMap::new(),
            all_pairs: false,
        })
    }

    fn resolver(&self) -> Resolver<'_> {
        Resolver {
            sites: &self.sites,
            seen: &self.seen,
            selection: &self.selection,
        }
    }

    /// For what the result is valid.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// What there is to know of a single node, which nobody needs to reach.
    pub(super) fn alone(&self) -> Option<Network> {
        let alone = self.sites.len() == 1;
        alone.then(|| resolve::alone(&self.resolver())).flatten()
    }

    /// The interface of these nodes, all on one host, at which other hosts may reach them. Nothing if the host has the loopback alone.
    pub(super) fn together(hosts: &[Host]) -> Option<Network> {
        let (first, others) = hosts.split_first()?;
        let found = Self::new(vec![first.clone()], &InterfaceSelection::default());
        let mut network = found.ok()?.alone()?;
        network.share(first.node, others);
        Some(network)
    }

    /// The first orders: each node tries the next in the ring.
    pub fn start(&mut self) -> Step {
        let ring = self.resolver().ring();
        self.attempt(ring)
    }

    /// A node has answered an order; an error says why it did not.
    pub fn answered(&mut self, node: NodeId, results: Result<Vec<ProbeResult>, String>) -> Step {
        let prober = self.index.get(&node).copied();
        let Some((prober, asked)) = prober.and_then(|it| self.asked.remove_entry(&it)) else {
            return Step::Wait;
        };
        let results = results.and_then(|results| {
            if results.len() == asked.len() {
                return Ok(results);
            }
            let (answers, probes) = (results.len(), asked.len());
            Err(format!("it answered {answers} of {probes} probes"))
        });
        let results = results.unwrap_or_else(|reason| {
            let failed = ProbeResult::Failed {
                kind: ProbeFailure::Other,
                reason: format!("it did not try: {reason}"),
            };
            vec![failed; asked.len()]
        });
        for ((target, candidate), result) in asked.into_iter().zip(results) {
            let seen = self.classify(prober, target, candidate, result);
            self.note(prober, target, candidate, seen);
        }
        if self.asked.is_empty() {
            self.conclude()
        } else {
            Step::Wait
        }
    }

    /// Addresses that come into question, of all nodes.
    fn addresses(&self) -> usize {
        self.sites.iter().map(|site| site.fit().count()).sum()
    }

    fn note(&mut self, prober: usize, target: usize, candidate: usize, seen: Seen) {
        self.seen
            .entry((prober, target))
            .or_default()
            .push((candidate, seen));
    }

    fn classify(
        &self,
        prober: usize,
        target: usize,
        candidate: usize,
        result: ProbeResult,
    ) -> Seen {
        match result {
            ProbeResult::Reached { rtt_us, echo } => {
                let from = echo.seen.ip().to_canonical();
                let name = self.sites[target].name(candidate);
                let source = self.sites[prober].interface_with(from, name);
                Seen::Reached {
                    rtt_us,
                    from,
                    source: source.map(str::to_owned),
                    at: echo.interface,
                }
            }
            ProbeResult::Failed { kind, reason } => {
                let by = &self.sites[prober].host.hostname;
                Seen::Failed(match kind {
                    ProbeFailure::NoRoute => format!("{by}: no route ({reason})"),
                    _ => format!("{by}: {reason}"),
                })
            }
        }
    }

    /// Has pairs tried that were not tried yet.
    fn attempt(&mut self, pairs: impl Iterator<Item = (usize, usize)>) -> Step {
        let mut orders: BTreeMap<usize, Vec<ProbeTarget>> = BTreeMap::new();
        for (prober, target) in pairs {
            if self.seen.contains_key(&(prober, target)) {
                continue;
            }
            for candidate in self.sites[target].fit().collect::<Vec<_>>() {
                match self.target(prober, target, candidate) {
                    Ok(probe) => {
                        orders.entry(prober).or_default().push(probe);
                        let asked = self.asked.entry(prober).or_default();
                        asked.push((target, candidate));
                    }
                    Err(why) => self.note(prober, target, candidate, Seen::Failed(why)),
                }
            }
        }
        if orders.is_empty() {
            return self.conclude();
        }
        let orders = orders.into_iter().map(|(prober, targets)| Order {
            node: self.sites[prober].host.node,
            targets,
        });
        Step::Probe(orders.collect())
    }

    /// How `prober` tries an address of `target`, or why that makes no sense.
    fn target(
        &self,
        prober: usize,
        target: usize,
        candidate: usize,
    ) -> Result<ProbeTarget, String> {
        let (from, to) = (&self.sites[prober], &self.sites[target]);
        let (ip, name) = (to.candidates[candidate].ip, to.name(candidate));
        let hostname = &from.host.hostname;
        if !from.network.speaks(ip) {
            return Err(format!(
                "{hostname} does not speak to it: its daemon listens on {}",
                from.network.listen
            ));
        }
        let together = from.network.host == to.network.host;
        let family = to.candidates[candidate].family;
        if family != Family::LinkLocal
            && !together
            && let Some(own) = from.network.interface_of(ip)
        {
            return Err(format!(
                "{hostname} has the same address on {} and would reach itself",
                own.name
            ));
        }
        let scope = (family == Family::LinkLocal).then(|| name.to_owned());
        let has_scope = |scope: &String| {
            let mut all = from.candidates.iter().enumerate();
            all.any(|(index, candidate)| {
                let interface = from.interface(index);
                candidate.family == Family::LinkLocal && interface.name == *scope && interface.up
            })
        };
        if !scope.as_ref().is_none_or(has_scope) {
            return Err(format!(
                "link-local, and {hostname} has no {name} to reach it over"
            ));
        }
        Ok(ProbeTarget {
            node: to.host.node,
            address: SocketAddr::new(ip, to.network.listen.port()),
            scope,
        })
    }

    fn conclude(&mut self) -> Step {
        if let Some(network) = resolve::common(&self.resolver()) {
            return Step::Done(Box::new(Ok(network)));
        }
        if !self.all_pairs {
            let count = self.sites.len();
            if self.addresses().saturating_mul(count.saturating_sub(1)) > MOST_PROBES {
                return Step::Done(Box::new(Err(resolve::too_many(&self.resolver()))));
            }
            self.all_pairs = true;
            let pairs = self.resolver().pairs();
            return self.attempt(pairs);
        }
        let found = resolve::by_node(&self.resolver());
        Step::Done(Box::new(
            found.map_or_else(|| resolve::by_pair(&self.resolver()), Ok),
        ))
    }
}
