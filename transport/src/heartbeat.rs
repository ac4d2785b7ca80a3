//! Heartbeats, without I/O or clock: an answer shows that the peer is there.

use std::time::{Duration, Instant};

use crate::wire::head::Beat;

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

/// The side that sends heartbeats and wants each answered. Its time is best that in which it was [awake](crate::awake).
#[derive(Debug, Clone)]
pub struct Heartbeats {
    interval: Duration,
    lease: Duration,
    next: Instant,
    seq: u64,
    /// Since when an answer is awaited.
    asked: Option<Instant>,
}

impl Heartbeats {
    /// Sends a beat every `interval` from `now` on, and gives the peer up when none was answered for a `lease`. That begins with
    /// the first beat that is not: a peer that was not asked is not silent.
    #[must_use]
    pub fn new(interval: Duration, lease: Duration, now: Instant) -> Self {
        Self {
            interval,
            lease,
            next: now,
            seq: 0,
            asked: None,
        }
    }

    /// What to do at `now`. Beats that were missed are not made up for.
    pub fn poll(&mut self, now: Instant) -> HeartbeatAction {
        let lost = self.asked.map(|asked| asked + self.lease);
        if lost.is_some_and(|lost| now >= lost) {
            return HeartbeatAction::Lost;
        }
        if now < self.next {
            return HeartbeatAction::Wait(lost.map_or(self.next, |lost| lost.min(self.next)));
        }
        self.seq += 1;
        self.asked.get_or_insert(now);
        self.next = now + self.interval;
        HeartbeatAction::Send(Beat { seq: self.seq })
    }

    /// An answer came at `now`. One to a beat that was never sent is ignored.
    pub fn answered(&mut self, beat: Beat, now: Instant) {
        if (1..=self.seq).contains(&beat.seq) {
            // It is heard now, whichever beat it answers.
            self.asked = (beat.seq < self.seq).then_some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

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

    #[test]
    fn a_peer_that_was_not_asked_is_not_silent() {
        let start = Instant::now();
        let mut beats = Heartbeats::new(MS(25), MS(100), start);
        beats.poll(start);
        beats.answered(Beat { seq: 1 }, start + MS(1));
        // The next question is what its silence is counted from: it may stand still for a whole lease.
        beats.poll(start + MS(25));
        assert_eq!(
            beats.poll(start + MS(124)),
            HeartbeatAction::Send(Beat { seq: 3 })
        );
        assert_eq!(
            beats.poll(start + MS(124)),
            HeartbeatAction::Wait(start + MS(125))
        );
        assert_eq!(beats.poll(start + MS(125)), HeartbeatAction::Lost);
    }
}
