//! What was found before.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_wire::InterfaceSelection;
use kolo_wire::ids::NodeId;

use super::{Host, Network, NetworkFingerprint};

/// How long a result counts.
pub const TTL: Duration = Duration::from_secs(60 * 60);

/// Most results that are kept.
const MOST: usize = 256;

/// For what a result is valid: a set of nodes with exactly these interfaces, and which of them may be used.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    nodes: Vec<(NodeId, NetworkFingerprint)>,
    selection: String,
}

impl Key {
    /// The key for these nodes; `None` if one of them does not report, so that a change would not be seen.
    #[must_use]
    pub fn new(hosts: &[Host], selection: &InterfaceSelection) -> Option<Self> {
        let mut nodes = hosts
            .iter()
            .map(|host| Some((host.node, NetworkFingerprint::of(host.network.as_ref()?))))
            .collect::<Option<Vec<_>>>()?;
        nodes.sort_unstable();
        Some(Self {
            nodes,
            // All lists and maps in it have an order.
            selection: format!("{selection:?}"),
        })
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
