//! The memory that all ranks of a host map, and the only ways to touch it.
//!
//! Another process may write any byte of it at any time: a peer may be dead in the middle of a write, late, or faulty. So no
//! reference to its data is ever made (but by [`super::buffer`], for the caller's own data). Flags are atomics; data is
//! [copied](super::copy) in and out, after the place was checked against the layout, which is computed from the world size
//! alone and never read from the memory.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use kolo_transport::ids::{Generation, JobId};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::copy;

/// Most ranks that share an arena: each of them has a link to each other one.
pub(crate) const MOST_RANKS: u32 = 64;
/// Bytes of data that travel in the line of the flag.
pub(crate) const INLINE: usize = 56;
/// Bytes of each of a rank's two slots.
pub(crate) const SLOT: usize = 256 << 10;
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
const RECORD: usize = 8 * LINE;
/// Words of a record.
pub(crate) const RECORD_WORDS: usize = 12;

/// The first page.
const MAGIC: u64 = u64::from_le_bytes(*b"kolo-shm");
const VERSION: u64 = 1;
const HEADER: usize = 4096;
/// Words of the first page, from its start on.
const STATE: usize = 512;

/// Data of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the line of the flag of this parity.
    Inline(usize),
    /// The slot of this parity.
    Slot(usize),
    /// The area.
    Area,
    /// From this byte of the heap on.
    Heap(usize),
}

/// Why there is no shared memory.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MapError {
    #[error("the system gives no shared memory: {0}")]
    System(#[from] io::Error),
    #[error("what was passed is not this group's shared memory: {0}")]
    Foreign(&'static str),
}

impl From<rustix::io::Errno> for MapError {
    fn from(error: rustix::io::Errno) -> Self {
        Self::System(error.into())
    }
}

/// Whose memory it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) job: JobId,
    pub(crate) generation: Generation,
    pub(crate) world: u32,
}

/// One mapping of the shared memory.
pub(crate) struct Map {
    base: NonNull<u8>,
    world: usize,
}

// SAFETY: the mapping is memory that any thread may use at any time: it is touched through atomics and raw copies alone,
// and stays mapped as long as the value lives.
unsafe impl Send for Map {}
// SAFETY: as above; no method needs `&mut self`.
unsafe impl Sync for Map {}

impl fmt::Debug for Map {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Map")
            .field("world", &self.world)
            .finish_non_exhaustive()
    }
}

/// Bytes that a rank has behind the flags.
const fn share() -> usize {
    2 * SLOT + AREA + HEAP
}

const fn total(world: usize) -> usize {
    HEADER + world * (CONTROL + share())
}

impl Map {
    /// Makes the memory, for others to map too. It has no name: it goes with the last process that has it.
    pub(crate) fn create(owner: Owner) -> Result<(Self, OwnedFd), MapError> {
        let world = owner.world as usize;
        if owner.world > MOST_RANKS {
            return Err(MapError::Foreign("there are more ranks than share memory"));
        }
        let length = total(world) as u64;
        // A file that is longer than the process may have is not refused but a signal.
        let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
        if limit.is_some_and(|limit| limit < length) {
            return Err(MapError::Foreign(
                "the limit of file sizes (RLIMIT_FSIZE) is too low",
            ));
        }
        let fd = rustix::fs::memfd_create(
            "kolo-arena",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )?;
        rustix::fs::ftruncate(&fd, length)?;
        rustix::fs::fcntl_add_seals(&fd, SEALS)?;
        let map = Self::whole(fd.as_fd(), world)?;
        let head = [
            MAGIC,
            VERSION,
            owner.job.0,
            owner.generation.0,
            u64::from(owner.world),
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
        // Only memory of this kind has seals. Without them it could become shorter, and reading it deadly.
        let seals = rustix::fs::fcntl_get_seals(fd)
            .map_err(|_| MapError::Foreign("it is no memory file"))?;
        if !seals.contains(SEALS) {
            return Err(MapError::Foreign("its length is not sealed"));
        }
        if rustix::fs::fstat(fd)?.st_size != total(world) as i64 {
            return Err(MapError::Foreign("it has another length"));
        }
        let map = Self::whole(fd, world)?;
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
        Ok(map)
    }

    fn whole(fd: BorrowedFd<'_>, world: usize) -> Result<Self, MapError> {
        let length = total(world);
        // SAFETY: the address is the system's choice, so that no memory of this process is replaced. The file is as long
        // as the mapping and sealed against becoming shorter.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                fd,
                0,
            )?
        };
        let base =
            NonNull::new(base.cast::<u8>()).ok_or(MapError::Foreign("it is at address 0"))?;
        let map = Self { base, world };
        // A child that a program forks is no rank: it does not get the memory, and does not keep it.
        for advice in [
            Advice::LinuxDontFork,
            Advice::LinuxDontDump,
            Advice::LinuxHugepage,
        ] {
            // Not every system has them, and nothing depends on them.
            // SAFETY: the range is the mapping; none of them changes what it holds for this process.
            let advised = unsafe { rustix::mm::madvise(base.as_ptr().cast(), length, advice) };
            if let Err(error) = advised {
                tracing::trace!(%error, ?advice, "advice on shared memory was not taken");
            }
        }
        Ok(map)
    }

    pub(crate) fn world(&self) -> usize {
        self.world
    }

    /// An atomic at this byte, which is a multiple of 8 among the flags.
    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at + 8 <= HEADER + self.world * CONTROL && at.is_multiple_of(8));
        // SAFETY: the byte is inside the mapping, which is aligned to a page and lives as long as `self`. All of the flags are
        // only touched as atomics of 8 or 4 bytes, of which no two of different size overlap.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(at).cast()) }
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
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(HEADER + rank * CONTROL + at).cast()) }
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
            Place::Slot(parity) => ((parity & 1) * SLOT, SLOT),
            Place::Area => (2 * SLOT, AREA),
            Place::Heap(start) => {
                assert!(start <= HEAP, "a buffer is in the heap");
                (2 * SLOT + AREA + start, HEAP - start)
            }
        };
        assert!(
            rank < self.world && at <= room && length <= room - at,
            "{length} bytes at {at} of rank {rank} are not in a place of {room}"
        );
        let at = HEADER + self.world * CONTROL + rank * share() + start + at;
        // SAFETY: it was checked above that the range is in the place, and places are inside the mapping.
        unsafe { self.base.add(at) }
    }

    /// Copies data of a rank.
    pub(crate) fn read(&self, rank: usize, place: Place, at: usize, into: &mut [u8]) {
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
        let head = into.as_ptr().align_offset(copy::LINE).min(into.len());
        let lines = (into.len() - head) / copy::LINE;
        let (first, rest) = into.split_at_mut(head);
        let (middle, last) = rest.split_at_mut(lines * copy::LINE);
        self.read(rank, place, at, first);
        let from = self.data(rank, place, at + head, middle.len());
        // SAFETY: source and destination have `lines` lines, checked by `data` and by the slice, whose beginning is aligned by
        // the choice of `head` (or which has no line).
        unsafe { copy::stream_lines::<true>(from.as_ptr(), middle.as_mut_ptr(), lines) };
        self.read(rank, place, at + head + lines * copy::LINE, last);
        copy::fence();
    }

    /// Copies to a rank's data: the own ones, or others' by agreement.
    pub(crate) fn write(&self, rank: usize, place: Place, at: usize, from: &[u8]) {
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
        let into = self.data(rank, place, at, from.len());
        // SAFETY: the destination is inside the mapping (checked by `data`), where no slice is: a buffer that gives one
        // is borrowed as a whole while an operation writes it.
        unsafe { copy::bytes(from.as_ptr(), into.as_ptr(), from.len()) }
    }

    /// As [`Map::write`], past the caches. [`Map::fence`] has to follow before others are told.
    pub(crate) fn write_streaming(&self, rank: usize, place: Place, at: usize, from: &[u8]) {
        let into = self.data(rank, place, at, from.len());
        let head = into.as_ptr().align_offset(copy::LINE).min(from.len());
        let lines = (from.len() - head) / copy::LINE;
        let (first, rest) = from.split_at(head);
        let (middle, last) = rest.split_at(lines * copy::LINE);
        self.write(rank, place, at, first);
        // SAFETY: source and destination have `lines` lines behind `head`, checked by the slice and by `data`; the
        // destination is aligned by the choice of `head` (or there is no line).
        unsafe {
            let into = into.as_ptr().add(head);
            copy::stream_lines::<false>(middle.as_ptr(), into, lines);
        }
        self.write(rank, place, at + head + lines * copy::LINE, last);
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
        const PAGE: usize = 4096;
        let begin = self.data(rank, place, at, length).as_ptr();
        let slack = begin.addr() % PAGE;
        // SAFETY: the range is inside the mapping: it begins at most a page before data that are inside and behind the first
        // page. Populating changes nothing that is there.
        let populated = unsafe {
            rustix::mm::madvise(
                begin.sub(slack).cast(),
                length + slack,
                Advice::LinuxPopulateWrite,
            )
        };
        match populated {
            // Before Linux 5.14 there is no such thing; pages come when they are touched.
            Ok(()) | Err(rustix::io::Errno::INVAL) => Ok(()),
            Err(error) => Err(error.into()),
        }
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

const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping that `map` made, and nothing refers to it any more: all references borrow `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), total(self.world)) };
        debug_assert!(unmapped.is_ok());
    }
}
