//! Hosts and their slots, as people write them: `a:4,b:4`, or a hostfile.
//!
//! Pure: text in, hosts or an error out. A slot is room for one worker.
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
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

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
        self.key() == other.key()
    }

    /// What two entries of the same host have in common: names do not care for case, IPv6 addresses have many
    /// forms, and another user is no other host.
    fn key(&self) -> String {
        match self.host.parse::<IpAddr>() {
            Ok(address) => address.to_canonical().to_string(),
            Err(_) => self.host.trim_end_matches('.').to_ascii_lowercase(),
        }
    }
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
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(number) => write!(f, "line {number}"),
            Self::Entry(number) => write!(f, "entry {number}"),
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
    /// A host stands there twice. Write it once, with all its slots.
    #[error(
        "the host {host} is in {first} and again in {second}; write each host once, with all its slots"
    )]
    Duplicate {
        /// The host, as written the second time.
        host: String,
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
    parse_entries(text, None)
}

/// Like [`parse_hosts`], where the slots don't matter: `a,root@b,[fd00::2]:1`. A host without slots has one.
///
/// # Errors
///
/// [`HostsError`] with the number of the entry.
pub fn parse_host_names(text: &str) -> Result<Vec<HostSlots>, HostsError> {
    parse_entries(text, Some("1"))
}

fn parse_entries(text: &str, default: Option<&str>) -> Result<Vec<HostSlots>, HostsError> {
    if text.trim().is_empty() {
        return Err(HostsError::Empty(Place::Entry(1)));
    }
    let mut hosts = Collected::default();
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
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut hosts = Collected::default();
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

#[derive(Default)]
struct Collected {
    hosts: Vec<HostSlots>,
    places: HashMap<String, Place>,
}

impl Collected {
    fn add(&mut self, place: Place, host: HostSlots) -> Result<(), HostsError> {
        if self.hosts.len() == MAX_HOSTS {
            return Err(HostsError::TooMany);
        }
        if let Some(first) = self.places.insert(host.key(), place) {
            return Err(HostsError::Duplicate {
                host: host.destination(),
                first,
                second: place,
            });
        }
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
            "the host A is in line 1 and again in line 4; write each host once, with all its slots"
        );
        for text in [
            "a:2,a:2",
            "a:1,root@a:1",
            "a:1,a.:1",
            "[fd00::0:2]:1,[fd00::2]:1",
            "[::ffff:10.0.0.1]:1,10.0.0.1:1",
        ] {
            let error = parse_hosts(text).unwrap_err().to_string();
            assert!(
                error.contains("is in entry 1 and again in entry 2"),
                "{error}"
            );
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
