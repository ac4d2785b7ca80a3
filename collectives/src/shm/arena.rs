//! Operations in the memory that all ranks of a group map.
//!
//! In every operation each rank gives its data (a copy, in memory that it alone writes, of what others need), sets its flag, and
//! waits for the flags of all. That all flags are the same word says that all ask for the same. From there on there are four ways:
//!
//! * *flat*: every rank combines, or copies, what it needs from where the others gave it. One flag.
//! * *piece by piece*, for long copies and reduce-scatters: see [`stream`].
//! * *in rounds*, for the longest all-reduces and reduces: see [`rounds`].
//! * *slices*, for other long reductions: each rank combines its slice of all inputs into its own data, sets a second flag, and
//!   waits for those of all; then everyone copies all slices.
//!
//! A buffer that holds the input, too, is written in the end, when nothing is waited for any more, or put back: an operation that
//! fails leaves it as it was (F-2).

mod asked;
mod combine;
mod give;
mod limits;
mod pieces;
mod rounds;
mod seat;
mod staging;
mod store;
mod stream;
mod watch;
mod way;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::task::{Context, Waker};
use std::time::Instant;

use super::buffer::{Buffers, Heap, SharedBuffer};
use super::map::{Map, Place};
use super::rules;
use super::ticket::{digest, parity, ticket};
use super::wait::{Waits, ring};
use crate::element::Element;
use crate::error::CollectiveError;
use crate::operation::{Operation, Tag};
use crate::scratch::Scratch;
use combine::{combine_buffers, combine_slice};
use give::{Given, is_inline};
use pieces::{Pieces, Work};
use seat::Seat;
pub(crate) use store::Own;
pub(crate) use way::Plan;
use way::Way;
pub use way::way_in_shared_memory;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Somebody still reads what this rank gave before.
    Held,
    /// This rank's data are given; others' are waited for.
    Given,
    /// This rank's slice is done; others' are waited for.
    Sliced,
    /// Pieces are given and taken.
    Streaming,
    /// Nothing is waited for.
    Ready,
    /// A rank asks for something else that goes with this: see [`Operation::is_join`].
    Elsewhere,
}

#[derive(Debug, Clone, Copy)]
struct Open {
    tag: Tag,
    ticket: u64,
    operation: Operation,
    way: Way,
    stage: Stage,
    /// That this rank gives.
    bytes: usize,
    /// Where they begin in its area, unless they are beside its flag.
    start: usize,
}

/// When some place was used last.
#[derive(Debug, Clone, Copy)]
struct Used {
    index: u64,
    ticket: u64,
    parity: usize,
}

/// How far an operation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Pending,
    /// The result can be stored.
    Ready,
    /// All agree; it goes on over the links.
    Elsewhere,
}

/// One rank's part of the memory.
#[derive(Debug)]
pub(crate) struct Arena {
    seat: Seat,
    waits: Waits,
    open: Option<Open>,
    /// The last operation that was entered.
    last: Option<Tag>,
    given: Given,
    /// Of the last two different operations.
    digested: [Option<(Operation, u64)>; 2],
    blocks: Scratch,
    pieces: Pieces,
    /// What was in the caller's buffer, if it is kept.
    kept: Scratch,
    keeps: bool,
    told: u64,
    /// Something from outside the memory ends the operation.
    is_over: Arc<AtomicBool>,
    heap: Heap,
}

impl Arena {
    pub(crate) fn new(map: Arc<Map>, me: u32, is_over: Arc<AtomicBool>) -> Self {
        let (me, world) = (me as usize, map.world());
        Self {
            waits: Waits::new(Arc::clone(&map), me),
            open: None,
            last: None,
            given: Given::new(world),
            digested: [None; 2],
            blocks: Scratch::default(),
            pieces: Pieces::default(),
            kept: Scratch::default(),
            keeps: false,
            told: 0,
            is_over,
            heap: Heap::new(Arc::clone(&map), me),
            seat: Seat { map, me, world },
        }
    }

    pub(crate) fn map(&self) -> &Arc<Map> {
        &self.seat.map
    }

    /// What wakes a thread in [`Arena::sleep`].
    pub(crate) fn waker(&self) -> Waker {
        self.waits.waker()
    }

    /// Whether a peer put a notice on the link to this rank since the last [`Arena::listen_to_links`].
    #[inline]
    pub(crate) fn is_told(&self) -> bool {
        self.seat.map.told(self.seat.me).load(Ordering::Relaxed) != self.told
    }

    /// All links are about to be read.
    pub(crate) fn listen_to_links(&mut self) {
        self.told = self.seat.map.told(self.seat.me).load(Ordering::SeqCst);
    }

    /// There are notices on the links to all others.
    pub(crate) fn tell(&self) {
        let map = &self.seat.map;
        for rank in self.seat.others() {
            map.told(rank).fetch_add(1, Ordering::SeqCst);
            ring(map, rank);
        }
    }

    /// Whether this rank is in the middle of an operation that is done piece by piece.
    pub(crate) fn is_streaming(&self) -> bool {
        self.is_at(Stage::Streaming)
    }

    /// Whether this rank is in an operation.
    pub(crate) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Whether an operation is done piece by piece: then it is given the buffer for its result when it begins.
    pub(crate) fn streams(&self, operation: &Operation) -> bool {
        let way = Way::of(operation, self.seat.world, self.seat.map.is_crowded());
        way.piecewise().is_some()
    }

    /// Whether it is not done here, but over the links when all have agreed.
    pub(crate) fn only_agrees(
        &self,
        operation: &Operation,
        forced: bool,
        offsets: &[usize],
    ) -> bool {
        way::plan(&self.seat, operation, forced, offsets).0 == Way::Agree
    }

    /// How an operation is done, if it is done [without any pieces](Arena::streams) or links.
    #[inline]
    pub(crate) fn plan_short(&self, operation: &Operation, offsets: &[usize]) -> Option<Plan> {
        let plan = way::plan(&self.seat, operation, false, offsets);
        matches!(plan.0, Way::Flat | Way::Slices).then_some(plan)
    }

    #[inline]
    fn digest(&mut self, operation: &Operation) -> u64 {
        for known in self.digested.iter().flatten() {
            if known.0 == *operation {
                return known.1;
            }
        }
        let digest = digest(operation);
        self.digested = [Some((*operation, digest)), self.digested[0]];
        digest
    }

    /// Begins an operation, unless it is begun. `forced`: it is to go over the links. `offsets` are those of operations on
    /// different lengths. `result` is for operations that are done [piece by piece](Arena::streams), and may be empty for others.
    ///
    /// Fails if the system has not so much memory, or the operation does not come after the last one. Then the operation
    /// is over here.
    pub(crate) fn begin(
        &mut self,
        tag: Tag,
        operation: &Operation,
        forced: bool,
        offsets: &[usize],
        input: &[u8],
        result: &mut [u8],
    ) -> Result<Outcome, CollectiveError> {
        let plan = way::plan(&self.seat, operation, forced, offsets);
        if let Some(pieces) = plan.0.piecewise() {
            pieces.check(&self.seat, input.len(), result.len())?;
            self.keeps = false;
        }
        self.begin_planned(tag, operation, plan, input, result)
    }

    /// As [`Arena::begin`] in one buffer, for input and result, of what is done [piece by piece](Arena::streams). `keeps`: if it
    /// fails, the buffer is to be [as it was](Arena::undo).
    pub(crate) fn begin_in_place(
        &mut self,
        tag: Tag,
        operation: &Operation,
        forced: bool,
        data: &mut [u8],
        keeps: bool,
    ) -> Result<Outcome, CollectiveError> {
        let plan = way::plan(&self.seat, operation, forced, &[]);
        if let Way::Rounds(rounds) = plan.0 {
            rounds.check_in_place(data.len())?;
            self.keeps = keeps;
            if keeps && !self.kept.try_reserve(data.len()) {
                return Err(CollectiveError::Invalid {
                    reason: format!(
                        "{operation} takes {} bytes to keep its input until it has ended, more than this process can get: give \
                         less at a time, or the process more memory",
                        data.len()
                    ),
                });
            }
        }
        self.begin_planned(tag, operation, plan, &[], data)
    }

    /// Begins an all-reduce of buffers in the memory, of which `input` is the half that the caller has. As [`Arena::begin`]; also fails
    /// if a peer's buffer is nowhere.
    pub(crate) fn begin_buffers(
        &mut self,
        tag: Tag,
        operation: &Operation,
        buffers: Buffers,
        input: &[u8],
    ) -> Result<Outcome, CollectiveError> {
        let plan = Plan(Way::Buffers(buffers), 0);
        self.begin_planned(tag, operation, plan, input, &mut [])
    }

    /// As [`Arena::begin`], of an operation whose [plan](Arena::plan_short) is made.
    #[inline]
    pub(crate) fn begin_planned(
        &mut self,
        tag: Tag,
        operation: &Operation,
        Plan(way, bytes): Plan,
        input: &[u8],
        result: &mut [u8],
    ) -> Result<Outcome, CollectiveError> {
        self.enter(tag, operation, way, bytes)?;
        self.advance(input, result).inspect_err(|_| self.leave())
    }

    /// Memory for the caller's own data. After an operation of all ranks.
    pub(crate) fn buffer<T: Element>(
        &mut self,
        len: usize,
    ) -> Result<SharedBuffer<T>, CollectiveError> {
        self.reclaim();
        self.heap.buffer(len)
    }

    /// Buffers that were dropped after an operation failed are free when nobody can be in it any more. Nobody is in an
    /// earlier one: this rank has waited for that.
    fn reclaim(&self) {
        if !self.given.are_buffers_used(&self.seat) {
            self.heap.reclaim();
        }
    }

    fn enter(
        &mut self,
        tag: Tag,
        operation: &Operation,
        way: Way,
        bytes: usize,
    ) -> Result<(), CollectiveError> {
        self.leave();
        if let Some(last) = self.last.filter(|last| tag <= *last) {
            // Its flag would be an old one, which all ranks seem to have set already.
            return Err(CollectiveError::Invalid {
                reason: format!("{tag} does not come after {last}: calls come in growing order"),
            });
        }
        let place = if is_inline(&way, bytes) {
            0..0
        } else {
            self.given.stage(&self.seat, operation, bytes)?
        };
        let ticket = ticket(tag, self.digest(operation));
        self.last = Some(tag);
        self.given.enter();
        self.open = Some(Open {
            tag,
            ticket,
            operation: *operation,
            way,
            stage: Stage::Held,
            bytes,
            start: place.start,
        });
        Ok(())
    }

    /// Goes on as far as it can without waiting. `input` and `result` are those of the beginning.
    #[inline]
    pub(crate) fn advance(
        &mut self,
        input: &[u8],
        result: &mut [u8],
    ) -> Result<Outcome, CollectiveError> {
        let Some(open) = &self.open else {
            return Ok(Outcome::Ready);
        };
        if open.stage == Stage::Held {
            if self.given.is_held(&self.seat, open) {
                return Ok(Outcome::Pending);
            }
            let open = *open;
            self.give(&open, input);
            self.comes_to(Stage::Given);
        }
        if let Some(open) = &self.open
            && open.stage == Stage::Given
        {
            if !self.all_have_given(open) {
                return Ok(Outcome::Pending);
            }
            self.given.sync();
            match open.way {
                Way::Agree => self.comes_to(Stage::Elsewhere),
                Way::Flat => self.comes_to(Stage::Ready),
                Way::Stream(_) | Way::Rounds(_) => self.comes_to(Stage::Streaming),
                Way::Slices | Way::Buffers(_) => self.combine_own_slice(input)?,
            }
        }
        if let Some(open) = &self.open
            && open.stage == Stage::Sliced
        {
            if !self.all_have_sliced(open) {
                return Ok(Outcome::Pending);
            }
            self.comes_to(Stage::Ready);
        }
        if self.is_streaming() {
            if !self.go_through_pieces(input, result) {
                return Ok(Outcome::Pending);
            }
            self.comes_to(Stage::Ready);
        }
        if self.is_at(Stage::Elsewhere) {
            self.leave();
            return Ok(Outcome::Elsewhere);
        }
        Ok(Outcome::Ready)
    }

    #[inline]
    fn comes_to(&mut self, stage: Stage) {
        if let Some(open) = &mut self.open {
            open.stage = stage;
        }
    }

    #[inline]
    fn is_at(&self, stage: Stage) -> bool {
        self.open.as_ref().is_some_and(|open| open.stage == stage)
    }

    fn give(&mut self, open: &Open, input: &[u8]) {
        let seat = &self.seat;
        match open.way {
            Way::Agree => {}
            Way::Stream(_) | Way::Rounds(_) => {
                let begun = open.way.piecewise().map(|pieces| pieces.begin(seat));
                self.pieces = begun.unwrap_or_default();
            }
            Way::Buffers(Buffers { input, output }) => {
                let mut words = [0; 16];
                words[..8].copy_from_slice(&(input as u64).to_le_bytes());
                words[8..].copy_from_slice(&(output as u64).to_le_bytes());
                let place = Place::Inline(parity(open.tag));
                seat.map.write(seat.me, place, 0, &words);
            }
            Way::Flat | Way::Slices => open.write(seat, &mut self.blocks, input),
        }
        self.given.give(seat, open);
    }

    /// Combines the slice of this rank, and says so.
    fn combine_own_slice(&mut self, input: &[u8]) -> Result<(), CollectiveError> {
        let Some(open) = self.open else { return Ok(()) };
        let (seat, blocks) = (&self.seat, &mut self.blocks);
        match open.way {
            Way::Buffers(own) => combine_buffers(seat, blocks, &open, own, input)?,
            _ => combine_slice(seat, blocks, &open, input),
        }
        self.comes_to(Stage::Sliced);
        rules::slice(self.seat.map.second(self.seat.me), open.ticket);
        self.seat.ring_all();
        Ok(())
    }

    /// Returns whether nothing is left to do.
    fn go_through_pieces(&mut self, input: &[u8], result: &mut [u8]) -> bool {
        let Some(open) = &self.open else { return true };
        let work = Work {
            seat: &self.seat,
            open,
            blocks: &mut self.blocks,
            kept: self.keeps.then_some(&mut self.kept),
        };
        (open.way.piecewise())
            .is_none_or(|pieces| pieces.advance(work, &mut self.pieces, input, result))
    }

    #[inline]
    fn all_have_given(&self, open: &Open) -> bool {
        let (parity, map) = (parity(open.tag), &self.seat.map);
        (self.seat.others()).all(|rank| rules::has_given(map.front(rank, parity), open.ticket))
    }

    #[inline]
    fn all_have_sliced(&self, open: &Open) -> bool {
        let map = &self.seat.map;
        let seconds = self.seat.others().map(|rank| map.second(rank));
        rules::all_have_sliced(seconds, open.ticket)
    }

    /// Waits a little, as long as it is cheaper than to sleep.
    #[inline]
    pub(crate) fn look(
        &mut self,
        input: &[u8],
        result: &mut [u8],
    ) -> Result<Outcome, CollectiveError> {
        loop {
            let outcome = self.advance(input, result)?;
            if outcome != Outcome::Pending || !self.linger() {
                return Ok(outcome);
            }
        }
    }

    /// Whether there is something to hear besides what is awaited.
    pub(crate) fn is_other_news(&self) -> bool {
        self.is_told() || self.is_over.load(Ordering::Relaxed)
    }

    /// Waits a little for what is awaited. Returns whether it came.
    pub(crate) fn linger(&self) -> bool {
        let patience = &self.waits.patience;
        let Some(open) = &self.open else { return true };
        let is_other_news = || self.is_other_news();
        match (open.stage, open.way.piecewise()) {
            (Stage::Given, _) => patience.look(|| self.all_have_given(open), is_other_news),
            (Stage::Sliced, _) => patience.look(|| self.all_have_sliced(open), is_other_news),
            (Stage::Streaming, Some(pieces)) => patience.look(
                || pieces.may_advance(&self.seat, self.pieces),
                is_other_news,
            ),
            _ => patience.look(|| !self.given.is_held(&self.seat, open), is_other_news),
        }
    }

    /// From here on, news wake who waits: this thread in [`Arena::sleep`], or the task.
    pub(crate) fn listen(&mut self, blocking: bool, cx: &Context<'_>) {
        self.waits.listen(blocking, cx.waker());
    }

    pub(crate) fn ignore(&self) {
        self.waits.ignore();
    }

    pub(crate) fn sleep(&self, until: Instant) {
        self.waits.sleep(until);
    }

    /// Whether nobody rings when what is waited for comes: it has to be looked for.
    pub(crate) fn must_poll(&self) -> bool {
        self.is_at(Stage::Held)
    }

    /// Puts back into the buffer of an operation that is given up what was there.
    pub(crate) fn undo(&self, data: &mut [u8]) {
        if let Some(open) = &self.open
            && let Way::Rounds(rounds) = open.way
            && open.stage == Stage::Streaming
            && self.keeps
        {
            rounds.undo(self.pieces, self.kept.bytes(), data);
        }
    }

    /// Leaves the operation: this rank touches others' data no more. One that has not ended is given up by that.
    pub(crate) fn leave(&mut self) {
        let Some(open) = &self.open else { return };
        let (parity, ticket, stage) = (parity(open.tag), open.ticket, open.stage);
        self.open = None;
        match stage {
            // Flag and `done` are still those of the operation before.
            Stage::Held => return,
            Stage::Given | Stage::Sliced | Stage::Streaming => {
                if stage == Stage::Sliced {
                    // Its buffer is the caller's again, and others may still combine what is in it.
                    rules::take_back(self.seat.map.second(self.seat.me), ticket);
                    // What the caller writes from here on is not atomic: it comes after that, too.
                    fence(Ordering::SeqCst);
                }
                rules::give_up(self.seat.map.front(self.seat.me, parity), ticket);
            }
            // The others may still see the flag, and end well, too.
            Stage::Ready | Stage::Elsewhere => {}
        }
        rules::leave(self.seat.map.done(self.seat.me, parity), ticket);
        // The next operation writes the other line: nobody reads that any more, and this rank gets it back meanwhile.
        self.seat.map.expect_write(self.seat.me, 1 - parity);
    }

    /// Gives the memory of long operations back.
    pub(crate) fn release(&mut self) {
        if self.open.is_none() {
            self.given.release(&self.seat);
            self.kept.release();
        }
        self.reclaim();
        self.blocks.release();
    }

    /// Where so many bytes of this rank will be in its area, if its next operation gives them.
    #[cfg(test)]
    pub(super) fn next_place(&self, bytes: usize) -> usize {
        self.given.next_place(bytes)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        self.leave();
    }
}
