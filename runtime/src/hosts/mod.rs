//! Hosts and their slots, as people write them: `a:4,b:4`, or a hostfile; and which machine is meant.
//!
//! Pure: text in, hosts or an error out. A slot is room for one worker. A host with 0 slots is listed and not used, as
//! scripts that look for hosts print it.
//!
//! Each machine stands in a list once. As far as it can be told from the text, `Machine` tells one from another: for all
//! lists, for nodes that are there already, and for what is on record. What two hosts that were reached say of themselves
//! is compared by whoever reaches them: see [`ssh`](crate::ssh).
//!
//! ```
//! use kolo_runtime::hosts::parse_hosts;
//!
//! let hosts = parse_hosts("a:4,root@b.example:2,[fd00::2]:1")?;
//! assert_eq!(hosts[1].host, "b.example");
//! assert_eq!(hosts[1].user.as_deref(), Some("root"));
//! assert_eq!(hosts.iter().map(|host| host.slots).sum::<u32>(), 7);
//! # Ok::<(), kolo_runtime::hosts::HostsError>(())
//! ```

mod machine;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::net::Ipv6Addr;

pub(crate) use self::machine::{Machine, is_own_loopback};

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
    /// Room for so many workers. A host without any stands in the list and is not used.
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
    /// A line of what a discovery script prints, from 1.
    Output(usize),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(number) | Self::Output(number) => write!(f, "line {number}"),
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
            Self::Output(_) => {
                "HOST:SLOTS on each line, like `a:4` or `[fd00::2]:1`, or HOST alone with --slots-per-host; blank lines and what \
                 follows a `#` are skipped"
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
    /// No host has a slot. Give at least one host at least one slot.
    #[error("no host in it has a slot; at least one must have one, and those with 0 are not used")]
    NoSlots,
    /// There are too many hosts.
    #[error("there are more than {MAX_HOSTS} hosts; at most so many are allowed")]
    TooMany,
}

impl HostsError {
    fn syntax(place: Place, entry: &str, problem: String) -> Self {
        Self::Syntax {
            place,
            entry: entry.to_owned(),
            problem,
        }
    }
}

/// Reads `a:4,b:4`: hosts with their slots, in order. An IPv6 address stands in brackets, `USER@` may precede a host.
///
/// # Errors
///
/// [`HostsError`] with the number of the entry.
pub fn parse_hosts(text: &str) -> Result<Vec<HostSlots>, HostsError> {
    List::of("").hosts(text)
}

/// `HOST:SLOTS`, or `HOST` if there is a usual number.
fn parse_entry(entry: &str, default: Option<&str>) -> Result<HostSlots, String> {
    if entry.is_empty() {
        return Err("is empty".to_owned());
    }
    // In `[::1]` and in `::1` the last colon is none before slots.
    let (host, slots) = entry
        .rsplit_once(':')
        .filter(|(host, _)| !host.contains('[') || host.ends_with(']'))
        .or_else(|| default.map(|slots| (entry, slots)))
        .ok_or_else(|| "has no number of slots".to_owned())?;
    parse_host(host, slots)
}

/// `HOST slots=N`.
fn parse_line(entry: &str) -> Result<HostSlots, String> {
    let (host, rest) = entry
        .split_once(char::is_whitespace)
        .ok_or("has no `slots=N`")?;
    let (key, value) = rest.split_once('=').ok_or("has no `slots=N`")?;
    if key.trim() != "slots" {
        return Err(format!(
            "has the key `{}`, which is not known; `slots` is the only one",
            key.trim().escape_debug()
        ));
    }
    let value = value.trim();
    if let Some((_, more)) = value.split_once(char::is_whitespace) {
        return Err(format!(
            "goes on with `{}` after its slots",
            more.trim().escape_debug()
        ));
    }
    parse_host(host, value)
}

/// The lines that say something, with their numbers; what follows a `#` says nothing.
fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = (1..).zip(text.lines());
    let lines = lines.map(|(number, line)| (number, line.split('#').next().unwrap_or_default()));
    lines
        .map(|(number, line)| (number, line.trim()))
        .filter(|(_, line)| !line.is_empty())
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
        self.entries(text, None)
    }

    /// As [`parse_hosts`], where the slots don't matter: `a,root@b,[fd00::2]:1`. A host without slots has one.
    pub(crate) fn names(self, text: &str) -> Result<Vec<HostSlots>, HostsError> {
        self.entries(text, Some("1"))
    }

    fn entries(self, text: &str, default: Option<&str>) -> Result<Vec<HostSlots>, HostsError> {
        if text.trim().is_empty() {
            return Err(HostsError::Empty(Place::Entry(1)));
        }
        let entries = (1..).zip(text.split(',').map(str::trim));
        self.read(Place::Entry, entries, |entry| parse_entry(entry, default))?
            .done()
    }

    /// A hostfile: `HOST slots=N` on each line, as Horovod and Open MPI write it. Blank lines are skipped, and what follows a `#`.
    pub(crate) fn file(self, text: &str) -> Result<Vec<HostSlots>, HostsError> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let list = self.read(Place::Line, lines(text), parse_line)?;
        if list.hosts.is_empty() {
            return Err(HostsError::Empty(Place::Line(1)));
        }
        list.done()
    }

    /// What a discovery script prints, as Horovod has it: `HOST` or `HOST:SLOTS` on each line. There may be none at the moment.
    pub(crate) fn discovered(
        self,
        text: &str,
        slots: Option<u32>,
    ) -> Result<Vec<HostSlots>, HostsError> {
        let slots = slots.map(|slots| slots.to_string());
        let parse = |entry: &str| parse_entry(entry, slots.as_deref());
        Ok(self.read(Place::Output, lines(text), parse)?.hosts)
    }

    /// `a,b,a,c`: the host of every rank, in rank order, each by the name that it has first.
    pub(crate) fn ranks(mut self, text: &str) -> Result<Vec<String>, HostsError> {
        (1..)
            .zip(text.split(',').map(str::trim))
            .map(|(number, entry)| {
                let place = Place::Rank(number);
                let host = if entry.is_empty() {
                    Err("is empty".to_owned())
                } else {
                    parse_host(entry, "1")
                };
                let host = host.map_err(|problem| HostsError::syntax(place, entry, problem))?;
                let named = self.places.entry(host.machine(&self.own));
                Ok(named.or_insert((host.host, place)).0.clone())
            })
            .collect()
    }

    fn read<'a>(
        mut self,
        place: fn(usize) -> Place,
        entries: impl Iterator<Item = (usize, &'a str)>,
        parse: impl Fn(&str) -> Result<HostSlots, String>,
    ) -> Result<Self, HostsError> {
        for (number, entry) in entries {
            let place = place(number);
            let host = parse(entry);
            self.add(
                place,
                host.map_err(|problem| HostsError::syntax(place, entry, problem))?,
            )?;
        }
        Ok(self)
    }

    fn done(self) -> Result<Vec<HostSlots>, HostsError> {
        if self.hosts.iter().all(|host| host.slots == 0) {
            return Err(HostsError::NoSlots);
        }
        Ok(self.hosts)
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
