//! The rules of a link's ring in shared memory, explored in every order in which writer and reader can run.
//!
//! The functions are those that lanes use: their files are a part of this test. The words and the bytes are loom's, the socket
//! that wakes is a count behind a lock. What loom finds: bytes that are read while they are written, wake-ups that are lost.

#![allow(clippy::unwrap_used)]

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Mutex, Notify};
use loom::thread;

#[path = "common/flag.rs"]
mod flag;
#[allow(dead_code, unreachable_pub)]
#[path = "../src/shm/ring.rs"]
mod ring;
#[allow(dead_code, unreachable_pub)]
#[path = "../src/shm/rules.rs"]
mod rules;

/// Where the ring finds its words' rules, as in the library.
mod shm {
    pub(crate) use super::rules;
}

use flag::Flag;
use ring::{Reader, Words, Writer};
use rules::Word;

/// One way of a socket: what was sent and not yet read, and whether the sender is gone.
struct Socket {
    state: Mutex<(u32, bool)>,
    changed: Notify,
}

impl Socket {
    fn new() -> Self {
        Self {
            state: Mutex::new((0, false)),
            changed: Notify::new(),
        }
    }

    fn ring(&self) {
        self.state.lock().unwrap().0 += 1;
        self.changed.notify();
    }

    fn end(&self) {
        self.state.lock().unwrap().1 = true;
        self.changed.notify();
    }

    /// Waits until something came, and reads all of it. Returns whether the sender is gone.
    fn wait(&self) -> bool {
        loop {
            let (rung, is_gone) = {
                let mut state = self.state.lock().unwrap();
                (std::mem::take(&mut state.0), state.1)
            };
            if rung > 0 || is_gone {
                return is_gone;
            }
            self.changed.wait();
        }
    }
}

struct Memory {
    tail: Flag,
    base: Flag,
    head: Flag,
    writer_sleeps: Flag,
    reader_sleeps: Flag,
    bytes: Vec<UnsafeCell<u8>>,
    to_reader: Socket,
    to_writer: Socket,
}

impl Memory {
    fn new(size: usize) -> Arc<Self> {
        Arc::new(Self {
            tail: Flag::new(),
            base: Flag::new(),
            head: Flag::new(),
            writer_sleeps: Flag::new(),
            reader_sleeps: Flag::new(),
            bytes: (0..size).map(|_| UnsafeCell::new(0)).collect(),
            to_reader: Socket::new(),
            to_writer: Socket::new(),
        })
    }

    fn words(&self) -> Words<'_, Flag> {
        Words {
            tail: &self.tail,
            base: &self.base,
            head: &self.head,
            writer_sleeps: &self.writer_sleeps,
            reader_sleeps: &self.reader_sleeps,
        }
    }

    fn put(&self, at: usize, byte: u8) {
        // SAFETY: loom ends the test if anybody reads or writes at the same time.
        self.bytes[at].with_mut(|place| unsafe { *place = byte });
    }

    fn get(&self, at: usize) -> u8 {
        // SAFETY: as above.
        self.bytes[at].with(|place| unsafe { *place })
    }
}

/// Waits for room, and writes up to `most` bytes that count on from `next`. Returns how many.
fn write(memory: &Memory, writer: &mut Writer, next: u8, most: usize) -> usize {
    let words = memory.words();
    let room = loop {
        match writer.room(&words).unwrap() {
            0 => {}
            room => break room,
        }
        writer.sleep(&words);
        match writer.room(&words).unwrap() {
            0 => assert!(!memory.to_writer.wait(), "the reader stays"),
            room => break room,
        }
    };
    writer.wake(&words);
    writer.rewind(&words);
    let count = room.min(most);
    for index in 0..count {
        let spot = writer.spot(index, 1);
        memory.put(spot.at, next + index as u8);
    }
    if writer.give(&words, count) {
        memory.to_reader.ring();
    }
    count
}

/// Waits for bytes, and reads up to `most`, which count on from `next`. Returns how many: 0 when the writer is gone.
fn read(memory: &Memory, reader: &mut Reader, next: u8, most: usize) -> usize {
    let words = memory.words();
    let mut is_gone = false;
    let held = loop {
        match reader.held(&words).unwrap() {
            0 if is_gone => return 0,
            0 => {}
            held => break held,
        }
        reader.sleep(&words);
        match reader.held(&words).unwrap() {
            0 => is_gone = memory.to_reader.wait(),
            held => break held,
        }
    };
    reader.wake(&words);
    let count = held.min(most);
    for index in 0..count {
        let spot = reader.spot(1);
        assert_eq!(memory.get(spot.at), next + index as u8);
        if reader.give_back(&words, 1) {
            memory.to_writer.ring();
        }
    }
    count
}

/// All bytes arrive, in order, and nobody sleeps for good: `total` bytes in writes of up to `writes` and reads of up to `reads`. In
/// all orders in which a side is stopped against its will up to `stops` times.
fn passes(stops: usize, (size, total): (usize, usize), (writes, reads): (usize, usize)) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(stops);
    model.check(move || {
        let memory = Memory::new(size);
        let theirs = Arc::clone(&memory);
        let peer = thread::spawn(move || {
            let (mut writer, mut sent) = (Writer::new(size), 0);
            while sent < total {
                sent += write(&theirs, &mut writer, sent as u8, writes.min(total - sent));
            }
            theirs.to_reader.end();
        });
        let (mut reader, mut got) = (Reader::new(size), 0);
        loop {
            match read(&memory, &mut reader, got as u8, reads) {
                0 => break,
                count => got += count,
            }
        }
        assert_eq!(got, total);
        peer.join().unwrap();
    });
}

#[test]
fn bytes_arrive_in_order_and_nobody_sleeps_for_good() {
    passes(3, (1, 2), (1, 1));
    passes(2, (2, 3), (1, 1));
    passes(2, (2, 3), (2, 2));
    passes(2, (3, 4), (2, 3));
}

/// A writer that begins anew before the ring is empty writes over what is being read: the model finds it.
#[test]
#[should_panic(expected = "Causality violation")]
fn a_ring_that_is_begun_anew_too_early_is_written_over() {
    loom::model(|| {
        let memory = Memory::new(2);
        let theirs = Arc::clone(&memory);
        let peer = thread::spawn(move || {
            theirs.put(0, 0);
            theirs.tail.set(1);
            theirs.base.put(1);
            theirs.put(0, 1);
            theirs.tail.set(2);
        });
        let (words, mut reader) = (memory.words(), Reader::new(2));
        if reader.held(&words).is_ok_and(|held| held > 0) {
            memory.get(reader.spot(1).at);
        }
        peer.join().unwrap();
    });
}

/// A writer that is killed before any of its instructions: what it gave before can be read, and then the ring ends.
#[test]
fn what_was_given_before_a_death_is_read_and_nothing_else() {
    for steps in 0..=4 {
        loom::model(move || {
            let memory = Memory::new(2);
            let theirs = Arc::clone(&memory);
            let peer = thread::spawn(move || {
                let words = theirs.words();
                let mut writer = Writer::new(2);
                if steps > 0 {
                    theirs.put(writer.spot(0, 1).at, 0);
                }
                // The death may come between the count and the ring that follows it.
                let rings = steps > 1 && writer.give(&words, 1);
                if steps > 2 && rings {
                    theirs.to_reader.ring();
                }
                if steps > 3 {
                    theirs.put(writer.spot(0, 1).at, 99);
                }
                theirs.to_reader.end();
            });
            let mut reader = Reader::new(2);
            let mut got = 0;
            while read(&memory, &mut reader, got, 2) > 0 {
                got += 1;
            }
            assert_eq!(got, u8::from(steps > 1));
            peer.join().unwrap();
        });
    }
}

/// Who looks for sleepers before it gives its news is not noticed: the model finds it.
#[test]
#[should_panic(expected = "deadlock")]
fn news_after_the_look_for_sleepers_are_slept_through() {
    loom::model(|| {
        let memory = Memory::new(1);
        let theirs = Arc::clone(&memory);
        let peer = thread::spawn(move || {
            let sleeps = theirs.reader_sleeps.get() != 0;
            theirs.put(0, 0);
            theirs.tail.set(1);
            if sleeps {
                theirs.to_reader.ring();
            }
        });
        assert_eq!(read(&memory, &mut Reader::new(1), 0, 1), 1);
        peer.join().unwrap();
    });
}
