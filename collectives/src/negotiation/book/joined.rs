//! Which members have no data.

use std::time::Instant;

use super::{Book, Key};
use crate::negotiation::messages::Join;

impl Book {
    /// A member has no more data. It has data for what it asked for before.
    pub(super) fn join(&mut self, rank: u32, join: Join) {
        // What comes late counts for nothing in the calls after it.
        if join.call < self.over_before() {
            return;
        }
        let Some(joined) = self.joined.get_mut(rank as usize) else {
            return;
        };
        *joined = Some(join);
        let mut keys: Vec<(Instant, Key)> = self
            .entries
            .iter()
            .filter(|((call, _), entry)| *call == join.call && !entry.is_ready)
            .map(|(key, entry)| (entry.since, key.clone()))
            .collect();
        keys.sort();
        for (_, key) in keys {
            self.check(&key);
        }
    }

    /// A member's join is over. `all` says that all had joined: then the member had no data until now, and does its part in what
    /// was ready. If not, it may have data for that.
    pub(super) fn unjoin(&mut self, rank: u32, serial: u64, all: bool) {
        if let Some(joined) = self.joined.get_mut(rank as usize) {
            joined.take_if(|join| join.serial == serial);
        }
        if all {
            return;
        }
        let counted_on = |(key, entry): (&Key, &super::Entry)| {
            let counts = entry.is_ready && entry.followers.contains(&(rank, serial));
            counts.then(|| key.clone())
        };
        let keys: Vec<Key> = self.entries.iter().filter_map(counted_on).collect();
        for key in keys {
            self.check(&key);
        }
    }

    /// A member has no link any more. On the next one it says again that it has joined.
    pub(in crate::negotiation) fn unlinked(&mut self, rank: u32) {
        if let Some(joined) = self.joined.get_mut(rank as usize) {
            *joined = None;
        }
    }

    /// Looks whether all have asked for an operation or have no data.
    pub(super) fn check(&mut self, key: &Key) {
        let Some(entry) = self.entries.get_mut(key) else {
            return;
        };
        let is_ready = entry.missing(&self.joined).is_empty();
        if is_ready {
            entry.set_followers(&self.joined);
        }
        match (entry.is_ready, is_ready) {
            (false, true) => {
                self.waiting -= 1;
                self.ready.push_back(key.clone());
            }
            // Somebody has data again.
            (true, false) => {
                self.waiting += 1;
                self.ready.retain(|ready| ready != key);
                self.clock.await_entry(entry);
            }
            _ => {}
        }
        entry.is_ready = is_ready;
    }
}
