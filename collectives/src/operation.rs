//! What a rank asks for, in words and on the wire.

use std::fmt;

use crate::element::DType;
use crate::schedule::Algorithm;
use crate::shape::{self, Mark};

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
/// ([`Operation::prescale`]).
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

/// The kinds of operations, as the header of a frame names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OperationKind {
    /// Every rank gets the combination of all ranks' values.
    AllReduce,
    /// Every rank gets the root's values.
    Broadcast,
    /// Every rank gets all ranks' values, of equal length.
    AllGather,
    /// The first half of an operation on different lengths: the lengths.
    AllGatherCounts,
    /// Every rank gets all ranks' values, of different lengths.
    AllGatherVarcount,
    /// Nobody leaves before all have come.
    Barrier,
    /// The root gets the combination of all ranks' values.
    Reduce,
    /// Every rank gets its part of the combination of all ranks' values.
    ReduceScatter,
    /// The root gets all ranks' values, of equal length.
    Gather,
    /// The root gets all ranks' values, of different lengths.
    GatherVarcount,
    /// Every rank gets its part, of equal length, of the root's values.
    Scatter,
    /// Every rank gets its part, of different length, of the root's values.
    ScatterVarcount,
    /// Every rank gets from each other one the part that is for it; parts have equal length.
    AllToAll,
    /// Every rank gets from each other one the part that is for it; parts have different lengths.
    AllToAllVarcount,
    /// One rank's values go to one other rank: from the root to the rank in [`Operation::rows`].
    SendReceive,
}

impl OperationKind {
    /// All kinds.
    pub const ALL: [Self; 15] = [
        Self::AllReduce,
        Self::Broadcast,
        Self::AllGather,
        Self::AllGatherCounts,
        Self::AllGatherVarcount,
        Self::Barrier,
        Self::Reduce,
        Self::ReduceScatter,
        Self::Gather,
        Self::GatherVarcount,
        Self::Scatter,
        Self::ScatterVarcount,
        Self::AllToAll,
        Self::AllToAllVarcount,
        Self::SendReceive,
    ];

    pub(crate) const fn code(self) -> u8 {
        match self {
            Self::AllReduce => 1,
            Self::Broadcast => 2,
            Self::AllGather => 3,
            Self::AllGatherCounts => 4,
            Self::AllGatherVarcount => 5,
            Self::Barrier => 6,
            Self::Reduce => 7,
            Self::ReduceScatter => 8,
            Self::Gather => 9,
            Self::GatherVarcount => 10,
            Self::Scatter => 11,
            Self::ScatterVarcount => 12,
            Self::AllToAll => 13,
            Self::AllToAllVarcount => 14,
            Self::SendReceive => 15,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.code() == code)
    }

    /// Its name in the API.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::Broadcast => "broadcast",
            Self::AllGather => "all_gather",
            Self::AllGatherCounts | Self::AllGatherVarcount => "all_gather_varcount",
            Self::Barrier => "barrier",
            Self::Reduce => "reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::Gather => "gather",
            Self::GatherVarcount => "gather_varcount",
            Self::Scatter => "scatter",
            Self::ScatterVarcount => "scatter_varcount",
            Self::AllToAll => "all_to_all",
            Self::AllToAllVarcount => "all_to_all_varcount",
            Self::SendReceive => "send",
        }
    }
}

impl fmt::Display for OperationKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What one rank asks of all: the same on every rank, or the operation is a mismatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Operation {
    /// Which operation.
    pub kind: OperationKind,
    /// The type of its elements; `None` for a barrier.
    pub dtype: Option<DType>,
    /// The operator of a reduction.
    pub reduce: Option<ReduceOp>,
    /// The rank that has the data or gets it, for operations with a root.
    pub root: Option<u32>,
    /// Elements: of the buffer; for gathers and scatters of one rank's share, or of all shares if they differ; for an
    /// all-to-all of equal parts of one part. 0 for an all-to-all of different parts: no two ranks have the same sum.
    pub count: u64,
    /// Of a reduce-scatter the first dimension, which is split; it divides `count`. Of a send the rank that receives.
    /// 0 for all others.
    pub rows: u64,
    /// Whatever else must agree, as [`shape::of`](crate::shape::of) makes it of dimensions; 0 if there is nothing.
    pub shape: u64,
    /// Inputs of a reduction are multiplied with it before they are combined.
    pub prescale: Factor,
    /// The result of a reduction is multiplied with it.
    pub postscale: Factor,
    /// The type that travels, if it is not `dtype`: compression. The whole operation runs in it.
    pub wire: Option<DType>,
    /// How it is done.
    pub algorithm: Algorithm,
    /// Pieces of pipelined algorithms have two to this power bytes; 0 for the others.
    pub segment: u8,
}

impl Operation {
    pub(crate) const BARRIER: Self = Self::new(OperationKind::Barrier, None, 0);

    /// An operation of `count` elements without operator, root, scale and compression.
    #[must_use]
    pub const fn new(kind: OperationKind, dtype: Option<DType>, count: u64) -> Self {
        Self {
            kind,
            dtype,
            reduce: None,
            root: None,
            count,
            rows: 0,
            shape: 0,
            prescale: Factor::ONE,
            postscale: Factor::ONE,
            wire: None,
            algorithm: Algorithm::Local,
            segment: 0,
        }
    }

    /// The first half of an operation on different lengths: what carries the lengths themselves, as `u64`. It is told
    /// apart from others by the operation and the type that it is for.
    pub(crate) const fn lengths(
        carrier: OperationKind,
        of: OperationKind,
        dtype: DType,
        count: u64,
    ) -> Self {
        Self {
            shape: Mark::Lengths { of, dtype }.encode(),
            ..Self::new(carrier, Some(DType::U64), count)
        }
    }

    /// What a rank does that has no more data: it waits for the others to say what they do, or that they have none.
    pub(crate) const JOIN: Self = Self {
        shape: Mark::Join.encode(),
        ..Self::new(OperationKind::AllGather, Some(DType::U64), 1)
    };

    pub(crate) fn is_join(&self) -> bool {
        self.shape == Self::JOIN.shape
    }

    /// Whether a rank could be done before all others have begun: then it waits for their word that they ask for the
    /// same.
    pub(crate) fn wants_consent(&self) -> bool {
        matches!(
            self.kind,
            OperationKind::Broadcast
                | OperationKind::Reduce
                | OperationKind::Gather
                | OperationKind::GatherVarcount
                | OperationKind::Scatter
                | OperationKind::ScatterVarcount
        )
    }

    /// The type that its elements have on their way and in the working buffer.
    #[must_use]
    pub const fn wire_type(&self) -> Option<DType> {
        match self.wire {
            Some(wire) => Some(wire),
            None => self.dtype,
        }
    }

    /// Whether operator, scale factors and type go together in a world of this size.
    ///
    /// # Errors
    ///
    /// [`Unsupported`], which says what is allowed.
    pub fn check(&self, world: u32) -> Result<(), Unsupported> {
        let (Some(dtype), Some(op)) = (self.dtype, self.reduce) else {
            return Ok(());
        };
        if dtype == DType::Bool && !(self.prescale.is_one() && self.postscale.is_one()) {
            return Err(Unsupported::Scale { dtype });
        }
        if op == ReduceOp::Adasum && self.kind != OperationKind::AllReduce {
            return Err(Unsupported::Kind { op, kind: self.kind });
        }
        op.check(dtype, world)
    }
}

/// As a person would say it: `all_reduce(sum) of 10 f32`.
impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(mark) = Mark::of(self.shape) {
            return mark.write(self, f);
        }
        f.write_str(self.kind.name())?;
        if self.kind == OperationKind::Barrier {
            return Ok(());
        }
        if let Some(reduce) = self.reduce {
            write!(f, "({reduce})")?;
        }
        // The counts of a varcount gather are its own affair: the caller sees the element type.
        if !matches!(
            self.kind,
            OperationKind::AllGatherCounts | OperationKind::AllToAllVarcount
        ) {
            write!(f, " of {}", self.count)?;
        }
        if let Some(dtype) = self.dtype {
            write!(f, " {dtype}")?;
        }
        if let (OperationKind::SendReceive, Some(from)) = (self.kind, self.root) {
            return write!(f, " from rank {from} to rank {}", self.rows);
        }
        if self.rows > 0 {
            write!(f, " in {} rows", self.rows)?;
        }
        if let Some(root) = self.root {
            let way = match self.kind {
                OperationKind::Reduce | OperationKind::Gather | OperationKind::GatherVarcount => {
                    "to"
                }
                _ => "from",
            };
            write!(f, " {way} root {root}")?;
        }
        if !self.prescale.is_one() {
            write!(f, ", prescale {}", self.prescale)?;
        }
        if !self.postscale.is_one() {
            write!(f, ", postscale {}", self.postscale)?;
        }
        if let Some(wire) = self.wire {
            write!(f, ", sent as {wire}")?;
        }
        shape::write(self.shape, f)
    }
}

/// Which operation of which call: what orders everything on a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Tag {
    /// The user's call.
    pub call: u64,
    /// The number of the operation in the call, from 0.
    pub operation: u64,
}

impl Tag {
    /// The tag of the next operation in the call.
    #[must_use]
    pub fn after(self) -> Self {
        Self {
            operation: self.operation + 1,
            ..self
        }
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "operation {} of call {}", self.operation, self.call)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_type_allows_which_operator() {
        use DType as D;
        use ReduceOp as R;
        let allowed = |op: R| -> Vec<D> {
            D::ALL
                .into_iter()
                .filter(|dtype| op.check(*dtype, 4).is_ok())
                .collect()
        };
        let integers = [D::U8, D::I8, D::U16, D::I16, D::I32, D::I64, D::U32, D::U64];
        let floats = [D::F16, D::F32, D::F64, D::Bf16];
        for dtype in D::ALL {
            assert_eq!(dtype.is_integer(), integers.contains(&dtype));
            assert_eq!(dtype.is_float(), floats.contains(&dtype));
        }
        for op in [R::Sum, R::Average, R::Product] {
            assert_eq!(allowed(op).len(), 12, "{op}");
            assert!(!op.allows(D::Bool));
        }
        for op in [R::Min, R::Max] {
            assert_eq!(allowed(op), D::ALL);
        }
        for op in [R::BitAnd, R::BitOr, R::BitXor] {
            assert!(allowed(op).iter().all(|dtype| !dtype.is_float()));
            assert_eq!(allowed(op).len(), 9, "{op}");
        }
        assert_eq!(allowed(R::Adasum), [D::F16, D::F32, D::F64]);
    }

    #[test]
    fn what_is_refused_says_what_is_allowed() {
        let refused = |op: ReduceOp, dtype, world| op.check(dtype, world).unwrap_err().to_string();
        assert_eq!(
            refused(ReduceOp::Sum, DType::Bool, 2),
            "sum of bool is not defined; bool allows min, max, bit_and, bit_or, bit_xor"
        );
        assert_eq!(
            refused(ReduceOp::BitXor, DType::Bf16, 2),
            "bit_xor of bf16 is not defined; bf16 allows average, sum, min, max, product"
        );
        assert_eq!(
            refused(ReduceOp::Adasum, DType::F32, 6),
            "adasum in a world of 6: it needs a power of two of ranks (such as 8); sum and average take any number"
        );
        assert!(ReduceOp::Adasum.check(DType::F32, 1).is_ok());
        let scaled = Operation {
            reduce: Some(ReduceOp::Max),
            postscale: Factor::new(2.0),
            ..Operation::new(OperationKind::AllReduce, Some(DType::Bool), 3)
        };
        assert_eq!(
            scaled.check(2).unwrap_err().to_string(),
            "a scale factor for bool: only numbers can be scaled; leave it at 1"
        );
    }

    #[test]
    fn an_operation_reads_like_a_call() {
        let mut operation = Operation {
            reduce: Some(ReduceOp::Sum),
            ..Operation::new(OperationKind::AllReduce, Some(DType::F32), 10)
        };
        assert_eq!(operation.to_string(), "all_reduce(sum) of 10 f32");
        operation.prescale = Factor::new(0.5);
        operation.wire = Some(DType::F16);
        assert_eq!(
            operation.to_string(),
            "all_reduce(sum) of 10 f32, prescale 0.5, sent as f16"
        );
        let operation = Operation {
            reduce: Some(ReduceOp::Max),
            root: Some(3),
            ..Operation::new(OperationKind::Reduce, Some(DType::I8), 2)
        };
        assert_eq!(operation.to_string(), "reduce(max) of 2 i8 to root 3");
        let barrier = Operation::new(OperationKind::Barrier, None, 0);
        assert_eq!(barrier.to_string(), "barrier");
    }
}
