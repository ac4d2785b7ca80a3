//! The caller's own data in the memory that all ranks of a host map: reduced without a copy.
//!
//! A buffer has two halves. The caller has one of them. An all-reduce reads that half of all ranks' buffers and writes the
//! other one; when it has ended well the caller has that one. When it fails the caller has what it gave (F-2), whoever of the
//! peers is still writing: they write the other half.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::map::{HEAP, Map, Place};
use super::parts::Parts;
use crate::element::{DType, Element, Elements};
use crate::error::CollectiveError;

const PAGE: usize = 4096;

/// The two halves of a buffer, as places in the heap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Buffers {
    pub(crate) input: usize,
    pub(crate) output: usize,
}

/// Whether a range that a peer named is in its heap.
pub(crate) fn is_inside(start: usize, length: usize) -> bool {
    start.is_multiple_of(64) && start <= HEAP && length <= HEAP - start
}

/// This rank's heap.
#[derive(Debug, Clone)]
pub(crate) struct Heap {
    map: Arc<Map>,
    me: usize,
    parts: Arc<Mutex<Free>>,
}

#[derive(Debug)]
struct Free {
    parts: Parts,
    /// Start and length of what nobody has any more, and late peers may still use.
    tainted: Vec<(usize, usize)>,
}

impl Heap {
    pub(crate) fn new(map: Arc<Map>, me: usize) -> Self {
        Self {
            map,
            me,
            parts: Arc::new(Mutex::new(Free {
                parts: Parts::new(HEAP),
                tainted: Vec::new(),
            })),
        }
    }

    fn free(&self) -> MutexGuard<'_, Free> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_back(&self, start: usize, length: usize) {
        if self.map.release(self.me, Place::Heap(start), 0, length) {
            self.free().parts.give_back(start, length);
        }
        // Otherwise it still holds what it held, and is not used again: a buffer begins with zeros.
    }

    /// Nobody uses any more what a buffer left that was dropped after a failure.
    pub(super) fn reclaim(&self) {
        // There is none, as a rule; and giving it back takes the lock again.
        let tainted = std::mem::take(&mut self.free().tainted);
        for (start, length) in tainted {
            self.give_back(start, length);
        }
    }

    /// A buffer of zeros.
    pub(crate) fn buffer<T: Element>(
        &self,
        len: usize,
    ) -> Result<SharedBuffer<T>, CollectiveError> {
        let refuse = |reason: String| CollectiveError::Invalid {
            reason: format!("a shared buffer of {len} {}: {reason}", T::DTYPE),
        };
        let half = len
            .checked_mul(size_of::<T>())
            .and_then(|bytes| bytes.max(1).checked_next_multiple_of(PAGE))
            .filter(|half| *half <= HEAP / 2)
            .ok_or_else(|| {
                refuse(format!(
                    "all of them together have {} bytes at most",
                    HEAP / 2
                ))
            })?;
        let start = self.free().parts.take(2 * half).ok_or_else(|| {
            refuse(format!(
                "it takes {half} bytes in one piece, twice, and all of them together have {} at most; drop others first",
                HEAP / 2
            ))
        })?;
        if let Err(error) = self.map.populate(self.me, Place::Heap(start), 0, 2 * half) {
            self.give_back(start, 2 * half);
            return Err(refuse(format!(
                "it takes {} MiB, and the system does not give them: {error}",
                (2 * half) >> 20
            )));
        }
        Ok(SharedBuffer {
            len,
            memory: Memory::Shared(Halves {
                heap: self.clone(),
                start,
                half,
                second: false,
                tainted: false,
            }),
        })
    }
}

#[derive(Debug)]
struct Halves {
    heap: Heap,
    start: usize,
    /// Bytes.
    half: usize,
    /// Which half the caller has.
    second: bool,
    /// An operation failed in which peers may still write the other half.
    tainted: bool,
}

impl Halves {
    fn place(&self, second: bool) -> usize {
        self.start + if second { self.half } else { 0 }
    }
}

impl Drop for Halves {
    fn drop(&mut self) {
        if self.tainted {
            let place = (self.start, 2 * self.half);
            self.heap.free().tainted.push(place);
        } else {
            self.heap.give_back(self.start, 2 * self.half);
        }
    }
}

#[derive(Debug)]
enum Memory<T> {
    Shared(Halves),
    Private(Vec<T>),
}

/// Elements in memory that all ranks of a host map: [`Communicator::buffer`](crate::Communicator::buffer) makes one,
/// [`Communicator::all_reduce_buffer`](crate::Communicator::all_reduce_buffer) reduces it without a copy. Otherwise it is a
/// slice, for any operation.
///
/// It takes twice its size. It lives as long as it is used, also longer than its communicator. Where ranks share no
/// memory it is memory of this process alone.
///
/// The ranks of the host can write to it, not only by agreement: it is for ranks that trust each other not to, as ranks of
/// one job do, which run the same program for the same user. A child that the program forks does not have it.
pub struct SharedBuffer<T: Element> {
    len: usize,
    memory: Memory<T>,
}

impl<T: Element> fmt::Debug for SharedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedBuffer")
            .field("len", &self.len)
            .field("is_shared", &self.is_shared())
            .finish_non_exhaustive()
    }
}

impl<T: Element> SharedBuffer<T> {
    pub(crate) fn private(len: usize) -> Result<Self, CollectiveError> {
        // Asked for first: memory of zeros, which is not touched before it is used, is only given or ends the process.
        Vec::<T>::new()
            .try_reserve_exact(len)
            .map_err(|error| CollectiveError::Invalid {
                reason: format!("a buffer of {len} {}: {error}", T::DTYPE),
            })?;
        Ok(Self {
            len,
            memory: Memory::Private(vec![T::default(); len]),
        })
    }

    /// Whether a type can be in shared memory: not all bytes that a faulty peer could write are a `bool`.
    pub(crate) fn can_be_shared() -> bool {
        T::DTYPE != DType::Bool
    }

    /// Whether other processes map it.
    pub fn is_shared(&self) -> bool {
        matches!(self.memory, Memory::Shared(_))
    }

    /// Where the two halves are in this memory.
    pub(crate) fn halves(&self, map: &Arc<Map>) -> Option<Buffers> {
        match &self.memory {
            Memory::Shared(halves) if Arc::ptr_eq(&halves.heap.map, map) => Some(Buffers {
                input: halves.place(halves.second),
                output: halves.place(!halves.second),
            }),
            _ => None,
        }
    }

    /// An operation begins, after which the other half may be written by peers, unless [`SharedBuffer::turn`] says that
    /// it ended well. Returns whether that was so before.
    pub(crate) fn taint(&mut self) -> bool {
        match &mut self.memory {
            Memory::Shared(halves) => std::mem::replace(&mut halves.tainted, true),
            Memory::Private(_) => false,
        }
    }

    /// The operation did not begin after all: it is as [`SharedBuffer::taint`] found it.
    pub(crate) fn untaint(&mut self, was: bool) {
        if let Memory::Shared(halves) = &mut self.memory {
            halves.tainted = was;
        }
    }

    /// The operation ended well: the result is in the other half.
    pub(crate) fn turn(&mut self) {
        if let Memory::Shared(halves) = &mut self.memory {
            halves.second = !halves.second;
            // What an earlier failure left running has ended: this operation waited for it.
            halves.tainted = false;
        }
    }
}

impl<T: Element> Deref for SharedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.memory {
            Memory::Private(values) => values,
            Memory::Shared(halves) => {
                let bytes = self.len * size_of::<T>();
                let place = halves.place(halves.second);
                let start = halves.heap.map.heap(halves.heap.me, place, bytes);
                // SAFETY: `heap` checked that the bytes are in the mapping, which lives as long as `self`. They begin at a page, so they
                // are aligned, and any bytes are good for the type, which is not `bool`. This half is this buffer's
                // alone; peers write it only in an operation that borrows the buffer mutably, and after one that failed they
                // write the other half. (That peers keep to that is what the type's documentation asks for.)
                unsafe { std::slice::from_raw_parts(start.cast::<T>().as_ptr(), self.len) }
            }
        }
    }
}

impl<T: Element> DerefMut for SharedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.memory {
            Memory::Private(values) => values,
            Memory::Shared(halves) => {
                let bytes = self.len * size_of::<T>();
                let place = halves.place(halves.second);
                let start = halves.heap.map.heap(halves.heap.me, place, bytes);
                // SAFETY: as in `deref`, and `self` is borrowed mutably. A peer of an operation that failed here may still read these
                // bytes; its result is never used, because it needs this rank's second flag, which is not set.
                unsafe { std::slice::from_raw_parts_mut(start.cast::<T>().as_ptr(), self.len) }
            }
        }
    }
}

impl<T: Element> Elements for SharedBuffer<T> {
    type Item = T;

    fn elements_mut(&mut self) -> &mut [T] {
        self
    }
}
