//! Memory that many holders share: one bound in bytes for all of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Memory that was let go of is given back to the system when there is so much of it.
const GIVE_BACK: usize = 4 << 20;

/// So long after that. What is let go of meanwhile goes with it.
const SOON: Duration = Duration::from_secs(1);

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
    /// The most that was held since memory was given back last: the heap may still have what is above `held`.
    peak: AtomicUsize,
}

impl Budget {
    /// At most so many bytes.
    #[must_use]
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            held: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
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

    /// So much is held now. Whether so much was let go of that memory is to be given back.
    fn note(&self, held: usize) -> bool {
        let noted = |peak: usize| (held > peak || peak - held >= GIVE_BACK).then_some(held);
        self.peak
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, noted)
            .is_ok_and(|peak| peak > held)
    }

    fn counted(&self, held: usize) {
        if self.note(held) {
            give_back_soon();
        }
    }
}

/// Has a thread give free memory of the heap back to the system. That takes tens of milliseconds, and who lets go of memory may be
/// an actor or have a lock.
fn give_back_soon() {
    static ASKED: AtomicBool = AtomicBool::new(false);
    if ASKED.swap(true, Ordering::AcqRel) {
        return;
    }
    let thread = std::thread::Builder::new()
        .name("kolo-heap".to_owned())
        .spawn(|| {
            std::thread::sleep(SOON);
            ASKED.swap(false, Ordering::AcqRel);
            kolo_process::give_back_memory();
        });
    if let Err(error) = thread {
        ASKED.swap(false, Ordering::AcqRel);
        tracing::debug!(%error, "free memory is not given back for now: there is no thread for it");
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

    /// Has so many bytes from now on. What all holders have then.
    fn count(&mut self, bytes: usize) -> usize {
        let held = &self.budget.held;
        let before = if bytes >= self.bytes {
            held.fetch_add(bytes - self.bytes, Ordering::Relaxed)
        } else {
            held.fetch_sub(self.bytes - bytes, Ordering::Relaxed)
        };
        let after = before + bytes - self.bytes;
        self.bytes = bytes;
        after
    }

    /// Has so many bytes from now on, whatever the bound is. Whether all holders together are within it.
    pub fn set(&mut self, bytes: usize) -> bool {
        let held = self.count(bytes);
        self.budget.counted(held);
        held <= self.budget.most
    }

    /// Has so many bytes from now on, if all holders together stay within the bound; else nothing changes. Less is always
    /// granted.
    #[must_use]
    pub fn try_set(&mut self, bytes: usize) -> bool {
        let before = self.bytes;
        let held = self.count(bytes);
        if bytes > before && held > self.budget.most {
            self.count(before);
            return false;
        }
        self.budget.counted(held);
        true
    }

    /// All that this counted is free: nothing is held, and the system gets its memory back soon.
    pub fn release(&mut self) {
        self.set(0);
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

    #[test]
    fn memory_is_given_back_when_much_was_let_go_of_and_not_taken_again() {
        let budget = Budget::new(usize::MAX);
        for (held, expected) in [
            (10 * GIVE_BACK, false),
            (9 * GIVE_BACK + 1, false),
            // What is taken again is the heap's own.
            (10 * GIVE_BACK, false),
            (9 * GIVE_BACK + 1, false),
            (9 * GIVE_BACK, true),
            // Once.
            (9 * GIVE_BACK, false),
            (8 * GIVE_BACK + 1, false),
            (0, true),
            (GIVE_BACK - 1, false),
            (0, false),
        ] {
            assert_eq!(budget.note(held), expected, "{held}");
        }
    }

    #[test]
    fn less_counts_as_let_go_of_before_the_end_and_what_was_refused_does_not() {
        let budget = Budget::new(10);
        let peak = || budget.peak.load(Ordering::Relaxed);
        let mut share = budget.share();
        assert!(share.try_set(8) && !share.try_set(11));
        assert_eq!(peak(), 8);
        share.set(3 * GIVE_BACK);
        share.set(GIVE_BACK);
        assert_eq!(peak(), GIVE_BACK, "given back");
        drop(share);
        assert_eq!(peak(), 0, "given back");
    }
}
