//! Adasum of two vectors (Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021).
//!
//! The sums are kept in eight parts that are added up in a fixed order, so that every processor, whatever its vectors are
//! long, gets the same bits, and the compiler may use them.

use half::f16;

use super::dispatch::{self, Convert, Kernel, Level};
use super::kernel::{Number, Zip};
use super::{DType, ReduceOp, same_length, undefined};

/// Scalar products of two vectors, or of parts of them: those of parts are added up.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Dots {
    /// Left times right.
    pub both: f64,
    /// Left times left.
    pub left: f64,
    /// Right times right.
    pub right: f64,
}

impl Dots {
    /// Bytes of the three numbers, as they travel.
    pub const SIZE: usize = 24;

    /// As they travel.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        for (bytes, value) in bytes
            .chunks_exact_mut(8)
            .zip([self.both, self.left, self.right])
        {
            bytes.copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    /// From where they have come.
    ///
    /// # Panics
    ///
    /// If there are not [`Dots::SIZE`] bytes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        assert_eq!(bytes.len(), Self::SIZE, "three numbers");
        let number = |at: usize| {
            let mut one = [0; 8];
            one.copy_from_slice(&bytes[at..at + 8]);
            f64::from_le_bytes(one)
        };
        Self {
            both: number(0),
            left: number(8),
            right: number(16),
        }
    }

    /// Those of two parts of the vectors together. The order does not matter.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            both: self.both + other.both,
            left: self.left + other.left,
            right: self.right + other.right,
        }
    }

    /// With left and right the other way round.
    #[must_use]
    pub fn mirrored(self) -> Self {
        Self {
            both: self.both,
            left: self.right,
            right: self.left,
        }
    }

    /// What the left and the right vector are multiplied with. A vector of length 0 takes nothing from the other.
    #[must_use]
    pub fn factors(&self) -> (f64, f64) {
        let factor = |own: f64| {
            if own == 0.0 {
                1.0
            } else {
                1.0 - self.both / (2.0 * own)
            }
        };
        (factor(self.left), factor(self.right))
    }
}

/// A float that Adasum is defined for.
trait Gradient: Number {
    fn double(wide: Self::Wide) -> f64;
    fn single(double: f64) -> Self::Wide;
}

macro_rules! gradients {
    ($($type:ty as $wide:ty),*) => {$(
        #[allow(clippy::cast_lossless)]
        impl Gradient for $type {
            #[inline(always)]
            fn double(wide: $wide) -> f64 {
                wide as f64
            }

            #[inline(always)]
            fn single(double: f64) -> $wide {
                double as $wide
            }
        }
    )*};
}

gradients!(f16 as f32, f32 as f32, f64 as f64);

const PARTS: usize = 8;
const BLOCK: usize = 512;

struct Multiply<'a, T> {
    left: &'a [T],
    right: &'a [T],
    sums: &'a mut [[f64; PARTS]; 3],
}

impl<T: Gradient> Kernel for Multiply<'_, T> {
    #[inline(always)]
    fn run<C: Convert>(self) {
        let zero: T::Wide = bytemuck::Zeroable::zeroed();
        let (mut a, mut b) = ([zero; BLOCK], [zero; BLOCK]);
        let [both, lefts, rights] = self.sums;
        for (left, right) in self.left.chunks(BLOCK).zip(self.right.chunks(BLOCK)) {
            // Zeros behind the end add nothing.
            let whole = left.len().next_multiple_of(PARTS);
            a[left.len()..whole].fill(zero);
            b[left.len()..whole].fill(zero);
            for (wide, short) in [(&mut a, left), (&mut b, right)] {
                let into = &mut wide[..short.len()];
                let combine = |_, b| b;
                Zip {
                    into,
                    from: short,
                    combine,
                }
                .run::<C>();
            }
            for (a, b) in a[..whole]
                .chunks_exact(PARTS)
                .zip(b[..whole].chunks_exact(PARTS))
            {
                for part in 0..PARTS {
                    let (a, b) = (T::double(a[part]), T::double(b[part]));
                    both[part] += a * b;
                    lefts[part] += a * a;
                    rights[part] += b * b;
                }
            }
        }
    }
}

struct Add<'a, T> {
    into: &'a mut [T],
    from: &'a [T],
    factors: (f64, f64),
}

impl<T: Gradient> Kernel for Add<'_, T> {
    #[inline(always)]
    fn run<C: Convert>(self) {
        let (one, other) = self.factors;
        let (into, from) = (self.into, self.from);
        let combine = |a, b| T::single(one * T::double(a) + other * T::double(b));
        Zip {
            into,
            from,
            combine,
        }
        .run::<C>();
    }
}

/// The scalar products of two vectors of the same length.
///
/// # Panics
///
/// As all [kernels](crate::reduce), and if Adasum is not defined for the type.
pub fn dots(dtype: DType, left: &[u8], right: &[u8]) -> Dots {
    dots_at(Level::detected(), dtype, left, right)
}

pub(super) fn dots_at(level: Level, dtype: DType, left: &[u8], right: &[u8]) -> Dots {
    fn typed<T: Gradient>(level: Level, left: &[u8], right: &[u8]) -> Dots {
        let mut sums = [[0.0; PARTS]; 3];
        let kernel = Multiply::<T> {
            left: bytemuck::cast_slice(left),
            right: bytemuck::cast_slice(right),
            sums: &mut sums,
        };
        dispatch::run(level, kernel);
        let [both, left, right] = sums.map(|parts| parts.iter().sum());
        Dots { both, left, right }
    }
    same_length(left.len(), right.len());
    match dtype {
        DType::F16 => typed::<f16>(level, left, right),
        DType::F32 => typed::<f32>(level, left, right),
        DType::F64 => typed::<f64>(level, left, right),
        other => undefined(ReduceOp::Adasum, other),
    }
}

/// `left = factor of left * left + factor of right * right`, with the [factors](Dots::factors) of the whole vectors.
///
/// # Panics
///
/// As [`dots`].
pub fn blend(dtype: DType, left: &mut [u8], right: &[u8], dots: &Dots) {
    fn typed<T: Gradient>(into: &mut [u8], from: &[u8], factors: (f64, f64)) {
        let (into, from) = (
            bytemuck::cast_slice_mut::<u8, T>(into),
            bytemuck::cast_slice(from),
        );
        dispatch::run(
            Level::detected(),
            Add {
                into,
                from,
                factors,
            },
        );
    }
    same_length(left.len(), right.len());
    let factors = dots.factors();
    match dtype {
        DType::F16 => typed::<f16>(left, right, factors),
        DType::F32 => typed::<f32>(left, right, factors),
        DType::F64 => typed::<f64>(left, right, factors),
        other => undefined(ReduceOp::Adasum, other),
    }
}
