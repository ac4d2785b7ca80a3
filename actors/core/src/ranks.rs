//! Ranks: who is which number in the world, on its node, and across nodes.
//!
//! The rules are Horovod's for uneven hosts. Nodes are taken in the order in which they were first seen.
//! - *local rank*: order of registration on the node; *local size*: members on the node.
//! - *cross rank*: number of earlier nodes that have this local rank too; *cross size*: number of nodes
//!   that have it.
//!
//! World ranks are given, not made: they stay as they are even if nodes interleave.

use std::collections::{BTreeMap, BTreeSet};

use kolo_wire::Member;
use kolo_wire::counted::Counted;
use kolo_wire::ids::{CrossRank, Incarnation, LocalRank, NodeId, Rank, Slot};

/// The largest world that kolo builds: its table of members must fit in one frame.
pub const MAX_WORLD_SIZE: u32 = 16_384;

/// How many missing ranks a message lists.
const LISTED: usize = 8;

/// One member's numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankInfo<K = NodeId> {
    /// Key of its node.
    pub node: K,
    /// Hostname of its node, for people.
    pub hostname: String,
    /// World rank.
    pub rank: Rank,
    /// Members in all.
    pub size: u32,
    /// Number on its node.
    pub local_rank: LocalRank,
    /// Members on its node.
    pub local_size: u32,
    /// Number of its node among those that have its local rank.
    pub cross_rank: CrossRank,
    /// Number of nodes that have its local rank.
    pub cross_size: u32,
}

impl RankInfo<NodeId> {
    /// As a member of a generation that fills `slot` and has no address yet.
    #[must_use]
    pub fn member(&self, slot: Slot) -> Member {
        Member {
            rank: self.rank,
            local_rank: self.local_rank,
            local_size: self.local_size,
            cross_rank: self.cross_rank,
            cross_size: self.cross_size,
            slot,
            node: self.node,
            hostname: self.hostname.clone(),
            address: None,
            incarnation: Incarnation::FIRST,
        }
    }
}

/// Why members can't be ranked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegistrationError {
    /// Two members have one rank. Give each its own.
    #[error(
        "rank {rank} is registered twice, on {first} and on {second}; every rank must be registered once"
    )]
    DuplicateRank {
        /// The rank.
        rank: Rank,
        /// Hostname of the first registration.
        first: String,
        /// Hostname of the second.
        second: String,
    },
    /// The ranks are not `0..n`. Register the missing ones, or number the members without gaps.
    #[error(
        "{registered} members are registered, the highest rank is {highest}, and {missing} ranks are missing: {}; \
         ranks must be exactly 0..{registered}",
        listed(first_missing, *missing)
    )]
    Gap {
        /// Number of members.
        registered: u32,
        /// The highest rank.
        highest: Rank,
        /// How many ranks below it nobody has.
        missing: u64,
        /// The first few of them.
        first_missing: Vec<Rank>,
    },
    /// Nobody registered. A group has at least one member.
    #[error("no member is registered; a group has at least 1")]
    Empty,
    /// A node gave two hostnames. A node has one for as long as it runs.
    #[error("one node is registered as {first} and as {second}; a node has one hostname")]
    Renamed {
        /// The first hostname.
        first: String,
        /// The other.
        second: String,
    },
    /// More members than kolo can rank.
    #[error("more than {MAX_WORLD_SIZE} members; a group has at most {MAX_WORLD_SIZE}")]
    TooLarge,
}

fn listed(first: &[Rank], count: u64) -> String {
    let mut text = first
        .iter()
        .map(Rank::to_string)
        .collect::<Vec<_>>()
        .join(", ");
    if count > first.len() as u64 {
        text.push_str(", ...");
    }
    text
}

#[derive(Debug, Clone)]
struct RegisteredNode<K> {
    key: K,
    hostname: String,
    members: u32,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    node: usize,
    local: u32,
}

/// Collects members and ranks them.
///
/// `K` tells nodes apart: [`NodeId`] in a cluster, since two nodes may have one hostname.
#[derive(Debug, Clone)]
pub struct Registration<K = NodeId> {
    nodes: Vec<RegisteredNode<K>>,
    by_key: BTreeMap<K, usize>,
    by_rank: BTreeMap<Rank, Place>,
}

impl<K> Default for Registration<K> {
    fn default() -> Self {
        Self {
            nodes: Vec::new(),
            by_key: BTreeMap::new(),
            by_rank: BTreeMap::new(),
        }
    }
}

impl<K: Clone + Ord> Registration<K> {
    /// Nobody yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A member with world rank `rank` is on node `node`. The order of calls gives the local ranks.
    ///
    /// # Errors
    ///
    /// [`RegistrationError::DuplicateRank`], [`RegistrationError::Renamed`], [`RegistrationError::TooLarge`].
    /// The registration is then as it was.
    pub fn register(
        &mut self,
        node: K,
        hostname: &str,
        rank: Rank,
    ) -> Result<(), RegistrationError> {
        if let Some(place) = self.by_rank.get(&rank) {
            return Err(RegistrationError::DuplicateRank {
                rank,
                first: self.nodes[place.node].hostname.clone(),
                second: hostname.to_owned(),
            });
        }
        if self.by_rank.len() >= MAX_WORLD_SIZE as usize {
            return Err(RegistrationError::TooLarge);
        }
        let index = if let Some(&index) = self.by_key.get(&node) {
            let known = &self.nodes[index];
            if known.hostname != hostname {
                return Err(RegistrationError::Renamed {
                    first: known.hostname.clone(),
                    second: hostname.to_owned(),
                });
            }
            index
        } else {
            self.nodes.push(RegisteredNode {
                key: node.clone(),
                hostname: hostname.to_owned(),
                members: 0,
            });
            self.by_key.insert(node, self.nodes.len() - 1);
            self.nodes.len() - 1
        };
        let local = self.nodes[index].members;
        self.nodes[index].members += 1;
        self.by_rank.insert(rank, Place { node: index, local });
        Ok(())
    }

    /// Everybody is registered: the numbers of each, in rank order.
    ///
    /// # Errors
    ///
    /// [`RegistrationError::Empty`] or [`RegistrationError::Gap`].
    pub fn finalize(&self) -> Result<Vec<RankInfo<K>>, RegistrationError> {
        let Some((&highest, _)) = self.by_rank.last_key_value() else {
            return Err(RegistrationError::Empty);
        };
        let size = self.by_rank.len() as u32;
        if highest.0 != size - 1 {
            return Err(RegistrationError::Gap {
                registered: size,
                highest,
                missing: u64::from(highest.0) + 1 - u64::from(size),
                first_missing: self.first_missing(),
            });
        }
        // In order of nodes: how many earlier nodes have each local rank, and how many in all.
        let mut cross_sizes = Vec::new();
        let mut cross_ranks = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            let members = node.members as usize;
            if cross_sizes.len() < members {
                cross_sizes.resize(members, 0_u32);
            }
            cross_ranks.push(cross_sizes[..members].to_vec());
            for count in &mut cross_sizes[..members] {
                *count += 1;
            }
        }
        let info = |(&rank, place): (&Rank, &Place)| {
            let node = &self.nodes[place.node];
            let local = place.local as usize;
            RankInfo {
                node: node.key.clone(),
                hostname: node.hostname.clone(),
                rank,
                size,
                local_rank: LocalRank(place.local),
                local_size: node.members,
                cross_rank: CrossRank(cross_ranks[place.node][local]),
                cross_size: cross_sizes[local],
            }
        };
        Ok(self.by_rank.iter().map(info).collect())
    }

    fn first_missing(&self) -> Vec<Rank> {
        let mut missing = Vec::new();
        let mut expected = 0_u32;
        for rank in self.by_rank.keys() {
            while expected < rank.0 && missing.len() < LISTED {
                missing.push(Rank(expected));
                expected += 1;
            }
            if missing.len() == LISTED {
                break;
            }
            expected = rank.0.saturating_add(1);
        }
        missing
    }
}

/// Why hosts can't take the members that are asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AssignmentError {
    /// There are too few slots. Ask for fewer, or give more hosts or slots.
    #[error(
        "requested at least {}, available: {} on {}",
        Counted(*requested, "worker"),
        Counted(*available, "slot"),
        Counted(*hosts, "host")
    )]
    NotEnoughSlots {
        /// The least that is asked for.
        requested: u32,
        /// What there is.
        available: u64,
        /// On how many hosts.
        hosts: usize,
    },
    /// The limits exclude each other. Give a maximum that is at least the minimum.
    #[error(
        "requested at least {min} and at most {max} workers; the maximum must be at least the minimum"
    )]
    Limits {
        /// The minimum.
        min: u32,
        /// The maximum.
        max: u32,
    },
    /// A group of nobody is asked for. Ask for at least 1.
    #[error("requested 0 workers; a group has at least 1")]
    Zero,
    /// A host is given twice, which would give two members one local rank. Give it once, with the sum of slots.
    #[error("host {host} is given twice; give each host once, with all its slots")]
    DuplicateHost {
        /// The host.
        host: String,
    },
    /// There are more slots than kolo can rank. Give a maximum.
    #[error(
        "the hosts have {available} slots and a group has at most {MAX_WORLD_SIZE} members; \
         give a maximum that is not above it"
    )]
    TooLarge {
        /// Slots that would be filled.
        available: u64,
    },
}

/// Fills hosts in the order given, all slots of one before the next, up to `max` members.
///
/// This is Horovod's `get_host_assignments`. A host may have 0 slots. The last host that gets members may
/// be cut in the middle; its local size is what it got. The result is in rank order, and the keys of nodes are
/// indices into `hosts`.
///
/// # Errors
///
/// [`AssignmentError`]: what is asked for is not there, or makes no sense.
pub fn host_assignments(
    hosts: &[(String, u32)],
    min: u32,
    max: Option<u32>,
) -> Result<Vec<RankInfo<usize>>, AssignmentError> {
    if min == 0 || max == Some(0) {
        return Err(AssignmentError::Zero);
    }
    if let Some(max) = max.filter(|max| *max < min) {
        return Err(AssignmentError::Limits { min, max });
    }
    let mut seen = BTreeSet::new();
    for (host, _) in hosts {
        if !seen.insert(host.as_str()) {
            return Err(AssignmentError::DuplicateHost { host: host.clone() });
        }
    }
    let available: u64 = hosts.iter().map(|(_, slots)| u64::from(*slots)).sum();
    if available < u64::from(min) {
        return Err(AssignmentError::NotEnoughSlots {
            requested: min,
            available,
            hosts: hosts.len(),
        });
    }
    let world = max.map_or(available, |max| available.min(u64::from(max)));
    if world > u64::from(MAX_WORLD_SIZE) {
        return Err(AssignmentError::TooLarge { available: world });
    }
    let places = hosts
        .iter()
        .enumerate()
        .flat_map(|(index, (host, slots))| (0..*slots).map(move |_| (index, host)))
        .take(world as usize);
    let mut registration = Registration::new();
    for (rank, (index, host)) in (0..).map(Rank).zip(places) {
        registration
            .register(index, host, rank)
            .expect("ranks are counted up, and a host's index has one name");
    }
    Ok(registration
        .finalize()
        .expect("ranks are counted up from 0 and the world is not empty"))
}

#[cfg(test)]
mod tests;
