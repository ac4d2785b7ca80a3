//! Heartbeats, without I/O or clock: an answer shows that the peer is there.

use std::time::{Duration, Instant};

use crate::wire::head::Beat;

/// What a [`Heartbeats`] wants done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeartbeatAction {
    /// Send this beat now.
    Send(Beat),
    /// Nothing for so long, unless an answer comes.
    Wait(Duration),
    /// The peer has not answered for a whole lease: it is lost.
    Lost,
}

/// The side that sends heartbeats and wants each answered.
///
/// It has two clocks. Beats go out by the real one, so that a side that hardly ever has a turn says that it is there whenever it
/// has one. The silence of the peer is best counted in time in which this side was [awake](crate::awake).
#[derive(Debug, Clone)]
pub struct Heartbeats {
    interval: Duration,
    lease: Duration,
    /// By the real clock.
    next: Instant,
    seq: u64,
    /// Since when an answer is awaited, in time awake.
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

    /// What to do at `now`, which is `awake` in time awake. Beats that were missed are not made up for.
    pub fn poll(&mut self, now: Instant, awake: Instant) -> HeartbeatAction {
        let lost = self.asked.map(|asked| asked + self.lease);
        if lost.is_some_and(|lost| awake >= lost) {
            return HeartbeatAction::Lost;
        }
        if now < self.next {
            let next = self.next - now;
            return HeartbeatAction::Wait(lost.map_or(next, |lost| next.min(lost - awake)));
        }
        self.seq += 1;
        self.asked.get_or_insert(awake);
        self.next = now + self.interval;
        HeartbeatAction::Send(Beat { seq: self.seq })
    }

    /// An answer came at this time awake. One to a beat that was never sent is ignored.
    pub fn answered(&mut self, beat: Beat, awake: Instant) {
        if (1..=self.seq).contains(&beat.seq) {
            // It is heard now, whichever beat it answers.
            self.asked = (beat.seq < self.seq).then_some(awake);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    /// Both clocks agree.
    fn poll(beats: &mut Heartbeats, now: Instant) -> HeartbeatAction {
        beats.poll(now, now)
    }

    #[test]
    fn beats_go_out_at_their_interval_until_the_peer_is_silent_for_a_lease() {
        let start = Instant::now();
        let mut beats = Heartbeats::new(MS(25), MS(100), start);
        assert_eq!(
            poll(&mut beats, start),
            HeartbeatAction::Send(Beat { seq: 1 })
        );
        assert_eq!(
            poll(&mut beats, start + MS(1)),
            HeartbeatAction::Wait(MS(24))
        );
        assert_eq!(
            poll(&mut beats, start + MS(25)),
            HeartbeatAction::Send(Beat { seq: 2 })
        );
        beats.answered(Beat { seq: 1 }, start + MS(30));
        // Late by three intervals: one beat, not three.
        assert_eq!(
            poll(&mut beats, start + MS(105)),
            HeartbeatAction::Send(Beat { seq: 3 })
        );
        assert_eq!(
            poll(&mut beats, start + MS(106)),
            HeartbeatAction::Wait(MS(24))
        );
        assert_eq!(poll(&mut beats, start + MS(130)), HeartbeatAction::Lost);
    }

    #[test]
    fn an_answer_to_nothing_renews_nothing() {
        let start = Instant::now();
        let mut beats = Heartbeats::new(MS(25), MS(100), start);
        poll(&mut beats, start);
        beats.answered(Beat { seq: 0 }, start + MS(50));
        beats.answered(Beat { seq: 2 }, start + MS(50));
        assert_eq!(poll(&mut beats, start + MS(100)), HeartbeatAction::Lost);
    }

    #[test]
    fn a_peer_that_was_not_asked_is_not_silent() {
        let start = Instant::now();
        let mut beats = Heartbeats::new(MS(25), MS(100), start);
        poll(&mut beats, start);
        beats.answered(Beat { seq: 1 }, start + MS(1));
        // The next question is what its silence is counted from: it may stand still for a whole lease.
        poll(&mut beats, start + MS(25));
        assert_eq!(
            poll(&mut beats, start + MS(124)),
            HeartbeatAction::Send(Beat { seq: 3 })
        );
        assert_eq!(
            poll(&mut beats, start + MS(124)),
            HeartbeatAction::Wait(MS(1))
        );
        assert_eq!(poll(&mut beats, start + MS(125)), HeartbeatAction::Lost);
    }

    #[test]
    fn a_side_that_hardly_ever_has_a_turn_beats_at_each_of_them() {
        let start = Instant::now();
        let mut beats = Heartbeats::new(MS(250), MS(3000), start);
        // A turn every 1.7 s, of which 0.25 s count as time awake.
        for turn in 0..10_u32 {
            let beat = beats.poll(start + MS(1700) * turn, start + MS(250) * turn);
            let seq = u64::from(turn) + 1;
            assert_eq!(beat, HeartbeatAction::Send(Beat { seq }));
            beats.answered(Beat { seq }, start + MS(250) * turn);
        }
    }
}
