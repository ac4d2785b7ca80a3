//! Heartbeats and leases, without I/O or clock: a heartbeat renews the lease of the one who sent it.

use std::time::{Duration, Instant};

use crate::wire::head::Beat;

/// How long a peer counts as alive. Runs on the monotonic clock of the side that grants it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    length: Duration,
    renewed: Instant,
}

impl Lease {
    /// A lease of this length, granted at `now`.
    #[must_use]
    pub fn new(length: Duration, now: Instant) -> Self {
        Self {
            length,
            renewed: now,
        }
    }

    /// The peer was heard of at `now`. A time before the last one changes nothing.
    pub fn renew(&mut self, now: Instant) {
        self.renewed = self.renewed.max(now);
    }

    /// When it expires if it is not renewed.
    #[must_use]
    pub fn expires(&self) -> Instant {
        self.renewed + self.length
    }

    /// Whether it has expired at `now`.
    #[must_use]
    pub fn is_expired(&self, now: Instant) -> bool {
        now >= self.expires()
    }
}

/// What a [`Heartbeats`] wants done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeartbeatAction {
    /// Send this beat now.
    Send(Beat),
    /// Nothing until then.
    Wait(Instant),
    /// The peer has not answered for a whole lease: it is lost.
    Lost,
}

/// The side that sends heartbeats and wants each answered.
#[derive(Debug, Clone)]
pub struct Heartbeats {
    interval: Duration,
    lease: Lease,
    next: Instant,
    seq: u64,
}

impl Heartbeats {
    /// Sends a beat every `interval` from `now` on, and gives the peer up after `lease` without an answer.
    #[must_use]
    pub fn new(interval: Duration, lease: Duration, now: Instant) -> Self {
        Self {
            interval,
            lease: Lease::new(lease, now),
            next: now,
            seq: 0,
        }
    }

    /// What to do at `now`. Beats that were missed are not made up for.
    pub fn poll(&mut self, now: Instant) -> HeartbeatAction {
        if self.lease.is_expired(now) {
            return HeartbeatAction::Lost;
        }
        if now < self.next {
            return HeartbeatAction::Wait(self.next.min(self.lease.expires()));
        }
        self.seq += 1;
        self.next = now + self.interval;
        HeartbeatAction::Send(Beat { seq: self.seq })
    }

    /// An answer came at `now`. One to a beat that was never sent is ignored.
    pub fn answered(&mut self, beat: Beat, now: Instant) {
        if (1..=self.seq).contains(&beat.seq) {
            self.lease.renew(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn a_lease_expires_unless_it_is_renewed() {
        let start = Instant::now();
        let mut lease = Lease::new(MS(100), start);
        assert!(!lease.is_expired(start + MS(99)));
        assert!(lease.is_expired(start + MS(100)));
        lease.renew(start + MS(60));
        lease.renew(start + MS(10));
        assert_eq!(lease.expires(), start + MS(160));
    }

    #[test]
    fn beats_go_out_at_their_interval_until_the_peer_is_silent_for_a_lease() {
        let start = Instant::now();
        let mut beats = Heartbeats::new(MS(25), MS(100), start);
        assert_eq!(beats.poll(start), HeartbeatAction::Send(Beat { seq: 1 }));
        assert_eq!(
            beats.poll(start + MS(1)),
            HeartbeatAction::Wait(start + MS(25))
        );
        assert_eq!(
            beats.poll(start + MS(25)),
            HeartbeatAction::Send(Beat { seq: 2 })
        );
        beats.answered(Beat { seq: 1 }, start + MS(30));
        // Late by three intervals: one beat, not three.
        assert_eq!(
            beats.poll(start + MS(105)),
            HeartbeatAction::Send(Beat { seq: 3 })
        );
        assert_eq!(
            beats.poll(start + MS(106)),
            HeartbeatAction::Wait(start + MS(130))
        );
        assert_eq!(beats.poll(start + MS(130)), HeartbeatAction::Lost);
    }

    #[test]
    fn an_answer_to_nothing_renews_nothing() {
        let start = Instant::now();
        let mut beats = Heartbeats::new(MS(25), MS(100), start);
        beats.poll(start);
        beats.answered(Beat { seq: 0 }, start + MS(50));
        beats.answered(Beat { seq: 2 }, start + MS(50));
        assert_eq!(beats.poll(start + MS(100)), HeartbeatAction::Lost);
    }
}
