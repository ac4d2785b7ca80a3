//! How often: what may come only now and then, and pauses that grow. Pure: the time comes in.

use std::time::{Duration, Instant};

/// Lets a few through at once, and then one in a while.
///
/// ```
/// # use std::time::{Duration, Instant};
/// use kolo_core::pace::Ration;
///
/// let mut ration = Ration::new(2, Duration::from_secs(1));
/// let now = Instant::now();
/// assert!(ration.take(now) && ration.take(now) && !ration.take(now));
/// assert!(ration.take(now + Duration::from_secs(1)));
/// ```
#[derive(Debug, Clone)]
pub struct Ration {
    most: u32,
    every: Duration,
    left: u32,
    /// When the last one was added.
    since: Option<Instant>,
}

impl Ration {
    /// At most `most` at once, and one more every so often, which is not 0.
    #[must_use]
    pub const fn new(most: u32, every: Duration) -> Self {
        Self {
            most,
            every,
            left: most,
            since: None,
        }
    }

    /// Takes one if there is one.
    #[must_use]
    pub fn take(&mut self, now: Instant) -> bool {
        let since = *self.since.get_or_insert(now);
        let grown = now.saturating_duration_since(since).as_nanos() / self.every.as_nanos().max(1);
        if grown > 0 {
            let grown = u32::try_from(grown).unwrap_or(u32::MAX);
            self.left = self.left.saturating_add(grown).min(self.most);
            self.since = Some(now);
        }
        let some = self.left > 0;
        self.left = self.left.saturating_sub(1);
        some
    }
}

/// Pauses between attempts that fail: each twice the one before, up to a bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    first: Duration,
    most: Duration,
    failures: u32,
}

impl Backoff {
    /// Pauses from `first` to `most`.
    #[must_use]
    pub const fn new(first: Duration, most: Duration) -> Self {
        Self {
            first,
            most,
            failures: 0,
        }
    }

    /// Attempts that have failed in a row.
    #[must_use]
    pub const fn failures(&self) -> u32 {
        self.failures
    }

    /// An attempt has failed. How long to wait before the next.
    #[must_use]
    pub fn failed(&mut self) -> Duration {
        let factor = 1_u32.checked_shl(self.failures).unwrap_or(u32::MAX);
        self.failures = self.failures.saturating_add(1);
        self.first.saturating_mul(factor).min(self.most)
    }

    /// An attempt was good. How many had failed before it.
    pub fn worked(&mut self) -> u32 {
        std::mem::take(&mut self.failures)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_their_bound_and_begin_again() {
        let ms = Duration::from_millis;
        let mut backoff = Backoff::new(ms(250), ms(5000));
        let pauses: Vec<_> = (0..7).map(|_| backoff.failed()).collect();
        assert_eq!(pauses, [250, 500, 1000, 2000, 4000, 5000, 5000].map(ms));
        for _ in 0..100 {
            assert_eq!(backoff.failed(), ms(5000));
        }
        assert_eq!(backoff.worked(), 107);
        assert_eq!(backoff.worked(), 0);
        assert_eq!(backoff.failed(), ms(250));
    }
}
