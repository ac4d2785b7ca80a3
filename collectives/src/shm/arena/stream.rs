//! Long copies, piece by piece, through a window of the memory; and reduce-scatters, whose readers combine each piece with
//! their own.
//!
//! A rank that gives writes piece after piece of its data into a few places of its area, used in turn; those that read copy
//! each to where it belongs. So both work at once, on memory that stays in caches, and an operation of any
//! length needs no more of it. A place is used again when every reader has taken the piece before:
//! [`rules::may_give`].
//!
//! Two words of each rank count the pieces that it has given and taken. They begin at 0 before its flag is set, and others look at
//! them when they have seen the flag; the rules of flags keep the owner from another operation until those have left.

use std::ops::Range;

use super::super::map::{MOST_RANKS, Place};
use super::super::rules::{self, Word};
use super::Arena;
use super::combine::To;
use super::store::streams_from;
use super::way::{Way, is_given_as_it_is, rows};
use crate::copy;
use crate::element::DType;
use crate::error::CollectiveError;
use crate::operation::{Operation, OperationKind, ReduceOp};
use crate::schedule::{Counts, Rows};
use crate::shape::Mark;

/// Bytes of a place.
const PLACE: usize = 128 << 10;

/// Places for pieces. Those of two ranks have more room than second caches, of which [`super::staging`] says why; what those of
/// many have together stays in the last one.
fn places(world: usize) -> usize {
    (32 / world).clamp(4, 16)
}

/// Bytes of all.
pub(super) fn window(world: usize) -> usize {
    places(world) * PLACE
}

/// A rank that gives fewer bytes gives them at once.
fn least(kind: OperationKind) -> usize {
    match kind {
        // Of which a half at most travels, in pieces of a few lines when there are many ranks: it takes as long either way
        // while it fits caches.
        OperationKind::AllToAll | OperationKind::ReduceScatter => 6 << 20,
        _ => 512 << 10,
    }
}

/// Who gives what to whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stream {
    /// Bytes that one rank gets from one other; the most that one gets if they are combined.
    each: usize,
    /// Whether every rank gets other bytes; else all get the same.
    is_split: bool,
    /// What ranks get is combined: who gets which bytes.
    combined: Option<Rows>,
    /// The only rank that gives.
    from: Option<usize>,
    /// The only rank that gets something.
    to: Option<usize>,
}

/// How far a rank is.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Pieces {
    pub(super) given: usize,
    taken: usize,
}

impl Stream {
    /// If an operation is done so. All ranks say the same.
    pub(super) fn of(operation: &Operation, world: usize) -> Option<Self> {
        let is_plain = is_given_as_it_is(operation)
            && operation.dtype != Some(DType::Bool)
            // Whoever gets an object has no place for it before it is there.
            && Mark::of(operation.shape).is_none()
            // A rank that gets nothing leaves its places empty.
            && (operation.kind != OperationKind::ReduceScatter || operation.rows >= world as u64);
        let each = usize::try_from(operation.count)
            .ok()?
            .checked_mul(operation.element_size())?;
        let root = operation.root.map(|root| root as usize);
        let combined = (operation.kind == OperationKind::ReduceScatter).then(|| {
            let rows = rows(operation, world);
            let width = rows.width * operation.element_size();
            Rows { width, ..rows }
        });
        let each = combined.map_or(each, |rows| rows.of(0));
        let (is_split, from, to) = match operation.kind {
            OperationKind::ReduceScatter if operation.reduce != Some(ReduceOp::Adasum) => {
                (true, None, None)
            }
            OperationKind::Broadcast => (false, root, None),
            OperationKind::AllGather => (false, None, None),
            OperationKind::Gather => (false, None, root),
            OperationKind::Scatter => (true, root, None),
            OperationKind::AllToAll => (true, None, None),
            _ => return None,
        };
        let stream = Self {
            each,
            is_split,
            combined,
            from,
            to,
        };
        (is_plain && stream.given(world) >= least(operation.kind)).then_some(stream)
    }

    /// Bytes that a rank gives, for itself too.
    fn given(&self, world: usize) -> usize {
        match self.combined {
            Some(rows) => rows.rows * rows.width,
            None => (self.each).saturating_mul(if self.is_split { world } else { 1 }),
        }
    }

    /// Bytes for `reader`, of one giver.
    fn length(&self, reader: usize) -> usize {
        self.combined
            .map_or(self.each, |rows| rows.of(reader as u32))
    }

    pub(super) fn gives(&self, rank: usize) -> bool {
        self.from.is_none_or(|from| from == rank) && self.to != Some(rank)
    }

    fn reads(&self, rank: usize) -> bool {
        self.to.is_none_or(|to| to == rank) && self.from != Some(rank)
    }

    /// Whether a rank has a part of its own data in its result, in another buffer.
    fn keeps_own(&self, rank: usize) -> bool {
        match (self.from, self.to) {
            (_, Some(to)) => to == rank,
            (Some(from), None) => self.is_split && from == rank,
            (None, None) => self.combined.is_none(),
        }
    }

    /// Bytes of a piece.
    fn piece(&self, world: usize) -> usize {
        PLACE / if self.is_split { world } else { 1 } / 64 * 64
    }

    fn pieces(&self, world: usize) -> usize {
        self.each.div_ceil(self.piece(world))
    }

    /// A piece, among the bytes that `reader` gets from one other.
    fn range(&self, world: usize, piece: usize, reader: usize) -> Range<usize> {
        let (long, all) = (self.piece(world), self.length(reader));
        (piece * long).min(all)..((piece + 1) * long).min(all)
    }

    /// Where a piece for `reader` is in the giver's area.
    fn place(&self, world: usize, piece: usize, reader: usize) -> usize {
        let lane = if self.is_split { reader } else { 0 };
        piece % places(world) * PLACE + lane * self.piece(world)
    }

    /// Where the bytes for `reader` begin in the giver's data.
    fn source(&self, reader: usize) -> usize {
        match self.combined {
            Some(rows) => rows.before(reader as u32),
            None if self.is_split => reader * self.each,
            None => 0,
        }
    }

    /// Where the bytes of `giver` begin in the reader's result.
    fn target(&self, giver: usize) -> usize {
        if self.from.is_some() {
            0
        } else {
            giver * self.each
        }
    }

    /// Bytes of a rank's input and result.
    fn lengths(&self, world: usize, rank: usize) -> (usize, usize) {
        let has_input = self.gives(rank) || self.keeps_own(rank);
        let has_result = self.reads(rank) || self.keeps_own(rank);
        let input = if has_input { self.given(world) } else { 0 };
        let result = match (has_result, self.from) {
            (false, _) => 0,
            _ if self.combined.is_some() => self.length(rank),
            (true, Some(_)) => self.each,
            (true, None) => self.each.saturating_mul(world),
        };
        (input, result)
    }
}

impl Arena {
    /// Whether an operation is done piece by piece: then it is given the buffer for its result when it begins.
    pub(crate) fn streams(&self, operation: &Operation) -> bool {
        let way = Way::of(operation, self.world, self.map.is_crowded());
        matches!(way, Way::Stream(_) | Way::Rounds(_))
    }

    /// Whoever calls gives all buffers that there are.
    pub(super) fn check_stream(
        &self,
        stream: &Stream,
        input: &[u8],
        result: &[u8],
    ) -> Result<(), CollectiveError> {
        let wanted = stream.lengths(self.world, self.me);
        if (input.len(), result.len()) == wanted {
            return Ok(());
        }
        Err(CollectiveError::Invalid {
            reason: format!(
                "buffers of {} and {} bytes: they must have {} and {}",
                input.len(),
                result.len(),
                wanted.0,
                wanted.1
            ),
        })
    }

    /// Before the flag is set.
    pub(super) fn open_stream(&mut self, stream: &Stream) {
        let (me, pieces) = (self.me, stream.pieces(self.world));
        let is_idle = !stream.gives(me) && !stream.keeps_own(me);
        self.pieces = Pieces {
            given: if is_idle { pieces } else { 0 },
            taken: if stream.reads(me) { 0 } else { pieces },
        };
        self.map.given(me).put(0);
        self.map.taken(me).put(0);
    }

    /// Goes on as far as it can. Returns whether nothing is left to do here.
    pub(super) fn stream(
        &mut self,
        operation: &Operation,
        stream: &Stream,
        input: &[u8],
        result: &mut [u8],
    ) -> bool {
        let pieces = stream.pieces(self.world);
        loop {
            let mut moved = false;
            if self.pieces.given < pieces && self.may_give(stream) {
                self.give_piece(stream, input, result);
                moved = true;
            }
            if self.pieces.taken < pieces && self.may_take(stream) {
                match stream.combined {
                    None => self.take_piece(stream, result),
                    Some(_) => self.take_combined(operation, stream, input, result),
                }
                self.pieces.taken += 1;
                self.map.taken(self.me).set(self.pieces.taken as u64);
                moved = true;
            }
            if moved {
                self.ring_all();
            }
            if self.pieces.given == pieces && self.pieces.taken == pieces {
                return true;
            }
            if !moved {
                return false;
            }
        }
    }

    fn may_give(&self, stream: &Stream) -> bool {
        let me = self.me;
        !stream.gives(me)
            || self
                .others()
                .filter(|rank| stream.reads(*rank))
                .all(|rank| {
                    rules::may_give(self.map.taken(rank), self.pieces.given, places(self.world))
                })
    }

    fn may_take(&self, stream: &Stream) -> bool {
        self.others()
            .filter(|rank| stream.gives(*rank))
            .all(|rank| rules::may_take(self.map.given(rank), self.pieces.taken))
    }

    /// Whether this rank can go on.
    pub(super) fn can_stream(&self, stream: &Stream) -> bool {
        let pieces = stream.pieces(self.world);
        (self.pieces.given < pieces && self.may_give(stream))
            || (self.pieces.taken < pieces && self.may_take(stream))
    }

    /// Whether this rank can't end without what another one has still to do.
    pub(super) fn lacks_pieces(&self, stream: &Stream, rank: usize) -> bool {
        let (me, pieces) = (self.me, stream.pieces(self.world));
        let (given, taken) = (self.map.given(rank), self.map.taken(rank));
        (stream.gives(rank) && stream.reads(me) && !rules::may_take(given, pieces - 1))
            || (stream.reads(rank)
                && stream.gives(me)
                && !rules::may_give(taken, pieces - 1, places(self.world)))
    }

    /// Whether another rank could go on, by what all have done, and does not. Those that wait for it do not count.
    pub(super) fn is_slow(&self, stream: &Stream, rank: usize) -> bool {
        let pieces = stream.pieces(self.world) as u64;
        let given = |rank| self.map.given(rank).get();
        let taken = |rank| self.map.taken(rank).get();
        let others = || (0..self.world).filter(|other| *other != rank);
        let could_give = stream.gives(rank)
            && given(rank) < pieces
            && others()
                .filter(|other| stream.reads(*other))
                .all(|other| given(rank) < taken(other).saturating_add(places(self.world) as u64));
        let could_take = stream.reads(rank)
            && taken(rank) < pieces
            && others()
                .filter(|other| stream.gives(*other))
                .all(|other| given(other) > taken(rank));
        could_give || could_take
    }

    fn give_piece(&mut self, stream: &Stream, input: &[u8], result: &mut [u8]) {
        let (me, world, piece) = (self.me, self.world, self.pieces.given);
        let part = |reader: usize| {
            let (start, range) = (stream.source(reader), stream.range(world, piece, reader));
            &input[start + range.start..start + range.end]
        };
        if stream.gives(me) {
            let readers = if stream.is_split { 0..world } else { 0..1 };
            for reader in readers.filter(|reader| !stream.is_split || *reader != me) {
                let at = self.start(me, window(world)) + stream.place(world, piece, reader);
                self.map.write(me, Place::Area, at, part(reader));
            }
        }
        if stream.keeps_own(me) {
            let (start, range) = (stream.target(me), stream.range(world, piece, me));
            let into = &mut result[start + range.start..start + range.end];
            if stream.each >= streams_from() {
                copy::away(part(me), into);
            } else {
                copy::slice(part(me), into);
            }
        }
        self.pieces.given = piece + 1;
        if stream.gives(me) {
            self.map.given(me).set(self.pieces.given as u64);
        }
    }

    fn take_piece(&mut self, stream: &Stream, result: &mut [u8]) {
        let (me, world, piece) = (self.me, self.world, self.pieces.taken);
        let range = stream.range(world, piece, me);
        let at = stream.place(world, piece, me);
        for giver in self.others().filter(|rank| stream.gives(*rank)) {
            let start = stream.target(giver);
            let at = self.start(giver, window(world)) + at;
            let into = &mut result[start + range.start..start + range.end];
            if stream.each >= streams_from() {
                self.map.read_streaming(giver, Place::Area, at, into);
            } else {
                self.map.read(giver, Place::Area, at, into);
            }
        }
    }

    /// As [`Arena::take_piece`], of what is combined with this rank's own.
    fn take_combined(
        &mut self,
        operation: &Operation,
        stream: &Stream,
        input: &[u8],
        result: &mut [u8],
    ) {
        let (me, world, piece) = (self.me, self.world, self.pieces.taken);
        let (first, range) = (stream.source(me), stream.range(world, piece, me));
        let range = first + range.start..first + range.end;
        let (place, start) = (stream.place(world, piece, me), range.start);
        let is_far = stream.each >= streams_from();
        // Copies past the caches have an end of their own.
        let is_away = |block: &[u8]| is_far && block.len() >= 4096;
        let mut starts = [0; MOST_RANKS as usize];
        for (rank, start) in starts.iter_mut().enumerate().take(world) {
            *start = self.start(rank, window(world));
        }
        let place = |rank: usize, at: usize| (Place::Area, starts[rank] + place + (at - start));
        let put = |at: usize, block: &[u8]| {
            let into = &mut result[at - first..at - first + block.len()];
            if is_away(block) {
                copy::away(block, into);
            } else {
                copy::slice(block, into);
            }
        };
        let own = Some(input);
        self.combine(operation, place, range, &mut To { own, put });
    }
}

#[cfg(test)]
mod tests;
