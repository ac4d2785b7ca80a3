//! Letting peers in, as [`Admission`](crate::endpoint) does it for QUIC.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::ServerConfig;
use rustls::server::UnbufferedServerConnection;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, mpsc};
use tokio::task::AbortHandle;

use super::handshake::shake;
use super::link::TlsLink;
use super::records::Records;
use super::{ALPN_BULK, peer_of, prepare};
use crate::descriptors;
use crate::endpoint::admission::{in_time, log, refused};
use crate::endpoint::{BACKLOG, BindError, Endpoint, EndpointConfig};
use crate::flood::Flood;
use crate::identity::Identity;
use crate::places::{Kept, Place, Places};
use crate::runtime::TransportRuntime;
use crate::session::canonical;
use crate::tls::{self, ClientAuth};

/// How long nothing is accepted when the process has no more descriptors.
const NO_DESCRIPTORS: Duration = Duration::from_millis(100);

/// Listens for bulk connections. Clones share it; when the last one is dropped or [`TlsListener::close`] is called, nobody is let
/// in any more.
#[derive(Clone)]
pub struct TlsListener {
    inner: Arc<Inner>,
}

struct Inner {
    address: SocketAddr,
    accepted: Mutex<mpsc::Receiver<TlsLink>>,
    admission: AbortHandle,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.admission.abort();
    }
}

impl TlsListener {
    pub(crate) fn bind(endpoint: &Endpoint, config: &EndpointConfig) -> Result<Self, BindError> {
        let address = endpoint.local_addr();
        let runtime = endpoint.runtime();
        let credentials = endpoint.live_credentials().clone();
        let mut server = tls::server_config(credentials, ClientAuth::Required, &[ALPN_BULK])
            .map_err(BindError::Tls)?;
        server.enable_secret_extraction = true;
        let failed = |error| BindError::Listen { address, error };
        let listener = {
            let _entered = runtime.handle().enter();
            let listener = std::net::TcpListener::bind(address).map_err(failed)?;
            listener.set_nonblocking(true).map_err(failed)?;
            TcpListener::from_std(listener).map_err(failed)?
        };
        let (sender, accepted) = mpsc::channel(BACKLOG);
        let admission = Arc::new(Admission {
            own: endpoint.identity().clone(),
            server: Arc::new(server),
            config: config.clone(),
            runtime: runtime.clone(),
            accepted: sender,
            places: config.places_of(descriptors::limit()),
            refused: refused(),
        });
        let admission = runtime.handle().spawn(admission.run(listener));
        Ok(Self {
            inner: Arc::new(Inner {
                address,
                accepted: Mutex::new(accepted),
                admission: admission.abort_handle(),
            }),
        })
    }

    /// Its address: that of its endpoint.
    pub fn local_addr(&self) -> SocketAddr {
        self.inner.address
    }

    /// Waits for the next connection of an authenticated peer of this cluster. Its role is not checked (S-2). `None` when the
    /// listener is closed.
    ///
    /// Handshakes run at the same time and have a deadline; a slow or bad one blocks nobody. Cancel safe.
    pub async fn accept(&self) -> Option<TlsLink> {
        self.inner.accepted.lock().await.recv().await
    }

    /// Lets nobody in any more. Connections live on.
    pub fn close(&self) {
        self.inner.admission.abort();
    }
}

impl fmt::Debug for TlsListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsListener")
            .field("address", &self.inner.address)
            .finish_non_exhaustive()
    }
}

struct Admission {
    own: Identity,
    server: Arc<ServerConfig>,
    config: EndpointConfig,
    runtime: TransportRuntime,
    accepted: mpsc::Sender<TlsLink>,
    places: Arc<Places>,
    refused: Flood,
}

impl Admission {
    async fn run(self: Arc<Self>, listener: TcpListener) {
        // Handshakes end with the listener.
        let mut handshakes = tokio::task::JoinSet::new();
        let mut is_news = true;
        loop {
            while handshakes.try_join_next().is_some() {}
            let (tcp, peer) = match listener.accept().await {
                Ok(accepted) => {
                    is_news = true;
                    accepted
                }
                Err(error) => {
                    if error.kind() == std::io::ErrorKind::ConnectionAborted {
                        tracing::debug!(%error, "a connection was gone before it was accepted");
                        continue;
                    }
                    // Of the process, which has no descriptor left, say.
                    if std::mem::take(&mut is_news) {
                        tracing::warn!(%error, "connections are not accepted for now");
                    }
                    tokio::time::sleep(NO_DESCRIPTORS).await;
                    continue;
                }
            };
            let peer = canonical(peer);
            // TCP has checked that the address is the peer's.
            match self.places.enter(peer.ip(), Instant::now()) {
                Ok(place) => drop(handshakes.spawn(Arc::clone(&self).admit(tcp, peer, place))),
                Err(reason) => log(&self.refused, peer, reason),
            }
        }
    }

    async fn admit(self: Arc<Self>, tcp: TcpStream, peer: SocketAddr, place: Place) {
        let limit = self.config.handshake_timeout;
        let handshake = |kept| Box::pin(self.handshake(tcp, peer, kept));
        let clock = self.runtime.clock();
        if let Err(reason) = place
            .hold(|kept| in_time(clock, limit, handshake(kept)))
            .await
        {
            log(&self.refused, peer, &reason);
        }
    }

    async fn handshake(
        &self,
        mut tcp: TcpStream,
        remote: SocketAddr,
        place: Kept,
    ) -> Result<(), String> {
        if matches!(tcp.peek(&mut [0]).await, Ok(0)) {
            // It only wanted to know whether anybody is here.
            return Ok(());
        }
        prepare(&tcp, &self.config).map_err(|error| error.to_string())?;
        let mut side = UnbufferedServerConnection::new(Arc::clone(&self.server))
            .map_err(|error| error.to_string())?;
        shake(&mut tcp, &mut side)
            .await
            .map_err(|error| error.to_string())?;
        let peer = peer_of(&side, &self.own)?;
        place.heard();
        let records = side
            .dangerous_into_kernel_connection()
            .map_err(|error| error.to_string())
            .and_then(Records::server)?;
        let link = TlsLink::new(tcp, records, peer, remote, &self.runtime)
            .map_err(|error| error.to_string())?;
        self.accepted
            .send(link)
            .await
            .map_err(|_| "nobody accepts any more".to_owned())
    }
}
