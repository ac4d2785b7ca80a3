//! Ranks that did not come in time, and because of whom.

use std::time::Duration;

use kolo_transport::ids::Rank;

use super::Run;
use crate::cause::{Cause, Excuse};
use crate::error::{CollectiveError, DOING};
use crate::operation::Tag;
use crate::stall::Missing;

/// Why a rank does not come to an operation.
pub(super) struct WhyLate {
    /// Because of whom it did not get through ...
    pub(super) culprit: Rank,
    /// ... which operation before this one.
    pub(super) tag: Tag,
    pub(super) fault: Fault,
}

/// What is known of who is the cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// The operation was given up, because that one is gone or can't be reached.
    Lost,
    /// That one is lost in another group.
    LostElsewhere,
    /// It was given up, because that one was late.
    Late,
    /// That one is still waited for, after the deadline.
    Awaited,
}

impl Fault {
    pub(super) fn is_loss(self) -> bool {
        matches!(self, Self::Lost | Self::LostElsewhere)
    }
}

fn is_loss(cause: &Cause) -> bool {
    matches!(cause, Cause::Lost { .. } | Cause::Connect { .. })
}

impl Run<'_> {
    /// The error of ranks that did not come in time.
    pub(super) fn late(&mut self, mut late: Vec<Rank>) -> CollectiveError {
        self.report_before_the_end();
        self.excuse(&mut late);
        if let Some((rank, why)) = late.iter().find_map(|rank| self.lost_for(*rank)) {
            let WhyLate {
                culprit,
                tag,
                fault,
            } = why;
            let did = match fault {
                Fault::LostElsewhere => "lost it in another group".to_owned(),
                _ => format!("gave up {tag} because of it"),
            };
            let reason = format!(
                "rank {} {did}, and did not come to {}",
                self.job_rank(rank),
                self.tag
            );
            return CollectiveError::PeerLost {
                rank: culprit,
                reason,
            };
        }
        let excused = self.excuses().cloned().map(Missing::from);
        let excused: Vec<Missing> = excused.take(DOING).collect();
        let mut doing = self.what_they_do(&late);
        doing.truncate(DOING - excused.len());
        doing.extend(excused);
        CollectiveError::Deadline {
            operation: self.request.to_string(),
            waited: Duration::from_millis(self.started.elapsed().as_millis() as u64),
            doing,
            late,
        }
    }

    /// The error of a rank that waits for no other one: what it waits for is its own.
    pub(super) fn late_itself(&mut self) -> CollectiveError {
        let me = Rank(self.engine.me);
        let mut error = self.late(vec![me]);
        if let CollectiveError::Deadline { doing, .. } = &mut error {
            doing.insert(
                0,
                Missing {
                    rank: me,
                    doing: "it does not know yet whether the ranks share memory".to_owned(),
                },
            );
        }
        error
    }

    /// With what a lost rank that did not come had said that it does. It may have gone because of that: two ranks that wait for each
    /// other in different operations reach their deadlines one after the other.
    pub(super) fn with_what_it_did(&self, error: CollectiveError) -> CollectiveError {
        let CollectiveError::PeerLost { rank, mut reason } = error else {
            return error;
        };
        if self.is_absent(rank)
            && let Some(said) = self.what_they_do(&[rank]).pop()
        {
            reason.extend(["; it had said: ", &said.doing]);
        }
        CollectiveError::PeerLost { rank, reason }
    }

    /// Puts the ranks because of whom others are late in the place of these. Leaves them in order.
    pub(super) fn excuse(&mut self, late: &mut Vec<Rank>) {
        let mut looked = 0;
        while let Some(rank) = late.get(looked).copied() {
            looked += 1;
            self.find_excuse(rank);
            // That one may have an excuse itself.
            if let Some(excuse) = self.excuse_of(rank)
                && !late.contains(&excuse.culprit)
            {
                late.push(excuse.culprit);
            }
        }
        late.sort_unstable();
        late.dedup();
        if late.iter().any(|rank| self.excuse_of(*rank).is_none()) {
            late.retain(|rank| self.excuse_of(*rank).is_none());
        }
    }

    /// Looks whether a rank is late because of another one.
    fn find_excuse(&mut self, rank: Rank) {
        let Some(WhyLate {
            culprit,
            tag,
            fault,
        }) = self.why_late(rank)
        else {
            return;
        };
        let did = match fault {
            Fault::Lost | Fault::LostElsewhere => return,
            Fault::Late => "it gave up",
            Fault::Awaited => "it is in",
        };
        let absent = self.job_rank(culprit);
        let doing = format!("{did} {tag}, to which rank {absent} did not come");
        let excuse = Excuse {
            rank,
            culprit,
            doing,
        };
        self.excused.insert(rank, excuse);
    }

    /// What keeps a rank away, as long as it does.
    pub(super) fn excuse_of(&self, rank: Rank) -> Option<&Excuse> {
        let excuse = self.excused.get(&rank)?;
        self.is_absent(excuse.culprit).then_some(excuse)
    }

    /// Of all that have one.
    pub(super) fn excuses(&self) -> impl Iterator<Item = &Excuse> {
        let absent = self.excused.keys().filter(|rank| self.is_absent(**rank));
        absent.filter_map(|rank| self.excuse_of(*rank))
    }

    /// A rank by its number among all, as it is named in texts.
    pub(super) fn job_rank(&self, rank: Rank) -> u32 {
        self.signals.lock().job_rank(rank.0)
    }

    /// Whether a rank has not come to this operation, as far as is known. One that has keeps nobody away.
    pub(super) fn is_absent(&self, rank: Rank) -> bool {
        rank.0 != self.engine.me && !self.has_come(rank)
    }

    /// A rank that has given up an operation before this one because of another rank, or waits for that one there, is not likely
    /// to come, and that is the other rank's fault.
    pub(super) fn why_late(&self, rank: Rank) -> Option<WhyLate> {
        let link = &self.engine.links[rank.index()];
        let is_culprit = |other: &Rank| *other != rank && self.is_absent(*other);
        let gave_up = self.gave_up_before(rank);
        let misses = link.misses.as_ref().filter(|(tag, _)| {
            let is_newer = gave_up.is_none_or(|(of, _)| of < tag);
            // All whom it missed have come to what has ended well here. A part of an operation may have ended here alone.
            let has_passed = self.engine.passed.is_some_and(|passed| passed >= *tag);
            is_newer && self.still_counts(rank, *tag) && (!has_passed || tag.is_part_of(self.tag))
        });
        let has_lost = gave_up.is_some_and(|(_, cause)| is_loss(cause));
        if !has_lost && let Some(why) = self.why_mourning(rank) {
            return Some(why);
        }
        if let Some((tag, missed)) = misses {
            return Some(WhyLate {
                culprit: missed.iter().copied().find(is_culprit)?,
                tag: *tag,
                fault: Fault::Awaited,
            });
        }
        let (tag, cause) = gave_up?;
        // One that was killed may have come here before, and its data to the one that lost it were lost, too.
        let lost = self.lost_before_by(rank);
        let ended = lost.filter(|lost| !self.engine.links[lost.index()].is_alive());
        Some(WhyLate {
            culprit: cause.absent().filter(is_culprit).or(ended)?,
            tag: *tag,
            fault: match cause {
                Cause::Deadline { .. } => Fault::Late,
                _ => Fault::Lost,
            },
        })
    }

    /// The operation before this one that a rank has given up, and why, if that may keep it away from this one.
    fn gave_up_before(&self, rank: Rank) -> Option<&(Tag, Cause)> {
        let gave_up = self.engine.links[rank.index()].gave_up.as_ref();
        gave_up.filter(|(tag, cause)| {
            // Whoever was late in another call may be in time in this one; who is lost is so in all.
            let of_this = tag.call == self.tag.call || !matches!(cause, Cause::Deadline { .. });
            // One that passed it here may have failed there.
            let has_passed = self.engine.passed.is_some_and(|passed| passed > *tag);
            of_this && self.still_counts(rank, *tag) && !has_passed
        })
    }

    /// The rank that one has lost in an operation before this one, which it gave up because of that.
    pub(super) fn lost_before_by(&self, rank: Rank) -> Option<Rank> {
        let (_, cause) = self.gave_up_before(rank)?;
        let culprit = cause.absent().filter(|_| is_loss(cause))?;
        (culprit != rank && culprit.0 != self.engine.me).then_some(culprit)
    }

    /// Whether what a rank said in an operation before this one, of this call or another, says something about this one: not if it
    /// has come to a later one.
    fn still_counts(&self, rank: Rank, tag: Tag) -> bool {
        let came = self.engine.links[rank.index()].came;
        tag < self.tag && came.is_none_or(|(came, _)| came <= tag)
    }

    /// A rank, if it does not come because another one is lost, and that one.
    fn lost_for(&self, rank: Rank) -> Option<(Rank, WhyLate)> {
        let why = self.why_late(rank)?;
        why.fault.is_loss().then_some((rank, why))
    }

    /// Because of whom a rank does not come.
    pub(super) fn culprit_of(&self, rank: Rank) -> Option<Rank> {
        self.why_late(rank).map(|why| why.culprit)
    }
}
