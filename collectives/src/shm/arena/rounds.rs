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
use std::sync::Arc;

use super::super::map::{MOST_RANKS, Place};
use super::super::rules::{self, Word};
use super::combine::To;
use super::stream::Pieces;
use super::way::{Plan, Way, is_given_as_it_is};
use super::{Arena, Outcome, Stage};
use crate::copy;
use crate::element::DType;
use crate::error::CollectiveError;
use crate::operation::{Operation, OperationKind, ReduceOp, Tag};

/// Pieces whose data, or slices, are there at once. Two would do; [`super::staging`] says why there are more.
const PLACES: usize = 8;
/// Shorter ones take less time in slices, for what all ranks together touch stays in the last cache.
const LEAST: usize = 12 << 20;
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

/// Bytes of a piece.
fn piece(world: usize) -> usize {
    (world * (64 << 10)).min(256 << 10)
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
        let root = operation.root.map(|root| root as usize);
        let piece = piece(world);
        (is_plain && length >= LEAST).then_some(Self {
            length,
            root,
            piece,
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
        piece % PLACES * self.piece
    }

    /// Where the slice is that it combines.
    fn slice_place(self, world: usize, piece: usize) -> usize {
        PLACES * self.piece + piece % PLACES * self.longest(world)
    }

    /// Bytes of the longest slice.
    fn longest(self, world: usize) -> usize {
        self.piece.div_ceil(world).next_multiple_of(64)
    }

    /// Whoever calls gives all buffers that there are.
    pub(super) fn check(
        self,
        rank: usize,
        input: usize,
        result: usize,
    ) -> Result<(), CollectiveError> {
        let stored = if self.stores(rank) { self.length } else { 0 };
        if (input, result) == (self.length, stored) {
            return Ok(());
        }
        let reason = format!(
            "buffers of {input} and {result} bytes: they must have {} and {stored}",
            self.length
        );
        Err(CollectiveError::Invalid { reason })
    }

    /// Bytes of all places.
    pub(super) fn window(self, world: usize) -> usize {
        PLACES * (self.piece + self.longest(world))
    }
}

impl Arena {
    /// Begins an operation that is done [piece by piece](Arena::streams) in one buffer, for input and result, as
    /// [`Arena::begin`] those in two. `keeps`: if it fails, the buffer is to be [as it was](Arena::undo).
    pub(crate) fn begin_in_place(
        &mut self,
        tag: Tag,
        operation: &Operation,
        forced: bool,
        data: &mut [u8],
        keeps: bool,
    ) -> Result<Outcome, CollectiveError> {
        let Plan(way, bytes) = self.plan(operation, forced, &[]);
        if let Way::Rounds(rounds) = way {
            rounds.check(self.me, data.len(), data.len())?;
            self.keeps = keeps;
            if keeps && !self.kept.try_reserve(rounds.length) {
                return Err(CollectiveError::Invalid {
                    reason: format!(
                        "{operation} takes {} bytes to keep its input until it has ended, more than this process can get: give \
                         less at a time, or the process more memory",
                        rounds.length
                    ),
                });
            }
        }
        self.enter(tag, operation, way, bytes)?;
        self.advance(&[], data).inspect_err(|_| self.leave())
    }

    /// Before the flag is set.
    pub(super) fn open_rounds(&mut self) {
        self.pieces = Pieces::default();
        self.map.given(self.me).put(0);
    }

    /// Goes on as far as it can. Returns whether nothing is left to do here. Without `input` it is in `result`.
    pub(super) fn go_rounds(
        &mut self,
        operation: &Operation,
        rounds: Rounds,
        input: &[u8],
        result: &mut [u8],
    ) -> bool {
        while self.pieces.given < rounds.all() {
            if !self.can_go_round(rounds) {
                return false;
            }
            let round = self.pieces.given;
            if let Some(piece) = round.checked_sub(MORE)
                && rounds.stores(self.me)
            {
                self.store_piece(rounds, piece, result);
            }
            let data = if input.is_empty() { &*result } else { input };
            if (1..=rounds.pieces()).contains(&round) {
                self.combine_piece(operation, rounds, round - 1, data);
            }
            if round < rounds.pieces() {
                self.give_whole(rounds, round, data);
            }
            self.pieces.given = round + 1;
            self.map.given(self.me).set(self.pieces.given as u64);
            self.ring_all();
        }
        true
    }

    /// Whether all others have ended the round before this rank's.
    pub(super) fn can_go_round(&self, rounds: Rounds) -> bool {
        let round = self.pieces.given;
        let others = || self.others().map(|rank| self.map.given(rank));
        round < rounds.all() && others().all(|ended| rules::may_begin(ended, round))
    }

    /// Whether this rank can't end without what another one has still to do. In the last round it reads what was combined before.
    pub(super) fn lacks_rounds(&self, rounds: Rounds, rank: usize) -> bool {
        !rules::may_begin(self.map.given(rank), rounds.all() - 1)
    }

    /// Whether another rank could go on, by what all have done, and does not.
    pub(super) fn is_behind(&self, rounds: Rounds, rank: usize) -> bool {
        let ended = |rank: usize| self.map.given(rank).get();
        ended(rank) < rounds.all() as u64
            && (0..self.world).all(|other| ended(other) >= ended(rank))
    }

    /// Puts back into the buffer of an operation that is given up what was there.
    pub(crate) fn undo(&self, data: &mut [u8]) {
        let Some(open) = self.open.filter(|open| open.stage == Stage::Streaming) else {
            return;
        };
        if let Way::Rounds(rounds) = open.way
            && self.keeps
        {
            let end = (self.pieces.given * rounds.piece).min(rounds.length);
            data[..end].copy_from_slice(&self.kept.bytes()[..end]);
        }
    }

    fn give_whole(&mut self, rounds: Rounds, piece: usize, data: &[u8]) {
        let (me, all) = (self.me, rounds.piece(piece));
        if self.keeps {
            copy::away(&data[all.clone()], &mut self.kept.bytes_mut()[all.clone()]);
        }
        let own = rounds.slice(self.world, piece, me);
        let place = self.start(me, rounds.window(self.world)) + rounds.place(piece);
        self.map
            .write(me, Place::Area, place, &data[all.start..own.start]);
        let after = place + (own.end - all.start);
        self.map
            .write(me, Place::Area, after, &data[own.end..all.end]);
    }

    fn combine_piece(&mut self, operation: &Operation, rounds: Rounds, piece: usize, data: &[u8]) {
        let (me, world) = (self.me, self.world);
        let own = rounds.slice(world, piece, me);
        let (first, start) = (rounds.piece(piece).start, own.start);
        let (from, into) = (rounds.place(piece), rounds.slice_place(world, piece));
        let mut starts = [0; MOST_RANKS as usize];
        for (rank, start) in starts.iter_mut().enumerate().take(world) {
            *start = self.start(rank, rounds.window(world));
        }
        let map = Arc::clone(&self.map);
        let place = |rank: usize, at: usize| (Place::Area, starts[rank] + from + (at - first));
        let put = |at: usize, block: &[u8]| {
            map.write(me, Place::Area, starts[me] + into + (at - start), block);
        };
        let mut target = To {
            own: Some(data),
            put,
        };
        self.combine(operation, place, own, &mut target);
    }

    fn store_piece(&mut self, rounds: Rounds, piece: usize, result: &mut [u8]) {
        let place = rounds.slice_place(self.world, piece);
        for rank in 0..self.world {
            let slice = rounds.slice(self.world, piece, rank);
            let place = self.start(rank, rounds.window(self.world)) + place;
            self.map.read(rank, Place::Area, place, &mut result[slice]);
        }
    }
}

#[cfg(test)]
mod tests;
