//! Operations that are done piece by piece.

use std::fmt::Debug;

use super::Open;
use super::seat::Seat;
use crate::error::CollectiveError;
use crate::scratch::Scratch;

/// How far a rank is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Pieces {
    /// Pieces that it has given, or rounds that it has ended.
    pub(super) given: usize,
    pub(super) taken: usize,
}

/// What a rank works with.
pub(super) struct Work<'a> {
    pub(super) seat: &'a Seat,
    pub(super) open: &'a Open,
    pub(super) blocks: &'a mut Scratch,
    /// Where what was in the caller's buffer is kept, if it is.
    pub(super) kept: Option<&'a mut Scratch>,
}

/// How an operation is done piece by piece.
pub(super) trait Piecewise: Debug {
    /// Bytes of this rank's input and result.
    fn lengths(&self, seat: &Seat) -> (usize, usize);

    /// Where a rank begins, before its flag is set.
    fn begin(&self, seat: &Seat) -> Pieces;

    /// Goes on as far as it can. Returns whether nothing is left to do here. Without `input` it is in `result`.
    fn advance(&self, work: Work<'_>, pieces: &mut Pieces, input: &[u8], result: &mut [u8])
    -> bool;

    /// Whether this rank can go on.
    fn may_advance(&self, seat: &Seat, pieces: Pieces) -> bool;

    /// Whether this rank can't end without what another one has still to do.
    fn lacks(&self, seat: &Seat, rank: usize) -> bool;

    /// Whether another rank could go on, by what all have done, and does not. Those that wait for it do not count.
    fn is_slow(&self, seat: &Seat, rank: usize) -> bool;

    /// Whoever calls gives all buffers that there are.
    fn check(&self, seat: &Seat, input: usize, result: usize) -> Result<(), CollectiveError> {
        let (has, stores) = self.lengths(seat);
        if (input, result) == (has, stores) {
            return Ok(());
        }
        Err(CollectiveError::Invalid {
            reason: format!(
                "buffers of {input} and {result} bytes: they must have {has} and {stores}"
            ),
        })
    }
}
