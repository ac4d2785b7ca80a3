//! survivors keep their order, and come before those that are new.
//!
//! A member that a generation in between has left out counts as new, though that generation was given up: it may lack a commit of
//! that generation (E-1).

use std::collections::{BTreeMap, BTreeSet};

use kolo_wire::GenerationTable;
use kolo_wire::ids::{Generation, JobId};

use crate::worker::{Name, names};

/// The members of generations, in rank order.
#[derive(Debug, Default)]
pub(crate) struct Order {
    /// Of the last generation that was active, and of those on their way since.
    members: BTreeMap<(JobId, Generation), Vec<Name>>,
    active: BTreeMap<JobId, Generation>,
}

impl Order {
    /// A node gets a generation.
    pub(crate) fn published(&mut self, table: &GenerationTable) {
        let key = (table.job, table.generation);
        let active = self.active.get(&table.job);
        if active.is_none_or(|active| *active < table.generation) {
            self.members.entry(key).or_insert_with(|| names(table));
        }
    }

    /// Those that must come first in the generation `next`, in this order. `None` if nobody has seen some generation before it.
    fn survivors(&self, job: JobId, next: Generation) -> Option<Vec<Name>> {
        let Some(Generation(last)) = self.active.get(&job) else {
            return Some(Vec::new());
        };
        let mut stay = self.members.get(&(job, Generation(*last)))?.clone();
        for given_up in last + 1..next.0 {
            let attempt = self.members.get(&(job, Generation(given_up)))?;
            let all: BTreeSet<&Name> = attempt.iter().collect();
            stay.retain(|name| all.contains(name));
            if stay.is_empty() {
                stay.clone_from(attempt);
            }
        }
        Some(stay)
    }

    /// The driver is told of a generation.
    pub(crate) fn active(&mut self, table: &GenerationTable) -> Result<(), String> {
        let (job, generation) = (table.job, table.generation);
        let new = names(table);
        let all: BTreeSet<&Name> = new.iter().collect();
        let mut stay = self.survivors(job, generation).unwrap_or_default();
        stay.retain(|name| all.contains(name));
        let checked = if new.starts_with(&stay) {
            Ok(())
        } else {
            let short = |names: &[Name]| {
                let names = names
                    .iter()
                    .map(|name| format!("{}.{}", name.slot, name.incarnation));
                names.collect::<Vec<_>>().join(" ")
            };
            Err(format!(
                "generation {generation} of {job} has {}, and {} stay",
                short(&new),
                short(&stay)
            ))
        };
        let of_job = (job, Generation(0))..=(job, generation);
        let over: Vec<_> = self.members.range(of_job).map(|(key, _)| *key).collect();
        for key in over {
            self.members.remove(&key);
        }
        self.members.insert((job, generation), new);
        self.active.insert(job, generation);
        checked
    }
}

#[cfg(test)]
mod tests {
    use kolo_wire::ids::{CrossRank, Incarnation, LocalRank, NodeId, Rank, Slot};
    use kolo_wire::{Handover, Member};

    use super::*;

    fn table(generation: u64, slots: &[u32]) -> GenerationTable {
        let member = |(rank, slot): (u32, &u32)| Member {
            rank: Rank(rank),
            local_rank: LocalRank(0),
            local_size: 1,
            cross_rank: CrossRank(rank),
            cross_size: slots.len() as u32,
            slot: Slot(*slot),
            incarnation: Incarnation::FIRST,
            node: NodeId(u64::from(*slot)),
            hostname: String::new(),
            address: None,
        };
        GenerationTable {
            job: JobId(1),
            generation: Generation(generation),
            members: (0..).zip(slots).map(member).collect(),
            cause: String::new(),
            handover: Handover::None,
        }
    }

    /// A group of 0, 1, 2, 3, then generations that were given up, and then one that is active.
    fn after(given_up: &[&[u32]], last: &[u32]) -> Result<(), String> {
        let mut order = Order::default();
        let mut next = (1..).map(Generation);
        let first = table(next.next().unwrap().0, &[0, 1, 2, 3]);
        order.published(&first);
        order.active(&first).unwrap();
        for slots in given_up {
            order.published(&table(next.next().unwrap().0, slots));
        }
        order.active(&table(next.next().unwrap().0, last))
    }

    #[test]
    fn survivors_come_first_in_their_order() {
        after(&[], &[0, 1, 2, 3]).unwrap();
        after(&[], &[1, 3, 7]).unwrap();
        after(&[], &[8, 7]).unwrap();
        after(&[], &[1, 0]).unwrap_err();
        after(&[], &[7, 0, 1]).unwrap_err();
        after(&[], &[0, 7, 1]).unwrap_err();
        // A generation that had all of them changes nothing.
        after(&[&[0, 1, 2, 3, 4]], &[0, 4, 1]).unwrap_err();
        after(&[&[0, 1, 2, 3, 4]], &[0, 1, 4]).unwrap();
    }

    #[test]
    fn a_member_that_was_left_out_in_between_is_new() {
        after(&[&[0, 2, 3, 5]], &[0, 2, 7, 1]).unwrap();
        after(&[&[0, 2, 3, 5]], &[0, 2, 1, 7]).unwrap();
        after(&[&[0, 2, 3, 5]], &[0, 7, 1, 2]).unwrap_err();
        after(&[&[0, 2, 3, 5], &[0, 1, 3]], &[0, 3, 7, 1, 2]).unwrap();
        after(&[&[0, 2, 3, 5], &[0, 1, 3]], &[0, 2, 3]).unwrap_err();
    }

    #[test]
    fn of_a_group_that_is_gone_the_one_that_was_tried_is_left() {
        after(&[&[5, 6]], &[5, 6, 0]).unwrap();
        after(&[&[5, 6]], &[6, 5, 0]).unwrap_err();
    }
}
