//! By which addresses hosts may reach the head, and which hosts are this machine.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use kolo_transport::interfaces;
use kolo_transport::wire::network::is_link_local;

use crate::hosts::{HostSlots, Machine, is_own_loopback};

/// Where the head may be reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Addresses {
    /// An address that was given for all hosts; then no other counts.
    pub(super) given: Option<String>,
    /// Where the head listens, if it runs on this machine.
    pub(super) here: Option<SocketAddr>,
    /// `HOST:PORT` as this machine reaches it, best first, if it runs elsewhere.
    pub(super) elsewhere: Vec<String>,
    /// Addresses of this machine, the likeliest first.
    pub(super) own: Vec<IpAddr>,
}

impl Addresses {
    /// Where a host should look for the head, best first. `from` is this machine's address as the host sees it, `here`
    /// tells that the host is this machine.
    pub(super) fn candidates(&self, from: Option<IpAddr>, here: bool) -> Vec<String> {
        if let Some(given) = &self.given {
            return vec![given.clone()];
        }
        let mut candidates: Vec<String> = Vec::new();
        let mut add = |candidate: String| {
            if !candidates.contains(&candidate) {
                candidates.push(candidate);
            }
        };
        self.elsewhere.iter().cloned().for_each(&mut add);
        if let Some(listen) = self.here {
            let port = listen.port();
            if listen.ip().to_canonical().is_unspecified() {
                let heard = |ip: &IpAddr| listen.is_ipv6() || ip.is_ipv4();
                // The host got an answer from there a moment ago.
                let from = from.map(|ip| ip.to_canonical()).filter(heard);
                // A node that reaches the head by the loopback is on the loopback: others could not reach it.
                let own = self.own.iter().copied().filter(heard);
                let loopback: [IpAddr; 2] =
                    [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
                let loopback = loopback.into_iter().filter(|ip| here && heard(ip));
                for ip in from.into_iter().chain(own).chain(loopback) {
                    add(SocketAddr::new(ip, port).to_string());
                }
            } else {
                add(listen.to_string());
            }
        }
        candidates
    }

    /// Whether only processes of this machine reach the head.
    pub(super) fn is_loopback_only(&self) -> bool {
        self.given.is_none()
            && self.elsewhere.is_empty()
            && self
                .here
                .is_some_and(|listen| listen.ip().to_canonical().is_loopback())
    }
}

/// Addresses of this machine: those that face the world, by the routes to it, and then all others by which other machines may
/// reach it; a network need not lead anywhere else. Nothing is sent.
pub(super) fn own_addresses() -> Vec<IpAddr> {
    // Documentation addresses: only the choice of the route matters.
    let outside: [SocketAddr; 2] = [
        (Ipv4Addr::new(192, 0, 2, 1), 9).into(),
        (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 9).into(),
    ];
    let mut own: Vec<IpAddr> = outside.into_iter().filter_map(facing).collect();
    let interfaces = interfaces::here().unwrap_or_else(|error| {
        tracing::debug!(%error, "the interfaces are not known");
        Vec::new()
    });
    for interface in interfaces {
        if interface.up && !interface.loopback {
            for ip in interface.addresses.iter().map(|address| address.ip) {
                if !own.contains(&ip) && !is_link_local(ip) {
                    own.push(ip);
                }
            }
        }
    }
    own
}

/// The address of this machine that faces `peer`.
pub(super) fn facing(peer: SocketAddr) -> Option<IpAddr> {
    let any: SocketAddr = if peer.is_ipv4() {
        (Ipv4Addr::UNSPECIFIED, 0).into()
    } else {
        (Ipv6Addr::UNSPECIFIED, 0).into()
    };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(peer).ok()?;
    let ip = socket.local_addr().ok()?.ip().to_canonical();
    (!ip.is_loopback() && !ip.is_unspecified()).then_some(ip)
}

/// Whether an address is one of this machine. Of the loopback's only the usual ones count.
fn is_own(ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    if ip.is_loopback() {
        return is_own_loopback(ip);
    }
    // An address can be bound to where it is an interface's.
    !ip.is_unspecified() && !ip.is_multicast() && UdpSocket::bind((ip, 0)).is_ok()
}

/// Whether a host is this machine, and ssh therefore not needed: its name is `localhost` or this machine's own, or one
/// of its addresses is an address of this machine, as with Horovod. A user that is named makes it another account,
/// which takes ssh.
pub(super) fn is_here(host: &HostSlots, own_name: &str, addresses: &[IpAddr]) -> bool {
    host.user.is_none()
        && (host.machine(own_name) == Machine::Here || addresses.iter().copied().any(is_own))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hosts::parse_hosts;

    fn here(listen: &str) -> Addresses {
        Addresses {
            given: None,
            here: Some(listen.parse().unwrap()),
            elsewhere: Vec::new(),
            own: vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
        }
    }

    fn ip(text: &str) -> Option<IpAddr> {
        text.parse().ok()
    }

    #[test]
    fn the_address_that_ssh_came_from_is_tried_first() {
        let all = here("0.0.0.0:7");
        assert_eq!(
            all.candidates(ip("192.168.1.1"), false),
            ["192.168.1.1:7", "10.0.0.1:7"]
        );
        assert_eq!(all.candidates(ip("10.0.0.1"), false), ["10.0.0.1:7"]);
        // A head that has IPv4 only is not looked for by IPv6.
        assert_eq!(all.candidates(ip("fd00::9"), false), ["10.0.0.1:7"]);
        let both = here("[::]:7");
        assert_eq!(
            both.candidates(ip("fd00::9"), false),
            ["[fd00::9]:7", "10.0.0.1:7", "[fd00::1]:7"]
        );
        assert_eq!(
            both.candidates(ip("::ffff:10.0.0.1"), false),
            ["10.0.0.1:7", "[fd00::1]:7"]
        );
    }

    #[test]
    fn this_machine_uses_the_loopback_last() {
        assert_eq!(
            here("0.0.0.0:7").candidates(None, true),
            ["10.0.0.1:7", "127.0.0.1:7"]
        );
        let mut alone = here("[::]:7");
        alone.own.clear();
        assert_eq!(alone.candidates(None, true), ["127.0.0.1:7", "[::1]:7"]);
    }

    #[test]
    fn what_is_given_is_the_only_one() {
        let mut given = here("0.0.0.0:7");
        given.given = Some("head.example:7700".to_owned());
        assert_eq!(
            given.candidates(ip("192.168.1.1"), false),
            ["head.example:7700"]
        );
        assert!(!given.is_loopback_only());
    }

    #[test]
    fn a_head_elsewhere_is_named_as_it_is_known_here() {
        let elsewhere = Addresses {
            given: None,
            here: None,
            elsewhere: vec!["head:7700".to_owned()],
            own: Vec::new(),
        };
        assert_eq!(elsewhere.candidates(ip("10.0.0.9"), false), ["head:7700"]);
        assert!(!elsewhere.is_loopback_only());
    }

    #[test]
    fn a_head_on_one_address_is_there_only() {
        assert_eq!(
            here("10.0.0.5:7").candidates(ip("10.0.0.9"), false),
            ["10.0.0.5:7"]
        );
        assert!(here("127.0.0.1:7").is_loopback_only());
        assert!(here("[::1]:7").is_loopback_only());
        assert!(!here("0.0.0.0:7").is_loopback_only());
    }

    #[test]
    fn this_machine_is_known_by_name_and_address() {
        let is = |text: &str, addresses: &[&str]| {
            let addresses: Vec<IpAddr> = addresses.iter().map(|ip| ip.parse().unwrap()).collect();
            is_here(&parse_hosts(text).unwrap()[0], "me", &addresses)
        };
        assert!(is("localhost:1", &[]) && is("LOCALHOST:1", &[]) && is("me:1", &[]));
        assert!(is("127.0.0.1:1", &["127.0.0.1"]) && is("x:1", &["127.0.0.1"]));
        assert!(is("[::1]:1", &["::1"]));
        // As Debian writes a machine's own full name into /etc/hosts.
        assert!(is("me.example:1", &["127.0.1.1"]) && is("ME.:1", &[]) && is("127.1:1", &[]));
        assert!(!is("root@localhost:1", &["127.0.0.1"]));
        assert!(!is("127.0.0.2:1", &["127.0.0.2"]));
        assert!(!is("other:1", &[]) && !is("other:1", &["192.0.2.77", "0.0.0.0", "224.0.0.1"]));
    }
}
