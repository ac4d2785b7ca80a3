//! Network interfaces: what nodes have, how they try to reach each other, and what came of it.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use super::Refusal;
use crate::ids::{JobId, NodeId};

/// An address of an [`Interface`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct InterfaceAddress {
    /// The address.
    pub ip: IpAddr,
    /// Leading bits that name its network.
    pub prefix: u8,
}

/// A network interface of a host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Interface {
    /// Its name: `eth0`.
    pub name: String,
    /// Whether it is switched on and has a carrier.
    pub up: bool,
    /// Whether it reaches nothing but its own host.
    pub loopback: bool,
    /// Largest packet, in bytes.
    pub mtu: u32,
    /// Megabits a second, where the driver knows.
    #[serde(default)]
    pub speed: Option<u32>,
    /// Its addresses, sorted.
    pub addresses: Vec<InterfaceAddress>,
}

/// A host's networks, as its node daemon reports them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NodeNetwork {
    /// Where the daemon listens; all addresses of the family if the IP is unspecified, of both if it is `[::]`.
    pub listen: SocketAddr,
    /// Tells hosts apart: daemons with the same value share one network stack, and reach each other over its loopback.
    pub host: String,
    /// Interfaces with addresses, by name.
    pub interfaces: Vec<Interface>,
}

impl NodeNetwork {
    /// Most interfaces that a node reports; those behind them in order are left out.
    pub const MAX_INTERFACES: usize = 256;
    /// Most addresses of an interface that a node reports.
    pub const MAX_ADDRESSES: usize = 32;
    /// Longest name, in bytes.
    pub const MAX_NAME: usize = 64;

    /// The interface that has this address.
    #[must_use]
    pub fn interface_of(&self, ip: IpAddr) -> Option<&Interface> {
        self.interfaces
            .iter()
            .find(|interface| interface.addresses.iter().any(|address| address.ip == ip))
    }

    /// Whether the daemon's socket can speak to and from addresses of this kind.
    #[must_use]
    pub fn speaks(&self, ip: IpAddr) -> bool {
        match self.listen.ip() {
            IpAddr::V4(_) => ip.is_ipv4(),
            IpAddr::V6(listen) => ip.is_ipv6() || listen.is_unspecified(),
        }
    }

    /// Whether the daemon listens at this address of its host.
    #[must_use]
    pub fn listens_at(&self, ip: IpAddr) -> bool {
        self.speaks(ip) && (self.listen.ip().is_unspecified() || self.listen.ip() == ip)
    }
}

/// Whether an address means something only together with an interface.
#[must_use]
pub fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// One address to try.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ProbeTarget {
    /// The node that must answer.
    pub node: NodeId,
    /// Where it listens.
    pub address: SocketAddr,
    /// For a link-local address: the interface of the prober's own over which it is tried.
    #[serde(default)]
    pub scope: Option<String>,
}

/// Addresses to try, all at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// The addresses.
    pub targets: Vec<ProbeTarget>,
    /// The longest wait for each, in milliseconds.
    pub limit_ms: u64,
}

impl Probe {
    /// So many addresses are tried at one time; more wait for those before them.
    pub const AT_ONCE: usize = 256;
}

/// How a node sees the connection on which it is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Echo {
    /// Where the caller comes from.
    pub seen: SocketAddr,
    /// The node's own address on this connection.
    #[serde(default)]
    pub local: Option<IpAddr>,
    /// The interface that has this address.
    #[serde(default)]
    pub interface: Option<String>,
    /// Its wall clock, in milliseconds since 1970; 0 if it does not say.
    #[serde(default)]
    pub time_ms: u64,
}

/// Why an address does not connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ProbeFailure {
    /// The prober has no route to it.
    NoRoute,
    /// Nothing came back in time: a firewall, a dead host, a port that nobody listens on.
    Silent,
    /// Another member answered than the one that was meant, or oneself.
    WrongPeer,
    /// Something answered that is no member of the cluster, or refused.
    Refused,
    /// A kind of a later version.
    #[serde(other)]
    Other,
}

/// What came of one [`ProbeTarget`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProbeResult {
    /// The node that was meant has answered.
    Reached {
        /// The shortest round trip, in microseconds.
        rtt_us: u64,
        /// What it said.
        echo: Echo,
    },
    /// It has not.
    Failed {
        /// The kind.
        kind: ProbeFailure,
        /// For people.
        reason: String,
    },
}

/// Which interfaces a job may use; any if empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct InterfaceSelection {
    /// On every host without an entry of its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
    /// By hostname or node id.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub by_host: BTreeMap<String, Vec<String>>,
}

impl InterfaceSelection {
    /// Whether it selects nothing in particular.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.names.is_empty() && self.by_host.is_empty()
    }

    /// The names for one node; any if empty.
    #[must_use]
    pub fn for_node(&self, node: NodeId, hostname: &str) -> &[String] {
        self.by_host
            .get(&node.to_string())
            .or_else(|| self.by_host.get(hostname))
            .unwrap_or(&self.names)
    }
}

/// What connects the nodes of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NetworkChoice {
    /// All is on one host: its loopback.
    Local,
    /// The addresses at which the nodes registered; they did not report interfaces.
    Registered,
    /// The interface of this name on every node.
    Interface(String),
    /// One interface on each node, with different names.
    PerNode,
    /// Different interfaces for different pairs of nodes.
    PerPair,
    /// Nothing.
    None,
}

impl fmt::Display for NetworkChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.write_str("loopback (all on one host)"),
            Self::Registered => f.write_str("the addresses at which the nodes registered"),
            Self::Interface(name) => write!(f, "{name} on every node"),
            Self::PerNode => f.write_str("one interface on each node"),
            Self::PerPair => f.write_str("by pair of nodes"),
            Self::None => f.write_str("nothing"),
        }
    }
}

/// Who reached an address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReachedBy {
    /// Its node.
    pub node: NodeId,
    /// Its hostname.
    pub hostname: String,
    /// From which of its own interfaces.
    pub interface: String,
    /// The shortest round trip, in microseconds.
    pub rtt_us: u64,
}

/// One address of one interface of one node, and what became of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceRow {
    /// The node.
    pub node: NodeId,
    /// Its hostname.
    pub hostname: String,
    /// The interface.
    pub interface: String,
    /// The address.
    pub address: IpAddr,
    /// Largest packet, in bytes.
    pub mtu: u32,
    /// Megabits a second, where known.
    #[serde(default)]
    pub speed: Option<u32>,
    /// Who reached it.
    pub reached_by: Vec<ReachedBy>,
    /// Whether the job uses it.
    pub chosen: bool,
    /// Why not.
    #[serde(default)]
    pub why_not: Option<String>,
}

/// The interfaces of some nodes, and which connect them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkReport {
    /// What was chosen.
    pub choice: NetworkChoice,
    /// Every address, by node in the order of the ring.
    pub rows: Vec<InterfaceRow>,
    /// Whether it was known from before.
    pub cached: bool,
    /// Milliseconds that the probe took; 0 if there was none.
    pub took_ms: u64,
    /// Why nothing was chosen.
    #[serde(default)]
    pub problem: Option<Refusal>,
}

/// Which nodes' interfaces are asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfacesQuery {
    /// Those of a job, as found when it started. The other fields don't count then.
    #[serde(default)]
    pub job: Option<JobId>,
    /// These hosts (hostname or node id); all that live if empty.
    #[serde(default)]
    pub nodes: Vec<String>,
    /// Only these interfaces.
    #[serde(default)]
    pub selection: InterfaceSelection,
    /// Probe even if the answer is known.
    #[serde(default)]
    pub no_cache: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_speaks_what_it_is_bound_to() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        for (listen, v4, v6) in [
            ("[::]:7", true, true),
            ("0.0.0.0:7", true, false),
            ("10.0.0.1:7", true, false),
            ("[fd00::1]:7", false, true),
        ] {
            let network = NodeNetwork {
                listen: listen.parse().unwrap(),
                host: "h".to_owned(),
                interfaces: Vec::new(),
            };
            assert_eq!(network.speaks(ip("10.0.0.1")), v4, "{listen}");
            assert_eq!(network.speaks(ip("fd00::1")), v6, "{listen}");
            assert_eq!(
                network.listens_at(ip("10.0.0.9")),
                v4 && listen != "10.0.0.1:7"
            );
        }
    }

    #[test]
    fn a_selection_by_host_goes_before_the_one_for_all() {
        let selection = InterfaceSelection {
            names: vec!["eth0".to_owned()],
            by_host: BTreeMap::from([
                ("b".to_owned(), vec!["ib0".to_owned()]),
                (NodeId(3).to_string(), vec!["ib1".to_owned()]),
            ]),
        };
        assert_eq!(selection.for_node(NodeId(1), "a"), ["eth0"]);
        assert_eq!(selection.for_node(NodeId(2), "b"), ["ib0"]);
        assert_eq!(selection.for_node(NodeId(3), "b"), ["ib1"]);
    }
}
