//! The head's part in network interfaces: which nodes, what is known of them, who asks.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use actix::{AsyncContext as _, Context, Handler, ResponseFuture};
use kolo_core::head::job::NetworkPlan;
use kolo_core::head::registry::MAX_NODES;
use kolo_core::interfaces::{Host, Key, Network, plan};
use kolo_transport::ids::NodeId;
use kolo_transport::wire::{
    InterfaceSelection, InterfacesQuery, NetworkReport, NodeRegistration, Refusal, RefusalKind,
};

use super::actor::HeadActor;
use super::link::NodeLink;
use super::messages::{GetInterfaces, GetJob, Learned, NetworkChanged};
use super::probing::Search;

type Links = HashMap<NodeId, Arc<dyn NodeLink>>;

fn host(registration: &NodeRegistration) -> Host {
    Host {
        node: registration.node,
        hostname: registration.hostname.clone(),
        address: registration.address,
        network: registration.network.clone(),
    }
}

impl HeadActor {
    /// What connects these nodes, as far as it is known, and for what that is valid.
    pub(super) fn plan_network(
        &self,
        nodes: &[NodeId],
        selection: &InterfaceSelection,
        no_cache: bool,
    ) -> Result<(Option<Key>, NetworkPlan), Refusal> {
        check_size(selection)?;
        let hosts: Vec<Host> = nodes
            .iter()
            .filter_map(|node| self.registry.alive(*node))
            .map(|(registration, _)| host(registration))
            .collect();
        // Hosts of the cluster on which the job has no part may be named; others are a mistake.
        let mut selection = selection.clone();
        if !selection.by_host.is_empty() {
            let elsewhere: HashSet<String> = self
                .registry
                .living()
                .filter(|known| !nodes.contains(&known.node))
                .flat_map(|known| [known.hostname.clone(), known.node.to_string()])
                .collect();
            let here: HashSet<String> = hosts
                .iter()
                .flat_map(|host| [host.hostname.clone(), host.node.to_string()])
                .collect();
            selection
                .by_host
                .retain(|wanted, _| here.contains(wanted) || !elsewhere.contains(wanted));
        }
        let key = Key::new(&hosts, &selection);
        let known = key
            .as_ref()
            .filter(|_| !no_cache)
            .and_then(|key| self.networks.get(Instant::now(), key));
        if let Some(network) = known {
            return Ok((key, NetworkPlan::Known(cached(&network))));
        }
        Ok((key, plan(hosts, &selection)?.into()))
    }

    fn query(&self, query: &InterfacesQuery) -> Result<(Option<Key>, NetworkPlan, Links), Refusal> {
        if query.nodes.len() > MAX_NODES {
            return Err(Refusal::new(
                RefusalKind::Invalid,
                format!(
                    "{} nodes are asked for; a cluster has at most {MAX_NODES}",
                    query.nodes.len()
                ),
            ));
        }
        let wanted: HashSet<&str> = query.nodes.iter().map(String::as_str).collect();
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
        if let Some(missing) = missing.into_iter().min() {
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
        let (key, plan) = self.plan_network(&nodes, &query.selection, query.no_cache)?;
        let links = nodes
            .iter()
            .filter_map(|node| Some((*node, Arc::clone(&self.links.get(node)?.1))))
            .collect();
        Ok((key, plan, links))
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

impl Handler<NetworkChanged> for HeadActor {
    type Result = Result<(), Refusal>;

    fn handle(&mut self, message: NetworkChanged, _: &mut Context<Self>) -> Self::Result {
        let NetworkChanged {
            node,
            session,
            network,
        } = message;
        tracing::info!(%node, interfaces = network.interfaces.len(), "a node's network interfaces have changed");
        self.registry.set_network(node, session, network)
    }
}

impl Handler<Learned> for HeadActor {
    type Result = ();

    fn handle(&mut self, Learned { key, network }: Learned, _: &mut Context<Self>) {
        self.networks.put(Instant::now(), key, network);
    }
}

impl Handler<GetInterfaces> for HeadActor {
    type Result = ResponseFuture<Result<NetworkReport, Refusal>>;

    fn handle(
        &mut self,
        GetInterfaces(query): GetInterfaces,
        ctx: &mut Context<Self>,
    ) -> Self::Result {
        let this = ctx.address();
        if let Some(job) = query.job {
            return Box::pin(async move {
                let stopped = |_| Refusal::new(RefusalKind::Stopped, "the head is stopping");
                let info = this.send(GetJob(job)).await.map_err(stopped)??;
                info.network.ok_or_else(|| {
                    Refusal::new(
                        RefusalKind::NotFound,
                        format!(
                            "the interfaces of {job} are not known: it is {}, and its nodes were not probed",
                            info.state
                        ),
                    )
                })
            });
        }
        let limit = (self.clock.clone(), self.settings.job.probe_limit);
        let asked = self.query(&query);
        let probes = self.probes.clone();
        Box::pin(async move {
            let (key, plan, links) = asked?;
            let discovery = match plan {
                NetworkPlan::Known(network) => return Ok(network.report.clone()),
                NetworkPlan::Discover(discovery) => discovery,
            };
            let search = Search {
                discovery: *discovery,
                key: key.clone(),
                anew: query.no_cache,
            };
            match probes.find(search, links, limit).await {
                Ok(network) => {
                    let report = network.report.clone();
                    if let Some(key) = key {
                        // A head that stops needs no cache.
                        this.send(Learned { key, network }).await.ok();
                    }
                    Ok(report)
                }
                Err(report) => Ok(report),
            }
        })
    }
}
