//! The rules of the flags in shared memory, explored in every order in which two ranks can run.
//!
//! The model has the orders that the rules ask for: flags are read and written in one total order.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;

#[allow(dead_code, unreachable_pub)]
#[path = "../src/shm/rules.rs"]
mod rules;

use rules::{Word, give, give_up, has_given, holds};

/// A flag. Loom knows one total order for fences alone.
struct Flag(AtomicU64);

impl Flag {
    fn new() -> Self {
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
}

struct Memory {
    flags: [Flag; 2],
    done: [Flag; 2],
    /// Of rank 0. Loom finds reads beside writes.
    data: UnsafeCell<u64>,
}

impl Memory {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            flags: [Flag::new(), Flag::new()],
            done: [Flag::new(), Flag::new()],
            data: UnsafeCell::new(0),
        })
    }

    fn write(&self, value: u64) {
        // SAFETY: loom ends the test if anybody reads or writes at the same time.
        self.data.with_mut(|data| unsafe { *data = value });
    }

    fn read(&self) -> u64 {
        // SAFETY: as above.
        self.data.with(|data| unsafe { *data })
    }
}

const FIRST: u64 = 2;
const SECOND: u64 = 6;

/// Rank 0 gives data and gives up at once. It writes others only when rank 1 can't read the first any more.
#[test]
fn data_of_an_operation_that_was_given_up_stay_while_somebody_reads_them() {
    loom::model(|| {
        let memory = Memory::new();
        let theirs = Arc::clone(&memory);
        let peer = thread::spawn(move || {
            give(&theirs.flags[1], FIRST);
            if has_given(&theirs.flags[0], FIRST) {
                assert_eq!(theirs.read(), 1);
            }
            theirs.done[1].set(FIRST);
        });
        memory.write(1);
        give(&memory.flags[0], FIRST);
        give_up(&memory.flags[0], FIRST);
        if !holds(&memory.flags[1], &memory.done[1], FIRST) {
            memory.write(2);
        }
        peer.join().unwrap();
    });
}

/// An operation ends well on rank 0, which then wants to give the same place again.
#[test]
fn data_of_an_operation_that_went_well_stay_until_all_have_left_it() {
    loom::model(|| {
        let memory = Memory::new();
        let theirs = Arc::clone(&memory);
        let peer = thread::spawn(move || {
            give(&theirs.flags[1], FIRST);
            while !has_given(&theirs.flags[0], FIRST) {
                thread::yield_now();
            }
            assert_eq!(theirs.read(), 1);
            theirs.done[1].set(FIRST);
        });
        memory.write(1);
        give(&memory.flags[0], FIRST);
        while !has_given(&memory.flags[1], FIRST) {
            thread::yield_now();
        }
        memory.done[0].set(FIRST);
        while holds(&memory.flags[1], &memory.done[1], FIRST) {
            thread::yield_now();
        }
        memory.write(2);
        give(&memory.flags[0], SECOND);
        peer.join().unwrap();
    });
}

/// Without the mark, the model finds what goes wrong: it is not blind.
#[test]
#[should_panic(expected = "Causality violation")]
fn without_the_mark_somebody_reads_what_is_written() {
    loom::model(|| {
        let memory = Memory::new();
        let theirs = Arc::clone(&memory);
        let peer = thread::spawn(move || {
            give(&theirs.flags[1], FIRST);
            if has_given(&theirs.flags[0], FIRST) {
                theirs.read();
            }
            theirs.done[1].set(FIRST);
        });
        memory.write(1);
        give(&memory.flags[0], FIRST);
        if !holds(&memory.flags[1], &memory.done[1], FIRST) {
            memory.write(2);
        }
        peer.join().unwrap();
    });
}

/// A bell: who is about to sleep says so before the last look, who has news looks for sleepers after it gave them.
#[test]
fn no_news_are_slept_through() {
    loom::model(|| {
        let memory = Memory::new();
        let sleeping = Arc::new(Flag::new());
        let (theirs, sleeper) = (Arc::clone(&memory), Arc::clone(&sleeping));
        let peer = thread::spawn(move || {
            give(&theirs.flags[1], FIRST);
            sleeper.get() != 0
        });
        sleeping.set(1);
        let came = has_given(&memory.flags[1], FIRST);
        let rang = peer.join().unwrap();
        assert!(came || rang);
    });
}
