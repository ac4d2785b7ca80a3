//! Ranks that are still in an earlier call: a rank runs one call at a time, in the order in which they were sent.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kolo_transport::ids::{CallId, Rank};

use super::super::busy::BusyRank;
use super::super::entry::Entry;
use super::CallTable;

/// How long a call waits behind another one before the user is told.
const TOLD_AFTER: Duration = Duration::from_secs(4);

/// The user is told so often at most.
const QUIET: Duration = Duration::from_secs(60);

/// Calls that are remembered beyond their waiters, at most. Without the rest, less is told.
const MOST: usize = 1024;

/// Calls that nobody waits for any more, and that some ranks have not answered: they may run there.
#[derive(Debug, Default)]
pub(super) struct Unwanted(BTreeMap<CallId, Left>);

#[derive(Debug)]
struct Left {
    name: String,
    sent: Instant,
    ranks: Vec<Rank>,
}

impl Unwanted {
    /// A call leaves the table.
    pub(super) fn add<W>(&mut self, call: CallId, entry: &Entry<W>) {
        let ranks = entry.ranks_waiting();
        if !ranks.is_empty() && self.0.len() < MOST {
            let (name, sent) = (entry.name.clone(), entry.sent);
            self.0.insert(call, Left { name, sent, ranks });
        }
    }

    pub(super) fn answered(&mut self, call: CallId, rank: Rank) {
        if let Some(left) = self.0.get_mut(&call) {
            left.ranks.retain(|other| *other != rank);
            if left.ranks.is_empty() {
                self.0.remove(&call);
            }
        }
    }
}

impl<W> CallTable<W> {
    /// A rank has answered a call that is none of the table's any more.
    pub(crate) fn answered(&mut self, call: CallId, rank: Rank) {
        self.unwanted.answered(call, rank);
    }

    /// Those of the ranks that are still in a call before this one.
    pub(super) fn busy(&self, now: Instant, call: CallId, ranks: &[Rank]) -> Vec<BusyRank> {
        let earliest = |rank: Rank| {
            let mut wanted = self.calls.range(..call);
            let wanted = wanted.find(|(_, entry)| entry.waiting(rank).is_some());
            let mut unwanted = self.unwanted.0.range(..call);
            let unwanted = unwanted.find(|(_, left)| left.ranks.contains(&rank));
            let wanted = wanted.map(|(call, entry)| (*call, &entry.name, entry.sent));
            let unwanted = unwanted.map(|(call, left)| (*call, &left.name, left.sent));
            let (_, name, sent) = wanted.into_iter().chain(unwanted).min()?;
            Some(BusyRank {
                rank,
                hostname: self.hostnames.get(rank.index()).cloned()?,
                call: name.clone(),
                since: now.saturating_duration_since(sent),
            })
        };
        ranks.iter().copied().filter_map(earliest).collect()
    }

    /// What the user is to know of calls that have waited behind others for long: the oldest is named. Each call is told of once, and
    /// there is a line a minute at most.
    pub(crate) fn held_up(&mut self, now: Instant) -> Option<String> {
        if self.quiet_until.is_some_and(|until| now < until) {
            return None;
        }
        let is_due = |entry: &Entry<W>| !entry.is_told && entry.sent + TOLD_AFTER <= now;
        let due = self.calls.iter().filter(|(_, entry)| is_due(entry));
        let due: Vec<CallId> = due.map(|(call, _)| *call).collect();
        let line = due.iter().enumerate().find_map(|(index, call)| {
            let entry = self.calls.get(call)?;
            let text = BusyRank::text(&self.busy(now, *call, &entry.ranks_waiting()))?;
            let more = match due.len() - index - 1 {
                0 => String::new(),
                1 => "; 1 more call waits".to_owned(),
                more => format!("; {more} more calls wait"),
            };
            Some((index, format!("`{}` waits: {text}{more}", entry.name)))
        });
        let (first, line) = line?;
        for call in &due[first..] {
            self.calls
                .entry(*call)
                .and_modify(|entry| entry.is_told = true);
        }
        self.quiet_until = Some(now + QUIET);
        Some(line)
    }
}
