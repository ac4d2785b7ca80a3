//! Asking whether those that a rank waits for are gone, where no link would tell.

use std::time::{Duration, Instant};

use kolo_transport::ids::Rank;

use super::{Mode, Run};
use crate::cause::Cause;
use crate::error::CollectiveError;

/// A rank that waits for so long and hears nothing asks.
const ASK: Duration = Duration::from_millis(100);

/// What is to be asked when.
#[derive(Debug)]
pub(super) struct Questions {
    at: Option<Instant>,
    /// It is being asked of some.
    asked: bool,
    /// Something came, or a link came or went, since that was looked at last.
    stirred: bool,
}

impl Questions {
    pub(super) fn new(started: Instant) -> Self {
        Self {
            at: Some(started + ASK),
            asked: false,
            stirred: false,
        }
    }

    /// Something has come, or a link has come or gone.
    pub(super) fn stir(&mut self) {
        self.stirred = true;
    }

    /// Nothing has come for a while.
    pub(super) fn is_quiet(&self) -> bool {
        self.at.is_none() && !self.stirred
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
            self.questions.at = Some(now + ASK);
        } else if was_due {
            let late = self.waited_for();
            // Who gave up an operation before this one because of another rank is not likely to come.
            let culprits: Vec<Rank> = late
                .iter()
                .filter_map(|rank| self.culprit_of(*rank))
                .collect();
            for peer in (0..self.engine.world).filter(|peer| *peer != self.engine.me) {
                let link = &self.engine.links[peer as usize];
                if link.is_silent() && link.found_gone.is_none() {
                    let waited = late.contains(&Rank(peer))
                        || culprits.contains(&Rank(peer))
                        || self.awaits_consent(peer);
                    self.questions.asked = true;
                    (self.ask_whether_gone)(peer, waited);
                }
            }
        }
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
        link.found_gone = Some(reason);
        let frame = self.gone_frame(rank);
        self.unsaid = true;
        for (peer, link) in (0..).zip(&mut self.engine.links) {
            if peer != rank && Some(peer) != from {
                link.notify(&frame);
            }
        }
        // On a link that is there may be all that is needed of it.
        if self.engine.links[rank as usize].is_up() || !self.needs(rank) {
            return Ok(());
        }
        Err(self.lost(rank))
    }

    /// A link was made after this rank heard who is gone.
    pub(super) fn tell_who_is_gone(&mut self, peer: u32) {
        let known = (0..).zip(&self.engine.links);
        let gone: Vec<u32> = known
            .filter(|(_, link)| link.found_gone.is_some())
            .map(|(rank, _)| rank)
            .collect();
        for rank in gone {
            let frame = self.gone_frame(rank);
            self.engine.links[peer as usize].notify(&frame);
        }
    }

    fn gone_frame(&self, rank: u32) -> Vec<u8> {
        let reason = self.engine.links[rank as usize].found_gone.clone();
        let cause = Cause::Gone {
            rank: Rank(rank),
            reason: reason.unwrap_or_default(),
        };
        self.engine.notice(self.tag, &cause)
    }

    pub(super) fn end_questions(&mut self) {
        if std::mem::take(&mut self.questions.asked) {
            self.signals.lock().unwatch();
        }
    }
}
