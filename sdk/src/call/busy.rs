//! Ranks that are still in an earlier call, in words.

use std::fmt;
use std::time::Duration;

use kolo_transport::ids::Rank;
use kolo_transport::wire::span::Span;

/// Ranks that a message shows.
const MOST: usize = 4;

/// A rank that was still in an earlier call. A synchronous function runs to its end, also if nobody waits for it any more.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BusyRank {
    /// The rank.
    pub rank: Rank,
    /// The hostname of its node.
    pub hostname: String,
    /// The earlier call.
    pub call: String,
    /// How long ago that was sent.
    pub since: Duration,
}

impl BusyRank {
    /// Some of them, for a message.
    pub(crate) fn text(busy: &[Self]) -> Option<String> {
        let shown: Vec<String> = busy.iter().take(MOST).map(Self::to_string).collect();
        let more = busy.len().checked_sub(MOST).filter(|more| *more > 0);
        let more = more.map_or(String::new(), |more| format!(" and {more} more ranks"));
        (!shown.is_empty()).then(|| shown.join(", ") + &more)
    }
}

impl fmt::Display for BusyRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank,
            hostname,
            call,
            since,
        } = self;
        let since = Span::rough(*since);
        write!(
            f,
            "rank {rank} ({hostname}) is still in `{call}`, sent {since} ago"
        )
    }
}
