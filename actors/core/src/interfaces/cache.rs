//! What was found before.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_wire::InterfaceSelection;
use kolo_wire::ids::NodeId;

use super::{Host, Network};

/// How long a result counts.
pub const TTL: Duration = Duration::from_secs(60 * 60);

/// Most results that are kept.
const MOST: usize = 256;

/// For what a result is valid: a set of nodes with exactly these interfaces, and which of them may be used.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// With a hash of its interfaces, since a job may have thousands of nodes.
    nodes: Vec<(NodeId, u64)>,
    selection: InterfaceSelection,
}

impl Key {
    /// The key for these nodes, in whatever order.
    #[must_use]
    pub fn new<'a>(hosts: impl Iterator<Item = &'a Host>, selection: &InterfaceSelection) -> Self {
        let hashed = |host: &Host| {
            let mut hasher = DefaultHasher::new();
            host.network.hash(&mut hasher);
            (host.node, hasher.finish())
        };
        let mut nodes: Vec<(NodeId, u64)> = hosts.map(hashed).collect();
        nodes.sort_unstable();
        Self {
            nodes,
            selection: selection.clone(),
        }
    }
}

/// Results by [`Key`].
#[derive(Debug, Default)]
pub struct ProbeCache {
    known: BTreeMap<Key, (Instant, Arc<Network>)>,
}

impl ProbeCache {
    /// What is known, if it is not older than [`TTL`].
    #[must_use]
    pub fn get(&self, now: Instant, key: &Key) -> Option<Arc<Network>> {
        self.known
            .get(key)
            .filter(|(since, _)| now.saturating_duration_since(*since) < TTL)
            .map(|(_, network)| Arc::clone(network))
    }

    /// Keeps a result.
    pub fn put(&mut self, now: Instant, key: Key, network: Arc<Network>) {
        self.known
            .retain(|_, (since, _)| now.saturating_duration_since(*since) < TTL);
        if self.known.len() >= MOST
            && let Some(oldest) = self
                .known
                .iter()
                .min_by_key(|(_, (since, _))| *since)
                .map(|(key, _)| key.clone())
        {
            self.known.remove(&oldest);
        }
        self.known.insert(key, (now, network));
    }
}
