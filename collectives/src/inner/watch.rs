//! Whether ranks are gone of which nothing is heard.

use std::sync::Arc;
use std::time::Duration;

use super::Inner;
use crate::error::CollectiveError;
use crate::group::{Saying, until_gone};

/// Pauses between questions, the first and the longest: about ranks that are waited for, and about others.
const OF_WAITED: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
const OF_OTHERS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));

impl Inner {
    /// A peer that is gone counts as lost, in all groups.
    pub(super) fn lose(&self, peer: u32, reason: &str) {
        self.family.rank_lost(self.job_rank(peer), reason);
    }

    /// If an operation fails because a rank is lost, the other groups hear of it: this rank may end because of that.
    pub(super) fn tell_elsewhere(&self, error: &CollectiveError) -> Vec<Saying> {
        let (CollectiveError::PeerLost { rank, reason }
        | CollectiveError::Connect { rank, reason }) = error
        else {
            return Vec::new();
        };
        let rank = self.job_rank(rank.0);
        if rank == self.family.me {
            return Vec::new();
        }
        self.family.lost_in(&[self.id], rank, reason)
    }

    /// Asks the [connector](crate::Connector::is_gone) again and again whether a peer is gone, until it is, or until this
    /// rank [no longer waits](crate::signals::State::unwatch). The operation hears of it. Less often if it is not `waited` for.
    /// Returns whether it can be asked.
    pub(super) fn watch(self: &Arc<Self>, peer: u32, waited: bool) -> bool {
        let rank = self.job_rank(peer);
        // Only somebody who has seen it there knows what it looks like when it is not.
        if !waited && !self.family.has_met(rank) {
            return false;
        }
        let Some(first) = self.family.is_gone(rank) else {
            return false;
        };
        let (weak, family) = (Arc::downgrade(self), Arc::downgrade(&self.family));
        let questions = async move {
            let pauses = if waited { OF_WAITED } else { OF_OTHERS };
            let reason = until_gone(family, rank, first, pauses).await;
            if let (Some(reason), Some(inner)) = (reason, weak.upgrade()) {
                inner
                    .signals
                    .change(|state| state.gone.push((peer, reason)));
            }
        };
        self.signals
            .lock()
            .watch(peer, || self.family.handle.spawn(questions).abort_handle());
        true
    }
}
