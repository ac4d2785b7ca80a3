//! The end of an operation by its time: the ranks that are there find out together who is late.
//!
//! A rank that this one waits for may itself wait for the one that is late, and of several late ranks each may be missed by
//! another one. So a rank whose deadline has passed says so, and so do all that hear of it. Who has said nothing after a while
//! is late; who misses somebody tells the others, and shortly after that all give up, with the names of all that are missed.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kolo_transport::ids::Rank;

use super::{Mode, Run};
use crate::cause::{Cause, Excuse};
use crate::error::CollectiveError;

/// After its deadline a rank asks its peers who is still there. It names those that have said nothing after
/// this time (longer if the deadline was far away, so that a loaded host is not taken for a late rank) ...
const ANSWER: Duration = Duration::from_millis(400);
const LONGEST_ANSWER: Duration = Duration::from_secs(2);
const OF_LIMIT: u32 = 30;
/// ... after a part of that in which it hears whom the others miss ...
const GATHER: u32 = 4;
/// ... and, if all have answered, waits for so many times as long for somebody else to name one.
const NAMED: u32 = 2;

/// In groups up to this size a rank whose deadline has passed asks all others, linked so far or not. In larger ones each only asks
/// those that it is linked with and some more: late ranks that nobody waits for are not named there.
const ASKS_ALL: u32 = 64;

/// What is to be done when, after the deadline.
#[derive(Debug)]
pub(super) struct Stall {
    answer_at: Instant,
    /// Those that were asked have had their time.
    answered: bool,
    gather: Duration,
    /// When all that is known of late ranks is with all, once somebody is known to be late.
    gathered_at: Option<Instant>,
    named_at: Instant,
}

impl Stall {
    fn new(now: Instant, limit: Duration) -> Self {
        let answer = (limit / OF_LIMIT).clamp(ANSWER, LONGEST_ANSWER);
        Self {
            answer_at: now + answer,
            answered: false,
            gather: answer / GATHER,
            gathered_at: None,
            named_at: now + NAMED * answer,
        }
    }

    /// Whether it is time to give up; from now on those that were asked have had their time, if it has passed.
    fn is_over(&mut self, now: Instant, misses: bool) -> bool {
        self.answered |= now >= self.answer_at;
        if !misses {
            self.gathered_at = None;
        } else if self.answered {
            self.gathered_at.get_or_insert(now + self.gather);
        }
        now >= self.named_at || self.gathered_at.is_some_and(|at| now >= at)
    }

    /// When to look next.
    pub(super) fn next(&self) -> Instant {
        match self.gathered_at {
            _ if !self.answered => self.answer_at,
            Some(at) => at.min(self.named_at),
            None => self.named_at,
        }
    }
}

/// A rank that waits has a turn so often at least ...
pub(crate) const TURN: Duration = Duration::from_secs(1);
/// ... and of the time between two of them so much counts: whoever was stopped, maybe with all others, comes back to ranks that
/// are not late because of that.
pub(crate) const MOST: Duration = Duration::from_secs(2);

impl Run<'_> {
    /// Time in which this rank stood still does not count.
    pub(super) fn move_deadline(&mut self, now: Instant) {
        // Not more often: what wakes this rank next stays the same meanwhile.
        if now >= self.awake.ticked() + TURN {
            self.deadline += self.awake.stood_still(now);
        }
    }

    /// Looks at the clock. Returns whether there is something new to tell the peers.
    pub(super) fn check_time(&mut self, fired: bool) -> Result<bool, CollectiveError> {
        let now = Instant::now();
        let now = if fired { now.max(self.wake_at()) } else { now };
        self.move_deadline(now);
        let mut told = self.look(now);
        if self.stall.is_none() {
            if now >= self.deadline || self.asked {
                self.ask_who_is_there(now);
                told = true;
            }
            return Ok(told);
        }
        let is_due = |stall: &mut Stall| now >= stall.answer_at && !stall.answered;
        if self.stall.as_mut().is_some_and(is_due) {
            let mut late = self.who_is_late();
            self.excuse(&mut late);
            let excused: Vec<Excuse> = self.excuses().cloned().collect();
            told |= self.miss(None, &late, &excused);
        }
        let missed = self.still_missed();
        let is_over = |stall: &mut Stall| stall.is_over(now, !missed.is_empty());
        if !self.stall.as_mut().is_some_and(is_over) {
            return Ok(told);
        }
        // Not late.
        self.end_postponed()?;
        if !missed.is_empty() {
            return Err(self.late(missed));
        }
        let mut waited = self.waited_for();
        if waited.is_empty() {
            return Err(self.late_itself());
        }
        if waited.iter().any(|rank| !self.has_answered(*rank)) {
            waited.retain(|rank| !self.has_answered(*rank));
        }
        Err(self.late(waited))
    }

    /// The time is over.
    fn ask_who_is_there(&mut self, now: Instant) {
        let limit = self.deadline.saturating_duration_since(self.started);
        self.stall = Some(Stall::new(now, limit));
        let asked = self.request.to_string();
        let notice = self.engine.tell(self.tag, &Cause::Stalled { asked });
        self.signals.lock().put_notice(notice);
        if self.engine.world <= ASKS_ALL {
            let (me, world) = (self.engine.me, self.engine.world);
            for peer in (0..world).filter(|peer| *peer != me) {
                let link = &self.engine.links[peer as usize];
                let is_asked_for = !link.is_up() && !link.is_over() && !self.engine.dials(peer);
                if is_asked_for || self.engine.may_begin_link(peer) {
                    (self.connect)(peer);
                }
            }
        } else {
            self.link_neighbours();
            self.request_links();
        }
    }

    /// Tells a rank whose link has just come whom somebody misses.
    pub(super) fn tell_missed(&mut self, peer: u32) {
        if !self.missed.is_empty() {
            let frame = self.missed_frame();
            self.engine.links[peer as usize].notify(&frame);
        }
    }

    fn missed_frame(&self) -> Vec<u8> {
        let late = self.missed.iter().copied().collect();
        let excused = self.excuses().cloned().collect();
        self.engine
            .notice(self.tag, &Cause::Missed { late, excused })
    }

    /// Whether a rank has come to this operation, or is past it.
    pub(super) fn has_come(&self, rank: Rank) -> bool {
        let came = self.engine.links[rank.index()].came;
        self.has_answered(rank)
            || came.is_some_and(|(tag, _)| tag >= self.tag)
            || self.mode == Mode::Shared && !self.engine.late_in_shared().contains(&rank)
    }

    /// Whether a rank has said that its deadline has passed, too.
    fn has_answered(&self, rank: Rank) -> bool {
        self.engine.links[rank.index()].stalled_in == Some(self.tag)
    }

    /// Those that have not answered: of the ones that this rank waits for, and, if one of those has never come, of all that are
    /// linked with it and have not come either.
    ///
    /// Nobody gets through an operation to which somebody has not come. But nothing may have come from a rank that is here, either,
    /// and who is through does not answer: if one that came does not, and nobody has to wait for it, others may be through, too.
    fn who_is_late(&self) -> Vec<Rank> {
        let waited = self.waited_for();
        let mut late = waited.clone();
        late.retain(|rank| !self.has_answered(*rank));
        let all = || {
            (0..self.engine.world)
                .map(Rank)
                .filter(|rank| rank.0 != self.engine.me)
        };
        let is_through = |rank: &Rank| {
            !waited.contains(rank) && self.has_come(*rank) && !self.has_answered(*rank)
        };
        if late.iter().all(|rank| self.has_come(*rank)) || all().any(|rank| is_through(&rank)) {
            return late;
        }
        late.extend(
            all().filter(|rank| self.engine.links[rank.index()].is_up() && self.is_absent(*rank)),
        );
        late.sort_unstable();
        late.dedup();
        late
    }

    /// Somebody misses these ranks, and others because of these, which all are to know. Returns whether any of that is news.
    pub(super) fn miss(&mut self, from: Option<u32>, late: &[Rank], excused: &[Excuse]) -> bool {
        // What this rank knows itself is among the excused already.
        let mut is_news = from.is_none() && !excused.is_empty();
        for rank in late {
            is_news |= self.missed.insert(*rank);
        }
        for excuse in excused {
            let rank = excuse.rank;
            let is_new = rank.0 != self.engine.me && self.excuse_of(rank).is_none();
            if is_new && excuse.culprit != rank && self.is_absent(excuse.culprit) {
                self.excused.insert(rank, excuse.clone());
                is_news = true;
            }
        }
        if is_news {
            let frame = self.missed_frame();
            self.unsaid = true;
            for (peer, link) in (0..).zip(&mut self.engine.links) {
                if Some(peer) != from {
                    link.notify(&frame);
                }
            }
        }
        is_news
    }

    /// Of the ranks that were missed, those that have not come by now and have no excuse, or none any more; all that have not come
    /// if each of them is excused by another one.
    pub(super) fn still_missed(&self) -> Vec<Rank> {
        let missed: BTreeSet<Rank> = self
            .missed
            .iter()
            .chain(self.excused.keys())
            .copied()
            .filter(|rank| rank.0 != self.engine.me && !self.has_answered(*rank))
            .collect();
        let is_guilty = |rank: &&Rank| self.excuse_of(**rank).is_none();
        let guilty: Vec<Rank> = missed.iter().filter(is_guilty).copied().collect();
        if guilty.is_empty() {
            return missed.into_iter().collect();
        }
        guilty
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_named_before_all_had_their_time_and_none_later_than_that_needs() {
        let (start, ms) = (Instant::now(), Duration::from_millis);
        let mut stall = Stall::new(start, ms(100));
        assert_eq!(stall.next(), start + ANSWER);
        // Others may be faster, and miss somebody already.
        assert!(!stall.is_over(start + ANSWER / 2, true));
        assert_eq!(stall.next(), start + ANSWER);
        assert!(!stall.is_over(start + ANSWER, true));
        let gathered = start + ANSWER + ANSWER / GATHER;
        assert_eq!(stall.next(), gathered);
        // Who was missed has come, and then somebody else is missed.
        assert!(!stall.is_over(gathered, false));
        assert_eq!(stall.next(), start + NAMED * ANSWER);
        assert!(!stall.is_over(gathered, true));
        assert!(stall.is_over(gathered + ANSWER / GATHER, true));
        // Nobody is missed by anybody.
        let mut stall = Stall::new(start, ms(100));
        assert!(!stall.is_over(start + ANSWER, false));
        assert!(!stall.is_over(start + ANSWER + ms(1), false));
        assert!(stall.is_over(start + NAMED * ANSWER, false));
    }

    #[test]
    fn who_was_given_much_time_gets_more_to_answer() {
        let (start, seconds) = (Instant::now(), Duration::from_secs);
        assert_eq!(Stall::new(start, seconds(30)).next(), start + seconds(1));
        assert_eq!(
            Stall::new(start, seconds(6000)).next(),
            start + LONGEST_ANSWER
        );
        assert_eq!(Stall::new(start, Duration::ZERO).next(), start + ANSWER);
    }
}
