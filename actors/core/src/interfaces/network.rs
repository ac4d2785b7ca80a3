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
    /// By who asks and whom: where that one is reached. Empty if each node is reached at one address.
    pub(super) pairs: BTreeMap<(NodeId, NodeId), IpAddr>,
}

impl Network {
    pub(super) fn new(choice: NetworkChoice, rows: Vec<InterfaceRow>) -> Self {
        Self {
            report: NetworkReport {
                choice,
                rows,
                cached: false,
                took_ms: 0,
                problem: None,
            },
            listen: BTreeMap::new(),
            names: BTreeMap::new(),
            pairs: BTreeMap::new(),
        }
    }

    /// All on one host: its loopback.
    pub(super) fn local(hosts: &[Host]) -> Self {
        let mut network = Self::new(NetworkChoice::Local, Vec::new());
        for host in hosts {
            let interfaces = host.network.iter().flat_map(|known| &known.interfaces);
            let loopback = interfaces
                .filter(|interface| interface.loopback && interface.up)
                .flat_map(|interface| interface.addresses.iter().map(move |a| (a.ip, interface)))
                .filter(|(ip, _)| ip.is_loopback())
                .min_by_key(|(ip, _)| *ip);
            let interface = loopback.map_or("lo", |(_, interface)| &interface.name);
            network.names.insert(host.node, interface.to_owned());
            if let Some((ip, _)) = loopback {
                let interface = interface.to_owned();
                let listen = vec![Listen { ip, interface }];
                network.listen.insert(host.node, listen);
            }
        }
        network.add_rows(hosts, "all is on one host");
        network
    }

    /// Some don't report: as they registered.
    pub(super) fn registered(hosts: &[Host]) -> Self {
        let mut network = Self::new(NetworkChoice::Registered, Vec::new());
        network.add_rows(hosts, "not probed: a node does not report its interfaces");
        network
    }

    /// These nodes are on the host of a node, and have the same interfaces.
    pub(super) fn share(&mut self, of: NodeId, others: &[Host]) {
        for host in others {
            let listen = self.listen(of).to_vec();
            self.listen.insert(host.node, listen);
            if let Some(name) = self.names.get(&of).cloned() {
                self.names.insert(host.node, name);
            }
        }
        self.add_rows(others, "another interface of the host is chosen");
    }

    /// The rows of nodes among which nothing was probed, with the reason against what is not chosen.
    fn add_rows(&mut self, hosts: &[Host], why_not: &str) {
        for host in hosts {
            for interface in host.network.iter().flat_map(|known| &known.interfaces) {
                for address in &interface.addresses {
                    let mut row = report::plain_row(host, interface, address.ip);
                    let mut listens = self.listen(host.node).iter();
                    row.chosen =
                        listens.any(|it| it.ip == row.address && it.interface == row.interface);
                    row.why_not = (!row.chosen).then(|| why_not.to_owned());
                    self.report.rows.push(row);
                }
            }
        }
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
        let first = || self.listen(of).first().map(|listen| listen.ip);
        self.pairs.get(&(by, of)).copied().or_else(first)
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
