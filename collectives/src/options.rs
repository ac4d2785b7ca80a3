//! How an operation is done, beside what it does.

use std::time::Instant;

use crate::element::DType;
use crate::operation::{Factor, Operation};
use crate::record::ShortName;
use crate::shape::{self, Mark};

/// The type in which floats travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Compression {
    /// As they are.
    #[default]
    None,
    /// As `f16`: 11 bits of precision, up to 65504.
    F16,
    /// As `bf16`: 8 bits of precision, the range of `f32`.
    Bf16,
}

/// How operations are done, beside what they do: see [`Communicator::with`](crate::Communicator::with). Part of what the
/// ranks must agree on.
///
/// ```
/// use kolo_collectives::{Compression, Options, ReduceOp, local_group};
///
/// let group = local_group(2)?;
/// let handles: Vec<_> = group
///     .iter()
///     .map(|comm| {
///         let half = comm.with(Options::new().prescale(0.5).compression(Compression::Bf16));
///         half.start().all_reduce(vec![3.0_f32, 1.0], ReduceOp::Sum)
///     })
///     .collect();
/// for handle in handles {
///     assert_eq!(handle.wait()?, [3.0, 1.0]);
/// }
/// # Ok::<(), kolo_collectives::CollectiveError>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    prescale: Factor,
    postscale: Factor,
    compression: Compression,
    shape: u64,
    pub(crate) name: ShortName,
    /// When it was asked for, if that was before its turn could come.
    pub(crate) asked: Option<Instant>,
}

impl Options {
    /// Nothing special.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Inputs of reductions are multiplied with this factor before they are combined. Integers are truncated toward zero
    /// ([`reduce::scale`](crate::reduce::scale)). Operations without an operator take no notice.
    #[must_use]
    pub fn prescale(self, factor: f64) -> Self {
        Self {
            prescale: Factor::new(factor),
            ..self
        }
    }

    /// Results of reductions are multiplied with this factor, after the division of an average.
    #[must_use]
    pub fn postscale(self, factor: f64) -> Self {
        Self {
            postscale: Factor::new(factor),
            ..self
        }
    }

    /// `f32` and `f64` travel, and are combined, in a shorter type. All ranks get the same bits, the root of a broadcast
    /// and a rank's own share of a gather included. Other types travel as they are.
    #[must_use]
    pub fn compression(self, compression: Compression) -> Self {
        Self {
            compression,
            ..self
        }
    }

    /// The dimensions of the buffer, which must be the same on all ranks: for operations on buffers of one length, such
    /// as all-reduce. (Their product need not be the length; of a gather, give the dimensions that must agree.)
    #[must_use]
    pub fn shape(self, dimensions: &[usize]) -> Self {
        Self {
            shape: shape::of(dimensions),
            ..self
        }
    }

    /// The same with a name, and when it was asked for.
    pub(crate) fn called(self, name: ShortName, asked: Option<Instant>) -> Self {
        Self {
            name,
            asked,
            ..self
        }
    }

    /// For operations that are a part of another one.
    pub(crate) fn marked(self, mark: Mark) -> Self {
        Self {
            shape: mark.encode(),
            ..self
        }
    }

    /// The mark, or 0.
    pub(crate) fn mark(&self) -> u64 {
        Mark::of(self.shape).map_or(0, Mark::encode)
    }

    /// Puts them in an operation.
    pub(crate) fn apply(&self, operation: &mut Operation) {
        if operation.reduce.is_some() {
            operation.prescale = self.prescale;
            operation.postscale = self.postscale;
        }
        let wire = match self.compression {
            Compression::None => None,
            Compression::F16 => Some(DType::F16),
            Compression::Bf16 => Some(DType::Bf16),
        };
        if matches!(operation.dtype, Some(DType::F32 | DType::F64)) {
            operation.wire = wire;
        }
        if operation.shape == 0 {
            operation.shape = self.shape;
        }
    }
}
