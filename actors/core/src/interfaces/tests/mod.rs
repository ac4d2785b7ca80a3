//! Tables of networks, and what comes out.

mod cases;
mod properties;
mod states;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use kolo_wire::ids::NodeId;
use kolo_wire::{
    Echo, Interface, InterfaceAddress, InterfaceSelection, NetworkChoice, NetworkReport,
    NodeNetwork, ProbeFailure, ProbeResult, ProbeTarget,
};

use super::{Host, Network, Order, Plan, Step, plan};

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// `eth0 10.1.0.1 fd00::1 mtu=9000 speed=100000 down`, one interface a text.
pub(crate) fn interface(text: &str) -> Interface {
    let mut words = text.split_whitespace();
    let mut interface = Interface {
        name: words.next().unwrap().to_owned(),
        up: true,
        loopback: false,
        mtu: 1500,
        speed: None,
        addresses: Vec::new(),
    };
    for word in words {
        match word.split_once('=') {
            Some(("mtu", mtu)) => interface.mtu = mtu.parse().unwrap(),
            Some(("speed", speed)) => interface.speed = Some(speed.parse().unwrap()),
            _ if word == "down" => interface.up = false,
            _ if word == "loopback" => interface.loopback = true,
            _ => interface.addresses.push(InterfaceAddress {
                ip: ip(word),
                prefix: 24,
            }),
        }
    }
    interface
}

/// Node `number`, called by the letter with this number (or `h27` and so on), with these interfaces and a loopback.
pub(crate) fn host(number: u64, interfaces: &[&str]) -> Host {
    let letter = u8::try_from(number)
        .ok()
        .filter(|number| (1..=26).contains(number))
        .map(|number| char::from(b'a' + number - 1));
    let hostname = letter.map_or_else(|| format!("h{number}"), |letter| letter.to_string());
    let mut all = vec![interface("lo 127.0.0.1 ::1 loopback mtu=65536")];
    all.extend(interfaces.iter().map(|text| interface(text)));
    let first = all.get(1).and_then(|interface| interface.addresses.first());
    Host {
        node: NodeId(number),
        address: SocketAddr::new(first.map_or(ip("10.255.0.1"), |first| first.ip), 7420),
        network: Some(NodeNetwork {
            listen: SocketAddr::new(ip("::"), 7420),
            host: format!("host-{hostname}"),
            interfaces: all,
        }),
        hostname,
    }
}

/// Three hosts, each pair with a network of its own.
pub(crate) fn triangle() -> [Host; 3] {
    [
        host(1, &["ab 10.12.0.1", "ac 10.13.0.1"]),
        host(2, &["ab 10.12.0.2", "bc 10.23.0.2"]),
        host(3, &["ac 10.13.0.3", "bc 10.23.0.3"]),
    ]
}

/// What the networks between hosts do.
#[derive(Debug, Default)]
pub(crate) struct World {
    /// Addresses whose packets are dropped, wherever they come from.
    pub(crate) dropped: Vec<IpAddr>,
    /// Pairs of hosts between which nothing passes, by number.
    pub(crate) apart: Vec<(u64, u64)>,
    /// Sources that are translated: what the target sees in place of the address.
    pub(crate) translated: BTreeMap<IpAddr, IpAddr>,
    /// Routes that differ: from this host to this address from another interface of its own.
    pub(crate) routed: BTreeMap<(u64, IpAddr), String>,
    /// Microseconds to an address; 200 for others.
    pub(crate) rtt: BTreeMap<IpAddr, u64>,
    /// Networks (first three bytes, or the first segment) that are routed to each other.
    pub(crate) gateway: bool,
    /// Nodes that don't answer the head.
    pub(crate) silent: Vec<u64>,
}

fn network_of(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets()[..3].to_vec(),
        IpAddr::V6(ip) => ip.octets()[..8].to_vec(),
    }
}

impl World {
    /// What a real network would have made of a probe.
    pub(crate) fn probe(&self, hosts: &[Host], from: NodeId, target: &ProbeTarget) -> ProbeResult {
        let failed = |kind, reason: &str| ProbeResult::Failed {
            kind,
            reason: reason.to_owned(),
        };
        let of = |node: NodeId| hosts.iter().find(|host| host.node == node).unwrap();
        let (prober, to) = (of(from), of(target.node));
        let address = target.address.ip();
        let own = prober.network.as_ref().unwrap();
        let link_local = matches!(address, IpAddr::V6(ip) if ip.is_unicast_link_local());
        // The interface that its routes choose: over which it has the same network.
        let by_route = || {
            own.interfaces
                .iter()
                .filter(|interface| interface.up)
                .flat_map(|interface| interface.addresses.iter().map(move |a| (interface, a.ip)))
                .find(|(_, ip)| network_of(*ip) == network_of(address))
        };
        let named = |name: &str| {
            own.interfaces
                .iter()
                .find(|interface| interface.name == name)
                .and_then(|interface| {
                    let same = |a: &&InterfaceAddress| a.ip.is_ipv4() == address.is_ipv4();
                    Some((interface, interface.addresses.iter().find(same)?.ip))
                })
        };
        let source = if let Some(name) = self.routed.get(&(from.0, address)) {
            named(name)
        } else if link_local {
            named(target.scope.as_deref().unwrap())
        } else {
            by_route().or_else(|| {
                let first = own.interfaces.iter().find(|i| i.up && !i.loopback)?;
                named(&first.name).filter(|_| self.gateway)
            })
        };
        let Some((_, source)) = source else {
            return failed(ProbeFailure::NoRoute, "Network is unreachable");
        };
        let apart = |a: u64, b: u64| self.apart.contains(&(a, b)) || self.apart.contains(&(b, a));
        let theirs = to.network.as_ref().unwrap();
        let at = theirs.interface_of(address).unwrap();
        if self.dropped.contains(&address) || apart(from.0, target.node.0) || !at.up {
            return failed(ProbeFailure::Silent, "no answer within 2s");
        }
        let seen = self.translated.get(&source).copied().unwrap_or(source);
        ProbeResult::Reached {
            rtt_us: self.rtt.get(&address).copied().unwrap_or(200),
            echo: Echo {
                seen: SocketAddr::new(seen, 1),
                local: Some(address),
                interface: Some(at.name.clone()),
                time_ms: 0,
            },
        }
    }
}

/// What came out, and what it cost.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) result: Result<Network, NetworkReport>,
    /// Every probe that was made: prober and target.
    pub(crate) probes: Vec<(NodeId, ProbeTarget)>,
    pub(crate) rounds: usize,
}

impl Outcome {
    pub(crate) fn choice(&self) -> &NetworkChoice {
        match &self.result {
            Ok(network) => network.choice(),
            Err(report) => &report.choice,
        }
    }

    pub(crate) fn report(&self) -> &NetworkReport {
        match &self.result {
            Ok(network) => &network.report,
            Err(report) => report,
        }
    }

    /// The addresses that were tried.
    pub(crate) fn tried(&self) -> impl Iterator<Item = String> {
        let addresses = self.probes.iter().map(|(_, target)| target.address.ip());
        addresses.map(|ip| ip.to_string())
    }

    /// Where each node listens.
    pub(crate) fn listens(&self) -> BTreeMap<NodeId, Vec<String>> {
        let network = self.result.as_ref().unwrap();
        self.report()
            .rows
            .iter()
            .map(|row| {
                let listen = network.listen(row.node);
                (row.node, listen.iter().map(ToString::to_string).collect())
            })
            .collect()
    }

    /// Why an address was not chosen.
    pub(crate) fn why(&self, address: &str) -> String {
        let rows = &self.report().rows;
        let row = rows.iter().find(|row| row.address == ip(address)).unwrap();
        assert!(!row.chosen, "{address} is chosen");
        row.why_not.clone().unwrap()
    }
}

/// Finds out what connects the hosts in this world; answers come in the order that `shuffle` makes of them.
pub(crate) fn discover_with(
    world: &World,
    hosts: &[Host],
    selection: &InterfaceSelection,
    shuffle: impl Fn(&mut Vec<Order>),
) -> Outcome {
    let mut discovery = match plan(hosts.to_vec(), selection, false).unwrap() {
        Plan::Probe(discovery) => discovery,
        Plan::Known(network) => {
            return Outcome {
                result: Ok(Network::clone(&network)),
                probes: Vec::new(),
                rounds: 0,
            };
        }
    };
    let mut probes = Vec::new();
    let mut rounds = 0;
    let mut waiting: Vec<Order> = Vec::new();
    let mut step = discovery.start();
    loop {
        match step {
            Step::Probe(orders) => {
                assert!(
                    waiting.is_empty(),
                    "a round begins before the last one ends"
                );
                rounds += 1;
                waiting = orders;
                shuffle(&mut waiting);
            }
            Step::Wait => assert!(!waiting.is_empty(), "it waits for nothing"),
            Step::Done(result) => {
                assert!(waiting.is_empty(), "it ends before all have answered");
                return Outcome {
                    result: *result,
                    probes,
                    rounds,
                };
            }
        }
        let order = waiting.pop().unwrap();
        assert!(!order.targets.is_empty(), "an order of nothing");
        let results = if world.silent.contains(&order.node.0) {
            Err("it does not answer the head".to_owned())
        } else {
            let probe = |target: &ProbeTarget| world.probe(hosts, order.node, target);
            Ok(order.targets.iter().map(probe).collect())
        };
        probes.extend(order.targets.into_iter().map(|target| (order.node, target)));
        step = discovery.answered(order.node, results);
    }
}

pub(crate) fn discover(world: &World, hosts: &[Host]) -> Outcome {
    discover_with(world, hosts, &InterfaceSelection::default(), |_| ())
}

pub(crate) fn select(names: &[&str], by_host: &[(&str, &[&str])]) -> InterfaceSelection {
    let list = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
    InterfaceSelection {
        names: list(names),
        by_host: by_host
            .iter()
            .map(|(host, names)| ((*host).to_owned(), list(names)))
            .collect(),
    }
}
