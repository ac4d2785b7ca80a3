//! Memory that many holders share: one bound in bytes for all of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Memory that was let go of is given back to the system when there is so much of it.
const GIVE_BACK: usize = 4 << 20;

/// Bytes that many holders share.
///
/// ```
/// use kolo_actors::budget::Budget;
///
/// let budget = Budget::new(100);
/// let (mut one, mut two) = (budget.share(), budget.share());
/// assert!(one.try_set(60) && !two.try_set(60) && two.try_set(40));
/// drop(one);
/// assert_eq!(budget.held(), 40);
/// ```
#[derive(Debug)]
pub struct Budget {
    most: usize,
    held: AtomicUsize,
    /// Bytes whose holders are gone and that may still be the heap's.
    let_go: AtomicUsize,
}

impl Budget {
    /// At most so many bytes.
    #[must_use]
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            held: AtomicUsize::new(0),
            let_go: AtomicUsize::new(0),
        })
    }

    /// The bound.
    #[must_use]
    pub fn most(&self) -> usize {
        self.most
    }

    /// Bytes of all holders.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// One more holder, of nothing so far.
    #[must_use]
    pub fn share(self: &Arc<Self>) -> Share {
        Share {
            budget: Arc::clone(self),
            bytes: 0,
        }
    }
}

/// What one holder has of a [`Budget`]. Dropped, it is free again: behind what it counts, so that memory can be given back.
#[derive(Debug)]
pub struct Share {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Share {
    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The bound of all holders together.
    #[must_use]
    pub fn most(&self) -> usize {
        self.budget.most
    }

    /// Has so many bytes from now on, whatever the bound is. Whether all holders together are within it.
    pub fn set(&mut self, bytes: usize) -> bool {
        let held = &self.budget.held;
        let before = if bytes >= self.bytes {
            held.fetch_add(bytes - self.bytes, Ordering::Relaxed)
        } else {
            held.fetch_sub(self.bytes - bytes, Ordering::Relaxed)
        };
        let after = before + bytes - self.bytes;
        self.bytes = bytes;
        after <= self.budget.most
    }

    /// Has so many bytes from now on, if all holders together stay within the bound; else nothing changes. Less is always
    /// granted.
    #[must_use]
    pub fn try_set(&mut self, bytes: usize) -> bool {
        let grows = bytes > self.bytes;
        let before = self.bytes;
        if self.set(bytes) || !grows {
            return true;
        }
        self.set(before);
        false
    }

    /// All that this counted is free: nothing is held, and the system gets its memory back.
    pub fn release(&mut self) {
        let freed = std::mem::take(&mut self.bytes);
        self.budget.held.fetch_sub(freed, Ordering::Relaxed);
        let let_go = &self.budget.let_go;
        if let_go.fetch_add(freed, Ordering::Relaxed) + freed >= GIVE_BACK
            && let_go.swap(0, Ordering::Relaxed) > 0
        {
            kolo_process::give_back_memory();
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_the_sum_of_all_shares_and_free_with_them() {
        let budget = Budget::new(10);
        let (mut one, mut two) = (budget.share(), budget.share());
        assert!(one.set(6) && !two.set(6), "12 of 10");
        assert_eq!(budget.held(), 12);
        assert!(!one.try_set(7) && one.bytes() == 6, "more is refused");
        assert!(one.try_set(5) && budget.held() == 11, "less is not");
        two.release();
        two.release();
        assert_eq!((budget.held(), two.bytes()), (5, 0));
        assert!(two.try_set(5) && !two.try_set(6));
        drop((one, two));
        assert_eq!(budget.held(), 0);
    }
}
