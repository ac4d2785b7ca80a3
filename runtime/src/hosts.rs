//! Hosts and their slots, as people write them: `a:4,b:4`, or a hostfile; and which machine is meant.
//!
//! Pure: text in, hosts or an error out. A slot is room for one worker.
//!
//! Each machine stands in a list once. As far as it can be told from the text, `Machine` tells one from another: for all
//! lists, for nodes that are there already, and for what is on record. What two hosts that were reached say of themselves
//! is compared by whoever reaches them: see [`ssh`](crate::ssh).
//!
//! ```
//! use kolo_runtime::hosts::{parse_hostfile, parse_hosts};
//!
//! let hosts = parse_hosts("a:4,root@b.example:2,[fd00::2]:1")?;
//! assert_eq!(hosts[1].host, "b.example");
//! assert_eq!(hosts[1].user.as_deref(), Some("root"));
//! assert_eq!(hosts.iter().map(|host| host.slots).sum::<u32>(), 7);
//!
//! let same = parse_hostfile("# the big ones\na slots=4\n\nroot@b.example slots=2\n[fd00::2] slots=1\n")?;
//! assert_eq!(same, hosts);
//! # Ok::<(), kolo_runtime::hosts::HostsError>(())
//! ```

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use kolo_transport::wire::network::is_link_local;

/// The most slots that one host may have.
pub const MAX_SLOTS: u32 = 65_536;

/// The most hosts of one list.
pub const MAX_HOSTS: usize = 16_384;

/// The longest host name, which is what the domain name system allows.
const LONGEST_NAME: usize = 253;

/// A host and how many workers it has room for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HostSlots {
    /// Who to log in as, if that was written.
    pub user: Option<String>,
    /// Its name or address; an IPv6 address without brackets.
    pub host: String,
    /// Room for so many workers; at least 1.
    pub slots: u32,
}

impl HostSlots {
    /// A host without a user.
    pub fn new(host: impl Into<String>, slots: u32) -> Self {
        Self {
            user: None,
            host: host.into(),
            slots,
        }
    }

    /// Host and user without the slots, as people write it: `root@b`, `[fd00::2]`.
    pub fn destination(&self) -> String {
        let bracketed = self.host.contains(':');
        let host = if bracketed {
            format!("[{}]", self.host)
        } else {
            self.host.clone()
        };
        match &self.user {
            Some(user) => format!("{user}@{host}"),
            None => host,
        }
    }

    /// Whether both are the same host, by name or address, whatever their users and slots.
    pub fn is_same_host(&self, other: &Self) -> bool {
        self.machine("") == other.machine("")
    }

    /// Whether this is a name of it.
    pub(crate) fn is_called(&self, name: &str) -> bool {
        self.machine("") == Machine::new(name, "")
    }

    /// Which machine it is; `own` is what this one is called, if that matters.
    pub(crate) fn machine(&self, own: &str) -> Machine {
        Machine::new(&self.host, own)
    }
}

/// What this machine calls itself.
pub(crate) fn own_name() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}

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

impl fmt::Display for HostSlots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.destination(), self.slots)
    }
}

/// Where in what was given something stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A line of a hostfile, from 1.
    Line(usize),
    /// An entry of a list, from 1.
    Entry(usize),
    /// An entry of a list of ranks' hosts, from 1.
    Rank(usize),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(number) => write!(f, "line {number}"),
            Self::Entry(number) | Self::Rank(number) => write!(f, "entry {number}"),
        }
    }
}

impl Place {
    fn form(self) -> &'static str {
        match self {
            Self::Line(_) => {
                "`HOST slots=N` on each line, like `a slots=4`, `root@b slots=2` or `[fd00::2] slots=1`; blank lines \
                 and what follows a `#` are skipped"
            }
            Self::Entry(_) => {
                "HOST:SLOTS,HOST:SLOTS,... like `a:4,b:4`, `root@b:2` or `[fd00::2]:1`"
            }
            Self::Rank(_) => "HOST,HOST,... in rank order, like `a,b,a,c`",
        }
    }
}

/// Why a list of hosts can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HostsError {
    /// An entry is not written as it must be. Write it as the message says.
    #[error("{place}, `{}`, {problem}; expected {}", .entry.escape_debug(), .place.form())]
    Syntax {
        /// Which.
        place: Place,
        /// What stands there.
        entry: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A machine stands there twice. Write it once, with all its slots.
    #[error(
        "`{host}` in {first} and `{again}` in {second} are one machine; write each machine once, with all its slots"
    )]
    Duplicate {
        /// The host, as written first.
        host: String,
        /// As written the second time.
        again: String,
        /// Where it was first.
        first: Place,
        /// Where it was again.
        second: Place,
    },
    /// There is no host.
    #[error("there is no host in it; expected {}", .0.form())]
    Empty(Place),
    /// There are too many hosts.
    #[error("there are more than {MAX_HOSTS} hosts; at most so many are allowed")]
    TooMany,
}

/// Reads `a:4,b:4`: hosts with their slots, in order. An IPv6 address stands in brackets, `USER@` may precede a host.
///
/// # Errors
///
/// [`HostsError`] with the number of the entry.
pub fn parse_hosts(text: &str) -> Result<Vec<HostSlots>, HostsError> {
    List::of("").hosts(text)
}

/// Like [`parse_hosts`], where the slots don't matter: `a,root@b,[fd00::2]:1`. A host without slots has one.
///
/// # Errors
///
/// [`HostsError`] with the number of the entry.
pub fn parse_host_names(text: &str) -> Result<Vec<HostSlots>, HostsError> {
    List::of("").names(text)
}

fn parse_entries(
    mut hosts: List,
    text: &str,
    default: Option<&str>,
) -> Result<Vec<HostSlots>, HostsError> {
    if text.trim().is_empty() {
        return Err(HostsError::Empty(Place::Entry(1)));
    }
    for (number, entry) in (1..).zip(text.split(',')) {
        let entry = entry.trim();
        let place = Place::Entry(number);
        let wrong = |problem: String| HostsError::Syntax {
            place,
            entry: entry.to_owned(),
            problem,
        };
        if entry.is_empty() {
            return Err(wrong("is empty".to_owned()));
        }
        // In `[::1]` and in `::1` the last colon is none before slots.
        let (host, slots) = entry
            .rsplit_once(':')
            .filter(|(host, _)| !host.contains('[') || host.ends_with(']'))
            .or_else(|| default.map(|slots| (entry, slots)))
            .ok_or_else(|| wrong("has no number of slots".to_owned()))?;
        let host = parse_host(host, slots).map_err(wrong)?;
        hosts.add(place, host)?;
    }
    Ok(hosts.hosts)
}

/// Reads a hostfile: `HOST slots=N` on each line, as Horovod and Open MPI write it. Blank lines are skipped, and what
/// follows a `#`.
///
/// # Errors
///
/// [`HostsError`] with the number of the line, or of both lines for a duplicate.
pub fn parse_hostfile(text: &str) -> Result<Vec<HostSlots>, HostsError> {
    List::of("").file(text)
}

fn parse_lines(mut hosts: List, text: &str) -> Result<Vec<HostSlots>, HostsError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    for (number, line) in (1..).zip(text.lines()) {
        let entry = line.split('#').next().unwrap_or_default().trim();
        if entry.is_empty() {
            continue;
        }
        let place = Place::Line(number);
        let wrong = |problem: String| HostsError::Syntax {
            place,
            entry: entry.to_owned(),
            problem,
        };
        let (host, rest) = entry
            .split_once(char::is_whitespace)
            .ok_or_else(|| wrong("has no `slots=N`".to_owned()))?;
        let (key, value) = rest
            .split_once('=')
            .ok_or_else(|| wrong("has no `slots=N`".to_owned()))?;
        if key.trim() != "slots" {
            return Err(wrong(format!(
                "has the key `{}`, which is not known; `slots` is the only one",
                key.trim().escape_debug()
            )));
        }
        let value = value.trim();
        if let Some((_, more)) = value.split_once(char::is_whitespace) {
            return Err(wrong(format!(
                "goes on with `{}` after its slots",
                more.trim().escape_debug()
            )));
        }
        let host = parse_host(host, value).map_err(wrong)?;
        hosts.add(place, host)?;
    }
    if hosts.hosts.is_empty() {
        return Err(HostsError::Empty(Place::Line(1)));
    }
    Ok(hosts.hosts)
}

/// A list of hosts that is being read.
pub(crate) struct List {
    /// What this machine is called.
    own: String,
    hosts: Vec<HostSlots>,
    places: HashMap<Machine, (String, Place)>,
}

impl List {
    /// Of hosts as they are seen from the machine of this name.
    pub(crate) fn of(own: &str) -> Self {
        Self {
            own: own.to_owned(),
            hosts: Vec::new(),
            places: HashMap::new(),
        }
    }

    /// See [`parse_hosts`].
    pub(crate) fn hosts(self, text: &str) -> Result<Vec<HostSlots>, HostsError> {
        parse_entries(self, text, None)
    }

    /// See [`parse_host_names`].
    pub(crate) fn names(self, text: &str) -> Result<Vec<HostSlots>, HostsError> {
        parse_entries(self, text, Some("1"))
    }

    /// See [`parse_hostfile`].
    pub(crate) fn file(self, text: &str) -> Result<Vec<HostSlots>, HostsError> {
        parse_lines(self, text)
    }

    /// `a,b,a,c`: the host of every rank, in rank order, each by the name that it has first.
    pub(crate) fn ranks(mut self, text: &str) -> Result<Vec<String>, HostsError> {
        (1..)
            .zip(text.split(','))
            .map(|(number, entry)| {
                let place = Place::Rank(number);
                let entry = entry.trim();
                let host = if entry.is_empty() {
                    Err("is empty".to_owned())
                } else {
                    parse_host(entry, "1")
                };
                let host = host.map_err(|problem| HostsError::Syntax {
                    place,
                    entry: entry.to_owned(),
                    problem,
                })?;
                let named = self.places.entry(host.machine(&self.own));
                Ok(named.or_insert((host.host, place)).0.clone())
            })
            .collect()
    }

    fn add(&mut self, place: Place, host: HostSlots) -> Result<(), HostsError> {
        if self.hosts.len() == MAX_HOSTS {
            return Err(HostsError::TooMany);
        }
        match self.places.entry(host.machine(&self.own)) {
            Entry::Vacant(free) => free.insert((host.destination(), place)),
            Entry::Occupied(known) => {
                let (first, first_place) = known.get().clone();
                return Err(HostsError::Duplicate {
                    host: first,
                    again: host.destination(),
                    first: first_place,
                    second: place,
                });
            }
        };
        self.hosts.push(host);
        Ok(())
    }
}

fn parse_host(destination: &str, slots: &str) -> Result<HostSlots, String> {
    let (user, host) = match destination.rsplit_once('@') {
        Some((user, host)) if is_user(user) => (Some(user.to_owned()), host),
        Some((user, _)) => {
            return Err(format!(
                "has the user `{}`, which is none; allowed are letters, digits and `_.-+\\`, not `-` at the start",
                user.escape_debug()
            ));
        }
        None => (None, destination),
    };
    let host = match host
        .strip_prefix('[')
        .map(|rest| rest.strip_suffix(']').unwrap_or(rest))
    {
        Some(inner) if is_ipv6(inner) => inner,
        None if is_name(host) => host,
        _ if host.contains(':') && !host.contains('[') && is_ipv6(host) => {
            return Err("has an IPv6 address without brackets".to_owned());
        }
        _ => return Err("has a host that is neither a name nor an address".to_owned()),
    };
    if slots.is_empty() || !slots.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("has slots that are no whole number".to_owned());
    }
    let slots = match slots.parse() {
        Ok(0) => {
            return Err(
                "has no slots; give at least 1, or leave the host out if it is not to be used"
                    .to_owned(),
            );
        }
        Ok(slots) if slots <= MAX_SLOTS => slots,
        _ => return Err(format!("has more slots than {MAX_SLOTS}")),
    };
    Ok(HostSlots {
        user,
        host: host.to_owned(),
        slots,
    })
}

/// What may stand for a host: nothing that a shell or ssh could take for anything else.
fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= LONGEST_NAME
        && !text.starts_with(['-', '.'])
        && text
            .chars()
            .all(|c| c.is_alphanumeric() || matches!(c, '_' | '.' | '-'))
}

/// An address, with the interface of a link-local one: `fe80::1%eth0`.
fn is_ipv6(text: &str) -> bool {
    let (address, zone) = match text.split_once('%') {
        Some((address, zone)) => (address, Some(zone)),
        None => (text, None),
    };
    address.parse::<Ipv6Addr>().is_ok() && zone.is_none_or(is_name)
}

fn is_user(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 256
        && !text.starts_with('-')
        && text
            .chars()
            .all(|c| c.is_alphanumeric() || matches!(c, '_' | '.' | '-' | '+' | '\\' | '@'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(user: Option<&str>, host: &str, slots: u32) -> HostSlots {
        HostSlots {
            user: user.map(str::to_owned),
            ..HostSlots::new(host, slots)
        }
    }

    #[test]
    fn lists_are_read_in_order() {
        assert_eq!(
            parse_hosts(" b:2, a-1.example:1,worker_0:3 ").unwrap(),
            [
                host(None, "b", 2),
                host(None, "a-1.example", 1),
                host(None, "worker_0", 3)
            ]
        );
        assert_eq!(
            parse_hosts("root@a:1,10.0.0.2:2,me@[fd00::2]:3,[fe80::1%eth0]:1").unwrap(),
            [
                host(Some("root"), "a", 1),
                host(None, "10.0.0.2", 2),
                host(Some("me"), "fd00::2", 3),
                host(None, "fe80::1%eth0", 1)
            ]
        );
    }

    #[test]
    fn hosts_need_no_slots_where_slots_do_not_matter() {
        let expected = parse_hosts("a:1,me@b:1,[fd00::2]:1,c:4").unwrap();
        let read = parse_host_names("a, me@b,[fd00::2],c:4").unwrap();
        assert_eq!(read, expected);
        for wrong in ["", "a,", "a:x", "a b", "-oProxyCommand=x"] {
            assert!(parse_host_names(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_printed_is_read_again() {
        for text in ["a:1", "root@b.example:2", "[fd00::2]:3", "me@[::1]:65536"] {
            assert_eq!(parse_hosts(text).unwrap()[0].to_string(), text);
        }
    }

    // Horovod's test of hostfiles (S/test_run.py), and what Horovod can't read.
    #[test]
    fn hostfiles_are_read() {
        let text = "172.31.32.7 slots=8\n172.31.33.9 slots=8\n";
        let hosts = parse_hostfile(text).unwrap();
        assert_eq!(
            hosts,
            [host(None, "172.31.32.7", 8), host(None, "172.31.33.9", 8)]
        );
        let text = "\u{feff}# all of them\r\n\r\n  a slots=2   # the small one\r\n\tb\tslots = 4\r\n#c slots=1\r\nme@[fd00::1] slots=1";
        assert_eq!(
            parse_hostfile(text).unwrap(),
            [
                host(None, "a", 2),
                host(None, "b", 4),
                host(Some("me"), "fd00::1", 1)
            ]
        );
    }

    #[test]
    fn bad_lists_name_the_entry_and_what_is_allowed() {
        for (text, part) in [
            ("a:1,,b:1", "entry 2, ``, is empty"),
            ("a:1,", "entry 2, ``, is empty"),
            ("a", "entry 1, `a`, has no number of slots"),
            ("[::1]", "has no number of slots"),
            ("a:", "slots that are no whole number"),
            ("a:-1", "slots that are no whole number"),
            ("a:+1", "slots that are no whole number"),
            ("a:1.5", "slots that are no whole number"),
            ("b:1,a:0", "entry 2, `a:0`, has no slots; give at least 1"),
            ("a:65537", "has more slots than 65536"),
            ("a:99999999999999999999", "has more slots than 65536"),
            (":2", "neither a name nor an address"),
            ("a b:2", "neither a name nor an address"),
            ("-oProxyCommand=x:2", "neither a name nor an address"),
            ("$(x):2", "neither a name nor an address"),
            ("[a]:2", "neither a name nor an address"),
            ("fd00::2:4", "has an IPv6 address without brackets"),
            ("@a:2", "has the user ``, which is none"),
            ("-l@a:2", "has the user `-l`, which is none"),
            ("a;b@c:2", "has the user `a;b`, which is none"),
        ] {
            let error = parse_hosts(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
            assert!(
                error.contains("expected HOST:SLOTS,HOST:SLOTS,... like `a:4,b:4`"),
                "{error}"
            );
        }
        for text in ["", "  "] {
            let error = parse_hosts(text).unwrap_err().to_string();
            assert!(error.starts_with("there is no host in it"), "{error}");
        }
    }

    #[test]
    fn bad_hostfiles_name_the_line_and_what_is_allowed() {
        for (text, part) in [
            ("a slots=2\nb\n", "line 2, `b`, has no `slots=N`"),
            ("\n\nb 4", "line 3, `b 4`, has no `slots=N`"),
            ("b:4", "line 1, `b:4`, has no `slots=N`"),
            (
                "a slots=2 max_slots=4",
                "line 1, `a slots=2 max_slots=4`, goes on with `max_slots=4` after its slots",
            ),
            (
                "a max_slots=4",
                "has the key `max_slots`, which is not known; `slots` is the only one",
            ),
            (
                "# x\na slots=0",
                "line 2, `a slots=0`, has no slots; give at least 1",
            ),
            ("a slots=", "slots that are no whole number"),
            ("a slots=x", "slots that are no whole number"),
            ("a\u{1b} slots=1", "line 1, `a\\u{1b} slots=1`, has a host"),
            ("fd00::2 slots=1", "an IPv6 address without brackets"),
        ] {
            let error = parse_hostfile(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
            assert!(error.contains("expected `HOST slots=N`"), "{error}");
        }
        for text in ["", "\n# a slots=2\n"] {
            let error = parse_hostfile(text).unwrap_err();
            assert_eq!(error, HostsError::Empty(Place::Line(1)));
        }
    }

    #[test]
    fn duplicates_are_refused_with_both_places() {
        let error = parse_hostfile("a slots=2\n\nb slots=1\nA slots=2").unwrap_err();
        assert_eq!(
            error.to_string(),
            "`a` in line 1 and `A` in line 4 are one machine; write each machine once, with all its slots"
        );
        for text in [
            "a:2,a:2",
            "a:1,root@a:1",
            "a:1,a.:1",
            "[fd00::0:2]:1,[fd00::2]:1",
            "[::ffff:10.0.0.1]:1,10.0.0.1:1",
            "localhost:1,127.0.0.1:1",
        ] {
            let error = parse_hosts(text).unwrap_err().to_string();
            let (first, second) = text.split_once(',').unwrap();
            let host = |entry: &str| entry.rsplit_once(':').unwrap().0.to_owned();
            assert!(error.contains("in entry 2 are one machine"), "{error}");
            let (first, second) = (host(first), host(second));
            // Addresses are told as they were written.
            assert!(error.contains(&format!("`{first}` in entry 1")), "{error}");
            assert!(error.contains(&format!("`{second}` in entry 2")), "{error}");
        }
        let own = |text: &str| List::of("Me.example").hosts(text).map(|hosts| hosts.len());
        for text in ["me:1,localhost:1", "me.example.:1,root@[::1]:1"] {
            assert!(
                matches!(own(text), Err(HostsError::Duplicate { .. })),
                "{text}"
            );
        }
        assert_eq!(own("me.other:1,localhost:1,127.0.0.2:1"), Ok(3));
        assert!(
            List::of("me")
                .file("me slots=1\n127.0.1.1 slots=1")
                .is_err()
        );
    }

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

    #[test]
    fn ranks_are_on_machines_and_not_on_spellings() {
        let ranks = |text: &str| List::of("me").ranks(text);
        assert_eq!(ranks("a,A,b,a.").unwrap(), ["a", "a", "b", "a"]);
        assert_eq!(
            ranks("[fd00::2],root@a,[fd00:0::2],a").unwrap(),
            ["fd00::2", "a", "fd00::2", "a"]
        );
        assert_eq!(ranks("localhost,me,127.0.0.1").unwrap(), ["localhost"; 3]);
        for (text, part) in [
            ("", "entry 1, ``, is empty"),
            ("a,,b", "entry 2, ``, is empty"),
            (
                "a:2",
                "`a:2`, has a host that is neither a name nor an address",
            ),
            ("a b", "neither a name nor an address"),
            ("::1", "an IPv6 address without brackets"),
        ] {
            let error = ranks(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
            assert!(error.ends_with("like `a,b,a,c`"), "{error}");
        }
    }

    #[test]
    fn there_is_a_limit() {
        let many: Vec<String> = (0..=MAX_HOSTS)
            .map(|number| format!("h{number}:1"))
            .collect();
        assert_eq!(parse_hosts(&many[1..].join(",")).unwrap().len(), MAX_HOSTS);
        assert_eq!(
            parse_hosts(&many.join(",")).unwrap_err(),
            HostsError::TooMany
        );
    }
}
