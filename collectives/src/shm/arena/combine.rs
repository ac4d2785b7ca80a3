//! Reductions over what all ranks gave, block by block.

use std::ops::Range;
use std::sync::atomic::Ordering;

use kolo_transport::ids::Rank;

use super::super::buffer::{Buffers, is_inside};
use super::super::map::{MOST_RANKS, Map, Place};
use super::super::ticket::parity;
use super::Open;
use super::asked::{is_given_as_it_is, length};
use super::limits::{BLOCK, past_caches};
use super::seat::Seat;
use crate::copy;
use crate::element::DType;
use crate::error::CollectiveError;
use crate::operation::Operation;
use crate::reduce::{self, Finish};
use crate::scratch::Scratch;

/// This rank's slice of what all gave, into its own data.
pub(super) fn combine_slice(seat: &Seat, blocks: &mut Scratch, open: &Open, input: &[u8]) {
    let range = seat.slice(seat.me, length(&open.operation));
    let own = is_given_as_it_is(&open.operation).then_some(input);
    let put = |at: usize, block: &[u8]| {
        seat.map.write(seat.me, Place::Area, open.start + at, block);
    };
    combine_flat(seat, blocks, open, range, &mut To { own, put });
}

/// This rank's slice of all ranks' buffers in the memory, into the other halves of all.
pub(super) fn combine_buffers(
    seat: &Seat,
    blocks: &mut Scratch,
    open: &Open,
    own: Buffers,
    data: &[u8],
) -> Result<(), CollectiveError> {
    let Seat { map, me, world } = seat;
    let length = length(&open.operation);
    let parity = parity(open.tag);
    let mut places = [(0, 0); MOST_RANKS as usize];
    for (rank, place) in places.iter_mut().enumerate().take(*world) {
        let word = |index| map.inline(rank, parity, index).load(Ordering::Relaxed);
        // The own ones are not looked up where others could have changed them: they say where this rank has no slice.
        let (input, output) = if rank == *me {
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
    let streaming = length >= past_caches();
    let input = |rank: usize, at: usize| (Place::Heap(places[rank].0), at);
    let put = |at: usize, block: &[u8]| {
        for (rank, place) in places.iter().enumerate().take(*world) {
            if streaming {
                map.write_streaming(rank, Place::Heap(place.1), at, block);
            } else {
                map.write(rank, Place::Heap(place.1), at, block);
            }
        }
    };
    let target = &mut To {
        own: Some(data),
        put,
    };
    let range = seat.slice(*me, length);
    combine(seat, blocks, &open.operation, input, range, target);
    Map::fence();
    Ok(())
}

/// As [`combine`], of what all gave in their areas, or beside their flags.
pub(super) fn combine_flat<T: Target>(
    seat: &Seat,
    blocks: &mut Scratch,
    open: &Open,
    range: Range<usize>,
    target: &mut T,
) {
    let given = length(&open.operation);
    let place = |rank: usize, at: usize| {
        let (place, start) = open.place(seat, rank, given);
        (place, start + at)
    };
    combine(seat, blocks, &open.operation, place, range, target);
}

/// Combines a range of all ranks' data, block by block, in rank order, and finishes it. `place` says where a
/// rank's byte at some offset is. Half types of more than two ranks are summed in `f32`, and rounded once.
pub(super) fn combine<T: Target>(
    seat: &Seat,
    blocks: &mut Scratch,
    operation: &Operation,
    place: impl Fn(usize, usize) -> (Place, usize),
    range: Range<usize>,
    target: &mut T,
) {
    let (me, world) = (seat.me, seat.world);
    let (Some(dtype), Some(op), Some(finish)) = (
        operation.wire_type(),
        operation.reduce,
        Finish::asked(operation, world as u32),
    ) else {
        return;
    };
    let is_wide = matches!(dtype, DType::F16 | DType::Bf16) && world > 2;
    blocks.reserve(if is_wide { 6 * BLOCK } else { 2 * BLOCK });
    let (result, rest) = blocks.bytes_mut().split_at_mut(BLOCK);
    let (input, wide) = rest.split_at_mut(BLOCK);
    let read = |rank: usize, at: usize, into: &mut [u8]| {
        let (place, at) = place(rank, at);
        seat.map.read(rank, place, at, into);
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
            // In rank order, and without a copy of this rank's own data. There are two ranks at least.
            let rest = if let Some(own) = own_of(0) {
                read(1, at, into);
                reduce::combine_behind(dtype, op, own, into);
                2..world
            } else {
                read(0, at, into);
                1..world
            };
            for rank in rest {
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
