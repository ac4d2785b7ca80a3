//! Which ranks are lost, in the order in which that was heard. Pure.
//!
//! Who hears of a loss may leave because of it, and is lost then, too. All are to name the one with whom it began.

/// Ranks that are lost, the first one first.
#[derive(Debug, Clone, Default)]
pub(crate) struct Lost(Vec<(u32, String)>);

impl Lost {
    /// A rank is lost, and why. What was heard of it first stays. Returns whether it is news.
    pub(crate) fn add(&mut self, rank: u32, reason: &str) -> bool {
        let is_news = !self.has(rank);
        if is_news {
            self.0.push((rank, reason.to_owned()));
        }
        is_news
    }

    /// The one of which it was heard first.
    pub(crate) fn first(&self) -> Option<(u32, &str)> {
        self.iter().next()
    }

    pub(crate) fn has(&self, rank: u32) -> bool {
        self.iter().any(|(lost, _)| lost == rank)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// In order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &str)> {
        self.0.iter().map(|(rank, reason)| (*rank, reason.as_str()))
    }

    /// The same in other numbers, of those that have one.
    pub(crate) fn map(&self, number: impl Fn(u32) -> Option<u32>) -> Self {
        let kept = self.iter();
        Self(
            kept.filter_map(|(rank, reason)| Some((number(rank)?, reason.to_owned())))
                .collect(),
        )
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
}
