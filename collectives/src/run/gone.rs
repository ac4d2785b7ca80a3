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
const OTHERS: u32 = 8;

/// What is to be asked when.
#[derive(Debug)]
pub(super) struct Questions {
    at: Option<Instant>,
    /// How often it was time to ask since something came.
    rounds: u32,
    /// How far from this rank the next one is of those that are asked about later.
    distance: u32,
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
            distance: 1,
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
        if self.mode == Mode::Shared {
            self.questions.at = None;
            return;
        }
        if self.questions.stirred && self.questions.rounds > 0 {
            // What was asked for so far may be answered by what has come.
            self.end_questions();
            self.questions = Questions::new(now);
        }
        // Looked at rarely: something comes all the time.
        if self.questions.at.is_some_and(|at| now < at) {
            return;
        }
        if std::mem::take(&mut self.questions.stirred) {
            self.questions.at = Some(now + ASK);
        } else if self.questions.at.take().is_some() {
            self.ask_who_is_gone();
            self.questions.rounds += 1;
            let more = self.questions.distance < self.engine.world;
            self.questions.at = more.then_some(now + ASK_OTHERS);
        }
    }

    fn ask_who_is_gone(&mut self) {
        let (me, world) = (self.engine.me, self.engine.world);
        let suspects = self.suspects();
        for peer in (0..world).filter(|peer| *peer != me) {
            let link = &self.engine.links[peer as usize];
            let waited = suspects.contains(&Rank(peer));
            let has_ended = link.has_ended() && link.found_gone.is_none();
            if link.is_silent() && (waited || has_ended) {
                self.questions.asked |= (self.ask_whether_gone)(peer, waited);
            }
        }
        if self.questions.rounds == 0 {
            return;
        }
        let mut left = OTHERS;
        while left > 0 && self.questions.distance < world {
            let peer = (me + self.questions.distance) % world;
            self.questions.distance += 1;
            let link = &self.engine.links[peer as usize];
            if link.is_silent() && link.found_gone.is_none() && (self.ask_whether_gone)(peer, false)
            {
                self.questions.asked = true;
                left -= 1;
            }
        }
    }

    /// Those that this rank waits for, and those because of whom they may not come.
    fn suspects(&self) -> Vec<Rank> {
        let mut suspects = self.waited_for();
        // Who gave up an operation before this one because of another rank is not likely to come.
        let culprits: Vec<Rank> = suspects
            .iter()
            .flat_map(|rank| [self.culprit_of(*rank), self.may_not_come_for(*rank)])
            .flatten()
            .collect();
        suspects.extend(culprits);
        // A word may be in its link, behind what is not wanted yet.
        let lacks_word = |peer: &u32| {
            self.awaits_consent(*peer) && !self.engine.links[*peer as usize].is_holding()
        };
        suspects.extend((0..self.engine.world).filter(lacks_word).map(Rank));
        suspects
    }

    /// Decides what it means that ranks are gone, after what they have sent was read.
    pub(super) fn judge_the_gone(&mut self) -> Result<(), CollectiveError> {
        if self.found_gone.is_empty() {
            return Ok(());
        }
        let suspects = self.suspects();
        let gone = std::mem::take(&mut self.found_gone);
        // Who left because of another rank that is lost is not the one to be named.
        let left = gone.iter().find(|(rank, _)| {
            let is_waited = suspects.contains(&Rank(*rank));
            is_waited
                && !self.engine.links[*rank as usize].is_up()
                && self.left_because_of_loss(*rank)
        });
        if let Some((rank, _)) = left {
            self.lose_peer(*rank)?;
        }
        for (rank, reason) in gone {
            let link = &self.engine.links[rank as usize];
            if !suspects.contains(&Rank(rank)) || !link.is_silent() {
                self.hear_gone(None, rank, reason)?;
            } else if link.is_up() && !self.questions.is_quiet() {
                // More of it may be on its way through this host.
                self.found_gone.push((rank, reason));
            } else {
                // Nothing more comes over it.
                self.engine.links[rank as usize].end(reason.clone());
                if self.left_because_of_loss(rank) {
                    self.lose_peer(rank)?;
                } else {
                    (self.lose)(rank, &reason);
                }
            }
        }
        let obstacle = self.signals.lock().obstacle(self.tag);
        obstacle.map_or(Ok(()), Err)
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
        self.lose_peer(rank)
    }

    pub(super) fn end_questions(&mut self) {
        if std::mem::take(&mut self.questions.asked) {
            self.signals.lock().unwatch();
        }
    }
}
