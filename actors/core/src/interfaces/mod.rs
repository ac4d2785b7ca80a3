//! Which network interfaces connect the nodes of a job. No I/O, no clock.
//!
//! ```text
//! plan ---> all on one host: the loopback
//!   \-----> Discovery: ring (each node probes the next) ---> one name for all
//!                        \--> no common name: all pairs ---> one interface on each node, or by pair, or an error
//! ```
//!
//! An address of a node counts for a prober if the node itself has answered there, which its certificate proves, and if
//! the prober's packets came from one of its own interfaces as the node saw them. For the ring's result it must be the
//! interface of the same name, so that what is translated or takes another way drops out.
//!
//! The choice is measured and deterministic: see `choose.rs`.

mod cache;
mod candidates;
mod choose;
mod discovery;
mod network;
mod report;
mod resolve;
mod seen;
#[cfg(test)]
pub(crate) mod tests;
mod words;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

use kolo_wire::ids::NodeId;
use kolo_wire::{InterfaceSelection, NodeNetwork, Refusal, RefusalKind};

pub use self::cache::{Key, ProbeCache, TTL};
pub use self::discovery::{Discovery, Order, Step};
pub use self::network::{Listen, Network};
pub use self::report::{COLUMNS, cells, refusal, table};

/// A node that takes part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// The node.
    pub node: NodeId,
    /// Its hostname.
    pub hostname: String,
    /// Where its daemon is reached, as it registered.
    pub address: SocketAddr,
    /// Its interfaces, if it reports them.
    pub network: Option<NodeNetwork>,
}

impl Host {
    fn name(&self) -> String {
        format!("{} ({})", self.hostname, self.node)
    }
}

/// What is to be done to know the interfaces.
#[derive(Debug, Clone, PartialEq)]
pub enum Plan {
    /// Nothing: they are known.
    Known(Arc<Network>),
    /// To probe.
    Probe(Box<Discovery>),
}

/// What is to be done for these nodes, of which no two are the same. `may_grow`: other hosts may come, and the processes that are
/// there by then stay; so processes on a single host listen where others reach them.
///
/// # Errors
///
/// [`RefusalKind::Invalid`] if the selection names hosts or interfaces that are not there, [`RefusalKind::Network`] if a
/// node has no interface that could be used.
pub fn plan(
    hosts: Vec<Host>,
    selection: &InterfaceSelection,
    may_grow: bool,
) -> Result<Plan, Refusal> {
    check_selection(&hosts, selection)?;
    let silent = hosts.iter().find(|host| host.network.is_none());
    let together = match silent {
        Some(silent) if !selection.is_empty() => {
            return Err(Refusal::new(
                RefusalKind::Network,
                format!(
                    "{} does not report its network interfaces, so those that are asked for can't be verified; \
                     use the same version of kolo on all hosts, or leave the interfaces out",
                    silent.name()
                ),
            ));
        }
        Some(_) => hosts.iter().all(|host| host.address.ip().is_loopback()),
        None => {
            let mut stacks = hosts.iter().flat_map(|it| &it.network).map(|it| &it.host);
            let first = stacks.next();
            stacks.all(|stack| Some(stack) == first)
        }
    };
    if together && selection.is_empty() {
        let reached = may_grow.then(|| Discovery::together(&hosts)).flatten();
        let network = reached.unwrap_or_else(|| Network::local(&hosts));
        return Ok(Plan::Known(Arc::new(network)));
    }
    if silent.is_some() {
        return Ok(Plan::Known(Arc::new(Network::registered(&hosts))));
    }
    let discovery = Discovery::new(hosts, selection)?;
    Ok(match discovery.alone() {
        Some(network) => Plan::Known(Arc::new(network)),
        None => Plan::Probe(Box::new(discovery)),
    })
}

fn check_selection(hosts: &[Host], selection: &InterfaceSelection) -> Result<(), Refusal> {
    let invalid = |message: String| Err(Refusal::new(RefusalKind::Invalid, message));
    let lists = selection.by_host.values().chain([&selection.names]);
    for name in lists.flatten() {
        if name.is_empty() || name.len() > NodeNetwork::MAX_NAME || name.contains(['/', '\0', ' '])
        {
            return invalid(format!(
                "`{}` can't be the name of a network interface; names are like eth0",
                name.escape_debug()
            ));
        }
    }
    let mut there = BTreeSet::new();
    if !selection.by_host.is_empty() {
        there.extend(
            hosts
                .iter()
                .flat_map(|host| [host.hostname.clone(), host.node.to_string()]),
        );
    }
    for wanted in selection.by_host.keys() {
        if !there.contains(wanted) {
            let names: Vec<_> = hosts.iter().map(|host| host.hostname.as_str()).collect();
            return invalid(format!(
                "interfaces are given for the host `{}`, which has no part here; hosts are {}",
                wanted.escape_debug(),
                words::listed(&names)
            ));
        }
    }
    Ok(())
}
