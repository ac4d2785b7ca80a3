//! How long a thread looks before it sleeps.

use std::time::Duration;

const SHORTEST: Duration = Duration::from_micros(2);
pub(super) const LONGEST: Duration = Duration::from_micros(50);

/// When even the shortest time was in vain, so many sleeps begin without a look.
const RARELY: u32 = 16;

/// How long it is worth while to look for what one waits for before one sleeps, by what it was lately: twice as long after a look
/// that was not in vain, half as long after one that was. When even the shortest was, most sleeps begin at once; after some of
/// them the longest look is tried. Not the shortest: where waits are longer than that it is always in vain, and two threads
/// that make each other wait by sleeping would do so for ever.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    length: Duration,
    /// Sleeps that begin at once until the next look.
    skips: u32,
    /// It is a try after some sleeps.
    is_try: bool,
}

impl Patience {
    pub(super) const fn new() -> Self {
        Self {
            length: LONGEST,
            skips: 0,
            is_try: false,
        }
    }

    /// How long to look before the next sleep, `None` if not at all.
    pub(super) fn length(self) -> Option<Duration> {
        (self.skips == 0).then_some(self.length)
    }

    /// It slept at once.
    pub(super) fn skipped(&mut self) {
        self.skips = self.skips.saturating_sub(1);
    }

    /// It came while it was looked for.
    pub(super) fn found(&mut self) {
        self.length = (self.length * 2).min(LONGEST);
        self.is_try = false;
    }

    pub(super) fn looked_in_vain(&mut self) {
        if self.is_try || self.length == SHORTEST {
            *self = Self {
                length: LONGEST,
                skips: RARELY,
                is_try: true,
            };
        } else {
            self.length = (self.length / 2).max(SHORTEST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits of this length, one after the other: how many of them are looked through.
    fn looked_through(patience: &mut Patience, waits: usize, wait: Duration) -> usize {
        let mut through = 0;
        for _ in 0..waits {
            match patience.length() {
                None => patience.skipped(),
                Some(length) if wait <= length => {
                    patience.found();
                    through += 1;
                }
                Some(_) => patience.looked_in_vain(),
            }
        }
        through
    }

    #[test]
    fn long_waits_are_slept_through() {
        let mut patience = Patience::new();
        let long = LONGEST + Duration::from_nanos(1);
        assert_eq!(looked_through(&mut patience, 100, long), 0);
        // From here on one of some sleeps begins with a look.
        let looks = (0..17 * 10)
            .filter(|_| {
                let looks = patience.length().is_some();
                looked_through(&mut patience, 1, long);
                looks
            })
            .count();
        assert_eq!(looks, 10);
    }

    #[test]
    fn after_long_waits_it_finds_back_to_all_that_it_can_look_through() {
        for wait in [Duration::ZERO, SHORTEST, SHORTEST * 2, LONGEST / 2, LONGEST] {
            let mut patience = Patience::new();
            looked_through(&mut patience, 1000, LONGEST * 2);
            looked_through(&mut patience, 1 + RARELY as usize, wait);
            assert_eq!(looked_through(&mut patience, 100, wait), 100, "{wait:?}");
        }
    }

    #[test]
    fn one_long_wait_among_short_ones_changes_little() {
        let mut patience = Patience::new();
        for _ in 0..10 {
            assert_eq!(looked_through(&mut patience, 9, SHORTEST), 9);
            assert_eq!(looked_through(&mut patience, 1, LONGEST * 2), 0);
        }
    }
}
