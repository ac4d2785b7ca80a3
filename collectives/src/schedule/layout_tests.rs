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
            schedule.broadcast(group, Algorithm::TwoLevelTree, root, count, 1);
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
    let mut crossings = vec![0; layout.hosts() as usize];
    for (rank, schedule) in (0..).zip(all) {
        let host = layout.host_of(rank);
        for action in schedule.steps().flatten() {
            if let Action::Send { peer, span } = action
                && layout.host_of(*peer) != host
            {
                crossings[host as usize] += span.len;
            }
        }
    }
    crossings
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

/// How far the formula may be from the schedules themselves: a factor. It is that far for trees whose distances do not
/// fit the hosts; rings, halving and two levels are within a few hundredths.
const LIMIT: f64 = 1.7;

#[test]
fn the_formula_agrees_with_the_schedules() {
    let model = Model::default();
    let kinds = [
        OperationKind::AllReduce,
        OperationKind::Reduce,
        OperationKind::ReduceScatter,
        OperationKind::AllGather,
        OperationKind::Gather,
        OperationKind::Scatter,
        OperationKind::Broadcast,
        OperationKind::AllToAll,
        OperationKind::Barrier,
    ];
    let mut wrong = Vec::new();
    let mut worst: (f64, String) = (1.0, String::new());
    for (hosts, slots) in [
        (1, 2),
        (1, 5),
        (1, 8),
        (2, 1),
        (4, 1),
        (2, 4),
        (4, 4),
        (3, 5),
        (8, 8),
    ] {
        let layout = Layout::of_slots(&vec![slots; hosts]);
        let world = layout.world();
        for kind in kinds {
            for &algorithm in Algorithm::able(kind) {
                for share in [0, 64, 16 << 10] {
                    // One-byte elements: elements are bytes.
                    let total = share * world as usize;
                    let segment = 4096;
                    let all = schedules(&layout, |schedule, group| match kind {
                        OperationKind::AllReduce => {
                            schedule.all_reduce(group, algorithm, total, total, false);
                        }
                        OperationKind::Reduce => {
                            schedule.reduce(group, algorithm, 0, total, segment, false);
                        }
                        OperationKind::ReduceScatter => {
                            schedule.reduce_scatter(group, algorithm, Equal(share), false);
                        }
                        OperationKind::AllGather => {
                            schedule.all_gather(group, algorithm, Equal(share));
                        }
                        OperationKind::Gather => {
                            schedule.gather(group, algorithm, 0, Equal(share));
                        }
                        OperationKind::Scatter => {
                            schedule.scatter(group, algorithm, 0, Equal(share));
                        }
                        OperationKind::Broadcast => {
                            schedule.broadcast(group, algorithm, 0, total, segment);
                        }
                        OperationKind::AllToAll => {
                            schedule.all_to_all(group, algorithm, Equal(share), Equal(share));
                        }
                        _ => schedule.barrier(group),
                    });
                    let run = time(&model, &layout, &all, 1);
                    let bytes = if kind == OperationKind::Barrier {
                        0.0
                    } else {
                        total as f64
                    };
                    let said = predict(
                        &model,
                        layout.shape(),
                        kind,
                        algorithm,
                        bytes,
                        f64::from(segment as u32),
                    );
                    let ratio = said.seconds / run.seconds;
                    let off = ratio.max(1.0 / ratio);
                    let case = format!(
                        "{kind} by {algorithm}, {hosts}x{slots}, share {share}: formula {:.1} us, schedules {:.1} us",
                        said.seconds * 1e6,
                        run.seconds * 1e6
                    );
                    if off >= LIMIT {
                        wrong.push(case.clone());
                    }
                    if off > worst.0 {
                        worst = (off, case);
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    println!("furthest apart: {:.2}, {}", worst.0, worst.1);
}

#[test]
fn costs_of_very_many_ranks_are_known_at_once() {
    let model = Model::default();
    for world in [16, 1024, 65_536] {
        let shape = Shape::even(world, world.div_ceil(8));
        for kind in OperationKind::ALL {
            for &algorithm in Algorithm::able(kind) {
                let one = predict(&model, shape, kind, algorithm, 1e6, 65_536.0);
                let two = predict(&model, shape, kind, algorithm, 2e6, 65_536.0);
                assert!(one.seconds.is_finite() && one.seconds > 0.0);
                assert!(two.seconds >= one.seconds, "{kind} by {algorithm}");
                assert!(one.steps >= 1.0);
            }
        }
        // A ring of ranks pays for every rank, two levels for every host.
        let steps =
            |algorithm| predict(&model, shape, OperationKind::AllReduce, algorithm, 4.0, 1.0).steps;
        assert!((steps(Algorithm::Ring) - 2.0 * f64::from(world - 1)).abs() < 1e-9);
        let hosts = f64::from(shape.hosts);
        assert!((steps(Algorithm::TwoLevelRing) - 2.0 * (hosts - 1.0) - 2.0).abs() < 1e-9);
    }
}

#[test]
fn two_ranks_cost_what_the_model_says() {
    let model = Model::default();
    let layout = Layout::of_slots(&[1, 1]);
    let bytes = 1_000_000;
    let all = schedules(&layout, |schedule, group| {
        schedule.all_reduce(group, Algorithm::Ring, bytes, bytes, false);
    });
    let run = time(&model, &layout, &all, 1);
    let half = bytes as f64 / 2.0;
    let message = model.across.alpha + model.across.overhead + half * model.across.beta;
    let expected = 2.0 * message + half * model.gamma;
    assert!(
        (run.seconds - expected).abs() < 1e-12,
        "{} {expected}",
        run.seconds
    );
    assert!((run.across - 1e6).abs() < 1e-3 && run.inside.abs() < 1e-9);
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
