//! Long all-reduces and reduces, piece by piece, in the caller's buffer.
//!
//! In round r a rank gives piece r of its data, combines its slice of piece r - 1, and stores the result of piece r - 2 (of a reduce,
//! the root does that). It begins a round when all others have ended the one before. So what it reads was written in rounds that have ended, and what it
//! writes over was read in rounds that have ended: there are some places for what is given, and as many for slices, which are used in
//! turn. One word of each rank counts its rounds, and begins at 0 before its flag is set, as in [`stream`](super::stream).
//!
//! What others read stays in caches that way, and each byte of the caller's is brought there once, where slices of everything go
//! through memory three times. But the caller's buffer is written while the operation can still fail. If it holds the input, too,
//! a rank keeps what was in it, and puts that back then (F-2).

use std::ops::Range;

use super::super::map::{MOST_RANKS, Place};
use super::super::rules::{self, Word};
use super::asked::is_given_as_it_is;
use super::combine::{To, combine};
use super::limits::{ROUND_PLACES, ROUNDS, round_piece};
use super::pieces::{Pieces, Piecewise, Work};
use super::seat::Seat;
use crate::copy;
use crate::element::DType;
use crate::error::CollectiveError;
use crate::operation::{Operation, OperationKind, ReduceOp};

/// Rounds after that of the last piece.
const MORE: usize = 2;

/// An all-reduce of so many bytes, or a reduce to a root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rounds {
    length: usize,
    root: Option<usize>,
    /// Bytes of a piece, all ranks' slices together.
    piece: usize,
}

impl Rounds {
    /// If an operation may be done so.
    pub(super) fn of(operation: &Operation, world: usize) -> Option<Self> {
        let is_kind = matches!(
            operation.kind,
            OperationKind::AllReduce | OperationKind::Reduce
        );
        let is_plain = is_kind
            && operation.reduce != Some(ReduceOp::Adasum)
            && is_given_as_it_is(operation)
            && operation.dtype != Some(DType::Bool);
        let length = usize::try_from(operation.count)
            .ok()?
            .checked_mul(operation.element_size())?;
        (is_plain && length >= ROUNDS).then_some(Self {
            length,
            root: operation.root.map(|root| root as usize),
            piece: round_piece(world),
        })
    }

    /// Whether a rank has a result.
    fn stores(self, rank: usize) -> bool {
        self.root.is_none_or(|root| root == rank)
    }

    fn pieces(self) -> usize {
        self.length.div_ceil(self.piece)
    }

    fn all(self) -> usize {
        self.pieces() + MORE
    }

    /// A piece, in the data.
    fn piece(self, piece: usize) -> Range<usize> {
        piece * self.piece..((piece + 1) * self.piece).min(self.length)
    }

    /// The part of a piece that a rank combines, in the data.
    fn slice(self, world: usize, piece: usize, rank: usize) -> Range<usize> {
        let Range { start, end } = self.piece(piece);
        let each = (end - start).div_ceil(world).next_multiple_of(64);
        let at = |rank: usize| (start + rank * each).min(end);
        at(rank)..at(rank + 1)
    }

    /// Where a piece that a rank gives is in its area.
    fn place(self, piece: usize) -> usize {
        piece % ROUND_PLACES * self.piece
    }

    /// Where the slice is that it combines.
    fn slice_place(self, world: usize, piece: usize) -> usize {
        ROUND_PLACES * self.piece + piece % ROUND_PLACES * self.longest(world)
    }

    /// Bytes of the longest slice.
    fn longest(self, world: usize) -> usize {
        self.piece.div_ceil(world).next_multiple_of(64)
    }

    /// Bytes of all places.
    pub(super) fn window(self, world: usize) -> usize {
        ROUND_PLACES * (self.piece + self.longest(world))
    }

    /// As [`Piecewise::check`], of a buffer that holds input and result.
    pub(super) fn check_in_place(self, length: usize) -> Result<(), CollectiveError> {
        if length == self.length {
            return Ok(());
        }
        Err(CollectiveError::Invalid {
            reason: format!("a buffer of {length} bytes: it must have {}", self.length),
        })
    }

    /// What a rank in an operation that is given up had in its buffer, of which it has done so much, is there again.
    pub(super) fn undo(self, pieces: Pieces, kept: &[u8], data: &mut [u8]) {
        let end = (pieces.given * self.piece).min(self.length);
        data[..end].copy_from_slice(&kept[..end]);
    }

    fn give_piece(self, work: &mut Work<'_>, piece: usize, data: &[u8]) {
        let (seat, all) = (work.seat, self.piece(piece));
        if let Some(kept) = &mut work.kept {
            copy::away(&data[all.clone()], &mut kept.bytes_mut()[all.clone()]);
        }
        let own = self.slice(seat.world, piece, seat.me);
        let place = work.open.start + self.place(piece);
        let write = |at: usize, from: &[u8]| seat.map.write(seat.me, Place::Area, at, from);
        write(place, &data[all.start..own.start]);
        write(place + (own.end - all.start), &data[own.end..all.end]);
    }

    fn combine_piece(self, work: &mut Work<'_>, piece: usize, data: &[u8]) {
        let Work { seat, open, .. } = *work;
        let (me, world) = (seat.me, seat.world);
        let own = self.slice(world, piece, me);
        let (first, start) = (self.piece(piece).start, own.start);
        let (from, into) = (self.place(piece), self.slice_place(world, piece));
        let mut starts = [0; MOST_RANKS as usize];
        for (rank, start) in starts.iter_mut().enumerate().take(world) {
            *start = open.place(seat, rank, self.window(world)).1;
        }
        let place = |rank: usize, at: usize| (Place::Area, starts[rank] + from + (at - first));
        let put = |at: usize, block: &[u8]| {
            let at = starts[me] + into + (at - start);
            seat.map.write(me, Place::Area, at, block);
        };
        let target = &mut To {
            own: Some(data),
            put,
        };
        combine(seat, work.blocks, &open.operation, place, own, target);
    }

    fn store_piece(self, work: &Work<'_>, piece: usize, result: &mut [u8]) {
        let (seat, world) = (work.seat, work.seat.world);
        let place = self.slice_place(world, piece);
        for rank in 0..world {
            let slice = self.slice(world, piece, rank);
            let place = work.open.place(seat, rank, self.window(world)).1 + place;
            seat.map.read(rank, Place::Area, place, &mut result[slice]);
        }
    }
}

impl Piecewise for Rounds {
    fn lengths(&self, seat: &Seat) -> (usize, usize) {
        let stored = if self.stores(seat.me) { self.length } else { 0 };
        (self.length, stored)
    }

    fn begin(&self, seat: &Seat) -> Pieces {
        seat.map.given(seat.me).put(0);
        Pieces::default()
    }

    fn advance(
        &self,
        mut work: Work<'_>,
        pieces: &mut Pieces,
        input: &[u8],
        result: &mut [u8],
    ) -> bool {
        let seat = work.seat;
        while pieces.given < self.all() {
            if !self.may_advance(seat, *pieces) {
                return false;
            }
            let round = pieces.given;
            if let Some(piece) = round.checked_sub(MORE)
                && self.stores(seat.me)
            {
                self.store_piece(&work, piece, result);
            }
            let data = if input.is_empty() { &*result } else { input };
            if (1..=self.pieces()).contains(&round) {
                self.combine_piece(&mut work, round - 1, data);
            }
            if round < self.pieces() {
                self.give_piece(&mut work, round, data);
            }
            pieces.given = round + 1;
            seat.map.given(seat.me).set(pieces.given as u64);
            seat.ring_all();
        }
        true
    }

    /// All others have ended the round before this rank's.
    fn may_advance(&self, seat: &Seat, pieces: Pieces) -> bool {
        let round = pieces.given;
        let mut others = seat.others().map(|rank| seat.map.given(rank));
        round < self.all() && others.all(|ended| rules::may_begin(ended, round))
    }

    /// In the last round a rank reads what was combined before.
    fn lacks(&self, seat: &Seat, rank: usize) -> bool {
        !rules::may_begin(seat.map.given(rank), self.all() - 1)
    }

    fn is_slow(&self, seat: &Seat, rank: usize) -> bool {
        let ended = |rank: usize| seat.map.given(rank).get();
        ended(rank) < self.all() as u64 && (0..seat.world).all(|other| ended(other) >= ended(rank))
    }
}

#[cfg(test)]
mod tests;
