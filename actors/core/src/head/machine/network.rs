//! Network interfaces: which nodes, what is known of them, which probes run.

use std::collections::BTreeSet;
use std::sync::Arc;

use kolo_wire::ids::NodeId;
use kolo_wire::{
    HeadReply, InterfaceSelection, InterfacesQuery, NodeRegistration, NodeRequest, Probe, Refusal,
    RefusalKind,
};

use super::{Due, HeadCore};
use crate::head::job::Event;
use crate::head::messages::AskId;
use crate::head::milliseconds;
use crate::head::probes::{ProbeId, Waiter};
use crate::head::registry::{MAX_NODES, Session};
use crate::head::requests::Purpose;
use crate::interfaces::{Discovery, Host, Network, Order, Plan, Step, plan};

impl HeadCore {
    /// What connects these nodes, as far as it is known.
    pub(super) fn plan_network(
        &self,
        nodes: &[NodeId],
        selection: &InterfaceSelection,
        no_cache: bool,
        may_grow: bool,
    ) -> Result<Plan, Refusal> {
        check_size(selection)?;
        let hosts: Vec<Host> = nodes
            .iter()
            .filter_map(|node| self.registry.alive(*node))
            .map(|(registration, _)| host(registration))
            .collect();
        // Hosts of the cluster on which the job has no part may be named; others are a mistake.
        let mut selection = selection.clone();
        if !selection.by_host.is_empty() {
            let elsewhere: BTreeSet<String> = self
                .registry
                .living()
                .filter(|known| !nodes.contains(&known.node))
                .flat_map(|known| [known.hostname.clone(), known.node.to_string()])
                .collect();
            let here: BTreeSet<String> = hosts
                .iter()
                .flat_map(|host| [host.hostname.clone(), host.node.to_string()])
                .collect();
            selection
                .by_host
                .retain(|wanted, _| here.contains(wanted) || !elsewhere.contains(wanted));
        }
        // Where all nodes are reached over the loopback, there is one host.
        let is_spread = || {
            let mut known = self.registry.living();
            known.any(|known| !known.address.ip().is_loopback())
        };
        let plan = plan(hosts, &selection, may_grow && is_spread())?;
        let known = match &plan {
            Plan::Probe(discovery) if !no_cache => {
                self.probes.cache.get(self.now.awake, discovery.key())
            }
            _ => None,
        };
        Ok(known.map_or(plan, |network| Plan::Known(cached(&network))))
    }

    /// Tells which interfaces connect nodes. They are probed if that is not known.
    pub(super) fn interfaces(
        &mut self,
        ask: AskId,
        query: &InterfacesQuery,
    ) -> Result<Option<HeadReply>, Refusal> {
        if let Some(job) = query.job {
            let info = self.job(job)?;
            return match info.network {
                Some(report) => Ok(Some(HeadReply::Interfaces(report))),
                None => Err(Refusal::new(
                    RefusalKind::NotFound,
                    format!(
                        "the interfaces of {job} are not known: it is {}, and its nodes were not probed",
                        info.state
                    ),
                )),
            };
        }
        let nodes = self.named(query)?;
        match self.plan_network(&nodes, &query.selection, query.no_cache, false)? {
            Plan::Known(network) => Ok(Some(HeadReply::Interfaces(network.report.clone()))),
            Plan::Probe(discovery) => {
                if self.probes.is_busy_for(&discovery, query.no_cache) {
                    return Err(Refusal::new(
                        RefusalKind::Busy,
                        "too many other interfaces are being probed; try again later",
                    ));
                }
                self.find_network(*discovery, query.no_cache, Waiter::Ask(ask));
                Ok(None)
            }
        }
    }

    /// The nodes that a query names; all if it names none.
    fn named(&self, query: &InterfacesQuery) -> Result<Vec<NodeId>, Refusal> {
        if query.nodes.len() > MAX_NODES {
            return Err(Refusal::new(
                RefusalKind::Invalid,
                format!(
                    "{} nodes are asked for; a cluster has at most {MAX_NODES}",
                    query.nodes.len()
                ),
            ));
        }
        let wanted: BTreeSet<&str> = query.nodes.iter().map(String::as_str).collect();
        let mut missing = wanted.clone();
        let mut nodes = Vec::new();
        for registration in self.registry.living() {
            let id = registration.node.to_string();
            let names = [registration.hostname.as_str(), &id];
            if wanted.is_empty() || names.iter().any(|name| wanted.contains(name)) {
                nodes.push(registration.node);
            }
            for name in names {
                missing.remove(name);
            }
        }
        if let Some(missing) = missing.first() {
            return Err(Refusal::new(
                RefusalKind::Invalid,
                format!(
                    "no living node has the hostname or id `{}`; `kolo status` lists them",
                    missing.escape_debug()
                ),
            ));
        }
        if nodes.is_empty() {
            return Err(Refusal::new(
                RefusalKind::Unplaceable,
                "the cluster has no living node",
            ));
        }
        Ok(nodes)
    }

    /// Finds out what connects nodes, and tells the waiter. If `anew`, no probe that has begun already counts.
    pub(super) fn find_network(&mut self, discovery: Discovery, anew: bool, waiter: Waiter) {
        if let Some((probe, step)) = self.probes.find(self.now.real, discovery, anew, waiter) {
            self.go_on(probe, step);
        }
    }

    pub(super) fn go_on(&mut self, probe: ProbeId, step: Step) {
        match step {
            Step::Wait => {}
            Step::Probe(orders) => {
                for order in orders {
                    self.order(probe, order);
                }
            }
            Step::Done(found) => {
                let now = (self.now.real, self.now.awake);
                let Some((found, waiting)) = self.probes.done(now, probe, *found) else {
                    return;
                };
                for waiter in waiting {
                    let found = found.clone();
                    match waiter {
                        Waiter::Job(job) => {
                            self.due.push_back(Due::Job(job, Event::Discovered(found)));
                        }
                        Waiter::Ask(ask) => {
                            let report = found.map(|network| network.report.clone());
                            let report = report.unwrap_or_else(|report| report);
                            self.answer(ask, HeadReply::Interfaces(report));
                        }
                    }
                }
            }
        }
    }

    fn order(&mut self, probe: ProbeId, order: Order) {
        let limit = self.settings.job.probe_limit;
        let (node, deadline) = (order.node, order.deadline(limit));
        let request = NodeRequest::Probe(Probe {
            targets: order.targets,
            limit_ms: milliseconds(limit),
        });
        let stay = self.registry.alive(node);
        let session = stay.map_or(Session::NONE, |(_, session)| session);
        let purpose = Purpose::Probe(probe, node);
        let request = self.send(session, request, deadline, purpose);
        self.probes.sent(probe, request);
    }

    /// Waits for no probe any more. Nodes learn that nobody waits for their answers.
    pub(super) fn leave_probes(&mut self, waiter: Waiter) {
        for request in self.probes.leave(waiter) {
            self.cancel(request);
        }
    }
}

fn host(registration: &NodeRegistration) -> Host {
    Host {
        node: registration.node,
        hostname: registration.hostname.clone(),
        address: registration.address,
        network: registration.network.clone(),
    }
}

/// Refuses lists that no cluster can need.
fn check_size(selection: &InterfaceSelection) -> Result<(), Refusal> {
    let names = selection.names.len() + selection.by_host.values().map(Vec::len).sum::<usize>();
    if selection.by_host.len() > MAX_NODES || names > MAX_NODES {
        return Err(Refusal::new(
            RefusalKind::Invalid,
            format!("{names} network interfaces are named; allowed are {MAX_NODES}"),
        ));
    }
    Ok(())
}

/// The same, marked as known from before.
fn cached(network: &Arc<Network>) -> Arc<Network> {
    let mut network = Network::clone(network);
    network.report.cached = true;
    Arc::new(network)
}
