//! Times at which something is to be done.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// At most one time for each key.
#[derive(Debug)]
pub(super) struct Agenda<K> {
    times: BTreeMap<K, Instant>,
    order: BTreeSet<(Instant, K)>,
}

impl<K> Default for Agenda<K> {
    fn default() -> Self {
        Self {
            times: BTreeMap::new(),
            order: BTreeSet::new(),
        }
    }
}

impl<K: Ord + Copy> Agenda<K> {
    /// Sets the time of a key in place of the one before; `None` is never.
    pub(super) fn set(&mut self, key: K, at: Option<Instant>) {
        let before = match at {
            Some(at) => self.times.insert(key, at),
            None => self.times.remove(&key),
        };
        if before == at {
            return;
        }
        if let Some(before) = before {
            self.order.remove(&(before, key));
        }
        if let Some(at) = at {
            self.order.insert((at, key));
        }
    }

    /// Whether the key has a time.
    pub(super) fn has(&self, key: K) -> bool {
        self.times.contains_key(&key)
    }

    /// The earliest time.
    pub(super) fn next(&self) -> Option<Instant> {
        self.order.first().map(|(at, _)| *at)
    }

    /// Takes a key whose time has come.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<K> {
        let (at, key) = *self.order.first()?;
        if at > now {
            return None;
        }
        self.set(key, None);
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn keys_come_in_the_order_of_their_last_times() {
        let start = Instant::now();
        let at = |second| Some(start + Duration::from_secs(second));
        let mut agenda = Agenda::default();
        for (key, second) in [('a', 3), ('b', 2), ('c', 1), ('a', 1), ('b', 4)] {
            agenda.set(key, at(second));
        }
        agenda.set('c', None);
        assert!(agenda.has('a') && !agenda.has('c'));
        assert_eq!(agenda.next(), at(1));
        assert_eq!(agenda.take_due(start), None);
        let end = start + Duration::from_secs(9);
        let due: Vec<_> = std::iter::from_fn(|| agenda.take_due(end)).collect();
        assert_eq!(due, ['a', 'b']);
        assert_eq!(agenda.next(), None);
    }
}
