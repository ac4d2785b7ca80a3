//! Settings of an endpoint.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use quinn::{MtuDiscoveryConfig, TransportConfig, VarInt};
use tokio::sync::mpsc;

use super::BindError;
use crate::descriptors;
use crate::joiners::JoinHandler;
use crate::places::Places;
use crate::wire::Obituary;

/// Connections that wait for [`Endpoint::accept`](super::Endpoint::accept). When there are as many, handshakes wait.
pub(crate) const BACKLOG: usize = 256;

/// Streams that a peer may have open at once. Each takes about 100 bytes of memory in both processes even if it is never used.
pub(super) const MAX_STREAMS: u32 = 1024;

/// Bytes that this side sends to a peer without an acknowledgement: the bandwidth-delay product of 10 Gbit/s at 0.8 ms. More
/// fills queues and slows everything down, less leaves a long path idle.
const SEND_WINDOW: u64 = 1 << 20;

/// Bytes that a peer may send on one stream before they are read.
pub(crate) const STREAM_RECEIVE_WINDOW: u32 = 2 << 20;

/// Bytes that a peer may send on all streams before they are read, so that a few streams which nobody reads don't hold up the
/// others.
pub(super) const RECEIVE_WINDOW: u32 = 64 << 20;

/// Settings of an [`Endpoint`](super::Endpoint). Start from [`EndpointConfig::default`].
#[derive(Clone)]
pub struct EndpointConfig {
    /// Address of the socket. Default: `127.0.0.1:0`, a port that the operating system chooses. From a loopback
    /// address only peers on the same host can be reached; see [`EndpointConfig::towards`].
    pub listen: SocketAddr,
    /// Whether to accept connections. Default: yes.
    pub accept: bool,
    /// After how long without a packet the peer counts as gone. Default: 3 s. The smaller value of the two
    /// sides holds. Shorter finds losses sooner and takes a stall of a busy machine for one.
    pub idle_timeout: Duration,
    /// How long a connection may be silent before this side sends something. Default: 500 ms. Must be well
    /// under the idle timeout.
    pub keep_alive: Duration,
    /// How long a handshake may take in all, joining included, on both sides. Default: 5 s.
    pub handshake_timeout: Duration,
    /// How long a handshake keeps its place when there are as many as there may be and another peer wants to begin, before the
    /// peer has shown a certificate, sent its join request or, on a [bulk connection](crate::bulk), said anything. Default: 1 s.
    /// A member needs milliseconds; those who stall would keep members out until their timeout.
    pub handshake_patience: Duration,
    /// Handshakes at the same time. Default: 1024. More are refused, and can be tried again, unless somebody
    /// [stalls for too long](Self::handshake_patience). From half of it on, peers must first show that their address is theirs.
    /// For [bulk connections](crate::bulk), whose handshakes take a descriptor each, at most a quarter of the limit of open files,
    /// and for one address half of that.
    pub max_handshakes: usize,
    /// Handshakes at the same time with peers of one address (for IPv6 of one /64 network), so that a flood of them leaves
    /// room for others. Default: 256. As with `max_handshakes`, more are refused, and from half of it on the address is checked.
    pub max_handshakes_per_address: usize,
    /// Largest UDP payload that is tried, in bytes. Default: 1452, which fits Ethernet. On a network with
    /// jumbo frames set it to the MTU less 48 on all members: it halves the cost of bulk data.
    pub mtu_upper_bound: u16,
    /// Congestion control of [bulk connections](crate::bulk), as `net.ipv4.tcp_available_congestion_control` names it. Default:
    /// that of the host (`net.ipv4.tcp_congestion_control`), but for BBR, for which CUBIC is taken: BBR's timers halve what a
    /// connection inside a cluster carries. One that the host does not have or allow makes connections fail.
    pub tcp_congestion: Option<String>,
    /// Whether the dates of the certificates of peers that this side connects to count. Default: yes. Without them one can look
    /// how far clocks are apart, and should do nothing else.
    pub dates_count: bool,
    /// Who lets joiners in. Default: nobody.
    pub join: Option<Arc<dyn JoinHandler>>,
    /// Where [obituaries](crate::obituary) of daemons go that come to this endpoint. Default: nobody.
    pub obituaries: Option<mpsc::Sender<Obituary>>,
}

impl Default for EndpointConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            accept: true,
            idle_timeout: Duration::from_secs(3),
            keep_alive: Duration::from_millis(500),
            handshake_timeout: Duration::from_secs(5),
            handshake_patience: Duration::from_secs(1),
            max_handshakes: 1024,
            max_handshakes_per_address: 256,
            mtu_upper_bound: 1452,
            tcp_congestion: None,
            dates_count: true,
            join: None,
            obituaries: None,
        }
    }
}

impl EndpointConfig {
    /// For a client of `peer` that accepts nothing: a free port on the loopback if the peer is on it, on all
    /// interfaces otherwise.
    #[must_use]
    pub fn towards(peer: SocketAddr) -> Self {
        let address: IpAddr = match (peer.ip().to_canonical(), peer.is_ipv4()) {
            (IpAddr::V4(ip), true) if ip.is_loopback() => Ipv4Addr::LOCALHOST.into(),
            (IpAddr::V6(ip), _) if ip.is_loopback() => Ipv6Addr::LOCALHOST.into(),
            (_, true) => Ipv4Addr::UNSPECIFIED.into(),
            (_, false) => Ipv6Addr::UNSPECIFIED.into(),
        };
        Self {
            listen: (address, 0).into(),
            accept: false,
            ..Self::default()
        }
    }

    pub(super) fn check(&self) -> Result<(), BindError> {
        let refuse = |field, reason: &str| {
            Err(BindError::Config {
                field,
                reason: reason.to_owned(),
            })
        };
        if self.idle_timeout.is_zero() || self.idle_timeout > Duration::from_secs(24 * 3600) {
            return refuse("idle_timeout", "it must be over 0 and at most a day");
        }
        if self.keep_alive.is_zero() || self.keep_alive > self.idle_timeout / 2 {
            return refuse(
                "keep_alive",
                "it must be over 0 and at most half the idle timeout",
            );
        }
        if self.handshake_timeout.is_zero() {
            return refuse("handshake_timeout", "it must be over 0");
        }
        if self.max_handshakes == 0 || self.max_handshakes > 1 << 20 {
            return refuse("max_handshakes", "it must be from 1 to 1048576");
        }
        if self.max_handshakes_per_address == 0 {
            return refuse("max_handshakes_per_address", "it must be at least 1");
        }
        if !(1200..=65_000).contains(&self.mtu_upper_bound) {
            return refuse("mtu_upper_bound", "it must be from 1200 to 65000");
        }
        Ok(())
    }

    pub(crate) fn places(&self) -> Arc<Places> {
        Places::new(
            self.max_handshakes,
            self.max_handshakes_per_address,
            self.handshake_patience,
        )
    }

    /// As [`places`](Self::places), for handshakes that take one of so many descriptors each.
    pub(crate) fn places_of(&self, descriptors: u64) -> Arc<Places> {
        let (most, of_address) = self.handshakes_of(descriptors);
        Places::new(most, of_address, self.handshake_patience)
    }

    fn handshakes_of(&self, descriptors: u64) -> (usize, usize) {
        let most = descriptors::for_peers(descriptors, self.max_handshakes);
        let of_address = self.max_handshakes_per_address.min(most.div_ceil(2));
        (most, of_address)
    }

    /// Settings of a connection whose peer may open `streams` streams and fill `window`.
    pub(crate) fn transport(&self, streams: u32, window: u32) -> TransportConfig {
        let mut mtu = MtuDiscoveryConfig::default();
        mtu.upper_bound(self.mtu_upper_bound);
        let mut transport = TransportConfig::default();
        transport
            .max_concurrent_bidi_streams(streams.into())
            // The listener's welcome.
            .max_concurrent_uni_streams(VarInt::from_u32(1))
            .max_idle_timeout(self.idle_timeout.try_into().ok())
            .keep_alive_interval(Some(self.keep_alive))
            .send_window(SEND_WINDOW)
            .stream_receive_window(STREAM_RECEIVE_WINDOW.into())
            .receive_window(window.into())
            .mtu_discovery_config(Some(mtu))
            .datagram_receive_buffer_size(None)
            // The guess before the first sample. The default of 333 ms is for the internet, and makes the first
            // lost packet cost a second.
            .initial_rtt(Duration::from_millis(100));
        transport
    }
}

impl fmt::Debug for EndpointConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndpointConfig")
            .field("listen", &self.listen)
            .field("accept", &self.accept)
            .field("idle_timeout", &self.idle_timeout)
            .field("keep_alive", &self.keep_alive)
            .field("handshake_timeout", &self.handshake_timeout)
            .field("handshake_patience", &self.handshake_patience)
            .field("mtu_upper_bound", &self.mtu_upper_bound)
            .field("joins", &self.join.is_some())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_settings_are_named() {
        let good = EndpointConfig::default();
        assert!(good.check().is_ok());
        let spoilt = |field: &str, spoil: fn(&mut EndpointConfig)| {
            let mut config = good.clone();
            spoil(&mut config);
            let error = config.check().unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        };
        spoilt("idle_timeout", |c| c.idle_timeout = Duration::ZERO);
        spoilt("keep_alive", |c| c.keep_alive = c.idle_timeout);
        spoilt("handshake_timeout", |c| {
            c.handshake_timeout = Duration::ZERO;
        });
        spoilt("max_handshakes", |c| c.max_handshakes = 0);
        spoilt("max_handshakes_per_address", |c| {
            c.max_handshakes_per_address = 0;
        });
        spoilt("mtu_upper_bound", |c| c.mtu_upper_bound = 1000);
    }

    #[test]
    fn handshakes_that_take_descriptors_leave_most_of_them() {
        let small = EndpointConfig {
            max_handshakes: 5,
            max_handshakes_per_address: 2,
            ..EndpointConfig::default()
        };
        let default = EndpointConfig::default();
        for (config, descriptors, expected) in [
            (&default, 0, (8, 4)),
            (&default, 256, (64, 32)),
            (&default, 1024, (256, 128)),
            (&default, 2048, (512, 256)),
            (&default, 1 << 20, (1024, 256)),
            (&default, u64::MAX, (1024, 256)),
            (&small, 0, (5, 2)),
            (&small, 1024, (5, 2)),
        ] {
            assert_eq!(config.handshakes_of(descriptors), expected, "{descriptors}");
        }
    }

    #[test]
    fn a_client_binds_where_it_can_reach_its_peer() {
        let listen = |peer: &str| {
            let config = EndpointConfig::towards(peer.parse().unwrap());
            assert!(!config.accept);
            config.listen.ip().to_string()
        };
        assert_eq!(listen("127.0.0.1:1"), "127.0.0.1");
        assert_eq!(listen("10.0.0.1:1"), "0.0.0.0");
        assert_eq!(listen("[::1]:1"), "::1");
        assert_eq!(listen("[2001:db8::1]:1"), "::");
    }
}
