//! Where a worker's data plane listens: on the addresses that connect the job's nodes, and on no others.
//!
//! Mostly that is one address. Where different pairs of nodes use different interfaces, there is a socket on each of this
//! node's, all with the same port, so that a peer needs to know no more than the address that it reaches.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use kolo_collectives::lane::{LaneChoice, NetworkLanes};
use kolo_transport::endpoint::BindError;
use kolo_transport::wire::network::is_link_local;
use kolo_transport::{CloseCode, TlsListener, interfaces};
use kolo_transport::{Credentials, Endpoint, EndpointConfig, LiveCredentials, TransportRuntime};

use super::control::ControlError;
use crate::executor::LANE;

/// The IP address under which other nodes reach this one, set by the node.
const NODE_IP: &str = "KOLO_NODE_IP";

/// All addresses to listen on, each with its interface: `10.0.0.1%eth0,10.1.0.1%eth1`.
const LISTEN: &str = "KOLO_LISTEN";

/// The smallest MTU of the interfaces that connect the job's nodes.
const MTU: &str = "KOLO_MTU";

/// Attempts to find a port that is free on all addresses.
const ATTEMPTS: usize = 64;

/// What IPv6 and UDP add to a payload, in bytes.
const HEADERS: u16 = 48;

/// Largest MTU that is made use of: that of networks with jumbo frames.
const JUMBO: u16 = 9000;

/// How many of the attempts also want TCP's port of the same number. After that there is no TLS on the address.
const TLS_ATTEMPTS: usize = 16;

/// One address: a UDP socket for QUIC, and beside it a TCP socket with the same port for TLS.
#[derive(Debug)]
pub(super) struct Door {
    lanes: NetworkLanes,
    tls: Option<TlsListener>,
    interface: Option<String>,
}

impl Door {
    /// What makes links through it.
    pub(super) fn lanes(&self) -> &NetworkLanes {
        &self.lanes
    }

    /// The UDP socket.
    pub(super) fn endpoint(&self) -> &Endpoint {
        self.lanes.endpoint()
    }

    /// What takes links of TLS over TCP, if the port was free there.
    pub(super) fn tls(&self) -> Option<&TlsListener> {
        self.tls.as_ref()
    }

    fn ip(&self) -> IpAddr {
        self.endpoint().local_addr().ip()
    }
}

/// The sockets of a worker. There is at least one.
#[derive(Debug)]
pub(crate) struct Plane {
    first: Door,
    others: Vec<Door>,
}

impl Plane {
    /// Listens where the environment says.
    pub(crate) fn open(
        runtime: &TransportRuntime,
        credentials: Credentials,
    ) -> Result<Self, ControlError> {
        let variable = |name| std::env::var(name).ok();
        let places = places(variable(LISTEN), variable(NODE_IP))?;
        let mtu = variable(MTU).and_then(|mtu| mtu.parse().ok());
        let choice = lane_choice(variable(LANE));
        let credentials = LiveCredentials::from(credentials);
        let bind = |place: &Place, port| {
            let address = SocketAddr::new(place.ip, port);
            let listen = interfaces::scoped(address, place.interface.as_deref())
                .map_err(|error| BindError::Socket { address, error })?;
            Endpoint::bind(runtime, credentials.clone(), config(listen, mtu))
        };
        let (one, more) = places.split_first().ok_or_else(|| ControlError::NodeIp {
            given: String::new(),
        })?;
        let mut attempt = 0;
        loop {
            attempt += 1;
            let first = bind(one, 0)?;
            let port = first.local_addr().port();
            let others: Result<Vec<Endpoint>, BindError> =
                more.iter().map(|place| bind(place, port)).collect();
            let others = match others {
                Ok(others) => others,
                Err(BindError::Socket { error, .. })
                    if error.kind() == ErrorKind::AddrInUse && attempt < ATTEMPTS =>
                {
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            let door = |endpoint: Endpoint, place: &Place| {
                let tls = match endpoint.listen_tls() {
                    Ok(tls) => Some(tls),
                    Err(_) if attempt < TLS_ATTEMPTS => return None,
                    Err(error) => {
                        tracing::warn!(%error, "this worker takes no links of TLS over TCP");
                        None
                    }
                };
                Some(Door {
                    lanes: NetworkLanes::new(endpoint, choice),
                    tls,
                    interface: place.interface.clone(),
                })
            };
            let others: Option<Vec<Door>> = others
                .into_iter()
                .zip(more)
                .map(|(endpoint, place)| door(endpoint, place))
                .collect();
            if let (Some(first), Some(others)) = (door(first, one), others) {
                return Ok(Self { first, others });
            }
        }
    }

    /// All addresses; the first is the main one.
    pub(super) fn doors(&self) -> impl Iterator<Item = &Door> + Clone {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// The socket on the main address.
    pub(super) fn first(&self) -> &Endpoint {
        self.first.endpoint()
    }

    /// From which address to connect to a peer's, and that one as this host needs it.
    pub(super) fn towards(&self, address: SocketAddr) -> std::io::Result<(&Door, SocketAddr)> {
        let mut doors = self.doors();
        if is_link_local(address.ip()) {
            let door = doors
                .find(|door| is_link_local(door.ip()))
                .unwrap_or(&self.first);
            let scoped = interfaces::scoped(address, door.interface.as_deref())?;
            return Ok((door, scoped));
        }
        if self.others.is_empty() {
            return Ok((&self.first, address));
        }
        let source = interfaces::source_towards(address)?;
        let door = doors
            .clone()
            .find(|door| door.ip() == source)
            .or_else(|| doors.find(|door| door.ip().is_ipv4() == source.is_ipv4()))
            .unwrap_or(&self.first);
        Ok((door, address))
    }

    /// Closes all sockets and waits until the peers know.
    pub(crate) async fn close(&self, reason: &str) {
        for door in self.doors() {
            if let Some(tls) = door.tls() {
                tls.close();
            }
            door.endpoint().close(CloseCode::Shutdown, reason);
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
struct Place {
    ip: IpAddr,
    interface: Option<String>,
}

fn places(listen: Option<String>, node_ip: Option<String>) -> Result<Vec<Place>, ControlError> {
    let Some(given) = listen.or(node_ip) else {
        return Ok(vec![Place {
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
            Ok(Place { ip, interface })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_as_they_are_written() {
        let read = |listen: Option<&str>, ip: Option<&str>| {
            places(listen.map(str::to_owned), ip.map(str::to_owned))
                .map(|places| format!("{places:?}"))
                .map_err(|error| error.to_string())
        };
        let place = |ip: &str, interface: Option<&str>| Place {
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
    fn what_is_no_kind_of_lane_leaves_the_choice_to_measurement() {
        for (given, expected) in [
            (None, LaneChoice::Auto),
            (Some("quic"), LaneChoice::Quic),
            (Some("tls"), LaneChoice::Tls),
            (Some("rdma"), LaneChoice::Auto),
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
