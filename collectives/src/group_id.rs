//! The names of groups.

use std::fmt;

/// Which group of a job and a generation: the same number on all its members.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u64);

impl GroupId {
    /// The group of all ranks.
    pub const WORLD: Self = Self(0);

    /// The id of a group that is made out of this one, the n-th of its kind with these members.
    pub(crate) fn child(self, what: Kind, count: u64, members: &[u32]) -> Self {
        // FNV-1a, with a last mix: members agree because they hash the same, and 64 bits don't collide by chance.
        let words = [self.0, what as u64, count]
            .into_iter()
            .chain(members.iter().map(|member| u64::from(*member)));
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for byte in words.flat_map(u64::to_le_bytes) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        hash ^= hash >> 33;
        Self(hash.max(1))
    }
}

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::WORLD {
            f.write_str("all ranks")
        } else {
            write!(f, "group {:08x}", self.0 >> 32)
        }
    }
}

/// The purpose of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A user's.
    Members = 1,
    /// One rank sends to one other.
    Pair = 2,
    /// Reserved: the links over which named operations are negotiated.
    Negotiation = 3,
    /// Operations whose order was negotiated.
    Negotiated = 4,
}
