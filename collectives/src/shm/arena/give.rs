//! What a rank gives in an operation: where, when nobody reads there any more, and how others find it.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::super::map::{AREA, INLINE, Map, Place};
use super::super::rules;
use super::super::ticket::{parity, write_record};
use super::way::{Buffers, Way, is_given_as_it_is};
use super::{Arena, Open, Used};
use crate::error::CollectiveError;
use crate::operation::Operation;

/// Pages are asked for in groups of so many bytes.
const POPULATED: usize = 64 << 10;

impl Open {
    /// Whether what a rank gives, so many bytes, is beside its flag.
    pub(super) fn is_inline(&self, bytes: usize) -> bool {
        is_inline(self.way, bytes)
    }

    /// Where the data are that a rank gave, of which there are so many bytes.
    #[inline]
    pub(super) fn place(&self, map: &Map, me: usize, rank: usize, bytes: usize) -> (Place, usize) {
        if self.is_inline(bytes) {
            return (Place::Inline(parity(self.tag)), 0);
        }
        if rank == me {
            return (Place::Area, self.start);
        }
        // Whatever stands there, the data are in the area.
        let start = map.inline(rank, parity(self.tag), 0);
        let start = start.load(Ordering::Relaxed) as usize;
        (Place::Area, start.min(AREA - bytes))
    }
}

/// Whether some rank may still read what `me` gave at that time. All have left what came before `synced`.
pub(super) fn is_read(map: &Map, me: usize, synced: u64, used: Used) -> bool {
    used.index >= synced
        && (0..map.world()).filter(|rank| *rank != me).any(|rank| {
            let flag = map.front(rank, used.parity);
            rules::holds(flag, map.done(rank, used.parity), used.ticket)
        })
}

pub(super) fn is_inline(way: Way, bytes: usize) -> bool {
    bytes <= INLINE && !matches!(way, Way::Slices | Way::Stream(_) | Way::Rounds(_))
}

impl Arena {
    /// A place in the area, with pages behind it.
    pub(super) fn stage(
        &mut self,
        operation: &Operation,
        bytes: usize,
    ) -> Result<Range<usize>, CollectiveError> {
        let place = self.staging.take(bytes);
        self.populate(operation, place.end)
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
    fn populate(&mut self, operation: &Operation, end: usize) -> Result<(), CollectiveError> {
        if end <= self.populated {
            return Ok(());
        }
        let (at, end) = (self.populated, end.next_multiple_of(POPULATED));
        if let Err(error) = self.map.populate(self.me, Place::Area, at, end - at) {
            // What is before that others may still read.
            self.map.release(self.me, Place::Area, at, end - at);
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

    /// Whether some rank may still read what was given at that time.
    pub(super) fn is_read(&self, used: Used) -> bool {
        is_read(&self.map, self.me, self.synced, used)
    }

    /// Whether what this operation gives can't be given yet.
    pub(super) fn is_held(&self, open: &Open) -> bool {
        self.before(open).any(|used| self.is_read(used))
    }

    /// When what this operation writes was written before.
    pub(super) fn before(&self, open: &Open) -> impl Iterator<Item = Used> {
        let special = match open.way {
            Way::Buffers(_) => self.buffers,
            Way::Stream(_) | Way::Rounds(_) => self.counted,
            _ => None,
        };
        let front = self.fronts[parity(open.tag)];
        let staged = self.staging.before(Self::staged(open));
        front.into_iter().chain(special).chain(staged)
    }

    /// What this rank uses of its area.
    fn staged(open: &Open) -> Range<usize> {
        if open.is_inline(open.bytes) {
            return 0..0;
        }
        open.start..open.start + open.bytes
    }

    /// Where the data are that a rank gave, of which there are so many bytes.
    #[inline]
    pub(super) fn place(&self, open: &Open, rank: usize, bytes: usize) -> (Place, usize) {
        open.place(&self.map, self.me, rank, bytes)
    }

    /// Where so many bytes of this rank will be in its area, if its next operation gives them.
    #[cfg(test)]
    pub(crate) fn next_place(&self, bytes: usize) -> usize {
        self.staging.clone().take(bytes).start
    }

    /// Where they begin in its area, in the operation that is under way.
    #[inline]
    pub(super) fn start(&self, rank: usize, bytes: usize) -> usize {
        self.open.map_or(0, |open| self.place(&open, rank, bytes).1)
    }

    pub(super) fn give(&mut self, open: &Open, input: &[u8]) {
        let (parity, bytes) = (parity(open.tag), open.bytes);
        let used = Used {
            index: self.index,
            ticket: open.ticket,
            parity,
        };
        let operation = &open.operation;
        match open.way {
            Way::Agree => {}
            Way::Stream(stream) => {
                self.counted = Some(used);
                self.open_stream(&stream);
            }
            Way::Rounds(_) => {
                self.counted = Some(used);
                self.open_rounds();
            }
            Way::Buffers(Buffers { input, output }) => {
                self.buffers = Some(used);
                let mut words = [0; 16];
                words[..8].copy_from_slice(&(input as u64).to_le_bytes());
                words[8..].copy_from_slice(&(output as u64).to_le_bytes());
                self.map.write(self.me, Place::Inline(parity), 0, &words);
            }
            way => {
                let (place, start) = self.place(open, self.me, bytes);
                if is_given_as_it_is(operation) {
                    let own = self.withheld(operation, way, bytes);
                    if own.start > 0 {
                        self.map.write(self.me, place, start, &input[..own.start]);
                    }
                    if own.end < bytes {
                        self.map
                            .write(self.me, place, start + own.end, &input[own.end..bytes]);
                    }
                } else {
                    self.give_converted(operation, (place, start), bytes, input);
                }
            }
        }
        if !open.is_inline(bytes) {
            self.map
                .inline(self.me, parity, 0)
                .store(open.start as u64, Ordering::Relaxed);
            let Self {
                map, me, synced, ..
            } = self;
            self.staging
                .give(used, Self::staged(open), *synced, |used| {
                    is_read(map, *me, *synced, used)
                });
        }
        self.fronts[parity] = Some(used);
        let known = self.recorded[parity] == Some(*operation);
        write_record(&self.map, self.me, open.tag, operation, !known);
        if !known {
            self.recorded[parity] = Some(*operation);
        }
        rules::give(self.map.front(self.me, parity), open.ticket);
        self.ring_all();
    }
}
