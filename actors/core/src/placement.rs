//! Gang placement: which node takes how many workers, all or nothing.
//!
//! Both strategies are functions of a snapshot of the cluster and give the same answer for the same
//! snapshot. Nodes are given, chosen and listed in order of registration, so ranks, which are handed out
//! contiguously per node in that order, are stable too.

use std::collections::BTreeMap;
use std::fmt;

use kolo_wire::ids::NodeId;
use kolo_wire::{Milli, NodeShare, Placement, Refusal, RefusalKind, Resources, Shortage};

use crate::ranks::MAX_WORLD_SIZE;

/// Most workers of a job on one node: the request to start them must fit in one frame.
pub const MAX_PER_NODE: u32 = 1024;

/// How many nodes an error describes one by one.
const DESCRIBED: usize = 8;

/// What a node offers at the moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// The node.
    pub node: NodeId,
    /// Its hostname, for messages.
    pub hostname: String,
    /// What nobody holds.
    pub available: Resources,
    /// What it would offer if no job ran.
    pub total: Resources,
}

/// Workers on one node. Never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// The node.
    pub node: NodeId,
    /// How many workers go there.
    pub workers: u32,
}

/// Room on one node that is too small.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeShortage {
    /// The node.
    pub node: NodeId,
    /// Its hostname.
    pub hostname: String,
    /// Workers that would fit.
    pub room: u32,
    /// Workers that were wanted there: what was left to place, or the slots of a host.
    pub wanted: u32,
    /// What lacks for the wanted ones.
    pub shortages: Vec<Shortage>,
}

impl fmt::Display for NodeShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({}) has room for {}",
            self.hostname, self.node, self.room
        )?;
        for (index, shortage) in self.shortages.iter().enumerate() {
            f.write_str(if index == 0 { "; " } else { ", " })?;
            write!(f, "{shortage}")?;
        }
        Ok(())
    }
}

/// Why a group can't be placed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// A group of nobody, or of more than kolo can rank. Ask for 1 to [`MAX_WORLD_SIZE`] workers.
    #[error("{given} workers are requested; allowed are 1 to {MAX_WORLD_SIZE}")]
    Size {
        /// What was asked for, in words.
        given: String,
    },
    /// The resources are not there. Wait for other jobs, add nodes, or ask for less.
    #[error("{0}")]
    Unplaceable(Box<Unplaceable>),
    /// A node that was asked for by its id is not there, or has too little room. Wait for other jobs, or ask for less.
    #[error("{0}")]
    Layout(String),
}

impl From<PlacementError> for Refusal {
    fn from(error: PlacementError) -> Self {
        let kind = match error {
            PlacementError::Size { .. } => RefusalKind::Invalid,
            PlacementError::Unplaceable(_) | PlacementError::Layout(_) => RefusalKind::Unplaceable,
        };
        Self::new(kind, error.to_string())
    }
}

/// What is missing where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unplaceable {
    /// What was asked for.
    pub placement: Placement,
    /// What each worker holds.
    pub per_worker: Resources,
    /// Nodes in the cluster.
    pub nodes: usize,
    /// For [`Placement::Pack`], workers that fit; for [`Placement::Spread`], hosts with enough room.
    pub available: u64,
    /// The same if no other job ran.
    pub available_when_idle: u64,
    /// The nodes that have too little, in order of registration; the first few.
    pub short: Vec<NodeShortage>,
    /// Nodes with too little that are not in `short`.
    pub more_short: usize,
    /// On how many nodes each resource lacks.
    pub by_resource: BTreeMap<String, usize>,
    /// Whether a node has the resources for more than [`MAX_PER_NODE`] workers, which is the most it takes.
    pub is_capped: bool,
}

impl fmt::Display for Unplaceable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let needed = match self.placement {
            Placement::Pack { workers } => {
                write!(
                    f,
                    "requested {workers} workers with {} each, available is room for {} on {} nodes",
                    self.per_worker, self.available, self.nodes
                )?;
                u64::from(workers)
            }
            Placement::Spread { hosts, slots } => {
                write!(
                    f,
                    "requested {hosts} distinct nodes with {slots} workers of {} each, available are {} of {} nodes",
                    self.per_worker, self.available, self.nodes
                )?;
                u64::from(hosts)
            }
        };
        for short in &self.short {
            write!(f, "; {short}")?;
        }
        if self.more_short > 0 {
            write!(f, "; and {} more nodes (too little of", self.more_short)?;
            for (index, (resource, nodes)) in self.by_resource.iter().enumerate() {
                f.write_str(if index == 0 { " " } else { ", " })?;
                write!(f, "{resource} on {nodes} nodes in all")?;
            }
            f.write_str(")")?;
        }
        if self.is_capped {
            write!(f, "; a node takes at most {MAX_PER_NODE} workers of a job")?;
        }
        if self.available_when_idle >= needed {
            f.write_str("; it fits when other jobs have ended")
        } else {
            write!(
                f,
                "; without other jobs it would be {}: add nodes or ask for less",
                self.available_when_idle
            )
        }
    }
}

/// Places a group on the nodes of `offers`, which are alive and in order of registration.
///
/// [`Placement::Pack`] takes the fewest nodes: the roomiest first, and as the last one the smallest that holds
/// the rest. [`Placement::Spread`] takes the nodes with the least room that is enough, so that large gaps
/// stay large. Ties go to the node that registered first. The shares are in order of registration.
///
/// # Errors
///
/// [`PlacementError`].
pub fn place(
    placement: Placement,
    per_worker: &Resources,
    offers: &[Offer],
) -> Result<Vec<Share>, PlacementError> {
    let workers = placement
        .workers()
        .filter(|workers| (1..=MAX_WORLD_SIZE).contains(workers))
        .ok_or_else(|| PlacementError::Size {
            given: match placement {
                Placement::Pack { workers } => workers.to_string(),
                Placement::Spread { hosts, slots } => format!("{hosts} times {slots}"),
            },
        })?;
    let room: Vec<u32> = offers
        .iter()
        .map(|offer| room_on(&offer.available, per_worker))
        .collect();
    let chosen = match placement {
        Placement::Pack { .. } => pack(workers, &room),
        Placement::Spread { hosts, slots } => spread(hosts, slots, &room),
    };
    let Some(mut chosen) = chosen else {
        return Err(PlacementError::Unplaceable(Box::new(explain(
            placement, per_worker, offers, &room,
        ))));
    };
    chosen.sort_unstable();
    Ok(shares(chosen, offers))
}

/// Places at most so many workers: first on nodes that have some of their job already, then as [`Placement::Pack`] does.
///
/// `there` is the number of the job's workers on a node. The shares are in order of registration. There may be fewer workers than
/// asked for, or none.
#[must_use]
pub fn place_at_most(
    workers: u32,
    per_worker: &Resources,
    offers: &[Offer],
    there: impl Fn(NodeId) -> u32,
) -> Vec<Share> {
    let mut left = workers;
    let mut room = Vec::with_capacity(offers.len());
    let mut chosen = Vec::new();
    for (index, offer) in offers.iter().enumerate() {
        let there = there(offer.node);
        let most = MAX_PER_NODE.saturating_sub(there);
        let here = room_on(&offer.available, per_worker).min(most);
        let taken = here.min(left);
        if there > 0 && taken > 0 {
            chosen.push((index, taken));
            left -= taken;
        }
        room.push(if there > 0 { 0 } else { here });
    }
    let all = room
        .iter()
        .fold(0_u32, |sum, room| sum.saturating_add(*room));
    let rest = left.min(all);
    if rest > 0 {
        chosen.extend(pack(rest, &room).unwrap_or_default());
    }
    chosen.sort_unstable();
    shares(chosen, offers)
}

fn shares(chosen: Vec<(usize, u32)>, offers: &[Offer]) -> Vec<Share> {
    let share = |(index, workers): (usize, u32)| Share {
        node: offers[index].node,
        workers,
    };
    chosen.into_iter().map(share).collect()
}

/// Places a group as it is asked for, node by node; the shares stay in this order.
///
/// # Errors
///
/// [`PlacementError::Layout`].
pub fn lay_out(
    layout: &[NodeShare],
    per_worker: &Resources,
    offers: &[Offer],
) -> Result<Vec<Share>, PlacementError> {
    layout
        .iter()
        .map(|NodeShare { node, workers }| {
            let offer = offers
                .iter()
                .find(|offer| offer.node == *node)
                .ok_or_else(|| {
                    PlacementError::Layout(format!(
                        "{node} is asked for {workers} workers and is not there, or counts as lost"
                    ))
                })?;
            let room = room_on(&offer.available, per_worker);
            if room < *workers {
                return Err(PlacementError::Layout(format!(
                    "{} ({node}) is asked for {workers} workers with {per_worker} each and has room for {room}; it has {} in \
                     all, of which {} are free",
                    offer.hostname, offer.total, offer.available
                )));
            }
            Ok(Share {
                node: *node,
                workers: *workers,
            })
        })
        .collect()
}

fn room_on(resources: &Resources, per_worker: &Resources) -> u32 {
    resources.count(per_worker).min(MAX_PER_NODE)
}

/// Pairs of index and workers, in any order.
fn pack(workers: u32, room: &[u32]) -> Option<Vec<(usize, u32)>> {
    let mut by_room: Vec<usize> = (0..room.len()).filter(|index| room[*index] > 0).collect();
    // A stable sort: ties stay in order of registration.
    by_room.sort_by_key(|index| std::cmp::Reverse(room[*index]));
    let mut chosen = Vec::new();
    let mut left = workers;
    for (position, &index) in by_room.iter().enumerate() {
        if room[index] >= left {
            let smallest = by_room[position..]
                .iter()
                .copied()
                .filter(|index| room[*index] >= left)
                .min_by_key(|index| room[*index])?;
            chosen.push((smallest, left));
            return Some(chosen);
        }
        chosen.push((index, room[index]));
        left -= room[index];
    }
    None
}

fn spread(hosts: u32, slots: u32, room: &[u32]) -> Option<Vec<(usize, u32)>> {
    let mut fit: Vec<usize> = (0..room.len())
        .filter(|index| room[*index] >= slots)
        .collect();
    if fit.len() < hosts as usize {
        return None;
    }
    fit.sort_by_key(|index| room[*index]);
    Some(
        fit.into_iter()
            .take(hosts as usize)
            .map(|index| (index, slots))
            .collect(),
    )
}

fn explain(
    placement: Placement,
    per_worker: &Resources,
    offers: &[Offer],
    room: &[u32],
) -> Unplaceable {
    let count = |room: &mut dyn Iterator<Item = u32>| -> u64 {
        match placement {
            Placement::Pack { .. } => room.map(u64::from).sum(),
            Placement::Spread { slots, .. } => room.filter(|room| *room >= slots).count() as u64,
        }
    };
    let available = count(&mut room.iter().copied());
    let available_when_idle =
        count(&mut offers.iter().map(|offer| room_on(&offer.total, per_worker)));
    let mut short = Vec::new();
    let mut more_short = 0;
    let mut by_resource = BTreeMap::<String, usize>::new();
    for (offer, &room) in offers.iter().zip(room) {
        let wanted = match placement {
            // One more than fits: what lacks for all of them would be the same names and worse numbers.
            Placement::Pack { .. } => room.saturating_add(1),
            Placement::Spread { slots, .. } => slots,
        };
        let shortages = offer.available.shortages(&per_worker.times(wanted));
        if shortages.is_empty() {
            continue;
        }
        for shortage in &shortages {
            *by_resource.entry(shortage.resource.clone()).or_default() += 1;
        }
        if short.len() < DESCRIBED {
            short.push(NodeShortage {
                node: offer.node,
                hostname: offer.hostname.clone(),
                room,
                wanted,
                shortages,
            });
        } else {
            more_short += 1;
        }
    }
    Unplaceable {
        placement,
        per_worker: per_worker.clone(),
        nodes: offers.len(),
        available,
        available_when_idle,
        short,
        more_short,
        by_resource,
        is_capped: room.contains(&MAX_PER_NODE)
            || matches!(placement, Placement::Spread { slots, .. } if slots > MAX_PER_NODE),
    }
}

/// Whether an amount can be a resource of a worker or node.
#[must_use]
pub fn is_sane(resources: &Resources) -> bool {
    let limit = Milli::units(1_000_000);
    resources.cpus <= limit
        && resources.gpus <= 1_000_000
        && resources.custom.values().all(|amount| *amount <= limit)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cpus(milli: u64) -> Resources {
        Resources {
            cpus: Milli(milli),
            ..Resources::default()
        }
    }

    fn offers(free: &[u64]) -> Vec<Offer> {
        (0..)
            .zip(free)
            .map(|(id, cpus_free)| Offer {
                node: NodeId(id),
                hostname: "host".to_owned(),
                available: cpus(*cpus_free),
                total: cpus(8000),
            })
            .collect()
    }

    fn placed(placement: Placement, per_worker: &Resources, offers: &[Offer]) -> Vec<(u64, u32)> {
        place(placement, per_worker, offers)
            .unwrap()
            .iter()
            .map(|share| (share.node.0, share.workers))
            .collect()
    }

    #[test]
    fn a_layout_is_taken_as_it_is_or_refused_with_what_is_there() {
        let offers = offers(&[4000, 2000]);
        let share = |node, workers| NodeShare {
            node: NodeId(node),
            workers,
        };
        let ask = |layout: &[NodeShare]| lay_out(layout, &cpus(1000), &offers);
        let placed = ask(&[share(1, 2), share(0, 1)]).unwrap();
        let pairs: Vec<_> = placed
            .iter()
            .map(|share| (share.node.0, share.workers))
            .collect();
        assert_eq!(pairs, [(1, 2), (0, 1)]);
        let error = ask(&[share(0, 4), share(1, 3)]).unwrap_err().to_string();
        assert!(
            error.contains("is asked for 3 workers with 1 cpus each and has room for 2"),
            "{error}"
        );
        assert!(
            ask(&[share(7, 1)])
                .unwrap_err()
                .to_string()
                .contains("is not there")
        );
    }

    #[test]
    fn pack_takes_few_nodes_and_leaves_the_large_gaps() {
        let pack = |workers| Placement::Pack { workers };
        let one = cpus(1000);
        let offers = offers(&[2000, 4000, 3000, 4000]);
        assert_eq!(placed(pack(1), &one, &offers), [(0, 1)]);
        assert_eq!(placed(pack(3), &one, &offers), [(2, 3)]);
        assert_eq!(placed(pack(4), &one, &offers), [(1, 4)]);
        assert_eq!(placed(pack(6), &one, &offers), [(0, 2), (1, 4)]);
        assert_eq!(
            placed(pack(13), &one, &offers),
            [(0, 2), (1, 4), (2, 3), (3, 4)]
        );
        // What asks for nothing fits anywhere, as often as a node takes workers.
        assert_eq!(
            placed(pack(100), &Resources::default(), &offers),
            [(0, 100)]
        );
        assert_eq!(
            placed(pack(MAX_PER_NODE + 1), &Resources::default(), &offers),
            [(0, MAX_PER_NODE), (1, 1)]
        );
        let error = place(pack(5 * MAX_PER_NODE), &Resources::default(), &offers).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("a node takes at most 1024 workers"),
            "{error}"
        );
    }

    #[test]
    fn as_many_as_there_is_room_for_go_where_the_job_is_first() {
        let one = cpus(1000);
        let offers = offers(&[1000, 4000, 2000]);
        let ask = |workers, there: fn(NodeId) -> u32| -> Vec<(u64, u32)> {
            let shares = place_at_most(workers, &one, &offers, there);
            let pairs = shares.iter().map(|share| (share.node.0, share.workers));
            pairs.collect()
        };
        let nowhere = |_: NodeId| 0;
        assert_eq!(ask(2, nowhere), [(2, 2)]);
        assert_eq!(ask(9, nowhere), [(0, 1), (1, 4), (2, 2)]);
        assert_eq!(ask(0, nowhere), []);
        // One has room for one more worker of the job at most.
        let there = |node: NodeId| [1, 0, MAX_PER_NODE - 1][node.0 as usize];
        assert_eq!(ask(1, there), [(0, 1)]);
        assert_eq!(ask(5, there), [(0, 1), (1, 3), (2, 1)]);
        assert_eq!(ask(9, there), [(0, 1), (1, 4), (2, 1)]);
        assert_eq!(place_at_most(3, &one, &[], |_| 0), []);
    }

    #[test]
    fn spread_takes_distinct_nodes() {
        let offers = offers(&[4000, 2000, 1000, 2000]);
        let spread = |hosts, slots| Placement::Spread { hosts, slots };
        let one = cpus(1000);
        assert_eq!(placed(spread(2, 2), &one, &offers), [(1, 2), (3, 2)]);
        assert_eq!(
            placed(spread(3, 2), &one, &offers),
            [(0, 2), (1, 2), (3, 2)]
        );
        assert_eq!(
            place(spread(4, 2), &one, &offers).unwrap_err().to_string(),
            "requested 4 distinct nodes with 2 workers of 1 cpus each, available are 3 of 4 nodes; \
             host (node-0000000000000002) has room for 1; cpus: requested 2, available 1; \
             it fits when other jobs have ended"
        );
    }

    /// Horovod's `test_infeasible_placement`: 4 workers on 2 CPUs.
    #[test]
    fn infeasible_placement_names_what_is_missing_where() {
        let mut offers = offers(&[2000]);
        offers[0].total = cpus(2000);
        assert_eq!(
            place(Placement::Pack { workers: 4 }, &cpus(1000), &offers)
                .unwrap_err()
                .to_string(),
            "requested 4 workers with 1 cpus each, available is room for 2 on 1 nodes; \
             host (node-0000000000000000) has room for 2; cpus: requested 3, available 2; \
             without other jobs it would be 2: add nodes or ask for less"
        );
        let error = place(Placement::Pack { workers: 1 }, &cpus(1000), &[]).unwrap_err();
        assert!(
            error.to_string().contains("room for 0 on 0 nodes"),
            "{error}"
        );
    }

    #[test]
    fn sizes_out_of_range_are_refused() {
        for placement in [
            Placement::Pack { workers: 0 },
            Placement::Pack {
                workers: MAX_WORLD_SIZE + 1,
            },
            Placement::Spread { hosts: 0, slots: 3 },
            Placement::Spread { hosts: 3, slots: 0 },
            Placement::Spread {
                hosts: u32::MAX,
                slots: u32::MAX,
            },
        ] {
            let error = place(placement, &cpus(1), &offers(&[8000])).unwrap_err();
            assert!(
                error.to_string().contains("allowed are 1 to 16384"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_thousand_nodes_are_placed_and_their_shortage_is_summarised() {
        let offers = offers(&[1500; 1000]);
        let shares = place(Placement::Pack { workers: 1000 }, &cpus(1000), &offers).unwrap();
        assert_eq!(shares.len(), 1000);
        let mut need = cpus(1000);
        need.custom.insert("fpga".to_owned(), Milli(1));
        let error = place(Placement::Pack { workers: 1 }, &need, &offers)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("and 992 more nodes (too little of fpga on 1000 nodes in all)"),
            "{error}"
        );
        assert!(error.len() < 2000, "{error}");
    }

    proptest! {
        #[test]
        fn a_placement_fits_and_pack_is_minimal(
            free in proptest::collection::vec(0_u64..7, 0..9),
            workers in 1_u32..20,
            slots in 1_u32..4,
        ) {
            let offers = offers(&free.iter().map(|free| free * 1000).collect::<Vec<_>>());
            let one = cpus(1000);
            let check = |shares: &[Share], total: u32| {
                assert_eq!(shares.iter().map(|share| share.workers).sum::<u32>(), total);
                assert!(shares.is_sorted_by(|a, b| a.node < b.node));
                for share in shares {
                    assert!(share.workers > 0);
                    assert!(u64::from(share.workers) <= free[share.node.0 as usize]);
                }
            };
            let mut sorted = free.clone();
            sorted.sort_unstable_by_key(|free| std::cmp::Reverse(*free));
            let mut sum = 0;
            let fewest = sorted.iter().position(|free| { sum += free; sum >= u64::from(workers) });
            let packed = place(Placement::Pack { workers }, &one, &offers).ok();
            prop_assert_eq!(packed.as_ref().map(Vec::len), fewest.map(|index| index + 1));
            if let Some(shares) = packed {
                check(&shares, workers);
            }
            let enough = free.iter().filter(|free| **free >= u64::from(slots)).count();
            let spread = place(Placement::Spread { hosts: workers, slots }, &one, &offers).ok();
            prop_assert_eq!(spread.is_some(), enough >= workers as usize);
            if let Some(shares) = spread {
                check(&shares, workers * slots);
                prop_assert_eq!(shares.len(), workers as usize);
            }
        }
    }
}
