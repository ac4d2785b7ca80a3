//! What a rank asks for, in words and on the wire.

use std::fmt;

use crate::element::DType;
use crate::schedule::Algorithm;

/// How [`Communicator::all_reduce`](crate::Communicator::all_reduce) combines the ranks' values.
///
/// | | floats | integers |
/// |---|---|---|
/// | `Sum`, `Product` | IEEE 754, rounded to nearest after every step | wrap around on overflow |
/// | `Average` | the sum divided by the world size | the wrapped sum divided by the world size, truncated toward zero (as Horovod) |
/// | `Min`, `Max` | a NaN on any rank gives NaN | the usual order |
///
/// The order in which the ranks' values are combined depends on the algorithm, which depends on world
/// size and length alone. Every rank gets the same bits, and gets them again in the next run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum divided by the world size.
    Average,
    /// The sum.
    Sum,
    /// The least value. Of `-0.0` and `0.0` it is either, the same on every rank.
    Min,
    /// The greatest value. Of `-0.0` and `0.0` it is either, the same on every rank.
    Max,
    /// The product.
    Product,
}

impl ReduceOp {
    /// All operators.
    pub const ALL: [Self; 5] = [
        Self::Average,
        Self::Sum,
        Self::Min,
        Self::Max,
        Self::Product,
    ];

    pub(crate) fn code(self) -> u8 {
        // Codes 0, 1, 3, 4 and 5 are Horovod's; 2 is its Adasum.
        match self {
            Self::Average => 0,
            Self::Sum => 1,
            Self::Min => 3,
            Self::Max => 4,
            Self::Product => 5,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|op| op.code() == code)
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Average => "average",
            Self::Sum => "sum",
            Self::Min => "min",
            Self::Max => "max",
            Self::Product => "product",
        })
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
    /// The first half of a gather of different lengths: the lengths.
    AllGatherCounts,
    /// The second half: the values.
    AllGatherVarcount,
    /// Nobody leaves before all have come.
    Barrier,
}

impl OperationKind {
    const ALL: [Self; 6] = [
        Self::AllReduce,
        Self::Broadcast,
        Self::AllGather,
        Self::AllGatherCounts,
        Self::AllGatherVarcount,
        Self::Barrier,
    ];

    pub(crate) fn code(self) -> u8 {
        match self {
            Self::AllReduce => 1,
            Self::Broadcast => 2,
            Self::AllGather => 3,
            Self::AllGatherCounts => 4,
            Self::AllGatherVarcount => 5,
            Self::Barrier => 6,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.code() == code)
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
    /// The rank that has the data, for operations with a root.
    pub root: Option<u32>,
    /// Elements: of the buffer; for gathers of one rank's share, or of all shares if they differ.
    pub count: u64,
    /// How it is done.
    pub algorithm: Algorithm,
}

/// As a person would say it: `all_reduce(sum) of 10 f32`.
impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            OperationKind::AllReduce => "all_reduce",
            OperationKind::Broadcast => "broadcast",
            OperationKind::AllGather => "all_gather",
            OperationKind::AllGatherCounts | OperationKind::AllGatherVarcount => {
                "all_gather_varcount"
            }
            OperationKind::Barrier => return f.write_str("barrier"),
        })?;
        if let Some(reduce) = self.reduce {
            write!(f, "({reduce})")?;
        }
        // The counts of a varcount gather are its own affair: the caller sees the element type.
        if self.kind != OperationKind::AllGatherCounts {
            write!(f, " of {}", self.count)?;
        }
        if let Some(dtype) = self.dtype {
            write!(f, " {dtype}")?;
        }
        if let Some(root) = self.root {
            write!(f, " from root {root}")?;
        }
        Ok(())
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
