//! The end of an operation by its time: the ranks that are there find out together who is late.
//!
//! A rank that this one waits for may itself wait for the one that is late, and of several late ranks each may be missed by
//! another one. So a rank whose deadline has passed says so, and so do all that hear of it. A rank that has said nothing after a
//! while is late. Ranks tell each other whom they miss, and shortly after that all give up, with the names of all that are missed.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kolo_transport::ids::Rank;

use crate::times::{ANSWER, LONGEST_ANSWER};

/// Ranks that have said nothing after the question for this part of the time limit are late ([`ANSWER`] at least) ...
const OF_LIMIT: u32 = 30;
/// ... a part of it later all have heard whom the others miss ...
const GATHER: u32 = 4;
/// ... and if all have answered, somebody else has so many times as long to name one.
const NAMED: u32 = 2;

/// What is to be done when, after the deadline.
#[derive(Debug)]
pub(super) struct RollCall {
    answer_at: Instant,
    /// Those that were asked have had their time.
    is_answered: bool,
    gather: Duration,
    /// When all that is known of late ranks is with all, once somebody is known to be late.
    gathered_at: Option<Instant>,
    named_at: Instant,
}

impl RollCall {
    pub(super) fn new(now: Instant, limit: Duration) -> Self {
        let answer = (limit / OF_LIMIT).clamp(ANSWER, LONGEST_ANSWER);
        Self {
            answer_at: now + answer,
            is_answered: false,
            gather: answer / GATHER,
            gathered_at: None,
            named_at: now + NAMED * answer,
        }
    }

    /// Whether those that were asked have had their time. Once.
    pub(super) fn is_answered_now(&mut self, now: Instant) -> bool {
        now >= self.answer_at && !std::mem::replace(&mut self.is_answered, true)
    }

    /// Whether it is time to give up.
    pub(super) fn is_over(&mut self, now: Instant, misses: bool) -> bool {
        if !misses {
            self.gathered_at = None;
        } else if self.is_answered {
            self.gathered_at.get_or_insert(now + self.gather);
        }
        now >= self.named_at || self.gathered_at.is_some_and(|at| now >= at)
    }

    /// When to look next.
    pub(super) fn next(&self) -> Instant {
        match self.gathered_at {
            _ if !self.is_answered => self.answer_at,
            Some(at) => at.min(self.named_at),
            None => self.named_at,
        }
    }
}

/// What is known of a rank at this moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// The present step waits for it.
    pub(crate) is_waited_for: bool,
    pub(crate) is_linked: bool,
    /// It has come to this operation, or is past it.
    pub(crate) has_come: bool,
}

/// The ranks that the present step waits for.
pub(super) fn waited_for(seen: &[Seen]) -> Vec<Rank> {
    let ranks = (0..).map(Rank).zip(seen);
    ranks
        .filter(|(_, seen)| seen.is_waited_for)
        .map(|(rank, _)| rank)
        .collect()
}

/// The ranks that have not answered: of the ones that `me` waits for, and, if one of those has never come, of all that are linked
/// and have not come either.
///
/// Nobody gets through an operation to which somebody has not come. But nothing may have come from a rank that is here, either,
/// and a rank that is through does not answer: if one that came does not, and nobody has to wait for it, others may be through, too.
pub(super) fn who_is_late(me: Rank, seen: &[Seen], here: &BTreeSet<Rank>) -> Vec<Rank> {
    let ranks = || (0..).map(Rank).zip(seen).filter(|(rank, _)| *rank != me);
    let has_come = |rank: Rank, seen: &Seen| seen.has_come || here.contains(&rank);
    let is_waited = |(rank, seen): &(Rank, &Seen)| seen.is_waited_for && !here.contains(rank);
    let is_through =
        |(rank, seen): (Rank, &Seen)| !seen.is_waited_for && seen.has_come && !here.contains(&rank);
    let waits_for_absent = ranks()
        .filter(is_waited)
        .any(|(rank, seen)| !has_come(rank, seen));
    let all = waits_for_absent && !ranks().any(is_through);
    let is_late = |(rank, seen): &(Rank, &Seen)| {
        is_waited(&(*rank, *seen)) || all && seen.is_linked && !has_come(*rank, seen)
    };
    ranks().filter(is_late).map(|(rank, _)| rank).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_named_before_all_had_their_time_and_none_later_than_that_needs() {
        let (start, ms) = (Instant::now(), Duration::from_millis);
        let step = |roll_call: &mut RollCall, now, misses| {
            roll_call.is_answered_now(now);
            roll_call.is_over(now, misses)
        };
        let mut call = RollCall::new(start, ms(100));
        assert_eq!(call.next(), start + ANSWER);
        // Others may be faster, and miss somebody already.
        assert!(!step(&mut call, start + ANSWER / 2, true));
        assert_eq!(call.next(), start + ANSWER);
        assert!(!step(&mut call, start + ANSWER, true));
        let gathered = start + ANSWER + ANSWER / GATHER;
        assert_eq!(call.next(), gathered);
        // Who was missed has come, and then somebody else is missed.
        assert!(!step(&mut call, gathered, false));
        assert_eq!(call.next(), start + NAMED * ANSWER);
        assert!(!step(&mut call, gathered, true));
        assert!(step(&mut call, gathered + ANSWER / GATHER, true));
        // Nobody is missed by anybody.
        let mut call = RollCall::new(start, ms(100));
        assert!(!step(&mut call, start + ANSWER, false));
        assert!(!step(&mut call, start + ANSWER + ms(1), false));
        assert!(step(&mut call, start + NAMED * ANSWER, false));
    }

    #[test]
    fn who_was_given_much_time_gets_more_to_answer() {
        let (start, seconds) = (Instant::now(), Duration::from_secs);
        for (limit, answer) in [
            (seconds(30), seconds(1)),
            (seconds(6000), LONGEST_ANSWER),
            (Duration::ZERO, ANSWER),
        ] {
            assert_eq!(RollCall::new(start, limit).next(), start + answer);
        }
    }
}
