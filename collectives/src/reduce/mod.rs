//! Kernels: what is done to elements. No I/O.
//!
//! All take bytes, as elements of a type: `into[i] = into[i] op from[i]` ([`combine`]), and what goes with that: dividing
//! and scaling ([`finish`]), neutral elements ([`fill_neutral`]), conversion ([`convert`]). [`ReduceOp`] says what
//! overflow and NaN do.
//!
//! Every loop is plain Rust without a branch on a value, and is compiled several times, for the
//! instructions that a processor may have; which one runs is decided at run time. The bits of the results do not
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
mod software;

use half::{bf16, f16};

use crate::element::{self, DType, Element};
use crate::operation::{Factor, Operation, ReduceOp};
use kernel::{Map, Number, Zip};

pub use adasum::{Dots, blend, dots};
use dispatch::Level;

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

    /// What an operation asks for; `None` if nothing is combined.
    pub(crate) fn asked(operation: &Operation, world: u32) -> Option<Self> {
        let op = operation.reduce?;
        Some(Self::of(op, world, operation.postscale))
    }

    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.divide.is_none() && self.postscale.is_one()
    }
}

/// Does something with a numeric type: `$integers!(type, of the same width without a sign, the largest of the kind)`,
/// `$floats!(type, what it is computed in)`, or `$bool`.
macro_rules! by_type {
    ($dtype:expr, $integers:ident, $floats:ident, $bool:expr) => {
        match $dtype {
            DType::Bool => $bool,
            DType::U8 => $integers!(u8, u8, u64),
            DType::I8 => $integers!(i8, u8, i64),
            DType::U16 => $integers!(u16, u16, u64),
            DType::I16 => $integers!(i16, u16, i64),
            DType::U32 => $integers!(u32, u32, u64),
            DType::I32 => $integers!(i32, u32, i64),
            DType::U64 => $integers!(u64, u64, u64),
            DType::I64 => $integers!(i64, u64, i64),
            DType::F16 => $floats!(f16, f32),
            DType::Bf16 => $floats!(bf16, f32),
            DType::F32 => $floats!(f32, f32),
            DType::F64 => $floats!(f64, f64),
        }
    };
}

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

/// As [`combine`], with the instructions of this level, which the processor must have.
fn combine_at(level: Level, dtype: DType, op: ReduceOp, into: &mut [u8], from: &[u8]) {
    same_length(into.len(), from.len());
    if op == ReduceOp::Adasum {
        let dots = dots(dtype, into, from);
        return blend(dtype, into, from, &dots);
    }
    combine_on_side(level, dtype, op, false, into, from);
}

/// `into = first op into`. Not for [`ReduceOp::Adasum`], whose operands are alike.
pub(crate) fn combine_behind(dtype: DType, op: ReduceOp, first: &[u8], into: &mut [u8]) {
    same_length(into.len(), first.len());
    combine_on_side(Level::detected(), dtype, op, true, into, first);
}

/// `into` is the left operand, or the right one if the other one is `first`.
fn combine_on_side(
    level: Level,
    dtype: DType,
    op: ReduceOp,
    first: bool,
    into: &mut [u8],
    from: &[u8],
) {
    macro_rules! run {
        ($type:ty, $combine:expr) => {
            in_place::<$type>(level, first, into, from, $combine)
        };
    }
    // A wrapped sum or product has the same bits with and without a sign.
    macro_rules! integers {
        ($ordered:ty, $unsigned:ty, $largest:ty) => {
            match op {
                ReduceOp::Sum | ReduceOp::Average => run!($unsigned, <$unsigned>::wrapping_add),
                ReduceOp::Product => run!($unsigned, <$unsigned>::wrapping_mul),
                ReduceOp::Min => run!($ordered, Ord::min),
                ReduceOp::Max => run!($ordered, Ord::max),
                op => undefined(op, dtype),
            }
        };
    }
    macro_rules! floats {
        ($type:ty, $wide:ty) => {
            match op {
                ReduceOp::Sum | ReduceOp::Average => run!($type, |a: $wide, b: $wide| a + b),
                ReduceOp::Product => run!($type, |a: $wide, b: $wide| a * b),
                // `a` stays if it is NaN (no comparison holds); `b` is taken if it is NaN.
                ReduceOp::Min => run!($type, |a: $wide, b: $wide| if (b < a) | b.is_nan() {
                    b
                } else {
                    a
                }),
                ReduceOp::Max => run!($type, |a: $wide, b: $wide| if (b > a) | b.is_nan() {
                    b
                } else {
                    a
                }),
                op => undefined(op, dtype),
            }
        };
    }
    match (dtype, op) {
        (dtype, ReduceOp::BitAnd) if dtype.is_integer() => run!(u8, |a, b| a & b),
        (dtype, ReduceOp::BitOr) if dtype.is_integer() => run!(u8, |a, b| a | b),
        (dtype, ReduceOp::BitXor) if dtype.is_integer() => run!(u8, |a, b| a ^ b),
        // Any byte but 0 is true.
        (DType::Bool, ReduceOp::BitAnd | ReduceOp::Min) => {
            run!(u8, |a, b| u8::from(a != 0) & u8::from(b != 0));
        }
        (DType::Bool, ReduceOp::BitOr | ReduceOp::Max) => run!(u8, |a, b| u8::from((a | b) != 0)),
        (DType::Bool, ReduceOp::BitXor) => run!(u8, |a, b| u8::from((a != 0) != (b != 0))),
        _ => by_type!(dtype, integers, floats, undefined(op, dtype)),
    }
}

fn in_place<T: Number>(
    level: Level,
    first: bool,
    into: &mut [u8],
    from: &[u8],
    combine: impl Fn(T::Wide, T::Wide) -> T::Wide,
) {
    if first {
        zip::<T, T>(level, into, from, |a, b| combine(b, a));
    } else {
        zip::<T, T>(level, into, from, combine);
    }
}

fn zip<A: Number, B: Number<Wide = A::Wide>>(
    level: Level,
    into: &mut [u8],
    from: &[u8],
    combine: impl Fn(A::Wide, A::Wide) -> A::Wide,
) {
    let into = bytemuck::cast_slice_mut::<u8, A>(into);
    let from = bytemuck::cast_slice::<u8, B>(from);
    let kernel = Zip {
        into,
        from,
        combine,
    };
    dispatch::run(level, kernel);
}

/// Divides and multiplies, as [`Finish`] says: integers are divided truncating toward zero.
pub fn finish(dtype: DType, values: &mut [u8], finish: &Finish) {
    if let Some(by) = finish.divide {
        divide(dtype, values, by);
    }
    scale(dtype, values, finish.postscale);
}

/// Changes every element: of floats in what they are computed in; of integers, which may need a type that is larger.
macro_rules! change {
    ($dtype:expr, $values:expr, |$f:ident: $wide:ident| $float:expr, |$i:ident: $type:ident, $larger:ident| $integer:expr) => {{
        macro_rules! floats {
            ($one:ty, $computed:ty) => {{
                type $wide = $computed;
                map::<$one>($values, |$f: $wide| $float);
            }};
        }
        macro_rules! integers {
            ($one:ty, $unsigned:ty, $big:ty) => {{
                #[allow(dead_code)]
                type $larger = $big;
                type $type = $one;
                map::<$one>($values, |$i: $type| $integer);
            }};
        }
        by_type!($dtype, integers, floats, {})
    }};
}

fn map<T: Number>(values: &mut [u8], change: impl Fn(T::Wide) -> T::Wide) {
    let values = bytemuck::cast_slice_mut::<u8, T>(values);
    dispatch::run(Level::detected(), Map { values, change });
}

/// Divides every element by the world size, for [`ReduceOp::Average`]. Does nothing to `bool`s.
#[allow(clippy::cast_lossless)]
pub fn divide(dtype: DType, values: &mut [u8], by: u32) {
    change!(
        dtype,
        values,
        |value: Wide| value / by as Wide,
        // Every `u32` fits the larger type, and is not negative: no overflow.
        |value: Type, Larger| (value as Larger / by as Larger) as Type
    );
}

/// Multiplies every element with a factor, for prescale and postscale. Does nothing to `bool`s.
///
/// `f64` multiplies as it is, the other floats in `f32` (the factor is rounded to it). Integers are multiplied in `f64`
/// and truncated toward zero, as Horovod does; what does not fit becomes the nearest value that does, and integers over
/// 2^53 lose their lowest bits.
#[allow(clippy::cast_lossless, clippy::cast_sign_loss)]
pub fn scale(dtype: DType, values: &mut [u8], factor: Factor) {
    if factor.is_one() {
        return;
    }
    let factor = factor.get();
    change!(
        dtype,
        values,
        |value: Wide| value * factor as Wide,
        |value: Type, Larger| (value as f64 * factor) as Type
    );
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
    macro_rules! integers {
        ($type:ty, $unsigned:ty, $largest:ty) => {
            match op {
                ReduceOp::Product => fill::<$type>(values, 1),
                ReduceOp::Min => fill(values, <$type>::MAX),
                ReduceOp::Max => fill(values, <$type>::MIN),
                ReduceOp::BitAnd => values.fill(u8::MAX),
                _ => values.fill(0),
            }
        };
    }
    macro_rules! floats {
        ($type:ty, $wide:ty) => {
            match op {
                ReduceOp::Product => fill(values, <$type>::short(1.0)),
                ReduceOp::Min => fill(values, <$type>::INFINITY),
                ReduceOp::Max => fill(values, <$type>::NEG_INFINITY),
                ReduceOp::Adasum => values.fill(0),
                _ => fill(values, <$type>::short(-0.0)),
            }
        };
    }
    if !op.allows(dtype) {
        undefined(op, dtype);
    }
    let is_true = matches!(op, ReduceOp::BitAnd | ReduceOp::Min);
    by_type!(dtype, integers, floats, values.fill(u8::from(is_true)));
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
fn convert_at(level: Level, to: DType, into: &mut [u8], from_type: DType, from: &[u8]) {
    const BLOCK: usize = 1024;
    assert!(
        to.is_float() && from_type.is_float(),
        "{from_type} to {to}: only floats are converted"
    );
    let count = from.len() / from_type.size();
    same_length(into.len(), count * to.size());
    if to == from_type {
        return into.copy_from_slice(from);
    }
    let mut floats = [0_f32; BLOCK];
    for at in (0..count).step_by(BLOCK) {
        let length = BLOCK.min(count - at);
        let part = |size: usize| at * size..(at + length) * size;
        let floats = &mut floats[..length];
        let from = &from[part(from_type.size())];
        if from_type == DType::F64 {
            for (into, from) in floats.iter_mut().zip(bytemuck::cast_slice::<u8, f64>(from)) {
                *into = *from as f32;
            }
        } else {
            let floats = bytemuck::cast_slice_mut(floats);
            copy_as(level, DType::F32, floats, from_type, from);
        }
        let into = &mut into[part(to.size())];
        if to == DType::F64 {
            for (into, from) in bytemuck::cast_slice_mut::<u8, f64>(into)
                .iter_mut()
                .zip(floats)
            {
                *into = f64::from(*from);
            }
        } else {
            copy_as(level, to, into, DType::F32, bytemuck::cast_slice(floats));
        }
    }
}

/// From `f32` to a type that is computed in it, or back.
fn copy_as(level: Level, to: DType, into: &mut [u8], from_type: DType, from: &[u8]) {
    match (to, from_type) {
        (DType::F16, _) => zip::<f16, f32>(level, into, from, |_, b| b),
        (DType::Bf16, _) => zip::<bf16, f32>(level, into, from, |_, b| b),
        (_, DType::F16) => zip::<f32, f16>(level, into, from, |_, b| b),
        (_, DType::Bf16) => zip::<f32, bf16>(level, into, from, |_, b| b),
        _ => into.copy_from_slice(from),
    }
}

#[cfg(test)]
mod tests;
