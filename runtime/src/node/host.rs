//! What every daemon that is a node takes from its host.

use std::net::SocketAddr;

use kolo_transport::EndpointConfig;
use kolo_transport::interfaces::wildcard;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

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

/// Raises this process's limit of open files as far as it may. A node needs about eight descriptors for each worker; the usual
/// soft limit of 1024 is a relic.
pub fn raise_open_files() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "the limit of open files could not be raised");
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

    #[test]
    fn the_limit_of_open_files_is_what_it_may_be() {
        raise_open_files();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
    }
}
