//! From what was seen to what is used.

use std::collections::{BTreeMap, BTreeSet};

use kolo_wire::{Interface, NetworkChoice, NetworkReport, Refusal, RefusalKind};

use super::candidates::Family;
use super::choose::{self, Scored};
use super::network::{Listen, Network};
use super::report;
use super::seen::{Resolver, Way};
use super::words::listed;

impl Resolver<'_> {
    fn listen(&self, site: usize, candidate: usize) -> Listen {
        Listen {
            ip: self.ip(site, candidate),
            interface: self.sites[site].name(candidate).to_owned(),
        }
    }

    /// A network in which every node has one address: `chosen` has a candidate of each.
    fn one_each(&self, chosen: &[usize], scored: &[Scored]) -> Network {
        let listens: Vec<Listen> = (0..).zip(chosen).map(|(s, c)| self.listen(s, *c)).collect();
        let mut names = listens.iter().map(|listen| &listen.interface);
        let first = names.next().cloned().unwrap_or_default();
        let choice = if names.all(|name| *name == first) {
            NetworkChoice::Interface(first)
        } else {
            NetworkChoice::PerNode
        };
        let set = chosen.iter().copied().enumerate().collect();
        let mut network = Network::new(choice, report::rows(self, &set, scored));
        for (site, listen) in self.sites.iter().zip(listens) {
            let node = site.host.node;
            network.names.insert(node, listen.interface.clone());
            network.listen.insert(node, vec![listen]);
        }
        network
    }

    /// The best of these, each with a candidate of every node.
    fn best_of(&self, found: impl Iterator<Item = (Scored, Vec<usize>)>) -> Option<Network> {
        let (scored, chosen): (Vec<Scored>, Vec<Vec<usize>>) = found.unzip();
        let best = choose::best(&scored)?;
        Some(self.one_each(&chosen[best], &scored))
    }

    /// The best of some ways to `target`.
    fn best_way<'a>(&self, target: usize, ways: impl Iterator<Item = Way<'a>>) -> Option<Way<'a>> {
        let score = |way: Way<'a>| {
            let interface = self.sites[target].interface(way.candidate);
            let family = self.family(target, way.candidate);
            let one = std::iter::once(interface);
            (way, scored(&interface.name, family, way.rtt_us, one))
        };
        let (ways, scores): (Vec<Way<'a>>, Vec<Scored>) = ways.map(score).unzip();
        choose::best(&scores).map(|best| ways[best])
    }

    /// What it is worth that `links`, which lead to all nodes, go over one interface of each node, and the candidates; `None` if
    /// one of them does not. `name` says which interface of a node that is.
    fn over<'a>(
        &self,
        name: impl Fn(usize) -> &'a str,
        family: Family,
        links: impl Iterator<Item = (usize, usize)>,
        counts: impl Fn(&Way<'_>) -> bool,
    ) -> Option<(Scored, Vec<usize>)> {
        let mut chosen: Vec<Option<usize>> = vec![None; self.sites.len()];
        let mut worst = 0;
        for (prober, target) in links {
            // The nearest of its addresses counts; the lowest, which does not vary, is used.
            let (mut nearest, mut lowest) = (u64::MAX, None);
            for way in self.ways(prober, target) {
                if way.source != name(prober)
                    || self.sites[target].name(way.candidate) != name(target)
                    || self.family(target, way.candidate) != family
                    || !counts(&way)
                {
                    continue;
                }
                nearest = nearest.min(way.rtt_us);
                let found = (self.ip(target, way.candidate), way.candidate);
                lowest = Some(lowest.map_or(found, |lowest| found.min(lowest)));
            }
            let (_, candidate) = lowest?;
            worst = worst.max(nearest);
            if *chosen[target].get_or_insert(candidate) != candidate {
                return None;
            }
        }
        let chosen: Vec<usize> = chosen.into_iter().collect::<Option<_>>()?;
        let sites = self.sites.iter().zip(&chosen);
        let interfaces = sites.map(|(site, candidate)| site.interface(*candidate));
        Some((scored(name(0), family, worst, interfaces), chosen))
    }

    fn nothing(&self, problem: String) -> NetworkReport {
        let rows = report::rows(self, &BTreeSet::new(), &[]);
        let mut report = Network::new(NetworkChoice::None, rows).report;
        report.problem = Some(Refusal::new(RefusalKind::Network, problem));
        report
    }
}

fn scored<'a>(
    name: &str,
    family: Family,
    rtt_us: u64,
    interfaces: impl Iterator<Item = &'a Interface>,
) -> Scored {
    let mut scored = Scored {
        name: name.to_owned(),
        family,
        rtt_us,
        mtu: u32::MAX,
        speed: u32::MAX,
    };
    for interface in interfaces {
        scored.mtu = scored.mtu.min(interface.mtu);
        scored.speed = scored.speed.min(interface.speed.unwrap_or(0));
    }
    scored
}

/// One node, whose interfaces were asked for by name. It has candidates, since a site without is refused.
pub(super) fn alone(resolver: &Resolver<'_>) -> Option<Network> {
    let site = &resolver.sites[0];
    resolver.best_of(site.fit().map(|candidate| {
        let interface = site.interface(candidate);
        let family = resolver.family(0, candidate);
        let one = std::iter::once(interface);
        (scored(&interface.name, family, 0, one), vec![candidate])
    }))
}

/// The best interface that has the same name on every node and is on every link of the ring.
pub(super) fn common(resolver: &Resolver<'_>) -> Option<Network> {
    let (prober, target) = resolver.ring().next()?;
    let first: BTreeSet<(&str, Family)> = resolver
        .ways(prober, target)
        .filter(|way| way.matched)
        .map(|way| (way.source, resolver.family(target, way.candidate)))
        .collect();
    // A name must be possible on every node: a selection by host is not looked at by name alone.
    resolver.best_of(first.into_iter().filter_map(|(name, family)| {
        resolver.over(|_| name, family, resolver.ring(), |way| way.matched)
    }))
}

/// One interface on each node, with different names, such that all reach each other over them.
pub(super) fn by_node(resolver: &Resolver<'_>) -> Option<Network> {
    let site = &resolver.sites[0];
    let first: BTreeSet<(&str, Family)> = site
        .fit()
        .map(|candidate| (site.name(candidate), resolver.family(0, candidate)))
        .collect();
    resolver.best_of(first.into_iter().filter_map(|(name, family)| {
        // What the first node reaches from there.
        let mut names = vec![name];
        for target in 1..resolver.sites.len() {
            let ways = resolver.ways(0, target).filter(|way| {
                way.source == name && resolver.family(target, way.candidate) == family
            });
            let best = resolver.best_way(target, ways)?;
            names.push(resolver.sites[target].name(best.candidate));
        }
        resolver.over(|site| names[site], family, resolver.pairs(), |_| true)
    }))
}

/// For each pair of nodes the best way between them.
pub(super) fn by_pair(resolver: &Resolver<'_>) -> Result<Network, NetworkReport> {
    let ways: BTreeMap<(usize, usize), Way<'_>> = resolver
        .pairs()
        .filter_map(|(prober, target)| {
            let best = resolver.best_way(target, resolver.ways(prober, target))?;
            Some(((prober, target), best))
        })
        .collect();
    let apart: Vec<(usize, usize)> = resolver
        .pairs()
        // The one makes links, and the other asks for them.
        .filter(|(a, b)| a < b && !(ways.contains_key(&(*a, *b)) && ways.contains_key(&(*b, *a))))
        .collect();
    if !apart.is_empty() {
        return Err(unconnected(resolver, &apart));
    }
    let chosen = ways
        .iter()
        .map(|((_, target), way)| (*target, way.candidate))
        .collect();
    let rows = report::rows(resolver, &chosen, &[]);
    let mut network = Network::new(NetworkChoice::PerPair, rows);
    for ((prober, target), way) in &ways {
        let node = |site: usize| resolver.sites[site].host.node;
        let there = resolver.listen(*target, way.candidate);
        let pair = (node(*prober), node(*target));
        network.pairs.insert(pair, there.ip);
        // Both ends need a socket: where it is reached, and where it comes from.
        let own = Listen {
            ip: way.from,
            interface: way.source.to_owned(),
        };
        for (node, listen) in [(pair.1, there), (pair.0, own)] {
            let all = network.listen.entry(node).or_default();
            if !all.contains(&listen) {
                all.push(listen);
            }
        }
    }
    for all in network.listen.values_mut() {
        all.sort_unstable_by_key(|listen| (Family::of(listen.ip), listen.ip));
    }
    Ok(network)
}

/// The report of nodes that nothing connects.
fn unconnected(resolver: &Resolver<'_>, apart: &[(usize, usize)]) -> NetworkReport {
    let name = |site: usize| resolver.sites[site].host.hostname.as_str();
    let pairs: Vec<String> = apart
        .iter()
        .map(|(a, b)| format!("{} and {}", name(*a), name(*b)))
        .collect();
    let which = if resolver.selection.is_empty() {
        "no network interface"
    } else {
        "none of the interfaces that were asked for"
    };
    let ports = resolver.sites.iter().map(|it| it.network.listen.port());
    let ports: BTreeSet<u16> = ports.collect();
    let ports: Vec<String> = ports.iter().map(ToString::to_string).collect();
    resolver.nothing(format!(
        "{which} connects {}. Look at routes and firewalls (the daemons listen on UDP port {}, workers on any), or name \
         interfaces that connect all hosts with --interfaces; `kolo interfaces --no-cache` tries again",
        listed(&pairs),
        listed(&ports),
    ))
}

/// The report of nodes that no common name connects, and that are too many to try all pairs of them.
pub(super) fn too_many(resolver: &Resolver<'_>) -> NetworkReport {
    resolver.nothing(format!(
        "no network interface has one name on all {} nodes and connects each to the next, and for so many nodes other \
         combinations are not tried. Give the interfaces of one network the same name on all nodes, mend what the table shows, \
         or use fewer nodes",
        resolver.sites.len()
    ))
}
