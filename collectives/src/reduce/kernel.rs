//! The loops, for any type and any combination of two values.

use bytemuck::Pod;
use half::{bf16, f16};

use super::dispatch::{Convert, Kernel, LANES};
use super::software;

/// A type as it lies in memory, and what it is computed in.
pub(super) trait Number: Pod {
    /// What it is computed in.
    type Wide: Number<Wide = Self::Wide>;
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

/// `into = combine(into, from)`, of types that are computed in the same one.
pub(super) struct Zip<'a, A, B, F> {
    pub(super) into: &'a mut [A],
    pub(super) from: &'a [B],
    pub(super) combine: F,
}

impl<A, B, F> Kernel for Zip<'_, A, B, F>
where
    A: Number,
    B: Number<Wide = A::Wide>,
    F: Fn(A::Wide, A::Wide) -> A::Wide,
{
    #[inline(always)]
    fn run<C: Convert>(self) {
        let combine = self.combine;
        let is_grouped = A::GROUP > 1 || B::GROUP > 1;
        let groups = if is_grouped {
            self.into.len() / LANES * LANES
        } else {
            0
        };
        let (into, rest) = self.into.split_at_mut(groups);
        let (from, others) = self.from.split_at(groups);
        for (a, b) in into.chunks_exact_mut(LANES).zip(from.chunks_exact(LANES)) {
            let (mut left, right) = (A::load::<C>(a), B::load::<C>(b));
            for at in 0..LANES {
                left[at] = combine(left[at], right[at]);
            }
            A::store::<C>(a, &left);
        }
        for (a, b) in rest.iter_mut().zip(others) {
            *a = A::short(combine(a.wide(), b.wide()));
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
        let groups = if T::GROUP > 1 {
            self.values.len() / LANES * LANES
        } else {
            0
        };
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
