//! Whether ranks are gone of which nothing is heard.

use std::sync::Arc;
use std::time::Duration;

use super::Inner;

/// After each question that brought no certainty the next one waits twice as long: about ranks that are waited for, and about
/// others.
const OF_WAITED: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
const OF_OTHERS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));

impl Inner {
    /// Asks the [connector](crate::Connector::is_gone) again and again whether a peer is gone, until it is, or until this
    /// rank [no longer waits](crate::signals::State::unwatch). The operation hears of it. Less often if it is not `waited` for.
    /// Returns whether it can be asked.
    pub(super) fn watch(self: &Arc<Self>, peer: u32, waited: bool) -> bool {
        let rank = self.job_rank(peer);
        // Only somebody who has seen it there knows what it looks like when it is not.
        if !waited && !self.family.has_met(rank) {
            return false;
        }
        let Some(mut asking) = self.family.is_gone(rank) else {
            return false;
        };
        let weak = Arc::downgrade(self);
        let questions = async move {
            let (mut pause, longest) = if waited { OF_WAITED } else { OF_OTHERS };
            loop {
                let gone = asking.await;
                let Some(inner) = weak.upgrade() else { return };
                if let Some(reason) = gone {
                    tracing::debug!(rank, %reason, waited, "a rank is gone");
                    inner
                        .signals
                        .change(|state| state.gone.push((peer, reason)));
                    return;
                }
                drop(inner);
                tokio::time::sleep(pause).await;
                pause = (2 * pause).min(longest);
                let next = weak.upgrade().and_then(|inner| inner.family.is_gone(rank));
                let Some(next) = next else { return };
                asking = next;
            }
        };
        self.signals
            .lock()
            .watch(peer, || self.family.handle.spawn(questions).abort_handle());
        true
    }
}
