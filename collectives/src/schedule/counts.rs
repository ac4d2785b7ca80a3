//! Who has how much.

use super::Span;

/// How many elements each rank has.
pub trait Counts: Copy {
    /// Elements of this rank.
    fn of(self, rank: u32) -> usize;

    /// Elements of the ranks before this one, which may be the number of ranks: then it is the sum of all.
    fn before(self, rank: u32) -> usize;

    /// The elements of this rank among those of all.
    fn span(self, rank: u32) -> Span {
        Span {
            start: self.before(rank),
            len: self.of(rank),
        }
    }
}

/// The same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Equal(pub usize);

impl Counts for Equal {
    fn of(self, _rank: u32) -> usize {
        self.0
    }

    fn before(self, rank: u32) -> usize {
        self.0 * rank as usize
    }
}

/// Different: `offsets[i]` elements come before rank i's; one more entry than ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offsets<'a>(pub &'a [usize]);

impl Counts for Offsets<'_> {
    fn of(self, rank: u32) -> usize {
        self.0[rank as usize + 1] - self.0[rank as usize]
    }

    fn before(self, rank: u32) -> usize {
        self.0[rank as usize]
    }
}

/// A first dimension that is split as evenly as can be, as Horovod's reduce-scatter does: the first `rows % world` ranks
/// get one row more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// The first dimension.
    pub rows: usize,
    /// Elements of a row: the product of the other dimensions.
    pub width: usize,
    /// Ranks.
    pub world: u32,
}

impl Counts for Rows {
    fn of(self, rank: u32) -> usize {
        piece(self.rows, self.world, rank).len * self.width
    }

    fn before(self, rank: u32) -> usize {
        start(self.rows, self.world, rank) * self.width
    }
}

/// Where piece `index` begins, of `count` elements cut into `pieces` as evenly as can be: the first `count % pieces`
/// have one element more. It ends where the next one begins.
pub(super) fn start(count: usize, pieces: u32, index: u32) -> usize {
    let (pieces, index) = (pieces as usize, index as usize);
    index * (count / pieces) + index.min(count % pieces)
}

pub(super) fn piece(count: usize, pieces: u32, index: u32) -> Span {
    Span::between(start(count, pieces, index), start(count, pieces, index + 1))
}
