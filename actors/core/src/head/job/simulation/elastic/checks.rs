//! The invariants, whenever the head says that a generation is active, and at the end.

use super::*;

impl Cluster {
    /// All members of a generation are there, and in it.
    pub(super) fn is_whole(&self, table: &GenerationTable) -> bool {
        table.members.iter().all(|member| {
            let workers = &self.machines[&member.node].workers;
            workers.get(&(member.slot, member.incarnation)) == Some(&table.generation.0)
        })
    }

    /// The head says that a generation is active.
    pub(super) fn active(&mut self, table: GenerationTable) {
        let seed = self.seed;
        let number = table.generation.0;
        let size = table.world_size();
        assert!(
            (self.min..=self.max).contains(&size),
            "seed {seed}: {size} members"
        );
        for (rank, member) in (0..).zip(&table.members) {
            assert_eq!(member.rank, Rank(rank), "seed {seed}: R-1");
            let taken = self.taken.get(&(member.slot, member.incarnation));
            assert!(
                taken.is_some_and(|taken| *taken >= number),
                "seed {seed}: G-2, rank {rank} of generation {number} has not taken it"
            );
        }
        if let Some(before) = self.tables.last() {
            assert!(number > before.generation.0, "seed {seed}");
            assert!(
                !self.is_whole(before),
                "seed {seed}: G-3, {before:?} is whole still"
            );
            let names = |table: &GenerationTable| -> Vec<Name> {
                let members = table.members.iter();
                members
                    .map(|member| (member.slot, member.incarnation))
                    .collect()
            };
            let (old, new) = (names(before), names(&table));
            let stay: Vec<Name> = old
                .iter()
                .copied()
                .filter(|name| new.contains(name))
                .collect();
            assert_eq!(
                stay,
                new[..stay.len()],
                "seed {seed}: R-2, {old:?} became {new:?}"
            );
        }
        self.tables.push(table);
    }

    /// Nothing has gone wrong for long: the group is whole, and as large as it can be.
    pub(super) fn check_service(&self) {
        let seed = self.seed;
        let table = self.tables.last();
        let table = table.unwrap_or_else(|| panic!("seed {seed}: there never was a group"));
        assert!(
            self.is_whole(table),
            "seed {seed}: {table:?} {:?}",
            self.machines
        );
        let seats = self.machines.values().map(|machine| machine.seats).sum();
        let most = self.max.min(seats);
        assert_eq!(table.world_size(), most, "seed {seed}: {:?}", self.job);
    }
}
