//! Schedules of two levels on every layout up to 8 hosts of 8 slots, and what operations cost.
#![allow(clippy::cast_possible_wrap)] // small numbers

use proptest::prelude::*;

use super::tests::{inputs, same_order, schedules, sum, sums};
use super::*;
use crate::operation::OperationKind;

const REDUCERS: [Algorithm; 3] = [
    Algorithm::TwoLevelRing,
    Algorithm::TwoLevelHalving,
    Algorithm::TwoLevelDoubling,
];

/// All operations that work on two levels, on one layout.
fn check(layout: &Layout, count: usize) {
    let world = layout.world();
    for algorithm in REDUCERS {
        let all = schedules(layout, |schedule, group| {
            schedule.all_reduce(group, algorithm, count, count.max(1), true);
        });
        let (results, traffic) = sum(&all, &inputs(world, count));
        for result in results {
            assert_eq!(
                result,
                sums(world, count, true),
                "{algorithm} on {layout:?}"
            );
        }
        assert!(same_order(&all, count), "{algorithm} on {layout:?}");
        check_volume(layout, algorithm, count, &all, &traffic.sent);
    }
    let shares: Vec<usize> = (0..world as usize)
        .map(|rank| (rank * 7 + count) % 5)
        .collect();
    let mut offsets = vec![0];
    for share in &shares {
        offsets.push(offsets[offsets.len() - 1] + share);
    }
    let all = schedules(layout, |schedule, group| {
        schedule.all_gather(group, Algorithm::TwoLevelRing, Offsets(&offsets));
    });
    let inputs: Vec<Vec<i64>> = (0..)
        .zip(&shares)
        .map(|(rank, share)| (0..*share as i64).map(|i| rank * 100 + i).collect())
        .collect();
    for result in sum(&all, &inputs).0 {
        assert_eq!(result, inputs.concat(), "all_gather on {layout:?}");
    }
    for root in [0, world / 3, world - 1] {
        let all = schedules(layout, |schedule, group| {
            schedule.broadcast(group, Algorithm::TwoLevelTree, root, count);
        });
        let inputs: Vec<Vec<i64>> = (0..i64::from(world))
            .map(|rank| vec![rank; count])
            .collect();
        let (results, _) = sum(&all, &inputs);
        for result in results {
            assert_eq!(result, inputs[root as usize], "broadcast on {layout:?}");
        }
        // Each host is sent the values once.
        let crossing = crossings(layout, &all);
        assert_eq!(
            crossing.iter().sum::<usize>(),
            count * (layout.hosts() as usize - 1)
        );
    }
}

/// Elements that each host sends to others.
fn crossings(layout: &Layout, all: &[Schedule]) -> Vec<usize> {
    both_ways(layout, all).map(|(sent, _)| sent).collect()
}

/// Elements that each host sends to others and receives from them.
fn both_ways(layout: &Layout, all: &[Schedule]) -> impl Iterator<Item = (usize, usize)> {
    let mut crossing = vec![(0, 0); layout.hosts() as usize];
    for (rank, schedule) in (0..).zip(all) {
        let host = layout.host_of(rank) as usize;
        for action in schedule.steps().flatten() {
            if let Action::Send { peer, span } = action
                && layout.host_of(*peer) as usize != host
            {
                crossing[host].0 += span.len;
                crossing[layout.host_of(*peer) as usize].1 += span.len;
            }
        }
    }
    crossing.into_iter()
}

fn check_volume(
    layout: &Layout,
    algorithm: Algorithm,
    count: usize,
    all: &[Schedule],
    sent: &[usize],
) {
    let Shape { hosts, least, .. } = layout.shape();
    let (hosts, pieces) = (hosts as usize, least as usize);
    let crossing = crossings(layout, all);
    if algorithm == Algorithm::TwoLevelRing && count.is_multiple_of(hosts * pieces) {
        // As a ring of hosts, whatever the number of ranks there.
        assert_eq!(crossing, vec![2 * count * (hosts - 1) / hosts; hosts]);
    }
    if hosts == 1 {
        assert_eq!(crossing, [0]);
    }
    // Inside, a rank without a piece sends its values once; one with a piece hands it out too.
    for (rank, sent) in (0..).zip(sent) {
        let mates = layout.ranks_on(layout.host_of(rank)).len();
        if layout.local_of(rank) >= least {
            assert_eq!(*sent, count, "rank {rank} of {mates} on {layout:?}");
        }
    }
}

#[test]
fn every_layout_up_to_eight_by_eight_is_right() {
    for hosts in 1..=8_u32 {
        for slots in 1..=8_u32 {
            let layout = Layout::of_slots(&vec![slots; hosts as usize]);
            for count in [
                0,
                3,
                (hosts * slots) as usize,
                2 * (hosts * slots) as usize + 5,
            ] {
                check(&layout, count);
            }
        }
    }
}

/// The bytes of the formula are those of the schedules, within a factor that trees need whose distances do not fit the hosts; so are
/// the steps.
#[test]
fn the_formula_agrees_with_the_schedules() {
    const LIMIT: f64 = 2.0;
    const SHARE: usize = 64;
    let model = Model::default();
    let of_slots = |(hosts, slots): (usize, u32)| Layout::of_slots(&vec![slots; hosts]);
    let sizes = [
        (1, 2),
        (1, 5),
        (1, 8),
        (2, 1),
        (4, 1),
        (2, 4),
        (4, 4),
        (3, 5),
        (8, 8),
    ];
    for layout in sizes.map(of_slots) {
        // Elements of one byte.
        let total = SHARE * layout.world() as usize;
        for kind in OperationKind::ALL {
            for &algorithm in Algorithm::able(kind) {
                let all = schedules(&layout, |schedule, group| match kind {
                    OperationKind::AllReduce => {
                        schedule.all_reduce(group, algorithm, total, total, false);
                    }
                    OperationKind::Reduce => schedule.reduce(group, algorithm, 0, total, false),
                    OperationKind::ReduceScatter => {
                        schedule.reduce_scatter(group, algorithm, Equal(SHARE), false);
                    }
                    OperationKind::AllGather => schedule.all_gather(group, algorithm, Equal(SHARE)),
                    OperationKind::Gather => schedule.gather(group, algorithm, 0, Equal(SHARE)),
                    OperationKind::Scatter => schedule.scatter(group, algorithm, 0, Equal(SHARE)),
                    OperationKind::Broadcast => schedule.broadcast(group, algorithm, 0, total),
                    OperationKind::AllToAll => {
                        schedule.all_to_all(group, algorithm, Equal(SHARE), Equal(SHARE));
                    }
                    _ => schedule.barrier(group),
                });
                if all[0].buffer == 0 {
                    continue;
                }
                let said = predict(&model, layout.shape(), kind, algorithm, total as f64);
                let busier = both_ways(&layout, &all).map(|(sent, received)| sent.max(received));
                let across = busier.max().unwrap_or(0);
                let steps = all.iter().map(Schedule::len).max().unwrap_or(0);
                let what = format!("{kind} by {algorithm} on {:?}", layout.shape());
                let near = |name: &str, said: f64, is: usize| {
                    let is = is as f64;
                    let holds = said <= is * LIMIT && is <= said * LIMIT;
                    assert!(holds, "{what}: {name} {said} and {is}");
                };
                near("across", said.across, across);
                // A rank of a tree waits for those below it and has few steps of its own.
                if algorithm != Algorithm::Binomial && algorithm != Algorithm::TwoLevelTree {
                    near("steps", said.steps, steps);
                }
            }
        }
    }
}

#[test]
fn costs_of_very_many_ranks_are_known_at_once() {
    let model = Model::default();
    for world in [16, 1024, 65_536] {
        let shape = Shape::even(world, world.div_ceil(8));
        for kind in OperationKind::ALL {
            for &algorithm in Algorithm::able(kind) {
                let one = predict(&model, shape, kind, algorithm, 1e6);
                let two = predict(&model, shape, kind, algorithm, 2e6);
                assert!(one.seconds.is_finite() && one.seconds > 0.0);
                assert!(two.seconds >= one.seconds, "{kind} by {algorithm}");
                assert!(one.steps >= 1.0);
            }
        }
        // A ring of ranks pays for every rank, two levels for every host.
        let steps =
            |algorithm| predict(&model, shape, OperationKind::AllReduce, algorithm, 4.0).steps;
        assert!((steps(Algorithm::Ring) - 2.0 * f64::from(world - 1)).abs() < 1e-9);
        let hosts = f64::from(shape.hosts);
        assert!((steps(Algorithm::TwoLevelRing) - 2.0 * (hosts - 1.0) - 2.0).abs() < 1e-9);
    }
}

proptest! {
    /// Hosts with different numbers of ranks, and ranks anywhere.
    #[test]
    fn any_layout_is_right(
        hosts in prop::collection::vec(0_u32..8, 1..=64),
        count in 0_usize..150,
    ) {
        check(&Layout::of_hosts(&hosts), count);
    }

    #[test]
    fn any_uneven_slots_are_right(
        slots in prop::collection::vec(1_u32..=8, 1..=8),
        count in 0_usize..150,
    ) {
        check(&Layout::of_slots(&slots), count);
    }
}
