//! The network interfaces of this host.
//!
//! [`here`] lists them as a node reports them, [`Changes`] tells when the list may have changed, and [`wildcard`] is the
//! address that is reached over all of them. What is done with it is in `kolo_core::interfaces`.

mod netlink;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};
use std::path::Path;

use crate::wire::network::{Interface, NodeNetwork, is_link_local};

/// The interfaces of this host that have addresses, by name; at most [`NodeNetwork::MAX_INTERFACES`], the ones that are up
/// first. Addresses that are not usable yet or not for long (IPv6 addresses that are tentative, deprecated or temporary)
/// are left out.
///
/// # Errors
///
/// If the kernel does not tell.
pub fn here() -> io::Result<Vec<Interface>> {
    let mut interfaces: Vec<Interface> = netlink::links()?
        .into_values()
        .filter(|link| !link.addresses.is_empty())
        .map(|mut link| {
            link.addresses.sort_unstable();
            link.addresses.dedup();
            link.addresses.truncate(NodeNetwork::MAX_ADDRESSES);
            Interface {
                speed: speed(&link.name),
                name: link.name,
                up: link.up,
                loopback: link.loopback,
                mtu: link.mtu,
                addresses: link.addresses,
            }
        })
        .collect();
    interfaces.sort_unstable_by(|a, b| b.up.cmp(&a.up).then_with(|| a.name.cmp(&b.name)));
    interfaces.truncate(NodeNetwork::MAX_INTERFACES);
    interfaces.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(interfaces)
}

/// Megabits a second, if the driver knows. Virtual devices say -1 or nothing.
fn speed(name: &str) -> Option<u32> {
    // A name has no slash, but `.` and `..` would be other folders.
    let path = Path::new("/sys/class/net").join(name).join("speed");
    let text = std::fs::read_to_string(path).ok()?;
    text.trim().parse().ok().filter(|speed| *speed > 0)
}

/// Tells this host's network stack from all others: the same for processes that share one, another in each network
/// namespace and after each boot.
#[must_use]
pub fn host() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/thread-self/ns/net")
        .map(|link| link.to_string_lossy().into_owned())
        .unwrap_or_default();
    let mut hasher = blake3::Hasher::new();
    for part in [boot.trim(), &namespace] {
        hasher.update(part.as_bytes());
        hasher.update(b"\0");
    }
    hasher.finalize().to_hex()[..16].to_owned()
}

/// Tells this machine from all others: the same for all who log in to it, another for each container and after each boot.
/// Nothing where the kernel does not tell.
#[must_use]
pub fn machine() -> String {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let boot = read("/proc/sys/kernel/random/boot_id");
    if boot.trim().is_empty() {
        return String::new();
    }
    let processes = std::fs::read_link("/proc/self/ns/pid")
        .map(|link| link.to_string_lossy().into_owned())
        .unwrap_or_default();
    let mut hasher = blake3::Hasher::new();
    // Copies of a virtual machine that goes on may have one boot id, but not one machine id.
    for part in [&host(), read("/etc/machine-id").trim(), &processes] {
        hasher.update(part.as_bytes());
        hasher.update(b"\0");
    }
    hasher.finalize().to_hex()[..16].to_owned()
}

/// The address on which all others of this host are reached, over IPv4 and IPv6: `[::]`, or `0.0.0.0` if the kernel has no
/// IPv6.
#[must_use]
pub fn wildcard(port: u16) -> SocketAddr {
    let dual = || {
        let socket = socket2::Socket::new(socket2::Domain::IPV6, socket2::Type::DGRAM, None)?;
        socket.set_only_v6(false)?;
        socket.bind(&SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)).into())
    };
    match dual() {
        Ok(()) => (Ipv6Addr::UNSPECIFIED, port).into(),
        Err(_) => (Ipv4Addr::UNSPECIFIED, port).into(),
    }
}

/// The number of an interface of this host, which is the scope of a link-local address.
///
/// # Errors
///
/// If there is no such interface.
pub fn index(name: &str) -> io::Result<u32> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))
        .or_else(|_| UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)))?;
    Ok(rustix::net::netdevice::name_to_index(&socket, name)?)
}

/// `address` as a socket of this host needs it: a link-local one with the scope of the interface `scope`.
///
/// # Errors
///
/// If a link-local address comes without scope, or there is no such interface.
pub fn scoped(address: SocketAddr, scope: Option<&str>) -> io::Result<SocketAddr> {
    match address {
        SocketAddr::V6(v6) if is_link_local(IpAddr::V6(*v6.ip())) && v6.scope_id() == 0 => {
            let Some(scope) = scope else {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!("{} means nothing without the name of an interface", v6.ip()),
                ));
            };
            Ok(SocketAddrV6::new(*v6.ip(), v6.port(), 0, index(scope)?).into())
        }
        other => Ok(other),
    }
}

/// The address from which this host would send to `peer`. Asks the kernel's routes and sends nothing.
///
/// # Errors
///
/// If there is no route.
pub fn source_towards(peer: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = match peer {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(peer)?;
    Ok(socket.local_addr()?.ip().to_canonical())
}

/// Tells of changes of this host's links and addresses.
#[derive(Debug)]
pub struct Changes {
    /// A netlink socket: for the runtime, a socket whose datagrams are received is as good as any.
    socket: tokio::net::UdpSocket,
}

impl Changes {
    /// From now on, on the current tokio runtime.
    ///
    /// # Errors
    ///
    /// If the kernel does not tell.
    pub fn new() -> io::Result<Self> {
        let socket = UdpSocket::from(netlink::changes()?);
        Ok(Self {
            socket: tokio::net::UdpSocket::from_std(socket)?,
        })
    }

    /// Waits until something has changed, which may be nothing that [`here`] shows. Cancel safe.
    ///
    /// # Errors
    ///
    /// If the kernel does not tell any more.
    pub async fn next(&mut self) -> io::Result<()> {
        let mut any = false;
        // What it says does not matter: the list is read anew.
        let mut buffer = [0; 64];
        loop {
            match self.socket.try_recv(&mut buffer) {
                Ok(_) => any = true,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && any => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.socket.readable().await?;
                }
                // There were more than the socket could hold: they are changes all the same.
                Err(error)
                    if error.raw_os_error() == Some(rustix::io::Errno::NOBUFS.raw_os_error()) =>
                {
                    any = true;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_has_a_loopback_and_one_name_for_itself() {
        let interfaces = here().unwrap();
        let lo = interfaces.iter().find(|interface| interface.loopback);
        assert_eq!(index(&lo.unwrap().name).unwrap(), 1);
        assert!(index("no-such-one").is_err());
        assert_eq!(host(), host());
        assert_eq!(host().len(), 16);
    }

    #[test]
    fn sources_are_found_and_scopes_are_added() {
        let loopback: SocketAddr = "127.0.0.1:9".parse().unwrap();
        assert_eq!(source_towards(loopback).unwrap(), loopback.ip());
        assert_eq!(scoped(loopback, None).unwrap(), loopback);
        let local: SocketAddr = "[fe80::1]:9".parse().unwrap();
        assert!(
            scoped(local, None)
                .unwrap_err()
                .to_string()
                .contains("interface")
        );
        let SocketAddr::V6(with) = scoped(local, Some("lo")).unwrap() else {
            panic!("it is an IPv6 address");
        };
        assert_eq!(with.scope_id(), 1);
    }

    #[test]
    fn the_wildcard_is_reached_over_both_families() {
        let socket = crate::endpoint::bind_socket(wildcard(0)).unwrap();
        let port = socket.local_addr().unwrap().port();
        let from = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        from.send_to(b"x", (Ipv4Addr::LOCALHOST, port)).unwrap();
        let (_, seen) = socket.recv_from(&mut [0; 4]).unwrap();
        assert_eq!(seen.ip().to_canonical(), IpAddr::from(Ipv4Addr::LOCALHOST));
    }
}
