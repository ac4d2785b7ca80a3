//! The addresses of some nodes as probers saw them, and the ways that follow from that.

use std::collections::BTreeMap;
use std::net::IpAddr;

use kolo_wire::InterfaceSelection;

use super::candidates::{Family, Site};

/// A prober's finding about an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Seen {
    /// The node that was meant has answered.
    Reached {
        rtt_us: u64,
        /// Where the prober's packets came from, as the node saw them.
        from: IpAddr,
        /// The prober's own interface that has this address; `None` if none has: it was translated on the way.
        source: Option<String>,
        /// The node's interface on which they arrived, as far as it knows.
        at: Option<String>,
    },
    /// It has not, or trying makes no sense: why, with the name of the prober.
    Failed(String),
}

/// By prober and target: what was seen of the target's candidates.
pub(super) type Seens = BTreeMap<(usize, usize), Vec<(usize, Seen)>>;

/// Everything that is known.
#[derive(Debug, Clone, Copy)]
pub(super) struct Resolver<'a> {
    pub(super) sites: &'a [Site],
    pub(super) seen: &'a Seens,
    pub(super) selection: &'a InterfaceSelection,
}

/// A way from one site to another: both ends have an interface, and nothing translates between them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Way<'a> {
    /// The target's address.
    pub(super) candidate: usize,
    /// The prober's interface and address.
    pub(super) source: &'a str,
    pub(super) from: IpAddr,
    pub(super) rtt_us: u64,
    /// Whether it goes from an interface to the one of the same name.
    pub(super) matched: bool,
}

impl<'a> Resolver<'a> {
    pub(super) fn seen(&self, prober: usize, target: usize) -> &'a [(usize, Seen)] {
        self.seen.get(&(prober, target)).map_or(&[], Vec::as_slice)
    }

    pub(super) fn ways(&self, prober: usize, target: usize) -> impl Iterator<Item = Way<'a>> + '_ {
        let sites = self.sites;
        let host = &sites[prober].host;
        let selected = self.selection.for_node(host.node, &host.hostname);
        self.seen(prober, target)
            .iter()
            .filter_map(move |(candidate, seen)| {
                let Seen::Reached {
                    rtt_us,
                    from,
                    source: Some(source),
                    at,
                } = seen
                else {
                    return None;
                };
                if !selected.is_empty() && !selected.contains(source) {
                    return None;
                }
                let name = sites[target].name(*candidate);
                Some(Way {
                    candidate: *candidate,
                    source,
                    from: *from,
                    rtt_us: *rtt_us,
                    matched: source == name && at.as_ref().is_none_or(|at| at == name),
                })
            })
    }

    pub(super) fn family(&self, site: usize, candidate: usize) -> Family {
        self.sites[site].candidates[candidate].family
    }

    pub(super) fn ip(&self, site: usize, candidate: usize) -> IpAddr {
        self.sites[site].candidates[candidate].ip
    }

    /// The links of the ring that an interface of every node must be on.
    pub(super) fn ring(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let count = self.sites.len();
        (0..count).map(move |prober| (prober, (prober + 1) % count))
    }

    /// All nodes with all others.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let count = self.sites.len();
        (0..count).flat_map(move |a| (0..count).filter(move |b| *b != a).map(move |b| (a, b)))
    }

    /// The links of the ring that this name and family is not on.
    pub(super) fn gaps(&self, name: &str, family: Family) -> impl Iterator<Item = (usize, usize)> {
        self.ring().filter(move |(prober, target)| {
            !self.ways(*prober, *target).any(|way| {
                way.matched && way.source == name && self.family(*target, way.candidate) == family
            })
        })
    }
}
