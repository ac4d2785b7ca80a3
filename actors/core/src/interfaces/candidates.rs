//! Which addresses of a host come into question.

use std::fmt;
use std::net::IpAddr;

use kolo_wire::network::is_link_local;
use kolo_wire::{Interface, InterfaceSelection, NodeNetwork, Refusal, RefusalKind};

use super::Host;
use super::words::listed;

/// The kinds of addresses, in the order in which they are preferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Family {
    V4,
    V6,
    LinkLocal,
}

impl Family {
    pub(super) fn of(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(_) => Self::V4,
            ip if is_link_local(ip) => Self::LinkLocal,
            IpAddr::V6(_) => Self::V6,
        }
    }
}

/// Why an address does not come into question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unfit {
    NotSelected,
    Down,
    Loopback,
    NotListening,
    LinkLocal,
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotSelected => "not among the interfaces that were asked for",
            Self::Down => "down",
            Self::Loopback => "loopback",
            Self::NotListening => "the node daemon does not listen on it (--listen)",
            Self::LinkLocal => "link-local, and there are other addresses",
        })
    }
}

/// An address of a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Candidate {
    /// Index of its interface in the host's report.
    pub(super) interface: usize,
    pub(super) ip: IpAddr,
    pub(super) family: Family,
    pub(super) unfit: Option<Unfit>,
}

/// A host with its candidates.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Site {
    pub(super) host: Host,
    pub(super) network: NodeNetwork,
    /// Every address, in the order of the report.
    pub(super) candidates: Vec<Candidate>,
}

impl Site {
    pub(super) fn interface(&self, candidate: usize) -> &Interface {
        &self.network.interfaces[self.candidates[candidate].interface]
    }

    pub(super) fn name(&self, candidate: usize) -> &str {
        &self.interface(candidate).name
    }

    pub(super) fn fit(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.candidates.len()).filter(|index| self.candidates[*index].unfit.is_none())
    }

    /// The host's interface that has this address; the one of this name if there are several.
    pub(super) fn interface_with(&self, ip: IpAddr, name: &str) -> Option<&str> {
        let mut found = None;
        for interface in &self.network.interfaces {
            if interface.addresses.iter().any(|address| address.ip == ip) {
                if interface.name == name {
                    return Some(&interface.name);
                }
                found = found.or(Some(interface.name.as_str()));
            }
        }
        found
    }
}

/// The addresses of a host, and which of them come into question.
pub(super) fn site(host: Host, selection: &InterfaceSelection) -> Result<Site, Refusal> {
    let Some(network) = host.network.clone() else {
        // `plan` has seen that all report.
        return Err(Refusal::new(
            RefusalKind::Internal,
            format!("{} reports no interfaces", host.name()),
        ));
    };
    let selected = selection.for_node(host.node, &host.hostname);
    let names = || {
        let names: Vec<_> = network.interfaces.iter().map(|i| i.name.as_str()).collect();
        listed(&names)
    };
    if !selected.is_empty()
        && !network
            .interfaces
            .iter()
            .any(|interface| interface.up && selected.contains(&interface.name))
    {
        return Err(Refusal::new(
            RefusalKind::Network,
            format!(
                "{} has none of the interfaces {} that were asked for, or they are down; it has {}",
                host.name(),
                selected.join(", "),
                names()
            ),
        ));
    }
    let has_routable = |interface: &Interface| {
        let mut addresses = interface.addresses.iter();
        interface.up
            && !interface.loopback
            && addresses.any(|address| !is_link_local(address.ip) && network.listens_at(address.ip))
    };
    let mut candidates = Vec::new();
    for (index, interface) in network.interfaces.iter().enumerate() {
        // A link-local address is the last resort of a host; of an interface that was asked for by name.
        let has_other = if selected.is_empty() {
            network.interfaces.iter().any(has_routable)
        } else {
            has_routable(interface)
        };
        for address in &interface.addresses {
            let ip = address.ip;
            let unfit = if !selected.is_empty() && !selected.contains(&interface.name) {
                Some(Unfit::NotSelected)
            } else if !interface.up {
                Some(Unfit::Down)
            } else if (interface.loopback || ip.is_loopback()) && selected.is_empty() {
                Some(Unfit::Loopback)
            } else if !network.listens_at(ip) {
                Some(Unfit::NotListening)
            } else if is_link_local(ip) && has_other {
                Some(Unfit::LinkLocal)
            } else {
                None
            };
            candidates.push(Candidate {
                interface: index,
                ip,
                family: Family::of(ip),
                unfit,
            });
        }
    }
    if candidates.iter().all(|candidate| candidate.unfit.is_some()) {
        let addresses: Vec<String> = candidates
            .iter()
            .map(|candidate| {
                let name = &network.interfaces[candidate.interface].name;
                let why = candidate.unfit.map(|why| why.to_string());
                format!("{name} {}: {}", candidate.ip, why.unwrap_or_default())
            })
            .collect();
        return Err(Refusal::new(
            RefusalKind::Network,
            format!(
                "{} has no network interface that other hosts could reach: {}; start its kolo-node with --listen [::]:PORT \
                 or with an address that they reach",
                host.name(),
                if addresses.is_empty() {
                    "it has no addresses at all".to_owned()
                } else {
                    listed(&addresses)
                }
            ),
        ));
    }
    Ok(Site {
        host,
        network,
        candidates,
    })
}
