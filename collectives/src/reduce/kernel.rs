//! The loops, for any type and any combination of two values.

use bytemuck::Pod;
use half::{bf16, f16};

use super::dispatch::{Convert, Kernel, LANES};
use super::software;

/// A type as it lies in memory, and what it is computed in.
pub(super) trait Number: Pod {
    /// What it is computed in.
    type Wide: Pod;
    /// Elements that are converted at once, by [`Number::load`] and [`Number::store`]: some processors have an instruction for that.
    /// With 1 a loop over elements becomes SIMD code as a whole.
    const GROUP: usize = 1;

    fn wide(self) -> Self::Wide;
    fn short(wide: Self::Wide) -> Self;

    /// A group of [`LANES`].
    #[inline(always)]
    fn load<C: Convert>(from: &[Self]) -> [Self::Wide; LANES] {
        std::array::from_fn(|at| from[at].wide())
    }

    #[inline(always)]
    fn store<C: Convert>(into: &mut [Self], from: &[Self::Wide; LANES]) {
        for (into, from) in into.iter_mut().zip(from) {
            *into = Self::short(*from);
        }
    }
}

macro_rules! plain {
    ($($type:ty),*) => {$(
        impl Number for $type {
            type Wide = Self;

            #[inline(always)]
            fn wide(self) -> Self {
                self
            }

            #[inline(always)]
            fn short(wide: Self) -> Self {
                wide
            }
        }
    )*};
}

plain!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);

impl Number for bf16 {
    type Wide = f32;

    #[inline(always)]
    fn wide(self) -> f32 {
        software::widen_bf16(self.to_bits())
    }

    #[inline(always)]
    fn short(wide: f32) -> Self {
        Self::from_bits(software::narrow_bf16(wide))
    }
}

impl Number for f16 {
    type Wide = f32;
    const GROUP: usize = LANES;

    #[inline(always)]
    fn wide(self) -> f32 {
        software::widen_f16(self.to_bits())
    }

    #[inline(always)]
    fn short(wide: f32) -> Self {
        Self::from_bits(software::narrow_f16(wide))
    }

    #[inline(always)]
    fn load<C: Convert>(from: &[Self]) -> [f32; LANES] {
        let mut bits = [0; LANES];
        bits.copy_from_slice(bytemuck::cast_slice(from));
        C::widen_f16(&bits)
    }

    #[inline(always)]
    fn store<C: Convert>(into: &mut [Self], from: &[f32; LANES]) {
        bytemuck::cast_slice_mut(into).copy_from_slice(&C::narrow_f16(from));
    }
}

/// How many of so many elements are in whole groups.
#[inline(always)]
fn grouped<T: Number>(length: usize) -> usize {
    if T::GROUP > 1 {
        length / LANES * LANES
    } else {
        0
    }
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
        let combine = self.combine;
        let groups = grouped::<T>(self.into.len());
        let (into, rest) = self.into.split_at_mut(groups);
        let (from, others) = self.from.split_at(groups);
        for (a, b) in into.chunks_exact_mut(LANES).zip(from.chunks_exact(LANES)) {
            let (mut left, right) = (T::load::<C>(a), T::load::<C>(b));
            for at in 0..LANES {
                left[at] = combine(left[at], right[at]);
            }
            T::store::<C>(a, &left);
        }
        for (a, b) in rest.iter_mut().zip(others) {
            *a = T::short(combine(a.wide(), b.wide()));
        }
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
        let change = self.change;
        let groups = grouped::<T>(self.values.len());
        let (values, rest) = self.values.split_at_mut(groups);
        for group in values.chunks_exact_mut(LANES) {
            let mut wide = T::load::<C>(group);
            for value in &mut wide {
                *value = change(*value);
            }
            T::store::<C>(group, &wide);
        }
        for value in rest {
            *value = T::short(change(value.wide()));
        }
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
        let groups = grouped::<T>(self.from.len());
        let (into, rest) = self.into.split_at_mut(groups);
        let (from, others) = self.from.split_at(groups);
        for (a, b) in into.chunks_exact_mut(LANES).zip(from.chunks_exact(LANES)) {
            a.copy_from_slice(&T::load::<C>(b));
        }
        for (a, b) in rest.iter_mut().zip(others) {
            *a = b.wide();
        }
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
        let groups = grouped::<T>(self.from.len());
        let (into, rest) = self.into.split_at_mut(groups);
        let (from, others) = self.from.split_at(groups);
        for (a, b) in into.chunks_exact_mut(LANES).zip(from.chunks_exact(LANES)) {
            let mut wide = [b[0]; LANES];
            wide.copy_from_slice(b);
            T::store::<C>(a, &wide);
        }
        for (a, b) in rest.iter_mut().zip(others) {
            *a = T::short(*b);
        }
    }
}
