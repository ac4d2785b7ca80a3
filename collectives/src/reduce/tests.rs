#![allow(clippy::cast_possible_wrap, clippy::float_cmp)]

use half::{bf16, f16};

use super::adasum::dots_at;
use super::*;
use crate::element::Element;

/// Around the widths of vectors and of blocks.
const LENGTHS: [usize; 19] = [
    0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 257, 1025, 4099,
];

const SPECIAL: [f64; 15] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    65_504.0,
    -65_520.0,
    1e-8,
    3e38,
    -3e38,
    1e300,
    f64::INFINITY,
    f64::NEG_INFINITY,
    f64::NAN,
    6e-5,
];

/// Bytes of a type: anything, and often what is special.
fn mixed(dtype: DType, length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut bytes = Vec::new();
    for _ in 0..length {
        let (any, special) = (next(), SPECIAL[next() as usize % SPECIAL.len()]);
        let picks_special = next().is_multiple_of(3);
        match dtype {
            DType::Bool => bytes.push((any % 2) as u8),
            // NaN of many kinds.
            _ if dtype.is_float() && any.is_multiple_of(7) => {
                bytes.push((any >> 32) as u8);
                bytes.resize(bytes.len() + dtype.size() - 1, 0xff);
            }
            DType::F16 if picks_special => {
                bytes.extend_from_slice(&f16::from_f64(special).to_le_bytes());
            }
            DType::Bf16 if picks_special => {
                bytes.extend_from_slice(&bf16::from_f64(special).to_le_bytes());
            }
            DType::F32 if picks_special => {
                bytes.extend_from_slice(&(special as f32).to_le_bytes());
            }
            DType::F64 if picks_special => bytes.extend_from_slice(&special.to_le_bytes()),
            _ => bytes.extend_from_slice(&any.to_le_bytes()[..dtype.size()]),
        }
    }
    bytes
}

/// One element, combined in the plainest way there is. `None` for NaN.
fn reference(dtype: DType, op: ReduceOp, a: &[u8], b: &[u8]) -> Option<Vec<u8>> {
    macro_rules! integers {
        ($type:ty, $unsigned:ty, $largest:ty) => {{
            let one = |bytes: &[u8]| <$type>::from_le_bytes(bytes.try_into().unwrap());
            let (a, b) = (one(a), one(b));
            let result = match op {
                ReduceOp::Sum | ReduceOp::Average => a.wrapping_add(b),
                ReduceOp::Product => a.wrapping_mul(b),
                ReduceOp::Min => std::cmp::min(a, b),
                ReduceOp::Max => std::cmp::max(a, b),
                ReduceOp::BitAnd => a & b,
                ReduceOp::BitOr => a | b,
                ReduceOp::BitXor => a ^ b,
                ReduceOp::Adasum => unreachable!(),
            };
            Some(result.to_le_bytes().to_vec())
        }};
    }
    macro_rules! floats {
        ($type:ty, $wide:ty) => {{
            let one = |bytes: &[u8]| <$type>::from_le_bytes(bytes.try_into().unwrap()).wide();
            let (a, b) = (one(a), one(b));
            let result = match op {
                ReduceOp::Sum | ReduceOp::Average => a + b,
                ReduceOp::Product => a * b,
                _ if a.is_nan() || b.is_nan() => <$wide>::NAN,
                // The left one, of two zeros.
                _ if (b < a) == (op == ReduceOp::Min) && a != b => b,
                _ => a,
            };
            let result = <$type>::short(result);
            (!result.is_nan()).then(|| result.to_le_bytes().to_vec())
        }};
    }
    by_type!(dtype, integers, floats, {
        let (a, b) = (a[0] != 0, b[0] != 0);
        Some(vec![u8::from(match op {
            ReduceOp::Min | ReduceOp::BitAnd => a && b,
            ReduceOp::Max | ReduceOp::BitOr => a || b,
            _ => a != b,
        })])
    })
}

fn is_nan(dtype: DType, bytes: &[u8]) -> bool {
    match dtype {
        DType::F16 => f16::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        DType::Bf16 => bf16::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        DType::F32 => f32::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        DType::F64 => f64::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        _ => false,
    }
}

/// Aligned for every type.
struct Aligned(Vec<u64>, usize);
impl Aligned {
    fn of(bytes: &[u8]) -> Self {
        let mut words = vec![0; bytes.len().div_ceil(8)];
        bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..bytes.len()].copy_from_slice(bytes);
        Self(words, bytes.len())
    }

    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.0)[..self.1]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.0)[..self.1]
    }
}

fn defined() -> impl Iterator<Item = (DType, ReduceOp)> {
    DType::ALL.into_iter().flat_map(|dtype| {
        ReduceOp::ALL
            .into_iter()
            .filter(move |op| *op != ReduceOp::Adasum && op.allows(dtype))
            .map(move |op| (dtype, op))
    })
}

fn reduced<T: Element + bytemuck::Pod>(op: ReduceOp, a: &[T], b: &[T]) -> Vec<T> {
    let mut into = a.to_vec();
    combine(
        T::DTYPE,
        op,
        bytemuck::cast_slice_mut(&mut into),
        bytemuck::cast_slice(b),
    );
    into
}

fn check_equal(
    dtype: DType,
    given: &[u8],
    expected: impl Fn(usize) -> Option<Vec<u8>>,
    case: &str,
) {
    let size = dtype.size();
    for (index, given) in given.chunks_exact(size).enumerate() {
        match expected(index) {
            Some(expected) => assert_eq!(given, expected, "{case}, element {index}"),
            None => assert!(
                is_nan(dtype, given),
                "{case}, element {index}: {given:?} is no NaN"
            ),
        }
    }
}

#[test]
fn every_type_operator_length_and_level_is_as_the_plain_loop() {
    for (dtype, op) in defined() {
        let size = dtype.size();
        for length in LENGTHS {
            let left = Aligned::of(&mixed(dtype, length, 1));
            let right = Aligned::of(&mixed(dtype, length, 2));
            let one = |side: &Aligned, index: usize| {
                side.bytes()[index * size..(index + 1) * size].to_vec()
            };
            let expected: Vec<Option<Vec<u8>>> = (0..length)
                .map(|index| reference(dtype, op, &one(&left, index), &one(&right, index)))
                .collect();
            for level in Level::available() {
                let case = format!("{op} of {length} {dtype} by {level:?}");
                let mut into = Aligned::of(left.bytes());
                combine_at(level, dtype, op, into.bytes_mut(), right.bytes());
                check_equal(dtype, into.bytes(), |index| expected[index].clone(), &case);
                // Two ranks write over their own values, one over the left and one over the right ones: of two NaN the same comes out.
                let mut over_right = Aligned::of(right.bytes());
                combine_on_side(level, dtype, op, true, over_right.bytes_mut(), left.bytes());
                assert_eq!(into.bytes(), over_right.bytes(), "{case}");
            }
        }
    }
}

#[test]
fn the_neutral_element_changes_nothing() {
    for (dtype, op) in defined() {
        let values = Aligned::of(&mixed(dtype, 300, 3));
        let mut neutral = Aligned::of(&vec![1; values.bytes().len()]);
        fill_neutral(dtype, op, neutral.bytes_mut());
        for neutral_first in [false, true] {
            let (left, right) = if neutral_first {
                (&neutral, &values)
            } else {
                (&values, &neutral)
            };
            let mut into = Aligned::of(left.bytes());
            combine(dtype, op, into.bytes_mut(), right.bytes());
            let size = dtype.size();
            let same = |index: usize| {
                let one = &values.bytes()[index * size..(index + 1) * size];
                (!is_nan(dtype, one)).then(|| one.to_vec())
            };
            check_equal(dtype, into.bytes(), same, &format!("{op} of {dtype}"));
        }
    }
    // For Adasum too: nothing is added to a vector by one of length 0.
    for dtype in [DType::F16, DType::F32, DType::F64] {
        let mut ones = Aligned::of(&vec![0; 40 * dtype.size()]);
        fill_neutral(dtype, ReduceOp::Product, ones.bytes_mut());
        let before = ones.bytes().to_vec();
        let mut zeros = Aligned::of(&vec![1; 40 * dtype.size()]);
        fill_neutral(dtype, ReduceOp::Adasum, zeros.bytes_mut());
        combine(dtype, ReduceOp::Adasum, ones.bytes_mut(), zeros.bytes());
        assert_eq!(ones.bytes(), before);
        combine(dtype, ReduceOp::Adasum, zeros.bytes_mut(), ones.bytes());
        assert_eq!(zeros.bytes(), before);
    }
}

#[test]
#[should_panic(expected = "sum of bool is not defined")]
fn what_is_not_defined_panics() {
    combine(DType::Bool, ReduceOp::Sum, &mut [0], &[0]);
}

#[test]
#[should_panic(expected = "slices of one length")]
fn slices_of_different_length_panic() {
    combine(DType::U8, ReduceOp::Sum, &mut [0], &[0, 0]);
}

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

#[test]
fn levels_convert_alike() {
    for to in [DType::F16, DType::Bf16, DType::F32, DType::F64] {
        for from in [DType::F16, DType::Bf16, DType::F32, DType::F64] {
            for length in [0, 1, 15, 16, 17, 1024, 1025, 3000] {
                let source = Aligned::of(&mixed(from, length, 5));
                let mut plain = Aligned::of(&vec![0; length * to.size()]);
                convert_at(Level::Plain, to, plain.bytes_mut(), from, source.bytes());
                for level in Level::available() {
                    let mut into = Aligned::of(&vec![1; length * to.size()]);
                    convert_at(level, to, into.bytes_mut(), from, source.bytes());
                    let size = to.size();
                    let same = |index: usize| {
                        let one = &plain.bytes()[index * size..(index + 1) * size];
                        (!is_nan(to, one)).then(|| one.to_vec())
                    };
                    check_equal(
                        to,
                        into.bytes(),
                        same,
                        &format!("{from} to {to} by {level:?}"),
                    );
                }
                // What is widened comes back.
                if to.size() > from.size() {
                    let mut back = Aligned::of(&vec![1; source.bytes().len()]);
                    convert(from, back.bytes_mut(), to, plain.bytes());
                    let size = from.size();
                    let same = |index: usize| {
                        let one = &source.bytes()[index * size..(index + 1) * size];
                        (!is_nan(from, one)).then(|| one.to_vec())
                    };
                    check_equal(
                        from,
                        back.bytes(),
                        same,
                        &format!("{from} to {to} and back"),
                    );
                }
            }
        }
    }
}

#[test]
fn every_half_is_converted_alike_by_all_levels() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    for level in Level::available() {
        let mut wide = vec![0_f32; all.len()];
        let into = bytemuck::cast_slice_mut(&mut wide);
        convert_at(
            level,
            DType::F32,
            into,
            DType::F16,
            bytemuck::cast_slice(&all),
        );
        for (bits, wide) in all.iter().zip(&wide) {
            assert_eq!(
                wide.to_bits(),
                software::widen_f16(*bits).to_bits(),
                "{level:?} {bits:04x}"
            );
        }
        // Between halves, at the ties, and beyond the largest.
        let between: Vec<f32> = wide
            .iter()
            .flat_map(|value| {
                [0x0fff_u32, 0x1000, 0x1001].map(|low| f32::from_bits(value.to_bits() | low))
            })
            .collect();
        let mut short = vec![0_u16; between.len()];
        let into = bytemuck::cast_slice_mut(&mut short);
        convert_at(
            level,
            DType::F16,
            into,
            DType::F32,
            bytemuck::cast_slice(&between),
        );
        for (value, short) in between.iter().zip(&short) {
            assert_eq!(*short, software::narrow_f16(*value), "{level:?} {value:e}");
        }
    }
}

#[test]
fn adasum_averages_parallel_and_adds_orthogonal_vectors() {
    for length in [1, 7, 8, 9, 513, 5000] {
        let one: Vec<f32> = (0..length).map(|index| 1.0 + (index % 7) as f32).collect();
        assert_eq!(reduced(ReduceOp::Adasum, &one, &one), one);
        let (mut left, mut right) = (vec![0.0_f64; length + 1], vec![0.0; length + 1]);
        (left[0], right[length]) = (3.0, 4.0);
        let sum = reduced(ReduceOp::Adasum, &left, &right);
        assert_eq!((sum[0], sum[length]), (3.0, 4.0));
    }
    let dots = Dots {
        both: 2.0,
        left: 4.0,
        right: 1.0,
    };
    assert_eq!(dots.factors(), (0.75, 0.0));
    assert_eq!(dots.mirrored().factors(), (0.0, 0.75));
    assert_eq!(Dots::from_bytes(&dots.to_bytes()), dots);
    assert_eq!(dots.plus(dots).both, 4.0);
}

#[test]
fn scalar_products_have_the_same_bits_at_every_level() {
    for dtype in [DType::F16, DType::F32, DType::F64] {
        for length in [0, 1, 8, 511, 512, 513, 4099] {
            let number = |seed: u32| -> Vec<f64> {
                (0..length)
                    .map(|index: u32| {
                        f64::from((index * 7919 + seed).wrapping_mul(40_503) % 1013) / 77.0
                    })
                    .collect()
            };
            let as_type = |values: &[f64]| {
                let mut bytes = Aligned::of(&vec![0; values.len() * dtype.size()]);
                convert(
                    dtype,
                    bytes.bytes_mut(),
                    DType::F64,
                    bytemuck::cast_slice(values),
                );
                bytes
            };
            let (left, right) = (as_type(&number(1)), as_type(&number(2)));
            let plain = dots_at(Level::Plain, dtype, left.bytes(), right.bytes());
            for level in Level::available() {
                assert_eq!(dots_at(level, dtype, left.bytes(), right.bytes()), plain);
            }
            let expected: f64 = {
                let mut wide = vec![0_f64; length as usize];
                convert(
                    DType::F64,
                    bytemuck::cast_slice_mut(&mut wide),
                    dtype,
                    left.bytes(),
                );
                wide.iter().map(|value| value * value).sum()
            };
            assert!((plain.left - expected).abs() <= 1e-9 * expected.max(1.0));
        }
    }
}
