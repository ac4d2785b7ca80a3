//! Operations in the memory that all ranks of a group map.
//!
//! In every operation each rank gives its data (a copy, in memory that it alone writes), sets its flag, and waits for the
//! flags of all. That all flags are the same word says that all ask for the same. From there on there are two ways:
//!
//! * *flat*: every rank combines, or copies, what it needs from where the others gave it. One flag.
//! * *slices*, for long reductions: each rank combines its slice of all inputs into its own data, sets a second flag, and
//!   waits for those of all; then everyone copies all slices.
//!
//! The caller's buffer is written in the end, when nothing is waited for any more: an operation that fails leaves it
//! as it was (F-2).

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Waker};
use std::time::Instant;

use kolo_transport::ids::Rank;

use super::map::{AREA, INLINE, MOST_RANKS, Map, Place, SLOT};
use super::rules;
use super::ticket::{self, digest, parity, read_record, ticket, write_record};
use super::wait::{Bell, Patience, Porter, ring};
use crate::element::{self, Element};
use crate::engine::{element_size, finish_of};
use crate::error::CollectiveError;
use crate::operation::{Operation, OperationKind, ReduceOp, Tag};
use crate::reduce::{self, Store};
use crate::schedule::{Algorithm, Counts, Rows};
use crate::scratch::Scratch;

/// Bytes that are combined at once, of all ranks together: they stay in the first cache.
const BLOCK: usize = 16 << 10;
/// Reductions whose inputs have more bytes than this, all ranks' together, are done in slices.
const FLAT: usize = 96 << 10;

/// How an operation is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Nothing but agreement: the operation itself goes over the links.
    Agree,
    Flat,
    Slices,
    /// Slices, of buffers that are in the memory: see [`super::buffer`].
    Buffers(Buffers),
}

/// The two halves of a buffer, as places in the heap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Buffers {
    pub(crate) input: usize,
    pub(crate) output: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Somebody still reads what this rank gave before.
    Held,
    /// This rank's data are given; others' are waited for.
    Given,
    /// This rank's slice is done; others' are waited for.
    Sliced,
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
    /// Operations that were entered.
    index: u64,
    /// The last one in which all ranks were seen: they have left all before.
    synced: u64,
    fronts: [Option<Used>; 2],
    area: Option<Used>,
    buffers: Option<Used>,
    recorded: [Option<Operation>; 2],
    /// Of the last two different operations.
    digested: [Option<(Operation, u64)>; 2],
    blocks: Scratch,
    populated: usize,
    told: u64,
    pub(crate) heap: super::buffer::Heap,
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
            index: 0,
            synced: 0,
            fronts: [None; 2],
            area: None,
            buffers: None,
            recorded: [None; 2],
            digested: [None; 2],
            blocks: Scratch::default(),
            populated: 0,
            told: 0,
            heap: super::buffer::Heap::new(Arc::clone(&map), me),
            map,
        }
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
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

    /// How an operation is done, and how many bytes this rank gives.
    fn plan(&self, operation: &Operation, forced: bool, offsets: &[usize]) -> (Way, usize) {
        let agree = (Way::Agree, 0);
        if forced || operation.is_join() || operation.reduce == Some(ReduceOp::Adasum) {
            return agree;
        }
        let size = element_size(operation);
        let Some(bytes) = usize::try_from(operation.count)
            .ok()
            .and_then(|count| count.checked_mul(size))
            .filter(|bytes| *bytes <= AREA / self.world)
        else {
            return agree;
        };
        let is_root = operation.root == Some(self.me as u32);
        let only_root = |bytes| if is_root { bytes } else { 0 };
        match operation.kind {
            OperationKind::AllReduce | OperationKind::Reduce if bytes * self.world > FLAT => {
                (Way::Slices, bytes)
            }
            OperationKind::AllReduce
            | OperationKind::Reduce
            | OperationKind::ReduceScatter
            | OperationKind::AllGather
            | OperationKind::AllGatherCounts
            | OperationKind::Gather
            | OperationKind::Barrier => (Way::Flat, bytes),
            OperationKind::Broadcast => (Way::Flat, only_root(bytes)),
            OperationKind::Scatter => (Way::Flat, only_root(bytes * self.world)),
            OperationKind::AllToAll => (Way::Flat, bytes * self.world),
            OperationKind::AllGatherVarcount | OperationKind::GatherVarcount => {
                match offsets.get(self.me..self.me + 2) {
                    Some(&[start, end]) => (Way::Flat, (end - start) * size),
                    _ => agree,
                }
            }
            _ => agree,
        }
    }

    /// Whether it is not done here, but over the links when all have agreed.
    pub(crate) fn only_agrees(
        &self,
        operation: &Operation,
        forced: bool,
        offsets: &[usize],
    ) -> bool {
        self.plan(operation, forced, offsets).0 == Way::Agree
    }

    /// Whether this rank is in an operation.
    pub(crate) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Where so many bytes of an operation are.
    fn place(way: Way, parity: usize, bytes: usize) -> Place {
        if way == Way::Slices || bytes > SLOT {
            Place::Area
        } else if bytes <= INLINE {
            Place::Inline(parity)
        } else {
            Place::Slot(parity)
        }
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
    /// different lengths.
    ///
    /// Fails if the system has not so much memory.
    pub(crate) fn begin(
        &mut self,
        tag: Tag,
        operation: &Operation,
        forced: bool,
        offsets: &[usize],
        input: &[u8],
    ) -> Result<Outcome, CollectiveError> {
        let (way, bytes) = self.plan(operation, forced, offsets);
        self.enter(tag, operation, way, bytes)?;
        self.advance(input)
    }

    /// Begins an all-reduce of buffers in the memory.
    pub(crate) fn begin_buffers(
        &mut self,
        tag: Tag,
        operation: &Operation,
        buffers: Buffers,
    ) -> Result<Outcome, CollectiveError> {
        self.enter(tag, operation, Way::Buffers(buffers), 0)?;
        self.advance(&[])
    }

    fn enter(
        &mut self,
        tag: Tag,
        operation: &Operation,
        way: Way,
        bytes: usize,
    ) -> Result<(), CollectiveError> {
        self.leave();
        if Self::place(way, 0, bytes) == Place::Area && bytes > self.populated {
            self.map
                .populate(self.me, Place::Area, 0, bytes)
                .map_err(|error| CollectiveError::Invalid {
                    reason: format!(
                        "{operation} takes {bytes} bytes of shared memory, which the system does not give ({error}): \
                         give less at a time, or the host more memory"
                    ),
                })?;
            self.populated = bytes;
        }
        let ticket = ticket(tag, self.digest(operation));
        self.index += 1;
        self.open = Some(Open {
            tag,
            ticket,
            operation: *operation,
            way,
            stage: Stage::Held,
            bytes,
        });
        Ok(())
    }

    /// A rank that may still read what was given at that time.
    fn holder(&self, used: Option<Used>) -> Option<usize> {
        let used = used.filter(|used| used.index >= self.synced)?;
        self.others().find(|rank| {
            let flag = self.map.front(*rank, used.parity);
            rules::holds(flag, self.map.done(*rank, used.parity), used.ticket)
        })
    }

    /// Whether what this operation gives can't be given yet.
    fn is_held(&self, open: &Open) -> bool {
        let parity = parity(open.tag);
        let before = match open.way {
            Way::Buffers(_) => self.buffers,
            way if Self::place(way, parity, open.bytes) == Place::Area => self.area,
            _ => None,
        };
        self.holder(self.fronts[parity])
            .or_else(|| self.holder(before))
            .is_some()
    }

    /// Goes on as far as it can without waiting. `input` is that of the beginning.
    #[inline]
    pub(crate) fn advance(&mut self, input: &[u8]) -> Result<Outcome, CollectiveError> {
        let Some(mut open) = self.open else {
            return Ok(Outcome::Ready);
        };
        if open.stage == Stage::Held {
            if self.is_held(&open) {
                return Ok(Outcome::Pending);
            }
            self.give(&open, input);
            open.stage = Stage::Given;
            self.open = Some(open);
        }
        if open.stage == Stage::Given {
            if !self.all_have_given(&open) {
                return Ok(Outcome::Pending);
            }
            self.synced = self.index;
            open.stage = match open.way {
                Way::Agree => Stage::Elsewhere,
                Way::Flat => Stage::Ready,
                Way::Slices => {
                    self.combine_slice(&open, input);
                    Stage::Sliced
                }
                Way::Buffers(_) => {
                    self.combine_buffers(&open)?;
                    Stage::Sliced
                }
            };
            self.open = Some(open);
            if open.stage == Stage::Sliced {
                self.map.second(self.me).swap(open.ticket, Ordering::SeqCst);
                self.ring_all();
            }
        }
        if open.stage == Stage::Sliced {
            let all = self
                .others()
                .all(|rank| self.map.second(rank).load(Ordering::SeqCst) == open.ticket);
            if !all {
                return Ok(Outcome::Pending);
            }
            open.stage = Stage::Ready;
            self.open = Some(open);
        }
        if open.stage == Stage::Elsewhere {
            self.leave();
            return Ok(Outcome::Elsewhere);
        }
        Ok(Outcome::Ready)
    }

    fn give(&mut self, open: &Open, input: &[u8]) {
        let (parity, bytes) = (parity(open.tag), open.bytes);
        let used = Used {
            index: self.index,
            ticket: open.ticket,
            parity,
        };
        let operation = &open.operation;
        match open.way {
            Way::Agree => {}
            Way::Buffers(Buffers { input, output }) => {
                self.buffers = Some(used);
                let mut words = [0; 16];
                words[..8].copy_from_slice(&(input as u64).to_le_bytes());
                words[8..].copy_from_slice(&(output as u64).to_le_bytes());
                self.map.write(self.me, Place::Inline(parity), 0, &words);
            }
            way => {
                let place = Self::place(way, parity, bytes);
                if place == Place::Area {
                    self.area = Some(used);
                }
                if way == Way::Slices && is_given_as_it_is(operation) {
                    // Nobody else needs this rank's own slice.
                    let own = self.slice(self.me, bytes);
                    self.map.write(self.me, place, 0, &input[..own.start]);
                    self.map
                        .write(self.me, place, own.end, &input[own.end..bytes]);
                } else if is_given_as_it_is(operation) {
                    self.map.write(self.me, place, 0, &input[..bytes]);
                } else {
                    self.give_converted(operation, place, bytes, input);
                }
            }
        }
        self.fronts[parity] = Some(used);
        let known = self.recorded[parity] == Some(*operation);
        write_record(&self.map, self.me, open.tag, operation, !known);
        self.recorded[parity] = Some(*operation);
        rules::give(self.map.front(self.me, parity), open.ticket);
        self.ring_all();
    }

    fn give_converted(&mut self, operation: &Operation, place: Place, bytes: usize, input: &[u8]) {
        let Some(dtype) = operation.dtype else { return };
        let wire = operation.wire.unwrap_or(dtype);
        self.blocks.reserve(BLOCK);
        for at in (0..bytes).step_by(BLOCK) {
            let count = BLOCK.min(bytes - at);
            let block = &mut self.blocks.bytes_mut()[..count];
            let (from, many) = (
                at / wire.size() * dtype.size(),
                count / wire.size() * dtype.size(),
            );
            let from = &input[from..from + many];
            if wire == dtype {
                block.copy_from_slice(from);
            } else {
                reduce::convert(wire, block, dtype, from);
            }
            if operation.reduce.is_some() {
                reduce::scale(wire, block, operation.prescale);
            }
            self.map.write(self.me, place, at, block);
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

    /// The part of a reduction that a rank combines, in bytes.
    fn slice(&self, rank: usize, length: usize) -> std::ops::Range<usize> {
        let each = length.div_ceil(self.world).next_multiple_of(64);
        (rank * each).min(length)..((rank + 1) * each).min(length)
    }

    fn length(operation: &Operation) -> usize {
        operation.count as usize * element_size(operation)
    }

    fn combine_slice(&mut self, open: &Open, input: &[u8]) {
        let range = self.slice(self.me, Self::length(&open.operation));
        let map = Arc::clone(&self.map);
        let me = self.me;
        let own = is_given_as_it_is(&open.operation).then_some(input);
        self.combine(
            &open.operation,
            |_| Place::Area,
            own,
            range,
            |at, block| {
                map.write(me, Place::Area, at, block);
            },
        );
    }

    fn combine_buffers(&mut self, open: &Open) -> Result<(), CollectiveError> {
        let length = Self::length(&open.operation);
        let parity = parity(open.tag);
        let mut places = [(0, 0); MOST_RANKS as usize];
        for (rank, place) in places.iter_mut().enumerate().take(self.world) {
            let word = |index| self.map.inline(rank, parity, index).load(Ordering::Relaxed);
            let (input, output) = (word(0) as usize, word(1) as usize);
            if !super::buffer::is_inside(input, length) || !super::buffer::is_inside(output, length)
            {
                return Err(CollectiveError::Protocol {
                    rank: Rank(rank as u32),
                    reason: format!(
                        "its buffer of {length} bytes at {input} and {output} is not in the shared memory"
                    ),
                });
            }
            *place = (input, output);
        }
        let range = self.slice(self.me, length);
        let map = Arc::clone(&self.map);
        let world = self.world;
        let streaming = length >= streams_from();
        let input = |rank: usize| Place::Heap(places[rank].0);
        self.combine(&open.operation, input, None, range, |at, block| {
            for (rank, place) in places.iter().enumerate().take(world) {
                if streaming {
                    map.write_streaming(rank, Place::Heap(place.1), at, block);
                } else {
                    map.write(rank, Place::Heap(place.1), at, block);
                }
            }
        });
        Map::fence();
        Ok(())
    }

    /// Combines a range of all ranks' data, block by block, in rank order, and finishes it. `own` are this rank's data, if
    /// they are not in their place.
    fn combine(
        &mut self,
        operation: &Operation,
        place: impl Fn(usize) -> Place,
        own: Option<&[u8]>,
        range: std::ops::Range<usize>,
        mut put: impl FnMut(usize, &[u8]),
    ) {
        let (Some(dtype), Some(op), Some(finish)) = (
            operation.wire_type(),
            operation.reduce,
            finish_of(operation, self.world as u32),
        ) else {
            return;
        };
        let world = self.world;
        let each = (BLOCK / world).max(512) / 64 * 64;
        self.blocks.reserve((world + 1) * each);
        let (result, inputs) = self.blocks.bytes_mut().split_at_mut(each);
        let me = self.me;
        for at in range.clone().step_by(each) {
            let length = each.min(range.end - at);
            for (rank, block) in inputs.chunks_mut(each).enumerate().take(world) {
                if own.is_none() || rank != me {
                    self.map.read(rank, place(rank), at, &mut block[..length]);
                }
            }
            let part = |rank: usize| match own {
                Some(own) if rank == me => &own[at..at + length],
                _ => &inputs[rank * each..rank * each + length],
            };
            let result = &mut result[..length];
            if world == 2 {
                reduce::combine_into(dtype, op, result, part(0), part(1));
                if !finish.is_nothing() {
                    reduce::finish(dtype, result, &finish);
                }
            } else {
                let mut parts: [&[u8]; MOST_RANKS as usize] = [&[]; MOST_RANKS as usize];
                for (rank, place) in parts.iter_mut().enumerate().take(world) {
                    *place = part(rank);
                }
                reduce::combine_many(dtype, op, result, &parts[..world], &finish, Store::Cached);
            }
            put(at, result);
        }
    }

    /// Copies the result to the caller, after [`Outcome::Ready`], and leaves the operation.
    pub(crate) fn store<T: Element>(&mut self, offsets: &[usize], result: &mut [T]) {
        let Some(open) = self.open.filter(|open| open.stage == Stage::Ready) else {
            return;
        };
        let operation = &open.operation;
        let size = element_size(operation);
        let count = operation.count as usize;
        let root = operation.root.unwrap_or(0) as usize;
        let is_root = self.me == root;
        match operation.kind {
            OperationKind::Reduce | OperationKind::Gather | OperationKind::GatherVarcount
                if !is_root => {}
            OperationKind::AllReduce | OperationKind::Reduce => match open.way {
                Way::Flat => self.store_combined(&open, 0..count, result),
                Way::Slices => {
                    let length = count * size;
                    for rank in 0..self.world {
                        let slice = self.slice(rank, length);
                        let place = &mut result[slice.start / size..slice.end / size];
                        self.copy(&open, rank, Place::Area, slice.start, place, length);
                    }
                }
                Way::Agree | Way::Buffers(_) => {}
            },
            OperationKind::ReduceScatter => {
                let rows = operation.rows.max(1) as usize;
                let split = Rows {
                    rows,
                    width: count / rows,
                    world: self.world as u32,
                };
                let start = split.before(self.me as u32);
                let end = start + split.of(self.me as u32);
                self.store_combined(&open, start..end, result);
            }
            OperationKind::Broadcast => self.part(&open, root, count, 0, result),
            OperationKind::AllGather | OperationKind::AllGatherCounts | OperationKind::Gather => {
                for (rank, place) in result.chunks_mut(count.max(1)).enumerate().take(self.world) {
                    self.part(&open, rank, count, 0, place);
                }
            }
            OperationKind::AllGatherVarcount | OperationKind::GatherVarcount => {
                for rank in 0..self.world {
                    let (start, end) = (offsets[rank], offsets[rank + 1]);
                    self.part(&open, rank, end - start, 0, &mut result[start..end]);
                }
            }
            OperationKind::Scatter => {
                let at = self.me * count;
                self.part(&open, root, count * self.world, at, &mut result[..count]);
            }
            OperationKind::AllToAll => {
                for (rank, place) in result.chunks_mut(count.max(1)).enumerate().take(self.world) {
                    self.part(&open, rank, count * self.world, self.me * count, place);
                }
            }
            _ => {}
        }
        self.leave();
    }

    /// Copies elements from `at` on of those that a rank gave, which are `given` in all.
    fn part<T: Element>(
        &mut self,
        open: &Open,
        rank: usize,
        given: usize,
        at: usize,
        into: &mut [T],
    ) {
        let size = element_size(&open.operation);
        let place = Self::place(open.way, parity(open.tag), given * size);
        let all = into.len() * size * self.world;
        self.copy(open, rank, place, at * size, into, all);
    }

    fn copy<T: Element>(
        &mut self,
        open: &Open,
        rank: usize,
        place: Place,
        at: usize,
        into: &mut [T],
        all: usize,
    ) {
        let wire = open.operation.wire;
        if let (None, Some(into)) = (wire, element::bytes_of_mut(into))
            && (!matches!(place, Place::Inline(_)) || at.is_multiple_of(8))
        {
            if all / self.world >= streams_from() {
                self.map.read_streaming(rank, place, at, into);
            } else {
                self.map.read(rank, place, at, into);
            }
            return;
        }
        let size = element_size(&open.operation);
        self.blocks.reserve(BLOCK);
        let blocks = self.blocks.bytes_mut();
        if matches!(place, Place::Inline(_)) {
            // Words are read as a whole.
            self.map.read(rank, place, 0, &mut blocks[..INLINE]);
            let bytes = into.len() * size;
            // To where it is aligned for its type.
            blocks.copy_within(at..at + bytes, 0);
            element::store(into, wire, &blocks[..bytes]);
            return;
        }
        let each = BLOCK / size;
        for (index, into) in into.chunks_mut(each).enumerate() {
            let block = &mut blocks[..into.len() * size];
            self.map.read(rank, place, at + index * each * size, block);
            element::store(into, wire, block);
        }
    }

    /// Combines elements of what all gave, into the caller's buffer.
    fn store_combined<T: Element>(
        &mut self,
        open: &Open,
        range: std::ops::Range<usize>,
        result: &mut [T],
    ) {
        let operation = &open.operation;
        let size = element_size(operation);
        let place = Self::place(open.way, parity(open.tag), operation.count as usize * size);
        let bytes = range.start * size..range.end * size;
        let start = range.start;
        if matches!(place, Place::Inline(_)) && !bytes.start.is_multiple_of(8) {
            // Words are read as a whole.
            let mut all = [T::default(); INLINE];
            let wire = operation.wire;
            self.combine(
                operation,
                |_| place,
                None,
                0..bytes.end,
                |at, block| {
                    let at = at / size;
                    element::store(&mut all[at..at + block.len() / size], wire, block);
                },
            );
            result[..range.len()].copy_from_slice(&all[range]);
            return;
        }
        let wire = operation.wire;
        self.combine(
            operation,
            |_| place,
            None,
            bytes,
            |at, block| {
                let at = at / size - start;
                element::store(&mut result[at..at + block.len() / size], wire, block);
            },
        );
    }

    /// Waits a little, as long as it is cheaper than to sleep.
    #[inline]
    pub(crate) fn look(&mut self, input: &[u8]) -> Result<Outcome, CollectiveError> {
        loop {
            let outcome = self.advance(input)?;
            if outcome != Outcome::Pending || !self.linger() {
                return Ok(outcome);
            }
        }
    }

    /// Waits a little for what is awaited. Returns whether it came.
    pub(crate) fn linger(&self) -> bool {
        let patience = &self.patience;
        let Some(open) = self.open else { return true };
        match open.stage {
            Stage::Given => patience.look(|| self.all_have_given(&open)),
            Stage::Sliced => patience.look(|| {
                self.others()
                    .all(|rank| self.map.second(rank).load(Ordering::SeqCst) == open.ticket)
            }),
            _ => patience.look(|| !self.is_held(&open)),
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
        self.open.is_some_and(|open| open.stage == Stage::Held)
    }

    /// Whether the operation can't end without this rank.
    pub(crate) fn lacks(&self, rank: u32) -> bool {
        let Some(open) = self.open else { return false };
        let rank = rank as usize;
        let lacks = |open: &Open| {
            !rules::has_given(self.map.front(rank, parity(open.tag)), open.ticket)
                || (matches!(open.way, Way::Slices | Way::Buffers(_))
                    && self.map.second(rank).load(Ordering::SeqCst) != open.ticket)
        };
        open.stage != Stage::Ready && lacks(&open)
    }

    /// The ranks that are waited for.
    pub(crate) fn late(&self) -> Vec<Rank> {
        let Some(open) = self.open else {
            return Vec::new();
        };
        let parity = parity(open.tag);
        let ranks = |is_late: &dyn Fn(usize) -> bool| -> Vec<Rank> {
            self.others()
                .filter(|rank| is_late(*rank))
                .map(|rank| Rank(rank as u32))
                .collect()
        };
        match open.stage {
            Stage::Held => {
                let held = |used: Option<Used>, rank: usize| {
                    used.is_some_and(|used| {
                        let flag = self.map.front(rank, used.parity);
                        rules::holds(flag, self.map.done(rank, used.parity), used.ticket)
                    })
                };
                ranks(&|rank| {
                    [self.fronts[parity], self.area, self.buffers]
                        .into_iter()
                        .any(|used| held(used, rank))
                })
            }
            Stage::Given => {
                let flag = |rank| self.map.front(rank, parity);
                // Who was here and gave up is not late, if anybody is.
                let gone = |rank| rules::is_gone(flag(rank), open.ticket);
                let late = ranks(&|rank| !rules::has_given(flag(rank), open.ticket) && !gone(rank));
                if late.is_empty() { ranks(&gone) } else { late }
            }
            _ => ranks(&|rank| self.map.second(rank).load(Ordering::SeqCst) != open.ticket),
        }
    }

    /// Looks at what the ranks do that have not come: `Err` if one of them asks for something else, or will not come.
    pub(crate) fn observe(&mut self) -> Result<(), CollectiveError> {
        let Some(mut open) = self.open.filter(|open| open.stage == Stage::Given) else {
            return Ok(());
        };
        let own = parity(open.tag);
        let mut joins = open.operation.is_join();
        let mut missing = false;
        for rank in self.others() {
            if rules::has_given(self.map.front(rank, own), open.ticket) {
                continue;
            }
            let at = [0, 1]
                .into_iter()
                .filter_map(|parity| read_record(&self.map, rank, parity))
                .max_by_key(|(tag, _)| *tag);
            let Some((tag, theirs)) = at else {
                missing = true;
                continue;
            };
            // It may have come just now, and be further by now. Then its flag stays until this rank has left.
            if rules::has_given(self.map.front(rank, own), open.ticket) {
                continue;
            }
            if tag > open.tag {
                return Err(CollectiveError::PeerLeft {
                    rank: Rank(rank as u32),
                    reason: format!(
                        "it is in {tag} while this rank is in {}, {}",
                        open.tag, open.operation
                    ),
                });
            }
            if tag < open.tag {
                missing = true;
            } else if theirs.is_join() || open.operation.is_join() {
                joins = true;
            } else if theirs == open.operation {
                // It gave the same operation up, and says why on its link.
                missing = true;
            } else {
                return Err(self.mismatch(&open, rank, &theirs));
            }
        }
        if joins && !missing {
            open.stage = Stage::Elsewhere;
            self.open = Some(open);
        }
        Ok(())
    }

    fn mismatch(&self, open: &Open, rank: usize, theirs: &Operation) -> CollectiveError {
        let (mut asked, mut other_asked) = (open.operation.to_string(), theirs.to_string());
        if asked == other_asked {
            // Only how it is done differs: the ranks have different tuning, or one gave a buffer.
            let by = |operation: &Operation| match operation.algorithm {
                Algorithm::Local if operation.segment != 0 => {
                    format!("{operation} of a shared buffer")
                }
                Algorithm::Local => format!("{operation} in shared memory"),
                algorithm => format!("{operation} by the {algorithm} algorithm"),
            };
            (asked, other_asked) = (by(&open.operation), by(theirs));
        }
        CollectiveError::Mismatch {
            rank: Rank(self.me as u32),
            asked,
            other: Rank(rank as u32),
            other_asked,
        }
    }

    /// Leaves the operation: this rank touches others' data no more.
    pub(crate) fn leave(&mut self) {
        if let Some(open) = self.open.take() {
            let parity = parity(open.tag);
            self.map
                .done(self.me, parity)
                .store(open.ticket, Ordering::Release);
            // The next operation writes the other line: nobody reads that any more, and this rank gets it back meanwhile.
            self.map.expect_write(self.me, 1 - parity);
        }
    }

    /// Gives the operation up.
    pub(crate) fn give_up(&mut self) {
        if let Some(open) = self.open {
            let parity = ticket::parity(open.tag);
            if open.stage != Stage::Held {
                rules::give_up(self.map.front(self.me, parity), open.ticket);
            }
            self.leave();
        }
    }

    /// Gives the memory of long operations back.
    pub(crate) fn release(&mut self) {
        if self.open.is_none() && self.populated > 0 && self.holder(self.area).is_none() {
            self.map.release(self.me, Place::Area, 0, self.populated);
            self.populated = 0;
        }
        self.blocks.release();
    }
}

/// Whether what others see is what the caller gave.
fn is_given_as_it_is(operation: &Operation) -> bool {
    operation.wire.is_none() && operation.prescale.is_one()
}

/// Results from this length on are written past the caches: they are much longer than what the last cache holds.
fn streams_from() -> usize {
    static FROM: OnceLock<usize> = OnceLock::new();
    *FROM.get_or_init(|| {
        let size = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index3/size");
        let kibibytes = size
            .ok()
            .and_then(|size| size.trim().strip_suffix('K')?.parse::<usize>().ok())
            .unwrap_or(0);
        reduce::STREAM_FROM.max(kibibytes * 1024 / 4)
    })
}

impl Drop for Arena {
    fn drop(&mut self) {
        self.give_up();
    }
}
