//! Reductions over what all ranks gave, block by block.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kolo_transport::ids::Rank;

use super::super::buffer::is_inside;
use super::super::map::{MOST_RANKS, Map, Place};
use super::super::ticket::parity;
use super::store::streams_from;
use super::way::{Buffers, is_given_as_it_is};
use super::{Arena, BLOCK, Open};
use crate::copy;
use crate::element::DType;
use crate::error::CollectiveError;
use crate::operation::Operation;
use crate::reduce::{self, Finish};
use crate::scratch::Scratch;

impl Arena {
    pub(super) fn give_converted(
        &mut self,
        operation: &Operation,
        (place, start): (Place, usize),
        bytes: usize,
        input: &[u8],
    ) {
        let Some(dtype) = operation.dtype else { return };
        let wire = operation.wire.unwrap_or(dtype);
        self.blocks.reserve(BLOCK);
        for at in (0..bytes).step_by(BLOCK) {
            let count = BLOCK.min(bytes - at);
            let block = &mut self.blocks.bytes_mut()[..count];
            let (from, many) = (
                at / wire.size() * dtype.size(),
                count / wire.size() * dtype.size(),
            );
            let from = &input[from..from + many];
            if wire == dtype {
                copy::slice(from, block);
            } else {
                reduce::convert(wire, block, dtype, from);
            }
            if operation.reduce.is_some() {
                reduce::scale(wire, block, operation.prescale);
            }
            self.map.write(self.me, place, start + at, block);
        }
    }

    pub(super) fn combine_slice(&mut self, open: &Open, input: &[u8]) {
        let range = self.slice(self.me, Self::length(&open.operation));
        let map = Arc::clone(&self.map);
        let (me, start) = (self.me, open.start);
        let own = is_given_as_it_is(&open.operation).then_some(input);
        let put = |at: usize, block: &[u8]| map.write(me, Place::Area, start + at, block);
        self.combine_flat(open, range, &mut To { own, put });
    }

    pub(super) fn combine_buffers(
        &mut self,
        open: &Open,
        own: Buffers,
        data: &[u8],
    ) -> Result<(), CollectiveError> {
        let length = Self::length(&open.operation);
        let parity = parity(open.tag);
        let mut places = [(0, 0); MOST_RANKS as usize];
        for (rank, place) in places.iter_mut().enumerate().take(self.world) {
            let word = |index| self.map.inline(rank, parity, index).load(Ordering::Relaxed);
            // The own ones are not looked up where others could have changed them: they say where this rank has no slice.
            let (input, output) = if rank == self.me {
                (own.input, own.output)
            } else {
                (word(0) as usize, word(1) as usize)
            };
            if !is_inside(input, length) || !is_inside(output, length) {
                return Err(CollectiveError::Protocol {
                    rank: Rank(rank as u32),
                    reason: format!(
                        "its buffer of {length} bytes at {input} and {output} is not in the shared memory"
                    ),
                });
            }
            *place = (input, output);
        }
        let range = self.slice(self.me, length);
        let map = Arc::clone(&self.map);
        let world = self.world;
        let streaming = length >= streams_from();
        let input = |rank: usize, at: usize| (Place::Heap(places[rank].0), at);
        let put = |at: usize, block: &[u8]| {
            for (rank, place) in places.iter().enumerate().take(world) {
                if streaming {
                    map.write_streaming(rank, Place::Heap(place.1), at, block);
                } else {
                    map.write(rank, Place::Heap(place.1), at, block);
                }
            }
        };
        let own = Some(data);
        self.combine(&open.operation, input, range, &mut To { own, put });
        Map::fence();
        Ok(())
    }

    /// As [`Arena::combine`], of what all gave in their areas, or beside their flags.
    pub(super) fn combine_flat<T: Target>(
        &mut self,
        open: &Open,
        range: Range<usize>,
        target: &mut T,
    ) {
        let given = Self::length(&open.operation);
        let place = |map: &Map, rank: usize, at: usize| {
            let (place, start) = open.place(map, self.me, rank, given);
            (place, start + at)
        };
        let (ranks, blocks) = (Ranks::of(&self.map, self.me), &mut self.blocks);
        ranks.combine(blocks, &open.operation, place, range, target);
    }

    /// As [`Ranks::combine`].
    pub(super) fn combine<T: Target>(
        &mut self,
        operation: &Operation,
        place: impl Fn(usize, usize) -> (Place, usize),
        range: Range<usize>,
        target: &mut T,
    ) {
        let (ranks, blocks) = (Ranks::of(&self.map, self.me), &mut self.blocks);
        let place = |_: &Map, rank: usize, at: usize| place(rank, at);
        ranks.combine(blocks, operation, place, range, target);
    }
}

/// Those that share the memory.
struct Ranks<'a> {
    map: &'a Map,
    me: usize,
    world: usize,
}

impl<'a> Ranks<'a> {
    fn of(map: &'a Map, me: usize) -> Self {
        let world = map.world();
        Self { map, me, world }
    }

    /// Combines a range of all ranks' data, block by block, in rank order, and finishes it. `place` says where a
    /// rank's byte at some offset is. Half types of more than two ranks are summed in `f32`, and rounded once.
    fn combine<T: Target>(
        &self,
        blocks: &mut Scratch,
        operation: &Operation,
        place: impl Fn(&Map, usize, usize) -> (Place, usize),
        range: Range<usize>,
        target: &mut T,
    ) {
        let (Some(dtype), Some(op), Some(finish)) = (
            operation.wire_type(),
            operation.reduce,
            Finish::asked(operation, self.world as u32),
        ) else {
            return;
        };
        let (me, world) = (self.me, self.world);
        let is_wide = matches!(dtype, DType::F16 | DType::Bf16) && world > 2;
        blocks.reserve(if is_wide { 6 * BLOCK } else { 2 * BLOCK });
        let (result, rest) = blocks.bytes_mut().split_at_mut(BLOCK);
        let (input, wide) = rest.split_at_mut(BLOCK);
        let read = |rank: usize, at: usize, into: &mut [u8]| {
            let (place, at) = place(self.map, rank, at);
            self.map.read(rank, place, at, into);
        };
        for at in range.clone().step_by(BLOCK) {
            let length = BLOCK.min(range.end - at);
            let input = &mut input[..length];
            if world == 2
                && let Some(own) = target.over(at..at + length)
            {
                read(1 - me, at, input);
                // In rank order.
                if me == 0 {
                    reduce::combine(dtype, op, own, input);
                } else {
                    reduce::combine_behind(dtype, op, input, own);
                }
                reduce::finish(dtype, own, &finish);
                continue;
            }
            let (own, direct) = target.ends(at..at + length);
            let is_put = direct.is_none();
            let into = direct.unwrap_or(&mut result[..length]);
            let own_of = |rank: usize| own.filter(|_| rank == me);
            if is_wide {
                let (sum, term) = wide.split_at_mut(2 * BLOCK);
                let floats = length / dtype.size() * size_of::<f32>();
                let (sum, term) = (&mut sum[..floats], &mut term[..floats]);
                let mut widen = |rank: usize, wide: &mut [u8]| {
                    if let Some(own) = own_of(rank) {
                        reduce::convert(DType::F32, wide, dtype, own);
                    } else {
                        read(rank, at, input);
                        reduce::convert(DType::F32, wide, dtype, input);
                    }
                };
                widen(0, sum);
                for rank in 1..world {
                    widen(rank, term);
                    reduce::combine(DType::F32, op, sum, term);
                }
                reduce::finish(DType::F32, sum, &finish);
                reduce::convert(dtype, into, DType::F32, sum);
            } else {
                match own_of(0) {
                    Some(own) => copy::slice(own, into),
                    None => read(0, at, into),
                }
                for rank in 1..world {
                    if let Some(own) = own_of(rank) {
                        reduce::combine(dtype, op, into, own);
                    } else {
                        read(rank, at, input);
                        reduce::combine(dtype, op, into, input);
                    }
                }
                reduce::finish(dtype, into, &finish);
            }
            if is_put {
                target.put(at, &result[..length]);
            }
        }
    }
}

/// Where a result goes, and where this rank's own data are.
pub(super) trait Target {
    /// This rank's data of a range, if they are not where it gave them; and where the range's result goes, if not where it is
    /// [put](Target::put).
    fn ends(&mut self, range: Range<usize>) -> (Option<&[u8]>, Option<&mut [u8]>);
    /// The same, if the result goes over them.
    fn over(&mut self, _range: Range<usize>) -> Option<&mut [u8]> {
        None
    }
    /// Takes what has been combined, from a place on.
    fn put(&mut self, at: usize, block: &[u8]);
}

/// To wherever `put` brings it.
pub(super) struct To<'a, F> {
    pub(super) own: Option<&'a [u8]>,
    pub(super) put: F,
}

impl<F: FnMut(usize, &[u8])> Target for To<'_, F> {
    fn ends(&mut self, range: Range<usize>) -> (Option<&[u8]>, Option<&mut [u8]>) {
        (self.own.map(|own| &own[range]), None)
    }

    fn put(&mut self, at: usize, block: &[u8]) {
        (self.put)(at, block);
    }
}

/// To a buffer for bytes from `start` on, as they are in it.
pub(super) struct Within<'a> {
    pub(super) own: Option<&'a [u8]>,
    pub(super) result: &'a mut [u8],
    pub(super) start: usize,
}

impl Target for Within<'_> {
    fn ends(&mut self, range: Range<usize>) -> (Option<&[u8]>, Option<&mut [u8]>) {
        let place = range.start - self.start..range.end - self.start;
        (
            self.own.map(|own| &own[range]),
            Some(&mut self.result[place]),
        )
    }

    fn put(&mut self, at: usize, block: &[u8]) {
        let place = at - self.start..at - self.start + block.len();
        copy::slice(block, &mut self.result[place]);
    }
}

/// Over this rank's own data.
pub(super) struct Over<'a>(pub(super) &'a mut [u8]);

impl Target for Over<'_> {
    fn ends(&mut self, range: Range<usize>) -> (Option<&[u8]>, Option<&mut [u8]>) {
        (Some(&self.0[range]), None)
    }

    fn over(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        Some(&mut self.0[range])
    }

    fn put(&mut self, at: usize, block: &[u8]) {
        copy::slice(block, &mut self.0[at..at + block.len()]);
    }
}
