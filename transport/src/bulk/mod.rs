//! TLS 1.3 over TCP: connections for bulk data beside an [`Endpoint`]'s QUIC.
//!
//! QUIC pays for every packet; TCP hands the kernel, and often the network card, 64 KiB at a time. So for large transfers on
//! paths with small packets TCP needs a fraction of the CPU time. Nothing else differs: the same certificates, checked on both
//! sides, the same cipher (AES-128-GCM first), TLS 1.3 only. There is no resumption and no early data.
//!
//! [`Endpoint::listen_tls`] listens on the TCP port with the number of the endpoint's UDP port, so that one address says where
//! both are.

mod handshake;
mod link;
mod listener;
mod records;

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;

use rustix::net::sockopt;
use rustls::client::UnbufferedClientConnection;
use rustls::{AlertDescription, CommonState};
use rustls_pki_types::ServerName;
use tokio::net::{TcpSocket, TcpStream};

use self::handshake::{HandshakeError, shake};
pub use self::link::{LinkLost, TlsLink};
pub use self::listener::TlsListener;
use self::records::Records;
use crate::end::ConnectionLost;
use crate::endpoint::{BindError, ConnectError, Endpoint, EndpointConfig, Expect};
use crate::identity::{Identity, identity_of};
use crate::tls;

/// The protocol of bulk connections, with its version.
pub const ALPN_BULK: &[u8] = b"kolo-bulk/1";

/// The bulk connections of an endpoint.
impl Endpoint {
    /// Listens for [bulk connections](crate::bulk), on the TCP port with the number of this endpoint's UDP port. Who is let in
    /// and how long a handshake may take is as for the endpoint.
    ///
    /// # Errors
    ///
    /// [`BindError::Listen`], for instance because another process has the TCP port: bind another endpoint and try again.
    pub fn listen_tls(&self) -> Result<TlsListener, BindError> {
        TlsListener::bind(self, self.config())
    }

    /// Makes a [bulk connection](crate::bulk) to the endpoint of a peer that [listens](Endpoint::listen_tls) for them, and checks who
    /// it is. Takes at most [`EndpointConfig::handshake_timeout`]. Cancel safe.
    ///
    /// Whether the peer takes this side's certificate shows when something is read.
    ///
    /// # Errors
    ///
    /// [`ConnectError`]; [`ConnectError::Address`] if nothing listens there.
    pub async fn connect_tls(
        &self,
        address: SocketAddr,
        expect: Expect,
    ) -> Result<TlsLink, ConnectError> {
        connect(self, self.config(), address, expect).await
    }
}

/// Connects to the [`TlsListener`] of a peer. See [`Endpoint::connect_tls`].
async fn connect(
    endpoint: &Endpoint,
    config: &EndpointConfig,
    address: SocketAddr,
    expect: Expect,
) -> Result<TlsLink, ConnectError> {
    let runtime = endpoint.runtime();
    // Where the socket's events are. Boxed, for TLS keeps much until it is established.
    let opening = Box::pin(open(endpoint, config, address, expect));
    let opening = in_context(runtime.handle().clone(), opening);
    runtime
        .timeout(config.handshake_timeout, opening)
        .await
        .unwrap_or(Err(ConnectError::TimedOut { address }))
}

async fn open(
    endpoint: &Endpoint,
    config: &EndpointConfig,
    address: SocketAddr,
    expect: Expect,
) -> Result<TlsLink, ConnectError> {
    let mut tcp = dial(endpoint.local_addr(), address)
        .await
        .map_err(|error| not_dialed(address, &error))?;
    prepare(&tcp, config).map_err(|error| match error.kind() {
        // A congestion control that there is not will not be there the next time.
        ErrorKind::NotFound | ErrorKind::PermissionDenied | ErrorKind::InvalidInput => {
            ConnectError::Address {
                address,
                reason: format!("{error} (TCP)"),
            }
        }
        _ => unreachable(address, &error),
    })?;
    let failed = |reason: String| ConnectError::Lost {
        address,
        lost: ConnectionLost::Failed { reason },
    };
    let mut config = tls::client_config(endpoint.live_credentials().clone(), &[ALPN_BULK])
        .map_err(|error| failed(error.to_string()))?;
    config.enable_secret_extraction = true;
    let name = ServerName::try_from(tls::SERVER_NAME).expect("it is a DNS name");
    let mut side = UnbufferedClientConnection::new(Arc::new(config), name)
        .map_err(|error| failed(error.to_string()))?;
    shake(&mut tcp, &mut side)
        .await
        .map_err(|error| not_connected(address, error))?;
    let peer = peer_of(&side, endpoint.identity())
        .map_err(|reason| ConnectError::Certificate { address, reason })?;
    if !expect.matches(&peer) {
        return Err(ConnectError::WrongPeer {
            address,
            expected: expect.to_string(),
            found: Box::new(peer),
        });
    }
    let records = side
        .dangerous_into_kernel_connection()
        .map_err(|error| error.to_string())
        .and_then(Records::client)
        .map_err(failed)?;
    TlsLink::new(tcp, records, peer, address, endpoint.runtime())
        .map_err(|error| failed(error.to_string()))
}

async fn dial(own: SocketAddr, address: SocketAddr) -> io::Result<TcpStream> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    if let Some(from) = from_where(own, address) {
        socket.bind(from)?;
    }
    socket.connect(address).await
}

/// The interface that the endpoint is on, for a socket to a peer; `None` if it is on all.
fn from_where(mut own: SocketAddr, peer: SocketAddr) -> Option<SocketAddr> {
    // With the scope of a link-local address.
    own.set_port(0);
    (!own.ip().is_unspecified() && own.is_ipv4() == peer.is_ipv4()).then_some(own)
}

/// A peer that is gone without a word while nothing is on its way to it is noticed as over QUIC: after the idle timeout.
///
/// `TCP_USER_TIMEOUT` would notice it with bytes on their way, too. But it also ends connections to peers that are there and
/// only do not read yet: a worker that comes to an operation later than the others, say.
fn prepare(tcp: &TcpStream, config: &EndpointConfig) -> io::Result<()> {
    tcp.set_nodelay(true)?;
    choose_congestion_control(tcp, config.tcp_congestion.as_deref())?;
    // The kernel counts in seconds here, and in milliseconds there.
    let second = std::time::Duration::from_secs(1);
    sockopt::set_socket_keepalive(tcp, true)?;
    sockopt::set_tcp_keepidle(tcp, config.keep_alive.max(second))?;
    sockopt::set_tcp_keepintvl(tcp, config.keep_alive.max(second))?;
    let probes = config.idle_timeout.as_secs().clamp(2, 100);
    sockopt::set_tcp_keepcnt(tcp, probes as u32)?;
    Ok(())
}

/// BBR where the host has it by default is replaced: it sends at a rate of its own, by a timer for each packet, which on the short
/// paths between the hosts of a cluster costs more processor time than all else that TCP does. CUBIC is in every kernel.
fn choose_congestion_control(tcp: &TcpStream, asked: Option<&str>) -> std::io::Result<()> {
    if let Some(asked) = asked {
        return sockopt::set_tcp_congestion(tcp, asked).map_err(|error| {
            let reason = format!("congestion control {asked:?} is not to be had: {error}");
            std::io::Error::new(error.kind(), reason)
        });
    }
    if sockopt::tcp_congestion(tcp).is_ok_and(|name| name.starts_with("bbr")) {
        // A host that allows nothing else has slow links, and not none.
        sockopt::set_tcp_congestion(tcp, "cubic").ok();
    }
    Ok(())
}

/// Who the peer is, by the certificate that the handshake has verified.
fn peer_of(state: &CommonState, own: &Identity) -> Result<Identity, String> {
    if state.alpn_protocol() != Some(ALPN_BULK) {
        return Err("it speaks another protocol".to_owned());
    }
    let certificate = state
        .peer_certificates()
        .and_then(|chain| chain.first())
        .ok_or("it presented no certificate of the cluster")?;
    let peer = identity_of(certificate).map_err(|error| error.to_string())?;
    if peer.cluster == own.cluster {
        Ok(peer)
    } else {
        Err(format!(
            "the certificate is one of {}, not of {}",
            peer.cluster, own.cluster
        ))
    }
}

/// A refusal holds; other things may be better in a moment.
fn not_dialed(address: SocketAddr, error: &io::Error) -> ConnectError {
    match error.kind() {
        ErrorKind::ConnectionRefused | ErrorKind::InvalidInput => ConnectError::Address {
            address,
            reason: format!("{error} (TCP)"),
        },
        _ => unreachable(address, error),
    }
}

fn unreachable(address: SocketAddr, error: &io::Error) -> ConnectError {
    ConnectError::Unreachable {
        address,
        reason: format!("{error} (TCP)"),
    }
}

fn not_connected(address: SocketAddr, error: HandshakeError) -> ConnectError {
    use AlertDescription as Alert;
    let reason = error.to_string();
    match error {
        HandshakeError::Tls(rustls::Error::AlertReceived(Alert::NoApplicationProtocol)) => {
            ConnectError::Version { address }
        }
        HandshakeError::Tls(rustls::Error::AlertReceived(
            Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::UnknownCA
            | Alert::AccessDenied
            | Alert::DecryptError
            | Alert::CertificateRequired,
        )) => ConnectError::Rejected { address, reason },
        // Such as one that has too many handshakes at once.
        HandshakeError::Io(error) => unreachable(address, &error),
        HandshakeError::Tls(
            rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented,
        ) => ConnectError::Certificate { address, reason },
        _ => ConnectError::Lost {
            address,
            lost: ConnectionLost::Failed { reason },
        },
    }
}

/// Polls a future in the context of a runtime, whoever awaits it.
async fn in_context<F: Future>(handle: tokio::runtime::Handle, future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    std::future::poll_fn(|cx| {
        let _entered = handle.enter();
        future.as_mut().poll(cx)
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::io::IoSlice;

    use super::*;
    use crate::authority::Authority;
    use crate::identity::Role;
    use crate::ids::{ClusterId, JobId, Slot};
    use crate::random::RandomId as _;
    use crate::runtime::TransportRuntime;

    /// Ends at any record, as it would after millions of them.
    #[tokio::test]
    async fn keys_are_renewed_on_the_way() {
        let authority = Authority::create(ClusterId::random()).unwrap();
        let runtime = TransportRuntime::new(1).unwrap();
        let bind = |slot| {
            let name = Identity::worker_name(JobId(1), Slot(slot));
            let credentials = authority.issue(Role::Worker, &name).unwrap();
            Endpoint::bind(&runtime, credentials, EndpointConfig::default()).unwrap()
        };
        let client = bind(0);
        let (server, listener) = loop {
            let server = bind(1);
            if let Ok(listener) = server.listen_tls() {
                break (server, listener);
            }
        };
        let expect = Expect::worker(JobId(1), Slot(1));
        let (accepted, connected) = tokio::join!(
            listener.accept(),
            client.connect_tls(server.local_addr(), expect)
        );
        let (mut one, mut two) = (accepted.unwrap(), connected.unwrap());
        for round in 0..20_u8 {
            if round % 3 == 0 {
                one.rekey_soon();
            }
            if round % 4 == 1 {
                two.rekey_soon();
            }
            for (from, into) in [(&mut one, &mut two)] {
                let mut bytes = [round; 3];
                poll_fn(|cx| from.poll_write(cx, &[IoSlice::new(&bytes)]))
                    .await
                    .unwrap();
                poll_fn(|cx| from.poll_flush(cx)).await.unwrap();
                poll_fn(|cx| into.poll_read(cx, &mut bytes)).await.unwrap();
                assert_eq!(bytes, [round; 3]);
            }
            std::mem::swap(&mut one, &mut two);
        }
    }
}
