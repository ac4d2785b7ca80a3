//! What every daemon that is a node takes from its host.

use std::net::SocketAddr;

use kolo_transport::EndpointConfig;
use kolo_transport::interfaces::wildcard;

/// Where a node listens whose head is at `head`, unless it is told: a free port, on the loopback if the head is there, and on
/// all addresses of both families otherwise, so that other nodes and drivers reach it over whatever network they have in
/// common.
#[must_use]
pub fn default_listen(head: SocketAddr) -> SocketAddr {
    if head.ip().to_canonical().is_loopback() {
        EndpointConfig::towards(head).listen
    } else {
        wildcard(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_where_its_head_is_or_everywhere() {
        let listen = |head: &str| default_listen(head.parse().unwrap()).ip();
        assert!(listen("127.0.0.1:1").is_loopback() && listen("127.0.0.1:1").is_ipv4());
        assert!(listen("[::1]:1").is_loopback() && listen("[::1]:1").is_ipv6());
        for far in ["10.0.0.1:1", "[fd00::1]:1", "[::ffff:10.0.0.1]:1"] {
            assert_eq!(listen(far), wildcard(0).ip());
        }
    }
}
