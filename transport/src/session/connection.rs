//! A connection to one peer.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::{Arc, Weak};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::bytes::ByteStream;
use super::request::RequestError;
use super::stream::Stream;
use crate::end::{CloseCode, ConnectionLost};
use crate::frame::{FrameError, Limits};
use crate::identity::Identity;
use crate::runtime::TransportRuntime;

/// A connection to a peer whose certificate was checked. Clones share it.
///
/// When the last clone and the last stream are dropped, it is closed with [`CloseCode::Done`]. Its futures may
/// be awaited on any executor.
#[derive(Clone)]
pub struct Connection {
    inner: Arc<Inner>,
}

struct Inner {
    quinn: quinn::Connection,
    peer: Identity,
    /// The address that the endpoint is bound to; may be unspecified.
    bound: IpAddr,
    runtime: TransportRuntime,
}

impl Connection {
    pub(crate) fn new(
        quinn: quinn::Connection,
        peer: Identity,
        bound: IpAddr,
        runtime: TransportRuntime,
    ) -> Self {
        Self {
            inner: Arc::new(Inner {
                quinn,
                peer,
                bound,
                runtime,
            }),
        }
    }

    /// Who is at the other end.
    pub fn peer(&self) -> &Identity {
        &self.inner.peer
    }

    /// The peer's address.
    pub fn remote_addr(&self) -> SocketAddr {
        canonical(self.inner.quinn.remote_address())
    }

    /// This side's address on the way to the peer: the one at which the peer's host can reach this host. `None`
    /// if the operating system does not tell.
    pub fn local_ip(&self) -> Option<IpAddr> {
        let bound = Some(self.inner.bound).filter(|ip| !ip.is_unspecified());
        bound
            // Known from the packets on the side that accepted.
            .or_else(|| self.inner.quinn.local_ip())
            .or_else(|| route_to(self.remote_addr()))
            .map(|ip| ip.to_canonical())
    }

    /// The runtime that the connection runs on.
    pub fn runtime(&self) -> &TransportRuntime {
        &self.inner.runtime
    }

    /// Opens a stream. The peer learns of it with the first frame. Frames from the peer may be up to
    /// `limits`. Waits while too many streams are open. Cancel safe.
    ///
    /// # Errors
    ///
    /// [`ConnectionLost`].
    pub async fn open(&self, limits: Limits) -> Result<Stream, ConnectionLost> {
        let halves = self.inner.quinn.open_bi().await?;
        Ok(Stream::new(halves, limits, &self.inner.runtime))
    }

    /// Waits for a stream that the peer opens. Frames on it may be up to `limits`. Cancel safe.
    ///
    /// # Errors
    ///
    /// [`ConnectionLost`].
    pub async fn accept(&self, limits: Limits) -> Result<Stream, ConnectionLost> {
        let halves = self.inner.quinn.accept_bi().await?;
        Ok(Stream::new(halves, limits, &self.inner.runtime))
    }

    /// As [`Connection::open`], a stream of plain bytes. The peer learns of it with the first byte.
    ///
    /// # Errors
    ///
    /// [`ConnectionLost`].
    pub async fn open_bytes(&self) -> Result<ByteStream, ConnectionLost> {
        let halves = self.inner.quinn.open_bi().await?;
        Ok(ByteStream::new(halves, &self.inner.runtime))
    }

    /// As [`Connection::accept`], a stream of plain bytes.
    ///
    /// # Errors
    ///
    /// [`ConnectionLost`].
    pub async fn accept_bytes(&self) -> Result<ByteStream, ConnectionLost> {
        let halves = self.inner.quinn.accept_bi().await?;
        Ok(ByteStream::new(halves, &self.inner.runtime))
    }

    /// Sends one request on a stream of its own and waits for its reply, at most for `deadline`.
    ///
    /// When the future is dropped or the deadline passes, the stream is reset: the handler sees
    /// [`CloseCode::Cancelled`] (see [`FrameSender::stopped`](super::FrameSender::stopped)).
    ///
    /// # Errors
    ///
    /// [`RequestError`].
    pub async fn request<Q: Serialize, R: DeserializeOwned>(
        &self,
        request: &Q,
        deadline: Duration,
    ) -> Result<R, RequestError> {
        self.inner
            .runtime
            .timeout(deadline, self.exchange(request))
            .await
            .unwrap_or(Err(RequestError::Deadline { after: deadline }))
    }

    async fn exchange<Q: Serialize, R: DeserializeOwned>(
        &self,
        request: &Q,
    ) -> Result<R, RequestError> {
        let mut exchange = Exchange {
            stream: self.open(Limits::CONTROL).await?,
            answered: false,
        };
        let Stream { send, recv } = &mut exchange.stream;
        match send.send(request, &[]).await {
            Ok(()) => send.finish(),
            // A peer may answer without reading all of a request that it refuses.
            Err(FrameError::Reset(code)) => {
                return match recv.expect().await {
                    Ok(reply) => Ok(reply.head),
                    Err(FrameError::Lost(lost)) => Err(RequestError::Lost(lost)),
                    Err(_) => Err(RequestError::Rejected { code }),
                };
            }
            Err(error) => return Err(error.into()),
        }
        let reply = recv.expect().await?;
        exchange.answered = true;
        Ok(reply.head)
    }

    /// Closes the connection; all streams end on both sides. The peer learns `code` and `reason` if it can be
    /// reached. Does nothing if the connection has ended.
    pub fn close(&self, code: CloseCode, reason: &str) {
        self.inner.quinn.close(code.varint(), reason.as_bytes());
    }

    /// Waits until the connection has ended. Cancel safe.
    pub async fn closed(&self) -> ConnectionLost {
        self.inner.quinn.closed().await.into()
    }

    /// Whether the connection has ended.
    pub fn is_closed(&self) -> bool {
        self.inner.quinn.close_reason().is_some()
    }

    /// How the connection ended, if it has.
    pub fn close_reason(&self) -> Option<ConnectionLost> {
        self.inner.quinn.close_reason().map(Into::into)
    }

    /// The largest UDP payload that is known to pass unfragmented, in bytes. It grows while the connection is young.
    pub fn path_mtu(&self) -> u16 {
        self.inner.quinn.stats().path.current_mtu
    }

    /// The current estimate of the round-trip time.
    pub fn rtt(&self) -> Duration {
        self.inner.quinn.rtt()
    }

    /// A number that no other connection of this endpoint has at the same time, to tell two connections of one
    /// peer apart.
    pub fn stable_id(&self) -> usize {
        self.inner.quinn.stable_id()
    }
}

/// A connection that may have ended. Does not keep it from being closed.
pub(crate) struct WeakConnection(Weak<Inner>);

impl WeakConnection {
    /// The connection, if somebody still holds it and it has not ended.
    pub(crate) fn upgrade(&self) -> Option<Connection> {
        let connection = Connection {
            inner: self.0.upgrade()?,
        };
        (!connection.is_closed()).then_some(connection)
    }
}

impl Connection {
    pub(crate) fn downgrade(&self) -> WeakConnection {
        WeakConnection(Arc::downgrade(&self.inner))
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("peer", &self.inner.peer.to_string())
            .field("remote_addr", &self.remote_addr())
            .finish_non_exhaustive()
    }
}

/// An IPv4 address in its own form, which IPv6 sockets don't use.
pub(crate) fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        IpAddr::V4(ip) => (ip, address.port()).into(),
        // As it is, for it may have a scope.
        IpAddr::V6(_) => address,
    }
}

/// The address from which the operating system would send to `peer`. Sends nothing.
fn route_to(peer: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = match peer {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(peer).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// A stream that carries one request: reset if it is dropped before the reply.
struct Exchange {
    stream: Stream,
    answered: bool,
}

impl Drop for Exchange {
    fn drop(&mut self) {
        if !self.answered {
            self.stream.abort(CloseCode::Cancelled);
        }
    }
}
