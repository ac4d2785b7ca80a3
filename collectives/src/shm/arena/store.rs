//! From what all ranks gave to the caller's memory.

use std::ops::Range;

use super::super::map::{INLINE, Place};
use super::asked::{is_given_as_it_is, length, rows};
use super::combine::{Over, Target, To, Within, combine_flat};
use super::limits::{BLOCK, past_caches};
use super::way::{Way, withheld};
use super::{Arena, Open, Stage};
use crate::copy;
use crate::element::{self, Element};
use crate::operation::OperationKind;
use crate::reduce;
use crate::schedule::Counts;

/// Where a rank's own data are when the result is stored.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Own<'a> {
    /// Where it gave them. Not for operations that [withhold](withheld) some of them. (Lengths, which are gathered before
    /// operations on different lengths, are too short for that.)
    Given,
    /// There.
    At(&'a [u8]),
    /// In the buffer for the result of a reduction that has as many elements; where it gave them in other operations.
    InResult,
}

impl<'a> Own<'a> {
    fn bytes(self) -> &'a [u8] {
        match self {
            Self::At(own) => own,
            Self::Given | Self::InResult => &[],
        }
    }
}

impl Arena {
    /// Copies the result to the caller, after [`Outcome::Ready`], and leaves the operation.
    pub(crate) fn store<T: Element>(&mut self, offsets: &[usize], own: Own<'_>, result: &mut [T]) {
        let input = own.bytes();
        let Some(open) = self.open.filter(|open| open.stage == Stage::Ready) else {
            return;
        };
        if open.way.piecewise().is_some() {
            // Every piece is where it belongs.
            self.leave();
            return;
        }
        let operation = &open.operation;
        let size = operation.element_size();
        let count = operation.count as usize;
        let root = operation.root.unwrap_or(0) as usize;
        let (me, world) = (self.seat.me, self.seat.world);
        let is_root = me == root;
        match operation.kind {
            OperationKind::Reduce | OperationKind::Gather | OperationKind::GatherVarcount
                if !is_root => {}
            OperationKind::AllReduce | OperationKind::Reduce => match open.way {
                Way::Flat => self.store_combined(&open, 0..count, own, result),
                Way::Slices => {
                    let length = count * size;
                    for rank in 0..world {
                        let slice = self.seat.slice(rank, length);
                        let place = &mut result[slice.start / size..slice.end / size];
                        let (from, start) = open.place(&self.seat, rank, length);
                        self.copy(&open, rank, from, start + slice.start, place);
                    }
                }
                _ => {}
            },
            OperationKind::ReduceScatter => {
                let span = rows(operation, world).span(me as u32);
                self.store_combined(&open, span.start..span.end(), own, result);
            }
            OperationKind::Broadcast => self.part(&open, root, count, 0, &[], result),
            OperationKind::AllGather | OperationKind::AllGatherCounts | OperationKind::Gather => {
                for (rank, place) in result.chunks_mut(count.max(1)).enumerate().take(world) {
                    self.part(&open, rank, count, 0, input, place);
                }
            }
            OperationKind::AllGatherVarcount | OperationKind::GatherVarcount => {
                for rank in 0..world {
                    let (start, end) = (offsets[rank], offsets[rank + 1]);
                    self.part(&open, rank, end - start, 0, input, &mut result[start..end]);
                }
            }
            OperationKind::Scatter => {
                let at = me * count;
                let place = &mut result[..count];
                self.part(&open, root, count * world, at, input, place);
            }
            OperationKind::AllToAll => {
                let (given, at) = (count * world, me * count);
                for (rank, place) in result.chunks_mut(count.max(1)).enumerate().take(world) {
                    self.part(&open, rank, given, at, input, place);
                }
            }
            _ => {}
        }
        self.leave();
    }

    /// As [`Arena::store`], of an all-reduce whose result is to lie in one piece, as it travels, where the input was.
    pub(crate) fn store_packed(&mut self, result: &mut [u8]) {
        let Some(open) = self.open.filter(|open| open.stage == Stage::Ready) else {
            return;
        };
        let length = length(&open.operation);
        match open.way {
            Way::Flat => {
                if is_given_as_it_is(&open.operation) {
                    self.combine(&open, 0..length, Over(result));
                } else {
                    let put = |at: usize, block: &[u8]| {
                        copy::slice(block, &mut result[at..at + block.len()]);
                    };
                    self.combine(&open, 0..length, To { own: None, put });
                }
            }
            Way::Slices => {
                for rank in 0..self.seat.world {
                    let slice = self.seat.slice(rank, length);
                    let (place, start) = open.place(&self.seat, rank, length);
                    (self.seat.map).read(rank, place, start + slice.start, &mut result[slice]);
                }
            }
            _ => {}
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
        let size = operation.element_size();
        if rank == self.seat.me && !input.is_empty() && is_given_as_it_is(operation) {
            let from = &input[at * size..(at + into.len()) * size];
            match element::bytes_of_mut(into) {
                Some(into) if into.len() >= past_caches() => copy::away(from, into),
                Some(into) => copy::slice(from, into),
                None => reduce::store(into, None, from),
            }
            return;
        }
        debug_assert!(
            rank != self.seat.me
                || withheld(&self.seat, operation, open.way, given * size).is_empty(),
            "what was not given is not there"
        );
        let (place, start) = open.place(&self.seat, rank, given * size);
        self.copy(open, rank, place, start + at * size, into);
    }

    fn copy<T: Element>(
        &mut self,
        open: &Open,
        rank: usize,
        place: Place,
        at: usize,
        into: &mut [T],
    ) {
        let wire = open.operation.wire;
        if let (None, Some(into)) = (wire, element::bytes_of_mut(into))
            && (!matches!(place, Place::Inline(_)) || at.is_multiple_of(8))
        {
            if into.len() >= past_caches() {
                self.seat.map.read_streaming(rank, place, at, into);
            } else {
                self.seat.map.read(rank, place, at, into);
            }
            return;
        }
        let size = open.operation.element_size();
        self.blocks.reserve(BLOCK);
        let blocks = self.blocks.bytes_mut();
        if matches!(place, Place::Inline(_)) {
            // Words are read as a whole.
            self.seat.map.read(rank, place, 0, &mut blocks[..INLINE]);
            let bytes = into.len() * size;
            // To where it is aligned for its type.
            blocks.copy_within(at..at + bytes, 0);
            reduce::store(into, wire, &blocks[..bytes]);
            return;
        }
        let each = BLOCK / size;
        for (index, into) in into.chunks_mut(each).enumerate() {
            let block = &mut blocks[..into.len() * size];
            self.seat
                .map
                .read(rank, place, at + index * each * size, block);
            reduce::store(into, wire, block);
        }
    }

    /// Combines a range of what all gave.
    fn combine<T: Target>(&mut self, open: &Open, range: Range<usize>, mut target: T) {
        combine_flat(&self.seat, &mut self.blocks, open, range, &mut target);
    }

    /// Combines elements of what all gave, into the caller's buffer.
    fn store_combined<T: Element>(
        &mut self,
        open: &Open,
        range: Range<usize>,
        own: Own<'_>,
        result: &mut [T],
    ) {
        let operation = &open.operation;
        let size = operation.element_size();
        let bytes = range.start * size..range.end * size;
        let start = range.start;
        let wire = operation.wire;
        if open.is_inline(length(operation)) && !bytes.start.is_multiple_of(8) {
            // Words are read as a whole.
            let mut all = [T::default(); INLINE];
            let put = |at: usize, block: &[u8]| {
                let at = at / size;
                reduce::store(&mut all[at..at + block.len() / size], wire, block);
            };
            self.combine(open, 0..bytes.end, To { own: None, put });
            result[..range.len()].copy_from_slice(&all[range]);
            return;
        }
        if let Own::InResult = own
            && is_given_as_it_is(operation)
            && let Some(result) = element::bytes_of_mut(result)
        {
            return self.combine(open, bytes, Over(result));
        }
        let own = match own {
            Own::At(own) if is_given_as_it_is(operation) => Some(own),
            _ => None,
        };
        if wire.is_none()
            && let Some(result) = element::bytes_of_mut(result)
        {
            let start = bytes.start;
            return self.combine(open, bytes, Within { own, result, start });
        }
        let put = |at: usize, block: &[u8]| {
            let at = at / size - start;
            reduce::store(&mut result[at..at + block.len() / size], wire, block);
        };
        self.combine(open, bytes, To { own, put });
    }
}
