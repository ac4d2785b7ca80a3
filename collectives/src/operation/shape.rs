//! What else must agree about an operation, in one number: dimensions, or what it is a part of. No I/O.

use std::fmt;

use super::{Operation, OperationKind};
use crate::element::DType;

/// Bits below the tag.
const BITS: u32 = 61;
/// Dimensions that don't fit: a digest of them.
const DIGEST: u64 = 6 << BITS;
/// Not dimensions: a [`Mark`].
const MARK: u64 = 7 << BITS;
/// Most dimensions that are kept as they are.
const MOST: usize = 5;

/// Dimensions as one number, for [`Operation::shape`]: up to five dimensions that are not too large as they are (so that
/// a mismatch can be told in words), others as a digest. No dimensions are 0.
///
/// ```
/// use kolo_collectives::shape;
///
/// assert_ne!(shape::of(&[2, 3]), shape::of(&[3, 2]));
/// assert_eq!(shape::of(&[]), 0);
/// ```
#[must_use]
pub fn of(dimensions: &[usize]) -> u64 {
    of_each(dimensions.iter().copied())
}

/// As [`of`].
pub(crate) fn of_each(dimensions: impl Iterator<Item = usize> + Clone) -> u64 {
    let count = dimensions.clone().count();
    if count == 0 {
        return 0;
    }
    if count <= MOST {
        let bits = BITS / count as u32;
        let mut packed = 0;
        let fits = dimensions.clone().all(|dimension| {
            packed = (packed << bits) | dimension as u64;
            (dimension as u64) < 1 << bits
        });
        if fits {
            return (count as u64) << BITS | packed;
        }
    }
    // FNV-1a: not against those who want to collide, who could as well lie.
    let digest = dimensions
        .flat_map(|dimension| (dimension as u64).to_le_bytes())
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
    DIGEST | (digest & (u64::MAX >> 3))
}

/// As a person would say it.
pub(crate) fn write(shape: u64, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let count = (shape >> BITS) as u32;
    match count {
        0 => Ok(()),
        1..=5 => {
            let bits = BITS / count;
            let dimensions: Vec<u64> = (0..count)
                .rev()
                .map(|index| (shape >> (bits * index)) & ((1 << bits) - 1))
                .collect();
            write!(f, ", shape {dimensions:?}")
        }
        _ => write!(f, ", shape with digest {:012x}", shape & 0xffff_ffff_ffff),
    }
}

/// What an operation is a part of, if it is not one that a caller asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mark {
    /// The lengths for an operation on elements of this type.
    Lengths { of: OperationKind, dtype: DType },
    /// A serialised value.
    Object,
    /// No more data.
    Join,
    /// Groups are made.
    Split,
    /// Clocks are compared.
    Trace,
}

impl Mark {
    pub(crate) const fn encode(self) -> u64 {
        match self {
            Self::Lengths { of, dtype } => {
                MARK | 1 << 16 | (of.code() as u64) << 8 | dtype.code() as u64
            }
            Self::Object => MARK | 2 << 16,
            Self::Join => MARK | 3 << 16,
            Self::Split => MARK | 4 << 16,
            Self::Trace => MARK | 5 << 16,
        }
    }

    pub(crate) fn of(shape: u64) -> Option<Self> {
        if shape >> BITS != MARK >> BITS {
            return None;
        }
        match (shape >> 16) & 0xff {
            1 => Some(Self::Lengths {
                of: OperationKind::from_code((shape >> 8) as u8)?,
                dtype: DType::from_code(shape as u8)?,
            }),
            2 => Some(Self::Object),
            3 => Some(Self::Join),
            4 => Some(Self::Split),
            5 => Some(Self::Trace),
            _ => None,
        }
    }

    pub(crate) fn write(self, operation: &Operation, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Join => return f.write_str("join"),
            Self::Split => return f.write_str("split"),
            Self::Trace => return f.write_str("trace"),
            Self::Object => {
                let name = match operation.kind {
                    OperationKind::Broadcast => "broadcast_object",
                    _ => "all_gather_object",
                };
                f.write_str(name)?;
            }
            Self::Lengths { of, dtype } => write!(f, "{of} {dtype}")?,
        }
        match (self, operation.kind, operation.root) {
            (_, OperationKind::SendReceive, _) => Ok(()),
            (
                Self::Lengths {
                    of: OperationKind::GatherVarcount,
                    ..
                },
                _,
                Some(root),
            ) => write!(f, " to root {root}"),
            (_, _, Some(root)) => write!(f, " from root {root}"),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(shape: u64) -> String {
        struct Shown(u64);
        impl fmt::Display for Shown {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write(self.0, f)
            }
        }
        Shown(shape).to_string()
    }

    #[test]
    fn dimensions_can_be_read_back() {
        for dimensions in [&[7][..], &[0], &[2, 3], &[1, 2, 3, 4, 5], &[1 << 29, 0]] {
            assert_eq!(text(of(dimensions)), format!(", shape {dimensions:?}"));
        }
        assert_eq!(text(0), "");
    }

    #[test]
    fn what_does_not_fit_becomes_a_digest_that_differs() {
        let many = [1, 2, 3, 4, 5, 6];
        let other = [1, 2, 3, 4, 6, 5];
        assert_ne!(of(&many), of(&other));
        assert_ne!(of(&[1 << 40, 2]), of(&[2, 1 << 40]));
        assert!(text(of(&many)).starts_with(", shape with digest "));
        assert_eq!(Mark::of(of(&many)), None);
    }

    #[test]
    fn marks_survive_and_read_well() {
        for mark in [
            Mark::Object,
            Mark::Join,
            Mark::Split,
            Mark::Trace,
            Mark::Lengths {
                of: OperationKind::ScatterVarcount,
                dtype: DType::Bf16,
            },
        ] {
            assert_eq!(Mark::of(mark.encode()), Some(mark));
        }
        let mut lengths = Operation::lengths(
            OperationKind::Broadcast,
            OperationKind::ScatterVarcount,
            DType::F32,
            4,
        );
        lengths.root = Some(2);
        assert_eq!(lengths.to_string(), "scatter_varcount f32 from root 2");
        assert_eq!(Operation::JOIN.to_string(), "join");
        assert!(Operation::JOIN.is_join());
    }
}
