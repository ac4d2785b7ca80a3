//! The word of the authority: which ranks are lost, in the order in which that was said, or that all is revoked.
//!
//! A rank that hears of a loss may leave because of it, and is lost then, too. All are to name the rank with which it began. In the
//! same way ranks leave when the communicator is revoked, so that losses after that are none.

use kolo_transport::ids::Rank;

use crate::error::CollectiveError;

/// Ranks that are lost, the first one first.
#[derive(Debug, Clone, Default)]
pub(crate) struct Lost {
    ranks: Vec<(u32, String)>,
    /// Nothing is to work any more, and why.
    revoked: Option<String>,
}

impl Lost {
    /// A rank is lost, and why. What was heard of it first stays. Returns whether it is news.
    pub(crate) fn add(&mut self, rank: u32, reason: &str) -> bool {
        let is_news = self.revoked.is_none() && !self.has(rank);
        if is_news {
            self.ranks.push((rank, reason.to_owned()));
        }
        is_news
    }

    /// Nothing is to work any more, and why. What was heard first stays.
    pub(crate) fn revoke(&mut self, reason: &str) {
        self.revoked.get_or_insert_with(|| reason.to_owned());
    }

    pub(crate) fn revoked(&self) -> Option<&str> {
        self.revoked.as_deref()
    }

    /// Why no operation can go on, if so.
    pub(crate) fn error(&self) -> Option<CollectiveError> {
        if let Some((rank, reason)) = self.first() {
            return Some(CollectiveError::PeerLost {
                rank: Rank(rank),
                reason: reason.to_owned(),
            });
        }
        let reason = self.revoked.clone()?;
        Some(CollectiveError::Revoked { reason })
    }

    /// As [`Lost::error`], but only if all was revoked.
    pub(crate) fn when_revoked(&self) -> Option<CollectiveError> {
        self.revoked.as_ref().and_then(|_| self.error())
    }

    /// The one of which it was heard first.
    pub(crate) fn first(&self) -> Option<(u32, &str)> {
        self.iter().next()
    }

    pub(crate) fn has(&self, rank: u32) -> bool {
        self.iter().any(|(lost, _)| lost == rank)
    }

    /// Whether operations work.
    pub(crate) fn is_empty(&self) -> bool {
        self.ranks.is_empty() && self.revoked.is_none()
    }

    /// In order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &str)> {
        self.ranks
            .iter()
            .map(|(rank, reason)| (*rank, reason.as_str()))
    }

    /// The same in other numbers, of those that have one.
    pub(crate) fn map(&self, number: impl Fn(u32) -> Option<u32>) -> Self {
        let kept = self.iter();
        Self {
            ranks: kept
                .filter_map(|(rank, reason)| Some((number(rank)?, reason.to_owned())))
                .collect(),
            revoked: self.revoked.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_one_and_the_first_word_count() {
        let mut lost = Lost::default();
        assert!(lost.is_empty() && lost.first().is_none() && !lost.has(3));
        assert!(lost.add(3, "killed"));
        assert!(lost.add(1, "left because of it"));
        assert!(!lost.add(3, "its link ended"));
        assert_eq!(lost.first(), Some((3, "killed")));
        assert!(lost.has(1) && !lost.has(0));
        // A group in which the first one is not.
        let there = lost.map(|rank| (rank != 3).then_some(rank + 1));
        assert_eq!(
            there.iter().collect::<Vec<_>>(),
            [(2, "left because of it")]
        );
    }

    #[test]
    fn what_came_first_is_named_a_loss_or_that_all_was_revoked() {
        let mut lost = Lost::default();
        assert_eq!(lost.error(), None);
        lost.revoke("the job ends");
        lost.revoke("again");
        // Who leaves because of that is not the cause.
        assert!(!lost.add(2, "its link ended") && !lost.is_empty());
        let revoked = CollectiveError::Revoked {
            reason: "the job ends".to_owned(),
        };
        assert_eq!(lost.error(), Some(revoked.clone()));
        // In groups, too, whoever is in them.
        assert_eq!(lost.map(|_| None).error(), Some(revoked));
        let mut lost = Lost::default();
        lost.add(3, "killed");
        lost.revoke("the job ends");
        let error = lost.error().unwrap();
        assert_eq!(error.culprit_rank(), Some(Rank(3)), "{error}");
    }
}
