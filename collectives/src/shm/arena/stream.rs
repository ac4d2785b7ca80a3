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
use super::asked::{is_given_as_it_is, rows};
use super::combine::{To, combine};
use super::limits::{self, PIECE, past_caches, places};
use super::pieces::{Pieces, Piecewise, Work};
use super::seat::Seat;
use crate::copy;
use crate::element::DType;
use crate::operation::{Operation, OperationKind, ReduceOp};
use crate::schedule::{Counts, Rows};
use crate::shape::Mark;

/// Bytes of all places.
pub(super) fn window(world: usize) -> usize {
    places(world) * PIECE
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
        (is_plain && stream.given(world) >= limits::pieces(operation.kind)).then_some(stream)
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
        PIECE / if self.is_split { world } else { 1 } / 64 * 64
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
        piece % places(world) * PIECE + lane * self.piece(world)
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

    fn may_give(&self, seat: &Seat, pieces: Pieces) -> bool {
        let mut readers = seat.others().filter(|rank| self.reads(*rank));
        let places = places(seat.world);
        !self.gives(seat.me)
            || readers.all(|rank| rules::may_give(seat.map.taken(rank), pieces.given, places))
    }

    fn may_take(&self, seat: &Seat, pieces: Pieces) -> bool {
        let mut givers = seat.others().filter(|rank| self.gives(*rank));
        givers.all(|rank| rules::may_take(seat.map.given(rank), pieces.taken))
    }

    fn give_piece(&self, work: &Work<'_>, piece: usize, input: &[u8], result: &mut [u8]) {
        let Work { seat, open, .. } = *work;
        let (me, world) = (seat.me, seat.world);
        let part = |reader: usize| {
            let (start, range) = (self.source(reader), self.range(world, piece, reader));
            &input[start + range.start..start + range.end]
        };
        if self.gives(me) {
            let readers = if self.is_split { 0..world } else { 0..1 };
            for reader in readers.filter(|reader| !self.is_split || *reader != me) {
                let at = open.start + self.place(world, piece, reader);
                seat.map.write(me, Place::Area, at, part(reader));
            }
        }
        if self.keeps_own(me) {
            let (start, range) = (self.target(me), self.range(world, piece, me));
            let into = &mut result[start + range.start..start + range.end];
            if self.each >= past_caches() {
                copy::away(part(me), into);
            } else {
                copy::slice(part(me), into);
            }
        }
    }

    fn take_piece(&self, work: &Work<'_>, piece: usize, result: &mut [u8]) {
        let Work { seat, open, .. } = *work;
        let (me, world) = (seat.me, seat.world);
        let range = self.range(world, piece, me);
        let at = self.place(world, piece, me);
        for giver in seat.others().filter(|rank| self.gives(*rank)) {
            let start = self.target(giver);
            let at = open.place(seat, giver, window(world)).1 + at;
            let into = &mut result[start + range.start..start + range.end];
            if self.each >= past_caches() {
                seat.map.read_streaming(giver, Place::Area, at, into);
            } else {
                seat.map.read(giver, Place::Area, at, into);
            }
        }
    }

    /// As [`Stream::take_piece`], of what is combined with this rank's own.
    fn take_combined(&self, work: &mut Work<'_>, piece: usize, input: &[u8], result: &mut [u8]) {
        let Work { seat, open, .. } = *work;
        let (me, world) = (seat.me, seat.world);
        let (first, range) = (self.source(me), self.range(world, piece, me));
        let range = first + range.start..first + range.end;
        let (place, start) = (self.place(world, piece, me), range.start);
        let is_far = self.each >= past_caches();
        // Copies past the caches have an end of their own.
        let is_away = |block: &[u8]| is_far && block.len() >= 4096;
        let mut starts = [0; MOST_RANKS as usize];
        for (rank, start) in starts.iter_mut().enumerate().take(world) {
            *start = open.place(seat, rank, window(world)).1;
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
        let target = &mut To {
            own: Some(input),
            put,
        };
        combine(seat, work.blocks, &open.operation, place, range, target);
    }
}

impl Piecewise for Stream {
    fn lengths(&self, seat: &Seat) -> (usize, usize) {
        let (me, world) = (seat.me, seat.world);
        let has_input = self.gives(me) || self.keeps_own(me);
        let has_result = self.reads(me) || self.keeps_own(me);
        let input = if has_input { self.given(world) } else { 0 };
        let result = match (has_result, self.from) {
            (false, _) => 0,
            _ if self.combined.is_some() => self.length(me),
            (true, Some(_)) => self.each,
            (true, None) => self.each.saturating_mul(world),
        };
        (input, result)
    }

    fn begin(&self, seat: &Seat) -> Pieces {
        let (me, pieces) = (seat.me, self.pieces(seat.world));
        let is_idle = !self.gives(me) && !self.keeps_own(me);
        seat.map.given(me).put(0);
        seat.map.taken(me).put(0);
        Pieces {
            given: if is_idle { pieces } else { 0 },
            taken: if self.reads(me) { 0 } else { pieces },
        }
    }

    fn advance(
        &self,
        mut work: Work<'_>,
        pieces: &mut Pieces,
        input: &[u8],
        result: &mut [u8],
    ) -> bool {
        let (seat, me) = (work.seat, work.seat.me);
        let all = self.pieces(seat.world);
        loop {
            let before = *pieces;
            if pieces.given < all && self.may_give(seat, *pieces) {
                self.give_piece(&work, pieces.given, input, result);
                pieces.given += 1;
                if self.gives(me) {
                    seat.map.given(me).set(pieces.given as u64);
                }
            }
            if pieces.taken < all && self.may_take(seat, *pieces) {
                match self.combined {
                    None => self.take_piece(&work, pieces.taken, result),
                    Some(_) => self.take_combined(&mut work, pieces.taken, input, result),
                }
                pieces.taken += 1;
                seat.map.taken(me).set(pieces.taken as u64);
            }
            let has_moved = *pieces != before;
            if has_moved {
                seat.ring_all();
            }
            if pieces.given == all && pieces.taken == all {
                return true;
            }
            if !has_moved {
                return false;
            }
        }
    }

    fn may_advance(&self, seat: &Seat, pieces: Pieces) -> bool {
        let all = self.pieces(seat.world);
        (pieces.given < all && self.may_give(seat, pieces))
            || (pieces.taken < all && self.may_take(seat, pieces))
    }

    fn lacks(&self, seat: &Seat, rank: usize) -> bool {
        let (me, last) = (seat.me, self.pieces(seat.world) - 1);
        let (given, taken) = (seat.map.given(rank), seat.map.taken(rank));
        (self.gives(rank) && self.reads(me) && !rules::may_take(given, last))
            || (self.reads(rank)
                && self.gives(me)
                && !rules::may_give(taken, last, places(seat.world)))
    }

    fn is_slow(&self, seat: &Seat, rank: usize) -> bool {
        let (all, places) = (self.pieces(seat.world) as u64, places(seat.world) as u64);
        let given = |rank| seat.map.given(rank).get();
        let taken = |rank| seat.map.taken(rank).get();
        let others = || (0..seat.world).filter(|other| *other != rank);
        let mut readers = others().filter(|other| self.reads(*other));
        let mut givers = others().filter(|other| self.gives(*other));
        let could_give = self.gives(rank)
            && given(rank) < all
            && readers.all(|other| given(rank) < taken(other).saturating_add(places));
        let could_take =
            self.reads(rank) && taken(rank) < all && givers.all(|other| given(other) > taken(rank));
        could_give || could_take
    }
}

#[cfg(test)]
mod tests;
