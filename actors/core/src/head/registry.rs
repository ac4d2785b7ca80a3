//! The node registry: who is alive, what is free, who holds what.
//!
//! A node is alive from its registration until its lease runs out or its connection ends. What a job holds
//! on it stays booked until the node itself has confirmed that nothing is left, so a node that comes back
//! with workers of old jobs offers only what is truly free (G-2): nothing as long as it has jobs of which nobody knows what
//! they hold, as after a restart of the head.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kolo_wire::ids::{JobId, NodeId};
use kolo_wire::{NodeInfo, NodeNetwork, NodeRegistration, Refusal, RefusalKind, Resources, Seal};

use super::introduction::{check, check_network};
use crate::pace::Pace;
use crate::placement::{MAX_PER_NODE, Offer};

/// Most nodes of a cluster, lost ones that are still shown included.
pub const MAX_NODES: usize = 16_384;
/// Lost nodes that are remembered.
const MAX_LOST: usize = 256;

/// A connection to the head, and the stay in the registry of the node that registers over it. A message of an older stay
/// changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Session(pub u64);

impl Session {
    /// No connection.
    pub const NONE: Self = Self(0);
}

/// Answer to a registration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admission {
    /// Jobs that the node held in an earlier stay, or says that it holds. They count it as lost; it must be told
    /// to stop them.
    pub stale: Vec<JobId>,
    /// The earlier stay, if it had not ended.
    pub replaced: Option<Session>,
    /// How often the node sends heartbeats in this stay, and how long it may be silent.
    pub pace: Pace,
}

#[derive(Debug)]
#[allow(clippy::struct_excessive_bools)] // whether it is there, how it went, and two reasons to offer nothing
struct Entry {
    registration: NodeRegistration,
    session: Session,
    alive: bool,
    /// It takes no more jobs in this stay, because its daemon leaves.
    leaving: bool,
    /// The last stay is over because the daemon said good-bye.
    left: bool,
    /// An operator drains it, in whatever stay.
    drained: bool,
    last_seen: Instant,
    pace: Pace,
    held: BTreeMap<JobId, Resources>,
    /// Jobs that it has, as it says, and that hold something which the head has not booked.
    unknown: BTreeSet<JobId>,
}

impl Entry {
    /// The silence after which the node counts as lost. The next beat of a node that stood still for a lease is due up to an
    /// interval later.
    fn patience(&self) -> Duration {
        self.pace.lease + self.pace.heartbeat
    }

    fn expires(&self) -> Instant {
        self.last_seen + self.patience()
    }

    fn available(&self) -> Resources {
        if !self.unknown.is_empty() {
            return Resources::default();
        }
        let taken = self
            .held
            .values()
            .fold(Resources::default(), |sum, held| sum.plus(held));
        let total = &self.registration.resources;
        // A node may come back smaller than what it still holds.
        Resources {
            cpus: kolo_wire::Milli(total.cpus.0.saturating_sub(taken.cpus.0)),
            gpus: total.gpus.saturating_sub(taken.gpus),
            custom: total
                .custom
                .iter()
                .map(|(name, amount)| {
                    let taken = taken.custom.get(name).map_or(0, |taken| taken.0);
                    let rest = kolo_wire::Milli(amount.0.saturating_sub(taken));
                    (name.clone(), rest)
                })
                .collect(),
        }
    }
}

/// All nodes that the head knows.
#[derive(Debug)]
pub struct NodeRegistry {
    pace: Pace,
    /// In order of first registration.
    entries: Vec<Entry>,
    index: BTreeMap<NodeId, usize>,
    /// Entries of living nodes.
    alive: usize,
}

impl NodeRegistry {
    /// No nodes. How often they send heartbeats depends on their number.
    #[must_use]
    pub fn new(pace: Pace) -> Self {
        Self {
            pace,
            entries: Vec::new(),
            index: BTreeMap::new(),
            alive: 0,
        }
    }

    /// A node introduces itself and begins the stay `session`, a number of no earlier stay. An earlier one is over.
    ///
    /// # Errors
    ///
    /// [`RefusalKind::Invalid`] for what can't be true, [`RefusalKind::Busy`] if there are too many nodes,
    /// [`RefusalKind::Duplicate`] if another daemon with this identity was heard within the last half of the
    /// lease: two that took turns would end each other's jobs without end.
    pub fn register(
        &mut self,
        now: Instant,
        session: Session,
        registration: NodeRegistration,
    ) -> Result<Admission, Refusal> {
        check(&registration)?;
        let pace = self.pace.of(self.entries.len());
        let mut stale: BTreeSet<JobId> = registration.jobs.iter().copied().collect();
        let replaced = if let Some(&index) = self.index.get(&registration.node) {
            let entry = &mut self.entries[index];
            let silent = now.saturating_duration_since(entry.last_seen);
            let another = registration.instance != 0
                && entry.registration.instance != 0
                && registration.instance != entry.registration.instance;
            if entry.alive && another && silent < entry.patience() / 2 {
                return Err(duplicate(&entry.registration, silent));
            }
            entry.unknown = &stale - &entry.held.keys().copied().collect();
            stale.extend(entry.held.keys());
            let replaced = entry.alive.then_some(entry.session);
            self.alive += usize::from(!entry.alive);
            entry.leaving = registration.draining;
            entry.left = false;
            entry.registration = registration;
            entry.session = session;
            entry.alive = true;
            entry.last_seen = now;
            entry.pace = pace;
            replaced
        } else {
            self.forget_lost();
            if self.entries.len() >= MAX_NODES {
                return Err(Refusal::new(
                    RefusalKind::Busy,
                    format!("the cluster has {MAX_NODES} nodes already, which is the most"),
                ));
            }
            self.alive += 1;
            self.index.insert(registration.node, self.entries.len());
            self.entries.push(Entry {
                leaving: registration.draining,
                left: false,
                registration,
                session,
                alive: true,
                drained: false,
                last_seen: now,
                pace,
                held: BTreeMap::new(),
                unknown: stale.clone(),
            });
            None
        };
        Ok(Admission {
            stale: stale.into_iter().collect(),
            replaced,
            pace,
        })
    }

    /// The node's interfaces have changed.
    ///
    /// # Errors
    ///
    /// [`RefusalKind::Forbidden`] if this stay is over, [`RefusalKind::Invalid`] for what can't be true.
    pub fn set_network(
        &mut self,
        node: NodeId,
        session: Session,
        network: NodeNetwork,
    ) -> Result<(), Refusal> {
        check_network(&network)?;
        match self.current(node, session) {
            Some(entry) => {
                entry.registration.network = Some(network);
                Ok(())
            }
            None => Err(Refusal::new(
                RefusalKind::Forbidden,
                format!("{node} is not registered, or counts as lost; register again"),
            )),
        }
    }

    /// The living nodes, in order of first registration.
    pub fn living(&self) -> impl Iterator<Item = &NodeRegistration> {
        self.entries
            .iter()
            .filter(|entry| entry.alive)
            .map(|entry| &entry.registration)
    }

    /// The node was heard. Nothing if this stay is over.
    pub fn beat(&mut self, now: Instant, node: NodeId, session: Session) {
        if let Some(entry) = self.current(node, session) {
            entry.last_seen = entry.last_seen.max(now);
        }
    }

    /// The stay is over. The jobs that the node held, or `None` if it was over before.
    pub fn lose(&mut self, node: NodeId, session: Session) -> Option<Vec<JobId>> {
        let entry = self.current(node, session)?;
        entry.alive = false;
        let held = entry.held.keys().copied().collect();
        self.alive -= 1;
        Some(held)
    }

    /// Whether the seal is that of the daemon which has registered last, and its stay, if that lasts.
    #[must_use]
    pub fn sealed(&self, node: NodeId, seal: Seal) -> Option<Option<Session>> {
        let entry = self.get(node)?;
        let is_its = entry.registration.seal == Some(seal);
        is_its.then(|| entry.alive.then_some(entry.session))
    }

    /// The node offers nothing any more in this stay. Nothing if the stay is over.
    pub fn leave(&mut self, node: NodeId, session: Session) {
        if let Some(entry) = self.current(node, session) {
            entry.leaving = true;
        }
    }

    /// As [`NodeRegistry::leave`], and the stay is about to end because of that.
    pub fn say_goodbye(&mut self, node: NodeId, session: Session) {
        if let Some(entry) = self.current(node, session) {
            (entry.leaving, entry.left) = (true, true);
        }
    }

    /// Whether the node's daemon leaves.
    #[must_use]
    pub fn is_leaving(&self, node: NodeId) -> bool {
        self.get(node)
            .is_some_and(|entry| entry.alive && entry.leaving)
    }

    /// An operator drains the node, or no longer does: it offers nothing until then, in later stays either.
    pub fn set_drained(&mut self, node: NodeId, drained: bool) {
        if let Some(&index) = self.index.get(&node) {
            self.entries[index].drained = drained;
        }
    }

    /// The introductions of all nodes that are remembered, in order of first registration.
    pub fn known(&self) -> impl Iterator<Item = &NodeRegistration> {
        self.entries.iter().map(|entry| &entry.registration)
    }

    /// The jobs that hold something on the node.
    pub fn jobs_on(&self, node: NodeId) -> impl Iterator<Item = JobId> {
        let held = self.get(node).map(|entry| entry.held.keys().copied());
        held.into_iter().flatten()
    }

    /// Whether this stay of the node lasts.
    #[must_use]
    pub fn is_current(&self, node: NodeId, session: Session) -> bool {
        self.get(node)
            .is_some_and(|entry| entry.alive && entry.session == session)
    }

    /// Whether no job holds anything on the node.
    #[must_use]
    pub fn is_idle(&self, node: NodeId) -> bool {
        self.get(node)
            .is_none_or(|entry| entry.held.is_empty() && entry.unknown.is_empty())
    }

    /// The stays whose lease has run out, with the time since the node was heard. [`NodeRegistry::lose`] ends them.
    #[must_use]
    pub fn expired(&self, now: Instant) -> Vec<(NodeId, Session, Duration)> {
        self.entries
            .iter()
            .filter(|entry| entry.alive && entry.expires() <= now)
            .map(|entry| (entry, now.saturating_duration_since(entry.last_seen)))
            .map(|(entry, silent)| (entry.registration.node, entry.session, silent))
            .collect()
    }

    /// When the next lease runs out, if nobody is heard before.
    #[must_use]
    pub fn next_expiry(&self) -> Option<Instant> {
        self.entries
            .iter()
            .filter(|entry| entry.alive)
            .map(Entry::expires)
            .min()
    }

    /// The hostnames of living nodes that an operator has drained.
    pub fn drained(&self) -> Vec<&str> {
        let drained = self.entries.iter().filter(|it| it.alive && it.drained);
        drained
            .map(|it| it.registration.hostname.as_str())
            .collect()
    }

    /// What the living nodes that are not being drained offer, in order of first registration.
    #[must_use]
    pub fn offers(&self) -> Vec<Offer> {
        self.entries
            .iter()
            .filter(|entry| entry.alive && !entry.leaving && !entry.drained)
            .map(|entry| Offer {
                node: entry.registration.node,
                hostname: entry.registration.hostname.clone(),
                available: entry.available(),
                total: entry.registration.resources.clone(),
                most: MAX_PER_NODE,
            })
            .collect()
    }

    /// Books resources for a job on several nodes, on top of what it holds there, all or nothing. False if one of them is lost or
    /// has too little.
    #[must_use]
    pub fn hold(&mut self, job: JobId, wanted: &[(NodeId, Resources)]) -> bool {
        let fits = wanted.iter().all(|(node, resources)| {
            self.get(*node)
                .is_some_and(|entry| entry.alive && entry.available().fits(resources))
        });
        if fits {
            for (node, resources) in wanted {
                if let Some(&index) = self.index.get(node) {
                    let held = self.entries[index].held.entry(job).or_default();
                    *held = held.plus(resources);
                }
            }
        }
        fits
    }

    /// The node has confirmed that nothing of the job is left on it.
    pub fn free(&mut self, job: JobId, node: NodeId) {
        if let Some(&index) = self.index.get(&node) {
            self.entries[index].held.remove(&job);
            self.entries[index].unknown.remove(&job);
        }
    }

    /// The job needs so much less on the node, where it has more.
    pub fn give_back(&mut self, job: JobId, node: NodeId, resources: &Resources) {
        if let Some(&index) = self.index.get(&node)
            && let Some(held) = self.entries[index].held.get_mut(&job)
            && let Some(rest) = held.minus(resources)
        {
            *held = rest;
        }
    }

    /// Whether the job is booked on the node.
    #[must_use]
    pub fn holds(&self, job: JobId, node: NodeId) -> bool {
        self.get(node)
            .is_some_and(|entry| entry.held.contains_key(&job))
    }

    /// The introduction of a living node.
    #[must_use]
    pub fn alive(&self, node: NodeId) -> Option<(&NodeRegistration, Session)> {
        self.get(node)
            .filter(|entry| entry.alive)
            .map(|entry| (&entry.registration, entry.session))
    }

    /// Number of living nodes.
    #[must_use]
    pub fn alive_count(&self) -> usize {
        self.alive
    }

    /// All nodes, as the API shows them.
    #[must_use]
    pub fn info(&self, now: Instant) -> Vec<NodeInfo> {
        self.entries
            .iter()
            .map(|entry| NodeInfo {
                node: entry.registration.node,
                hostname: entry.registration.hostname.clone(),
                address: entry.registration.address,
                alive: entry.alive,
                total: entry.registration.resources.clone(),
                available: if entry.alive {
                    entry.available()
                } else {
                    Resources::default()
                },
                last_seen_ms: now.saturating_duration_since(entry.last_seen).as_millis() as u64,
                jobs: entry.held.keys().chain(&entry.unknown).copied().collect(),
                draining: if entry.alive {
                    entry.leaving || entry.drained
                } else {
                    entry.left
                },
            })
            .collect()
    }

    fn get(&self, node: NodeId) -> Option<&Entry> {
        self.index.get(&node).map(|index| &self.entries[*index])
    }

    fn current(&mut self, node: NodeId, session: Session) -> Option<&mut Entry> {
        let entry = &mut self.entries[*self.index.get(&node)?];
        (entry.alive && entry.session == session).then_some(entry)
    }

    /// Drops the nodes that were lost the longest ago if there are too many.
    fn forget_lost(&mut self) {
        if self.entries.len() - self.alive <= MAX_LOST {
            return;
        }
        let mut lost: Vec<(Instant, NodeId)> = self
            .entries
            .iter()
            .filter(|entry| !entry.alive)
            .map(|entry| (entry.last_seen, entry.registration.node))
            .collect();
        lost.sort_unstable();
        lost.truncate(lost.len() - MAX_LOST);
        self.entries.retain(|entry| {
            entry.alive
                || !lost
                    .iter()
                    .any(|(_, node)| *node == entry.registration.node)
        });
        self.index = self
            .entries
            .iter()
            .enumerate()
            .map(|(index, entry)| (entry.registration.node, index))
            .collect();
    }
}

fn duplicate(there: &NodeRegistration, silent: Duration) -> Refusal {
    Refusal::new(
        RefusalKind::Duplicate,
        format!(
            "another daemon is registered as {}: on host {} at {}, heard {} ms ago; each node needs an identity of \
             its own: stop one of the two, or give this one a state folder of its own and a token to join with",
            there.node,
            there.hostname,
            there.address,
            silent.as_millis()
        ),
    )
}
