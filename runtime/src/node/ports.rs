//! TCP ports for jobs: `MASTER_PORT` must still be free when the program binds it.
//!
//! They are chosen outside the range from which the kernel takes ports by itself, so that no connection happens to get
//! one in between, and none is given to two jobs at nearly the same time.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

/// How long a port is not given again.
const KEPT: Duration = Duration::from_secs(600);

/// Lowest port to give.
const LOWEST: u16 = 10_000;

/// What Linux does without a setting of its own.
const EPHEMERAL: (u16, u16) = (32_768, 60_999);

/// How many ports are tried.
const TRIES: usize = 200;

/// The ports that were given.
#[derive(Debug, Default)]
pub(super) struct Ports {
    given: Mutex<VecDeque<(u16, Instant)>>,
}

impl Ports {
    /// A port that is free on every address of this host; 0, which binds to any, if none is found.
    pub(super) fn take(&self) -> u16 {
        let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")
            .ok()
            .and_then(|text| parse_range(&text))
            .unwrap_or(EPHEMERAL);
        self.choose(Instant::now(), range, random, is_free)
    }

    fn choose(
        &self,
        now: Instant,
        ephemeral: (u16, u16),
        mut random: impl FnMut() -> u32,
        is_free: impl Fn(u16) -> bool,
    ) -> u16 {
        let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        while given
            .front()
            .is_some_and(|(_, at)| now.duration_since(*at) >= KEPT)
        {
            given.pop_front();
        }
        for _ in 0..TRIES {
            let Some(port) = outside(ephemeral, random()) else {
                break;
            };
            if !given.iter().any(|(other, _)| *other == port) && is_free(port) {
                given.push_back((port, now));
                return port;
            }
        }
        0
    }
}

fn parse_range(text: &str) -> Option<(u16, u16)> {
    let mut numbers = text.split_whitespace().map(str::parse);
    let (Some(Ok(low)), Some(Ok(high))) = (numbers.next(), numbers.next()) else {
        return None;
    };
    (low <= high).then_some((low, high))
}

/// One of the ports from [`LOWEST`] on that are not in the range; any from there on if it leaves none.
fn outside((low, high): (u16, u16), random: u32) -> Option<u16> {
    let below = u32::from(low.max(LOWEST) - LOWEST);
    let above = u32::from(u16::MAX - high.max(LOWEST - 1));
    let count = below + above;
    if count == 0 {
        return u16::try_from(u32::from(LOWEST) + random % u32::from(u16::MAX - LOWEST)).ok();
    }
    let index = random % count;
    let port = if index < below {
        u32::from(LOWEST) + index
    } else {
        u32::from(high.max(LOWEST - 1)) + 1 + (index - below)
    };
    u16::try_from(port).ok()
}

fn random() -> u32 {
    // A keyed hash of nothing: the key is random, which is all that is needed here.
    use std::hash::{BuildHasher, Hasher};
    let hash = std::collections::hash_map::RandomState::new()
        .build_hasher()
        .finish();
    hash as u32
}

/// Whether nobody has the port, without the permission to share it.
fn is_free(port: u16) -> bool {
    let bind = |ip: IpAddr| -> std::io::Result<()> {
        let address = SocketAddr::new(ip, port);
        let socket = Socket::new(
            Domain::for_address(address),
            Type::STREAM,
            Some(Protocol::TCP),
        )?;
        if ip.is_ipv6() {
            socket.set_only_v6(true)?;
        }
        socket.bind(&address.into())
    };
    let taken = |result: std::io::Result<()>| {
        result.is_err_and(|error| error.kind() == std::io::ErrorKind::AddrInUse)
    };
    // A host without IPv6 has nobody there either.
    !taken(bind(IpAddr::V4(Ipv4Addr::UNSPECIFIED)))
        && !taken(bind(IpAddr::V6(Ipv6Addr::UNSPECIFIED)))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn ports_are_outside_the_kernel_s_range() {
        for random in 0..60_000 {
            let port = outside(EPHEMERAL, random).unwrap();
            assert!((LOWEST..32_768).contains(&port) || port > 60_999, "{port}");
            assert!(outside((1024, 60_999), random).unwrap() > 60_999);
            assert!(outside((20_000, u16::MAX), random).unwrap() < 20_000);
            assert!(outside((1024, u16::MAX), random).unwrap() >= LOWEST);
        }
        assert_eq!(parse_range("32768\t60999\n"), Some((32_768, 60_999)));
        assert_eq!(parse_range("5 4"), None);
        assert_eq!(parse_range("x"), None);
    }

    #[test]
    fn a_port_is_not_given_twice_nor_if_it_is_taken() {
        let ports = Ports::default();
        let now = Instant::now();
        let mut number = 0;
        let mut counting = || {
            number += 1;
            number / 3
        };
        let first = ports.choose(now, EPHEMERAL, &mut counting, |_| true);
        let second = ports.choose(now, EPHEMERAL, &mut counting, |port| port != first + 1);
        assert_eq!((first, second), (LOWEST, LOWEST + 2));
        assert_eq!(
            ports.choose(now, EPHEMERAL, || 0, |_| true),
            0,
            "all are given"
        );
        assert_eq!(ports.choose(now + KEPT, EPHEMERAL, || 0, |_| true), LOWEST);
    }

    #[test]
    fn a_port_that_somebody_has_on_any_address_is_not_free() {
        let port = Ports::default().take();
        assert!(port >= LOWEST && is_free(port));
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        assert!(!is_free(port));
        drop(listener);
    }
}
