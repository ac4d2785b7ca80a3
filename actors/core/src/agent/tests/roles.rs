//! Ranks of several roles.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn agents(agents: &[(&str, u32)]) -> Vec<RoleInstance> {
    let instance = |(role, local_world_size): &(&str, u32)| RoleInstance {
        role: (*role).to_owned(),
        local_world_size: *local_world_size,
    };
    agents.iter().map(instance).collect()
}

#[test]
fn test_assign_worker_ranks() {
    let ranks = assign_worker_ranks(&agents(&[
        ("ps", 4),
        ("trainer", 1),
        ("trainer", 2),
        ("trainer", 3),
        ("ps", 5),
    ]));
    let of = |f: fn(&AssignedRanks) -> u32| ranks.iter().map(f).collect::<Vec<_>>();
    assert_eq!(of(|r| r.global_base), [0, 4, 5, 7, 10]);
    assert_eq!(of(|r| r.world_size), [15; 5]);
    assert_eq!(of(|r| r.role_base), [0, 0, 1, 3, 4]);
    assert_eq!(of(|r| r.role_world_size), [9, 6, 6, 6, 9]);
    assert_eq!(assign_worker_ranks(&[]), []);
}

/// torch: `get_worker_ranks` of heterogeneous and homogeneous agents.
#[test]
fn test_correct_rank_assignment() {
    for sizes in [[8, 1, 2, 3, 4, 5, 2], [1; 7]] {
        let sizes: Vec<(&str, u32)> = sizes.iter().map(|size| ("trainer", *size)).collect();
        let mut next = 0;
        for (ranks, (_, size)) in assign_worker_ranks(&agents(&sizes)).iter().zip(&sizes) {
            assert_eq!((ranks.global_base, ranks.role_base), (next, next));
            next += size;
        }
    }
}

proptest! {
    /// Ranks of the world, and of each role, are exactly 0..n, in the order of agents; each worker has one.
    #[test]
    fn ranks_are_exactly_0_to_n(
        given in prop::collection::vec((0_usize..3, 1_u32..9), 0..20),
    ) {
        let names = ["a", "b", "c"];
        let given: Vec<(&str, u32)> = given.iter().map(|(role, size)| (names[*role], *size)).collect();
        let instances = agents(&given);
        let ranks = assign_worker_ranks(&instances);
        prop_assert_eq!(ranks.len(), instances.len());
        let all: Vec<(&str, WorkerRanks)> = ranks
            .iter()
            .zip(&given)
            .flat_map(|(ranks, (role, size))| (0..*size).map(move |local| (*role, ranks.worker(local))))
            .collect();
        let world: Vec<u32> = all.iter().map(|(_, worker)| worker.global_rank).collect();
        prop_assert_eq!(world, (0..all.len() as u32).collect::<Vec<_>>());
        prop_assert!(all.iter().all(|(_, worker)| worker.world_size as usize == all.len()));
        for role in given.iter().map(|(role, _)| *role).collect::<BTreeSet<_>>() {
            let of_role: Vec<_> = all.iter().filter(|(of, _)| *of == role).collect();
            let role_ranks: Vec<u32> = of_role.iter().map(|(_, worker)| worker.role_rank).collect();
            prop_assert_eq!(role_ranks, (0..of_role.len() as u32).collect::<Vec<_>>());
            prop_assert!(of_role.iter().all(|(_, worker)| worker.role_world_size as usize == of_role.len()));
        }
    }
}
