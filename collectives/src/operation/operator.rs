//! How reductions combine values.

use std::fmt;

use super::OperationKind;
use crate::element::DType;

/// How a reduction combines the ranks' values.
///
/// | | `bool` | integers | `f32`, `f64` | `f16` | `bf16` |
/// |---|---|---|---|---|---|
/// | `Sum`, `Average`, `Product` | no | yes | yes | yes | yes |
/// | `Min`, `Max` | yes | yes | yes | yes | yes |
/// | `BitAnd`, `BitOr`, `BitXor` | yes | yes | no | no | no |
/// | `Adasum` | no | no | yes | yes | no |
///
/// What they do:
///
/// | | floats | integers and `bool` |
/// |---|---|---|
/// | `Sum`, `Product` | IEEE 754, rounded to nearest after every step | wrap around on overflow |
/// | `Average` | the sum divided by the world size | the wrapped sum divided by the world size, truncated toward zero (as Horovod) |
/// | `Min`, `Max` | a NaN on any rank gives NaN | the usual order, `false` before `true` |
/// | `BitAnd`, `BitOr`, `BitXor` | | bit by bit |
/// | `Adasum` | see [`ReduceOp::Adasum`] | |
///
/// `f16` and `bf16` are widened to `f32`, combined there and rounded to nearest, ties to even, for every combination of
/// two ranks' values. What is too large for them becomes infinite: an average of large values wants a prescale factor
/// ([`Operation::prescale`](super::Operation::prescale)).
///
/// The order in which the ranks' values are combined depends on the algorithm, which depends on world
/// layout and length alone. Every rank gets the same bits, and gets them again in the next run. Of a NaN only that it is
/// one is promised if the hosts have different processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum divided by the world size.
    Average,
    /// The sum.
    Sum,
    /// Adaptive summation of gradients (Maleki et al. 2021): values of two ranks that point the same way are averaged,
    /// orthogonal ones added, and all between:
    /// `(1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b`, pair by pair along a binary tree.
    ///
    /// It looks at all elements of a buffer together; a world size that is no power of two is refused. Factors are
    /// computed in `f64`.
    Adasum,
    /// The least value. Of `-0.0` and `0.0` it is either, the same on every rank.
    Min,
    /// The greatest value. Of `-0.0` and `0.0` it is either, the same on every rank.
    Max,
    /// The product.
    Product,
    /// The bits that are set on every rank.
    BitAnd,
    /// The bits that are set on any rank.
    BitOr,
    /// The bits that are set on an odd number of ranks.
    BitXor,
}

/// An operator does not go with a type or a world size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unsupported {
    /// The operator is not defined for the type. Take one of those that are named, or convert the values.
    #[error("{op} of {dtype} is not defined; {dtype} allows {}", names(*dtype))]
    Type {
        /// The operator.
        op: ReduceOp,
        /// The type.
        dtype: DType,
    },
    /// Adasum combines ranks in pairs. Use a power of two of ranks, or `sum` or `average`.
    #[error(
        "adasum in a world of {world}: it needs a power of two of ranks (such as {}); sum and average take any number",
        world.checked_next_power_of_two().unwrap_or(1 << 31)
    )]
    World {
        /// The number of ranks.
        world: u32,
    },
    /// Adasum is defined for all-reduce alone. Use that, or another operator.
    #[error("{kind} with {op}: it is defined for all_reduce only")]
    Kind {
        /// The operator.
        op: ReduceOp,
        /// The operation.
        kind: OperationKind,
    },
    /// There are more elements than any memory holds. A peer that says so has gone wrong.
    #[error("{count} elements of {size} bytes are more than any memory holds")]
    Size {
        /// The number of elements.
        count: u64,
        /// Bytes of one.
        size: usize,
    },
    /// A prescale or postscale factor is given for a `bool`, which has no numbers to scale. Leave it at 1.
    #[error("a scale factor for {dtype}: only numbers can be scaled; leave it at 1")]
    Scale {
        /// The type.
        dtype: DType,
    },
}

fn names(dtype: DType) -> String {
    let allowed: Vec<&str> = ReduceOp::ALL
        .into_iter()
        .filter(|op| op.allows(dtype))
        .map(ReduceOp::name)
        .collect();
    allowed.join(", ")
}

impl ReduceOp {
    /// All operators.
    pub const ALL: [Self; 9] = [
        Self::Average,
        Self::Sum,
        Self::Adasum,
        Self::Min,
        Self::Max,
        Self::Product,
        Self::BitAnd,
        Self::BitOr,
        Self::BitXor,
    ];

    /// Whether it is defined for a type. The table is at [`ReduceOp`].
    #[must_use]
    pub const fn allows(self, dtype: DType) -> bool {
        match self {
            Self::Average | Self::Sum | Self::Product => !matches!(dtype, DType::Bool),
            Self::Min | Self::Max => true,
            Self::BitAnd | Self::BitOr | Self::BitXor => !dtype.is_float(),
            Self::Adasum => matches!(dtype, DType::F16 | DType::F32 | DType::F64),
        }
    }

    /// Whether it can be used with this type in a world of this size.
    ///
    /// # Errors
    ///
    /// [`Unsupported`], which says what is allowed.
    pub fn check(self, dtype: DType, world: u32) -> Result<(), Unsupported> {
        if !self.allows(dtype) {
            return Err(Unsupported::Type { op: self, dtype });
        }
        if self == Self::Adasum && !world.is_power_of_two() {
            return Err(Unsupported::World { world });
        }
        Ok(())
    }

    pub(crate) const fn code(self) -> u8 {
        // Codes 0 to 5 are Horovod's.
        match self {
            Self::Average => 0,
            Self::Sum => 1,
            Self::Adasum => 2,
            Self::Min => 3,
            Self::Max => 4,
            Self::Product => 5,
            Self::BitAnd => 6,
            Self::BitOr => 7,
            Self::BitXor => 8,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|op| op.code() == code)
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Average => "average",
            Self::Sum => "sum",
            Self::Adasum => "adasum",
            Self::Min => "min",
            Self::Max => "max",
            Self::Product => "product",
            Self::BitAnd => "bit_and",
            Self::BitOr => "bit_or",
            Self::BitXor => "bit_xor",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A factor that values are multiplied with, compared bit by bit.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Factor(u64);

impl Factor {
    /// The factor that changes nothing.
    pub const ONE: Self = Self(1_f64.to_bits());

    /// This factor. Values are multiplied as [`reduce::scale`](crate::reduce::scale) says.
    #[must_use]
    pub const fn new(factor: f64) -> Self {
        Self(factor.to_bits())
    }

    /// Its value.
    #[must_use]
    pub const fn get(self) -> f64 {
        f64::from_bits(self.0)
    }

    /// Whether there is nothing to multiply.
    #[must_use]
    pub fn is_one(self) -> bool {
        self == Self::ONE
    }

    pub(crate) const fn to_bits(self) -> u64 {
        self.0
    }

    pub(crate) const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }
}

impl Default for Factor {
    fn default() -> Self {
        Self::ONE
    }
}

impl From<f64> for Factor {
    fn from(factor: f64) -> Self {
        Self::new(factor)
    }
}

impl fmt::Debug for Factor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.get(), f)
    }
}

impl fmt::Display for Factor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.get(), f)
    }
}
