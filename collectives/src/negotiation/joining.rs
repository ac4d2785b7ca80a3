//! What a rank's joins mean for its named operations.
//!
//! The coordinator hears of a join later than it begins and ends. So joins have numbers, and an operation that runs without a
//! rank's data says by which of its joins: the rank takes part only if that join did not fail. And a rank that asks says after how
//! many operations without names all had joined last: a join from before that is over.

use std::sync::Arc;

use super::messages::{Join, Up};
use super::{Command, Negotiation};
use crate::operation::Tag;

/// The joins of this rank.
#[derive(Debug, Default)]
pub(super) struct Joining {
    /// The number that was given last to a join or to what was asked.
    serial: u64,
    /// The number of the last join.
    last: u64,
    /// The join that this rank is in.
    open: Option<Join>,
    /// The number of the last join that ended before all had joined. It counts no more, nor do those before it.
    failed: u64,
    /// The first operation without a name after all had joined, and of which call.
    epoch: (u64, u64),
}

impl Joining {
    /// The number of what is said next: later ones are higher.
    pub(super) fn number(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }

    /// A join begins. The operation without a name that would be next has this tag.
    pub(super) fn begin(&mut self, next: Tag) -> Join {
        self.last = self.number();
        let join = Join {
            serial: self.last,
            call: next.call,
            since: next.operation,
        };
        self.open = Some(join);
        join
    }

    /// A join has ended: in this operation, if all had joined.
    pub(super) fn end(&mut self, join: Join, all_in: Option<Tag>) {
        // Another thread may be in one that began later.
        self.open.take_if(|open| open.serial == join.serial);
        match all_in {
            Some(tag) => self.epoch = self.epoch.max((tag.call, tag.operation + 1)),
            None => self.failed = self.failed.max(join.serial),
        }
    }

    /// The join that this rank is in.
    pub(super) fn open(&self) -> Option<Join> {
        self.open
    }

    /// A call has begun: no join of one before it counts.
    pub(super) fn begin_call(&mut self, call: u64) {
        self.open.take_if(|open| open.call < call);
        self.failed = self.open.map_or(self.last, |open| open.serial - 1);
    }

    /// After which operation of a call all had joined last.
    pub(super) fn epoch(&self, call: u64) -> u64 {
        if self.epoch.0 == call {
            self.epoch.1
        } else {
            0
        }
    }

    /// Whether this rank takes part without data, as it said with this number.
    pub(super) fn holds(&self, serial: u64) -> bool {
        serial > self.failed && serial <= self.last
    }
}

/// A rank that is in a join, until this is dropped.
pub(crate) struct Joined {
    negotiation: Arc<Negotiation>,
    join: Join,
    all_in: Option<Tag>,
}

impl Joined {
    /// All ranks had joined, in this operation.
    pub(crate) fn with_all(mut self, tag: Tag) {
        self.all_in = Some(tag);
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        let mut state = self.negotiation.lock();
        state.joining.end(self.join, self.all_in);
        self.negotiation.tell(Command::Say(Up::Unjoin {
            serial: self.join.serial,
            all: self.all_in.is_some(),
        }));
    }
}

impl Negotiation {
    /// This rank has no more data. The operation without a name that would be next has this tag.
    pub(crate) fn join(self: &Arc<Self>, next: Tag) -> Joined {
        let mut state = self.lock();
        let join = state.joining.begin(next);
        // Under the lock: the coordinator hears all in the order in which it happened.
        self.tell(Command::Say(Up::Join(join)));
        Joined {
            negotiation: Arc::clone(self),
            join,
            all_in: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_join_holds_until_it_fails_or_its_call_is_over() {
        let mut joining = Joining::default();
        let first = joining.begin(Tag::new(0, 3));
        assert!(joining.holds(first.serial));
        joining.end(first, Some(Tag::new(0, 7)));
        // What was decided before the end comes later.
        assert!(joining.holds(first.serial) && joining.open.is_none());
        assert_eq!((joining.epoch(0), joining.epoch(1)), (8, 0));
        let second = joining.begin(Tag::new(0, 8));
        joining.end(second, None);
        assert!(!joining.holds(first.serial) && !joining.holds(second.serial));
        let third = joining.begin(Tag::new(0, 9));
        assert!(joining.holds(third.serial) && !joining.holds(third.serial + 1));
        joining.begin_call(1);
        assert!(!joining.holds(third.serial) && joining.open.is_none());
        assert_eq!(joining.epoch(1), 0);
        // It may have begun in the new call before that is heard of here.
        let fourth = joining.begin(Tag::new(2, 0));
        joining.begin_call(2);
        assert!(joining.holds(fourth.serial));
    }

    #[test]
    fn the_end_of_a_join_is_not_that_of_a_later_one() {
        let mut joining = Joining::default();
        let [one, other] = [0, 0].map(|next| joining.begin(Tag::new(0, next)));
        joining.end(one, Some(Tag::new(0, 0)));
        assert_eq!(joining.open, Some(other));
        joining.end(other, None);
        assert!(!joining.holds(other.serial) && joining.open.is_none());
        assert_eq!(joining.epoch(0), 1);
    }
}
