//! Letting peers in: handshakes at the same time, each with a deadline, and what an unknown peer may do.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use quinn::crypto::rustls::HandshakeData;
use tokio::sync::mpsc;

use super::peers::Peers;
use super::places::{Place, Places};
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
    places: Arc<Places>,
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
            places: Places::new(config),
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
            // A sender that forges its address never gets past this, and takes no handshake from others, nor from
            // those whose address it shows.
            if !incoming.remote_address_validated() && self.places.is_crowded(peer.ip()) {
                if let Err(error) = incoming.retry() {
                    error.into_incoming().ignore();
                }
                continue;
            }
            match self.places.enter(peer.ip(), Instant::now()) {
                Ok(place) => drop(tokio::spawn(Arc::clone(&self).admit(incoming, peer, place))),
                Err(reason) => {
                    self.refused.log(peer, reason);
                    incoming.refuse();
                }
            }
        }
    }

    async fn admit(self: Arc<Self>, incoming: quinn::Incoming, peer: SocketAddr, place: Place) {
        // Its first packet has come.
        place.heard();
        let limit = self.config.handshake_timeout;
        let handshake = async |_kept| self.handshake(incoming, peer).await;
        if let Err(reason) = place.hold(self.runtime.clock(), limit, handshake).await {
            self.refused.log(peer, &reason);
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
