//! The UDP socket and its buffers.

use std::net::{SocketAddr, UdpSocket};

use rustix::net::sockopt;
use socket2::{Domain, Protocol, Socket, Type};

use super::BindError;

/// Size of the socket's buffers, in bytes, if the operating system grants it (`net.core.rmem_max`, `net.core.wmem_max`).
const BUFFER: usize = 32 << 20;

/// A socket on `address`.
pub(crate) fn bind(address: SocketAddr) -> Result<UdpSocket, BindError> {
    let open = || {
        let socket = Socket::new(
            Domain::for_address(address),
            Type::DGRAM,
            Some(Protocol::UDP),
        )?;
        if address.is_ipv6() {
            // Peers with IPv4 addresses can be reached, too.
            socket.set_only_v6(false)?;
        }
        socket.bind(&address.into())?;
        Ok(socket)
    };
    let socket: Socket = open().map_err(|error| BindError::Socket { address, error })?;
    grow(&socket, BUFFER);
    Ok(socket.into())
}

/// Asks for larger buffers, first past the operating system's limits (for which root's rights are needed), then up to
/// them.
fn grow(socket: &Socket, wanted: usize) {
    let receive = sockopt::set_socket_recv_buffer_size_force(socket, wanted)
        .or_else(|_| sockopt::set_socket_recv_buffer_size(socket, wanted));
    let send = sockopt::set_socket_send_buffer_size_force(socket, wanted)
        .or_else(|_| sockopt::set_socket_send_buffer_size(socket, wanted));
    if let Err(error) = receive.and(send) {
        tracing::debug!(%error, "the socket's buffers stay as they are");
    }
    // The kernel counts its own overhead, and reports twice what was set.
    let granted = |size: rustix::io::Result<usize>| size.unwrap_or_default() / 2;
    let receive = granted(sockopt::socket_recv_buffer_size(socket));
    let send = granted(sockopt::socket_send_buffer_size(socket));
    if receive < wanted || send < wanted {
        tracing::debug!(
            wanted,
            receive,
            send,
            "socket buffers are smaller than wanted; raise net.core.rmem_max and net.core.wmem_max"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_grow_as_far_as_they_may() {
        let size = |buffer| {
            let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap();
            grow(&socket, buffer);
            sockopt::socket_recv_buffer_size(&socket).unwrap()
        };
        assert!(size(128 << 10) > size(8 << 10));
    }

    #[test]
    fn a_taken_port_is_named() {
        let taken = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = taken.local_addr().unwrap();
        let error = bind(address).unwrap_err().to_string();
        assert!(error.contains(&address.to_string()), "{error}");
    }
}
