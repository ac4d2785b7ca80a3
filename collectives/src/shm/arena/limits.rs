//! From how many bytes on something is done in another way: all of that, each with its reason.

use std::sync::OnceLock;

use super::super::caches;
use super::super::map::MOST_RANKS;
use crate::operation::OperationKind;

/// Bytes that are combined, or converted, at once: those of two ranks stay in the first cache.
pub(super) const BLOCK: usize = 8 << 10;

/// Pages are asked for in groups of so many bytes: a call to the system takes as long as some of them.
pub(super) const POPULATED: usize = 64 << 10;

/// The longest reductions that are flat, in bytes of all ranks' inputs.
pub(super) fn flat(world: usize) -> usize {
    if world == 2 {
        // Each of two reads and writes as much in slices, or more, and waits twice.
        8 << 20
    } else {
        96 << 10
    }
}

/// From so many bytes on a rank withholds what it alone needs. Fewer fit the line of a flag, or cost next to nothing.
pub(super) const WITHHELD: usize = 4 << 10;

// Lengths, which are stored over what was given, are never withheld.
const _: () = assert!(8 * (MOST_RANKS as usize) < WITHHELD);

/// From so many bytes on a rank gives in a place that moves on; see [`super::staging`].
pub(super) const MOVED: usize = 8 << 10;

/// Of longer data than this there is one place, and not two: with two they would not be in a cache any more.
pub(super) const TWICE: usize = 2 << 20;

/// A rank that gives fewer bytes in copies, or what is split, gives them at once.
pub(super) fn pieces(kind: OperationKind) -> usize {
    match kind {
        // Of which a half at most travels, in pieces of a few lines when there are many ranks: it takes as long either way
        // while it fits caches.
        OperationKind::AllToAll | OperationKind::ReduceScatter => 6 << 20,
        _ => 512 << 10,
    }
}

/// Bytes of a place for pieces.
pub(super) const PIECE: usize = 128 << 10;

/// Places for pieces. Those of two ranks have more room than second caches, of which [`super::staging`] says why; what those of
/// many have together stays in the last one.
pub(super) fn places(world: usize) -> usize {
    (32 / world).clamp(4, 16)
}

/// Shorter all-reduces and reduces than this take less time in slices than in rounds, for what all ranks together touch stays in
/// the last cache.
pub(super) const ROUNDS: usize = 12 << 20;

/// Pieces of rounds whose data, or slices, are there at once. Two would do; [`super::staging`] says why there are more.
pub(super) const ROUND_PLACES: usize = 8;

/// Bytes of a piece in rounds: all ranks' slices together.
pub(super) fn round_piece(world: usize) -> usize {
    (world * (64 << 10)).min(256 << 10)
}

/// Results from this length on are written past the caches: they are much longer than what the last cache holds.
pub(super) fn past_caches() -> usize {
    static FROM: OnceLock<usize> = OnceLock::new();
    *FROM.get_or_init(|| (8 << 20).max(caches::last() / 4))
}
