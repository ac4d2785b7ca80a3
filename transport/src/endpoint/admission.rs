//! Letting peers in: handshakes at the same time, each with a deadline, and what an unknown peer may do.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use quinn::crypto::rustls::HandshakeData;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use super::peers::Peers;
use super::{ALPN, ALPN_JOIN, EndpointConfig, peer_identity};
use crate::frame::FrameWriter;
use crate::identity::Identity;
use crate::join;
use crate::live::LiveCredentials;
use crate::runtime::TransportRuntime;
use crate::session::{CloseCode, Connection, canonical};
use crate::wire::Welcome;

/// Bytes that a peer may send before it is authenticated: one join request.
pub(super) const UNAUTHENTICATED_WINDOW: u32 = 128 << 10;

/// At most one line about refused peers in this time.
const LOG_INTERVAL: Duration = Duration::from_secs(5);

/// Accepts the connections of one endpoint.
pub(super) struct Admission {
    own: Identity,
    config: EndpointConfig,
    runtime: TransportRuntime,
    accepted: mpsc::Sender<Connection>,
    /// The endpoint's address.
    bound: IpAddr,
    peers: Arc<Peers>,
    handshakes: Arc<Semaphore>,
    by_address: Arc<ByAddress>,
    refused: Refused,
}

impl Admission {
    pub(super) fn new(
        credentials: &LiveCredentials,
        config: &EndpointConfig,
        runtime: &TransportRuntime,
        accepted: mpsc::Sender<Connection>,
        bound: IpAddr,
        peers: &Arc<Peers>,
    ) -> Arc<Self> {
        Arc::new(Self {
            own: credentials.identity().clone(),
            handshakes: Arc::new(Semaphore::new(config.max_handshakes)),
            by_address: Arc::default(),
            config: config.clone(),
            runtime: runtime.clone(),
            accepted,
            bound,
            peers: Arc::clone(peers),
            refused: Refused::default(),
        })
    }

    /// Runs until the endpoint is closed.
    pub(super) async fn run(self: Arc<Self>, quinn: quinn::Endpoint) {
        while let Some(incoming) = quinn.accept().await {
            let peer = canonical(incoming.remote_address());
            let Ok(permit) = Arc::clone(&self.handshakes).try_acquire_owned() else {
                self.refused.log(peer, "too many handshakes at once");
                incoming.refuse();
                continue;
            };
            let limit = self.config.max_handshakes_per_address;
            let place = ByAddress::enter(&self.by_address, peer.ip());
            // A sender that forges its address never gets past this, and takes no handshake from others, nor from
            // those whose address it shows.
            let crowded = self.handshakes.available_permits() < self.config.max_handshakes / 2
                || place.others >= limit.div_ceil(2);
            if crowded && !incoming.remote_address_validated() {
                if let Err(error) = incoming.retry() {
                    error.into_incoming().ignore();
                }
                continue;
            }
            if place.others >= limit {
                self.refused
                    .log(peer, "too many handshakes at once with its address");
                incoming.refuse();
                continue;
            }
            tokio::spawn(Arc::clone(&self).admit(incoming, peer, (permit, place)));
        }
    }

    async fn admit(
        self: Arc<Self>,
        incoming: quinn::Incoming,
        peer: SocketAddr,
        _place: (OwnedSemaphorePermit, Place),
    ) {
        let limit = self.config.handshake_timeout;
        match tokio::time::timeout(limit, self.handshake(incoming, peer)).await {
            Ok(Ok(())) => {}
            Ok(Err(reason)) => self.refused.log(peer, &reason),
            Err(_) => self.refused.log(peer, "the handshake did not end in time"),
        }
    }

    async fn handshake(&self, incoming: quinn::Incoming, peer: SocketAddr) -> Result<(), String> {
        let text = |error: quinn::ConnectionError| error.to_string();
        let connection = match incoming.accept().map_err(text)?.await {
            Ok(connection) => connection,
            Err(error) if is_given_up(&error) => {
                tracing::debug!(%peer, %error, "a peer has given its handshake up");
                return Ok(());
            }
            Err(error) => return Err(text(error)),
        };
        // Dropped when the deadline passes, which must close the connection and say why.
        let mut guard = CloseOnDrop {
            connection: Some(&connection),
        };
        let protocol = connection
            .handshake_data()
            .and_then(|data| data.downcast::<HandshakeData>().ok())
            .and_then(|data| data.protocol);
        let result = match (protocol.as_deref(), &self.config.join) {
            (Some(ALPN_JOIN), Some(handler)) => join::serve(&connection, peer, handler).await,
            (Some(ALPN), _) => self.welcome(&connection).await,
            // TLS has agreed on one of the two.
            _ => Err((CloseCode::Protocol, "unknown protocol".to_owned())),
        };
        guard.connection = None;
        result.map_err(|(code, reason)| {
            connection.close(code.varint(), reason.as_bytes());
            reason
        })
    }

    /// Lets an authenticated member in.
    async fn welcome(&self, connection: &quinn::Connection) -> Result<(), (CloseCode, String)> {
        let peer = peer_identity(connection, &self.own)
            .map_err(|reason| (CloseCode::Unauthenticated, reason))?;
        let place = self.accepted.reserve().await.map_err(|_| {
            (
                CloseCode::Shutdown,
                "the endpoint does not accept any more".to_owned(),
            )
        })?;
        let member = Connection::new(connection.clone(), peer, self.bound, self.runtime.clone());
        // Known from here on, so that a revocation that comes now closes it.
        if !self.peers.add(&member) {
            return Err((CloseCode::Revoked, format!("{} was revoked", member.peer())));
        }
        connection.set_receive_window(self.config.receive_window.into());
        connection.set_max_concurrent_bi_streams(self.config.max_streams.into());
        let gone = |reason: String| (CloseCode::Protocol, reason);
        let stream = connection
            .open_uni()
            .await
            .map_err(|error| gone(error.to_string()))?;
        let mut writer = FrameWriter::new(stream);
        let welcome = Welcome {
            version: env!("CARGO_PKG_VERSION").to_owned(),
        };
        writer
            .send(&welcome, &[])
            .await
            .map_err(|error| gone(error.to_string()))?;
        place.send(member);
        Ok(())
    }
}

/// How many handshakes go on with the peers of an address.
#[derive(Debug, Default)]
pub(crate) struct ByAddress(Mutex<HashMap<IpAddr, usize>>);

impl ByAddress {
    /// Takes a place for one more handshake.
    pub(crate) fn enter(all: &Arc<Self>, peer: IpAddr) -> Place {
        let source = source(peer);
        let mut counts = all.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(source).or_default();
        *count += 1;
        Place {
            others: *count - 1,
            source,
            all: Arc::clone(all),
        }
    }
}

/// One handshake of its address, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    /// Those that there were already.
    others: usize,
    source: IpAddr,
    all: Arc<ByAddress>,
}

impl Place {
    /// How many there were already.
    pub(crate) fn others(&self) -> usize {
        self.others
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self.all.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.source) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.source);
            }
        }
    }
}

/// What counts as one address: a host has all of an IPv6 network to choose from.
fn source(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX)).into(),
        ip @ IpAddr::V4(_) => ip,
    }
}

/// Closes a connection that was not let in by the deadline.
struct CloseOnDrop<'a> {
    connection: Option<&'a quinn::Connection>,
}

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(connection) = self.connection {
            connection.close(
                CloseCode::Deadline.varint(),
                b"the handshake did not end in time",
            );
        }
    }
}

/// Counts refused peers and logs some, so that a flood of them does not fill the log.
#[derive(Default)]
pub(crate) struct Refused(Mutex<RefusedState>);

#[derive(Default)]
struct RefusedState {
    last: Option<Instant>,
    not_logged: u64,
}

impl RefusedState {
    /// Whether to log at `now`, and how many were not since the last time.
    fn step(&mut self, now: Instant) -> Option<u64> {
        if self
            .last
            .is_some_and(|last| now.saturating_duration_since(last) < LOG_INTERVAL)
        {
            self.not_logged += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.not_logged))
    }
}

impl Refused {
    pub(crate) fn log(&self, peer: SocketAddr, reason: &str) {
        let log = self
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .step(Instant::now());
        if let Some(not_logged) = log {
            tracing::warn!(%peer, reason, not_logged, "refused a peer");
        }
    }
}

/// Whether it is the peer's program that has ended a connection, and not its TLS that has refused this side.
fn is_given_up(error: &quinn::ConnectionError) -> bool {
    match error {
        quinn::ConnectionError::ApplicationClosed(_) => true,
        quinn::ConnectionError::ConnectionClosed(close) => {
            close.error_code == quinn::TransportErrorCode::APPLICATION_ERROR
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handshakes_are_counted_by_address_as_long_as_they_last() {
        let all = Arc::default();
        let enter = |ip: &str| ByAddress::enter(&all, ip.parse().unwrap());
        let places = [enter("10.0.0.1"), enter("::ffff:10.0.0.1")];
        assert_eq!(places.each_ref().map(|place| place.others), [0, 1]);
        assert_eq!(enter("10.0.0.2").others, 0);
        let network = [enter("2001:db8::1"), enter("2001:db8::ffff:0:0:1")];
        assert_eq!(network.each_ref().map(|place| place.others), [0, 1]);
        assert_eq!(enter("2001:db8:0:1::1").others, 0);
        drop(places);
        assert_eq!(enter("10.0.0.1").others, 0);
        drop(network);
        assert!(all.0.lock().unwrap().is_empty());
    }

    #[test]
    fn a_flood_of_refused_peers_is_one_line() {
        let start = Instant::now();
        let mut state = RefusedState::default();
        assert_eq!(state.step(start), Some(0));
        for _ in 0..1000 {
            assert_eq!(state.step(start + Duration::from_secs(4)), None);
        }
        assert_eq!(state.step(start + Duration::from_secs(5)), Some(1000));
        assert_eq!(state.step(start + Duration::from_secs(10)), Some(0));
    }
}
