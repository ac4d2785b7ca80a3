//! Echo requests of ICMP: what the kernels on the way let through, whole and in fragments.

use std::io::{self, ErrorKind, Read as _};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{
    Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery, set_ip_mtu_discover, set_ipv6_mtu_discover,
};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

/// How long to wait for an answer.
const PATIENCE: Duration = Duration::from_millis(700);
/// Header of an echo request.
const HEADER: usize = 8;

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ping {
    /// The answer came.
    Answered,
    /// Nothing came.
    Silent,
    /// This host knows that it does not fit.
    TooLarge,
}

/// Bytes of IP and ICMP headers.
pub(super) fn overhead(ip: IpAddr) -> usize {
    HEADER + if ip.is_ipv4() { 20 } else { 40 }
}

/// Sends one packet of `size` bytes, IP header included, to `to` and waits for the answer; in one piece, or in fragments
/// where it does not fit. Blocks for less than a second.
///
/// # Errors
///
/// If this process may not ping.
pub(super) fn ping(to: SocketAddr, size: usize, whole: bool) -> io::Result<Ping> {
    let (domain, protocol, kind) = match to {
        SocketAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4, 8),
        SocketAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6, 128),
    };
    // Without rights where the system allows it, with root's otherwise.
    let (socket, raw) = match Socket::new(domain, Type::DGRAM, Some(protocol)) {
        Ok(socket) => (socket, false),
        Err(_) => (Socket::new(domain, Type::RAW, Some(protocol))?, true),
    };
    match to {
        SocketAddr::V4(_) => set_ip_mtu_discover(
            &socket,
            if whole {
                // Past what this host believes of the way.
                Ipv4PathMtuDiscovery::PROBE
            } else {
                Ipv4PathMtuDiscovery::DONT
            },
        )?,
        SocketAddr::V6(_) => set_ipv6_mtu_discover(
            &socket,
            if whole {
                Ipv6PathMtuDiscovery::PROBE
            } else {
                Ipv6PathMtuDiscovery::DONT
            },
        )?,
    }
    let mut packet = vec![0x6b; size.saturating_sub(overhead(to.ip())) + HEADER];
    let marker = marker();
    packet[..4].copy_from_slice(&[kind, 0, 0, 0]);
    packet[4..HEADER].copy_from_slice(&marker);
    let sum = checksum(&packet);
    packet[2..4].copy_from_slice(&sum.to_be_bytes());
    let address = match to {
        SocketAddr::V4(to) => SockAddr::from(SocketAddr::from((*to.ip(), 0))),
        SocketAddr::V6(mut to) => {
            to.set_port(0);
            SockAddr::from(SocketAddr::V6(to))
        }
    };
    // From then on only what comes from there is received.
    socket.connect(&address)?;
    match socket.send(&packet) {
        Ok(_) => {}
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::MSGSIZE.raw_os_error()) => {
            return Ok(Ping::TooLarge);
        }
        Err(error) => return Err(error),
    }
    let deadline = Instant::now() + PATIENCE;
    let mut buffer = [0; 128];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(Ping::Silent);
        }
        socket.set_read_timeout(Some(left))?;
        match (&socket).read(&mut buffer) {
            Ok(length) => {
                if is_answer(
                    &buffer[..length.min(buffer.len())],
                    to.is_ipv4(),
                    raw,
                    marker,
                ) {
                    return Ok(Ping::Answered);
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Ok(Ping::Silent);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Identifier and sequence number of a request: one of this process's, and none of its others, which may be on their way to the
/// same host at the same time.
fn marker() -> [u8; 4] {
    static REQUESTS: AtomicU16 = AtomicU16::new(1);
    let [high, low] = (std::process::id() as u16).to_be_bytes();
    let [next, number] = REQUESTS.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    [high, low, next, number]
}

/// Whether it is the answer to this request. A raw IPv4 socket gives the IP header as well and sees the answers to
/// others; of requests of the other kind the kernel chooses the identifier itself.
fn is_answer(packet: &[u8], v4: bool, raw: bool, marker: [u8; 4]) -> bool {
    let skip = match packet.first() {
        Some(first) if raw && v4 => usize::from(first & 0xf) * 4,
        _ => 0,
    };
    let Some(icmp) = packet.get(skip..).filter(|icmp| icmp.len() >= HEADER) else {
        return false;
    };
    let kind = if v4 { 0 } else { 129 };
    let own = if raw { 4 } else { 6 };
    icmp[0] == kind && icmp[own..HEADER] == marker[own - 4..]
}

/// The checksum of the Internet. For ICMPv6, in which addresses count, the kernel makes its own.
fn checksum(bytes: &[u8]) -> u16 {
    let mut sum: u32 = bytes
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)])))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_standard() {
        // The example of RFC 1071.
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(checksum(&bytes), !0xddf2);
        let mut packet = [8, 0, 0, 0, 1, 2, 0, 1, 0x6b];
        let sum = checksum(&packet);
        packet[2..4].copy_from_slice(&sum.to_be_bytes());
        assert_eq!(checksum(&packet), 0);
    }

    #[test]
    fn only_the_answer_to_the_request_counts() {
        let own = [1, 2, 0, 1];
        let answer = [0, 0, 0, 0, 1, 2, 0, 1];
        let raw = [&[0x45; 20][..], &answer].concat();
        assert!(is_answer(&raw, true, true, own));
        for other in [[1, 3, 0, 1], [1, 2, 0, 2]] {
            assert!(!is_answer(&raw, true, true, other));
        }
        // The kernel has chosen another identifier, and taken it back.
        assert!(is_answer(&answer, true, false, [9, 9, 0, 1]));
        assert!(!is_answer(&answer, true, false, [9, 9, 0, 2]));
        assert!(!is_answer(&[8, 0, 0, 0, 1, 2, 0, 1], true, false, own));
        for short in [&[][..], &[0x45], &[0x4f; 30], &[0; 7]] {
            assert!(!is_answer(short, true, true, own));
        }
        assert_ne!(marker(), marker());
    }
}
