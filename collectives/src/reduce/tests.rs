#![allow(clippy::cast_possible_wrap, clippy::float_cmp)]

mod levels;
mod values;

use half::{bf16, f16};
use proptest::prelude::*;

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
    macro_rules! integer {
        ($type:ty) => {{
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
    macro_rules! float {
        ($type:ty, $wide:ty, $to:expr, $from:expr) => {{
            let one =
                |bytes: &[u8]| -> $wide { $to(<$type>::from_le_bytes(bytes.try_into().unwrap())) };
            let (a, b) = (one(a), one(b));
            let result = match op {
                ReduceOp::Sum | ReduceOp::Average => a + b,
                ReduceOp::Product => a * b,
                _ if a.is_nan() || b.is_nan() => <$wide>::NAN,
                ReduceOp::Min => {
                    if b < a {
                        b
                    } else {
                        a
                    }
                }
                _ => {
                    if b > a {
                        b
                    } else {
                        a
                    }
                }
            };
            let result: $type = $from(result);
            (!result.is_nan()).then(|| result.to_le_bytes().to_vec())
        }};
    }
    match dtype {
        DType::Bool => {
            let (a, b) = (a[0] != 0, b[0] != 0);
            Some(vec![u8::from(match op {
                ReduceOp::Min | ReduceOp::BitAnd => a && b,
                ReduceOp::Max | ReduceOp::BitOr => a || b,
                _ => a != b,
            })])
        }
        DType::U8 => integer!(u8),
        DType::I8 => integer!(i8),
        DType::U16 => integer!(u16),
        DType::I16 => integer!(i16),
        DType::U32 => integer!(u32),
        DType::I32 => integer!(i32),
        DType::U64 => integer!(u64),
        DType::I64 => integer!(i64),
        DType::F16 => float!(f16, f32, f16::to_f32, f16::from_f32),
        DType::Bf16 => float!(bf16, f32, bf16::to_f32, bf16::from_f32),
        DType::F32 => float!(f32, f32, |v| v, |v| v),
        DType::F64 => float!(f64, f64, |v| v, |v| v),
    }
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
                let mut into = Aligned::of(&vec![0xa5; length * size]);
                combine_into_at(
                    level,
                    dtype,
                    op,
                    into.bytes_mut(),
                    left.bytes(),
                    right.bytes(),
                );
                check_equal(dtype, into.bytes(), |index| expected[index].clone(), &case);
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

proptest! {
    #[test]
    fn any_bytes_are_combined_alike_by_all_levels(
        case in prop::sample::select(defined().collect::<Vec<_>>()),
        length in 0_usize..300,
        seeds in any::<(u64, u64)>(),
    ) {
        let (dtype, op) = case;
        let left = Aligned::of(&mixed(dtype, length, seeds.0));
        let right = Aligned::of(&mixed(dtype, length, seeds.1));
        let mut plain = Aligned::of(left.bytes());
        combine_at(Level::Plain, dtype, op, plain.bytes_mut(), right.bytes());
        for level in Level::available() {
            let mut into = Aligned::of(left.bytes());
            combine_at(level, dtype, op, into.bytes_mut(), right.bytes());
            let size = dtype.size();
            let same = |index: usize| {
                let one = &plain.bytes()[index * size..(index + 1) * size];
                (!is_nan(dtype, one)).then(|| one.to_vec())
            };
            check_equal(dtype, into.bytes(), same, &format!("{op} of {dtype}"));
        }
    }
}
