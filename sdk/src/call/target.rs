//! Where calls go.

use std::sync::Arc;

use kolo_transport::ids::Generation;
use kolo_transport::wire::RankFailure;

use super::generations::{Generations, Present};
use super::group::{Group, Listener as _};
use super::table::End;

/// A group that never changes, or the present generation of one that does.
#[derive(Clone)]
pub(crate) enum Target {
    Fixed(Arc<Group>),
    Elastic(Arc<Generations>),
}

impl Target {
    /// The group that takes a call now.
    pub(crate) fn now(&self) -> Arc<Group> {
        match self {
            Self::Fixed(group) => Arc::clone(group),
            Self::Elastic(generations) => generations.now(),
        }
    }

    /// Whether calls wait between two generations.
    pub(crate) fn waits(&self) -> bool {
        matches!(self, Self::Elastic(generations) if generations.waits)
    }

    /// A call was refused because a generation is over, which others may not know yet.
    pub(crate) fn is_over(&self, generation: Generation) {
        if let Self::Elastic(generations) = self {
            generations.is_over(generation, false);
        }
    }

    /// The wait for the next generation, if this is between two generations.
    pub(crate) fn recovery(&self) -> Option<impl Future<Output = ()> + Send + use<>> {
        let Self::Elastic(generations) = self else {
            return None;
        };
        let mut present = generations.present();
        let is_between = |present: &Present| present.is_over && present.ended.is_none();
        if !is_between(&present.borrow()) {
            return None;
        }
        Some(async move {
            // The sender lives as long as somebody can call.
            drop(present.wait_for(|present| !is_between(present)).await);
        })
    }

    /// The head is gone: waits until an elastic group has lost a rank, and so can't go on. Never ends in a group of fixed members,
    /// which may do with those that are left.
    pub(crate) async fn ends_without_head(&self) {
        match self {
            Self::Fixed(_) => std::future::pending().await,
            Self::Elastic(generations) => {
                generations.without_head();
                let mut present = generations.present();
                // The sender lives as long as the target.
                drop(present.wait_for(|present| present.is_over).await);
            }
        }
    }

    /// No more calls are taken; those that are in flight go on.
    pub(crate) fn close(&self, reason: &str) {
        match self {
            Self::Fixed(group) => group.close(reason),
            Self::Elastic(generations) => generations.close(reason),
        }
    }

    /// The group has ended: so has every call.
    pub(crate) fn finish(&self, reason: &str, failure: Option<RankFailure>) {
        match self {
            Self::Fixed(group) => group.finish(reason, failure),
            Self::Elastic(generations) => generations.finish(&End {
                reason: reason.to_owned(),
                failure,
            }),
        }
    }

    /// The head says that a rank is lost.
    pub(crate) fn reported_lost(&self, generation: Generation, failure: RankFailure) {
        match self {
            Self::Fixed(group) => group.reported_lost(failure),
            Self::Elastic(generations) => generations.reported_lost(generation, failure),
        }
    }

    /// Whether no worker is known to be lost, but for those that others have replaced.
    pub(crate) fn is_whole(&self) -> bool {
        self.now().is_whole()
    }
}

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "generation {}", self.now().generation())
    }
}
