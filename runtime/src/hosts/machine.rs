//! Which machine a name or an address means.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use kolo_transport::wire::network::is_link_local;

/// Which machine a name or an address means, as far as that can be told from how it is written: names do not care for case and
/// a last dot, addresses have many forms, and another user is no other machine. A short name and a full one may be two.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Machine {
    /// This one, by `localhost`, by its own name or by an address that each machine has for itself. Others of the loopback's
    /// addresses may be other hosts to their user, as they are to Horovod.
    Here,
    /// An address; one that is valid on a link alone with the link.
    Address(IpAddr, Option<String>),
    /// A name, in lower case.
    Name(String),
}

impl Machine {
    pub(crate) fn new(host: &str, own: &str) -> Self {
        let (address, zone) = match host.split_once('%') {
            Some((address, zone)) => (address, Some(zone)),
            None => (host, None),
        };
        let address = address.parse::<IpAddr>().ok();
        if let Some(ip) = address.or_else(|| ipv4(host).map(IpAddr::V4)) {
            let ip = ip.to_canonical();
            if is_own_loopback(ip) {
                return Self::Here;
            }
            let zone = zone.filter(|_| is_link_local(ip)).map(str::to_owned);
            return Self::Address(ip, zone);
        }
        let plain = |name: &str| name.trim_end_matches('.').to_lowercase();
        let (name, own) = (plain(host), plain(own));
        let is_own = !own.is_empty()
            && (name == own || own.split_once('.').is_some_and(|(short, _)| name == short));
        if is_own
            || matches!(name.as_str(), "localhost" | "localhost.localdomain")
            || name.ends_with(".localhost")
        {
            Self::Here
        } else {
            Self::Name(name)
        }
    }

    /// Whether it is an address of the loopback that its user takes for another host.
    pub(crate) fn is_host_by_wish(&self) -> bool {
        matches!(self, Self::Address(ip, _) if ip.is_loopback())
    }
}

/// As a name for a folder.
impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Here => f.write_str("localhost"),
            Self::Address(ip, None) => write!(f, "{ip}"),
            Self::Address(ip, Some(zone)) => write!(f, "{ip}%{zone}"),
            Self::Name(name) => f.write_str(name),
        }
    }
}

/// Whether an address of the loopback means this machine to everybody. Debian gives a machine's own name `127.0.1.1`.
pub(crate) fn is_own_loopback(ip: IpAddr) -> bool {
    ip == Ipv4Addr::LOCALHOST || ip == Ipv4Addr::new(127, 0, 1, 1) || ip == Ipv6Addr::LOCALHOST
}

/// An IPv4 address in the forms that name resolution takes: `127.1`, `0x7f.0.0.1`, `2130706433`.
fn ipv4(text: &str) -> Option<Ipv4Addr> {
    let number = |part: &str| {
        let (digits, radix) = match part.as_bytes() {
            [b'0', b'x' | b'X', ..] => (&part[2..], 16),
            [b'0', _, ..] => (&part[1..], 8),
            _ => (part, 10),
        };
        let is_number = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_number.then(|| u32::from_str_radix(digits, radix).ok())?
    };
    let parts: Vec<u32> = text.split('.').map(number).collect::<Option<_>>()?;
    let (last, first) = parts.split_last()?;
    if first.len() > 3 || first.iter().any(|part| *part > 255) {
        return None;
    }
    let bits = 32 - 8 * first.len() as u32;
    if bits < 32 && *last >> bits != 0 {
        return None;
    }
    let first = first.iter().zip([24, 16, 8]);
    Some(Ipv4Addr::from_bits(
        first.fold(*last, |sum, (part, shift)| sum | (part << shift)),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_machine_has_many_names() {
        let same: [&[&str]; 9] = [
            &["a", "A", "a.", "A."],
            &["b.example", "B.Example."],
            &["Ärger", "ärger"],
            &[
                "10.0.0.1",
                "::ffff:10.0.0.1",
                "::FFFF:a00:1",
                "10.1",
                "0xa.0.0.1",
                "012.0.0.1",
                "167772161",
            ],
            &["fd00::2", "FD00:0:0::2", "fd00:0000::0002", "fd00::2%eth0"],
            &["fe80::1%eth0", "FE80:0::1%eth0"],
            &["fe80::1%eth1", "fe80::0:1%eth1"],
            &["127.0.0.2", "127.2"],
            &[
                "localhost",
                "LocalHost.",
                "localhost.localdomain",
                "x.localhost",
                "127.0.0.1",
                "127.1",
                "127.0.1.1",
                "::1",
                "0:0::1",
                "::ffff:127.0.0.1",
                "me",
                "ME.",
                "me.example",
                "Me.Example.",
            ],
        ];
        let machine = |name: &str| Machine::new(name, "me.example");
        for (number, names) in same.iter().enumerate() {
            for name in *names {
                assert_eq!(machine(name), machine(names[0]), "{name} {}", names[0]);
                assert_eq!(machine(name) == Machine::Here, number == 8, "{name}");
            }
            for other in &same[number + 1..] {
                assert_ne!(machine(names[0]), machine(other[0]));
            }
        }
        for other in [
            "me.other",
            "mee",
            "1.2.3.4.5",
            "10.0.0.256",
            "10.0.0.",
            "0x",
            "1e3",
            "08.1",
        ] {
            assert!(matches!(machine(other), Machine::Name(_)), "{other}");
        }
        // Without its name it is known by `localhost` alone.
        assert_eq!(Machine::new("me", ""), Machine::Name("me".to_owned()));
        assert_ne!(Machine::new("", ""), Machine::Here);
        // A full name may be that of another machine which has the same short one.
        assert_ne!(Machine::new("me.example", "me"), Machine::Here);
    }
}
