//! Whether what others read is written past the caches. Pure.
//!
//! Lines that a core of another last cache has read or written have to be fetched back from there before this one can write them, one
//! by one: ten times as long as from a cache that both share. Stores past the caches fetch nothing, and who reads what they wrote
//! reads it from memory, which is faster, too. Where cores share a last cache it is the other way around, by a half. Which
//! cores ranks run on no rank knows (threads move, virtual machines do, too). So each finds it out by how long its own writes take.

use std::time::Duration;

/// Shorter data are not looked at: most of their time goes elsewhere.
pub(super) const LEAST: usize = 8 << 10;
/// One write is timed for so many bytes.
const TIMED: u64 = 64 << 10;
/// Writes to the caches that are slower than so many bytes in a nanosecond are slow: next to each other cores do 10 to 30, far from
/// each other 3.
const SLOW: u64 = 5;
/// So many in a row are no chance, or more among others: each makes up for so many that are not slow.
const ENOUGH: u32 = 4;
const OTHERS: u32 = 3;
/// Past the caches it has to be so many times as fast: otherwise the memory is slow, and not the way between the cores.
const FASTER: u64 = 3;
/// So many bytes, and twice as many each time that it pays, are written past the caches before the other way is tried again: at first
/// (memory that is written for the first time is slow, too, and soon is not any more), and at most (a second's worth).
const SPAN: u64 = 4 << 20;
const MOST: u64 = 4 << 30;
/// After so many bytes to the caches that were not slow the cores are near each other.
const CLEAR: u64 = 16 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// To the caches, and it is looked how long that takes.
    Cached,
    /// Past them, until so much is written that the other way is tried again.
    Away,
    /// To the caches, for as long: it is slow, and past them it is as well.
    Resting,
}

/// How a rank writes.
#[derive(Debug)]
pub(super) struct Pace {
    mode: Mode,
    /// Bytes that were written since that changed, and since one write was timed.
    since: u64,
    untimed: u64,
    span: u64,
    /// Writes past the caches that were timed.
    timed: u32,
    /// How many others make up for those to the caches that were slow.
    worth: u32,
    took: Took,
    /// Of the slow ones because of which the other way was tried.
    before: Took,
}

#[derive(Debug, Clone, Copy, Default)]
struct Took {
    bytes: u64,
    nanos: u64,
}

impl Took {
    fn is_faster_than(self, other: Self, times: u64) -> bool {
        let cross = |one: u64, other: u64| u128::from(one) * u128::from(other);
        cross(self.bytes, other.nanos) >= cross(other.bytes, self.nanos) * u128::from(times)
    }
}

/// How something is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Way {
    pub(super) is_away: bool,
    pub(super) is_timed: bool,
}

impl Pace {
    pub(super) fn new() -> Self {
        Self {
            mode: Mode::Cached,
            since: 0,
            untimed: 0,
            span: SPAN,
            timed: 0,
            worth: 0,
            took: Took::default(),
            before: Took::default(),
        }
    }

    /// How so many bytes are to be written.
    pub(super) fn next(&mut self, bytes: usize) -> Way {
        match self.mode {
            Mode::Away | Mode::Resting if self.since >= self.span => self.go(Mode::Cached),
            Mode::Cached if self.since >= CLEAR => self.span = SPAN,
            _ => {}
        }
        self.since = self.since.saturating_add(bytes as u64);
        self.untimed = self.untimed.saturating_add(bytes as u64);
        let is_looked_at = match self.mode {
            Mode::Cached => true,
            Mode::Away => self.timed < ENOUGH,
            Mode::Resting => false,
        };
        let is_timed = is_looked_at && self.untimed >= TIMED;
        if is_timed {
            self.untimed = 0;
        }
        Way {
            is_away: self.mode == Mode::Away,
            is_timed,
        }
    }

    /// How long it took to write what was to be timed.
    pub(super) fn took(&mut self, bytes: usize, time: Duration) {
        let (bytes, nanos) = (bytes as u64, time.as_nanos() as u64);
        if self.mode == Mode::Cached && bytes >= SLOW * nanos {
            self.worth = self.worth.saturating_sub(1);
            if self.worth == 0 {
                self.took = Took::default();
            }
            return;
        }
        self.took.bytes += bytes;
        self.took.nanos += nanos;
        if self.mode == Mode::Cached {
            self.worth += OTHERS;
            if self.worth >= ENOUGH * OTHERS {
                self.before = self.took;
                self.go(Mode::Away);
            }
            return;
        }
        self.timed += 1;
        if self.timed != ENOUGH {
            return;
        }
        // Whether it pays or not, it is not looked at again for longer and longer.
        self.span = (2 * self.span).min(MOST);
        if !self.took.is_faster_than(self.before, FASTER) {
            self.go(Mode::Resting);
        }
    }

    fn go(&mut self, mode: Mode) {
        self.mode = mode;
        (self.since, self.untimed) = (0, 0);
        (self.timed, self.worth, self.took) = (0, 0, Took::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: usize = 64 << 10;

    /// Writes so many bytes, where one in a nanosecond is multiplied by these: to the caches and past them. Returns how many went
    /// past them.
    fn write(pace: &mut Pace, bytes: u64, (cached, away): (u64, u64)) -> u64 {
        let mut past = 0;
        for _ in 0..bytes / PIECE as u64 {
            let way = pace.next(PIECE);
            let rate = if way.is_away { away } else { cached };
            if way.is_timed {
                pace.took(PIECE, Duration::from_nanos(PIECE as u64 / rate));
            }
            past += u64::from(way.is_away) * PIECE as u64;
        }
        past
    }

    const NEAR: (u64, u64) = (28, 12);
    const FAR: (u64, u64) = (3, 26);

    #[test]
    fn cores_that_are_far_from_each_other_write_past_the_caches_and_near_ones_never() {
        let mut pace = Pace::new();
        assert_eq!(write(&mut pace, 1 << 30, NEAR), 0);
        let far = 8 << 30;
        let past = write(&mut pace, far, FAR);
        assert!(past > far / 1000 * 999, "{past} of {far}");
        // When they are near again that is found out, and the next time it is looked at as soon as at first.
        let past = write(&mut pace, 8 << 30, NEAR);
        assert!(past <= MOST, "{past}");
        assert_eq!((pace.mode, pace.span), (Mode::Cached, SPAN));
    }

    #[test]
    fn what_is_slow_for_another_reason_is_not_taken_for_far() {
        let piece = PIECE as u64;
        let mut pace = Pace::new();
        // Somebody else has the core for a moment.
        for _ in 0..1000 {
            assert_eq!(write(&mut pace, 10 * piece, NEAR), 0);
            assert_eq!(write(&mut pace, 3 * piece, FAR), 0);
        }
        // The system gets pages for the first writes.
        let mut pace = Pace::new();
        let fresh = write(&mut pace, 4 << 20, (1, 12));
        let past = fresh + write(&mut pace, 1 << 30, NEAR);
        assert!(past <= 2 * SPAN, "{past}");
        // Memory is slow either way.
        let mut pace = Pace::new();
        let bytes = 8 << 30;
        let past = write(&mut pace, bytes, (4, 7));
        assert!(past < bytes / 1000, "{past} of {bytes}");
        // Ranks give by turns, so that some lines were not read since: half of the writes are enough.
        let mut pace = Pace::new();
        let turn = |pace: &mut Pace| write(pace, piece, NEAR) + write(pace, piece, FAR);
        let past: u64 = (0..100).map(|_| turn(&mut pace)).sum();
        assert!(past > 100 * piece, "{past}");
        // To look at the clock takes as long as to write 1 KiB.
        let mut pace = Pace::new();
        let timed = (0..800).filter(|_| pace.next(LEAST).is_timed);
        assert_eq!(timed.count(), 100);
    }
}
