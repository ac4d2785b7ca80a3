//! The words of tests that loom runs.

use loom::sync::atomic::{AtomicU64, Ordering, fence};

use crate::rules::Word;

/// A word in shared memory. Loom knows one total order for fences alone.
pub(crate) struct Flag(AtomicU64);

impl Flag {
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(0))
    }
}

impl Word for Flag {
    fn get(&self) -> u64 {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Acquire)
    }

    fn set(&self, value: u64) {
        self.0.store(value, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    fn put(&self, value: u64) {
        self.0.store(value, Ordering::Release);
    }

    fn advance(&self) {
        fence(Ordering::SeqCst);
        self.0.fetch_add(1, Ordering::AcqRel);
        fence(Ordering::SeqCst);
    }
}
