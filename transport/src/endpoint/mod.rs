//! One UDP socket, over which a process accepts and opens connections.
//!
//! The protocol's version is in the ALPN: [`ALPN`] for members, [`ALPN_JOIN`] for those that want to become one.
//! Peers of another version are refused in the handshake.
//!
//! A listener reads nothing from a peer that is not authenticated (S-1), a [`JoinRequest`] aside: until then a peer
//! gets a window of some kilobytes and one stream. After the handshake the listener sends a
//! [`Welcome`] on a stream of its own, without which [`Endpoint::connect`] does not return: a refusal
//! is an error of `connect` and not a surprise later.
//!
//! [`JoinRequest`]: crate::wire::JoinRequest

pub(crate) mod admission;
mod config;
mod error;
mod peers;
mod socket;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use tokio::sync::{Mutex, mpsc};
use tokio::task::AbortHandle;

pub use self::config::EndpointConfig;
pub(crate) use self::config::{BACKLOG, STREAM_RECEIVE_WINDOW};
use self::config::{MAX_STREAMS, RECEIVE_WINDOW};
pub use self::error::{BindError, ConnectError, Dated, Whose};
use self::peers::Peers;
use crate::credentials::Credentials;
use crate::end::CloseCode;
use crate::frame::{FrameReader, Limits};
use crate::identity::{Identity, Role, identity_of};
use crate::ids::{JobId, NodeId, Slot};
use crate::live::LiveCredentials;
use crate::runtime::{QuinnRuntime, TransportRuntime};
use crate::session::Connection;
use crate::tls::{self, ClientAuth, TlsError};
use crate::wire::{RevocationList, Welcome};

/// The protocol of members, with its version.
pub const ALPN: &[u8] = b"kolo/1";

/// The protocol of joining, with its version.
pub const ALPN_JOIN: &[u8] = b"kolo-join/1";

/// Bytes of one peer that are kept until its first packet was looked at.
const UNSEEN_PER_PEER: u64 = 64 << 10;

/// Bytes of all such peers.
const UNSEEN: u64 = 4 << 20;

/// Who must be at the other end of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expect {
    /// Its role.
    pub role: Role,
    /// Its name; any if `None`.
    pub name: Option<String>,
}

impl Expect {
    /// The head.
    #[must_use]
    pub fn head() -> Self {
        Self {
            role: Role::Head,
            name: None,
        }
    }

    /// This node.
    #[must_use]
    pub fn node(node: NodeId) -> Self {
        Self {
            role: Role::Node,
            name: Some(node.to_string()),
        }
    }

    /// The worker in this slot of a job.
    #[must_use]
    pub fn worker(job: JobId, slot: Slot) -> Self {
        Self {
            role: Role::Worker,
            name: Some(Identity::worker_name(job, slot)),
        }
    }

    pub(crate) fn matches(&self, peer: &Identity) -> bool {
        self.role == peer.role && self.name.as_ref().is_none_or(|name| *name == peer.name)
    }
}

impl fmt::Display for Expect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(f, "{} {name}", self.role),
            None => write!(f, "a {}", self.role),
        }
    }
}

/// One UDP socket with its connections. Clones share it.
///
/// Connections live on when the last clone is dropped; new ones are not accepted any more then. For an orderly end call
/// [`Endpoint::close`] and wait for [`Endpoint::drained`]. Its futures may be awaited on any executor.
#[derive(Clone)]
pub struct Endpoint {
    inner: Arc<Inner>,
}

struct Inner {
    quinn: quinn::Endpoint,
    client: quinn::ClientConfig,
    address: SocketAddr,
    credentials: LiveCredentials,
    peers: Arc<Peers>,
    config: EndpointConfig,
    runtime: TransportRuntime,
    accepted: Mutex<mpsc::Receiver<Connection>>,
    admission: Option<AbortHandle>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(admission) = &self.admission {
            admission.abort();
            self.quinn.set_server_config(None);
        }
    }
}

impl Endpoint {
    /// Binds a socket, and accepts connections on it if `config` says so. Of [`LiveCredentials`] it presents the newest in
    /// every handshake.
    ///
    /// # Errors
    ///
    /// [`BindError`].
    pub fn bind(
        runtime: &TransportRuntime,
        credentials: impl Into<LiveCredentials>,
        config: EndpointConfig,
    ) -> Result<Self, BindError> {
        config.check()?;
        let credentials = credentials.into();
        let peers = Arc::new(Peers::default());
        let socket = socket::bind(config.listen)?;
        let server = config
            .accept
            .then(|| server_config(&credentials, &config))
            .transpose()?;
        let tls = if config.dates_count {
            tls::client_config(&credentials, &[ALPN])
        } else {
            tls::undated_client_config(&credentials, &[ALPN])
        }
        .map_err(BindError::Tls)?;
        let mut client = quinn::ClientConfig::new(Arc::new(
            QuicClientConfig::try_from(tls)
                .map_err(TlsError::new)
                .map_err(BindError::Tls)?,
        ));
        client.transport_config(Arc::new(config.transport(MAX_STREAMS, RECEIVE_WINDOW)));

        let failed = |error| BindError::Socket {
            address: config.listen,
            error,
        };
        let quinn = quinn_endpoint(runtime, &config, server, socket).map_err(failed)?;
        let address = quinn.local_addr().map_err(failed)?;
        let (sender, accepted) = mpsc::channel(BACKLOG);
        let admission = config.accept.then(|| {
            let admission = admission::Admission::new(
                &credentials,
                &config,
                runtime,
                sender,
                address.ip(),
                &peers,
            );
            runtime
                .handle()
                .spawn(admission.run(quinn.clone()))
                .abort_handle()
        });
        Ok(Self {
            inner: Arc::new(Inner {
                quinn,
                client,
                address,
                credentials,
                peers,
                config,
                runtime: runtime.clone(),
                accepted: Mutex::new(accepted),
                admission,
            }),
        })
    }

    /// The socket's address. Its IP is unspecified if the endpoint listens on all interfaces.
    pub fn local_addr(&self) -> SocketAddr {
        self.inner.address
    }

    /// Who this process is.
    pub fn identity(&self) -> &Identity {
        self.inner.credentials.identity()
    }

    /// What it presents to peers in the next handshake.
    pub fn credentials(&self) -> Credentials {
        self.inner.credentials.current()
    }

    /// What it presents to peers, to be replaced by newer ones.
    pub fn live_credentials(&self) -> &LiveCredentials {
        &self.inner.credentials
    }

    /// Puts revoked members out: closes their connections with [`CloseCode::Revoked`] at once, and refuses them from now
    /// on, whichever side connects. Members that are not on the list any more may connect again.
    ///
    /// False if a newer list of the same head is known, which stays.
    pub fn revoke(&self, list: &RevocationList) -> bool {
        self.inner.peers.revoke(list)
    }

    /// Whether a member is on the list of [`Endpoint::revoke`].
    pub fn is_revoked(&self, member: &Identity) -> bool {
        self.inner.peers.is_revoked(member)
    }

    pub(crate) fn config(&self) -> &EndpointConfig {
        &self.inner.config
    }

    /// The runtime that it runs on.
    pub fn runtime(&self) -> &TransportRuntime {
        &self.inner.runtime
    }

    /// Waits for the next connection of an authenticated peer of this cluster. Its role is not checked: do
    /// that for every request (S-2). `None` when the endpoint is closed or does not accept.
    ///
    /// Handshakes run at the same time and have a deadline; a slow or bad one blocks nobody. Cancel safe.
    pub async fn accept(&self) -> Option<Connection> {
        self.inner.accepted.lock().await.recv().await
    }

    /// Connects to a peer and checks who it is. Takes at most [`EndpointConfig::handshake_timeout`]. Cancel safe:
    /// nothing is left of an attempt whose future is dropped.
    ///
    /// # Errors
    ///
    /// [`ConnectError`].
    pub async fn connect(
        &self,
        address: SocketAddr,
        expect: Expect,
    ) -> Result<Connection, ConnectError> {
        let limit = self.inner.config.handshake_timeout;
        self.inner
            .runtime
            .timeout(limit, self.handshake(address, &expect))
            .await
            .unwrap_or(Err(ConnectError::TimedOut { address }))
    }

    async fn handshake(
        &self,
        address: SocketAddr,
        expect: &Expect,
    ) -> Result<Connection, ConnectError> {
        let connection = self
            .inner
            .quinn
            .connect_with(self.inner.client.clone(), address, tls::SERVER_NAME)
            .map_err(|error| ConnectError::start(address, &error))?
            .await
            .map_err(|error| ConnectError::before_proof(address, error))?;
        let peer = peer_identity(&connection, self.identity());
        match peer {
            Ok(peer) if expect.matches(&peer) => {
                welcome(&connection, address).await?;
                let connection = Connection::new(
                    connection,
                    peer,
                    self.inner.address.ip(),
                    self.inner.runtime.clone(),
                );
                if self.inner.peers.add(&connection) {
                    Ok(connection)
                } else {
                    let reason = format!("{} was revoked", connection.peer());
                    connection.close(CloseCode::Revoked, &reason);
                    Err(ConnectError::Certificate { address, reason })
                }
            }
            Ok(peer) => {
                connection.close(
                    CloseCode::Done.varint(),
                    b"not the peer that was looked for",
                );
                Err(ConnectError::WrongPeer {
                    address,
                    expected: expect.to_string(),
                    found: Box::new(peer),
                })
            }
            Err(reason) => {
                connection.close(CloseCode::Unauthenticated.varint(), reason.as_bytes());
                Err(ConnectError::Certificate { address, reason })
            }
        }
    }

    /// Closes all connections, which tells their peers `code` and `reason`, and accepts no more.
    pub fn close(&self, code: CloseCode, reason: &str) {
        self.inner.quinn.close(code.varint(), reason.as_bytes());
    }

    /// Waits until the peers of closed connections had a fair chance to learn of it: some round trips, and less
    /// than a second on a working network. Waits for ever while a connection is open.
    pub async fn drained(&self) {
        self.inner.quinn.wait_idle().await;
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("identity", &self.identity().to_string())
            .field("address", &self.inner.address)
            .finish_non_exhaustive()
    }
}

fn server_config(
    credentials: &LiveCredentials,
    config: &EndpointConfig,
) -> Result<quinn::ServerConfig, BindError> {
    let tls = if config.join.is_some() {
        tls::server_config(credentials, ClientAuth::Optional, &[ALPN, ALPN_JOIN])
    } else {
        tls::server_config(credentials, ClientAuth::Required, &[ALPN])
    }
    .map_err(BindError::Tls)?;
    let tls = QuicServerConfig::try_from(tls)
        .map_err(TlsError::new)
        .map_err(BindError::Tls)?;
    let mut server = quinn::ServerConfig::with_crypto(Arc::new(tls));
    // Peers get more when they are known: see `Admission`.
    let mut transport = config.transport(1, admission::UNAUTHENTICATED_WINDOW);
    transport.max_concurrent_uni_streams(quinn::VarInt::from_u32(0));
    server.transport_config(Arc::new(transport));
    // What comes before anybody has looked at it. The library's own bounds are 65,536 peers and 100 MiB, which it never gives
    // back.
    server
        .max_incoming(config.max_handshakes)
        .incoming_buffer_size(UNSEEN_PER_PEER)
        .incoming_buffer_size_total(UNSEEN);
    Ok(server)
}

pub(crate) fn quinn_endpoint(
    runtime: &TransportRuntime,
    config: &EndpointConfig,
    server: Option<quinn::ServerConfig>,
    socket: std::net::UdpSocket,
) -> std::io::Result<quinn::Endpoint> {
    let mut endpoint = quinn::EndpointConfig::default();
    // Peers discover the MTU up to what this side says that it takes.
    endpoint
        .max_udp_payload_size(config.mtu_upper_bound.max(1472))
        .map_err(std::io::Error::other)?;
    // A segmented send must stay under 64 KiB.
    let segments = 65_000 / usize::from(config.mtu_upper_bound);
    quinn::Endpoint::new(
        endpoint,
        server,
        socket,
        Arc::new(QuinnRuntime::new(
            runtime,
            segments,
            config.obituaries.clone(),
        )),
    )
}

pub(crate) use socket::bind as bind_socket;

/// Reads the identity from the peer's certificate, which the handshake has verified.
pub(crate) fn peer_identity(
    connection: &quinn::Connection,
    own: &Identity,
) -> Result<Identity, String> {
    let peer = presented_identity(connection)?;
    if peer.cluster == own.cluster {
        Ok(peer)
    } else {
        Err(format!(
            "the certificate is one of {}, not of {}",
            peer.cluster, own.cluster
        ))
    }
}

pub(crate) fn presented_identity(connection: &quinn::Connection) -> Result<Identity, String> {
    let certificates = connection
        .peer_identity()
        .and_then(|chain| {
            chain
                .downcast::<Vec<rustls_pki_types::CertificateDer<'static>>>()
                .ok()
        })
        .unwrap_or_default();
    let certificate = certificates
        .first()
        .ok_or("it presented no certificate of the cluster")?;
    identity_of(certificate).map_err(|error| error.to_string())
}

/// Waits until the listener has let this side in.
async fn welcome(connection: &quinn::Connection, address: SocketAddr) -> Result<(), ConnectError> {
    let stream = connection
        .accept_uni()
        .await
        .map_err(|error| ConnectError::handshake(address, error))?;
    let welcome = FrameReader::new(stream, Limits::JOIN)
        .expect::<Welcome>()
        .await
        .map_err(|error| ConnectError::welcome(address, connection, &error))?;
    tracing::debug!(%address, version = %welcome.head.version, "connected");
    Ok(())
}
