//! What was found: what connects the nodes of a job.

use std::collections::BTreeMap;
use std::net::IpAddr;

use kolo_wire::ids::NodeId;
use kolo_wire::{InterfaceRow, NetworkChoice, NetworkReport, Refusal, RefusalKind};

use super::Host;
use super::report;

/// An address on which a job's workers listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listen {
    /// The address.
    pub ip: IpAddr,
    /// Its interface.
    pub interface: String,
}

impl std::fmt::Display for Listen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}%{}", self.ip, self.interface)
    }
}

/// What connects some nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Network {
    /// For people.
    pub report: NetworkReport,
    /// Where workers listen, by node; the first one is for those who know no better. Empty: where the node registered.
    pub(super) listen: BTreeMap<NodeId, Vec<Listen>>,
    /// The one interface of each node, if there is one.
    pub(super) names: BTreeMap<NodeId, String>,
    /// By who asks and whom: where that one is reached. For pairs that differ from what [`Network::listen`] says first.
    pub(super) pairs: BTreeMap<(NodeId, NodeId), IpAddr>,
}

impl Network {
    /// All on one host: its loopback.
    pub(super) fn local(hosts: &[Host]) -> Self {
        let mut network = Self {
            report: NetworkReport {
                choice: NetworkChoice::Local,
                rows: Vec::new(),
                cached: false,
                took_ms: 0,
                problem: None,
            },
            listen: BTreeMap::new(),
            names: BTreeMap::new(),
            pairs: BTreeMap::new(),
        };
        for host in hosts {
            let loopback = host.network.as_ref().and_then(|report| {
                report
                    .interfaces
                    .iter()
                    .filter(|interface| interface.loopback && interface.up)
                    .flat_map(|interface| {
                        interface.addresses.iter().map(move |a| (a.ip, interface))
                    })
                    .filter(|(ip, _)| ip.is_loopback())
                    .min_by_key(|(ip, _)| *ip)
            });
            if let Some((ip, interface)) = loopback {
                let listen = Listen {
                    ip,
                    interface: interface.name.clone(),
                };
                network.names.insert(host.node, interface.name.clone());
                network.listen.insert(host.node, vec![listen]);
            } else {
                network.names.insert(host.node, "lo".to_owned());
            }
        }
        network.report.rows = local_rows(hosts, &network);
        network
    }

    /// Some don't report: as they registered.
    pub(super) fn registered(hosts: &[Host]) -> Self {
        let mut network = Self::local(&[]);
        network.report.choice = NetworkChoice::Registered;
        network.report.rows = local_rows(hosts, &network);
        network
    }

    /// What was chosen.
    #[must_use]
    pub fn choice(&self) -> &NetworkChoice {
        &self.report.choice
    }

    /// The one interface of a node over which it reaches all others; `None` if there is none, or none is known.
    #[must_use]
    pub fn interface(&self, node: NodeId) -> Option<&str> {
        self.names.get(&node).map(String::as_str)
    }

    /// Where the workers on a node listen, the main address first. Empty: at the address at which the node registered.
    #[must_use]
    pub fn listen(&self, node: NodeId) -> &[Listen] {
        self.listen.get(&node).map_or(&[], Vec::as_slice)
    }

    /// Where workers on `of` are reached by those on `by`; `None`: where they say that they listen.
    #[must_use]
    pub fn address(&self, of: NodeId, by: NodeId) -> Option<IpAddr> {
        self.pairs
            .get(&(by, of))
            .copied()
            .or_else(|| self.listen(of).first().map(|listen| listen.ip))
    }

    /// What programs that need one interface on each node are told if there is none.
    ///
    /// # Errors
    ///
    /// [`RefusalKind::Network`] with the table.
    pub fn check_one_interface(&self) -> Result<(), Refusal> {
        if self.report.choice != NetworkChoice::PerPair {
            return Ok(());
        }
        Err(Refusal::new(
            RefusalKind::Network,
            format!(
                "no single interface of each node reaches all others, which programs that take one (HOROVOD_GLOO_IFACE, \
                 GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) need; kolo's own collectives do without. Connect the nodes by one \
                 network, or start a program that takes none without the rendezvous (`kolo run --no-rendezvous`)\n{}",
                report::table(&self.report, report::MOST_ROWS)
            ),
        ))
    }
}

/// The rows of nodes among which nothing was probed.
fn local_rows(hosts: &[Host], network: &Network) -> Vec<InterfaceRow> {
    let mut rows = Vec::new();
    for host in hosts {
        let Some(report) = &host.network else {
            continue;
        };
        for interface in &report.interfaces {
            for address in &interface.addresses {
                let chosen = network
                    .listen(host.node)
                    .iter()
                    .any(|listen| listen.ip == address.ip && listen.interface == interface.name);
                let why_not = match network.choice() {
                    _ if chosen => None,
                    NetworkChoice::Local => Some("all is on one host".to_owned()),
                    _ => Some("not probed: a node does not report its interfaces".to_owned()),
                };
                rows.push(InterfaceRow {
                    node: host.node,
                    hostname: host.hostname.clone(),
                    interface: interface.name.clone(),
                    address: address.ip,
                    mtu: interface.mtu,
                    speed: interface.speed,
                    reached_by: Vec::new(),
                    chosen,
                    why_not,
                });
            }
        }
    }
    rows
}
