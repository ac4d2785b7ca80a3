//! Where a worker's data plane listens: on the addresses that connect the job's nodes, and on no others.
//!
//! Mostly that is one address. Where different pairs of nodes use different interfaces, there is a socket on each of this
//! node's, all with the same port, so that a peer needs to know no more than the address that it reaches.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use kolo_collectives::lane::{Door, LaneChoice};
use kolo_transport::endpoint::BindError;
use kolo_transport::wire::network::is_link_local;
use kolo_transport::{
    CloseCode, Credentials, Endpoint, EndpointConfig, TransportRuntime, interfaces,
};

use super::failure::ControlError;
use crate::options::LANE;

/// The IP address under which other nodes reach this one, set by the node.
const NODE_IP: &str = "KOLO_NODE_IP";

/// All addresses to listen on, each with its interface: `10.0.0.1%eth0,10.1.0.1%eth1`.
const LISTEN: &str = "KOLO_LISTEN";

/// The smallest MTU of the interfaces that connect the job's nodes.
const MTU: &str = "KOLO_MTU";

/// What IPv6 and UDP add to a payload, in bytes.
const HEADERS: u16 = 48;

/// Largest MTU that is made use of: that of networks with jumbo frames.
const JUMBO: u16 = 9000;

/// The sockets of a worker. There is at least one.
#[derive(Debug)]
pub(crate) struct Plane {
    first: Place,
    others: Vec<Place>,
}

/// A door, and the interface that it is on if that was named.
#[derive(Debug)]
struct Place {
    door: Door,
    interface: Option<String>,
}

impl Place {
    fn ip(&self) -> IpAddr {
        self.door.address().ip()
    }
}

impl Plane {
    /// Listens where the environment says.
    pub(crate) fn open(
        runtime: &TransportRuntime,
        credentials: Credentials,
    ) -> Result<Self, ControlError> {
        let variable = |name| std::env::var(name).ok();
        let addresses = addresses(variable(LISTEN), variable(NODE_IP))?;
        let mtu = variable(MTU).and_then(|mtu| mtu.parse().ok());
        let choice = lane_choice(variable(LANE));
        let settings: Vec<EndpointConfig> = addresses
            .iter()
            .map(|given| {
                let address = SocketAddr::new(given.ip, 0);
                let listen = interfaces::scoped(address, given.interface.as_deref())
                    .map_err(|error| BindError::Socket { address, error })?;
                Ok(config(listen, mtu))
            })
            .collect::<Result<_, BindError>>()?;
        let doors = Door::open_all(runtime, credentials, &settings, choice)?;
        let mut places = doors.into_iter().zip(addresses).map(|(door, given)| Place {
            door,
            interface: given.interface,
        });
        match places.next() {
            Some(first) => Ok(Self {
                first,
                others: places.collect(),
            }),
            None => Err(ControlError::NodeIp {
                given: String::new(),
            }),
        }
    }

    fn places(&self) -> impl Iterator<Item = &Place> + Clone {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// All addresses; the first is the main one.
    pub(super) fn doors(&self) -> impl Iterator<Item = &Door> {
        self.places().map(|place| &place.door)
    }

    /// The socket on the main address.
    pub(super) fn first(&self) -> &Endpoint {
        self.first.door.endpoint()
    }

    /// From which address to connect to a peer's, and that one as this host needs it.
    pub(super) fn towards(&self, address: SocketAddr) -> std::io::Result<(&Door, SocketAddr)> {
        let mut places = self.places();
        if is_link_local(address.ip()) {
            let place = places
                .find(|place| is_link_local(place.ip()))
                .unwrap_or(&self.first);
            let scoped = interfaces::scoped(address, place.interface.as_deref())?;
            return Ok((&place.door, scoped));
        }
        if self.others.is_empty() {
            return Ok((&self.first.door, address));
        }
        let source = interfaces::source_towards(address)?;
        let place = places
            .clone()
            .find(|place| place.ip() == source)
            .or_else(|| places.find(|place| place.ip().is_ipv4() == source.is_ipv4()))
            .unwrap_or(&self.first);
        Ok((&place.door, address))
    }

    /// Closes all sockets and waits until the peers know.
    pub(crate) async fn close(&self, reason: &str) {
        for door in self.doors() {
            door.close(CloseCode::Shutdown, reason);
        }
        for door in self.doors() {
            door.endpoint().drained().await;
        }
    }
}

/// What the job's options say. They were checked before the job began.
fn lane_choice(given: Option<String>) -> LaneChoice {
    given
        .map(|given| given.parse())
        .transpose()
        .unwrap_or_else(|error| {
            tracing::warn!(%error, "{LANE} is not understood");
            None
        })
        .unwrap_or_default()
}

fn config(listen: SocketAddr, mtu: Option<u32>) -> EndpointConfig {
    let mut config = EndpointConfig {
        listen,
        ..EndpointConfig::default()
    };
    // What does not fit on the way is found out by probes, so a switch in between may know less.
    if let Some(mtu) = mtu.filter(|_| !listen.ip().is_loopback()) {
        let mtu = u16::try_from(mtu).unwrap_or(u16::MAX).min(JUMBO);
        config.mtu_upper_bound = config.mtu_upper_bound.max(mtu.saturating_sub(HEADERS));
    }
    config
}

#[derive(Debug, PartialEq, Eq)]
struct Address {
    ip: IpAddr,
    interface: Option<String>,
}

fn addresses(
    listen: Option<String>,
    node_ip: Option<String>,
) -> Result<Vec<Address>, ControlError> {
    let Some(given) = listen.or(node_ip) else {
        return Ok(vec![Address {
            ip: Ipv4Addr::LOCALHOST.into(),
            interface: None,
        }]);
    };
    given
        .split(',')
        .map(|entry| {
            let (ip, interface) = match entry.split_once('%') {
                Some((ip, interface)) => (ip, Some(interface.to_owned())),
                None => (entry, None),
            };
            let ip = ip.parse().map_err(|_| ControlError::NodeIp {
                given: given.clone(),
            })?;
            Ok(Address { ip, interface })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_as_they_are_written() {
        let read = |listen: Option<&str>, ip: Option<&str>| {
            addresses(listen.map(str::to_owned), ip.map(str::to_owned))
                .map(|addresses| format!("{addresses:?}"))
                .map_err(|error| error.to_string())
        };
        let place = |ip: &str, interface: Option<&str>| Address {
            ip: ip.parse().unwrap(),
            interface: interface.map(str::to_owned),
        };
        for (listen, ip, expected) in [
            (None, None, vec![place("127.0.0.1", None)]),
            (None, Some("10.0.0.7"), vec![place("10.0.0.7", None)]),
            (
                Some("10.1.0.1%eth0,fe80::1%ib0"),
                Some("10.0.0.7"),
                vec![
                    place("10.1.0.1", Some("eth0")),
                    place("fe80::1", Some("ib0")),
                ],
            ),
        ] {
            assert_eq!(read(listen, ip), Ok(format!("{expected:?}")));
        }
        for bad in ["", "eth0", "10.0.0.1,", "10.0.0.1 10.0.0.2"] {
            assert!(read(Some(bad), None).unwrap_err().contains(bad), "{bad}");
        }
    }

    #[test]
    fn what_is_no_kind_of_lane_means_the_default() {
        for (given, expected) in [
            (None, LaneChoice::Tls),
            (Some("quic"), LaneChoice::Quic),
            (Some("tls"), LaneChoice::Tls),
            (Some("rdma"), LaneChoice::Tls),
        ] {
            assert_eq!(lane_choice(given.map(str::to_owned)), expected, "{given:?}");
        }
    }

    #[test]
    fn jumbo_frames_are_made_use_of_and_small_ones_change_nothing() {
        let bound = |listen: &str, mtu| config(listen.parse().unwrap(), mtu).mtu_upper_bound;
        assert_eq!(bound("10.0.0.1:0", Some(9000)), 8952);
        assert_eq!(bound("10.0.0.1:0", Some(65_536)), 8952);
        for mtu in [None, Some(0), Some(10), Some(1280), Some(1500)] {
            assert_eq!(bound("10.0.0.1:0", mtu), 1452, "{mtu:?}");
        }
        assert_eq!(bound("127.0.0.1:0", Some(65_536)), 1452);
    }
}
