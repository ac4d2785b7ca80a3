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

/// How often a node sends heartbeats, and how long it may be silent.
///
/// ```
/// # use std::time::Duration;
/// use kolo_core::pace::Pace;
///
/// let ms = Duration::from_millis;
/// let pace = Pace::new(ms(250), ms(1250));
/// assert_eq!(pace.of(2500), pace);
/// assert_eq!(pace.of(5000), Pace::new(ms(500), ms(2000)));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// The time from one heartbeat to the next.
    pub heartbeat: Duration,
    /// The silence after which the node counts as lost.
    pub lease: Duration,
}

impl Pace {
    /// So many heartbeats come to a head in a second, of nodes that have registered last, before it asks for fewer.
    const MOST: u32 = 10_000;
    /// However many nodes there are, a beat comes so often.
    const SLOWEST: Duration = Duration::from_millis(600);

    /// Those of a small cluster.
    #[must_use]
    pub const fn new(heartbeat: Duration, lease: Duration) -> Self {
        Self { heartbeat, lease }
    }

    /// Those of a cluster of so many nodes: from 2,500 nodes on heartbeats are rarer, up to 600 ms apart, and the lease is four of
    /// them, if these times are longer than the given ones.
    #[must_use]
    pub fn of(self, nodes: usize) -> Self {
        let nodes = u32::try_from(nodes).unwrap_or(u32::MAX);
        let heartbeat = Duration::from_secs(nodes.into()) / Self::MOST;
        let heartbeat = heartbeat.min(Self::SLOWEST).max(self.heartbeat);
        let slowed = if heartbeat > self.heartbeat {
            heartbeat * 4
        } else {
            Duration::ZERO
        };
        Self {
            heartbeat,
            lease: self.lease.max(slowed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heartbeats_are_rarer_in_a_large_cluster() {
        let ms = Duration::from_millis;
        let usual = Pace::new(ms(250), ms(1250));
        for (nodes, heartbeat, lease) in [
            (0, 250, 1250),
            (2500, 250, 1250),
            (3000, 300, 1250),
            (4000, 400, 1600),
            (6000, 600, 2400),
            (usize::MAX, 600, 2400),
        ] {
            assert_eq!(
                usual.of(nodes),
                Pace::new(ms(heartbeat), ms(lease)),
                "{nodes}"
            );
        }
        // Times that are longer already stay.
        let slow = Pace::new(ms(5000), ms(20_000));
        assert_eq!(slow.of(usize::MAX), slow);
    }

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
