//! Which ranks have no data, as rank 0 knows it.

use std::time::Instant;

use super::{Book, Key};
use crate::names::wire::Join;

impl Book {
    /// A rank has no more data. What it has asked for before it has data for, and the others follow.
    pub(in crate::names) fn join(&mut self, rank: u32, join: Join) {
        let Some(joined) = self.joined.get_mut(rank as usize) else {
            return;
        };
        // What comes late counts for nothing in the calls after it.
        if join.call < self.over_before {
            return;
        }
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

    /// A rank is in that join no more. `all` says that all ranks had joined: then it had no data until now, and does its part in what
    /// was ready. If not it may have data for that.
    pub(in crate::names) fn unjoin(&mut self, rank: u32, serial: u64, all: bool) {
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

    /// A rank has no link any more: what it says next it says on another one, and that it has joined as well.
    pub(in crate::names) fn unlinked(&mut self, rank: u32) {
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
                let alarm = entry.alarm(self.stall_after, self.asks_from);
                self.alarm = Some(self.alarm.map_or(alarm, |at| at.min(alarm)));
            }
            _ => {}
        }
        entry.is_ready = is_ready;
    }
}

#[cfg(test)]
mod tests {
    use kolo_transport::ids::Rank;

    use super::super::tests::{asked, book, key, runs, sum};
    use super::super::{Request, Verdict};
    use super::*;
    use crate::cause::Cause;

    fn join(serial: u64, since: u64) -> Join {
        Join {
            serial,
            call: 0,
            since,
        }
    }

    fn in_epoch(epoch: u64) -> Request {
        Request {
            epoch,
            ..asked(sum(1))
        }
    }

    fn followers(verdicts: &[Verdict]) -> &[(u32, u64)] {
        match verdicts {
            [Verdict::Run { followers, .. }] => followers,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn nobody_waits_for_a_rank_that_has_joined() {
        let (mut book, now) = book(2);
        book.ask(now, 0, key("a"), asked(sum(1)));
        book.join(1, join(1, 0));
        assert_eq!(followers(&book.verdicts(now)), [(1, 1)]);
        book.ask(now, 0, key("b"), asked(sum(1)));
        assert_eq!(runs(book.verdicts(now)), [["b"]]);
        book.ended();
        // All had joined, in operation 4: from now on all are waited for again.
        book.join(0, join(1, 2));
        book.ask(now, 0, key("c"), in_epoch(5));
        assert_eq!(book.verdicts(now), []);
        book.ask(now, 1, key("c"), in_epoch(5));
        assert_eq!(runs(book.verdicts(now)), [["c"]]);
    }

    /// In whatever order they are heard.
    #[test]
    fn what_a_rank_has_asked_for_before_all_joined_runs() {
        for order in [[0, 1], [1, 0]] {
            let (mut book, now) = book(2);
            book.ask(now, 0, key("a"), asked(sum(1)));
            for rank in order {
                book.join(rank, join(1, 0));
            }
            assert_eq!(followers(&book.verdicts(now)), [(1, 1)]);
        }
    }

    #[test]
    fn a_join_of_an_earlier_epoch_counts_for_nothing_in_a_later_one() {
        let (mut book, now) = book(3);
        book.join(1, join(1, 0));
        // In the next epoch rank 1 has joined again, and what rank 2 said in the first one comes now.
        book.join(1, join(2, 5));
        book.ask(now, 0, key("a"), in_epoch(5));
        book.join(2, join(1, 3));
        assert_eq!(book.verdicts(now), []);
        book.unjoin(2, 1, true);
        book.join(2, join(2, 6));
        assert_eq!(followers(&book.verdicts(now)), [(1, 2), (2, 2)]);
    }

    #[test]
    fn a_rank_whose_join_failed_is_waited_for() {
        let (mut book, now) = book(2);
        book.join(1, join(1, 0));
        for name in ["x", "y", "a"] {
            book.ask(now, 0, key(name), asked(sum(1)));
            book.verdicts(now);
        }
        // It was to run without data of rank 1, which may have some now.
        book.unjoin(1, 1, false);
        book.ended();
        assert_eq!(book.verdicts(now), []);
        assert_eq!(book.waits_for().into_iter().collect::<Vec<_>>(), [1]);
        assert!(book.next_alarm().is_some());
        book.ask(now, 0, key("b"), asked(sum(1)));
        assert_eq!(book.verdicts(now), []);
        book.ask(now, 1, key("a"), asked(sum(1)));
        assert_eq!(runs(book.verdicts(now)), [["a"]]);
        // The end of a join is not that of the next one.
        book.join(1, join(3, 0));
        book.unjoin(1, 1, false);
        book.ended();
        assert_eq!(runs(book.verdicts(now)), [["b"]]);
    }

    #[test]
    fn what_was_ready_before_all_had_joined_runs_without_data_of_those_that_had() {
        let (mut book, now) = book(2);
        book.join(1, join(1, 0));
        for name in ["x", "y", "a"] {
            book.ask(now, 0, key(name), asked(sum(1)));
            book.verdicts(now);
        }
        book.unjoin(1, 1, true);
        book.ended();
        assert_eq!(followers(&book.verdicts(now)), [(1, 1)]);
    }

    #[test]
    fn what_a_rank_asked_for_before_its_join_is_not_fused_with_what_it_has_no_data_for() {
        let (mut book, now) = book(2);
        for name in ["x", "y", "a", "c"] {
            book.ask(now, 1, key(name), asked(sum(1)));
        }
        book.join(1, join(1, 0));
        for name in ["x", "y", "a", "b", "c", "d"] {
            book.ask(now, 0, key(name), asked(sum(1)));
            book.verdicts(now);
        }
        book.ended();
        assert_eq!(runs(book.verdicts(now)), [["a", "c"]]);
        book.ended();
        let verdicts = book.verdicts(now);
        assert_eq!(followers(&verdicts), [(1, 1)]);
        assert_eq!(runs(verdicts), [["b", "d"]]);
    }

    #[test]
    fn a_rank_whose_link_ended_has_to_say_again_that_it_has_joined() {
        let (mut book, now) = book(2);
        book.join(1, join(1, 0));
        book.unlinked(1);
        book.ask(now, 0, key("a"), asked(sum(1)));
        assert_eq!(book.verdicts(now), []);
        book.join(1, join(1, 0));
        assert_eq!(followers(&book.verdicts(now)), [(1, 1)]);
    }

    #[test]
    fn a_join_counts_in_its_call_alone() {
        let (mut book, now) = book(2);
        book.join(1, join(1, 0));
        book.ask(now, 0, (1, "a".to_owned()), asked(sum(1)));
        assert_eq!(book.verdicts(now), []);
        let left = Cause::Left {
            rank: Rank(1),
            reason: "call 1 has begun".to_owned(),
        };
        book.over(1, left);
        // It comes after the end of its call.
        book.join(1, join(2, 0));
        assert_eq!(book.joined, [None; 2]);
    }
}
