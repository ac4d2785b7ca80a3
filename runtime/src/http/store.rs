//! A rendezvous store that many connections share, and that a reader can wait on.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use kolo_actors::budget::{Budget, Share};
use kolo_core::rendezvous::{
    Deleted, Entry, RendezvousError, RendezvousLimits, RendezvousStore, RendezvousUsage, Waited,
    WaiterId,
};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

/// A [`RendezvousStore`] behind a lock. A clone is the same store.
#[derive(Debug, Clone)]
pub struct SharedStore {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug)]
struct Inner {
    store: RendezvousStore,
    wakers: HashMap<WaiterId, oneshot::Sender<Infallible>>,
    next_waiter: u64,
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

    fn wake(&mut self, woken: &[WaiterId]) {
        for waiter in woken {
            // A sender that is dropped wakes its receiver.
            self.wakers.remove(waiter);
        }
    }
}

/// A place among the waiters, given up on drop.
struct Place<'a> {
    shared: &'a SharedStore,
    waiter: WaiterId,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut inner = self.shared.lock();
        inner.store.forget(self.waiter);
        inner.wakers.remove(&self.waiter);
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
                wakers: HashMap::new(),
                next_waiter: 0,
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
    pub fn get(&self, scope: &str, key: &str) -> Option<Entry> {
        self.lock().store.get(scope, key).cloned()
    }

    /// The values of many keys at one time, and the version of the store then.
    #[must_use]
    pub fn get_many<'a>(
        &self,
        keys: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> (u64, Vec<Option<Entry>>) {
        let inner = self.lock();
        (inner.store.version(), inner.store.get_many(keys))
    }

    /// Stores a value and wakes who waits for it. Returns the version.
    ///
    /// # Errors
    ///
    /// [`RendezvousError`] if it is over a limit, or the store is [retired](SharedStore::retire).
    pub fn put(&self, scope: &str, key: &str, value: Bytes) -> Result<u64, RendezvousError> {
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
        let stored = stored?;
        inner.wake(&stored.woken);
        Ok(stored.version)
    }

    /// Deletes a key or counts it as finished.
    #[must_use]
    pub fn delete(&self, scope: &str, key: &str) -> Deleted {
        let mut inner = self.lock();
        let deleted = inner.store.delete(scope, key);
        inner.count();
        deleted
    }

    /// The value of a key once it is newer than version `after`; `None` if it is not by the deadline, or the
    /// store is [retired](SharedStore::retire).
    ///
    /// Cancel safe.
    ///
    /// # Errors
    ///
    /// [`RendezvousError`] if the name is impossible or too many wait.
    pub async fn wait(
        &self,
        scope: &str,
        key: &str,
        after: u64,
        deadline: Instant,
    ) -> Result<Option<Entry>, RendezvousError> {
        loop {
            let (place, woken) = {
                let mut inner = self.lock();
                if inner.retired {
                    return Ok(None);
                }
                let waiter = WaiterId(inner.next_waiter);
                inner.next_waiter += 1;
                match inner.store.wait(scope, key, after, waiter)? {
                    Waited::Ready(entry) => return Ok(Some(entry)),
                    Waited::Registered => {}
                }
                let (waker, woken) = oneshot::channel();
                inner.wakers.insert(waiter, waker);
                let place = Place {
                    shared: self,
                    waiter,
                };
                (place, woken)
            };
            let timed_out = timeout_at(deadline, woken).await.is_err();
            drop(place);
            if timed_out {
                return Ok(None);
            }
        }
    }

    /// Ends all waiting, now and later, without a value, drops all values and takes no more, which nobody would read: the store
    /// belongs to a past generation.
    pub fn retire(&self) {
        let mut inner = self.lock();
        inner.retired = true;
        inner.wakers.clear();
        drop(inner.store.init(BTreeMap::new()));
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
    use std::time::Duration;

    use super::*;

    fn shared() -> SharedStore {
        SharedStore::new(
            RendezvousLimits::default(),
            BTreeMap::new(),
            &Budget::new(1 << 30),
        )
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(20)
    }

    fn late() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[tokio::test]
    async fn a_put_wakes_all_who_wait_for_the_key() {
        let store = shared();
        let waiters: Vec<_> = (0..3)
            .map(|_| {
                let store = store.clone();
                tokio::spawn(async move { store.wait("s", "k", 0, late()).await })
            })
            .collect();
        while store.usage().waiters < 3 {
            tokio::task::yield_now().await;
        }
        store.put("s", "other", Bytes::new()).unwrap();
        let version = store.put("s", "k", Bytes::from_static(b"v")).unwrap();
        for waiter in waiters {
            let entry = waiter.await.unwrap().unwrap().unwrap();
            assert_eq!((entry.value.as_ref(), entry.version), (&b"v"[..], version));
        }
        assert_eq!(store.usage().waiters, 0);
    }

    #[tokio::test]
    async fn a_wait_that_ends_without_the_key_leaves_no_trace() {
        let store = shared();
        assert_eq!(store.wait("s", "k", 0, soon()).await, Ok(None));
        let dropped = tokio::time::timeout_at(soon(), store.wait("s", "k", 0, late())).await;
        assert!(dropped.is_err());
        assert_eq!(store.usage().waiters, 0);
        assert!(store.lock().wakers.is_empty());
    }

    #[tokio::test]
    async fn retiring_ends_every_wait() {
        let store = shared();
        let waiter = tokio::spawn({
            let store = store.clone();
            async move { store.wait("s", "k", 0, late()).await }
        });
        while store.usage().waiters < 1 {
            tokio::task::yield_now().await;
        }
        store.retire();
        assert_eq!(waiter.await.unwrap(), Ok(None));
        assert_eq!(store.wait("s", "k", 0, late()).await, Ok(None));
        assert_eq!(store.usage().waiters, 0);
        // G-1: who is late is told, and does not wait for those who will never read it.
        let late = store.put("s", "k", Bytes::new());
        assert_eq!(late, Err(RendezvousError::Over));
    }

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
    }

    #[tokio::test]
    async fn a_wait_for_news_is_not_answered_by_the_value_that_is_known() {
        let store = shared();
        let known = store.put("s", "k", Bytes::from_static(b"1")).unwrap();
        assert_eq!(store.wait("s", "k", known, soon()).await, Ok(None));
        store.put("s", "k", Bytes::from_static(b"2")).unwrap();
        let entry = store.wait("s", "k", known, soon()).await.unwrap().unwrap();
        assert_eq!(entry.value, "2");
    }
}
