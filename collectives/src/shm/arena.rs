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

mod combine;
mod give;
mod rounds;
mod staging;
mod store;
mod stream;
mod watch;
mod way;

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::task::{Context, Waker};
use std::time::Instant;

use super::buffer::{Heap, SharedBuffer};
use super::caches;
use super::map::{Map, Place};
use super::rules;
use super::ticket::{digest, parity, ticket};
use super::wait::{Bell, Patience, Porter, ring};
use crate::element::Element;
use crate::error::CollectiveError;
use crate::operation::{Operation, Tag};
use crate::scratch::Scratch;
use give::is_inline;
use staging::Staging;
pub(crate) use store::Own;
use stream::Pieces;
use way::Way;
pub use way::way_in_shared_memory;
pub(crate) use way::{Buffers, Plan};

/// Bytes that are combined, or converted, at once: those of two ranks stay in the first cache.
const BLOCK: usize = 8 << 10;

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
    pub(crate) map: Arc<Map>,
    me: usize,
    world: usize,
    bell: Arc<Bell>,
    pub(crate) waker: Waker,
    porter: Porter,
    heard: u32,
    patience: Patience,
    open: Option<Open>,
    /// The last operation that was entered.
    last: Option<Tag>,
    /// How many were entered.
    index: u64,
    /// The last one in which all ranks were seen: they have left all before.
    synced: u64,
    fronts: [Option<Used>; 2],
    staging: Staging,
    /// The last operation that [counts pieces](Pieces).
    counted: Option<Used>,
    buffers: Option<Used>,
    recorded: [Option<Operation>; 2],
    /// Of the last two different operations.
    digested: [Option<(Operation, u64)>; 2],
    blocks: Scratch,
    pieces: Pieces,
    /// What was in the caller's buffer, if it is kept.
    kept: Scratch,
    keeps: bool,
    populated: usize,
    told: u64,
    heap: Heap,
}

impl Arena {
    pub(crate) fn new(map: Arc<Map>, me: u32) -> Self {
        let (me, world) = (me as usize, map.world());
        let bell = Bell::new(Arc::clone(&map), me);
        Self {
            me,
            world,
            waker: Waker::from(Arc::clone(&bell)),
            porter: Porter::new(Arc::clone(&bell)),
            bell,
            heard: 0,
            patience: Patience::of(world),
            open: None,
            last: None,
            index: 0,
            synced: 0,
            fronts: [None; 2],
            staging: Staging::new(world, caches::second(), caches::last()),
            counted: None,
            buffers: None,
            recorded: [None; 2],
            digested: [None; 2],
            blocks: Scratch::default(),
            pieces: Pieces::default(),
            kept: Scratch::default(),
            keeps: false,
            populated: 0,
            told: 0,
            heap: Heap::new(Arc::clone(&map), me),
            map,
        }
    }

    fn others(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        let me = self.me;
        (0..self.world).filter(move |rank| *rank != me)
    }

    /// Whether a peer put a notice on the link to this rank since the last [`Arena::listen_to_links`].
    #[inline]
    pub(crate) fn is_told(&self) -> bool {
        self.map.told(self.me).load(Ordering::Relaxed) != self.told
    }

    /// All links are about to be read.
    pub(crate) fn listen_to_links(&mut self) {
        self.told = self.map.told(self.me).load(Ordering::SeqCst);
    }

    /// There are notices on the links to all others.
    pub(crate) fn tell(&self) {
        for rank in self.others() {
            self.map.told(rank).fetch_add(1, Ordering::SeqCst);
            ring(&self.map, rank);
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
        let plan = self.plan(operation, forced, offsets);
        self.begin_planned(tag, operation, plan, input, result)
    }

    /// As [`Arena::begin`], if it is done without any [pieces](Arena::streams) or links.
    #[inline]
    pub(crate) fn begin_short(
        &mut self,
        tag: Tag,
        operation: &Operation,
        plan: Plan,
        input: &[u8],
    ) -> Result<Outcome, CollectiveError> {
        self.begin_planned(tag, operation, plan, input, &mut [])
    }

    #[inline]
    fn begin_planned(
        &mut self,
        tag: Tag,
        operation: &Operation,
        Plan(way, bytes): Plan,
        input: &[u8],
        result: &mut [u8],
    ) -> Result<Outcome, CollectiveError> {
        match &way {
            Way::Stream(stream) => self.check_stream(stream, input, result)?,
            Way::Rounds(rounds) => {
                rounds.check(self.me, input.len(), result.len())?;
                self.keeps = false;
            }
            _ => {}
        }
        self.enter(tag, operation, way, bytes)?;
        self.advance(input, result).inspect_err(|_| self.leave())
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
        self.enter(tag, operation, Way::Buffers(buffers), 0)?;
        self.advance(input, &mut []).inspect_err(|_| self.leave())
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
        if !self.buffers.is_some_and(|used| self.is_read(used)) {
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
        let place = if is_inline(way, bytes) {
            0..0
        } else {
            self.stage(operation, bytes)?
        };
        let ticket = ticket(tag, self.digest(operation));
        self.last = Some(tag);
        self.index += 1;
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
            if self.is_held(open) {
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
            self.synced = self.index;
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

    /// Combines the slice of this rank, and says so.
    fn combine_own_slice(&mut self, input: &[u8]) -> Result<(), CollectiveError> {
        let Some(open) = self.open else { return Ok(()) };
        match open.way {
            Way::Buffers(own) => self.combine_buffers(&open, own, input)?,
            _ => self.combine_slice(&open, input),
        }
        self.comes_to(Stage::Sliced);
        rules::slice(self.map.second(self.me), open.ticket);
        self.ring_all();
        Ok(())
    }

    /// Returns whether nothing is left to do.
    fn go_through_pieces(&mut self, input: &[u8], result: &mut [u8]) -> bool {
        let Some(open) = self.open else { return true };
        match &open.way {
            Way::Stream(stream) => self.stream(&open.operation, stream, input, result),
            Way::Rounds(rounds) => self.go_rounds(&open.operation, *rounds, input, result),
            _ => true,
        }
    }

    fn ring_all(&self) {
        for rank in self.others() {
            ring(&self.map, rank);
        }
    }

    #[inline]
    fn all_have_given(&self, open: &Open) -> bool {
        let parity = parity(open.tag);
        self.others()
            .all(|rank| rules::has_given(self.map.front(rank, parity), open.ticket))
    }

    #[inline]
    fn all_have_sliced(&self, open: &Open) -> bool {
        let seconds = self.others().map(|rank| self.map.second(rank));
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

    /// Waits a little for what is awaited. Returns whether it came.
    pub(crate) fn linger(&self) -> bool {
        let patience = &self.patience;
        let Some(open) = &self.open else { return true };
        match open.stage {
            Stage::Given => patience.look(|| self.all_have_given(open)),
            Stage::Sliced => patience.look(|| self.all_have_sliced(open)),
            Stage::Streaming => patience.look(|| match &open.way {
                Way::Stream(stream) => self.can_stream(stream),
                Way::Rounds(rounds) => self.can_go_round(*rounds),
                _ => true,
            }),
            _ => patience.look(|| !self.is_held(open)),
        }
    }

    /// From here on, news wake who waits: this thread in [`Arena::sleep`], or the task.
    pub(crate) fn listen(&mut self, blocking: bool, cx: &Context<'_>) {
        if blocking {
            self.heard = self.bell.listen();
        } else if let Err(error) = self.porter.listen(cx.waker()) {
            // The task looks again now and then.
            tracing::warn!(%error, "no thread to wait for shared memory");
        }
    }

    pub(crate) fn ignore(&self) {
        self.bell.ignore();
    }

    pub(crate) fn sleep(&self, until: Instant) {
        self.bell.wait(self.heard, until);
    }

    /// Whether nobody rings when what is waited for comes: it has to be looked for.
    pub(crate) fn must_poll(&self) -> bool {
        self.is_at(Stage::Held)
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
                    rules::take_back(self.map.second(self.me), ticket);
                    // What the caller writes from here on is not atomic: it comes after that, too.
                    fence(Ordering::SeqCst);
                }
                rules::give_up(self.map.front(self.me, parity), ticket);
            }
            // The others may still see the flag, and end well, too.
            Stage::Ready | Stage::Elsewhere => {}
        }
        rules::leave(self.map.done(self.me, parity), ticket);
        // The next operation writes the other line: nobody reads that any more, and this rank gets it back meanwhile.
        self.map.expect_write(self.me, 1 - parity);
    }

    /// Gives the memory of long operations back.
    pub(crate) fn release(&mut self) {
        let is_read = |used| self.is_read(used);
        if self.open.is_none() && self.populated > 0 && !self.staging.all().any(is_read) {
            self.map.release(self.me, Place::Area, 0, self.populated);
            self.populated = 0;
        }
        if self.open.is_none() {
            self.kept.release();
        }
        self.reclaim();
        self.blocks.release();
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        self.leave();
    }
}
