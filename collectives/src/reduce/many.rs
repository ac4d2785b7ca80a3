//! Many inputs in one pass, block by block: what ranks do that see each other's memory.

use super::dispatch::{self, Level};
use super::kernel::{Gather, Narrow, Number, Widen};
use super::{
    DType, Finish, ReduceOp, Store, combine_at, combine_into_at, finish, same_length, undefined,
    with_float,
};
use half::{bf16, f16};

/// Bytes of a block: it stays in the first cache while all inputs are combined in it.
const BLOCK: usize = 8 << 10;

/// A block of any type, aligned for it.
#[repr(align(64))]
struct Block([u8; BLOCK]);

/// `into = inputs[0] op inputs[1] op ...`, in this order for every element, then [finished](Finish).
///
/// Half types are summed in `f32` and rounded once, at the end. (Ranks that see each other's memory do that; it has other
/// bits than combining pair by pair, but all ranks of an operation do the same.)
///
/// # Panics
///
/// As all [kernels](crate::reduce), and if there is no input, or the operator is [`ReduceOp::Adasum`], which looks at whole
/// buffers.
pub fn combine_many(
    dtype: DType,
    op: ReduceOp,
    into: &mut [u8],
    inputs: &[&[u8]],
    finish: &Finish,
    store: Store,
) {
    for input in inputs {
        same_length(into.len(), input.len());
    }
    let mut block = Block([0; BLOCK]);
    for at in (0..into.len()).step_by(BLOCK) {
        let end = into.len().min(at + BLOCK);
        let part = |index: usize| &inputs[index][at..end];
        match store {
            Store::Cached => {
                combine_block(dtype, op, &mut into[at..end], inputs.len(), part, finish);
            }
            Store::Streaming => {
                let block = &mut block.0[..end - at];
                combine_block(dtype, op, block, inputs.len(), part, finish);
                dispatch::stream(&mut into[at..end], block);
            }
        }
    }
    if store == Store::Streaming {
        dispatch::fence();
    }
}

/// Every buffer becomes `buffers[0] op buffers[1] op ...`, as [`combine_many`] does it.
///
/// # Panics
///
/// As [`combine_many`].
pub fn combine_all(
    dtype: DType,
    op: ReduceOp,
    buffers: &mut [&mut [u8]],
    finish: &Finish,
    store: Store,
) {
    let length = buffers.first().map_or(0, |buffer| buffer.len());
    for buffer in &*buffers {
        same_length(length, buffer.len());
    }
    let mut block = Block([0; BLOCK]);
    for at in (0..length).step_by(BLOCK) {
        let end = length.min(at + BLOCK);
        let block = &mut block.0[..end - at];
        let part = |index: usize| &buffers[index][at..end];
        combine_block(dtype, op, block, buffers.len(), part, finish);
        for buffer in &mut *buffers {
            match store {
                Store::Cached => buffer[at..end].copy_from_slice(block),
                Store::Streaming => dispatch::stream(&mut buffer[at..end], block),
            }
        }
    }
    if store == Store::Streaming {
        dispatch::fence();
    }
}

fn combine_block<'a>(
    dtype: DType,
    op: ReduceOp,
    into: &mut [u8],
    count: usize,
    part: impl Fn(usize) -> &'a [u8],
    last: &Finish,
) {
    assert!(count > 0, "a reduction has at least one input");
    assert!(op != ReduceOp::Adasum, "adasum looks at whole buffers");
    let level = Level::detected();
    match dtype {
        // Two values are combined and rounded once anyway.
        DType::F16 | DType::Bf16 if count == 2 && last.is_nothing() => {}
        DType::F16 if count > 1 => {
            return halves::<f16>(level, op, into, count, part, last);
        }
        DType::Bf16 if count > 1 => {
            return halves::<bf16>(level, op, into, count, part, last);
        }
        _ => {}
    }
    if count == 1 {
        into.copy_from_slice(part(0));
    } else {
        combine_into_at(level, dtype, op, into, part(0), part(1));
    }
    for index in 2..count {
        combine_at(level, dtype, op, into, part(index));
    }
    finish(dtype, into, last);
}

fn halves<'a, T: Number<Wide = f32>>(
    level: Level,
    op: ReduceOp,
    into: &mut [u8],
    count: usize,
    part: impl Fn(usize) -> &'a [u8],
    last: &Finish,
) {
    const PART: usize = 1024;
    let mut sum = [0_f32; PART];
    let into = bytemuck::cast_slice_mut::<u8, T>(into);
    for at in (0..into.len()).step_by(PART) {
        let into = &mut into[at..];
        let length = into.len().min(PART);
        let (into, sum) = (&mut into[..length], &mut sum[..length]);
        let from = |index| &bytemuck::cast_slice::<u8, T>(part(index))[at..at + length];
        dispatch::run(
            level,
            Widen::<T> {
                into: sum,
                from: from(0),
            },
        );
        for index in 1..count {
            let from = from(index);
            with_float!(op, DType::F16, f16, f32, |_Half, combine| {
                dispatch::run(level, Gather::<T, _> { sum, from, combine });
            });
        }
        finish(DType::F32, bytemuck::cast_slice_mut(sum), last);
        dispatch::run(level, Narrow::<T> { into, from: sum });
    }
}
