//! From what was seen to what is used.

use std::collections::{BTreeMap, BTreeSet};

use kolo_wire::{NetworkChoice, NetworkReport, Refusal, RefusalKind};

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

    fn network(
        &self,
        choice: NetworkChoice,
        chosen: &BTreeSet<(usize, usize)>,
        scored: &[Scored],
        problem: Option<Refusal>,
    ) -> Network {
        let rows = report::rows(self, chosen, scored);
        Network {
            report: NetworkReport {
                choice,
                rows,
                cached: false,
                took_ms: 0,
                problem,
            },
            listen: BTreeMap::new(),
            names: BTreeMap::new(),
            pairs: BTreeMap::new(),
        }
    }

    /// A network in which every node has one address: `chosen` has a candidate of each.
    fn one_each(&self, choice: NetworkChoice, chosen: &[usize], scored: &[Scored]) -> Network {
        let set = chosen.iter().copied().enumerate().collect();
        let mut network = self.network(choice, &set, scored, None);
        for (index, candidate) in chosen.iter().enumerate() {
            let node = self.sites[index].host.node;
            let listen = self.listen(index, *candidate);
            network.names.insert(node, listen.interface.clone());
            network.listen.insert(node, vec![listen]);
        }
        network
    }
}

/// One node, whose interfaces were asked for by name.
pub(super) fn alone(resolver: &Resolver<'_>) -> Network {
    let site = &resolver.sites[0];
    let scored: Vec<(usize, Scored)> = site
        .fit()
        .map(|candidate| {
            let interface = site.interface(candidate);
            let scored = Scored {
                name: interface.name.clone(),
                family: resolver.family(0, candidate),
                rtt_us: 0,
                mtu: interface.mtu,
                speed: interface.speed.unwrap_or(0),
            };
            (candidate, scored)
        })
        .collect();
    let scores: Vec<Scored> = scored.iter().map(|(_, scored)| scored.clone()).collect();
    match choose::best(&scores) {
        Some(best) => resolver.one_each(
            NetworkChoice::Interface(scores[best].name.clone()),
            &[scored[best].0],
            &scores,
        ),
        // A site without candidates is refused before.
        None => resolver.network(NetworkChoice::Registered, &BTreeSet::new(), &[], None),
    }
}

/// The best interface that has the same name on every node and is on every link of the ring.
pub(super) fn common(resolver: &Resolver<'_>) -> Option<Network> {
    type Links = BTreeMap<(String, Family), (u64, Vec<Option<usize>>)>;
    let sites = resolver.sites;
    let mut found: Links = BTreeMap::new();
    for (place, (prober, target)) in resolver.ring().enumerate() {
        let mut here: BTreeMap<(&str, Family), (u64, usize)> = BTreeMap::new();
        for way in resolver.ways(prober, target).filter(|way| way.matched) {
            let key = (
                sites[target].name(way.candidate),
                resolver.family(target, way.candidate),
            );
            // The nearest of its addresses; the lowest of those, which does not vary, is used.
            let best = here.entry(key).or_insert((way.rtt_us, way.candidate));
            best.0 = best.0.min(way.rtt_us);
            if resolver.ip(target, way.candidate) < resolver.ip(target, best.1) {
                best.1 = way.candidate;
            }
        }
        if place == 0 {
            for (name, family) in here.keys() {
                let key = ((*name).to_owned(), *family);
                found.insert(key, (0, vec![None; sites.len()]));
            }
        }
        found.retain(
            |(name, family), (worst, chosen)| match here.get(&(name.as_str(), *family)) {
                Some((rtt, candidate)) => {
                    *worst = (*worst).max(*rtt);
                    chosen[target] = Some(*candidate);
                    true
                }
                None => false,
            },
        );
        if found.is_empty() {
            return None;
        }
    }
    let mut scored = Vec::with_capacity(found.len());
    let mut addresses: Vec<Vec<usize>> = Vec::with_capacity(found.len());
    for ((name, family), (rtt_us, chosen)) in found {
        let chosen: Vec<usize> = chosen.into_iter().collect::<Option<_>>()?;
        let (mut mtu, mut speed) = (u32::MAX, u32::MAX);
        for (site, candidate) in sites.iter().zip(&chosen) {
            let interface = site.interface(*candidate);
            mtu = mtu.min(interface.mtu);
            speed = speed.min(interface.speed.unwrap_or(0));
        }
        scored.push(Scored {
            name,
            family,
            rtt_us,
            mtu,
            speed,
        });
        addresses.push(chosen);
    }
    let best = choose::best(&scored)?;
    let choice = NetworkChoice::Interface(scored[best].name.clone());
    // The names must be possible on every node: a selection by host is not looked at by name alone.
    Some(resolver.one_each(choice, &addresses[best], &scored))
}

/// One interface on each node, with different names, such that all reach each other over them.
pub(super) fn by_node(resolver: &Resolver<'_>) -> Option<Network> {
    let count = resolver.sites.len();
    let mut all: Vec<(Scored, Vec<usize>)> = Vec::new();
    for family in Family::ALL {
        let first: BTreeSet<&str> = resolver.sites[0]
            .fit()
            .filter(|candidate| resolver.family(0, *candidate) == family)
            .map(|candidate| resolver.sites[0].name(candidate))
            .collect();
        for name in first {
            // What the first node reaches from there.
            let Some(names) = names_from(resolver, name, family) else {
                continue;
            };
            let mut chosen: Vec<Option<usize>> = vec![None; count];
            let mut worst = 0;
            let whole = (0..count).all(|prober| {
                (0..count).filter(|target| *target != prober).all(|target| {
                    let ways = resolver.ways(prober, target).filter(|way| {
                        way.source == names[prober]
                            && resolver.sites[target].name(way.candidate) == names[target]
                            && resolver.family(target, way.candidate) == family
                    });
                    let Some(way) = ways.min_by_key(|way| resolver.ip(target, way.candidate))
                    else {
                        return false;
                    };
                    worst = worst.max(way.rtt_us);
                    *chosen[target].get_or_insert(way.candidate) == way.candidate
                })
            });
            let Some(chosen) = chosen.into_iter().collect::<Option<Vec<usize>>>() else {
                continue;
            };
            if !whole {
                continue;
            }
            let interfaces = || {
                resolver
                    .sites
                    .iter()
                    .zip(&chosen)
                    .map(|(site, candidate)| site.interface(*candidate))
            };
            let scored = Scored {
                name: name.to_owned(),
                family,
                rtt_us: worst,
                mtu: interfaces()
                    .map(|interface| interface.mtu)
                    .min()
                    .unwrap_or(0),
                speed: interfaces()
                    .map(|interface| interface.speed.unwrap_or(0))
                    .min()
                    .unwrap_or(0),
            };
            all.push((scored, chosen));
        }
    }
    let scores: Vec<Scored> = all.iter().map(|(scored, _)| scored.clone()).collect();
    let best = choose::best(&scores)?;
    let chosen = &all[best].1;
    let mut names = resolver
        .sites
        .iter()
        .zip(chosen)
        .map(|(site, candidate)| site.name(*candidate));
    let first = names.next()?;
    let choice = if names.all(|name| name == first) {
        NetworkChoice::Interface(first.to_owned())
    } else {
        NetworkChoice::PerNode
    };
    Some(resolver.one_each(choice, chosen, &scores))
}

/// For every node the interface that the first one reaches from its interface `name`; `None` if there is a node without.
fn names_from<'a>(resolver: &Resolver<'a>, name: &'a str, family: Family) -> Option<Vec<&'a str>> {
    let mut names = vec![name];
    for target in 1..resolver.sites.len() {
        let scored: Vec<Scored> = resolver
            .ways(0, target)
            .filter(|way| way.source == name && resolver.family(target, way.candidate) == family)
            .map(|way| score(resolver, target, &way))
            .collect();
        let best = &scored[choose::best(&scored)?].name;
        let site = &resolver.sites[target];
        let index = site.fit().find(|candidate| site.name(*candidate) == best)?;
        names.push(site.name(index));
    }
    Some(names)
}

fn score(resolver: &Resolver<'_>, target: usize, way: &Way<'_>) -> Scored {
    let interface = resolver.sites[target].interface(way.candidate);
    Scored {
        name: interface.name.clone(),
        family: resolver.family(target, way.candidate),
        rtt_us: way.rtt_us,
        mtu: interface.mtu,
        speed: interface.speed.unwrap_or(0),
    }
}

/// For each pair of nodes the best way between them.
pub(super) fn by_pair(resolver: &Resolver<'_>) -> Result<Network, NetworkReport> {
    let count = resolver.sites.len();
    let mut ways: BTreeMap<(usize, usize), Way<'_>> = BTreeMap::new();
    for prober in 0..count {
        for target in (0..count).filter(|target| *target != prober) {
            let all: Vec<Way<'_>> = resolver.ways(prober, target).collect();
            let scored: Vec<Scored> = all.iter().map(|way| score(resolver, target, way)).collect();
            if let Some(best) = choose::best(&scored) {
                ways.insert((prober, target), all[best]);
            }
        }
    }
    let apart: Vec<(usize, usize)> = (0..count)
        .flat_map(|a| (a + 1..count).map(move |b| (a, b)))
        // The one makes links, and the other asks for them.
        .filter(|(a, b)| !ways.contains_key(&(*a, *b)) || !ways.contains_key(&(*b, *a)))
        .collect();
    if !apart.is_empty() {
        return Err(unconnected(resolver, &apart));
    }
    let chosen = ways
        .iter()
        .map(|((_, target), way)| (*target, way.candidate))
        .collect();
    let mut network = resolver.network(NetworkChoice::PerPair, &chosen, &[], None);
    for ((prober, target), way) in &ways {
        let (by, of) = (
            resolver.sites[*prober].host.node,
            resolver.sites[*target].host.node,
        );
        network
            .pairs
            .insert((by, of), resolver.ip(*target, way.candidate));
        // Both ends need a socket: where it is reached, and where it comes from.
        let own = Listen {
            ip: way.from,
            interface: way.source.to_owned(),
        };
        for (node, listen) in [(of, resolver.listen(*target, way.candidate)), (by, own)] {
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
    let ports: BTreeSet<u16> = resolver
        .sites
        .iter()
        .map(|site| site.network.listen.port())
        .collect();
    let ports: Vec<String> = ports.iter().map(ToString::to_string).collect();
    let problem = Refusal::new(
        RefusalKind::Network,
        format!(
            "{which} connects {}. Look at routes and firewalls (the daemons listen on UDP port {}, workers on any), or name \
             interfaces that connect all hosts with --interfaces; `kolo interfaces --no-cache` tries again",
            listed(&pairs),
            listed(&ports),
        ),
    );
    resolver
        .network(NetworkChoice::None, &BTreeSet::new(), &[], Some(problem))
        .report
}

/// The report of nodes that no common name connects, and that are too many to try all pairs of them.
pub(super) fn too_many(resolver: &Resolver<'_>) -> NetworkReport {
    let count = resolver.sites.len();
    let problem = Refusal::new(
        RefusalKind::Network,
        format!(
            "no network interface has one name on all {count} nodes and connects each to the next, and for so many nodes other \
             combinations are not tried. Give the interfaces of one network the same name on all nodes, mend what the table shows, \
             or use fewer nodes"
        ),
    );
    resolver
        .network(NetworkChoice::None, &BTreeSet::new(), &[], Some(problem))
        .report
}
