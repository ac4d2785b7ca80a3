//! Last words: when they have left this process, which may end right after them.

use std::time::Duration;

/// What another thread sends has left the process in this time, or a peer does not let it through.
pub(crate) const DEPARTURE: Duration = Duration::from_millis(10);

/// So often it is looked whether it has.
pub(crate) const LOOK: Duration = Duration::from_micros(50);

/// What a lane had [sent](super::Lane::departures) before the last words and a moment ago.
#[derive(Debug)]
pub(crate) struct Departure {
    first: Option<u64>,
    last: Option<u64>,
}

impl Departure {
    /// Of words that the lane is given after this.
    pub(crate) fn new(now: Option<u64>) -> Self {
        Self {
            first: now,
            last: now,
        }
    }

    /// Whether all has left, if the lane holds nothing back.
    pub(crate) fn is_over(&mut self, now: Option<u64>) -> bool {
        // What is before the last words leaves first.
        let rests = std::mem::replace(&mut self.last, now) == now;
        now.is_none() || (now != self.first && rests)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_have_left_when_some_went_and_no_more_go() {
        assert!(Departure::new(None).is_over(None));
        let mut departure = Departure::new(Some(4));
        assert!(!departure.is_over(Some(4)));
        assert!(!departure.is_over(Some(5)));
        assert!(!departure.is_over(Some(6)));
        assert!(departure.is_over(Some(6)));
        // The lane has ended.
        assert!(Departure::new(Some(4)).is_over(None));
    }
}
