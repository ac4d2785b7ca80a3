//! The rules of the flags in shared memory, explored in every order in which two ranks can run.
//!
//! The functions are those that the communicator uses: their file is a part of this test. The words and the data are loom's.
//! The model has the orders that the rules ask for: flags are read and written in one total order.

#![allow(clippy::unwrap_used)]

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

#[path = "common/flag.rs"]
mod flag;
#[allow(dead_code, unreachable_pub)]
#[path = "../src/shm/rules.rs"]
mod rules;

use flag::Flag;
use rules::{
    Word, all_have_sliced, attach, give, give_up, has_given, holds, ignore, leave, listen,
    may_begin, may_give, may_take, ring, ring_anyway, slice, take_back,
};

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
            leave(&theirs.done[1], FIRST);
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
            leave(&theirs.done[1], FIRST);
        });
        memory.write(1);
        give(&memory.flags[0], FIRST);
        while !has_given(&memory.flags[1], FIRST) {
            thread::yield_now();
        }
        leave(&memory.done[0], FIRST);
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
            leave(&theirs.done[1], FIRST);
        });
        memory.write(1);
        give(&memory.flags[0], FIRST);
        if !holds(&memory.flags[1], &memory.done[1], FIRST) {
            memory.write(2);
        }
        peer.join().unwrap();
    });
}

/// What the system does for who sleeps: it looks at the bell and falls asleep in one step.
struct Futex {
    sleeping: Flag,
    bell: Flag,
    lock: Mutex<()>,
    woken: Condvar,
}

impl Futex {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            sleeping: Flag::new(),
            bell: Flag::new(),
            lock: Mutex::new(()),
            woken: Condvar::new(),
        })
    }

    fn wait(&self, seen: u64) {
        let guard = self.lock.lock().unwrap();
        if self.bell.get() == seen {
            drop(self.woken.wait(guard).unwrap());
        }
    }

    fn wake(&self) {
        let _guard = self.lock.lock().unwrap();
        self.woken.notify_all();
    }
}

/// Rank 0 sleeps until rank 1 has given its data. `tell` gives them and wakes it.
fn sleep_until_told(tell: fn(&Memory, &Futex)) {
    loom::model(move || {
        let (memory, futex) = (Memory::new(), Futex::new());
        let (theirs, bell) = (Arc::clone(&memory), Arc::clone(&futex));
        let peer = thread::spawn(move || tell(&theirs, &bell));
        loop {
            let seen = listen(&futex.sleeping, &futex.bell);
            if has_given(&memory.flags[1], FIRST) {
                break;
            }
            futex.wait(seen);
        }
        ignore(&futex.sleeping);
        peer.join().unwrap();
    });
}

/// A bell: who is about to sleep says so before the last look, who has news looks for sleepers after it gave them.
#[test]
fn no_news_are_slept_through() {
    sleep_until_told(|memory, futex| {
        give(&memory.flags[1], FIRST);
        ring(&futex.sleeping, &futex.bell, || futex.wake());
    });
}

/// Who looks for sleepers first is not noticed: the model finds it.
#[test]
#[should_panic(expected = "deadlock")]
fn news_after_the_look_for_sleepers_are_slept_through() {
    sleep_until_told(|memory, futex| {
        let sleeps = futex.sleeping.get() != 0;
        give(&memory.flags[1], FIRST);
        if sleeps {
            ring_anyway(&futex.bell, || futex.wake());
        }
    });
}

/// All ranks attach, and nobody tells anybody: at least one finds that it was the last.
#[test]
fn whoever_attaches_last_sees_all() {
    loom::model(|| {
        let memory = Memory::new();
        let theirs = Arc::clone(&memory);
        let peer = thread::spawn(move || attach(&theirs.flags[1], &theirs.flags));
        let mine = attach(&memory.flags[0], &memory.flags);
        let other = peer.join().unwrap();
        assert!(mine || other);
    });
}

/// A giver with fewer places than pieces, and a reader. Each place is written and read under loom's eyes.
fn stream(places: usize, ask: impl Fn(&Flag, usize) -> bool + Send + Sync + 'static) {
    const PIECES: usize = 3;
    struct Window {
        given: Flag,
        taken: Flag,
        places: Vec<UnsafeCell<usize>>,
    }
    let ask = std::sync::Arc::new(ask);
    loom::model(move || {
        let window = Arc::new(Window {
            given: Flag::new(),
            taken: Flag::new(),
            places: (0..places).map(|_| UnsafeCell::new(0)).collect(),
        });
        let theirs = Arc::clone(&window);
        let reader = thread::spawn(move || {
            for piece in 0..PIECES {
                while !may_take(&theirs.given, piece) {
                    thread::yield_now();
                }
                // SAFETY: loom ends the test if anybody writes at the same time.
                let read = theirs.places[piece % places].with(|place| unsafe { *place });
                assert_eq!(read, piece + 1);
                theirs.taken.set(piece as u64 + 1);
            }
        });
        for piece in 0..PIECES {
            while !ask(&window.taken, piece) {
                thread::yield_now();
            }
            // SAFETY: loom ends the test if anybody reads or writes at the same time.
            window.places[piece % places].with_mut(|place| unsafe { *place = piece + 1 });
            window.given.set(piece as u64 + 1);
        }
        reader.join().unwrap();
    });
}

#[test]
fn a_place_is_written_again_when_its_piece_was_taken() {
    stream(1, |taken, given| may_give(taken, given, 1));
    stream(2, |taken, given| may_give(taken, given, 2));
}

#[test]
#[should_panic(expected = "assertion `left == right` failed")]
fn a_place_too_many_is_written_while_it_is_read() {
    stream(1, |taken, given| may_give(taken, given, 2));
}

/// Two ranks that give, combine and store so many pieces in rounds, with these many places. All are written and read under loom's eyes.
fn rounds(pieces: usize, places: usize) {
    #[derive(Default)]
    struct Window {
        given: UnsafeCell<usize>,
        slice: UnsafeCell<usize>,
    }
    struct Rank {
        ended: Flag,
        windows: Vec<Window>,
    }
    fn play(ranks: &[Rank; 2], me: usize, pieces: usize, places: usize) {
        let (mine, theirs) = (&ranks[me], &ranks[1 - me]);
        for round in 0..pieces + 2 {
            while !may_begin(&theirs.ended, round) {
                thread::yield_now();
            }
            if let Some(piece) = round.checked_sub(2) {
                // SAFETY: loom ends the test if anybody writes at the same time.
                let slice = theirs.windows[piece % places]
                    .slice
                    .with(|at| unsafe { *at });
                assert_eq!(slice, 10 * piece + 1);
            }
            if let Some(piece) = round.checked_sub(1).filter(|piece| *piece < pieces) {
                let place = piece % places;
                // SAFETY: as above.
                let given = theirs.windows[place].given.with(|at| unsafe { *at });
                assert_eq!(given, piece + 1);
                // SAFETY: loom ends the test if anybody reads or writes at the same time.
                mine.windows[place]
                    .slice
                    .with_mut(|at| unsafe { *at = 10 * piece + 1 });
            }
            if round < pieces {
                // SAFETY: as above.
                mine.windows[round % places]
                    .given
                    .with_mut(|at| unsafe { *at = round + 1 });
            }
            mine.ended.set(round as u64 + 1);
        }
    }
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let ranks = Arc::new([0, 1].map(|_| Rank {
            ended: Flag::new(),
            windows: (0..places).map(|_| Window::default()).collect(),
        }));
        let others = Arc::clone(&ranks);
        let other = thread::spawn(move || play(&others, 1, pieces, places));
        play(&ranks, 0, pieces, places);
        other.join().unwrap();
    });
}

#[test]
fn with_two_places_nothing_is_written_in_a_round_in_which_it_is_read() {
    rounds(3, 2);
}

#[test]
#[should_panic(expected = "assertion `left == right` failed")]
fn with_one_place_a_round_writes_what_is_read_in_it() {
    rounds(2, 1);
}

/// Rank 1 gives an operation up whose data rank 2 may still combine, and changes them. Rank 0 waits for both. `ended` is how
/// it finds that all is well; the ranks are looked at in this order.
fn buffers(order: [usize; 2], ended: impl Fn([&Flag; 2]) -> bool + Send + Sync + 'static) {
    struct Buffers {
        seconds: [Flag; 2],
        /// Of rank 1: read where it is, whatever it is.
        data: AtomicU64,
        /// What rank 2 makes of it.
        slice: AtomicU64,
    }
    let ended = std::sync::Arc::new(ended);
    loom::model(move || {
        let memory = Arc::new(Buffers {
            seconds: [Flag::new(), Flag::new()],
            data: AtomicU64::new(5),
            slice: AtomicU64::new(0),
        });
        let (one, two) = (Arc::clone(&memory), Arc::clone(&memory));
        let gives_up = thread::spawn(move || {
            slice(&one.seconds[0], FIRST);
            take_back(&one.seconds[0], FIRST);
            one.data.store(6, Ordering::Relaxed);
        });
        let combines = thread::spawn(move || {
            let read = two.data.load(Ordering::Relaxed);
            two.slice.store(read, Ordering::Relaxed);
            slice(&two.seconds[1], FIRST);
        });
        let seconds = order.map(|rank| &memory.seconds[rank]);
        if ended(seconds) {
            assert_eq!(memory.slice.load(Ordering::Relaxed), 5);
        }
        gives_up.join().unwrap();
        combines.join().unwrap();
    });
}

#[test]
fn who_ends_well_has_slices_of_data_that_nobody_had_taken_back() {
    for order in [[0, 1], [1, 0]] {
        buffers(order, |seconds| all_have_sliced(seconds.into_iter(), FIRST));
    }
}

#[test]
#[should_panic(expected = "left: 6")]
fn one_look_takes_a_slice_of_data_that_were_changed() {
    buffers([0, 1], |seconds| {
        seconds.iter().all(|second| second.get() == FIRST)
    });
}
