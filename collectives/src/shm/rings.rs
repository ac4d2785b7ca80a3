//! The memory of one link between two ranks of a host: a ring of bytes for each direction. What the words in it mean, the
//! rules of a [ring](super::ring) say.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use super::region::{MapError, Region};
use super::ring::{Spot, Words};
use crate::copy;

/// Bytes of each of the two rings: a frame of the longest kind and as much again.
pub(crate) const SIZE: usize = 512 << 10;

const MAGIC: u64 = u64::from_le_bytes(*b"kolo-rng");
const VERSION: u64 = 1;
/// Before the rings.
const HEADER: usize = 4096;
/// Lines are this far apart: processors fetch them in pairs.
const LINE: usize = 128;
/// The words of the first ring, and of the second.
const WORDS: usize = 512;
const TOTAL: usize = HEADER + 2 * SIZE;

/// Least pages that a ring gets at once, in bytes.
const FIRST: usize = 16 << 10;

/// One of the two rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From who made the memory.
    Out,
    /// To who made it.
    Back,
}

impl Direction {
    pub(crate) fn other(self) -> Self {
        match self {
            Self::Out => Self::Back,
            Self::Back => Self::Out,
        }
    }

    fn index(self) -> usize {
        match self {
            Self::Out => 0,
            Self::Back => 1,
        }
    }
}

/// Both rings, mapped. The file is sparse: pages come when they are used.
#[derive(Debug)]
pub(crate) struct Rings(Region);

impl Rings {
    /// Makes new ones, for the peer to map too.
    pub(crate) fn create() -> Result<(Self, OwnedFd), MapError> {
        let (region, fd) = Region::create("kolo-ring", TOTAL)?;
        region.populate(0, HEADER)?;
        let rings = Self(region);
        rings.word(0).store(MAGIC, Ordering::Relaxed);
        rings.word(8).store(VERSION, Ordering::Relaxed);
        Ok((rings, fd))
    }

    /// Maps what the peer made.
    pub(crate) fn open(fd: BorrowedFd<'_>) -> Result<Self, MapError> {
        let rings = Self(Region::open(fd, TOTAL)?);
        let is = |at, word| rings.word(at).load(Ordering::Relaxed) == word;
        if !is(0, MAGIC) || !is(8, VERSION) {
            return Err(MapError::Foreign("it holds no rings of this version"));
        }
        Ok(rings)
    }

    #[inline]
    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at + 8 <= HEADER && at.is_multiple_of(8));
        // SAFETY: the byte is inside the mapping, which is aligned to a page and lives as long as `self`. All of the header is
        // only touched as atomics of 8 bytes.
        unsafe { AtomicU64::from_ptr(self.0.base().as_ptr().add(at).cast()) }
    }

    #[inline]
    pub(crate) fn words(&self, direction: Direction) -> Words<'_, AtomicU64> {
        let line = |index| self.word(WORDS + (4 * direction.index() + index) * LINE);
        let of_tail = WORDS + 4 * direction.index() * LINE;
        Words {
            tail: self.word(of_tail),
            // It is written and read together with the tail.
            base: self.word(of_tail + 8),
            head: line(1),
            writer_sleeps: line(2),
            reader_sleeps: line(3),
        }
    }

    #[inline]
    fn at(direction: Direction, spot: Spot) -> usize {
        let Spot { at, length } = spot;
        assert!(
            at <= SIZE && length <= SIZE - at,
            "{spot:?} is not in the ring"
        );
        HEADER + direction.index() * SIZE + at
    }

    /// Copies bytes in, as many as the spot has.
    ///
    /// # Panics
    ///
    /// If the spot is not in the ring, or `from` is shorter.
    #[inline]
    pub(crate) fn write(&self, direction: Direction, spot: Spot, from: &[u8]) {
        let from = &from[..spot.length];
        let into = self.0.range(Self::at(direction, spot), from.len());
        // SAFETY: the destination is inside the mapping (checked by `range`), where no reference to data is ever made; the
        // source is memory of this process.
        unsafe { copy::bytes(from.as_ptr(), into.as_ptr(), from.len()) }
    }

    /// Copies bytes out, as many as the spot has.
    ///
    /// # Panics
    ///
    /// If the spot is not in the ring, or `into` is shorter.
    #[inline]
    pub(crate) fn read(&self, direction: Direction, spot: Spot, into: &mut [u8]) {
        let into = &mut into[..spot.length];
        let from = self.0.range(Self::at(direction, spot), into.len());
        // SAFETY: the source is inside the mapping (checked by `range`), the destination is memory of this process that nothing
        // else has.
        unsafe { copy::bytes(from.as_ptr(), into.as_mut_ptr(), into.len()) }
    }

    /// Sees to it that there are pages for a ring up to the end of this spot, of which `before` bytes have some. Returns how many
    /// have some then. So a link that carries little has few, and a host without memory is an error and no signal.
    pub(crate) fn populate(
        &self,
        direction: Direction,
        spot: Spot,
        before: usize,
    ) -> io::Result<usize> {
        let end = spot.at + spot.length;
        if end <= before {
            return Ok(before);
        }
        let all = end.next_power_of_two().clamp(FIRST, SIZE);
        let rest = Spot {
            at: before,
            length: all - before,
        };
        self.0
            .populate(Self::at(direction, rest), rest.length)
            .map(|()| all)
    }
}
