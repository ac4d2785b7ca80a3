//! The invariants of the architecture, in the small world.

use super::world::World;
use super::*;

impl World {
    /// G-3 among the workers.
    pub(super) fn check_groups(&self) {
        let whole = self.whole();
        assert!(whole.len() <= 1, "G-3: {whole:?}");
    }

    /// and the limits.
    pub(super) fn check_generation(&mut self, generation: &Generation) {
        let number = generation.number().0;
        assert!(number == self.last || number == self.last + 1);
        if number == self.last {
            return;
        }
        self.last = number;
        let is_known = self.membership.budget().commit().is_some();
        self.known.insert(generation.number(), is_known);
        let members = generation.members();
        let size = members.len() as u32;
        assert!(
            (self.limits.min..=self.limits.max).contains(&size),
            "{size}"
        );
        let ranks: Vec<u32> = members.iter().map(|member| member.rank.0).collect();
        assert_eq!(ranks, (0..size).collect::<Vec<_>>(), "R-1");
        let slots: BTreeSet<Slot> = members.iter().map(|member| member.process.slot).collect();
        assert_eq!(slots.len(), members.len(), "R-1");
        assert!(
            members.is_sorted_by_key(|member| member.since),
            "R-2: {members:?}"
        );
        if let Some(before) = self.active.last() {
            let old = members.iter().filter(|member| member.since.0 < number);
            let ranks: Vec<_> = old
                .filter_map(|member| before.member(member.process))
                .map(|member| member.rank)
                .collect();
            assert!(ranks.is_sorted(), "R-2: {ranks:?}");
            assert!(
                self.durable || !is_known || members[0].since.0 < number,
                "rank 0 is new"
            );
        }
        let unit = self.limits.per_host;
        let units: BTreeSet<u32> = slots.iter().map(|slot| slot.0 / unit).collect();
        assert_eq!(units.len() as u32 * unit, size, "units are whole");
        for filter in &self.limits.filters {
            let count = filter.count();
            let mut hosts: BTreeMap<&Host, u32> = BTreeMap::new();
            for member in members {
                *hosts.entry(&member.location.host).or_default() += 1;
            }
            let is_met = match filter {
                Filter::DivisibleBy(_) => size.is_multiple_of(count),
                Filter::Max(_) => size <= count,
                Filter::WholeHosts(_) => hosts.values().all(|members| *members == count),
            };
            assert!(is_met, "{filter} of {hosts:?}");
        }
    }

    /// G-2 and G-3, as the head sees it: all have taken it, and nobody is in an older one that is whole.
    pub(super) fn check_active(&mut self, generation: Arc<Generation>) {
        let number = generation.number();
        assert!(self.active.last().is_none_or(|last| last.number() < number));
        for member in generation.members() {
            let worker = &self.workers[&member.process];
            let taken = worker.taken.as_ref().map(|taken| taken.number());
            assert_eq!(taken, Some(number), "G-2: {}", member.process);
        }
        assert!(
            self.whole().iter().all(|whole| whole.number() == number),
            "G-3"
        );
        self.active.push(generation);
    }
}
