//! Ranks of workers of several roles.

use std::collections::BTreeMap;

use crate::ranks::MAX_WORLD_SIZE;

/// The workers that one agent brings to a group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RoleInstance {
    /// Their role.
    pub role: String,
    /// How many they are.
    pub local_world_size: u32,
}

/// The ranks of one agent's workers: a worker's rank is a base and its local rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AssignedRanks {
    /// The rank of the first worker among all workers.
    pub global_base: u32,
    /// The number of all workers.
    pub world_size: u32,
    /// The rank of the first worker among the workers of the role.
    pub role_base: u32,
    /// The number of workers of the role.
    pub role_world_size: u32,
}

/// The ranks of one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WorkerRanks {
    /// The rank among all workers.
    pub global_rank: u32,
    /// The rank among the workers of the role.
    pub role_rank: u32,
    /// The number of all workers.
    pub world_size: u32,
    /// The number of workers of the role.
    pub role_world_size: u32,
}

impl AssignedRanks {
    /// The ranks of a worker of the agent.
    #[must_use]
    pub fn worker(&self, local_rank: u32) -> WorkerRanks {
        WorkerRanks {
            global_rank: self.global_base + local_rank,
            role_rank: self.role_base + local_rank,
            world_size: self.world_size,
            role_world_size: self.role_world_size,
        }
    }
}

/// Ranks for the workers of agents, which are given in the order of their group ranks.
///
/// Workers of an agent follow each other, among all workers and among those of their role. Agents may bring different numbers.
///
/// ```
/// use kolo_core::agent::{RoleInstance, assign_worker_ranks};
///
/// let agent = |role: &str, local_world_size| RoleInstance { role: role.to_owned(), local_world_size };
/// let ranks = assign_worker_ranks(&[agent("ps", 2), agent("trainer", 3), agent("ps", 1)]);
/// assert_eq!(ranks[2].worker(0).global_rank, 5);
/// assert_eq!(ranks[2].worker(0).role_rank, 2);
/// assert_eq!(ranks[1].role_world_size, 3);
/// ```
#[must_use]
pub fn assign_worker_ranks(agents: &[RoleInstance]) -> Vec<AssignedRanks> {
    let mut world_size = 0;
    let mut of_role = BTreeMap::<&str, u32>::new();
    let mut ranks = Vec::with_capacity(agents.len());
    for agent in agents {
        let role_size = of_role.entry(&agent.role).or_default();
        ranks.push(AssignedRanks {
            global_base: world_size,
            world_size: 0,
            role_base: *role_size,
            role_world_size: 0,
        });
        world_size += agent.local_world_size;
        *role_size += agent.local_world_size;
    }
    for (ranks, agent) in ranks.iter_mut().zip(agents) {
        ranks.world_size = world_size;
        ranks.role_world_size = of_role
            .get(agent.role.as_str())
            .copied()
            .unwrap_or_default();
    }
    ranks
}

/// Whether a world has place for the workers of these agents. [`assign_worker_ranks`] counts without bounds.
pub(super) fn fits<'a>(agents: impl Iterator<Item = &'a RoleInstance>) -> bool {
    let all: u64 = agents.map(|agent| u64::from(agent.local_world_size)).sum();
    all <= u64::from(MAX_WORLD_SIZE)
}
