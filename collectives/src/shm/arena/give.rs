//! What a rank gives in an operation: where, when nobody reads there any more, and how others find it.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::super::caches;
use super::super::map::{AREA, INLINE, Place};
use super::super::rules;
use super::super::ticket::{parity, write_record};
use super::asked::is_given_as_it_is;
use super::limits::{BLOCK, POPULATED};
use super::seat::Seat;
use super::staging::Staging;
use super::way::{Way, withheld};
use super::{Open, Used};
use crate::copy;
use crate::error::CollectiveError;
use crate::operation::Operation;
use crate::reduce;
use crate::scratch::Scratch;

impl Open {
    /// Whether what a rank gives, so many bytes, is beside its flag.
    #[inline]
    pub(super) fn is_inline(&self, bytes: usize) -> bool {
        is_inline(&self.way, bytes)
    }

    /// Where the data are that a rank gave, of which there are so many bytes.
    #[inline]
    pub(super) fn place(&self, seat: &Seat, rank: usize, bytes: usize) -> (Place, usize) {
        if self.is_inline(bytes) {
            return (Place::Inline(parity(self.tag)), 0);
        }
        if rank == seat.me {
            return (Place::Area, self.start);
        }
        // Whatever stands there, the data are in the area.
        let start = seat.map.inline(rank, parity(self.tag), 0);
        let start = start.load(Ordering::Relaxed) as usize;
        (Place::Area, start.min(AREA - bytes))
    }

    /// What this rank uses of its area.
    fn staged(&self) -> Range<usize> {
        if self.is_inline(self.bytes) {
            return 0..0;
        }
        self.start..self.start + self.bytes
    }

    /// Writes this rank's data to where others find them.
    pub(super) fn write(&self, seat: &Seat, blocks: &mut Scratch, input: &[u8]) {
        let (operation, bytes) = (&self.operation, self.bytes);
        let (place, start) = self.place(seat, seat.me, bytes);
        let write = |at: usize, from: &[u8]| seat.map.write(seat.me, place, start + at, from);
        if is_given_as_it_is(operation) {
            let own = withheld(seat, operation, self.way, bytes);
            if own.start > 0 {
                write(0, &input[..own.start]);
            }
            if own.end < bytes {
                write(own.end, &input[own.end..bytes]);
            }
            return;
        }
        let Some(dtype) = operation.dtype else { return };
        let wire = operation.wire.unwrap_or(dtype);
        blocks.reserve(BLOCK);
        for at in (0..bytes).step_by(BLOCK) {
            let count = BLOCK.min(bytes - at);
            let block = &mut blocks.bytes_mut()[..count];
            let there = |at: usize| at / wire.size() * dtype.size();
            let from = &input[there(at)..there(at + count)];
            if wire == dtype {
                copy::slice(from, block);
            } else {
                reduce::convert(wire, block, dtype, from);
            }
            if operation.reduce.is_some() {
                reduce::scale(wire, block, operation.prescale);
            }
            write(at, block);
        }
    }
}

#[inline]
pub(super) fn is_inline(way: &Way, bytes: usize) -> bool {
    bytes <= INLINE && *way != Way::Slices && way.piecewise().is_none()
}

/// What this rank has given, as far as somebody may still read it.
#[derive(Debug)]
pub(super) struct Given {
    /// How many operations were entered.
    index: u64,
    /// The last one in which all ranks were seen: they have left all before.
    synced: u64,
    fronts: [Option<Used>; 2],
    staging: Staging,
    /// The last operation that [counts pieces](super::pieces).
    counted: Option<Used>,
    buffers: Option<Used>,
    recorded: [Option<Operation>; 2],
    /// Bytes of the area that have pages.
    populated: usize,
}

impl Given {
    pub(super) fn new(world: usize) -> Self {
        Self {
            index: 0,
            synced: 0,
            fronts: [None; 2],
            staging: Staging::new(world, caches::second(), caches::last()),
            counted: None,
            buffers: None,
            recorded: [None; 2],
            populated: 0,
        }
    }

    /// An operation is entered.
    pub(super) fn enter(&mut self) {
        self.index += 1;
    }

    /// All ranks are in the operation that was entered last.
    pub(super) fn sync(&mut self) {
        self.synced = self.index;
    }

    /// A place in the area, with pages behind it.
    pub(super) fn stage(
        &mut self,
        seat: &Seat,
        operation: &Operation,
        bytes: usize,
    ) -> Result<Range<usize>, CollectiveError> {
        let place = self.staging.take(bytes);
        self.populate(seat, operation, place.end)
            .map(|()| place)
            .or_else(|error| {
                // There may be enough of them already, further to the front.
                self.staging.begin_anew();
                let place = self.staging.take(bytes);
                if place.end <= self.populated {
                    Ok(place)
                } else {
                    Err(error)
                }
            })
    }

    /// Gets pages for the area up to `end`.
    fn populate(
        &mut self,
        seat: &Seat,
        operation: &Operation,
        end: usize,
    ) -> Result<(), CollectiveError> {
        if end <= self.populated {
            return Ok(());
        }
        let (at, end) = (self.populated, end.next_multiple_of(POPULATED));
        if let Err(error) = seat.map.populate(seat.me, Place::Area, at, end - at) {
            // What is before that others may still read.
            seat.map.release(seat.me, Place::Area, at, end - at);
            return Err(CollectiveError::Invalid {
                reason: format!(
                    "{operation} takes {end} bytes of shared memory, which the system does not give ({error}): \
                     give less at a time, or the host more memory"
                ),
            });
        }
        self.populated = end;
        Ok(())
    }

    /// Gives the pages of the area back, unless somebody may still read there.
    pub(super) fn release(&mut self, seat: &Seat) {
        let is_read = |used| self.is_read(seat, used);
        if self.populated > 0 && !self.staging.all().any(is_read) {
            seat.map.release(seat.me, Place::Area, 0, self.populated);
            self.populated = 0;
        }
    }

    /// Whether some rank may still read what was given at that time.
    fn is_read(&self, seat: &Seat, used: Used) -> bool {
        is_read(seat, self.synced, used)
    }

    /// Whether a peer may still be in the last operation on buffers.
    pub(super) fn are_buffers_used(&self, seat: &Seat) -> bool {
        self.buffers.is_some_and(|used| self.is_read(seat, used))
    }

    /// Whether what this operation gives can't be given yet.
    pub(super) fn is_held(&self, seat: &Seat, open: &Open) -> bool {
        self.before(open).any(|used| self.is_read(seat, used))
    }

    /// When what this operation writes was written before.
    pub(super) fn before(&self, open: &Open) -> impl Iterator<Item = Used> {
        let special = match &open.way {
            Way::Buffers(_) => self.buffers,
            way if way.piecewise().is_some() => self.counted,
            _ => None,
        };
        let front = self.fronts[parity(open.tag)];
        let staged = self.staging.before(open.staged());
        front.into_iter().chain(special).chain(staged)
    }

    /// The data of an operation are in their place: others hear of it.
    pub(super) fn give(&mut self, seat: &Seat, open: &Open) {
        let parity = parity(open.tag);
        let used = Used {
            index: self.index,
            ticket: open.ticket,
            parity,
        };
        match &open.way {
            Way::Buffers(_) => self.buffers = Some(used),
            way if way.piecewise().is_some() => self.counted = Some(used),
            _ => {}
        }
        let synced = self.synced;
        if !open.is_inline(open.bytes) {
            (seat.map.inline(seat.me, parity, 0)).store(open.start as u64, Ordering::Relaxed);
            self.staging.give(used, open.staged(), synced, |used| {
                is_read(seat, synced, used)
            });
        }
        self.fronts[parity] = Some(used);
        let known = self.recorded[parity] == Some(open.operation);
        write_record(&seat.map, seat.me, open.tag, &open.operation, !known);
        if !known {
            self.recorded[parity] = Some(open.operation);
        }
        rules::give(seat.map.front(seat.me, parity), open.ticket);
        seat.ring_all();
    }

    /// Where so many bytes of this rank will be in its area, if its next operation gives them.
    #[cfg(test)]
    pub(super) fn next_place(&self, bytes: usize) -> usize {
        self.staging.clone().take(bytes).start
    }
}

/// Whether some rank may still read what this one gave at that time. All have left what came before `synced`.
fn is_read(seat: &Seat, synced: u64, used: Used) -> bool {
    used.index >= synced
        && seat.others().any(|rank| {
            let flag = seat.map.front(rank, used.parity);
            rules::holds(flag, seat.map.done(rank, used.parity), used.ticket)
        })
}
