//! From what all ranks gave to the caller's memory.

use std::sync::OnceLock;

use super::super::map::{INLINE, Place};
use super::super::ticket::parity;
use super::way::{Way, rows};
use super::{Arena, BLOCK, Open, Stage};
use crate::copy;
use crate::element::{self, Element};
use crate::engine::element_size;
use crate::operation::OperationKind;
use crate::reduce;
use crate::schedule::Counts;

impl Arena {
    /// Copies the result to the caller, after [`Outcome::Ready`], and leaves the operation.
    ///
    /// `input` is what the operation began with, if its kind [withholds](Arena::withheld) some of it. (Lengths, which are
    /// gathered before operations on different lengths, are too short for that.)
    pub(crate) fn store<T: Element>(&mut self, offsets: &[usize], input: &[u8], result: &mut [T]) {
        let Some(open) = self.open.filter(|open| open.stage == Stage::Ready) else {
            return;
        };
        if matches!(open.way, Way::Stream(_) | Way::Rounds(_)) {
            // Every piece is where it belongs.
            self.leave();
            return;
        }
        let operation = &open.operation;
        let size = element_size(operation);
        let count = operation.count as usize;
        let root = operation.root.unwrap_or(0) as usize;
        let is_root = self.me == root;
        match operation.kind {
            OperationKind::Reduce | OperationKind::Gather | OperationKind::GatherVarcount
                if !is_root => {}
            OperationKind::AllReduce | OperationKind::Reduce => match open.way {
                Way::Flat => self.store_combined(&open, 0..count, &[], result),
                Way::Slices => {
                    let length = count * size;
                    for rank in 0..self.world {
                        let slice = self.slice(rank, length);
                        let place = &mut result[slice.start / size..slice.end / size];
                        self.copy(&open, rank, Place::Area, slice.start, place, length);
                    }
                }
                Way::Agree | Way::Stream(_) | Way::Rounds(_) | Way::Buffers(_) => {}
            },
            OperationKind::ReduceScatter => {
                let own = rows(operation, self.world).span(self.me as u32);
                self.store_combined(&open, own.start..own.end(), input, result);
            }
            OperationKind::Broadcast => self.part(&open, root, count, 0, &[], result),
            OperationKind::AllGather | OperationKind::AllGatherCounts | OperationKind::Gather => {
                for (rank, place) in result.chunks_mut(count.max(1)).enumerate().take(self.world) {
                    self.part(&open, rank, count, 0, input, place);
                }
            }
            OperationKind::AllGatherVarcount | OperationKind::GatherVarcount => {
                for rank in 0..self.world {
                    let (start, end) = (offsets[rank], offsets[rank + 1]);
                    self.part(&open, rank, end - start, 0, input, &mut result[start..end]);
                }
            }
            OperationKind::Scatter => {
                let at = self.me * count;
                let place = &mut result[..count];
                self.part(&open, root, count * self.world, at, input, place);
            }
            OperationKind::AllToAll => {
                let (given, at) = (count * self.world, self.me * count);
                for (rank, place) in result.chunks_mut(count.max(1)).enumerate().take(self.world) {
                    self.part(&open, rank, given, at, input, place);
                }
            }
            _ => {}
        }
        self.leave();
    }

    /// As [`Arena::store`], of an all-reduce whose result is to lie in one piece, as it travels.
    pub(crate) fn store_packed(&mut self, result: &mut [u8]) {
        let Some(open) = self.open.filter(|open| open.stage == Stage::Ready) else {
            return;
        };
        let length = Self::length(&open.operation);
        match open.way {
            Way::Flat => {
                let place = Self::place(open.way, parity(open.tag), length);
                self.combine(
                    &open.operation,
                    |_, at| (place, at),
                    None,
                    0..length,
                    |at, block| {
                        copy::slice(block, &mut result[at..at + block.len()]);
                    },
                );
            }
            Way::Slices => {
                for rank in 0..self.world {
                    let slice = self.slice(rank, length);
                    self.map
                        .read(rank, Place::Area, slice.start, &mut result[slice]);
                }
            }
            Way::Agree | Way::Stream(_) | Way::Rounds(_) | Way::Buffers(_) => {}
        }
        self.leave();
    }

    /// Copies elements from `at` on of those that a rank gave, which are `given` in all.
    fn part<T: Element>(
        &mut self,
        open: &Open,
        rank: usize,
        given: usize,
        at: usize,
        input: &[u8],
        into: &mut [T],
    ) {
        let operation = &open.operation;
        let size = element_size(operation);
        let all = into.len() * size * self.world;
        if rank == self.me && !self.withheld(operation, open.way, given * size).is_empty() {
            let from = &input[at * size..(at + into.len()) * size];
            match element::bytes_of_mut(into) {
                Some(into) if all / self.world >= streams_from() => copy::away(from, into),
                Some(into) => copy::slice(from, into),
                None => element::store(into, None, from),
            }
            return;
        }
        let place = Self::place(open.way, parity(open.tag), given * size);
        self.copy(open, rank, place, at * size, into, all);
    }

    fn copy<T: Element>(
        &mut self,
        open: &Open,
        rank: usize,
        place: Place,
        at: usize,
        into: &mut [T],
        all: usize,
    ) {
        let wire = open.operation.wire;
        if let (None, Some(into)) = (wire, element::bytes_of_mut(into))
            && (!matches!(place, Place::Inline(_)) || at.is_multiple_of(8))
        {
            if all / self.world >= streams_from() {
                self.map.read_streaming(rank, place, at, into);
            } else {
                self.map.read(rank, place, at, into);
            }
            return;
        }
        let size = element_size(&open.operation);
        self.blocks.reserve(BLOCK);
        let blocks = self.blocks.bytes_mut();
        if matches!(place, Place::Inline(_)) {
            // Words are read as a whole.
            self.map.read(rank, place, 0, &mut blocks[..INLINE]);
            let bytes = into.len() * size;
            // To where it is aligned for its type.
            blocks.copy_within(at..at + bytes, 0);
            element::store(into, wire, &blocks[..bytes]);
            return;
        }
        let each = BLOCK / size;
        for (index, into) in into.chunks_mut(each).enumerate() {
            let block = &mut blocks[..into.len() * size];
            self.map.read(rank, place, at + index * each * size, block);
            element::store(into, wire, block);
        }
    }

    /// Combines elements of what all gave, into the caller's buffer.
    fn store_combined<T: Element>(
        &mut self,
        open: &Open,
        range: std::ops::Range<usize>,
        input: &[u8],
        result: &mut [T],
    ) {
        let operation = &open.operation;
        let size = element_size(operation);
        let given = operation.count as usize * size;
        let place = Self::place(open.way, parity(open.tag), given);
        let is_withheld = !self.withheld(operation, open.way, given).is_empty();
        let own = is_withheld.then_some(input);
        let bytes = range.start * size..range.end * size;
        let start = range.start;
        if matches!(place, Place::Inline(_)) && !bytes.start.is_multiple_of(8) {
            // Words are read as a whole.
            let mut all = [T::default(); INLINE];
            let wire = operation.wire;
            self.combine(
                operation,
                |_, at| (place, at),
                None,
                0..bytes.end,
                |at, block| {
                    let at = at / size;
                    element::store(&mut all[at..at + block.len() / size], wire, block);
                },
            );
            result[..range.len()].copy_from_slice(&all[range]);
            return;
        }
        let wire = operation.wire;
        self.combine(
            operation,
            |_, at| (place, at),
            own,
            bytes,
            |at, block| {
                let at = at / size - start;
                element::store(&mut result[at..at + block.len() / size], wire, block);
            },
        );
    }
}

/// Results from this length on are written past the caches: they are much longer than what the last cache holds.
pub(super) fn streams_from() -> usize {
    static FROM: OnceLock<usize> = OnceLock::new();
    *FROM.get_or_init(|| {
        let size = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index3/size");
        let kibibytes = size
            .ok()
            .and_then(|size| size.trim().strip_suffix('K')?.parse::<usize>().ok())
            .unwrap_or(0);
        reduce::STREAM_FROM.max(kibibytes * 1024 / 4)
    })
}
