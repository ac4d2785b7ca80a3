//! Whether anybody is at an address any more.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::UdpSocket;

use super::{dial, from_where, in_context};
use crate::endpoint::Endpoint;

/// How long a refusal is waited for. From a peer that is there, none comes.
const ANSWER: Duration = Duration::from_millis(300);

/// How long after the first refusal it is asked again: what the peer sent before it went is here by then.
const AGAIN: Duration = Duration::from_millis(50);

/// Whether the host of a peer says that nothing listens at its port. See [`Endpoint::is_refused`].
pub(crate) async fn is_refused(endpoint: &Endpoint, address: SocketAddr) -> bool {
    let runtime = endpoint.runtime();
    let own = endpoint.local_addr();
    let asking = async {
        if !both(own, address).await {
            return false;
        }
        tokio::time::sleep(AGAIN).await;
        both(own, address).await
    };
    in_context(runtime.handle().clone(), asking).await
}

/// Whether a connection to a peer's port is taken. See [`Endpoint::is_reachable`].
pub(crate) async fn is_reachable(endpoint: &Endpoint, address: SocketAddr) -> bool {
    let own = endpoint.local_addr();
    let dialing = async {
        let dialed = tokio::time::timeout(ANSWER, dial(own, address)).await;
        matches!(dialed, Ok(Ok(_)))
    };
    in_context(endpoint.runtime().handle().clone(), dialing).await
}

/// UDP first: a peer that is there takes no notice of it.
async fn both(own: SocketAddr, address: SocketAddr) -> bool {
    udp(own, address).await && tcp(own, address).await
}

async fn udp(own: SocketAddr, address: SocketAddr) -> bool {
    let refused = async {
        let anywhere = match address {
            SocketAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
            SocketAddr::V6(_) => ([0_u16; 8], 0).into(),
        };
        let socket = UdpSocket::bind(from_where(own, address).unwrap_or(anywhere)).await?;
        socket.connect(address).await?;
        // Too short for a packet of QUIC.
        socket.send(&[0]).await?;
        socket.recv(&mut [0; 1]).await
    };
    is_refusal(&tokio::time::timeout(ANSWER, refused).await)
}

async fn tcp(own: SocketAddr, address: SocketAddr) -> bool {
    is_refusal(&tokio::time::timeout(ANSWER, dial(own, address)).await)
}

fn is_refusal<T>(answer: &Result<io::Result<T>, tokio::time::error::Elapsed>) -> bool {
    matches!(answer, Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused)
}
