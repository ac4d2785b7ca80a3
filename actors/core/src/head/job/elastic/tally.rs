//! Commits of a generation: what each member has, and so what all have.

use std::collections::{BTreeMap, BTreeSet};

use kolo_wire::Kept;

use crate::membership::Process;

/// The lowest of the numbers that processes have said.
#[derive(Debug, Default)]
struct Lowest {
    said: BTreeMap<Process, u64>,
    /// How many processes say each number.
    counts: BTreeMap<u64, usize>,
}

impl Lowest {
    /// A process says a number. A lower one than before is late news.
    fn say(&mut self, process: Process, number: u64) {
        let before = self.said.get(&process).copied();
        if before.is_some_and(|before| before >= number) {
            return;
        }
        if let Some(count) = before.and_then(|before| self.counts.get_mut(&before)) {
            *count -= 1;
        }
        self.counts.retain(|_, count| *count > 0);
        self.said.insert(process, number);
        *self.counts.entry(number).or_default() += 1;
    }

    /// The lowest number, if so many processes have said one.
    fn of(&self, members: usize) -> Option<u64> {
        let lowest = self.counts.keys().next().copied();
        lowest.filter(|_| self.said.len() == members)
    }
}

/// What all members of a generation have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Common {
    /// The commit.
    pub(super) commit: u64,
    /// How they have it.
    pub(super) kept: Kept,
}

/// Counts what the members of one generation say.
#[derive(Debug, Default)]
pub(super) struct Tally {
    members: BTreeSet<Process>,
    commits: Lowest,
    made: Lowest,
    durable: Lowest,
    holds: Lowest,
    told: Option<Common>,
}

impl Tally {
    /// No member has said anything yet. Words of others do not count.
    pub(super) fn new(members: impl IntoIterator<Item = Process>) -> Self {
        Self {
            members: members.into_iter().collect(),
            ..Self::default()
        }
    }

    /// A member has a commit. The result is news of what all members have.
    pub(super) fn committed(
        &mut self,
        process: Process,
        commit: u64,
        kept: Kept,
    ) -> Option<Common> {
        if !self.members.contains(&process) {
            return None;
        }
        self.commits.say(process, commit);
        if kept != Kept::Received {
            self.made.say(process, commit);
        }
        if kept == Kept::Durable {
            self.durable.say(process, commit);
        }
        let members = self.members.len();
        let commit = self.commits.of(members)?;
        let have = |lowest: &Lowest| lowest.of(members).is_some_and(|number| number >= commit);
        let kept = if have(&self.durable) {
            Kept::Durable
        } else if have(&self.made) {
            Kept::Made
        } else {
            Kept::Received
        };
        let common = Common { commit, kept };
        let is_news = self.told != Some(common);
        self.told = Some(common);
        is_news.then_some(common)
    }

    /// A member holds at a commit. The result is the lowest of these commits, once all members hold. Members that could not go on
    /// because a link between them broke may hold at different ones.
    pub(super) fn holds(&mut self, process: Process, commit: u64) -> Option<u64> {
        if !self.members.contains(&process) {
            return None;
        }
        self.holds.say(process, commit);
        self.holds.of(self.members.len())
    }
}

#[cfg(test)]
mod tests {
    use kolo_wire::ids::{Incarnation, Slot};

    use super::*;

    fn process(slot: u32) -> Process {
        Process {
            slot: Slot(slot),
            incarnation: Incarnation::FIRST,
        }
    }

    #[test]
    fn a_commit_counts_when_all_members_have_it() {
        use Kept::{Durable, Made, Received};
        let common = |commit, kept| Some(Common { commit, kept });
        let mut tally = Tally::new([process(0), process(1)]);
        assert_eq!(tally.committed(process(0), 1, Received), None);
        assert_eq!(
            tally.committed(process(1), 1, Received),
            common(1, Received)
        );
        assert_eq!(tally.committed(process(0), 2, Durable), None);
        assert_eq!(tally.committed(process(0), 4, Made), None);
        assert_eq!(tally.committed(process(1), 3, Durable), common(3, Made));
        // Late and repeated news.
        assert_eq!(tally.committed(process(1), 2, Durable), None);
        assert_eq!(tally.committed(process(1), 4, Durable), common(4, Made));
        assert_eq!(tally.committed(process(0), 4, Durable), common(4, Durable));
        assert_eq!(tally.committed(process(0), 4, Durable), None);
    }

    #[test]
    fn e1_a_process_that_is_no_member_does_not_count() {
        let mut tally = Tally::new([process(0), process(1)]);
        assert_eq!(tally.committed(process(0), 7, Kept::Made), None);
        assert_eq!(tally.committed(process(2), 7, Kept::Made), None);
        assert_eq!(tally.holds(process(0), 7), None);
        assert_eq!(tally.holds(process(2), 7), None);
        let news = tally.committed(process(1), 7, Kept::Made);
        assert_eq!(news.map(|common| common.commit), Some(7));
        assert_eq!(tally.holds(process(1), 7), Some(7));
    }

    #[test]
    fn all_hold_at_the_lowest_of_their_commits() {
        let mut tally = Tally::new([process(0), process(1)]);
        assert_eq!(tally.holds(process(0), 4), None);
        assert_eq!(tally.holds(process(1), 3), Some(3));
    }
}
