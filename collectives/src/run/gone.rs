//! Asking whether those that a rank waits for are gone, where no link would tell.

use std::time::{Duration, Instant};

use kolo_transport::ids::Rank;

use super::{Mode, Run};
use crate::cause::Cause;
use crate::error::CollectiveError;

/// A rank that waits for so long and hears nothing asks about those that it waits for, and whose links have ended.
const ASK: Duration = Duration::from_millis(100);

/// So long after that it asks about others that it has had links to, so many at a time: peers that have never had one may wait
/// for them.
const ASK_OTHERS: Duration = Duration::from_secs(1);
const OTHERS: usize = 8;

/// What is to be asked when.
#[derive(Debug)]
pub(super) struct Questions {
    at: Option<Instant>,
    /// How often it was time to ask since something came.
    rounds: usize,
    /// It is being asked of some.
    asked: bool,
    /// Something came, a link came or went, or this rank waits for others, since that was looked at last.
    stirred: bool,
}

impl Questions {
    pub(super) fn new(started: Instant) -> Self {
        Self {
            at: Some(started + ASK),
            rounds: 0,
            asked: false,
            stirred: false,
        }
    }

    /// Something has come, a link has come or gone, or this rank waits for others now.
    pub(super) fn stir(&mut self) {
        self.stirred = true;
    }

    /// Nothing has come for a while.
    pub(super) fn is_quiet(&self) -> bool {
        self.rounds > 0 && !self.stirred
    }

    /// When to look next.
    pub(super) fn next(&self) -> Option<Instant> {
        self.at
    }
}

impl Run<'_> {
    /// Has it asked whether those are gone of whom nothing is heard, and no more when something is heard again.
    pub(super) fn look_who_is_gone(&mut self, now: Instant) {
        if self.mode != Mode::Links {
            self.questions.at = None;
            return;
        }
        // Looked at rarely: something comes all the time.
        if self.questions.at.is_some_and(|at| now < at) {
            return;
        }
        let was_due = self.questions.at.take().is_some();
        if std::mem::take(&mut self.questions.stirred) {
            self.end_questions();
            self.questions.rounds = 0;
            self.questions.at = Some(now + ASK);
        } else if was_due {
            let more = self.ask_who_is_gone(self.questions.rounds);
            self.questions.rounds += 1;
            self.questions.at = more.then_some(now + ASK_OTHERS);
        }
    }

    /// Returns whether there are more to ask about.
    fn ask_who_is_gone(&mut self, round: usize) -> bool {
        let mut suspects = self.waited_for();
        // Who gave up an operation before this one because of another rank is not likely to come.
        let culprits: Vec<Rank> = suspects
            .iter()
            .filter_map(|rank| self.culprit_of(*rank))
            .collect();
        suspects.extend(culprits);
        let mut others = Vec::new();
        let (me, world) = (self.engine.me, self.engine.world);
        for peer in (1..world).map(|distance| (me + distance) % world) {
            let link = &self.engine.links[peer as usize];
            // Its word may be in its link, behind what is not wanted yet.
            let lacks_word = self.awaits_consent(peer) && !link.is_holding();
            let waited = suspects.contains(&Rank(peer)) || lacks_word;
            if !link.is_silent() {
                continue;
            }
            if waited || link.has_ended() && link.found_gone.is_none() {
                self.questions.asked = true;
                (self.ask_whether_gone)(peer, waited);
            } else if link.found_gone.is_none() {
                others.push(peer);
            }
        }
        let before = round.saturating_sub(1) * OTHERS;
        if round > 0 {
            for peer in others.iter().skip(before).take(OTHERS) {
                self.questions.asked = true;
                (self.ask_whether_gone)(*peer, false);
            }
        }
        others.len() > round * OTHERS
    }

    /// A rank is gone, as this one or another one has found out. Who is linked with this one hears of it once.
    ///
    /// A rank that has never had a link to the one it waits for can't tell whether that one is gone or only late, and would
    /// wait until its deadline. But others may have met it.
    ///
    /// # Errors
    ///
    /// If this operation needs it.
    pub(super) fn hear_gone(
        &mut self,
        from: Option<u32>,
        rank: u32,
        reason: String,
    ) -> Result<(), CollectiveError> {
        let link = &mut self.engine.links[rank as usize];
        if rank == self.engine.me || link.found_gone.is_some() {
            return Ok(());
        }
        link.found_gone = Some(reason.clone());
        let cause = Cause::Gone {
            rank: Rank(rank),
            reason,
        };
        let frame = self.engine.notice(self.tag, &cause);
        self.unsaid = true;
        for (peer, link) in (0..).zip(&mut self.engine.links) {
            if peer != rank && Some(peer) != from {
                link.notify(&frame);
            }
        }
        // Links that are made later get it, too.
        self.signals.lock().gone_notices.insert(rank, frame);
        // On a link that is there may be all that is needed of it.
        if self.engine.links[rank as usize].is_up() || !self.needs(rank) {
            return Ok(());
        }
        Err(self.lost(rank))
    }

    pub(super) fn end_questions(&mut self) {
        if std::mem::take(&mut self.questions.asked) {
            self.signals.lock().unwatch();
        }
    }
}
