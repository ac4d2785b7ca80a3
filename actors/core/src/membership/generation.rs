//! A generation: one membership of a job, with everybody's rank.

use std::collections::BTreeMap;

use kolo_wire::ids::{self, Rank, Slot};

use super::seat::{Addresses, Location, Process, Seat};

/// A process as a member of a generation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Its number in the world of this generation.
    pub rank: Rank,
    /// The process.
    pub process: Process,
    /// The node that it runs on.
    pub location: Location,
    /// Where it listens for its peers.
    pub addresses: Addresses,
    /// The first of the generations that the process has been in without a gap.
    pub since: ids::Generation,
}

/// One membership of a job. It is made once and never changed; each change of the membership makes the next one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generation {
    number: ids::Generation,
    cause: String,
    committed: ids::Generation,
    members: Vec<Member>,
    by_slot: BTreeMap<Slot, usize>,
}

impl Generation {
    /// A generation of the processes in these seats, in rank order. Those that are in `previous` are in since then.
    /// `committed` is the last generation all members of which are known to have the last commit, or 0.
    ///
    /// Seats without a node are left out; no live process has such a seat.
    #[must_use]
    pub fn new<'a>(
        number: ids::Generation,
        cause: String,
        seats: impl IntoIterator<Item = &'a Seat>,
        previous: Option<&Self>,
        committed: ids::Generation,
    ) -> Self {
        let held = seats
            .into_iter()
            .filter_map(|seat| Some((seat, seat.location.clone()?)));
        let members = (0..).map(Rank).zip(held).map(|(rank, (seat, location))| {
            let before = previous.and_then(|previous| previous.member(seat.process()));
            Member {
                rank,
                process: seat.process(),
                location,
                addresses: seat.addresses.clone(),
                since: before.map_or(number, |before| before.since),
            }
        });
        Self {
            number,
            cause,
            committed,
            members: Vec::new(),
            by_slot: BTreeMap::new(),
        }
        .with(members.collect())
    }

    fn with(mut self, members: Vec<Member>) -> Self {
        self.by_slot = members
            .iter()
            .enumerate()
            .map(|(index, member)| (member.process.slot, index))
            .collect();
        self.members = members;
        self
    }

    /// The number. It grows by one with each generation that is published.
    #[must_use]
    pub fn number(&self) -> ids::Generation {
        self.number
    }

    /// Why this generation came about, in plain words.
    #[must_use]
    pub fn cause(&self) -> &str {
        &self.cause
    }

    /// The members, in rank order.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// The member that this process is.
    #[must_use]
    pub fn member(&self, process: Process) -> Option<&Member> {
        let index = *self.by_slot.get(&process.slot)?;
        self.members
            .get(index)
            .filter(|member| member.process == process)
    }

    /// Some members may not have the last commit and get the state from rank 0 first. All members read the same answer here, so
    /// nobody waits in a synchronisation that others skip.
    ///
    /// A member that joined after the last commit may lack it even if the generation in which it joined is over by now: that may
    /// have ended before anything was handed over.
    #[must_use]
    pub fn needs_sync(&self) -> bool {
        self.members
            .iter()
            .any(|member| member.since > self.committed)
    }

    /// Something was committed, and no member has it. Rank 0 takes the state from where it outlives all members.
    #[must_use]
    pub fn needs_restore(&self) -> bool {
        let has_state = |first: &Member| first.since <= self.committed;
        self.committed.0 > 0 && !self.members.first().is_some_and(has_state)
    }

    /// Those members that have the state for certain after `attempt`, a later generation, was given up.
    ///
    /// Perhaps all members of `attempt` took it and committed before it was given up. A member that `attempt` left
    /// out could have missed that commit (E-1).
    #[must_use]
    pub(super) fn narrowed(&self, attempt: &Self) -> Self {
        let kept = self
            .members
            .iter()
            .filter(|member| attempt.member(member.process).is_some());
        let narrowed = Self {
            cause: self.cause.clone(),
            members: Vec::new(),
            by_slot: BTreeMap::new(),
            ..*self
        };
        narrowed.with(kept.cloned().collect())
    }
}
