//! A rendezvous store that many connections share.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use kolo_actors::budget::{Budget, Share};
use kolo_core::rendezvous::{
    Deleted, RendezvousError, RendezvousLimits, RendezvousStore, RendezvousUsage,
};

/// A [`RendezvousStore`] behind a lock. A clone is the same store.
#[derive(Debug, Clone)]
pub struct SharedStore {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug)]
struct Inner {
    store: RendezvousStore,
    retired: bool,
    /// Of the memory of all stores. Behind the values: they are free before it is.
    share: Share,
}

impl Inner {
    /// Whatever was stored or deleted, this is what it takes now.
    fn count(&mut self) {
        let bytes = self.store.usage().memory();
        self.share.set(bytes);
    }
}

impl SharedStore {
    /// A store that expects these scopes, and whose values take a part of the memory of all stores.
    #[must_use]
    pub fn new(
        limits: RendezvousLimits,
        scopes: BTreeMap<String, u32>,
        memory: &Arc<Budget>,
    ) -> Self {
        let mut store = RendezvousStore::new(limits);
        store.init(scopes);
        Self {
            inner: Arc::new(Mutex::new(Inner {
                store,
                retired: false,
                share: memory.share(),
            })),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // The store's methods leave it whole even if one of them should panic.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value of a key.
    #[must_use]
    pub fn get(&self, scope: &str, key: &str) -> Option<Bytes> {
        self.lock().store.get(scope, key).cloned()
    }

    /// Stores a value.
    ///
    /// # Errors
    ///
    /// [`RendezvousError`] if it is over a limit, or the store is [retired](SharedStore::retire).
    pub fn put(&self, scope: &str, key: &str, value: Bytes) -> Result<(), RendezvousError> {
        let mut inner = self.lock();
        if inner.retired {
            return Err(RendezvousError::Over);
        }
        let after = inner.store.usage_with(scope, key, &value).memory();
        if !inner.share.try_set(after) {
            return Err(RendezvousError::Shared {
                most: inner.share.most(),
            });
        }
        let stored = inner.store.put(scope, key, value);
        inner.count();
        stored
    }

    /// Deletes a key or counts it as finished.
    #[must_use]
    pub fn delete(&self, scope: &str, key: &str) -> Deleted {
        let mut inner = self.lock();
        let deleted = inner.store.delete(scope, key);
        inner.count();
        deleted
    }

    /// Drops all values and takes no more: the store belongs to a past generation, and nobody would read them.
    pub fn retire(&self) {
        let mut inner = self.lock();
        inner.retired = true;
        inner.store.init(BTreeMap::new());
        inner.share.release();
    }

    /// The limits.
    #[must_use]
    pub fn limits(&self) -> RendezvousLimits {
        self.lock().store.limits()
    }

    /// How full it is.
    #[must_use]
    pub fn usage(&self) -> RendezvousUsage {
        self.lock().store.usage()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_stores_share_one_memory_and_give_it_back_at_their_end() {
        let memory = Budget::new(10_000);
        let store = || SharedStore::new(RendezvousLimits::default(), BTreeMap::new(), &memory);
        let (one, two) = (store(), store());
        let value = || Bytes::from(vec![b'x'; 3000]);
        one.put("s", "a", value()).unwrap();
        one.put("s", "b", value()).unwrap();
        two.put("s", "a", value()).unwrap();
        let held = memory.held();
        let full = two.put("s", "b", value()).unwrap_err();
        assert_eq!(full, RendezvousError::Shared { most: 10_000 });
        assert!(full.to_string().contains("--rendezvous-memory"), "{full}");
        assert!(two.get("s", "b").is_none() && memory.held() == held);
        // The same key again takes nothing more, and a refusal for another reason takes nothing at all.
        one.put("s", "a", value()).unwrap();
        two.put("", "b", Bytes::new()).unwrap_err();
        assert_eq!(memory.held(), held);
        assert_eq!(one.delete("s", "a"), Deleted::Removed);
        two.put("s", "b", value()).unwrap();
        // Also while somebody still has it in hand.
        let in_hand = one.clone();
        one.retire();
        drop(one);
        assert!(in_hand.get("s", "b").is_none());
        two.put("s", "c", value()).unwrap();
        two.retire();
        assert_eq!(memory.held(), 0);
        // G-1: a late member is told that its generation is over.
        let late = two.put("s", "c", value());
        assert_eq!(late, Err(RendezvousError::Over));
        assert_eq!(memory.held(), 0);
    }
}
