//! Kernels: what is done to elements. No I/O.
//!
//! All take bytes, as elements of a type: `into[i] = into[i] op from[i]` ([`combine`]), with three operands
//! ([`combine_into`]), of many inputs in one pass ([`combine_many`], [`combine_all`]), and what goes with that: dividing
//! and scaling ([`finish`]), neutral elements ([`fill_neutral`]), conversion ([`convert`]). [`ReduceOp`] says what
//! overflow and NaN do.
//!
//! Every loop is plain Rust without a branch on a value, and is compiled several times, for the
//! [instructions](Level) that a processor may have; which one runs is decided at run time. The bits of the results do not
//! depend on it (of a NaN, that it is one).
//!
//! # Panics
//!
//! All functions panic if slices that belong together differ in length, if a slice is not aligned for its type (results
//! of conversions between half types and others included) or not a whole number of elements, or if the operator is not
//! defined for the type: see [`ReduceOp::check`].

// Kernels are inlined into functions that are compiled for other instructions than the rest of the program.
#![allow(clippy::inline_always)]

mod adasum;
mod dispatch;
mod kernel;
mod many;
mod software;

#[cfg(test)]
mod tests;

use half::{bf16, f16};

use crate::element::{self, DType, Element};
use crate::operation::{Factor, Operation, ReduceOp};
use kernel::{InPlace, Map, Narrow, Number, Three, Widen};

pub use adasum::{Dots, blend, dots};
pub use dispatch::Level;
pub use many::{combine_all, combine_many};

/// Results of at least this many bytes are written past the caches ([`Store::for_result`]).
pub const STREAM_FROM: usize = 8 << 20;

/// How a result is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Store {
    /// As usual: it is in the cache afterwards.
    #[default]
    Cached,
    /// Past the caches. Faster for what does not fit them and is not read soon. It can be read by other threads and
    /// processes as if it were written as usual.
    Streaming,
}

impl Store {
    /// For a final result of so many bytes in all: [`Store::Streaming`] from [`STREAM_FROM`] on. For intermediate
    /// results it is a loss at any size.
    #[must_use]
    pub const fn for_result(bytes: usize) -> Self {
        if bytes >= STREAM_FROM {
            Self::Streaming
        } else {
            Self::Cached
        }
    }
}

/// What is done to a combined value before it is a result: divided for the average, then multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Finish {
    /// The world size, for [`ReduceOp::Average`].
    pub divide: Option<u32>,
    /// The postscale factor.
    pub postscale: Factor,
}

impl Finish {
    /// Nothing.
    pub const NOTHING: Self = Self {
        divide: None,
        postscale: Factor::ONE,
    };

    /// What an operator asks for in a world of this size.
    #[must_use]
    pub fn of(op: ReduceOp, world: u32, postscale: Factor) -> Self {
        Self {
            divide: (op == ReduceOp::Average && world > 1).then_some(world),
            postscale,
        }
    }

    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.divide.is_none() && self.postscale.is_one()
    }
}

/// What combines two values, for a macro that wants one closure for each operator and kind of type.
macro_rules! with_operator {
    ($dtype:expr, $op:expr, |$t:ident, $f:ident| $body:expr) => {
        match ($op, $dtype) {
            (ReduceOp::BitAnd, d) if d.is_integer() => {
                type $t = u8;
                let $f = |a: u8, b: u8| a & b;
                $body
            }
            (ReduceOp::BitOr, d) if d.is_integer() => {
                type $t = u8;
                let $f = |a: u8, b: u8| a | b;
                $body
            }
            (ReduceOp::BitXor, d) if d.is_integer() => {
                type $t = u8;
                let $f = |a: u8, b: u8| a ^ b;
                $body
            }
            // Any byte but 0 is true.
            (ReduceOp::BitAnd | ReduceOp::Min, DType::Bool) => {
                type $t = u8;
                let $f = |a: u8, b: u8| u8::from((a != 0) & (b != 0));
                $body
            }
            (ReduceOp::BitOr | ReduceOp::Max, DType::Bool) => {
                type $t = u8;
                let $f = |a: u8, b: u8| u8::from((a | b) != 0);
                $body
            }
            (ReduceOp::BitXor, DType::Bool) => {
                type $t = u8;
                let $f = |a: u8, b: u8| u8::from((a != 0) != (b != 0));
                $body
            }
            // A wrapped sum or product has the same bits with and without a sign.
            (op, DType::U8 | DType::I8) => with_integer!(op, $dtype, u8, i8, |$t, $f| $body),
            (op, DType::U16 | DType::I16) => with_integer!(op, $dtype, u16, i16, |$t, $f| $body),
            (op, DType::U32 | DType::I32) => with_integer!(op, $dtype, u32, i32, |$t, $f| $body),
            (op, DType::U64 | DType::I64) => with_integer!(op, $dtype, u64, i64, |$t, $f| $body),
            (op, DType::F16) => with_float!(op, $dtype, f16, f32, |$t, $f| $body),
            (op, DType::Bf16) => with_float!(op, $dtype, bf16, f32, |$t, $f| $body),
            (op, DType::F32) => with_float!(op, $dtype, f32, f32, |$t, $f| $body),
            (op, DType::F64) => with_float!(op, $dtype, f64, f64, |$t, $f| $body),
            (op, dtype) => undefined(op, dtype),
        }
    };
}
macro_rules! with_integer {
    ($op:expr, $dtype:expr, $unsigned:ty, $signed:ty, |$t:ident, $f:ident| $body:expr) => {
        match ($op, $dtype) {
            (ReduceOp::Sum | ReduceOp::Average, _) => {
                type $t = $unsigned;
                let $f = |a: $t, b: $t| a.wrapping_add(b);
                $body
            }
            (ReduceOp::Product, _) => {
                type $t = $unsigned;
                let $f = |a: $t, b: $t| a.wrapping_mul(b);
                $body
            }
            (ReduceOp::Min, DType::U8 | DType::U16 | DType::U32 | DType::U64) => {
                type $t = $unsigned;
                let $f = |a: $t, b: $t| a.min(b);
                $body
            }
            (ReduceOp::Max, DType::U8 | DType::U16 | DType::U32 | DType::U64) => {
                type $t = $unsigned;
                let $f = |a: $t, b: $t| a.max(b);
                $body
            }
            (ReduceOp::Min, _) => {
                type $t = $signed;
                let $f = |a: $t, b: $t| a.min(b);
                $body
            }
            (ReduceOp::Max, _) => {
                type $t = $signed;
                let $f = |a: $t, b: $t| a.max(b);
                $body
            }
            (op, dtype) => undefined(op, dtype),
        }
    };
}
macro_rules! with_float {
    ($op:expr, $dtype:expr, $type:ty, $wide:ty, |$t:ident, $f:ident| $body:expr) => {
        match $op {
            ReduceOp::Sum | ReduceOp::Average => {
                type $t = $type;
                let $f = |a: $wide, b: $wide| a + b;
                $body
            }
            ReduceOp::Product => {
                type $t = $type;
                let $f = |a: $wide, b: $wide| a * b;
                $body
            }
            // `a` stays if it is NaN (no comparison holds); `b` is taken if it is NaN.
            ReduceOp::Min => {
                type $t = $type;
                let $f = |a: $wide, b: $wide| if (b < a) | b.is_nan() { b } else { a };
                $body
            }
            ReduceOp::Max => {
                type $t = $type;
                let $f = |a: $wide, b: $wide| if (b > a) | b.is_nan() { b } else { a };
                $body
            }
            op => undefined(op, $dtype),
        }
    };
}
use with_float;

fn undefined(op: ReduceOp, dtype: DType) -> ! {
    panic!("{op} of {dtype} is not defined: ReduceOp::check says so")
}

fn same_length(one: usize, other: usize) {
    assert_eq!(one, other, "a reduction takes slices of one length");
}

/// `into = into op from`. With [`ReduceOp::Adasum`] the slices are looked at as one whole each.
pub fn combine(dtype: DType, op: ReduceOp, into: &mut [u8], from: &[u8]) {
    combine_at(Level::detected(), dtype, op, into, from);
}

/// As [`combine`], with the instructions of this level, which the processor must have: for tests and measurements.
pub fn combine_at(level: Level, dtype: DType, op: ReduceOp, into: &mut [u8], from: &[u8]) {
    same_length(into.len(), from.len());
    if op == ReduceOp::Adasum {
        let dots = dots(dtype, into, from);
        return blend(dtype, into, from, &dots);
    }
    with_operator!(dtype, op, |T, combine| in_place::<T>(
        level, into, from, combine
    ));
}

/// `into = first op into`. Not for [`ReduceOp::Adasum`], whose operands are alike.
pub(crate) fn combine_behind(dtype: DType, op: ReduceOp, first: &[u8], into: &mut [u8]) {
    combine_behind_at(Level::detected(), dtype, op, first, into);
}

fn combine_behind_at(level: Level, dtype: DType, op: ReduceOp, first: &[u8], into: &mut [u8]) {
    same_length(into.len(), first.len());
    with_operator!(dtype, op, |T, combine| in_place::<T>(
        level,
        into,
        first,
        |a, b| combine(b, a)
    ));
}

fn in_place<T: Number>(
    level: Level,
    into: &mut [u8],
    from: &[u8],
    combine: impl Fn(T::Wide, T::Wide) -> T::Wide,
) {
    let (into, from) = (
        bytemuck::cast_slice_mut(into),
        bytemuck::cast_slice::<u8, T>(from),
    );
    dispatch::run(
        level,
        InPlace {
            into,
            from,
            combine,
        },
    );
}

/// `into = left op right`.
pub fn combine_into(dtype: DType, op: ReduceOp, into: &mut [u8], left: &[u8], right: &[u8]) {
    combine_into_at(Level::detected(), dtype, op, into, left, right);
}

/// As [`combine_into`], with the instructions of this level, which the processor must have.
pub fn combine_into_at(
    level: Level,
    dtype: DType,
    op: ReduceOp,
    into: &mut [u8],
    left: &[u8],
    right: &[u8],
) {
    same_length(into.len(), left.len());
    same_length(into.len(), right.len());
    if op == ReduceOp::Adasum {
        into.copy_from_slice(left);
        return combine_at(level, dtype, op, into, right);
    }
    with_operator!(dtype, op, |T, combine| {
        let into = bytemuck::cast_slice_mut::<u8, T>(into);
        let (left, right) = (bytemuck::cast_slice(left), bytemuck::cast_slice(right));
        dispatch::run(
            level,
            Three {
                into,
                left,
                right,
                combine,
            },
        );
    });
}

/// What is done to the combined values of an operation, if it is a reduction.
pub(crate) fn finish_of(operation: &Operation, world: u32) -> Option<Finish> {
    let op = operation.reduce?;
    Some(Finish::of(op, world, operation.postscale))
}

/// Divides and multiplies, as [`Finish`] says: integers are divided truncating toward zero.
pub fn finish(dtype: DType, values: &mut [u8], finish: &Finish) {
    if let Some(by) = finish.divide {
        divide(dtype, values, by);
    }
    scale(dtype, values, finish.postscale);
}

/// Divides every element by the world size, for [`ReduceOp::Average`]. Does nothing to `bool`s.
pub fn divide(dtype: DType, values: &mut [u8], by: u32) {
    let level = Level::detected();
    macro_rules! floats {
        ($type:ty, $wide:ty) => {{
            let by = by as $wide;
            let values = bytemuck::cast_slice_mut::<u8, $type>(values);
            dispatch::run(
                level,
                Map {
                    values,
                    change: |value: $wide| value / by,
                },
            );
        }};
    }
    macro_rules! integers {
        ($type:ty, $wide:ty) => {{
            // Every `u32` fits the wide type, and is not negative: no overflow.
            let by = <$wide>::from(by);
            let values = bytemuck::cast_slice_mut::<u8, $type>(values);
            let change = |value: $type| (<$wide>::from(value) / by) as $type;
            dispatch::run(level, Map { values, change });
        }};
    }
    match dtype {
        DType::F16 => floats!(f16, f32),
        DType::Bf16 => floats!(bf16, f32),
        DType::F32 => floats!(f32, f32),
        DType::F64 => floats!(f64, f64),
        DType::U8 => integers!(u8, u64),
        DType::U16 => integers!(u16, u64),
        DType::U32 => integers!(u32, u64),
        DType::U64 => integers!(u64, u64),
        DType::I8 => integers!(i8, i64),
        DType::I16 => integers!(i16, i64),
        DType::I32 => integers!(i32, i64),
        DType::I64 => integers!(i64, i64),
        DType::Bool => {}
    }
}

/// Multiplies every element with a factor, for prescale and postscale. Does nothing to `bool`s.
///
/// `f64` multiplies as it is, the other floats in `f32` (the factor is rounded to it). Integers are multiplied in `f64`
/// and truncated toward zero, as Horovod does; what does not fit becomes the nearest value that does, and integers over
/// 2^53 lose their lowest bits.
pub fn scale(dtype: DType, values: &mut [u8], factor: Factor) {
    if factor.is_one() {
        return;
    }
    let (level, factor) = (Level::detected(), factor.get());
    macro_rules! floats {
        ($type:ty, $wide:ty) => {{
            let factor = factor as $wide;
            let values = bytemuck::cast_slice_mut::<u8, $type>(values);
            dispatch::run(
                level,
                Map {
                    values,
                    change: |value: $wide| value * factor,
                },
            );
        }};
    }
    macro_rules! integers {
        ($type:ty) => {{
            let values = bytemuck::cast_slice_mut::<u8, $type>(values);
            #[allow(clippy::cast_lossless, clippy::cast_sign_loss)]
            let change = |value: $type| (value as f64 * factor) as $type;
            dispatch::run(level, Map { values, change });
        }};
    }
    match dtype {
        DType::F16 => floats!(f16, f32),
        DType::Bf16 => floats!(bf16, f32),
        DType::F32 => floats!(f32, f32),
        DType::F64 => floats!(f64, f64),
        DType::U8 => integers!(u8),
        DType::U16 => integers!(u16),
        DType::U32 => integers!(u32),
        DType::U64 => integers!(u64),
        DType::I8 => integers!(i8),
        DType::I16 => integers!(i16),
        DType::I32 => integers!(i32),
        DType::I64 => integers!(i64),
        DType::Bool => {}
    }
}

/// Fills with the value that changes nothing when it is combined: what a rank that has no data gives.
///
/// | operator | value |
/// |---|---|
/// | sum, average, adasum | 0; -0.0 for floats, because -0.0 + 0.0 is 0.0 (Adasum: 0.0) |
/// | product | 1 |
/// | min | the greatest value: infinity, `MAX`, `true` |
/// | max | the least value: -infinity, `MIN`, `false` |
/// | bit and | all bits set; `true` |
/// | bit or, bit xor | no bit set; `false` |
///
/// An average still divides by the whole world size, as Horovod's does.
pub fn fill_neutral(dtype: DType, op: ReduceOp, values: &mut [u8]) {
    fn fill<T: bytemuck::Pod>(values: &mut [u8], value: T) {
        bytemuck::cast_slice_mut::<u8, T>(values).fill(value);
    }
    macro_rules! integer {
        ($type:ty) => {
            match op {
                ReduceOp::Product => fill::<$type>(values, 1),
                ReduceOp::Min => fill(values, <$type>::MAX),
                ReduceOp::Max => fill(values, <$type>::MIN),
                ReduceOp::BitAnd => values.fill(u8::MAX),
                _ => values.fill(0),
            }
        };
    }
    macro_rules! float {
        ($type:ty, $infinity:expr, $one:expr, $zero:expr) => {
            match op {
                ReduceOp::Product => fill(values, $one),
                ReduceOp::Min => fill(values, $infinity),
                ReduceOp::Max => fill(values, -$infinity),
                ReduceOp::Adasum => values.fill(0),
                _ => fill(values, -$zero),
            }
        };
    }
    if !op.allows(dtype) {
        undefined(op, dtype);
    }
    match dtype {
        DType::U8 => integer!(u8),
        DType::I8 => integer!(i8),
        DType::U16 => integer!(u16),
        DType::I16 => integer!(i16),
        DType::U32 => integer!(u32),
        DType::I32 => integer!(i32),
        DType::U64 => integer!(u64),
        DType::I64 => integer!(i64),
        DType::F16 => float!(f16, f16::INFINITY, f16::ONE, f16::ZERO),
        DType::Bf16 => float!(bf16, bf16::INFINITY, bf16::ONE, bf16::ZERO),
        DType::F32 => float!(f32, f32::INFINITY, 1_f32, 0_f32),
        DType::F64 => float!(f64, f64::INFINITY, 1_f64, 0_f64),
        DType::Bool => values.fill(u8::from(matches!(op, ReduceOp::BitAnd | ReduceOp::Min))),
    }
}

/// Copies bytes that came from a peer to elements, or converts them from another float type. Any bytes are good for
/// any type: a `bool` is `true` unless its byte is 0.
///
/// # Panics
///
/// If there are not as many bytes as the elements have.
pub(crate) fn store<T: Element>(values: &mut [T], from: Option<DType>, bytes: &[u8]) {
    if let Some(from) = from
        && let Some(values) = element::bytes_of_mut(values)
    {
        convert(T::DTYPE, values, from, bytes);
        return;
    }
    T::take_bytes(values, bytes);
}

/// Converts floats: for compression on the wire, and back. Rounds to nearest, ties to even; what is too large becomes
/// infinite. From `f64` to a half type it goes by way of `f32`.
///
/// Panics if one of the types is no float.
pub fn convert(to: DType, into: &mut [u8], from_type: DType, from: &[u8]) {
    convert_at(Level::detected(), to, into, from_type, from);
}

/// As [`convert`], with the instructions of this level, which the processor must have.
pub fn convert_at(level: Level, to: DType, into: &mut [u8], from_type: DType, from: &[u8]) {
    fn halves<T: Number<Wide = f32>>(level: Level, to: DType, into: &mut [u8], from: &[u8]) {
        let from = bytemuck::cast_slice::<u8, T>(from);
        match to {
            DType::F32 => {
                let into = bytemuck::cast_slice_mut(into);
                same_length(into.len(), from.len());
                dispatch::run(level, Widen::<T> { into, from });
            }
            _ => by_f32(to, into, from.len(), |floats, at| {
                let from = &from[at..at + floats.len()];
                dispatch::run(level, Widen::<T> { into: floats, from });
            }),
        }
    }
    /// Makes `f32`s block by block, and what is asked for of them.
    fn by_f32(to: DType, into: &mut [u8], count: usize, make: impl Fn(&mut [f32], usize)) {
        const BLOCK: usize = 1024;
        same_length(into.len(), count * to.size());
        let mut floats = [0_f32; BLOCK];
        for at in (0..count).step_by(BLOCK) {
            let floats = &mut floats[..BLOCK.min(count - at)];
            make(floats, at);
            let into = &mut into[at * to.size()..(at + floats.len()) * to.size()];
            convert(to, into, DType::F32, bytemuck::cast_slice(floats));
        }
    }
    fn narrow<T: Number<Wide = f32>>(level: Level, into: &mut [u8], from: &[f32]) {
        let into = bytemuck::cast_slice_mut::<u8, T>(into);
        same_length(into.len(), from.len());
        dispatch::run(level, Narrow::<T> { into, from });
    }
    assert!(
        to.is_float() && from_type.is_float(),
        "{from_type} to {to}: only floats are converted"
    );
    if to == from_type {
        return into.copy_from_slice(from);
    }
    match (from_type, to) {
        (DType::F16, _) => halves::<f16>(level, to, into, from),
        (DType::Bf16, _) => halves::<bf16>(level, to, into, from),
        (DType::F32, DType::F16) => narrow::<f16>(level, into, bytemuck::cast_slice(from)),
        (DType::F32, DType::Bf16) => narrow::<bf16>(level, into, bytemuck::cast_slice(from)),
        (DType::F32, _) => {
            let (into, from) = (
                bytemuck::cast_slice_mut::<u8, f64>(into),
                bytemuck::cast_slice::<u8, f32>(from),
            );
            same_length(into.len(), from.len());
            for (into, from) in into.iter_mut().zip(from) {
                *into = f64::from(*from);
            }
        }
        _ => {
            let from = bytemuck::cast_slice::<u8, f64>(from);
            let cast = |floats: &mut [f32], at: usize| {
                for (float, from) in floats.iter_mut().zip(&from[at..]) {
                    *float = *from as f32;
                }
            };
            if to == DType::F32 {
                let into = bytemuck::cast_slice_mut(into);
                same_length(into.len(), from.len());
                cast(into, 0);
            } else {
                by_f32(to, into, from.len(), cast);
            }
        }
    }
}

/// Copies a result to its place.
pub fn copy(into: &mut [u8], from: &[u8], store: Store) {
    match store {
        Store::Cached => into.copy_from_slice(from),
        Store::Streaming => {
            dispatch::stream(into, from);
            dispatch::fence();
        }
    }
}
