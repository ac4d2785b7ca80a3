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
    /// Because of whom it gave up ...
    culprit: Rank,
    /// ... which operation before this one.
    tag: Tag,
    /// That one is gone or can't be reached, and was not only late itself.
    is_loss: bool,
}

impl Run<'_> {
    /// The error of ranks that did not come in time.
    pub(super) fn late(&mut self, mut late: Vec<Rank>) -> CollectiveError {
        self.report_before_the_end();
        let mut doing = self.what_they_do(&late);
        if let Some(why) = self.why_late(&late) {
            let WhyLate {
                rank, culprit, tag, ..
            } = why;
            if why.is_loss {
                let reason = format!(
                    "rank {} gave up {tag} because of it, and did not come to {}",
                    self.job_rank(rank),
                    self.tag
                );
                return CollectiveError::PeerLost {
                    rank: culprit,
                    reason,
                };
            }
            // The others are late all the same.
            late.retain(|other| *other != rank);
            late.push(culprit);
            late.sort_unstable();
            late.dedup();
            let absent = self.job_rank(culprit);
            let gave_up = format!("it gave up {tag}, to which rank {absent} did not come");
            doing.retain(|other| other.rank != rank);
            doing.truncate(DOING - 1);
            doing.push(Missing {
                rank,
                doing: gave_up,
            });
        }
        CollectiveError::Deadline {
            operation: self.request.to_string(),
            waited: Duration::from_millis(self.started.elapsed().as_millis() as u64),
            doing,
            late,
        }
    }

    /// A rank by its number among all, as it is named in texts.
    pub(super) fn job_rank(&self, rank: Rank) -> u32 {
        self.signals.lock().job_rank(rank.0)
    }

    /// A rank that is late gave up an operation before this one, because of another rank: it is not likely to come, and that
    /// is that rank's fault.
    fn why_late(&self, late: &[Rank]) -> Option<WhyLate> {
        late.iter().find_map(|rank| {
            let (tag, cause) = self.engine.links[rank.index()].gave_up.as_ref()?;
            // One that has come by now keeps nobody away.
            let culprit = self.culprit_of(*rank)?;
            (!self.has_come(culprit)).then_some(WhyLate {
                rank: *rank,
                culprit,
                tag: *tag,
                is_loss: !matches!(cause, Cause::Deadline { .. }),
            })
        })
    }

    /// Because of which other rank that is not there a peer gave up an operation of this call before this one.
    pub(super) fn culprit_of(&self, peer: Rank) -> Option<Rank> {
        let (tag, cause) = self.engine.links[peer.index()].gave_up.as_ref()?;
        let absent = cause.absent()?;
        let news = tag.call == self.tag.call && *tag < self.tag;
        (news && absent != peer && absent.0 != self.engine.me).then_some(absent)
    }
}
