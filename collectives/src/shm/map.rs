//! The memory that all ranks of a host map, and the only ways to touch it.
//!
//! Another process may write any byte of it at any time: a peer may be dead in the middle of a write, late, or faulty. So no
//! reference to its data is ever made (but by [`super::buffer`], for the caller's own data). Flags are atomics; data is
//! [copied](crate::copy) in and out, after the place was checked against the layout, which is computed from the world size
//! alone and never read from the memory.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kolo_transport::ids::{Generation, JobId};
use rustix::mm::Advice;

use super::pace::{self, Pace};
pub(crate) use super::region::MapError;
use super::region::Region;
use crate::copy;
use crate::record::Tally;

/// Most ranks that share an arena: each of them has a link to each other one.
pub(crate) const MOST_RANKS: u32 = 64;
/// Bytes of data that travel in the line of the flag.
pub(crate) const INLINE: usize = 56;
/// Bytes of a rank's area, most of which no page ever stands behind.
pub(crate) const AREA: usize = 16 << 30;
/// Bytes of a rank's heap, for buffers.
pub(crate) const HEAP: usize = 32 << 30;

/// Lines are this far apart: processors fetch them in pairs.
const LINE: usize = 128;
/// Bytes of a rank's flags.
const CONTROL: usize = 4096;
const FRONT: usize = 0;
const DONE: usize = 2 * LINE;
const SECOND: usize = 3 * LINE;
const BELL: usize = 4 * LINE;
const TOLD: usize = 5 * LINE;
const ATTACHED: usize = 6 * LINE;
const GIVEN: usize = 7 * LINE;
const RECORD: usize = 8 * LINE;
const TAKEN: usize = 10 * LINE;
/// Words of a record.
pub(crate) const RECORD_WORDS: usize = 12;

/// The first page.
const MAGIC: u64 = u64::from_le_bytes(*b"kolo-shm");
const VERSION: u64 = 4;
const HEADER: usize = 4096;
/// Words of the first page, from its start on, behind those that say whose it is.
const CROWDED: usize = 5 * 8;
const STATE: usize = 512;

/// Data of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the line of the flag of this parity.
    Inline(usize),
    /// The area.
    Area,
    /// From this byte of the heap on.
    Heap(usize),
}

/// Whose memory it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) job: JobId,
    pub(crate) generation: Generation,
    pub(crate) world: u32,
}

/// One mapping of the shared memory. It is touched through atomics and raw copies alone.
#[derive(Debug)]
pub(crate) struct Map {
    region: Region,
    world: usize,
    crowded: bool,
    /// By rank, what was written to its memory and read from there.
    moved: Arc<[Tally]>,
    /// How this rank writes.
    pace: Mutex<Pace>,
}

/// Bytes that a rank has behind the flags.
const fn share() -> usize {
    AREA + HEAP
}

fn tallies(world: usize) -> Arc<[Tally]> {
    (0..world).map(|_| Tally::default()).collect()
}

const fn total(world: usize) -> usize {
    HEADER + world * (CONTROL + share())
}

impl Map {
    /// Makes the memory, for others to map too. It has no name: it goes with the last process that has it.
    ///
    /// `crowded`: there are more ranks than processors, for all who map it.
    pub(crate) fn create(owner: Owner, crowded: bool) -> Result<(Self, OwnedFd), MapError> {
        let world = owner.world as usize;
        if owner.world > MOST_RANKS {
            return Err(MapError::Foreign("there are more ranks than share memory"));
        }
        let (region, fd) = Region::create("kolo-arena", total(world))?;
        let map = Self {
            region,
            world,
            crowded,
            moved: tallies(world),
            pace: Mutex::new(Pace::new()),
        };
        let head = [
            MAGIC,
            VERSION,
            owner.job.0,
            owner.generation.0,
            u64::from(owner.world),
            u64::from(crowded),
        ];
        for (index, word) in head.into_iter().enumerate() {
            map.word(index * 8).store(word, Ordering::Relaxed);
        }
        Ok((map, fd))
    }

    /// Maps what another rank made, if it is what it should be.
    pub(crate) fn open(fd: BorrowedFd<'_>, owner: Owner) -> Result<Self, MapError> {
        let world = owner.world as usize;
        if owner.world > MOST_RANKS {
            return Err(MapError::Foreign("there are more ranks than share memory"));
        }
        let region = Region::open(fd, total(world))?;
        let mut map = Self {
            region,
            world,
            crowded: false,
            moved: tallies(world),
            pace: Mutex::new(Pace::new()),
        };
        let head = [
            (MAGIC, "it has another magic word"),
            (VERSION, "it is of another version"),
            (owner.job.0, "it is of another job"),
            (owner.generation.0, "it is of another generation"),
            (u64::from(owner.world), "it is for another number of ranks"),
        ];
        for (index, (word, wrong)) in head.into_iter().enumerate() {
            if map.word(index * 8).load(Ordering::Relaxed) != word {
                return Err(MapError::Foreign(wrong));
            }
        }
        map.crowded = map.word(CROWDED).load(Ordering::Relaxed) != 0;
        Ok(map)
    }

    /// Whether there are more ranks than processors, by the word of the rank that made it: all say the same.
    pub(crate) fn is_crowded(&self) -> bool {
        self.crowded
    }

    pub(crate) fn world(&self) -> usize {
        self.world
    }

    /// What this rank moved, by the rank whose memory it is.
    pub(crate) fn moved(&self) -> Arc<[Tally]> {
        Arc::clone(&self.moved)
    }

    /// An atomic at this byte, which is a multiple of 8 among the flags.
    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at + 8 <= HEADER + self.world * CONTROL && at.is_multiple_of(8));
        // SAFETY: the byte is inside the mapping, which is aligned to a page and lives as long as `self`. All of the flags are
        // only touched as atomics of 8 or 4 bytes, of which no two of different size overlap.
        unsafe { AtomicU64::from_ptr(self.region.base().as_ptr().add(at).cast()) }
    }

    fn of(&self, rank: usize, at: usize) -> &AtomicU64 {
        debug_assert!(at < CONTROL);
        self.word(HEADER + rank * CONTROL + at)
    }

    /// Whether the memory is used: see [`super::setup`].
    pub(crate) fn state(&self) -> &AtomicU64 {
        self.word(STATE)
    }

    pub(crate) fn attached(&self, rank: usize) -> &AtomicU64 {
        self.of(rank, ATTACHED)
    }

    /// The flag of a rank.
    pub(crate) fn front(&self, rank: usize, parity: usize) -> &AtomicU64 {
        self.of(rank, FRONT + (parity & 1) * LINE)
    }

    /// The own flag of this parity is written next.
    pub(crate) fn expect_write(&self, rank: usize, parity: usize) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
            let line = self.front(rank, parity).as_ptr();
            // SAFETY: a prefetch changes nothing and may be of any address.
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(line.cast()) }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (rank, parity);
    }

    /// The data beside the flag.
    pub(crate) fn inline(&self, rank: usize, parity: usize, index: usize) -> &AtomicU64 {
        assert!(index < INLINE / 8);
        self.of(rank, FRONT + (parity & 1) * LINE + 8 + index * 8)
    }

    pub(crate) fn done(&self, rank: usize, parity: usize) -> &AtomicU64 {
        self.of(rank, DONE + (parity & 1) * 8)
    }

    pub(crate) fn second(&self, rank: usize) -> &AtomicU64 {
        self.of(rank, SECOND)
    }

    /// Pieces that a rank has given: see [`super::arena`].
    pub(crate) fn given(&self, rank: usize) -> &AtomicU64 {
        self.of(rank, GIVEN)
    }

    /// Pieces that it has taken of all others.
    pub(crate) fn taken(&self, rank: usize) -> &AtomicU64 {
        self.of(rank, TAKEN)
    }

    pub(crate) fn told(&self, rank: usize) -> &AtomicU64 {
        self.of(rank, TOLD)
    }

    pub(crate) fn record(&self, rank: usize, parity: usize, index: usize) -> &AtomicU64 {
        assert!(index < RECORD_WORDS);
        self.of(rank, RECORD + (parity & 1) * LINE + index * 8)
    }

    fn half(&self, rank: usize, at: usize) -> &AtomicU32 {
        assert!(rank < self.world);
        // SAFETY: as in `word`; `at` is BELL or BELL + 4, where no atomic of 8 bytes is.
        unsafe {
            AtomicU32::from_ptr(
                self.region
                    .base()
                    .as_ptr()
                    .add(HEADER + rank * CONTROL + at)
                    .cast(),
            )
        }
    }

    /// What a rank sleeps on.
    pub(crate) fn bell(&self, rank: usize) -> &AtomicU32 {
        self.half(rank, BELL)
    }

    /// Whether it sleeps, or is about to.
    pub(crate) fn sleeping(&self, rank: usize) -> &AtomicU32 {
        self.half(rank, BELL + 4)
    }

    /// The address of `length` bytes of a rank's data.
    ///
    /// # Panics
    ///
    /// If they are not all in that place: all lengths that come from others are checked before.
    fn data(&self, rank: usize, place: Place, at: usize, length: usize) -> NonNull<u8> {
        let (start, room) = match place {
            Place::Inline(_) => panic!("data in the line of a flag are words"),
            Place::Area => (0, AREA),
            Place::Heap(start) => {
                assert!(start <= HEAP, "a buffer is in the heap");
                (AREA + start, HEAP - start)
            }
        };
        assert!(
            rank < self.world && at <= room && length <= room - at,
            "{length} bytes at {at} of rank {rank} are not in a place of {room}"
        );
        let at = HEADER + self.world * CONTROL + rank * share() + start + at;
        // SAFETY: it was checked above that the range is in the place, and places are inside the mapping.
        unsafe { self.region.base().add(at) }
    }

    /// Copies data of a rank.
    pub(crate) fn read(&self, rank: usize, place: Place, at: usize, into: &mut [u8]) {
        self.moved[rank].received(into.len());
        if let Place::Inline(parity) = place {
            assert!(at + into.len() <= INLINE && at.is_multiple_of(8));
            for (index, piece) in into.chunks_mut(8).enumerate() {
                let word = self
                    .inline(rank, parity, at / 8 + index)
                    .load(Ordering::Relaxed);
                piece.copy_from_slice(&word.to_le_bytes()[..piece.len()]);
            }
            return;
        }
        let from = self.data(rank, place, at, into.len());
        // SAFETY: the source is inside the mapping (checked by `data`), the destination is memory of this process that
        // nothing else has.
        unsafe { copy::bytes(from.as_ptr(), into.as_mut_ptr(), into.len()) }
    }

    /// As [`Map::read`], past the caches on the way out: for results of many megabytes.
    pub(crate) fn read_streaming(&self, rank: usize, place: Place, at: usize, into: &mut [u8]) {
        self.moved[rank].received(into.len());
        let from = self.data(rank, place, at, into.len());
        // SAFETY: as in `read`.
        unsafe { copy::bytes_away::<true>(from.as_ptr(), into.as_mut_ptr(), into.len()) }
        copy::fence();
    }

    /// Copies to a rank's data: the own ones, or others' by agreement.
    pub(crate) fn write(&self, rank: usize, place: Place, at: usize, from: &[u8]) {
        self.moved[rank].sent(from.len());
        if let Place::Inline(parity) = place {
            assert!(at == 0 && from.len() <= INLINE);
            for (index, piece) in from.chunks(8).enumerate() {
                let mut word = [0; 8];
                word[..piece.len()].copy_from_slice(piece);
                let word = u64::from_le_bytes(word);
                self.inline(rank, parity, index)
                    .store(word, Ordering::Relaxed);
            }
            return;
        }
        // Elsewhere there are no such stores.
        if cfg!(target_arch = "x86_64") && from.len() >= pace::LEAST {
            self.write_at_pace(rank, place, at, from);
        } else {
            self.write_cached(rank, place, at, from);
        }
    }

    /// Writes to the caches, or past them if that is faster.
    fn write_at_pace(&self, rank: usize, place: Place, at: usize, from: &[u8]) {
        let way = self.pace().next(from.len());
        let begun = way.is_timed.then(Instant::now);
        if way.is_away {
            self.write_away(rank, place, at, from);
            Self::fence();
        } else {
            self.write_cached(rank, place, at, from);
        }
        if let Some(begun) = begun {
            self.pace().took(from.len(), begun.elapsed());
        }
    }

    fn pace(&self) -> MutexGuard<'_, Pace> {
        // Nothing that runs under the lock panics half-way.
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_cached(&self, rank: usize, place: Place, at: usize, from: &[u8]) {
        let into = self.data(rank, place, at, from.len());
        // SAFETY: the destination is inside the mapping (checked by `data`), where no slice is: a buffer that gives one
        // is borrowed as a whole while an operation writes it.
        unsafe { copy::bytes(from.as_ptr(), into.as_ptr(), from.len()) }
    }

    /// As [`Map::write`], past the caches. [`Map::fence`] has to follow before others are told.
    pub(crate) fn write_streaming(&self, rank: usize, place: Place, at: usize, from: &[u8]) {
        self.moved[rank].sent(from.len());
        self.write_away(rank, place, at, from);
    }

    fn write_away(&self, rank: usize, place: Place, at: usize, from: &[u8]) {
        let into = self.data(rank, place, at, from.len());
        // SAFETY: as in `write_cached`.
        unsafe { copy::bytes_away::<false>(from.as_ptr(), into.as_ptr(), from.len()) }
    }

    /// Makes what was streamed visible before what is written next.
    pub(crate) fn fence() {
        copy::fence();
    }

    /// Gets pages for a range of own data, so that the system says now if there are none, and not by a signal later.
    pub(crate) fn populate(
        &self,
        rank: usize,
        place: Place,
        at: usize,
        length: usize,
    ) -> io::Result<()> {
        let begin = self.data(rank, place, at, length).as_ptr();
        let base = self.region.base().as_ptr();
        self.region.populate(begin.addr() - base.addr(), length)
    }

    /// Gives the pages of a range of own data back. Returns whether it reads as zeros now.
    pub(crate) fn release(&self, rank: usize, place: Place, at: usize, length: usize) -> bool {
        let begin = self.data(rank, place, at, length);
        // SAFETY: the range is inside the mapping and this rank's own; nobody is in an operation that uses it.
        let released =
            unsafe { rustix::mm::madvise(begin.as_ptr().cast(), length, Advice::LinuxRemove) };
        if let Err(error) = released {
            tracing::debug!(%error, "pages of shared memory were not given back");
        }
        released.is_ok()
    }

    /// The address of a buffer of this rank, for [`super::buffer`].
    pub(crate) fn heap(&self, rank: usize, start: usize, length: usize) -> NonNull<u8> {
        self.data(rank, Place::Heap(start), 0, length)
    }
}
