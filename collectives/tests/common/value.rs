//! Small numbers of every type, and what operators make of them.
#![allow(
    dead_code,
    unused_macros,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::unwrap_used
)]

use half::{bf16, f16};
use kolo_collectives::{Element, ReduceOp};

/// A small whole number, so that floats are exact and a product of eight fits all types.
pub(crate) fn number(rank: u32, index: usize) -> i64 {
    (i64::from(rank) * 31 + index as i64 * 7) % 11 - 5
}

/// An element with small numbers and a reference for all operators.
pub(crate) trait Value: Element {
    /// The value of a small number; other numbers for types that have no such.
    fn from_number(number: i64) -> Self;
    fn reference(op: ReduceOp, numbers: &[i64]) -> Self;
}

/// A function for each type as an array: first `bool`, then the types that are combined as numbers.
macro_rules! for_each_type {
    ($check:ident) => {
        [
            $check::<bool>,
            $check::<u8>,
            $check::<i8>,
            $check::<u16>,
            $check::<i16>,
            $check::<u32>,
            $check::<i32>,
            $check::<u64>,
            $check::<i64>,
            $check::<half::f16>,
            $check::<half::bf16>,
            $check::<f32>,
            $check::<f64>,
        ]
    };
}
#[allow(unused_imports)] // each test file uses its part
pub(crate) use for_each_type;

macro_rules! value {
    ($type:ty, $number:ident => $map:expr) => {
        impl Value for $type {
            fn from_number($number: i64) -> Self {
                $map as $type
            }

            fn reference(op: ReduceOp, numbers: &[i64]) -> Self {
                let values = || {
                    numbers.iter().map(|number| {
                        let $number = *number;
                        $map
                    })
                };
                let world = numbers.len();
                let bits =
                    |combine: fn(i64, i64) -> i64| values().reduce(combine).unwrap() as $type;
                match op {
                    ReduceOp::Average => values().sum::<i64>() as $type / world as $type,
                    ReduceOp::Sum => values().sum::<i64>() as $type,
                    ReduceOp::Min => values().min().unwrap() as $type,
                    ReduceOp::Max => values().max().unwrap() as $type,
                    ReduceOp::Product => values().fold(1, i64::wrapping_mul) as $type,
                    ReduceOp::BitAnd => bits(|a, b| a & b),
                    ReduceOp::BitOr => bits(|a, b| a | b),
                    ReduceOp::BitXor => bits(|a, b| a ^ b),
                    other => panic!("no reference for {other}"),
                }
            }
        }
    };
}

value!(i8, number => number);
value!(i16, number => number);
value!(i32, number => number);
value!(i64, number => number);
value!(u8, number => number + 5);
value!(u16, number => number + 5);
value!(u32, number => number + 5);
value!(u64, number => number + 5);
value!(f32, number => number);
value!(f64, number => number);

macro_rules! half {
    ($type:ty) => {
        impl Value for $type {
            // Powers of two, so that products are exact.
            fn from_number(number: i64) -> Self {
                Self::from_f32(2_f32.powi((number % 2) as i32))
            }

            fn reference(op: ReduceOp, numbers: &[i64]) -> Self {
                let values = || {
                    numbers
                        .iter()
                        .map(|number| Self::from_number(*number).to_f32())
                };
                Self::from_f32(match op {
                    ReduceOp::Average => values().sum::<f32>() / numbers.len() as f32,
                    ReduceOp::Sum => values().sum(),
                    ReduceOp::Min => values().fold(f32::INFINITY, f32::min),
                    ReduceOp::Max => values().fold(f32::NEG_INFINITY, f32::max),
                    ReduceOp::Product => values().product(),
                    other => panic!("no reference for {other}"),
                })
            }
        }
    };
}

half!(f16);
half!(bf16);

impl Value for bool {
    fn from_number(number: i64) -> Self {
        number > 1
    }

    fn reference(op: ReduceOp, numbers: &[i64]) -> Self {
        let mut values = numbers.iter().map(|number| Self::from_number(*number));
        match op {
            ReduceOp::Min | ReduceOp::BitAnd => values.all(|value| value),
            ReduceOp::Max | ReduceOp::BitOr => values.any(|value| value),
            ReduceOp::BitXor => values.filter(|value| *value).count() % 2 == 1,
            other => panic!("no reference for {other}"),
        }
    }
}

pub(crate) fn input<T: Value>(rank: u32, length: usize) -> Vec<T> {
    (0..length)
        .map(|index| T::from_number(number(rank, index)))
        .collect()
}

/// The combination of the values of these ranks, element by element.
pub(crate) fn combined<T: Value>(
    op: ReduceOp,
    ranks: impl IntoIterator<Item = u32> + Clone,
    length: usize,
) -> Vec<T> {
    (0..length)
        .map(|index| {
            let ranks = ranks.clone().into_iter();
            let numbers: Vec<i64> = ranks.map(|rank| number(rank, index)).collect();
            T::reference(op, &numbers)
        })
        .collect()
}
