//! Where in its area a rank puts what it gives. Pure.
//!
//! The place moves on from operation to operation. If it were always the same one, or one of two, the lines that a rank writes would lie
//! in the second caches of those that read them the last time, and have to be fetched back from there, one by one; and so would
//! those that others read. Lines that have gone to the last cache meanwhile, which the cores share, cost a half to a
//! third of that. So the places of all go around through more memory than a second cache holds, but
//! together no more than the last one does. (`docs/performance.md` has what it is worth.)
//!
//! Short data are better off in few lines that stay where they are.

use std::ops::Range;

use super::Used;
use super::limits::{MOVED, TWICE};

/// Places for what is shorter.
const SHORT_PLACES: usize = 4;
/// Bytes of all of them.
const SHORT: usize = SHORT_PLACES * MOVED;
/// Long data are behind that.
pub(super) const BEFORE: usize = SHORT;
/// Bounds of the way around.
const LEAST_LAP: usize = 256 << 10;
const MOST_LAP: usize = 4 << 20;
/// So much may be there that somebody reads, as a rule.
const FEW: usize = 4;
/// Lines come in pairs.
const ALIGN: usize = 128;

#[derive(Debug, Clone)]
pub(super) struct Staging {
    /// Bytes that long data go around through.
    lap: usize,
    /// Where the next short data go, and where the next long ones, behind the short ones.
    short: usize,
    long: usize,
    /// What was given, and where, as far as somebody may still read it.
    given: Vec<(Used, Range<usize>)>,
}

impl Staging {
    /// For so many ranks with caches of so many bytes.
    pub(super) fn new(world: usize, second_cache: usize, last_cache: usize) -> Self {
        let share = (last_cache / world).max(LEAST_LAP);
        Self {
            lap: (2 * second_cache).clamp(LEAST_LAP, MOST_LAP).min(share),
            short: 0,
            long: 0,
            given: Vec::new(),
        }
    }

    /// The place for so many bytes.
    pub(super) fn take(&mut self, bytes: usize) -> Range<usize> {
        let (base, next, lap) = if bytes < MOVED {
            (0, &mut self.short, SHORT)
        } else {
            let lap = match bytes {
                bytes if bytes <= TWICE => self.lap.max(2 * bytes.next_multiple_of(ALIGN)),
                bytes => bytes,
            };
            (SHORT, &mut self.long, lap)
        };
        if bytes > lap.saturating_sub(*next) {
            *next = 0;
        }
        let start = *next;
        *next = (start + bytes).next_multiple_of(ALIGN);
        base + start..base + start + bytes
    }

    /// The next data are where the first ones were.
    pub(super) fn begin_anew(&mut self) {
        (self.short, self.long) = (0, 0);
    }

    /// Something is given there. What was given before operation `synced` nobody reads any more; `is_read` says it of the rest, by a
    /// look at others' lines, which takes as long as a short operation.
    pub(super) fn give(
        &mut self,
        used: Used,
        place: Range<usize>,
        synced: u64,
        is_read: impl Fn(Used) -> bool,
    ) {
        self.given.retain(|(used, _)| used.index >= synced);
        if self.given.len() > FEW {
            self.given.retain(|(used, _)| is_read(*used));
        }
        if !place.is_empty() {
            self.given.push((used, place));
        }
    }

    /// What was given where this place is, before.
    pub(super) fn before(&self, place: Range<usize>) -> impl Iterator<Item = Used> {
        let overlaps =
            move |other: &Range<usize>| other.start < place.end && place.start < other.end;
        self.given
            .iter()
            .filter(move |(_, other)| overlaps(other))
            .map(|(used, _)| *used)
    }

    /// All that may still be read.
    pub(super) fn all(&self) -> impl Iterator<Item = Used> {
        self.given.iter().map(|(used, _)| *used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::bed::Numbers;

    const MIB: usize = 1 << 20;

    fn used(index: u64) -> Used {
        Used {
            index,
            ticket: index,
            parity: 0,
        }
    }

    #[test]
    fn a_lap_is_longer_than_second_caches_and_all_together_fit_the_last() {
        let lap = |world, second, last| Staging::new(world, second, last).lap;
        assert_eq!(lap(2, MIB, 32 * MIB), 2 * MIB);
        assert_eq!(lap(2, 2 * MIB, 100 * MIB), 4 * MIB);
        assert_eq!(lap(2, 16 * MIB, 100 * MIB), 4 * MIB);
        assert_eq!(lap(32, MIB, 32 * MIB), MIB);
        for unknown in [0, MIB] {
            assert_eq!(lap(64, MIB, unknown), 256 << 10);
        }
    }

    #[test]
    fn data_go_around_and_do_not_overlap_those_just_before() {
        let starts = |bytes: usize| -> std::collections::BTreeSet<usize> {
            let mut staging = Staging::new(2, MIB, 32 * MIB);
            (0..100).map(|_| staging.take(bytes).start).collect()
        };
        // Short ones stay in few lines, of longer ones there are two places at least, and one of those that are in no cache anyway.
        for (bytes, places) in [
            (MOVED - 1, SHORT_PLACES),
            (64 << 10, 32),
            (2 * MIB, 2),
            (2 * MIB + 1, 1),
        ] {
            assert_eq!(starts(bytes).len(), places, "{bytes}");
        }
        let (mut numbers, mut before) = (Numbers(7), 0..0);
        let mut staging = Staging::new(4, MIB, 32 * MIB);
        for _ in 0..10_000 {
            let most = 1 << numbers.below(20);
            let bytes = numbers.below(most);
            let place = staging.take(bytes);
            assert!(place.len() == bytes && place.start.is_multiple_of(ALIGN));
            assert!(place.end <= SHORT + 2 * MIB);
            assert!(place.is_empty() || place.end <= before.start || before.end <= place.start);
            before = place;
        }
    }

    #[test]
    fn what_is_still_read_is_known_and_all_else_forgotten() {
        let mut staging = Staging::new(2, MIB, 32 * MIB);
        let places: Vec<_> = (0..8).map(|_| staging.take(MIB)).collect();
        for (index, place) in (0..).zip(&places) {
            // Only the first is read for long, and no operation has ended well.
            staging.give(used(index), place.clone(), 0, |used| used.index == 0);
        }
        let indices = |found: &mut dyn Iterator<Item = Used>| {
            found.map(|used| used.index).collect::<Vec<_>>()
        };
        let all = indices(&mut staging.all());
        assert!(
            all.len() <= FEW + 1 && all[0] == 0 && all.ends_with(&[7]),
            "{all:?}"
        );
        let of = |place: usize| {
            all.iter()
                .filter(move |index| **index as usize % 2 == place)
        };
        for (index, place) in places[..2].iter().enumerate() {
            let before = indices(&mut staging.before(place.clone()));
            assert!(before.iter().eq(of(index)), "{before:?} of {all:?}");
        }
        let last = places[0].end - 1..places[0].end;
        assert_eq!(indices(&mut staging.before(last))[0], 0);
        // One has ended well, and all that came before it.
        staging.give(used(8), places[0].clone(), 7, |_| true);
        assert_eq!(indices(&mut staging.all()), [7, 8]);
        staging.give(used(9), 0..0, 9, |_| true);
        assert_eq!(indices(&mut staging.all()), [0; 0]);
    }
}
