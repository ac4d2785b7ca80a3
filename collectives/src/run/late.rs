//! Ranks that did not come in time, and because of whom.

use std::time::Duration;

use kolo_transport::ids::Rank;

use super::Run;
use crate::cause::Cause;
use crate::error::{CollectiveError, DOING};
use crate::operation::Tag;
use crate::stall::Missing;

/// Why a rank is late.
struct WhyLate {
    rank: Rank,
    /// Because of whom it did not get through ...
    culprit: Rank,
    /// ... which operation before this one.
    tag: Tag,
    fault: Fault,
}

/// What is known of who is the cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// The operation was given up, because that one is gone or can't be reached.
    Lost,
    /// It was given up, because that one was late.
    Late,
    /// That one is still waited for, after the deadline.
    Awaited,
}

impl Run<'_> {
    /// The error of ranks that did not come in time.
    pub(super) fn late(&mut self, mut late: Vec<Rank>) -> CollectiveError {
        self.report_before_the_end();
        if let Some(why) = late.iter().find_map(|rank| self.why_late(*rank))
            && why.fault == Fault::Lost
        {
            let WhyLate { culprit, tag, .. } = why;
            let reason = format!(
                "rank {} gave up {tag} because of it, and did not come to {}",
                self.job_rank(why.rank),
                self.tag
            );
            return CollectiveError::PeerLost {
                rank: culprit,
                reason,
            };
        }
        let mut doing = self.what_they_do(&late);
        self.excuse(&mut late);
        doing.retain(|other| !self.excused.contains_key(&other.rank));
        doing.truncate(DOING.saturating_sub(self.excused.len()));
        doing.extend(self.excuses());
        doing.truncate(DOING);
        CollectiveError::Deadline {
            operation: self.request.to_string(),
            waited: Duration::from_millis(self.started.elapsed().as_millis() as u64),
            doing,
            late,
        }
    }

    /// Puts the ranks because of whom others are late in the place of these. Leaves them in order.
    pub(super) fn excuse(&mut self, late: &mut Vec<Rank>) {
        let whys: Vec<WhyLate> = late
            .iter()
            .filter_map(|rank| self.why_late(*rank))
            .filter(|why| why.fault != Fault::Lost)
            .collect();
        for why in whys {
            let WhyLate {
                rank, culprit, tag, ..
            } = why;
            let absent = self.job_rank(culprit);
            let did = match why.fault {
                Fault::Awaited => "it is in",
                _ => "it gave up",
            };
            let doing = format!("{did} {tag}, to which rank {absent} did not come");
            self.excused.insert(rank, doing);
            late.push(culprit);
        }
        late.sort_unstable();
        late.dedup();
        if late.iter().any(|rank| !self.excused.contains_key(rank)) {
            late.retain(|rank| !self.excused.contains_key(rank));
        }
    }

    /// Who is excused, and how that is known.
    pub(super) fn excuses(&self) -> Vec<Missing> {
        let excused = self.excused.iter();
        excused
            .map(|(rank, doing)| Missing {
                rank: *rank,
                doing: doing.clone(),
            })
            .collect()
    }

    /// A rank by its number among all, as it is named in texts.
    pub(super) fn job_rank(&self, rank: Rank) -> u32 {
        self.signals.lock().job_rank(rank.0)
    }

    /// A rank that is late has given up an operation before this one because of another rank, or waits for that one there: it is
    /// not likely to come, and that is the other rank's fault.
    fn why_late(&self, rank: Rank) -> Option<WhyLate> {
        let link = &self.engine.links[rank.index()];
        let why = |culprit, tag, fault| WhyLate {
            rank,
            culprit,
            tag,
            fault,
        };
        // One that has come by now keeps nobody away.
        let is_absent = |culprit: &Rank| !self.has_come(*culprit);
        if let Some((tag, cause)) = &link.gave_up
            && let Some(culprit) = self.culprit_of(rank)
        {
            let fault = match cause {
                Cause::Deadline { .. } => Fault::Late,
                _ => Fault::Lost,
            };
            return is_absent(&culprit).then(|| why(culprit, *tag, fault));
        }
        let (tag, missed) = link.misses.as_ref()?;
        let others = |other: &&Rank| **other != rank && other.0 != self.engine.me;
        let culprit = missed
            .iter()
            .filter(others)
            .find(|other| is_absent(other))?;
        (self.is_before(*tag)).then(|| why(*culprit, *tag, Fault::Awaited))
    }

    /// Whether it is an operation of this call before this one.
    fn is_before(&self, tag: Tag) -> bool {
        tag.call == self.tag.call && tag < self.tag
    }

    /// Because of which other rank that is not there a peer gave up an operation of this call before this one.
    pub(super) fn culprit_of(&self, peer: Rank) -> Option<Rank> {
        let (tag, cause) = self.engine.links[peer.index()].gave_up.as_ref()?;
        let absent = cause.absent()?;
        (self.is_before(*tag) && absent != peer && absent.0 != self.engine.me).then_some(absent)
    }
}
