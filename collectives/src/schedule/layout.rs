//! Which ranks share a host.

/// Where the ranks of a group are. The same on every rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The ranks of each host, in rank order; hosts by their lowest rank.
    hosts: Vec<Vec<u32>>,
    /// How many ranks are on the hosts before each one, and in all.
    before: Vec<usize>,
    /// For each rank, its host and its place there.
    places: Vec<(u32, u32)>,
}

/// The numbers of a layout that costs depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Ranks.
    pub world: u32,
    /// Hosts.
    pub hosts: u32,
    /// Ranks of the host that has the fewest.
    pub least: u32,
    /// Ranks of the host that has the most.
    pub most: u32,
}

impl Shape {
    /// Ranks that are spread over hosts as evenly as can be: `ranks` and `hosts` are at least 1, and there are no more
    /// hosts than ranks (the rest of them counts as not there).
    #[must_use]
    pub fn even(ranks: u32, hosts: u32) -> Self {
        let world = ranks.max(1);
        let hosts = hosts.clamp(1, world);
        Self {
            world,
            hosts,
            least: world / hosts,
            most: world.div_ceil(hosts),
        }
    }
}

impl Layout {
    /// All ranks on one host.
    #[must_use]
    pub fn single(world: u32) -> Self {
        Self::of_hosts(&vec![0; world as usize])
    }

    /// Hosts with so many ranks each, numbered host by host. Hosts without ranks don't count.
    #[must_use]
    pub fn of_slots(slots: &[u32]) -> Self {
        let hosts: Vec<u32> = (0..)
            .zip(slots)
            .flat_map(|(host, slots)| std::iter::repeat_n(host, *slots as usize))
            .collect();
        Self::of_hosts(&hosts)
    }

    /// The host of each rank, by any names.
    #[must_use]
    pub fn of_hosts<H: PartialEq>(host_of: &[H]) -> Self {
        let mut names: Vec<&H> = Vec::new();
        let mut hosts: Vec<Vec<u32>> = Vec::new();
        let mut places = Vec::new();
        for (rank, name) in (0..).zip(host_of) {
            let host = names
                .iter()
                .position(|known| *known == name)
                .unwrap_or_else(|| {
                    names.push(name);
                    hosts.push(Vec::new());
                    names.len() - 1
                });
            places.push((host as u32, hosts[host].len() as u32));
            hosts[host].push(rank);
        }
        let mut before = vec![0];
        for ranks in &hosts {
            before.push(before[before.len() - 1] + ranks.len());
        }
        Self {
            hosts,
            before,
            places,
        }
    }

    /// Ranks.
    #[must_use]
    pub fn world(&self) -> u32 {
        self.places.len() as u32
    }

    /// Hosts.
    #[must_use]
    pub fn hosts(&self) -> u32 {
        self.hosts.len() as u32
    }

    /// The host of a rank. Panics if there is no such rank.
    #[must_use]
    pub fn host_of(&self, rank: u32) -> u32 {
        self.places[rank as usize].0
    }

    /// The place of a rank among those of its host, from 0. Panics if there is no such rank.
    #[must_use]
    pub fn local_of(&self, rank: u32) -> u32 {
        self.places[rank as usize].1
    }

    /// The ranks of a host. Panics if there is no such host.
    #[must_use]
    pub fn ranks_on(&self, host: u32) -> &[u32] {
        &self.hosts[host as usize]
    }

    /// Ranks on the hosts before this one.
    pub(super) fn before(&self, host: u32) -> usize {
        self.before[host as usize]
    }

    /// The numbers that costs depend on.
    #[must_use]
    pub fn shape(&self) -> Shape {
        let slots = || self.hosts.iter().map(|ranks| ranks.len() as u32);
        Shape {
            world: self.world(),
            hosts: self.hosts(),
            least: slots().min().unwrap_or(0),
            most: slots().max().unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_found_by_host_and_place() {
        let layout = Layout::of_hosts(&["b", "a", "b", "c", "b"]);
        assert_eq!(layout.world(), 5);
        assert_eq!(layout.hosts(), 3);
        assert_eq!(layout.ranks_on(0), [0, 2, 4]);
        assert_eq!((layout.host_of(4), layout.local_of(4)), (0, 2));
        assert_eq!((layout.host_of(3), layout.local_of(3)), (2, 0));
        let shape = layout.shape();
        assert_eq!((shape.least, shape.most), (1, 3));
        assert_eq!(Layout::of_slots(&[2, 0, 1]), Layout::of_hosts(&[0, 0, 7]));
        assert_eq!(Layout::single(3), Layout::of_slots(&[3]));
    }

    #[test]
    fn an_even_shape_is_as_even_as_can_be() {
        let even = Shape::even(10, 4);
        assert_eq!((even.hosts, even.least, even.most), (4, 2, 3));
        let more_hosts = Shape::even(3, 8);
        assert_eq!(
            (more_hosts.world, more_hosts.hosts, more_hosts.most),
            (3, 3, 1)
        );
        assert_eq!(Shape::even(0, 0).world, 1);
    }
}
