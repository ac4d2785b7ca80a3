//! Gang placement: which node takes how many workers, all or nothing.
//!
//! Both strategies are functions of a snapshot of the cluster and give the same answer for the same
//! snapshot. Nodes are chosen and listed by their names, with `host2` before `host10`, and those of one name in order of
//! registration. Ranks are handed out contiguously per node in that order, so a job has the same ones after nodes have come anew.

mod names;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use kolo_wire::counted::Counted;
use kolo_wire::ids::NodeId;
use kolo_wire::{Milli, Placement, Refusal, RefusalKind, Resources, Shortage};

use self::names::natural;
use crate::ranks::MAX_WORLD_SIZE;

/// Workers on one node. Never 0.
pub use kolo_wire::NodeShare as Share;

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
    /// The most workers of the job that it takes, whatever it has.
    pub most: u32,
}

impl Offer {
    /// Room for workers now.
    fn room(&self, per_worker: &Resources) -> u32 {
        self.available.count(per_worker).min(self.most)
    }
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
        // What is requested is said before, for the whole group.
        f.write_str(&what_is_free(&self.shortages))?;
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
    #[error("{text}")]
    Layout {
        /// The message.
        text: String,
        /// Whether there would be room if no other job ran.
        fits_when_idle: bool,
    },
}

impl PlacementError {
    /// Whether there would be room if no other job ran.
    #[must_use]
    pub fn fits_when_idle(&self) -> bool {
        match self {
            Self::Size { .. } => false,
            Self::Unplaceable(unplaceable) => unplaceable.fits_when_idle(),
            Self::Layout { fits_when_idle, .. } => *fits_when_idle,
        }
    }
}

impl From<PlacementError> for Refusal {
    fn from(error: PlacementError) -> Self {
        let kind = match error {
            PlacementError::Size { .. } => RefusalKind::Invalid,
            PlacementError::Unplaceable(_) | PlacementError::Layout { .. } => {
                RefusalKind::Unplaceable
            }
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
    /// The nodes that have too little, by their names; the first few.
    pub short: Vec<NodeShortage>,
    /// Nodes with too little that are not in `short`.
    pub more_short: usize,
    /// On how many nodes each resource lacks.
    pub by_resource: BTreeMap<String, usize>,
    /// Whether a node has the resources for more than [`MAX_PER_NODE`] workers, which is the most it takes.
    pub is_capped: bool,
}

impl Unplaceable {
    fn fits_when_idle(&self) -> bool {
        let needed = match self.placement {
            Placement::Pack { workers } => workers,
            Placement::Spread { hosts, .. } => hosts,
        };
        self.available_when_idle >= needed.into()
    }
}

impl fmt::Display for Unplaceable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.placement {
            Placement::Pack { workers } => {
                write!(
                    f,
                    "requested {}: room for {} on {}",
                    with_each(workers, &self.per_worker),
                    self.available,
                    Counted(self.nodes, "node")
                )?;
            }
            Placement::Spread { hosts, slots } => {
                write!(
                    f,
                    "requested {} with {} of {} each: nodes with room: {} of {}",
                    Counted(hosts, "node"),
                    Counted(slots, "worker"),
                    self.per_worker,
                    self.available,
                    self.nodes
                )?;
            }
        }
        for short in &self.short {
            write!(f, "\n  {short}")?;
        }
        if self.more_short > 0 {
            let more = Counted(self.more_short, "more node");
            write!(f, "\n  {more} with too little of")?;
            for (index, (resource, short)) in self.by_resource.iter().enumerate() {
                f.write_str(if index == 0 { " " } else { ", " })?;
                write!(f, "{resource} (on {} in all)", Counted(*short, "node"))?;
            }
        }
        if self.is_capped {
            write!(
                f,
                "\n  a node takes at most {MAX_PER_NODE} workers of a job"
            )?;
        }
        let outlook = outlook(
            self.fits_when_idle(),
            self.available,
            self.available_when_idle,
            "add nodes",
        );
        write!(f, "\n  {outlook}")
    }
}

/// Says whether there is room when no other job runs, and else the remedy.
fn outlook(fits: bool, now: u64, when_idle: u64, remedy: &str) -> String {
    if fits {
        "it fits when other jobs have ended".to_owned()
    } else if when_idle > now {
        format!("without other jobs it would be {when_idle}: {remedy}, or ask for less")
    } else {
        format!("other jobs take none of the room: {remedy}, or ask for less")
    }
}

/// `; cpus free: 1, gpus free: 0`, of what lacks.
fn what_is_free(shortages: &[Shortage]) -> String {
    let mut text = String::new();
    for (index, shortage) in shortages.iter().enumerate() {
        let start = if index == 0 { "; " } else { ", " };
        // A text takes all that is written.
        let _ = write!(
            text,
            "{start}{} free: {}",
            shortage.resource, shortage.available
        );
    }
    text
}

/// `1 worker with 2 cpus`, `3 workers with 2 cpus each`.
fn with_each(workers: u32, per_worker: &Resources) -> String {
    let each = if workers == 1 { "" } else { " each" };
    format!("{} with {per_worker}{each}", Counted(workers, "worker"))
}

/// Places a group on the nodes of `offers`, which are alive and in order of registration.
///
/// [`Placement::Pack`] takes the fewest nodes: the roomiest first, and as the last one the smallest that holds
/// the rest. [`Placement::Spread`] takes the nodes with the least room that is enough, so that large gaps
/// stay large. Ties go to the node whose name comes first. The shares are in order of names.
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
    let mut offers: Vec<&Offer> = offers.iter().collect();
    // A stable sort: of one name the first to register stays first.
    offers.sort_by(|left, right| natural(&left.hostname, &right.hostname));
    let room: Vec<u32> = offers.iter().map(|offer| offer.room(per_worker)).collect();
    let chosen = match placement {
        Placement::Pack { .. } => pack(workers, &room),
        Placement::Spread { hosts, slots } => spread(hosts, slots, &room),
    };
    let Some(mut chosen) = chosen else {
        return Err(PlacementError::Unplaceable(Box::new(explain(
            placement, per_worker, &offers, &room,
        ))));
    };
    chosen.sort_unstable();
    Ok(shares(chosen, |index| offers[index].node))
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
        let here = offer.room(per_worker).min(most);
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
    shares(chosen, |index| offers[index].node)
}

/// Places so many workers on each of at most so many nodes, chosen as [`Placement::Spread`] does.
///
/// The shares are in order of registration. There may be fewer nodes than asked for, or none.
#[must_use]
pub fn spread_at_most(
    hosts: u32,
    slots: u32,
    per_worker: &Resources,
    offers: &[Offer],
) -> Vec<Share> {
    let room = offers.iter().map(|offer| offer.room(per_worker));
    let room: Vec<u32> = room.collect();
    let fit = room.iter().filter(|room| **room >= slots).count();
    let hosts = hosts.min(u32::try_from(fit).unwrap_or(u32::MAX));
    let mut chosen = spread(hosts, slots, &room).unwrap_or_default();
    chosen.sort_unstable();
    shares(chosen, |index| offers[index].node)
}

fn shares(chosen: Vec<(usize, u32)>, node: impl Fn(usize) -> NodeId) -> Vec<Share> {
    let share = |(index, workers): (usize, u32)| Share {
        node: node(index),
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
    layout: &[Share],
    per_worker: &Resources,
    offers: &[Offer],
) -> Result<Vec<Share>, PlacementError> {
    layout
        .iter()
        .map(|share| {
            let Share { node, workers } = share;
            let offer = offers
                .iter()
                .find(|offer| offer.node == *node)
                .ok_or_else(|| {
                    let workers = Counted(*workers, "worker");
                    let why = "is lost or takes no new work; `kolo status` shows the nodes";
                    PlacementError::Layout {
                        text: format!("{node}, which is to have {workers}, {why}"),
                        fits_when_idle: false,
                    }
                })?;
            let room = offer.room(per_worker);
            if room < *workers {
                let when_idle = offer.total.count(per_worker).min(offer.most);
                let fits_when_idle = when_idle >= *workers;
                let shortages = offer.available.shortages(&per_worker.times(*workers));
                return Err(PlacementError::Layout {
                    text: format!(
                        "requested {} on {} ({node}): room for {room}{}\n  {}",
                        with_each(*workers, per_worker),
                        offer.hostname,
                        what_is_free(&shortages),
                        outlook(
                            fits_when_idle,
                            room.into(),
                            when_idle.into(),
                            "give more nodes"
                        )
                    ),
                    fits_when_idle,
                });
            }
            Ok(*share)
        })
        .collect()
}

/// Pairs of index and workers, in any order.
fn pack(workers: u32, room: &[u32]) -> Option<Vec<(usize, u32)>> {
    let mut by_room: Vec<usize> = (0..room.len()).filter(|index| room[*index] > 0).collect();
    // A stable sort: ties stay in order of names.
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
    offers: &[&Offer],
    room: &[u32],
) -> Unplaceable {
    let count = |room: &mut dyn Iterator<Item = u32>| -> u64 {
        match placement {
            Placement::Pack { .. } => room.map(u64::from).sum(),
            Placement::Spread { slots, .. } => room.filter(|room| *room >= slots).count() as u64,
        }
    };
    let available = count(&mut room.iter().copied());
    let available_when_idle = count(
        &mut offers
            .iter()
            .map(|offer| offer.total.count(per_worker).min(offer.most)),
    );
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
