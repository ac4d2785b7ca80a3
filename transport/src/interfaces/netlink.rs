//! The kernel's own list of links and addresses, over a netlink socket.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, sendto, socket_with,
};

use crate::wire::network::InterfaceAddress;

// From linux/rtnetlink.h, linux/netlink.h, linux/if_link.h and linux/if_addr.h.
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_DUMP_INTR: u16 = 0x10;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_FLAGS: u16 = 8;
const IFF_UP: u32 = 1;
const IFF_LOOPBACK: u32 = 8;
const IFF_LOWER_UP: u32 = 1 << 16;
const IFA_F_TEMPORARY: u32 = 1;
const IFA_F_DADFAILED: u32 = 8;
const IFA_F_DEPRECATED: u32 = 0x20;
const IFA_F_TENTATIVE: u32 = 0x40;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
/// Links come and go, addresses of both families come and go.
const GROUPS: u32 = 1 | 0x10 | 0x100;

const HEADER: usize = 16;
/// Length of `ifinfomsg`, which begins a message about a link.
const LINK: usize = 16;
/// Length of `ifaddrmsg`, which begins a message about an address.
const ADDRESS: usize = 8;
/// The kernel fills at most so much at once.
const BUFFER: usize = 64 << 10;
/// Attempts at a list that changes while it is read.
const ATTEMPTS: usize = 10;

/// A link as the kernel knows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) name: String,
    pub(super) up: bool,
    pub(super) loopback: bool,
    pub(super) mtu: u32,
    pub(super) addresses: Vec<InterfaceAddress>,
}

/// All links by index, with those of their addresses that are fit for use.
pub(super) fn links() -> std::io::Result<BTreeMap<u32, Link>> {
    let socket = open(0, SocketFlags::CLOEXEC)?;
    let mut links = BTreeMap::new();
    for (request, length) in [(RTM_GETLINK, LINK), (RTM_GETADDR, ADDRESS)] {
        let mut consistent = false;
        for _ in 0..ATTEMPTS {
            let before = links.clone();
            consistent = dump(&socket, request, length, &mut |kind, body| {
                match kind {
                    RTM_NEWLINK => add_link(&mut links, body),
                    RTM_NEWADDR => add_address(&mut links, body),
                    _ => None,
                };
            })?;
            if consistent {
                break;
            }
            links = before;
        }
        if !consistent {
            return Err(std::io::Error::other(
                "the kernel's list of interfaces changes all the time",
            ));
        }
    }
    Ok(links)
}

/// A socket that becomes readable when links or addresses change.
pub(super) fn changes() -> std::io::Result<OwnedFd> {
    open(GROUPS, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
}

// The protocol `NETLINK_ROUTE` has the number 0, which is the default.
fn open(groups: u32, flags: SocketFlags) -> std::io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
    bind(&socket, &SocketAddrNetlink::new(0, groups))?;
    Ok(socket)
}

/// Asks for a list and hands over each entry. False if it changed meanwhile and must be asked for again.
fn dump(
    socket: &OwnedFd,
    request: u16,
    length: usize,
    take: &mut dyn FnMut(u16, &[u8]),
) -> std::io::Result<bool> {
    let mut message = vec![0_u8; HEADER + length];
    message[..4].copy_from_slice(&((HEADER + length) as u32).to_ne_bytes());
    message[4..6].copy_from_slice(&request.to_ne_bytes());
    message[6..8].copy_from_slice(&(NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes());
    sendto(
        socket,
        &message,
        SendFlags::empty(),
        &SocketAddrNetlink::new(0, 0),
    )?;
    let mut buffer = vec![0_u8; BUFFER];
    let mut consistent = true;
    loop {
        let (filled, whole) = match recv(socket, buffer.as_mut_slice(), RecvFlags::TRUNC) {
            Ok((_, length)) => (length.min(BUFFER), length),
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        };
        if whole > BUFFER {
            return Err(std::io::Error::other(
                "the kernel sent more than it may at once",
            ));
        }
        for (kind, flags, body) in messages(&buffer[..filled]) {
            consistent &= flags & NLM_F_DUMP_INTR == 0;
            match kind {
                NLMSG_DONE => return Ok(consistent),
                NLMSG_ERROR => {
                    let code = number(body).unwrap_or(0) as i32;
                    return Err(std::io::Error::from_raw_os_error(code.wrapping_neg()));
                }
                kind => take(kind, body),
            }
        }
    }
}

/// Splits what was received into kind, flags and body of each message. Ends at the first that makes no sense.
fn messages(mut bytes: &[u8]) -> impl Iterator<Item = (u16, u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = number(bytes)? as usize;
        if length < HEADER || length > bytes.len() {
            return None;
        }
        let kind = u16::from_ne_bytes([bytes[4], bytes[5]]);
        let flags = u16::from_ne_bytes([bytes[6], bytes[7]]);
        let body = &bytes[HEADER..length];
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, flags, body))
    })
}

/// The attributes of a message, by kind.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (length, kind) = (bytes.get(..2)?, bytes.get(2..4)?);
        let length = usize::from(u16::from_ne_bytes([length[0], length[1]]));
        let value = bytes.get(4..length)?;
        let kind = u16::from_ne_bytes([kind[0], kind[1]]);
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

fn number(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?))
}

fn add_link(links: &mut BTreeMap<u32, Link>, body: &[u8]) -> Option<()> {
    let index = number(body.get(4..)?)?;
    let flags = number(body.get(8..)?)?;
    let mut link = Link {
        up: flags & IFF_UP != 0 && flags & IFF_LOWER_UP != 0,
        loopback: flags & IFF_LOOPBACK != 0,
        ..Link::default()
    };
    for (kind, value) in attributes(body.get(LINK..)?) {
        match kind {
            IFLA_IFNAME => {
                let end = value.iter().position(|byte| *byte == 0);
                let name = &value[..end.unwrap_or(value.len())];
                link.name = String::from_utf8_lossy(name).into_owned();
            }
            IFLA_MTU => link.mtu = number(value)?,
            _ => {}
        }
    }
    links.insert(index, link);
    Some(())
}

fn add_address(links: &mut BTreeMap<u32, Link>, body: &[u8]) -> Option<()> {
    let (family, prefix, mut flags) = (*body.first()?, *body.get(1)?, u32::from(*body.get(2)?));
    let index = number(body.get(4..)?)?;
    let (mut address, mut local) = (None, None);
    for (kind, value) in attributes(body.get(ADDRESS..)?) {
        match kind {
            IFA_ADDRESS => address = ip(family, value),
            // On a point-to-point link the other one is the peer's.
            IFA_LOCAL => local = ip(family, value),
            IFA_FLAGS => flags = number(value)?,
            _ => {}
        }
    }
    let unfit = IFA_F_DADFAILED | IFA_F_TENTATIVE | IFA_F_DEPRECATED
        // It is another one tomorrow. The bit means "secondary" for IPv4, which is as good as any.
        | if family == AF_INET6 { IFA_F_TEMPORARY } else { 0 };
    if flags & unfit == 0 {
        let ip = local.or(address)?;
        links
            .get_mut(&index)?
            .addresses
            .push(InterfaceAddress { ip, prefix });
    }
    Some(())
}

fn ip(family: u8, bytes: &[u8]) -> Option<IpAddr> {
    match family {
        AF_INET => Some(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?).into()),
        AF_INET6 => Some(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_loopback_is_there_with_its_address() {
        let links = links().unwrap();
        let lo = links.values().find(|link| link.loopback).unwrap();
        assert!(lo.up && lo.mtu >= 1500, "{lo:?}");
        assert!(
            lo.addresses
                .iter()
                .any(|address| address.ip == IpAddr::from(Ipv4Addr::LOCALHOST)),
            "{lo:?}"
        );
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut links = BTreeMap::from([(0, Link::default())]);
            add_link(&mut links, &bytes);
            add_address(&mut links, &bytes);
            for (_, _, body) in messages(&bytes) {
                add_link(&mut links, body);
            }
        }

        #[test]
        fn attributes_end(length in 0_u16..40, kind in any::<u16>()) {
            let mut bytes = vec![0; 64];
            bytes[..2].copy_from_slice(&length.to_ne_bytes());
            bytes[2..4].copy_from_slice(&kind.to_ne_bytes());
            // One of length 0 would never end.
            prop_assert!(attributes(&bytes).count() <= 16);
        }
    }
}
