//! The loops, for any type and any combination of two values.

use bytemuck::Pod;
use half::{bf16, f16};

use super::dispatch::{Convert, Kernel, LANES};
use super::software;

/// A type as it lies in memory, and what it is computed in.
pub(super) trait Number: Pod {
    /// What it is computed in.
    type Wide: Pod;

    fn zip<C: Convert>(
        into: &mut [Self],
        from: &[Self],
        combine: impl Fn(Self::Wide, Self::Wide) -> Self::Wide,
    );
    fn zip_into<C: Convert>(
        into: &mut [Self],
        left: &[Self],
        right: &[Self],
        combine: impl Fn(Self::Wide, Self::Wide) -> Self::Wide,
    );
    fn map<C: Convert>(values: &mut [Self], change: impl Fn(Self::Wide) -> Self::Wide);
    fn widen<C: Convert>(into: &mut [Self::Wide], from: &[Self]);
    fn narrow<C: Convert>(into: &mut [Self], from: &[Self::Wide]);
    fn gather<C: Convert>(
        sum: &mut [Self::Wide],
        from: &[Self],
        combine: impl Fn(Self::Wide, Self::Wide) -> Self::Wide,
    );
}

macro_rules! plain {
    ($($type:ty),*) => {$(
        impl Number for $type {
            type Wide = Self;

            #[inline(always)]
            fn zip<C: Convert>(into: &mut [Self], from: &[Self], combine: impl Fn(Self, Self) -> Self) {
                for (a, b) in into.iter_mut().zip(from) {
                    *a = combine(*a, *b);
                }
            }

            #[inline(always)]
            fn zip_into<C: Convert>(
                into: &mut [Self],
                left: &[Self],
                right: &[Self],
                combine: impl Fn(Self, Self) -> Self,
            ) {
                for ((into, a), b) in into.iter_mut().zip(left).zip(right) {
                    *into = combine(*a, *b);
                }
            }

            #[inline(always)]
            fn map<C: Convert>(values: &mut [Self], change: impl Fn(Self) -> Self) {
                for value in values {
                    *value = change(*value);
                }
            }

            #[inline(always)]
            fn widen<C: Convert>(into: &mut [Self], from: &[Self]) {
                into.copy_from_slice(from);
            }

            #[inline(always)]
            fn narrow<C: Convert>(into: &mut [Self], from: &[Self]) {
                into.copy_from_slice(from);
            }

            #[inline(always)]
            fn gather<C: Convert>(sum: &mut [Self], from: &[Self], combine: impl Fn(Self, Self) -> Self) {
                Self::zip::<C>(sum, from, combine);
            }
        }
    )*};
}

plain!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);

// Element by element: the conversions are a few instructions each, and the loop becomes SIMD code as a whole.
impl Number for bf16 {
    type Wide = f32;

    #[inline(always)]
    fn zip<C: Convert>(into: &mut [Self], from: &[Self], combine: impl Fn(f32, f32) -> f32) {
        for (a, b) in into.iter_mut().zip(from) {
            *a = short(combine(long(*a), long(*b)));
        }
    }

    #[inline(always)]
    fn zip_into<C: Convert>(
        into: &mut [Self],
        left: &[Self],
        right: &[Self],
        combine: impl Fn(f32, f32) -> f32,
    ) {
        for ((into, a), b) in into.iter_mut().zip(left).zip(right) {
            *into = short(combine(long(*a), long(*b)));
        }
    }

    #[inline(always)]
    fn map<C: Convert>(values: &mut [Self], change: impl Fn(f32) -> f32) {
        for value in values {
            *value = short(change(long(*value)));
        }
    }

    #[inline(always)]
    fn widen<C: Convert>(into: &mut [f32], from: &[Self]) {
        for (into, from) in into.iter_mut().zip(from) {
            *into = long(*from);
        }
    }

    #[inline(always)]
    fn narrow<C: Convert>(into: &mut [Self], from: &[f32]) {
        for (into, from) in into.iter_mut().zip(from) {
            *into = short(*from);
        }
    }

    #[inline(always)]
    fn gather<C: Convert>(sum: &mut [f32], from: &[Self], combine: impl Fn(f32, f32) -> f32) {
        for (sum, from) in sum.iter_mut().zip(from) {
            *sum = combine(*sum, long(*from));
        }
    }
}

#[inline(always)]
fn long(value: bf16) -> f32 {
    software::widen_bf16(value.to_bits())
}

#[inline(always)]
fn short(value: f32) -> bf16 {
    bf16::from_bits(software::narrow_bf16(value))
}

// In groups, because some processors convert a group with one instruction.
impl Number for f16 {
    type Wide = f32;

    #[inline(always)]
    fn zip<C: Convert>(into: &mut [Self], from: &[Self], combine: impl Fn(f32, f32) -> f32) {
        let (mut a, mut b) = (into.chunks_exact_mut(LANES), from.chunks_exact(LANES));
        for (a, b) in a.by_ref().zip(b.by_ref()) {
            let result = join(&C::widen_f16(&bits(a)), &C::widen_f16(&bits(b)), &combine);
            put(a, &C::narrow_f16(&result));
        }
        let (a, b) = (a.into_remainder(), b.remainder());
        let result = join(
            &C::widen_f16(&some_bits(a)),
            &C::widen_f16(&some_bits(b)),
            &combine,
        );
        put(a, &C::narrow_f16(&result)[..a.len()]);
    }

    #[inline(always)]
    fn zip_into<C: Convert>(
        into: &mut [Self],
        left: &[Self],
        right: &[Self],
        combine: impl Fn(f32, f32) -> f32,
    ) {
        let mut into = into.chunks_exact_mut(LANES);
        let (mut left, mut right) = (left.chunks_exact(LANES), right.chunks_exact(LANES));
        for ((into, a), b) in into.by_ref().zip(left.by_ref()).zip(right.by_ref()) {
            let result = join(&C::widen_f16(&bits(a)), &C::widen_f16(&bits(b)), &combine);
            put(into, &C::narrow_f16(&result));
        }
        let (into, a, b) = (into.into_remainder(), left.remainder(), right.remainder());
        let result = join(
            &C::widen_f16(&some_bits(a)),
            &C::widen_f16(&some_bits(b)),
            &combine,
        );
        put(into, &C::narrow_f16(&result)[..into.len()]);
    }

    #[inline(always)]
    fn map<C: Convert>(values: &mut [Self], change: impl Fn(f32) -> f32) {
        let mut values = values.chunks_exact_mut(LANES);
        for values in values.by_ref() {
            let floats = each(&C::widen_f16(&bits(values)), &change);
            put(values, &C::narrow_f16(&floats));
        }
        let values = values.into_remainder();
        let floats = each(&C::widen_f16(&some_bits(values)), &change);
        put(values, &C::narrow_f16(&floats)[..values.len()]);
    }

    #[inline(always)]
    fn widen<C: Convert>(into: &mut [f32], from: &[Self]) {
        let (mut a, mut b) = (into.chunks_exact_mut(LANES), from.chunks_exact(LANES));
        for (a, b) in a.by_ref().zip(b.by_ref()) {
            a.copy_from_slice(&C::widen_f16(&bits(b)));
        }
        let (a, b) = (a.into_remainder(), b.remainder());
        a.copy_from_slice(&C::widen_f16(&some_bits(b))[..b.len()]);
    }

    #[inline(always)]
    fn narrow<C: Convert>(into: &mut [Self], from: &[f32]) {
        let (mut a, mut b) = (into.chunks_exact_mut(LANES), from.chunks_exact(LANES));
        let mut floats = [0.0; LANES];
        for (a, b) in a.by_ref().zip(b.by_ref()) {
            floats.copy_from_slice(b);
            put(a, &C::narrow_f16(&floats));
        }
        let (a, b) = (a.into_remainder(), b.remainder());
        floats[..b.len()].copy_from_slice(b);
        put(a, &C::narrow_f16(&floats)[..b.len()]);
    }

    #[inline(always)]
    fn gather<C: Convert>(sum: &mut [f32], from: &[Self], combine: impl Fn(f32, f32) -> f32) {
        let (mut a, mut b) = (sum.chunks_exact_mut(LANES), from.chunks_exact(LANES));
        for (a, b) in a.by_ref().zip(b.by_ref()) {
            let wide = C::widen_f16(&bits(b));
            for (a, b) in a.iter_mut().zip(wide) {
                *a = combine(*a, b);
            }
        }
        let (a, b) = (a.into_remainder(), b.remainder());
        for (a, b) in a.iter_mut().zip(C::widen_f16(&some_bits(b))) {
            *a = combine(*a, b);
        }
    }
}

/// [`LANES`] halves.
#[inline(always)]
fn bits(from: &[f16]) -> [u16; LANES] {
    let mut bits = [0; LANES];
    bits.copy_from_slice(bytemuck::cast_slice(from));
    bits
}

#[inline(always)]
fn put(into: &mut [f16], bits: &[u16]) {
    bytemuck::cast_slice_mut::<f16, u16>(into).copy_from_slice(bits);
}

#[inline(always)]
fn each(values: &[f32; LANES], change: &impl Fn(f32) -> f32) -> [f32; LANES] {
    let mut result = [0.0; LANES];
    for at in 0..LANES {
        result[at] = change(values[at]);
    }
    result
}

/// Fewer than [`LANES`] halves, and zeros behind them.
#[inline(always)]
fn some_bits(from: &[f16]) -> [u16; LANES] {
    let mut bits = [0; LANES];
    bits[..from.len()].copy_from_slice(bytemuck::cast_slice(from));
    bits
}

#[inline(always)]
fn join(a: &[f32; LANES], b: &[f32; LANES], combine: &impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    let mut result = [0.0; LANES];
    for at in 0..LANES {
        result[at] = combine(a[at], b[at]);
    }
    result
}

/// `into = into op from`.
pub(super) struct InPlace<'a, T, F> {
    pub(super) into: &'a mut [T],
    pub(super) from: &'a [T],
    pub(super) combine: F,
}

impl<T: Number, F: Fn(T::Wide, T::Wide) -> T::Wide> Kernel for InPlace<'_, T, F> {
    #[inline(always)]
    fn run<C: Convert>(self) {
        T::zip::<C>(self.into, self.from, self.combine);
    }
}

/// `into = left op right`.
pub(super) struct Three<'a, T, F> {
    pub(super) into: &'a mut [T],
    pub(super) left: &'a [T],
    pub(super) right: &'a [T],
    pub(super) combine: F,
}

impl<T: Number, F: Fn(T::Wide, T::Wide) -> T::Wide> Kernel for Three<'_, T, F> {
    #[inline(always)]
    fn run<C: Convert>(self) {
        T::zip_into::<C>(self.into, self.left, self.right, self.combine);
    }
}

/// `sum = sum op from`, where the sum is wide.
pub(super) struct Gather<'a, T: Number, F> {
    pub(super) sum: &'a mut [T::Wide],
    pub(super) from: &'a [T],
    pub(super) combine: F,
}

impl<T: Number, F: Fn(T::Wide, T::Wide) -> T::Wide> Kernel for Gather<'_, T, F> {
    #[inline(always)]
    fn run<C: Convert>(self) {
        T::gather::<C>(self.sum, self.from, self.combine);
    }
}

/// `value = change(value)`.
pub(super) struct Map<'a, T, F> {
    pub(super) values: &'a mut [T],
    pub(super) change: F,
}

impl<T: Number, F: Fn(T::Wide) -> T::Wide> Kernel for Map<'_, T, F> {
    #[inline(always)]
    fn run<C: Convert>(self) {
        T::map::<C>(self.values, self.change);
    }
}

/// To the type that it is computed in.
pub(super) struct Widen<'a, T: Number> {
    pub(super) into: &'a mut [T::Wide],
    pub(super) from: &'a [T],
}

impl<T: Number> Kernel for Widen<'_, T> {
    #[inline(always)]
    fn run<C: Convert>(self) {
        T::widen::<C>(self.into, self.from);
    }
}

/// And back.
pub(super) struct Narrow<'a, T: Number> {
    pub(super) into: &'a mut [T],
    pub(super) from: &'a [T::Wide],
}

impl<T: Number> Kernel for Narrow<'_, T> {
    #[inline(always)]
    fn run<C: Convert>(self) {
        T::narrow::<C>(self.into, self.from);
    }
}
