//! Letting peers in: handshakes at the same time, each with a deadline, and what an unknown peer may do.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use quinn::crypto::rustls::HandshakeData;
use tokio::sync::mpsc;

use super::config::{EndpointConfig, MAX_STREAMS, RECEIVE_WINDOW};
use super::peers::Peers;
use super::{ALPN, ALPN_JOIN, peer_identity};
use crate::awake::AwakeClock;
use crate::end::CloseCode;
use crate::flood::Flood;
use crate::frame::FrameWriter;
use crate::identity::Identity;
use crate::joiners;
use crate::live::LiveCredentials;
use crate::places::{Kept, Place, Places};
use crate::runtime::TransportRuntime;
use crate::session::{Connection, canonical};
use crate::wire::Welcome;

/// Bytes that a peer may send before it is authenticated: one join request.
pub(super) const UNAUTHENTICATED_WINDOW: u32 = 128 << 10;

/// Lines about refused peers in ten seconds.
const REFUSED_LINES: u32 = 2;

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
    refused: Flood,
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
            places: config.places(),
            config: config.clone(),
            runtime: runtime.clone(),
            accepted,
            bound,
            peers: Arc::clone(peers),
            refused: refused(),
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
                    log(&self.refused, peer, reason);
                    incoming.refuse();
                }
            }
        }
    }

    async fn admit(self: Arc<Self>, incoming: quinn::Incoming, peer: SocketAddr, place: Place) {
        let limit = self.config.handshake_timeout;
        let clock = self.runtime.clock();
        let handshake = |kept| in_time(clock, limit, self.handshake(incoming, peer, kept));
        if let Err(reason) = place.hold(handshake).await {
            log(&self.refused, peer, &reason);
        }
    }

    /// Until the peer has shown a certificate or its join request is here it counts as idle: what only begins handshakes makes
    /// room for who ends them.
    async fn handshake(
        &self,
        incoming: quinn::Incoming,
        peer: SocketAddr,
        place: Kept,
    ) -> Result<(), String> {
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
            (Some(ALPN_JOIN), Some(handler)) => {
                joiners::serve(&connection, peer, handler, &place).await
            }
            (Some(ALPN), _) => self.welcome(&connection, &place).await,
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
    async fn welcome(
        &self,
        connection: &quinn::Connection,
        kept: &Kept,
    ) -> Result<(), (CloseCode, String)> {
        let peer = peer_identity(connection, &self.own)
            .map_err(|reason| (CloseCode::Unauthenticated, reason))?;
        kept.heard();
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
        connection.set_receive_window(RECEIVE_WINDOW.into());
        connection.set_max_concurrent_bi_streams(MAX_STREAMS.into());
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

/// For lines about peers that are not let in.
pub(crate) fn refused() -> Flood {
    Flood::new("peers were refused", REFUSED_LINES)
}

/// A handshake that has so long, by this clock.
pub(crate) async fn in_time(
    clock: &AwakeClock,
    limit: Duration,
    handshake: impl Future<Output = Result<(), String>>,
) -> Result<(), String> {
    let ended = clock.timeout(limit, handshake).await;
    ended.unwrap_or_else(|| Err("the handshake did not end in time".to_owned()))
}

pub(crate) fn log(refused: &Flood, peer: SocketAddr, reason: &str) {
    refused.line(|| tracing::warn!(%peer, reason, "refused a peer"));
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
