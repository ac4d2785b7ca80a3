//! The probe as a state machine: who tries what, and what came of it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use kolo_wire::ids::NodeId;
use kolo_wire::{
    InterfaceSelection, NetworkReport, Probe, ProbeFailure, ProbeResult, ProbeTarget, Refusal,
};

use super::candidates::{Family, Site, site};
use super::resolve;
use super::seen::{Resolver, Seen, Seens};
use super::{Host, Network};

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
    /// More to try.
    Probe(Vec<Order>),
    /// The end: what connects the nodes, or a report whose problem says that nothing does.
    Done(Box<Result<Network, NetworkReport>>),
}

/// Finds out what connects some nodes.
#[derive(Debug, Clone, PartialEq)]
pub struct Discovery {
    sites: Vec<Site>,
    index: BTreeMap<NodeId, usize>,
    selection: InterfaceSelection,
    /// What each prober was asked: target and candidate, in the order of its targets.
    asked: BTreeMap<usize, Vec<(usize, usize)>>,
    seen: Seens,
    /// Pairs that were tried.
    tried: BTreeSet<(usize, usize)>,
    /// Whether each node tries all others.
    all_pairs: bool,
}

impl Discovery {
    pub(super) fn new(hosts: Vec<Host>, selection: &InterfaceSelection) -> Result<Self, Refusal> {
        let sites = hosts
            .into_iter()
            .map(|host| site(host, selection))
            .collect::<Result<Vec<_>, _>>()?;
        let index = (0..sites.len())
            .map(|index| (sites[index].host.node, index))
            .collect();
        Ok(Self {
            sites,
            index,
            selection: selection.clone(),
            asked: BTreeMap::new(),
            seen: BTreeMap::new(),
            tried: BTreeSet::new(),
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

    /// What there is to know of a single node, which nobody needs to reach.
    pub(super) fn alone(&self) -> Option<Network> {
        (self.sites.len() == 1).then(|| resolve::alone(&self.resolver()))
    }

    /// The first orders: each node tries the next in the ring. Every order must be answered once.
    pub fn start(&mut self) -> Step {
        let count = self.sites.len();
        let orders = self.orders((0..count).map(|prober| (prober, (prober + 1) % count)));
        self.go_on(orders)
    }

    /// A node has answered an order; an error says why it did not.
    pub fn answered(&mut self, node: NodeId, results: Result<Vec<ProbeResult>, String>) -> Step {
        let Some(prober) = self.index.get(&node).copied() else {
            return Step::Wait;
        };
        let Some(asked) = self.asked.remove(&prober) else {
            return Step::Wait;
        };
        let results = results.and_then(|results| {
            if results.len() == asked.len() {
                Ok(results)
            } else {
                Err(format!(
                    "it answered {} of {} probes",
                    results.len(),
                    asked.len()
                ))
            }
        });
        match results {
            Ok(results) => {
                for ((target, candidate), result) in asked.into_iter().zip(results) {
                    let seen = self.classify(prober, target, candidate, result);
                    self.note(prober, target, candidate, seen);
                }
            }
            Err(reason) => {
                for (target, candidate) in asked {
                    let seen = Seen::Failed(format!("it did not try: {reason}"));
                    self.note(prober, target, candidate, seen);
                }
            }
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
            ProbeResult::Failed { kind, reason } => Seen::Failed(match kind {
                ProbeFailure::NoRoute => format!("no route ({reason})"),
                _ => reason,
            }),
        }
    }

    /// Orders for pairs that were not tried yet. Nothing is tried twice.
    fn orders(&mut self, pairs: impl Iterator<Item = (usize, usize)>) -> Vec<Order> {
        let mut orders: Vec<Order> = Vec::new();
        let mut place: BTreeMap<usize, usize> = BTreeMap::new();
        for (prober, target) in pairs {
            if prober == target || !self.tried.insert((prober, target)) {
                continue;
            }
            for candidate in self.sites[target].fit().collect::<Vec<_>>() {
                match self.target(prober, target, candidate) {
                    Ok(probe) => {
                        let index = *place.entry(prober).or_insert_with(|| {
                            orders.push(Order {
                                node: self.sites[prober].host.node,
                                targets: Vec::new(),
                            });
                            orders.len() - 1
                        });
                        orders[index].targets.push(probe);
                        self.asked
                            .entry(prober)
                            .or_default()
                            .push((target, candidate));
                    }
                    Err(why) => self.note(prober, target, candidate, Seen::Skipped(why)),
                }
            }
        }
        orders
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
        let scope = if family == Family::LinkLocal {
            let there = from
                .candidates
                .iter()
                .enumerate()
                .any(|(index, candidate)| {
                    candidate.family == Family::LinkLocal
                        && from.name(index) == name
                        && from.interface(index).up
                });
            if !there {
                return Err(format!(
                    "link-local, and {hostname} has no {name} to reach it over"
                ));
            }
            Some(name.to_owned())
        } else {
            None
        };
        Ok(ProbeTarget {
            node: to.host.node,
            address: SocketAddr::new(ip, to.network.listen.port()),
            scope,
        })
    }

    fn go_on(&mut self, orders: Vec<Order>) -> Step {
        if orders.is_empty() {
            self.conclude()
        } else {
            Step::Probe(orders)
        }
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
            let pairs =
                (0..count).flat_map(|prober| (0..count).map(move |target| (prober, target)));
            let orders = self.orders(pairs);
            return self.go_on(orders);
        }
        let found = resolve::by_node(&self.resolver());
        Step::Done(Box::new(
            found.map_or_else(|| resolve::by_pair(&self.resolver()), Ok),
        ))
    }
}
