//! Why an operation can't go on, and because of whom. Pure: no I/O and no clock.
//!
//! The driver of an operation says what it hears ([`Event`]), and gets the error if that ends the operation. What the time brings it
//! asks for with [`Verdict::decide`].
//!
//! | heard | what follows |
//! |---|---|
//! | the authority says that a rank is lost, or revokes all | the end, with that rank or that cause |
//! | a link has ended, or can't be made | a suspicion: the end, if the authority says nothing until its time is over |
//! | a new link in its place | nothing is suspected any more, if the old link carried nothing of the operation |
//! | a peer gave the operation up | the end, with the peer's cause |
//! | a peer is in a later operation | the end: that rank has left |
//! | a peer asks for something else | the end: both ranks disagree |
//! | the deadline of this rank or of a peer | the ranks ask each other who is still there ([`roll_call`]), and name who is not |
//!
//! No rank works out for itself who was lost because of whom: the node that had the process knows that, and the head.

mod lost;
mod roll_call;
mod watch;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kolo_transport::ids::{CallId, Rank};

use crate::cause::Cause;
use crate::error::{CollectiveError, DOING};
use crate::operation::{Operation, Tag};
use crate::stall::{Missing, as_said};
use roll_call::RollCall;

pub(crate) use lost::Lost;
pub(crate) use roll_call::Seen;
pub(crate) use watch::{Report, Watch};

/// What the driver of an operation hears.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Event {
    /// The authority says why no operation goes on.
    Word(CollectiveError),
    /// The link to a rank that the operation needs has ended at this time. `is_used`: it carried something of the operation.
    LinkEnded {
        rank: Rank,
        at: Instant,
        reason: String,
        is_used: bool,
    },
    /// No link to a rank that the operation needs can be made, as was found at this time.
    NoLink {
        rank: Rank,
        at: Instant,
        error: CollectiveError,
    },
    /// A link to a rank has come. `replaces`: it takes the place of one that carried something of the operation.
    LinkMade { rank: Rank, replaces: bool },
    /// A peer says something about this operation.
    Told { by: Rank, cause: Cause },
    /// A rank that the operation waits for is in a later one.
    IsAhead { rank: Rank, tag: Tag },
    /// A peer asks for another operation at the same place.
    AsksFor { rank: Rank, operation: Operation },
}

/// What the time brings.
#[derive(Debug, PartialEq)]
pub(crate) enum Ruling {
    /// Nothing before [`Verdict::next`].
    Wait,
    /// All peers are to be asked who is still there.
    CallTheRoll,
    /// The operation ends.
    End(CollectiveError),
}

/// An end of a link that the authority has not explained yet.
#[derive(Debug)]
struct Suspicion {
    rank: Rank,
    error: CollectiveError,
    until: Instant,
    /// A new link to the rank does not help: what the old one carried is lost.
    is_used: bool,
}

/// What is known of the ranks of one operation that do not come.
#[derive(Debug)]
pub(crate) struct Verdict {
    me: Rank,
    tag: Tag,
    request: Operation,
    started: Instant,
    /// The word of the authority comes in this time, if it comes.
    patience: Duration,
    /// In the order in which the links ended.
    suspicions: Vec<Suspicion>,
    roll_call: Option<RollCall>,
    /// Ranks that have said that their deadline has passed, too.
    here: BTreeSet<Rank>,
    /// Late ranks that this rank or others miss.
    missed: BTreeSet<Rank>,
    /// Somebody misses ranks of which the peers were not told.
    is_news: bool,
    /// What ranks say that they do instead, and when they said so.
    doing: BTreeMap<Rank, (String, Instant)>,
}

impl Verdict {
    pub(crate) fn new(
        me: Rank,
        (tag, request): (Tag, Operation),
        started: Instant,
        patience: Duration,
    ) -> Self {
        Self {
            me,
            tag,
            request,
            started,
            patience,
            suspicions: Vec::new(),
            roll_call: None,
            here: BTreeSet::new(),
            missed: BTreeSet::new(),
            is_news: false,
            doing: BTreeMap::new(),
        }
    }

    /// Takes in what was heard. Returns the error of the operation if that ends it.
    pub(crate) fn hear(&mut self, event: Event) -> Result<(), CollectiveError> {
        match event {
            Event::Word(error) => Err(error),
            Event::LinkEnded {
                rank,
                at,
                reason,
                is_used,
            } => {
                let error = CollectiveError::PeerLost { rank, reason };
                self.suspect(rank, error, at, is_used)
            }
            Event::NoLink { rank, at, error } => match error {
                CollectiveError::Connect { .. } => self.suspect(rank, error, at, false),
                // A rank that is there has failed, or this one.
                _ => Err(error),
            },
            Event::LinkMade { rank, replaces } => {
                if replaces
                    || self
                        .suspicions
                        .iter()
                        .any(|one| one.rank == rank && one.is_used)
                {
                    return Err(CollectiveError::PeerLost {
                        rank,
                        reason: "its link was replaced while it was in use".to_owned(),
                    });
                }
                self.suspicions.retain(|one| one.rank != rank);
                Ok(())
            }
            Event::Told { by, cause } => self.told(by, cause),
            Event::IsAhead { rank, tag } => Err(CollectiveError::PeerLeft {
                rank,
                reason: format!(
                    "it is in {tag} while this rank is in {}, {}",
                    self.tag, self.request
                ),
            }),
            Event::AsksFor { rank, operation } => Err(self.mismatch(rank, &operation)),
        }
    }

    /// A rank has said before that its deadline has passed.
    pub(crate) fn is_here(&mut self, rank: Rank) {
        self.here.insert(rank);
    }

    /// A rank has said, at this time, what it does instead of coming to this operation.
    pub(crate) fn does(&mut self, rank: Rank, doing: String, at: Instant) {
        self.doing.insert(rank, (doing, at));
    }

    fn suspect(
        &mut self,
        rank: Rank,
        error: CollectiveError,
        at: Instant,
        is_used: bool,
    ) -> Result<(), CollectiveError> {
        if self.patience.is_zero() {
            return Err(self.with_its_words(error));
        }
        if !self.suspects(rank) {
            self.suspicions.push(Suspicion {
                rank,
                error,
                until: at + self.patience,
                is_used,
            });
        }
        Ok(())
    }

    /// The ranks of suspicions.
    pub(crate) fn suspected(&self) -> impl Iterator<Item = Rank> {
        self.suspicions.iter().map(|one| one.rank)
    }

    /// Nothing depends on these ranks any more.
    pub(crate) fn acquit(&mut self, ranks: &[Rank]) {
        self.suspicions.retain(|one| !ranks.contains(&one.rank));
    }

    /// Whether the link to a rank has ended, and it is not known yet what that means.
    pub(crate) fn suspects(&self, rank: Rank) -> bool {
        self.suspicions.iter().any(|one| one.rank == rank)
    }

    fn told(&mut self, by: Rank, cause: Cause) -> Result<(), CollectiveError> {
        match cause {
            Cause::Stalled { asked } => {
                let mine = self.request.to_string();
                // Who has no data takes part in whatever the others ask for, and hears of that in other words.
                let has_joined = self.request.is_join() || asked == Operation::JOIN.to_string();
                if asked != mine && !has_joined {
                    return Err(CollectiveError::Mismatch {
                        rank: self.me,
                        asked: mine,
                        other: by,
                        other_asked: asked,
                    });
                }
                self.here.insert(by);
                Ok(())
            }
            Cause::Missed { late } => {
                self.here.insert(by);
                self.miss(late);
                Ok(())
            }
            Cause::Failure(mut error) => {
                if let CollectiveError::Deadline { late, .. } = &mut error {
                    // The peer may have given up before it had heard of all.
                    late.extend(self.still_missed());
                    late.sort_unstable();
                    late.dedup();
                }
                Err(error.heard_in(CallId(self.tag.call), &self.request.to_string()))
            }
        }
    }

    /// Somebody misses these ranks.
    fn miss(&mut self, late: impl IntoIterator<Item = Rank>) {
        for rank in late {
            self.is_news |= self.missed.insert(rank);
        }
    }

    /// What the peers are to be told of late ranks, if that is news.
    pub(crate) fn take_news(&mut self) -> Option<Cause> {
        std::mem::take(&mut self.is_news).then(|| self.missed())?
    }

    /// What a peer that is linked from now on is to be told of late ranks.
    pub(crate) fn missed(&self) -> Option<Cause> {
        let late: Vec<Rank> = self.missed.iter().copied().collect();
        (!late.is_empty()).then_some(Cause::Missed { late })
    }

    /// Of the ranks that were missed, those that have not come by now.
    fn still_missed(&self) -> Vec<Rank> {
        let missed = self.missed.iter().copied();
        missed
            .filter(|rank| *rank != self.me && !self.here.contains(rank))
            .collect()
    }

    /// Ends the operation if the time of a suspicion is over.
    pub(crate) fn judge_suspicions(&mut self, now: Instant) -> Result<(), CollectiveError> {
        if self.suspicions.iter().any(|one| now >= one.until) {
            return Err(self.end_by_suspicion());
        }
        Ok(())
    }

    /// What the time brings, with what is seen of all ranks, in order.
    pub(crate) fn decide(&mut self, now: Instant, deadline: Instant, seen: &[Seen]) -> Ruling {
        if let Err(error) = self.judge_suspicions(now) {
            return Ruling::End(error);
        }
        let Some(roll_call) = &mut self.roll_call else {
            if now < deadline && self.here.is_empty() {
                return Ruling::Wait;
            }
            let limit = deadline.saturating_duration_since(self.started);
            self.roll_call = Some(RollCall::new(now, limit));
            return Ruling::CallTheRoll;
        };
        if roll_call.is_answered_now(now) {
            let late = roll_call::who_is_late(self.me, seen, &self.here);
            self.miss(late);
        }
        let missed = self.still_missed();
        let is_over = |roll_call: &mut RollCall| roll_call.is_over(now, !missed.is_empty());
        if !self.roll_call.as_mut().is_some_and(is_over) {
            return Ruling::Wait;
        }
        if !self.suspicions.is_empty() {
            // That is not lateness.
            return Ruling::End(self.end_by_suspicion());
        }
        if !missed.is_empty() {
            return Ruling::End(self.late(now, missed));
        }
        let mut waited = roll_call::waited_for(seen);
        if waited.iter().any(|rank| !self.here.contains(rank)) {
            waited.retain(|rank| !self.here.contains(rank));
        }
        Ruling::End(self.late(now, waited))
    }

    /// When to decide again if nothing is heard.
    pub(crate) fn next(&self, deadline: Instant) -> Instant {
        let at = match &self.roll_call {
            Some(roll_call) => roll_call.next(),
            None if self.here.is_empty() => deadline,
            // A peer's deadline has passed.
            None => self.started,
        };
        self.next_suspicion(at)
    }

    /// When the first suspicion is over, or `limit`.
    pub(crate) fn next_suspicion(&self, limit: Instant) -> Instant {
        let suspicions = self.suspicions.iter().map(|one| one.until);
        suspicions.fold(limit, Instant::min)
    }

    /// Whether the deadline of this rank or of another one has passed.
    pub(crate) fn is_calling_the_roll(&self) -> bool {
        self.roll_call.is_some()
    }

    fn end_by_suspicion(&mut self) -> CollectiveError {
        let first = self.suspicions.iter().map(|one| one.until).min();
        let first = (self.suspicions.iter()).position(|one| Some(one.until) == first);
        let one = self.suspicions.swap_remove(first.unwrap_or(0));
        self.with_its_words(one.error)
    }

    /// The error of ranks that did not come in time. If there are none, this rank waits for nobody but itself.
    pub(crate) fn late(&self, now: Instant, late: Vec<Rank>) -> CollectiveError {
        let doing = if late.is_empty() {
            let doing = "it does not know yet whether the ranks share memory".to_owned();
            vec![Missing {
                rank: self.me,
                doing,
            }]
        } else {
            late.iter()
                .filter_map(|rank| self.what_it_does(*rank, now))
                .take(DOING)
                .collect()
        };
        let waited = now.saturating_duration_since(self.started);
        CollectiveError::Deadline {
            operation: self.request.to_string(),
            waited: Duration::from_millis(waited.as_millis() as u64),
            late: if late.is_empty() { vec![self.me] } else { late },
            doing,
        }
    }

    /// What a rank said that it does instead of coming to this operation.
    pub(crate) fn what_it_does(&self, rank: Rank, now: Instant) -> Option<Missing> {
        let (doing, at) = self.doing.get(&rank)?;
        let doing = as_said(doing, now.saturating_duration_since(*at));
        Some(Missing { rank, doing })
    }

    /// With what a lost rank had said that it did instead of coming: it may have ended because of that.
    fn with_its_words(&self, error: CollectiveError) -> CollectiveError {
        let CollectiveError::PeerLost { rank, mut reason } = error else {
            return error;
        };
        if let Some((doing, _)) = self.doing.get(&rank) {
            reason.extend(["; it had said: ", doing]);
        }
        CollectiveError::PeerLost { rank, reason }
    }

    fn mismatch(&self, peer: Rank, theirs: &Operation) -> CollectiveError {
        let (mut asked, mut other_asked) = (self.request.to_string(), theirs.to_string());
        if asked == other_asked {
            // Only how it is done differs: the ranks have different tuning.
            asked = format!("{asked} by the {} algorithm", self.request.algorithm);
            other_asked = format!("{other_asked} by the {} algorithm", theirs.algorithm);
        }
        CollectiveError::Mismatch {
            rank: self.me,
            asked,
            other: peer,
            other_asked,
        }
    }
}
