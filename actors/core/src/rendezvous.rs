//! The rendezvous: a key-value store in named scopes, through which the members of a job find each other.
//!
//! [`RendezvousStore`] is a pure state machine: no I/O, no clock. The HTTP listeners are thin shells around it.
//!
//! A scope whose size was given to [`RendezvousStore::init`] is *finalised* by DELETE: each member deletes its
//! key once it is connected, and when as many different keys were deleted as the scope has members, all values
//! of the scope go. Until then the values stay, because slower members still read them. In any other (*ad-hoc*)
//! scope DELETE removes the key at once.
//!
//! This is what Horovod's rendezvous server does, with these faults of it put right:
//!
//! - The same key deleted twice counts once. There, a worker that repeats a DELETE because the answer was lost
//!   finalises the scope too early, under members that still read it.
//! - A scope that completes touches no other scope. There, it clears the counts of all scopes, so that those
//!   lose what was counted and are never cleared.
//! - A PUT takes its key out of the count again, so that a repeated DELETE that comes after the completion does
//!   not count for the next round of the same scope.
//! - A completed scope leaves nothing behind. There, an empty table stays.
//! - Names, values, their number and their sum are limited. There, any client can fill the server's memory.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;

mod door;
mod ear;
mod plan;
#[cfg(test)]
mod tests;

pub use door::{Course, Door, DoorNews, DoorOpening, RANK_AND_SIZE};
pub use ear::{Ear, EarError, hosts_updated};
pub use plan::{RendezvousPeers, RendezvousPlan, RendezvousSlot};

/// What a [`RendezvousStore`] holds at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RendezvousLimits {
    /// Longest name of a scope or key, in bytes.
    pub name_bytes: usize,
    /// Longest value, in bytes.
    pub value_bytes: usize,
    /// Sum of all values and their names, in bytes.
    pub total_bytes: usize,
    /// Number of keys in all scopes.
    pub keys: usize,
}

impl RendezvousLimits {
    /// Bytes that Horovod's workers publish for one connection to one peer.
    const ADDRESS: usize = 136;

    /// Limits that are ample for a job of `world_size` members.
    ///
    /// Horovod's workers publish an address for each peer, so that values grow with the size of the world and
    /// their sum grows with its square. Room is left for the scopes of some sixteen process sets.
    #[must_use]
    pub fn for_world(world_size: u32) -> Self {
        let size = (world_size as usize).max(1);
        let value = size
            .saturating_mul(Self::ADDRESS)
            .saturating_mul(2)
            .max(1 << 20);
        let mesh = size.saturating_mul(size).saturating_mul(Self::ADDRESS);
        Self {
            name_bytes: 512,
            value_bytes: value,
            total_bytes: mesh.saturating_mul(16).max(64 << 20),
            keys: size.saturating_mul(128).max(4096),
        }
    }
}

impl Default for RendezvousLimits {
    /// Limits for a job of up to 64 members.
    fn default() -> Self {
        Self::for_world(64)
    }
}

/// Why a store does not take something.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// A scope or key is empty or too long. Use a shorter name.
    #[error("the name of a {part} has {given} bytes; allowed are 1 to {limit}")]
    Name {
        /// `scope` or `key`.
        part: &'static str,
        /// Its length.
        given: usize,
        /// [`RendezvousLimits::name_bytes`].
        limit: usize,
    },
    /// The value is too long. Publish an address or a reference, not the data itself.
    #[error("the value of `{scope}/{key}` has {given} bytes; allowed are up to {limit}")]
    Value {
        /// The scope.
        scope: String,
        /// The key.
        key: String,
        /// Length of the value.
        given: usize,
        /// [`RendezvousLimits::value_bytes`].
        limit: usize,
    },
    /// The store is full. Delete keys that nobody reads any more.
    #[error(
        "the rendezvous is full: it holds {keys} keys of {bytes} bytes in all; delete keys that are not needed"
    )]
    Full {
        /// Number of keys that it holds.
        keys: usize,
        /// Their bytes.
        bytes: usize,
    },
    /// The stores of all jobs are full together. Delete keys that nobody reads any more, or give them more memory.
    #[error(
        "the rendezvous of all jobs together are full: they may take {most} bytes; delete keys that are not needed, or start the \
         head with a larger --rendezvous-memory"
    )]
    Shared {
        /// What they may take.
        most: usize,
    },
    /// The store belongs to a generation that is over. Ask for the current one.
    #[error("this rendezvous is over: its job has ended or has another generation by now")]
    Over,
}

/// What a DELETE did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deleted {
    /// The key of an ad-hoc scope is gone.
    Removed,
    /// There was no such key.
    Absent,
    /// The key is counted as finished.
    Counted {
        /// Different keys of the scope that are finished.
        finished: u32,
        /// Members of the scope.
        expected: u32,
    },
    /// The last member has finished: all values of the scope are gone.
    Completed,
}

/// What a store holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RendezvousUsage {
    /// Number of keys.
    pub keys: usize,
    /// Bytes of values and names.
    pub bytes: usize,
}

#[derive(Debug, Default)]
struct Scope {
    /// Number of members; `None` for an ad-hoc scope.
    expected: Option<u32>,
    finished: BTreeSet<String>,
    values: BTreeMap<String, Bytes>,
}

/// Scoped keys and values. See the [module](self) for what it does.
#[derive(Debug, Default)]
pub struct RendezvousStore {
    limits: RendezvousLimits,
    scopes: BTreeMap<String, Scope>,
    keys: usize,
    bytes: usize,
}

impl RendezvousUsage {
    /// What a key takes beside its name and value, about.
    const KEY: usize = 128;

    /// What all that takes of memory, about.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.bytes + self.keys * Self::KEY
    }
}

impl RendezvousStore {
    /// An empty store in which every scope is ad hoc.
    #[must_use]
    pub fn new(limits: RendezvousLimits) -> Self {
        Self {
            limits,
            ..Self::default()
        }
    }

    /// Clears everything and expects these scopes with these numbers of members; a number of 0 is ignored.
    pub fn init(&mut self, scopes: BTreeMap<String, u32>) {
        self.scopes = scopes
            .into_iter()
            .filter(|(_, size)| *size > 0)
            .map(|(name, size)| {
                let scope = Scope {
                    expected: Some(size),
                    ..Scope::default()
                };
                (name, scope)
            })
            .collect();
        self.keys = 0;
        self.bytes = 0;
    }

    /// The value of a key.
    #[must_use]
    pub fn get(&self, scope: &str, key: &str) -> Option<&Bytes> {
        self.scopes.get(scope)?.values.get(key)
    }

    /// Stores a value, over an older one if there is one. Creates the scope if need be.
    ///
    /// # Errors
    ///
    /// [`RendezvousError`]; nothing has changed then.
    pub fn put(&mut self, scope: &str, key: &str, value: Bytes) -> Result<(), RendezvousError> {
        self.check_name("scope", scope)?;
        self.check_name("key", key)?;
        if value.len() > self.limits.value_bytes {
            return Err(RendezvousError::Value {
                scope: scope.to_owned(),
                key: key.to_owned(),
                given: value.len(),
                limit: self.limits.value_bytes,
            });
        }
        let RendezvousUsage { keys, bytes, .. } = self.usage_with(scope, key, &value);
        if keys > self.limits.keys || bytes > self.limits.total_bytes {
            return Err(RendezvousError::Full {
                keys: self.keys,
                bytes: self.bytes,
            });
        }
        self.keys = keys;
        self.bytes = bytes;
        let table = self.scopes.entry(scope.to_owned()).or_default();
        table.finished.remove(key);
        table.values.insert(key.to_owned(), value);
        Ok(())
    }

    /// Deletes a key of an ad-hoc scope, or counts it as finished in a scope of known size.
    pub fn delete(&mut self, scope: &str, key: &str) -> Deleted {
        let Some(table) = self.scopes.get_mut(scope) else {
            return Deleted::Absent;
        };
        let Some(expected) = table.expected else {
            let Some(value) = table.values.remove(key) else {
                return Deleted::Absent;
            };
            if table.values.is_empty() {
                self.scopes.remove(scope);
            }
            self.keys -= 1;
            self.bytes -= weight(scope, key, &value);
            return Deleted::Removed;
        };
        // What could not have been put is no member's key. It must not take memory either.
        if key.is_empty() || key.len() > self.limits.name_bytes {
            return Deleted::Absent;
        }
        table.finished.insert(key.to_owned());
        let finished = table.finished.len() as u32;
        if finished < expected {
            return Deleted::Counted { finished, expected };
        }
        table.finished.clear();
        let values = std::mem::take(&mut table.values);
        self.keys -= values.len();
        self.bytes -= values
            .iter()
            .map(|(key, value)| weight(scope, key, value))
            .sum::<usize>();
        Deleted::Completed
    }

    /// The limits.
    #[must_use]
    pub fn limits(&self) -> RendezvousLimits {
        self.limits
    }

    /// How full it is.
    #[must_use]
    pub fn usage(&self) -> RendezvousUsage {
        RendezvousUsage {
            keys: self.keys,
            bytes: self.bytes,
        }
    }

    /// How full it is once this value is stored.
    #[must_use]
    pub fn usage_with(&self, scope: &str, key: &str, value: &Bytes) -> RendezvousUsage {
        let old = self.get(scope, key).map(|value| weight(scope, key, value));
        RendezvousUsage {
            keys: self.keys + usize::from(old.is_none()),
            bytes: self.bytes - old.unwrap_or(0) + weight(scope, key, value),
        }
    }

    fn check_name(&self, part: &'static str, name: &str) -> Result<(), RendezvousError> {
        let limit = self.limits.name_bytes;
        if name.is_empty() || name.len() > limit {
            return Err(RendezvousError::Name {
                part,
                given: name.len(),
                limit,
            });
        }
        Ok(())
    }
}

fn weight(scope: &str, key: &str, value: &Bytes) -> usize {
    scope.len() + key.len() + value.len()
}
