//! What comes out of values at the edges of their types.

use super::*;

fn divided<T: Element + bytemuck::Pod>(values: &[T], by: u32) -> Vec<T> {
    let mut into = values.to_vec();
    divide(T::DTYPE, bytemuck::cast_slice_mut(&mut into), by);
    into
}

fn scaled<T: Element + bytemuck::Pod>(values: &[T], factor: f64) -> Vec<T> {
    let mut into = values.to_vec();
    scale(
        T::DTYPE,
        bytemuck::cast_slice_mut(&mut into),
        Factor::new(factor),
    );
    into
}

#[test]
fn integers_wrap_and_their_average_truncates_toward_zero() {
    assert_eq!(reduced(ReduceOp::Sum, &[i32::MAX], &[1]), [i32::MIN]);
    assert_eq!(reduced(ReduceOp::Sum, &[250_u8], &[10]), [4]);
    assert_eq!(reduced(ReduceOp::Product, &[i64::MAX], &[2]), [-2]);
    assert_eq!(reduced(ReduceOp::Min, &[-1_i8], &[1]), [-1]);
    assert_eq!(reduced(ReduceOp::Min, &[255_u8], &[1]), [1]);
    assert_eq!(
        divided(&[7_i64, -7, 6, i64::MIN], 2),
        [3, -3, 3, i64::MIN / 2]
    );
    assert_eq!(divided(&[i32::MAX], u32::MAX), [0]);
    assert_eq!(divided(&[i8::MIN, 100], 300), [0, 0]);
    assert_eq!(divided(&[u64::MAX], 3), [u64::MAX / 3]);
    assert_eq!(divided(&[f16::from_f32(3.0)], 2), [f16::from_f32(1.5)]);
    assert_eq!(divided(&[bf16::from_f32(1.0)], 4), [bf16::from_f32(0.25)]);
}

#[test]
fn half_types_are_combined_in_f32_and_become_infinite() {
    let big = f16::from_f32(60_000.0);
    assert_eq!(reduced(ReduceOp::Sum, &[big], &[big]), [f16::INFINITY]);
    assert_eq!(
        reduced(ReduceOp::Sum, &[f16::INFINITY], &[big]),
        [f16::INFINITY]
    );
    // 2049 is a tie between 2048 and 2050: to even.
    let sum = reduced(ReduceOp::Sum, &[f16::from_f32(2048.0)], &[f16::ONE]);
    assert_eq!(sum, [f16::from_f32(2048.0)]);
    assert_eq!(scaled(&[big], 0.5), [f16::from_f32(30_000.0)]);
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
fn scaled_integers_are_truncated_and_stay_in_range() {
    assert_eq!(scaled(&[3_i32, -3, 100], 0.5), [1, -1, 50]);
    assert_eq!(scaled(&[100_u8, 3], 3.0), [255, 9]);
    assert_eq!(scaled(&[100_u8], -1.0), [0]);
    assert_eq!(scaled(&[i64::MAX], 2.0), [i64::MAX]);
    assert_eq!(scaled(&[1_i16], f64::NAN), [0]);
    assert_eq!(scaled(&[1.5_f32, -2.0], 2.0), [3.0, -4.0]);
    assert_eq!(scaled(&[1.5_f64], 1e300), [1.5e300]);
    assert_eq!(scaled(&[u64::MAX], 1.0), [u64::MAX]);
}

#[test]
fn any_byte_but_0_is_true() {
    let mut into = [0_u8, 0, 2, 2];
    combine(DType::Bool, ReduceOp::BitXor, &mut into, &[0, 4, 0, 4]);
    assert_eq!(into, [0, 1, 1, 0]);
    let mut into = [1_u8];
    combine(DType::Bool, ReduceOp::Min, &mut into, &[2]);
    assert_eq!(into, [1]);
}
