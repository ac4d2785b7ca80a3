//! The types that collectives carry.

use std::fmt;

use crate::operation::ReduceOp;
use crate::reduce;

/// A type of elements, as the header of a frame names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// `i32`.
    I32,
    /// `i64`.
    I64,
    /// `f32`.
    F32,
    /// `f64`.
    F64,
}

impl DType {
    /// All types.
    pub const ALL: [Self; 4] = [Self::I32, Self::I64, Self::F32, Self::F64];

    /// Bytes of one element.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::I32 | Self::F32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }

    pub(crate) fn code(self) -> u8 {
        // Horovod's numbers, with room for its other types.
        match self {
            Self::I32 => 4,
            Self::I64 => 5,
            Self::F32 => 7,
            Self::F64 => 8,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.code() == code)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::F32 => "f32",
            Self::F64 => "f64",
        })
    }
}

mod sealed {
    use super::ReduceOp;

    /// What the engine needs of a type. Plain old data: any bits are a value.
    pub trait Sealed: bytemuck::Pod {
        fn reduce(op: ReduceOp, into: &mut [Self], from: &[Self]);
        fn divide(values: &mut [Self], by: u32);
    }
}

pub(crate) use sealed::Sealed;

/// A type that collectives can carry: `i32`, `i64`, `f32` or `f64`. It can't be implemented elsewhere.
pub trait Element:
    Sealed + Copy + PartialEq + fmt::Debug + Default + Send + Sync + 'static
{
    /// Its name on the wire.
    const DTYPE: DType;
}

macro_rules! element {
    ($type:ty, $dtype:ident, $kernels:ident) => {
        impl Sealed for $type {
            fn reduce(op: ReduceOp, into: &mut [Self], from: &[Self]) {
                reduce::$kernels::apply(op, into, from);
            }

            fn divide(values: &mut [Self], by: u32) {
                reduce::$kernels::divide(values, by);
            }
        }

        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
    };
}

element!(i32, I32, for_i32);
element!(i64, I64, for_i64);
element!(f32, F32, for_f32);
element!(f64, F64, for_f64);
