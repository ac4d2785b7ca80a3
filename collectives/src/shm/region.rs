//! A memory file without a name that cannot change its length, mapped.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::left;

const PAGE: usize = 4096;
/// Pages are asked for in pieces of this size: an order of magnitude longer than what it takes to find out how many are left.
const PIECE: usize = 64 << 20;
/// Shorter memory has no use for huge pages.
const HUGE: usize = 2 << 20;

const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

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

/// One mapping of a memory file. Other processes may write any byte of it at any time.
pub(super) struct Region {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping is memory that any thread may use at any time, and stays mapped as long as the value lives. What
// hands its address out says how it may be touched.
unsafe impl Send for Region {}
// SAFETY: as above; no method needs `&mut self`.
unsafe impl Sync for Region {}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("length", &self.length)
            .finish_non_exhaustive()
    }
}

impl Region {
    /// Makes a file of zeros, for others to map too. It goes with the last process that has it.
    pub(super) fn create(name: &str, length: usize) -> Result<(Self, OwnedFd), MapError> {
        // A file that is longer than the process may have is not refused but a signal.
        let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
        if limit.is_some_and(|limit| limit < length as u64) {
            return Err(MapError::Foreign(
                "the limit of file sizes (RLIMIT_FSIZE) is too low",
            ));
        }
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, length as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SEALS)?;
        Ok((Self::map(fd.as_fd(), length)?, fd))
    }

    /// Maps what another process made, if it has this length for good.
    pub(super) fn open(fd: BorrowedFd<'_>, length: usize) -> Result<Self, MapError> {
        // Only memory of this kind has seals. Without them it could become shorter, and reading it deadly.
        let seals = rustix::fs::fcntl_get_seals(fd)
            .map_err(|_| MapError::Foreign("it is no memory file"))?;
        if !seals.contains(SEALS) {
            return Err(MapError::Foreign("its length is not sealed"));
        }
        if rustix::fs::fstat(fd)?.st_size != length as i64 {
            return Err(MapError::Foreign("it has another length"));
        }
        Self::map(fd, length)
    }

    fn map(fd: BorrowedFd<'_>, length: usize) -> Result<Self, MapError> {
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
        let region = Self { base, length };
        region.advise(Advice::LinuxDontFork);
        region.advise(Advice::LinuxDontDump);
        if length >= HUGE {
            region.advise(Advice::LinuxHugepage);
        }
        Ok(region)
    }

    /// A child that a program forks is no rank: it does not get the memory, and does not keep it. Not every system has all
    /// of this, and nothing depends on it.
    fn advise(&self, advice: Advice) {
        // SAFETY: the range is the mapping; none of what is asked for changes what it holds for this process.
        let advised =
            unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.length, advice) };
        if let Err(error) = advised {
            tracing::trace!(%error, ?advice, "advice on shared memory was not taken");
        }
    }

    /// The first byte, which is aligned to a page.
    #[inline]
    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// The address of a range.
    ///
    /// # Panics
    ///
    /// If it is not all inside.
    #[inline]
    pub(super) fn range(&self, at: usize, length: usize) -> NonNull<u8> {
        assert!(
            at <= self.length && length <= self.length - at,
            "{length} bytes at {at} are not in a memory of {}",
            self.length
        );
        // SAFETY: it was just checked that the range is inside the mapping.
        unsafe { self.base.add(at) }
    }

    /// Gets pages for a range, so that the system says now if there are none, and not by a signal later. Takes about as long as
    /// writing to all of it.
    ///
    /// # Errors
    ///
    /// The system's, or that the host has not so much memory left. Then a part of the pages may be there.
    pub(super) fn populate(&self, at: usize, length: usize) -> io::Result<()> {
        let (mut at, end) = (at - at % PAGE, at + length);
        if length >= PIECE {
            left::check(length)?;
        }
        while at < end {
            let piece = PIECE.min(end - at);
            // The ranks of the host may all ask at once.
            if piece == PIECE {
                left::check(piece)?;
            }
            let begin = self.range(at, piece);
            // SAFETY: the range is inside the mapping. Populating changes nothing that is there.
            let populated = unsafe {
                rustix::mm::madvise(begin.as_ptr().cast(), piece, Advice::LinuxPopulateWrite)
            };
            match populated {
                Ok(()) => at += piece,
                // Before Linux 5.14 there is no such thing; pages come when they are touched.
                Err(rustix::io::Errno::INVAL) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping that `map` made, and nothing refers to it any more: all references borrow `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
        debug_assert!(unmapped.is_ok());
    }
}
