//! The rules of a ring of bytes that two processes share: one writes, one reads. Pure: over any kind of atomic words, so that
//! they can be explored (`tests/ring_rules.rs`).
//!
//! Both sides count bytes from the beginning of the link on. The writer alone writes `tail`, up to where it has written; the
//! reader alone writes `head`, up to where it has read. Each side keeps its own count to
//! itself and takes the other's from the memory only after a check: what lies between head and tail is never more than the
//! ring, and no count goes back. So whatever a faulty peer writes there, no place outside the ring is touched.
//!
//! Byte n lies at n - `base` modulo the ring's size. A writer that finds the ring empty begins anew at its start, with `base` at
//! its count: so short messages use the same few lines, which stay in caches, and a link that carries little has few
//! pages. It writes `base` before `tail`, and only while the reader has read everything: a reader that sees bytes sees the base
//! that is theirs, and it is the one before or the reader's own count.
//!
//! Who finds nothing to read (no room to write) sets its *sleeps* word and looks once more. Who has news gives them and looks
//! at that word then. In one total order one of the two sees the other. Who sees a sleeper takes the word back and rings: so
//! there is one ring for each sleep. A writer is only woken when half of the ring is free; that comes, because a reader
//! that waits for more has emptied the ring before.
//!
//! A writer that dies at any instruction leaves `tail` behind what it has written in full: the reader reads up to there.

use crate::shm::rules::Word;

/// The words of one ring.
#[derive(Debug)]
pub(crate) struct Words<'a, W> {
    pub(crate) tail: &'a W,
    pub(crate) base: &'a W,
    pub(crate) head: &'a W,
    pub(crate) writer_sleeps: &'a W,
    pub(crate) reader_sleeps: &'a W,
}

/// The peer has written a count that can't be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("between {own} of this side and {theirs} of the peer are not 0 to {size} bytes")]
pub(crate) struct Broken {
    own: u64,
    theirs: u64,
    size: u64,
}

/// Bytes of the ring that follow each other in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Spot {
    pub(crate) at: usize,
    pub(crate) length: usize,
}

fn spot(size: u64, distance: u64, most: usize) -> Spot {
    let at = distance % size;
    Spot {
        at: at as usize,
        length: most.min((size - at) as usize),
    }
}

/// The side that writes.
#[derive(Debug)]
pub(crate) struct Writer {
    size: u64,
    tail: u64,
    base: u64,
    /// The last one seen.
    head: u64,
    sleeps: bool,
}

impl Writer {
    /// Of a new ring of so many bytes, at least 1.
    pub(crate) fn new(size: usize) -> Self {
        Self {
            size: size as u64,
            tail: 0,
            base: 0,
            head: 0,
            sleeps: false,
        }
    }

    /// Bytes that there is room for.
    pub(crate) fn room<W: Word>(&mut self, words: &Words<'_, W>) -> Result<usize, Broken> {
        let head = words.head.get();
        let filled = self.tail.wrapping_sub(head);
        if filled > self.tail.wrapping_sub(self.head) {
            return Err(Broken {
                own: self.tail,
                theirs: head,
                size: self.size,
            });
        }
        self.head = head;
        Ok((self.size - filled) as usize)
    }

    /// Begins anew at the ring's start, if [`Writer::room`] has just found that it is empty. Nothing may be written that is not
    /// [given](Writer::give).
    pub(crate) fn rewind<W: Word>(&mut self, words: &Words<'_, W>) {
        if self.head == self.tail && self.base != self.tail {
            self.base = self.tail;
            words.base.put(self.base);
        }
    }

    /// Where to write next, behind `skip` bytes that were written and are not [given](Writer::give) yet.
    pub(crate) fn spot(&self, skip: usize, most: usize) -> Spot {
        let distance = self.tail.wrapping_sub(self.base).wrapping_add(skip as u64);
        spot(self.size, distance, most)
    }

    /// Gives so many bytes, which are written. Returns whether to ring.
    pub(crate) fn give<W: Word>(&mut self, words: &Words<'_, W>, count: usize) -> bool {
        self.tail = self.tail.wrapping_add(count as u64);
        words.tail.set(self.tail);
        take(words.reader_sleeps)
    }

    /// From here on, who makes room rings. Look once more.
    pub(crate) fn sleep<W: Word>(&mut self, words: &Words<'_, W>) {
        words.writer_sleeps.set(1);
        self.sleeps = true;
    }

    /// Nobody need ring any more.
    pub(crate) fn wake<W: Word>(&mut self, words: &Words<'_, W>) {
        if std::mem::take(&mut self.sleeps) {
            words.writer_sleeps.put(0);
        }
    }

    /// Whether it has slept and the peer has rung for it.
    pub(crate) fn was_rung<W: Word>(&self, words: &Words<'_, W>) -> bool {
        self.sleeps && words.writer_sleeps.get() == 0
    }
}

/// The side that reads.
#[derive(Debug)]
pub(crate) struct Reader {
    size: u64,
    head: u64,
    /// The last ones seen.
    tail: u64,
    base: u64,
    sleeps: bool,
}

impl Reader {
    /// Of a new ring of so many bytes, at least 1.
    pub(crate) fn new(size: usize) -> Self {
        Self {
            size: size as u64,
            head: 0,
            tail: 0,
            base: 0,
            sleeps: false,
        }
    }

    /// Bytes that are there.
    pub(crate) fn held<W: Word>(&mut self, words: &Words<'_, W>) -> Result<usize, Broken> {
        let tail = words.tail.get();
        let broken = |theirs| Broken {
            own: self.head,
            theirs,
            size: self.size,
        };
        let held = tail.wrapping_sub(self.head);
        if held > self.size || held < self.tail.wrapping_sub(self.head) {
            return Err(broken(tail));
        }
        if held > 0 {
            let base = words.base.get();
            if base != self.base && base != self.head {
                return Err(broken(base));
            }
            self.base = base;
        }
        self.tail = tail;
        Ok(held as usize)
    }

    /// Where to read next.
    pub(crate) fn spot(&self, most: usize) -> Spot {
        spot(self.size, self.head.wrapping_sub(self.base), most)
    }

    /// Gives the room of so many bytes back, which are read. Returns whether to ring.
    pub(crate) fn give_back<W: Word>(&mut self, words: &Words<'_, W>, count: usize) -> bool {
        self.head = self.head.wrapping_add(count as u64);
        words.head.set(self.head);
        let left = self.tail.wrapping_sub(self.head);
        left <= self.size / 2 && take(words.writer_sleeps)
    }

    /// From here on, who writes rings. Look once more.
    pub(crate) fn sleep<W: Word>(&mut self, words: &Words<'_, W>) {
        words.reader_sleeps.set(1);
        self.sleeps = true;
    }

    /// Nobody need ring any more.
    pub(crate) fn wake<W: Word>(&mut self, words: &Words<'_, W>) {
        if std::mem::take(&mut self.sleeps) {
            words.reader_sleeps.put(0);
        }
    }

    /// Whether it has slept and the peer has rung for it.
    pub(crate) fn was_rung<W: Word>(&self, words: &Words<'_, W>) -> bool {
        self.sleeps && words.reader_sleeps.get() == 0
    }
}

/// Whether the peer sleeps. It is rung for by whoever takes this.
fn take<W: Word>(sleeps: &W) -> bool {
    let does = sleeps.get() != 0;
    if does {
        sleeps.put(0);
    }
    does
}
