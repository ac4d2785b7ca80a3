//! What is done when a link ends: a suspicion first, until somebody says which rank is lost.

use std::sync::Arc;
use std::time::Instant;

use kolo_transport::ids::Rank;

use super::Shell;
use crate::error::CollectiveError;
use crate::lane::LaneError;
use crate::negotiation::Negotiation;
use crate::negotiation::book::{AHEAD, Failed};
use crate::negotiation::ending::{self, Suspicion};
use crate::negotiation::line::Line;
use crate::operation::Tag;
use crate::rank_shared::Member as _;

impl Shell {
    /// The link of a member has ended, or can't be made. What waits now fails as soon as it is clear which rank is lost.
    pub(super) fn suspect(
        &mut self,
        negotiation: &Arc<Negotiation>,
        member: u32,
        cause: CollectiveError,
        is_final: bool,
    ) {
        self.line(member).end();
        let (failed, own) = match &mut self.book {
            Some(book) => {
                book.unlinked(member);
                let failed = book.fail_all(u64::MAX, &cause);
                let of_one =
                    |failed: &Failed| negotiation.take(failed.call, &failed.names, failed.heard[0]);
                let own = failed.iter().flat_map(of_one).collect();
                (failed, own)
            }
            None => (Vec::new(), negotiation.take_before(u64::MAX)),
        };
        let suspicion = Suspicion {
            member,
            cause,
            is_final,
            failed,
            own,
        };
        self.endings.suspect(Instant::now(), suspicion);
    }

    /// Nobody is there who could be asked for a link in place of the one of a member that has ended. What has begun to wait since then
    /// waits for a rank that is gone.
    pub(super) fn not_asked(
        &mut self,
        negotiation: &Arc<Negotiation>,
        member: u32,
        error: &LaneError,
    ) {
        let line = self.line(member);
        // A member that never had a link may not be there yet.
        if line.lane.is_none() && line.since.is_some() {
            let own = negotiation.job_rank(self.me);
            let cause = CollectiveError::unlinked(Rank(member), error, own);
            self.suspect(negotiation, member, cause, false);
        }
    }

    /// A suspicion ends: with the word on who is lost, or without one.
    pub(super) fn settle(
        &mut self,
        negotiation: &Arc<Negotiation>,
        suspicion: Suspicion,
        word: Option<&CollectiveError>,
    ) {
        let cause = word.unwrap_or(&suspicion.cause);
        if let (true, None, CollectiveError::PeerLost { reason, .. }) =
            (suspicion.is_final, word, cause)
        {
            // Nothing with a name works any more. An operation that was decided may wait for ranks that never heard of it.
            if let Some(book) = &mut self.book {
                book.lost(cause.clone());
            }
            // One that has done its part may be gone. No link comes from the member any more: that ends what needs the link.
            let rank = negotiation.job_rank(suspicion.member);
            let reason = reason.clone();
            let lane = Err(LaneError::Ended { reason });
            if let Err(error) = Arc::clone(&negotiation.data).lane(rank, lane, true) {
                tracing::debug!(%error, "a member is in no group for data");
            }
        }
        for failed in &suspicion.failed {
            ending::tell(&mut self.lines, failed, cause);
        }
        let cause = cause.clone();
        self.endings.end_later(Instant::now(), suspicion.own, cause);
    }

    /// The member is there: suspicions of it end without a word.
    pub(super) fn is_there(&mut self, negotiation: &Arc<Negotiation>, member: u32) {
        for mut suspicion in self.endings.take_those_of(member) {
            suspicion.is_final = false;
            self.settle(negotiation, suspicion, None);
        }
    }

    /// Ends suspicions whose time is over, and operations of which the others have been told. Returns whether there were any.
    pub(super) fn end_what_is_told(
        &mut self,
        negotiation: &Arc<Negotiation>,
        now: Instant,
    ) -> bool {
        let old = self.endings.take_old(now);
        let is_said = !self.lines.iter().any(Line::is_unsaid);
        let told = self.endings.take_told(now, is_said);
        let any = !old.is_empty() || !told.is_empty();
        for (own, cause) in told {
            negotiation.fail(own, &cause);
        }
        for suspicion in old {
            if self.book.is_none() && !suspicion.own.is_empty() {
                self.look_for_the_coordinator(negotiation, &suspicion);
            }
            self.settle(negotiation, suspicion, None);
        }
        any
    }

    /// What this rank waited for fails because of the link to the coordinator. Others may have heard that it runs.
    fn look_for_the_coordinator(&mut self, negotiation: &Arc<Negotiation>, suspicion: &Suspicion) {
        if suspicion.is_final {
            self.miss_the_rest(negotiation, &suspicion.cause);
        } else if matches!(suspicion.cause, CollectiveError::PeerLost { .. }) {
            // A coordinator that is there says on the link what this rank has missed.
            self.is_looking = true;
            self.link(negotiation);
        }
    }

    /// The coordinator is gone, and this rank gives up its part in what the coordinator may have told others.
    pub(super) fn miss_the_rest(&self, negotiation: &Arc<Negotiation>, cause: &CollectiveError) {
        let call = negotiation.lock().call;
        let (of_call, next) = self.next;
        let next = if of_call == call { next } else { 0 };
        let of_job = |rank: Rank| Rank(negotiation.job_rank(rank.0));
        let Some(cause) = negotiation.data.inward(cause.clone().with_ranks(of_job)) else {
            return;
        };
        for number in (next..next + AHEAD as u64).filter(|number| *number <= Tag::MOST) {
            negotiation.miss((call, number), cause.clone());
        }
    }
}
