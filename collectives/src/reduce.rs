//! Kernels: `into[i] = into[i] op from[i]`.
//!
//! Each is one plain loop over two slices of one length, which the compiler turns into SIMD code: no
//! branch depends on a value. [`ReduceOp`] says what overflow and NaN do.

use crate::element::{DType, Sealed};
use crate::operation::ReduceOp;

/// Combines two slices of bytes, as elements of `dtype`.
///
/// # Panics
///
/// If the lengths differ, or the slices are not aligned for the type or not a whole number of elements.
pub fn combine(dtype: DType, op: ReduceOp, into: &mut [u8], from: &[u8]) {
    fn typed<T: Sealed>(op: ReduceOp, into: &mut [u8], from: &[u8]) {
        T::reduce(
            op,
            bytemuck::cast_slice_mut(into),
            bytemuck::cast_slice(from),
        );
    }
    match dtype {
        DType::I32 => typed::<i32>(op, into, from),
        DType::I64 => typed::<i64>(op, into, from),
        DType::F32 => typed::<f32>(op, into, from),
        DType::F64 => typed::<f64>(op, into, from),
    }
}

/// Divides every element by the world size, for [`ReduceOp::Average`].
///
/// # Panics
///
/// As [`combine`].
pub fn divide(dtype: DType, values: &mut [u8], by: u32) {
    match dtype {
        DType::I32 => i32::divide(bytemuck::cast_slice_mut(values), by),
        DType::I64 => i64::divide(bytemuck::cast_slice_mut(values), by),
        DType::F32 => f32::divide(bytemuck::cast_slice_mut(values), by),
        DType::F64 => f64::divide(bytemuck::cast_slice_mut(values), by),
    }
}

/// One loop for all kernels. The check of the lengths up front takes the bounds checks out of the loop.
#[inline(always)]
#[allow(clippy::inline_always)] // the closure must be seen by the vectoriser, in debug builds of users too
fn zip<T: Copy>(into: &mut [T], from: &[T], combine: impl Fn(T, T) -> T) {
    assert_eq!(
        into.len(),
        from.len(),
        "a reduction takes slices of one length"
    );
    for (a, b) in into.iter_mut().zip(from) {
        *a = combine(*a, *b);
    }
}

macro_rules! float_kernels {
    ($name:ident, $type:ty) => {
        pub(crate) mod $name {
            use super::{ReduceOp, zip};

            pub(crate) fn apply(op: ReduceOp, into: &mut [$type], from: &[$type]) {
                match op {
                    ReduceOp::Sum | ReduceOp::Average => zip(into, from, |a, b| a + b),
                    ReduceOp::Product => zip(into, from, |a, b| a * b),
                    // `a` stays if it is NaN (no comparison holds); `b` is taken if it is NaN.
                    ReduceOp::Min => {
                        zip(into, from, |a, b| if (b < a) | b.is_nan() { b } else { a })
                    }
                    ReduceOp::Max => {
                        zip(into, from, |a, b| if (b > a) | b.is_nan() { b } else { a })
                    }
                }
            }

            pub(crate) fn divide(values: &mut [$type], by: u32) {
                let by = by as $type;
                for value in values {
                    *value /= by;
                }
            }
        }
    };
}

macro_rules! integer_kernels {
    ($name:ident, $type:ty) => {
        pub(crate) mod $name {
            use super::{ReduceOp, zip};

            pub(crate) fn apply(op: ReduceOp, into: &mut [$type], from: &[$type]) {
                match op {
                    ReduceOp::Sum | ReduceOp::Average => zip(into, from, <$type>::wrapping_add),
                    ReduceOp::Product => zip(into, from, <$type>::wrapping_mul),
                    ReduceOp::Min => zip(into, from, Ord::min),
                    ReduceOp::Max => zip(into, from, Ord::max),
                }
            }

            pub(crate) fn divide(values: &mut [$type], by: u32) {
                // Every `u32` fits an `i64`, and the divisor is not negative: no overflow.
                for value in values {
                    *value = (i64::from(*value) / i64::from(by)) as $type;
                }
            }
        }
    };
}

float_kernels!(for_f32, f32);
float_kernels!(for_f64, f64);
integer_kernels!(for_i32, i32);
integer_kernels!(for_i64, i64);

#[cfg(test)]
mod tests {
    use super::*;

    fn reduced<T: Sealed>(op: ReduceOp, a: &[T], b: &[T]) -> Vec<T> {
        let mut into = a.to_vec();
        T::reduce(op, &mut into, b);
        into
    }

    #[test]
    fn operators_do_what_they_say() {
        for (op, expected) in [
            (ReduceOp::Sum, [5, -3]),
            (ReduceOp::Average, [5, -3]),
            (ReduceOp::Min, [2, -4]),
            (ReduceOp::Max, [3, 1]),
            (ReduceOp::Product, [6, -4]),
        ] {
            assert_eq!(reduced::<i32>(op, &[2, -4], &[3, 1]), expected);
            assert_eq!(
                reduced::<i64>(op, &[2, -4], &[3, 1]),
                expected.map(i64::from)
            );
            let floats = expected.map(f64::from);
            assert_eq!(reduced::<f64>(op, &[2.0, -4.0], &[3.0, 1.0]), floats);
            assert_eq!(
                reduced::<f32>(op, &[2.0, -4.0], &[3.0, 1.0]),
                floats.map(|value| value as f32)
            );
        }
    }

    #[test]
    fn integers_wrap_and_their_average_truncates_toward_zero() {
        assert_eq!(reduced(ReduceOp::Sum, &[i32::MAX], &[1]), [i32::MIN]);
        assert_eq!(reduced(ReduceOp::Product, &[i64::MAX], &[2]), [-2]);
        let mut values = [7_i64, -7, 6, i64::MIN];
        i64::divide(&mut values, 2);
        assert_eq!(values, [3, -3, 3, i64::MIN / 2]);
        let mut values = [i32::MAX];
        i32::divide(&mut values, u32::MAX);
        assert_eq!(values, [0]);
    }

    #[test]
    fn a_nan_on_either_side_gives_nan() {
        for op in ReduceOp::ALL {
            for (a, b) in [(f32::NAN, 1.0), (1.0, f32::NAN), (f32::NAN, f32::NAN)] {
                assert!(reduced(op, &[a], &[b])[0].is_nan(), "{op} of {a} and {b}");
                let (a, b) = (f64::from(a), f64::from(b));
                assert!(reduced(op, &[a], &[b])[0].is_nan(), "{op} of {a} and {b}");
            }
        }
    }

    #[test]
    fn infinities_are_ordinary_values() {
        let infinity = f32::INFINITY;
        assert_eq!(
            reduced(ReduceOp::Min, &[infinity], &[-infinity]),
            [-infinity]
        );
        assert_eq!(reduced(ReduceOp::Max, &[1.0], &[infinity]), [infinity]);
        assert!(reduced(ReduceOp::Sum, &[infinity], &[-infinity])[0].is_nan());
    }

    #[test]
    fn bytes_are_combined_as_the_type_they_hold() {
        for length in [0, 1, 2, 7, 64, 1023] {
            let a: Vec<f32> = (0..length).map(|i| i as f32).collect();
            let b: Vec<f32> = (0..length).map(|i| 2.0 * i as f32).collect();
            let mut into = a.clone();
            combine(
                DType::F32,
                ReduceOp::Sum,
                bytemuck::cast_slice_mut(&mut into),
                bytemuck::cast_slice(&b),
            );
            divide(DType::F32, bytemuck::cast_slice_mut(&mut into), 3);
            assert_eq!(into, a);
        }
    }
}
