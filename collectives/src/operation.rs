//! What a rank asks for, in words and on the wire.

use std::fmt;

use crate::element::DType;

mod algorithm;
mod kind;
mod operator;
pub mod shape;

pub use algorithm::{Algorithm, UnknownAlgorithm};
pub use kind::OperationKind;
pub use operator::{Factor, ReduceOp, Unsupported};
use shape::Mark;

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
    /// Of a reduce-scatter the first dimension, which is split; it divides `count`. Of a send the rank that receives. Of an
    /// all-reduce of several buffers how many there are, or still are to come if each is combined by itself; of a
    /// named one of a shared buffer, and a named reduce-scatter of several buffers, `u64::MAX`. Of an all-gather of several buffers how many there are. 0 for all others.
    pub rows: u64,
    /// Whatever else must agree, as [`shape::of`] makes it of dimensions; 0 if there is nothing.
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

    /// The `rows` of a named all-reduce of a shared buffer, which is not to be fused with others.
    pub(crate) const OF_SHARED_BUFFER: u64 = u64::MAX;

    /// The `rows` of a named reduce-scatter of several buffers, which is not to be fused with others.
    pub(crate) const OF_SEVERAL: u64 = u64::MAX;

    /// Bytes of the buffer that is asked for: elements times their size.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let size = self.dtype.map_or(0, DType::size) as u64;
        self.count.saturating_mul(size)
    }

    /// Bytes of an element as it travels; a barrier has none to speak of.
    pub(crate) fn element_size(&self) -> usize {
        match self.kind {
            // The type is the caller's, so that a mismatch is seen here; the lengths themselves are `u64`.
            OperationKind::AllGatherCounts => size_of::<u64>(),
            _ => self.wire_type().map_or(1, DType::size),
        }
    }

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
        // What goes before the values of a send is only taken together with them.
        let is_head = self.kind == OperationKind::SendReceive && Mark::of(self.shape).is_some();
        self.kind.root().is_some() && !is_head
    }

    /// Whether it is a part of something that a rank without data can't take part in.
    pub(crate) fn wants_all(&self) -> bool {
        let makes_buffers = self.kind == OperationKind::Barrier && self.dtype.is_some();
        let is_part_of_more = matches!(Mark::of(self.shape), Some(Mark::Split | Mark::Trace));
        makes_buffers || is_part_of_more
    }

    /// Whether its elements travel as they are and have no shape.
    pub(crate) const fn is_plain(&self) -> bool {
        self.wire.is_none() && self.shape == 0
    }

    /// The same with elements that do.
    pub(crate) const fn as_plain(self) -> Self {
        Self {
            wire: None,
            shape: 0,
            ..self
        }
    }

    /// The type that its elements have on their way and in the working buffer.
    #[must_use]
    pub const fn wire_type(&self) -> Option<DType> {
        match self.wire {
            Some(wire) => Some(wire),
            None => self.dtype,
        }
    }

    /// Whether this is a part of an operation that has another one after it: lengths before values, one of several buffers.
    pub(crate) fn has_more(&self) -> bool {
        match Mark::of(self.shape) {
            Some(Mark::Lengths { .. }) => true,
            Some(Mark::Object) if self.kind == OperationKind::Broadcast => {
                self.dtype == Some(DType::U64)
            }
            _ => {
                let is_adasum = self.reduce == Some(ReduceOp::Adasum);
                self.kind == OperationKind::AllGatherCounts || is_adasum && self.rows > 1
            }
        }
    }

    /// Whether operator, scale factors, type and the type that travels go together in a world of this size, and so many
    /// elements are possible.
    ///
    /// # Errors
    ///
    /// [`Unsupported`], which says what is allowed.
    pub fn check(&self, world: u32) -> Result<(), Unsupported> {
        // All ranks' values, of up to 8 bytes, and sums of a few such lengths are numbers of bytes.
        let bytes = self.count.checked_mul(u64::from(world) << 6);
        if bytes.is_none_or(|bytes| bytes > isize::MAX as u64) {
            return Err(Unsupported::Size {
                count: self.count,
                size: self.dtype.map_or(1, DType::size),
            });
        }
        let (Some(dtype), Some(op)) = (self.dtype, self.reduce) else {
            return Ok(());
        };
        if dtype == DType::Bool && !(self.prescale.is_one() && self.postscale.is_one()) {
            return Err(Unsupported::Scale { dtype });
        }
        if op == ReduceOp::Adasum && self.kind != OperationKind::AllReduce {
            return Err(Unsupported::Kind {
                op,
                kind: self.kind,
            });
        }
        op.check(dtype, world)?;
        // Compressed values are combined as they travel.
        self.wire.map_or(Ok(()), |wire| op.check(wire, world))
    }

    /// Whether it is one that a rank may ask for: all that this rank knows of it came from a peer.
    pub(crate) fn is_sound(&self, world: u32) -> bool {
        use OperationKind as K;
        let has_root = self.kind.root().is_some();
        let lengths = matches!(Mark::of(self.shape), Some(Mark::Lengths { .. }));
        // Of a gather of lengths, the root of the operation that they are for.
        let root = match self.root {
            Some(root) => root < world && (has_root || lengths),
            None => !has_root,
        };
        let wire = match self.wire {
            None => true,
            Some(DType::F16 | DType::Bf16) => {
                matches!(self.dtype, Some(DType::F32 | DType::F64))
            }
            Some(_) => false,
        };
        let rows = self.kind != K::ReduceScatter
            || self.count.checked_rem(self.rows).unwrap_or(self.count) == 0;
        let one = match self.kind {
            // One of each buffer.
            K::AllGatherCounts => u16::try_from(self.count).is_ok(),
            K::Broadcast if lengths => self.count == u64::from(world),
            _ => !lengths || self.count == 1,
        };
        let numbers = !lengths || self.dtype == Some(DType::U64);
        root && wire
            && rows
            && one
            && numbers
            && self.reduce.is_some() == self.kind.reduces()
            && self.dtype.is_some() == (self.kind != K::Barrier)
            && self.check(world).is_ok()
    }
}

/// As a person would say it: `all_reduce(sum) of 10 f32`.
impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(mark) = Mark::of(self.shape) {
            return mark.write(self, f);
        }
        if let (OperationKind::Barrier, Some(dtype)) = (self.kind, self.dtype) {
            // What goes with it is that all have come.
            write!(f, "buffer of {dtype}")?;
            return shape::write(self.shape, f);
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
        if self.kind == OperationKind::AllGatherCounts && self.count != 1 {
            write!(f, " in {} buffers", self.count)?;
        }
        // Between which ranks the pair knows: `GroupCore::outward`.
        let is_pair = self.kind == OperationKind::SendReceive;
        match (self.kind, self.rows) {
            (OperationKind::SendReceive, _) | (_, 0) => {}
            (OperationKind::AllReduce, Self::OF_SHARED_BUFFER) => {
                f.write_str(" in a shared buffer")?;
            }
            (OperationKind::ReduceScatter, Self::OF_SEVERAL) => {
                f.write_str(" in several buffers")?;
            }
            (OperationKind::AllReduce, left) if self.reduce == Some(ReduceOp::Adasum) => {
                if left > 1 {
                    write!(f, " and more, {left} buffers")?;
                }
            }
            (OperationKind::AllReduce | OperationKind::AllGatherVarcount, 1) => {
                f.write_str(" in 1 buffer")?;
            }
            (OperationKind::AllReduce | OperationKind::AllGatherVarcount, buffers) => {
                write!(f, " in {buffers} buffers")?;
            }
            (_, rows) => write!(f, " in {rows} rows")?,
        }
        if let Some(root) = self.root.filter(|_| !is_pair) {
            let way = self.kind.root().unwrap_or("from");
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
    /// The number of the operation in the call, from 0. On a wire it has 48 bits.
    pub operation: u64,
    /// Its part, from 0: lengths come before values, say. Every operation has one number, whatever its parts are, so that ranks
    /// which did not agree on an operation are at the same one after it.
    pub part: u16,
}

impl Tag {
    /// The greatest number of an operation that a wire can carry.
    pub(crate) const MOST: u64 = (1 << 48) - 1;

    /// The first part of an operation.
    #[must_use]
    pub const fn new(call: u64, operation: u64) -> Self {
        Self {
            call,
            operation,
            part: 0,
        }
    }

    /// The tag of the next part of the operation.
    ///
    /// # Panics
    ///
    /// After 65,536 parts.
    #[must_use]
    pub fn next_part(self) -> Self {
        let part = self.part.checked_add(1);
        Self {
            part: part.expect("no operation has so many parts"),
            ..self
        }
    }

    /// Whether both are of one operation.
    pub(crate) fn is_part_of(self, other: Self) -> bool {
        (self.call, self.operation) == (other.call, other.operation)
    }

    /// Number and part, in one word.
    pub(crate) fn word(self) -> u64 {
        debug_assert!(self.operation <= Self::MOST);
        self.operation << 16 | u64::from(self.part)
    }

    /// What has this [word](Tag::word).
    pub(crate) fn of_word(call: u64, word: u64) -> Self {
        Self {
            call,
            operation: word >> 16,
            part: word as u16,
        }
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "operation {} of call {}", self.operation, self.call)?;
        if self.part > 0 {
            write!(f, ", part {}", self.part)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
