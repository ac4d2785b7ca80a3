#![allow(clippy::cast_possible_wrap)] // small numbers

use proptest::prelude::*;

use super::counts::piece;
use super::simulate::{Kernels, Traffic, run, run_with};
use super::*;
use crate::operation::OperationKind;

const WORLDS: std::ops::RangeInclusive<u32> = 1..=64;
const REDUCERS: [Algorithm; 6] = [
    Algorithm::Flat,
    Algorithm::Halving,
    Algorithm::Ring,
    Algorithm::Doubling,
    Algorithm::Binomial,
    // On one host: every rank collects its piece from all, and hands it to all.
    Algorithm::TwoLevelRing,
];
const GATHERERS: [Algorithm; 2] = [Algorithm::Bruck, Algorithm::Ring];

/// One schedule that is reused, as the engine does: nothing of the previous operation may be left.
pub(super) fn schedules(layout: &Layout, make: impl Fn(&mut Schedule, Group<'_>)) -> Vec<Schedule> {
    let mut schedule = Schedule::default();
    schedule.broadcast(Group::new(0, 7), Algorithm::Binomial, 3, 5, 1);
    (0..layout.world())
        .map(|rank| {
            make(&mut schedule, Group::on(rank, layout));
            schedule.clone()
        })
        .collect()
}

fn of_world(world: u32, make: impl Fn(&mut Schedule, Group<'_>)) -> Vec<Schedule> {
    schedules(&Layout::single(world), make)
}

/// Without anything, fewer than ranks, more, and not a multiple.
fn lengths(world: u32) -> Vec<usize> {
    let world = world as usize;
    let mut lengths = vec![0, 1, world / 2, world + 1, 2 * world + 1];
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

fn roots(world: u32) -> Vec<u32> {
    if world <= 9 {
        return (0..world).collect();
    }
    vec![0, world / 2 + world % 3, world - 1]
}

/// Shares of ranks: all alike, none, uneven, one rank alone.
fn shares(world: u32) -> Vec<Vec<usize>> {
    let of = |share: &dyn Fn(usize) -> usize| (0..world as usize).map(share).collect();
    vec![
        of(&|_| 3),
        of(&|_| 0),
        of(&|rank| rank % 4),
        of(&|rank| usize::from(rank + 1 == world as usize) * 5),
    ]
}

fn offsets(counts: &[usize]) -> Vec<usize> {
    let mut offsets = vec![0];
    for count in counts {
        offsets.push(offsets[offsets.len() - 1] + count);
    }
    offsets
}

pub(super) fn sum(schedules: &[Schedule], inputs: &[Vec<i64>]) -> (Vec<Vec<i64>>, Traffic) {
    let world = schedules.len() as i64;
    run(schedules, inputs, |a, b| a + b, |value| value / world).unwrap()
}

/// Rank r has `(r + 1) (i + 3)`; the sum over all ranks is known.
pub(super) fn inputs(world: u32, count: usize) -> Vec<Vec<i64>> {
    (0..i64::from(world))
        .map(|rank| (0..count as i64).map(|i| (rank + 1) * (i + 3)).collect())
        .collect()
}

pub(super) fn sums(world: u32, count: usize, finish: bool) -> Vec<i64> {
    let world = i64::from(world);
    let by = if finish { world } else { 1 };
    (0..count as i64)
        .map(|i| world * (world + 1) / 2 * (i + 3) / by)
        .collect()
}

/// What each rank is known by in gathers.
fn named(counts: &[usize]) -> Vec<Vec<i64>> {
    counts
        .iter()
        .enumerate()
        .map(|(rank, count)| (0..*count).map(|i| (rank * 1000 + i + 1) as i64).collect())
        .collect()
}

/// Hashes of expression trees: results are alike if and only if values were combined in the same order.
pub(super) fn same_order(schedules: &[Schedule], count: usize) -> bool {
    let inputs: Vec<Vec<u64>> = (0..schedules.len() as u64)
        .map(|rank| (0..count as u64).map(|i| rank << 32 | i).collect())
        .collect();
    let tree = |a: u64, b: u64| {
        a.wrapping_mul(6_364_136_223_846_793_005)
            .rotate_left(17)
            .wrapping_add(b.wrapping_mul(1_442_695_040_888_963_407) ^ 0x9e37)
    };
    let (results, _) = run(schedules, &inputs, tree, |value| value).unwrap();
    results.windows(2).all(|pair| pair[0] == pair[1])
}

#[test]
fn all_reduce_is_right_for_every_world_size() {
    for world in WORLDS {
        for algorithm in REDUCERS {
            for (index, count) in lengths(world).into_iter().enumerate() {
                let finish = index % 2 == world as usize % 2;
                let segment = if index % 3 == 0 { 3 } else { count.max(1) };
                let all = of_world(world, |schedule, group| {
                    schedule.all_reduce(group, algorithm, count, segment, finish);
                });
                let (results, _) = sum(&all, &inputs(world, count));
                let expected = sums(world, count, finish);
                for result in results {
                    assert_eq!(result, expected, "{algorithm} world {world} count {count}");
                }
            }
        }
    }
}

#[test]
fn float_sums_have_the_same_bits_on_every_rank_nan_included() {
    for world in WORLDS {
        for algorithm in REDUCERS {
            let count = 3 * world as usize + 1;
            let all = of_world(world, |schedule, group| {
                schedule.all_reduce(group, algorithm, count, world as usize, false);
            });
            // Terms of very different size: another order gives other bits. A NaN here and there.
            let inputs: Vec<Vec<f32>> = (0..world)
                .map(|rank| {
                    (0..count as u32)
                        .map(|i| {
                            let mixed = (rank * 7919 + i * 104_729).wrapping_mul(2_654_435_761);
                            if mixed % 97 == 0 {
                                f32::NAN
                            } else {
                                (mixed as f32 - 2e9) * 10_f32.powi((mixed % 13) as i32 - 6)
                            }
                        })
                        .collect()
                })
                .collect();
            let bits = |values: &Vec<f32>| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            let (results, _) = run(&all, &inputs, |a, b| a + b, |value| value).unwrap();
            let (again, _) = run(&all, &inputs, |a, b| a + b, |value| value).unwrap();
            for (result, again) in results.iter().zip(&again) {
                assert_eq!(bits(result), bits(&results[0]), "{algorithm} world {world}");
                assert_eq!(bits(result), bits(again), "{algorithm} world {world}");
            }
        }
    }
}

#[test]
fn every_rank_combines_in_one_order() {
    for world in WORLDS {
        for algorithm in REDUCERS {
            let count = world as usize + 1;
            let all = of_world(world, |schedule, group| {
                schedule.all_reduce(group, algorithm, count, count / 2 + 1, false);
            });
            assert!(same_order(&all, count), "{algorithm} {world}");
        }
    }
}

#[test]
fn reduce_is_right_for_every_world_size_and_root() {
    for world in WORLDS {
        for root in roots(world) {
            for &algorithm in Algorithm::able(OperationKind::Reduce) {
                for count in [0, 1, 5, world as usize + 2] {
                    let all = of_world(world, |schedule, group| {
                        schedule.reduce(group, algorithm, root, count, 2, true);
                    });
                    let (results, traffic) = sum(&all, &inputs(world, count));
                    for (rank, result) in results.iter().enumerate() {
                        if rank as u32 == root {
                            assert_eq!(*result, sums(world, count, true), "{algorithm} {world}");
                        } else {
                            assert!(result.is_empty());
                        }
                    }
                    if algorithm == Algorithm::Chain {
                        let steps = count.div_ceil(2).max(1) + (world as usize).max(2) - 2;
                        assert!(traffic.rounds <= steps + 3, "{} {steps}", traffic.rounds);
                    }
                }
            }
        }
    }
}

#[test]
fn reduce_scatter_splits_rows_as_horovod_does() {
    for world in WORLDS {
        for &algorithm in Algorithm::able(OperationKind::ReduceScatter) {
            for (rows, width) in [
                (0, 3),
                (1, 2),
                (world as usize, 1),
                (2 * world as usize + 1, 2),
            ] {
                let split = Rows { rows, width, world };
                let count = rows * width;
                let all = of_world(world, |schedule, group| {
                    schedule.reduce_scatter(group, algorithm, split, true);
                });
                let (results, _) = sum(&all, &inputs(world, count));
                let expected = sums(world, count, true);
                for (rank, result) in (0..world).zip(results) {
                    // The first `rows % world` ranks have one row more.
                    let more = usize::from((rank as usize) < rows % world as usize);
                    assert_eq!(result.len(), (rows / world as usize + more) * width);
                    let span = split.span(rank);
                    assert_eq!(
                        result,
                        expected[span.start..span.end()],
                        "{algorithm} {world}"
                    );
                }
            }
            for counts in shares(world) {
                let offsets = offsets(&counts);
                let count = offsets[world as usize];
                let all = of_world(world, |schedule, group| {
                    schedule.reduce_scatter(group, algorithm, Offsets(&offsets), false);
                });
                let (results, _) = sum(&all, &inputs(world, count));
                assert_eq!(
                    results.concat(),
                    sums(world, count, false),
                    "{algorithm} {world}"
                );
            }
        }
    }
}

#[test]
fn all_gather_is_right_for_every_world_size_and_uneven_shares() {
    for world in WORLDS {
        for algorithm in [GATHERERS[0], GATHERERS[1], Algorithm::TwoLevelRing] {
            for (shape, counts) in shares(world).into_iter().enumerate() {
                let offsets = offsets(&counts);
                let all = of_world(world, |schedule, group| {
                    schedule.all_gather(group, algorithm, Offsets(&offsets));
                });
                if shape == 0 {
                    let equal = of_world(world, |schedule, group| {
                        schedule.all_gather(group, algorithm, Equal(3));
                    });
                    assert_eq!(all, equal);
                }
                let inputs = named(&counts);
                let expected = inputs.concat();
                let (results, traffic) = sum(&all, &inputs);
                for result in results {
                    assert_eq!(result, expected, "{algorithm} world {world} shape {shape}");
                }
                if shape == 0 {
                    let each = 3 * (world as usize - 1);
                    assert_eq!(traffic.sent, vec![each; world as usize]);
                }
            }
        }
    }
}

#[test]
fn gather_and_scatter_are_right_for_every_world_size_root_and_uneven_shares() {
    for world in WORLDS {
        for root in roots(world) {
            for &algorithm in Algorithm::able(OperationKind::GatherVarcount) {
                for counts in shares(world) {
                    let offsets = offsets(&counts);
                    let shares = named(&counts);
                    let all = of_world(world, |schedule, group| {
                        schedule.gather(group, algorithm, root, Offsets(&offsets));
                    });
                    let (results, _) = sum(&all, &shares);
                    for (rank, result) in (0..).zip(results) {
                        let expected = if rank == root {
                            shares.concat()
                        } else {
                            vec![]
                        };
                        assert_eq!(result, expected, "{algorithm} {world} {root}");
                    }

                    let all = of_world(world, |schedule, group| {
                        schedule.scatter(group, algorithm, root, Offsets(&offsets));
                    });
                    let inputs: Vec<Vec<i64>> = (0..world)
                        .map(|rank| {
                            if rank == root {
                                shares.concat()
                            } else {
                                vec![]
                            }
                        })
                        .collect();
                    for (rank, schedule) in (0..).zip(&all) {
                        assert_eq!(schedule.input.is_some(), rank == root);
                    }
                    let (results, _) = sum(&all, &inputs);
                    assert_eq!(results, shares, "{algorithm} {world} {root}");
                }
            }
        }
    }
}

#[test]
fn broadcast_is_right_for_every_world_size_and_root() {
    for world in WORLDS {
        for root in roots(world) {
            for &algorithm in Algorithm::able(OperationKind::Broadcast) {
                for count in [0, 1, 5, world as usize] {
                    let all = of_world(world, |schedule, group| {
                        schedule.broadcast(group, algorithm, root, count, 2);
                    });
                    let inputs: Vec<Vec<i64>> = (0..world)
                        .map(|rank| vec![i64::from(rank) + 1; count])
                        .collect();
                    for (rank, schedule) in (0..).zip(&all) {
                        assert_eq!(schedule.input.is_some(), rank == root);
                    }
                    let (results, traffic) = sum(&all, &inputs);
                    for result in results {
                        assert_eq!(result, inputs[root as usize], "{algorithm} {world} {root}");
                    }
                    let sent: usize = traffic.sent.iter().sum();
                    match algorithm {
                        Algorithm::ScatterGather => {}
                        _ => assert_eq!(sent, count * (world as usize - 1)),
                    }
                    if algorithm == Algorithm::Binomial {
                        assert!(all.iter().all(|one| one.len() <= log2_up(world)));
                    }
                    if algorithm == Algorithm::Chain && world > 1 {
                        let segments = count.div_ceil(2).max(1);
                        assert!(all.iter().all(|one| one.len() <= segments + 1));
                        assert!(traffic.rounds <= segments + world as usize);
                    }
                }
            }
        }
    }
}

#[test]
fn all_to_all_is_right_for_every_world_size_and_uneven_parts() {
    for world in WORLDS {
        let block = |from: u32, to: u32, len: usize| -> Vec<i64> {
            (0..len)
                .map(|i| i64::from(from) * 10_000 + i64::from(to) * 100 + i as i64)
                .collect()
        };
        for &algorithm in Algorithm::able(OperationKind::AllToAll) {
            for len in [0, 1, 3] {
                let all = of_world(world, |schedule, group| {
                    schedule.all_to_all(group, algorithm, Equal(len), Equal(len));
                });
                let side = |sends: bool| -> Vec<Vec<i64>> {
                    (0..world)
                        .map(|me| {
                            (0..world)
                                .flat_map(|other| {
                                    if sends {
                                        block(me, other, len)
                                    } else {
                                        block(other, me, len)
                                    }
                                })
                                .collect()
                        })
                        .collect()
                };
                let (results, traffic) = sum(&all, &side(true));
                assert_eq!(results, side(false), "{algorithm} {world}");
                if algorithm == Algorithm::Bruck {
                    assert!(all.iter().all(|one| one.len() <= log2_up(world) + 1));
                } else {
                    assert_eq!(
                        traffic.sent,
                        vec![(world as usize - 1) * len; world as usize]
                    );
                }
            }
        }
        // Everybody has something else for everybody.
        let len = |from: u32, to: u32| (from as usize * 3 + to as usize * 5) % 4;
        for &algorithm in Algorithm::able(OperationKind::AllToAllVarcount) {
            let all = of_world(world, |schedule, group| {
                let me = group.rank;
                let send: Vec<usize> = (0..world).map(|other| len(me, other)).collect();
                let receive: Vec<usize> = (0..world).map(|other| len(other, me)).collect();
                let (send, receive) = (offsets(&send), offsets(&receive));
                schedule.all_to_all(group, algorithm, Offsets(&send), Offsets(&receive));
            });
            let inputs: Vec<Vec<i64>> = (0..world)
                .map(|me| {
                    (0..world)
                        .flat_map(|to| block(me, to, len(me, to)))
                        .collect()
                })
                .collect();
            let expected: Vec<Vec<i64>> = (0..world)
                .map(|me| {
                    (0..world)
                        .flat_map(|from| block(from, me, len(from, me)))
                        .collect()
                })
                .collect();
            assert_eq!(sum(&all, &inputs).0, expected, "{algorithm} {world}");
        }
    }
}

#[test]
fn one_rank_sends_to_another() {
    for count in [0, 5] {
        let (mut one, mut other) = (Schedule::default(), Schedule::default());
        one.receive(1, count);
        other.send(0, count);
        let values: Vec<i64> = (0..count as i64).collect();
        let (results, _) = sum(&[one, other], &[vec![], values.clone()]);
        assert_eq!(results, [values, vec![]]);
    }
}

#[test]
fn nobody_leaves_a_barrier_before_all_have_come() {
    for world in WORLDS {
        let all = of_world(world, Schedule::barrier);
        assert!(all.iter().all(|schedule| schedule.len() == log2_up(world)));
        assert!(all.iter().all(|schedule| schedule.buffer == 0));
        // What each rank knows after each step, as a set of ranks that have come.
        let mut known: Vec<u64> = (0..world).map(|rank| 1 << rank).collect();
        for step in 0..log2_up(world) {
            let before = known.clone();
            for (rank, schedule) in all.iter().enumerate() {
                for action in schedule.step(step) {
                    if let Action::Receive { peer, .. } = action {
                        known[rank] |= before[*peer as usize];
                    }
                }
            }
        }
        let everybody = u64::MAX >> (64 - world);
        assert!(known.iter().all(|set| *set == everybody), "world {world}");
        sum(&all, &vec![Vec::new(); world as usize]);
    }
}

/// Adasum of two vectors, in its plainest form.
fn blend(left: &mut [f64], right: &[f64], [both, lefts, rights]: [f64; 3]) {
    let factor = |own: f64| {
        if own == 0.0 {
            1.0
        } else {
            1.0 - both / (2.0 * own)
        }
    };
    for (a, b) in left.iter_mut().zip(right) {
        *a = factor(lefts) * *a + factor(rights) * *b;
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[test]
fn adasum_is_right_for_every_power_of_two() {
    let kernels = Kernels {
        combine: &|_, _| unreachable!("adasum blends"),
        finish: &|value: f64| value * 2.0,
        dots: &|a: &[f64], b: &[f64]| [dot(a, b), dot(a, a), dot(b, b)],
        add: &|a, b| a + b,
        blend: &blend,
    };
    for world in [1_u32, 2, 4, 8, 16, 32, 64] {
        for count in [0, 1, 3, 17, 130] {
            let inputs: Vec<Vec<f64>> = (0..world)
                .map(|rank| {
                    (0..count)
                        .map(|i| f64::from((rank * 37 + i * 11 + rank * rank * i) % 19) - 9.0)
                        .collect()
                })
                .collect();
            let mut expected = inputs.clone();
            while expected.len() > 1 {
                expected = expected
                    .chunks(2)
                    .map(|pair| {
                        let (a, b) = (&pair[0], &pair[1]);
                        let mut result = a.clone();
                        blend(&mut result, b, [dot(a, b), dot(a, a), dot(b, b)]);
                        result
                    })
                    .collect();
            }
            for &algorithm in Algorithm::ADASUM {
                let all = of_world(world, |schedule, group| {
                    schedule.adasum(group, algorithm, count as usize, 8, true);
                });
                let (results, traffic) = run_with(&all, &inputs, &kernels).unwrap();
                for result in &results {
                    let bits = |all: &[f64]| all.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(result), bits(&results[0]), "{algorithm} {world}");
                    for (value, expected) in result.iter().zip(&expected[0]) {
                        let expected = expected * 2.0;
                        assert!(
                            (value - expected).abs() <= 1e-9 * expected.abs().max(1.0),
                            "{algorithm} of {count} in {world}: {value} is not {expected}"
                        );
                    }
                }
                let (n, levels) = (world as usize, world.ilog2() as usize);
                let count = count as usize;
                if algorithm == Algorithm::Halving && count.is_multiple_of(n) {
                    let scalars = 3 * levels * (levels + 1) / 2;
                    assert_eq!(traffic.sent, vec![2 * count * (n - 1) / n + scalars; n]);
                }
                assert!(all.iter().all(|one| match algorithm {
                    Algorithm::Doubling => one.len() == levels.max(1),
                    _ => one.len() == (levels * (levels + 5) / 2).max(1),
                }));
            }
        }
    }
}

#[test]
fn scalar_products_lie_where_an_f64_may() {
    for size in [2, 4, 8] {
        for count in 0..40 {
            for &algorithm in Algorithm::ADASUM {
                let mut schedule = Schedule::default();
                schedule.adasum(Group::new(3, 8), algorithm, count, size, false);
                for action in schedule.steps().flatten() {
                    if let Action::Dots { into, .. } | Action::AddDots { into, .. } = action {
                        assert_eq!(into.start * size % 8, 0);
                        assert_eq!(into.len * size, 24);
                        assert!(into.end() <= schedule.buffer);
                    }
                }
            }
        }
    }
}

fn log2_up(world: u32) -> usize {
    world.next_power_of_two().ilog2() as usize
}

#[test]
fn ranks_send_as_many_bytes_as_theory_says() {
    for world in 2..=64_u32 {
        let n = world as usize;
        let count = 5 * n;
        let inputs = vec![vec![1; count]; n];
        let traffic = |algorithm| {
            let all = of_world(world, |schedule, group| {
                schedule.all_reduce(group, algorithm, count, count, false);
            });
            (sum(&all, &inputs).1.sent, all)
        };
        let (ring, all) = traffic(Algorithm::Ring);
        assert_eq!(ring, vec![2 * (n - 1) * 5; n]);
        assert!(all.iter().all(|one| one.len() == 2 * (n - 1)));

        let (gather, all) = traffic(Algorithm::Flat);
        assert_eq!(gather, vec![(n - 1) * count; n]);
        assert!(all.iter().all(|one| one.len() == log2_up(world)));

        let (halving, all) = traffic(Algorithm::Halving);
        let power = 1_usize << world.ilog2();
        let over = n - power;
        // Inside the power of two everybody sends 2 S (p-1)/p in total; the others S each way.
        assert_eq!(
            halving.iter().sum::<usize>(),
            power * 2 * count * (power - 1) / power + 2 * over * count
        );
        let steps = 2 * power.ilog2() as usize + if over > 0 { 2 } else { 0 };
        assert_eq!(all.iter().map(Schedule::len).max(), Some(steps));

        let (doubling, all) = traffic(Algorithm::Doubling);
        let rounds = power.ilog2() as usize;
        assert_eq!(
            doubling.iter().sum::<usize>(),
            count * (power * rounds + 2 * over)
        );
        let steps = rounds + if over > 0 { 2 } else { 0 };
        assert_eq!(all.iter().map(Schedule::len).max(), Some(steps));

        // Every byte goes up the tree once and down once.
        let (tree, all) = traffic(Algorithm::Binomial);
        assert_eq!(tree.iter().sum::<usize>(), 2 * count * (n - 1));
        assert!(all.iter().all(|one| one.len() <= 2 * log2_up(world)));

        let (direct, all) = traffic(Algorithm::TwoLevelRing);
        assert_eq!(direct, vec![2 * (n - 1) * 5; n]);
        assert!(all.iter().all(|one| one.len() == 2));
    }
}

#[test]
fn the_first_step_of_a_pair_is_found_by_its_peers() {
    let mut schedule = Schedule::default();
    schedule.all_reduce(Group::new(1, 4), Algorithm::Ring, 8, 8, true);
    assert_eq!(schedule.peers_from(0).count(), 12);
    assert_eq!(schedule.peers_from(5).collect::<Vec<_>>(), [2, 0]);
    assert_eq!(schedule.peers_from(6).count(), 0);
    assert_eq!(schedule.peers_from(60).count(), 0);
    assert_eq!(schedule.step(60), &[]);
}

#[test]
fn the_simulator_sees_what_is_wrong() {
    let span = Span::between(0, 2);
    let send = |peer| Action::Send { peer, span };
    let receive = |peer| Action::Receive { peer, span };
    let make = |steps: &[&[Action]]| {
        let mut schedule = Schedule {
            buffer: 2,
            ..Schedule::default()
        };
        for step in steps {
            step.iter().for_each(|action| schedule.act(*action));
            schedule.end_step();
        }
        schedule
    };
    let error = |a: &[&[Action]], b: &[&[Action]]| {
        let result = run::<i64>(
            &[make(a), make(b)],
            &[Vec::new(), Vec::new()],
            |a, _| a,
            |a| a,
        );
        result.unwrap_err()
    };
    // Both send first, then receive: it would work on lanes that buffer, and must not be relied on.
    assert!(error(&[&[send(1)], &[receive(1)]], &[&[send(0)], &[receive(0)]]).contains("deadlock"));
    assert!(error(&[&[send(1)]], &[]).contains("deadlock"));
    assert!(error(&[&[receive(1)]], &[]).contains("deadlock"));
    assert!(error(&[&[send(0)]], &[]).contains("to itself"));
    assert!(error(&[&[send(1), receive(1)]], &[]).contains("overwritten"));
    let short = Action::Receive {
        peer: 0,
        span: Span::between(0, 1),
    };
    assert!(error(&[&[send(1)]], &[&[short]]).contains("expects 1"));
    let outside = Action::Finish {
        span: Span::between(0, 3),
    };
    assert!(error(&[&[outside]], &[]).contains("outside"));
}

#[test]
fn a_ring_in_segments_reduces_one_while_it_gathers_the_other() {
    for world in 2..=9_u32 {
        let (rounds, segment) = (world as usize - 1, 3 * world as usize);
        for segments in 1..5 {
            let count = segments * segment - 1;
            let all = of_world(world, |schedule, group| {
                schedule.all_reduce(group, Algorithm::Ring, count, segment, true);
            });
            for schedule in &all {
                assert_eq!(schedule.len(), (segments + 1) * rounds);
                assert!(schedule.is_in_place(count));
                // Nothing that is worked on at once lies farther apart than two segments.
                for step in schedule.steps() {
                    let starts = step
                        .iter()
                        .filter_map(Action::transfer)
                        .map(|(_, span)| span.start);
                    let ends = step
                        .iter()
                        .filter_map(Action::transfer)
                        .map(|(_, span)| span.end());
                    assert!(ends.max().unwrap() - starts.min().unwrap() <= 2 * segment);
                }
            }
            let (_, traffic) = sum(&all, &inputs(world, count));
            assert_eq!(traffic.sent.iter().sum::<usize>(), 2 * rounds * count);
        }
    }
}

proptest! {
    #[test]
    fn any_reduction_of_any_length_is_right(
        world in WORLDS,
        count in 0_usize..700,
        algorithm in prop::sample::select(REDUCERS.to_vec()),
        segment in 1_usize..200,
        seed in any::<u32>(),
    ) {
        let all = of_world(world, |schedule, group| {
            schedule.all_reduce(group, algorithm, count, segment, false);
        });
        let inputs: Vec<Vec<i64>> = (0..world)
            .map(|rank| (0..count).map(|i| i64::from(seed ^ rank) * (i as i64 + 1)).collect())
            .collect();
        let expected: Vec<i64> = (0..count)
            .map(|i| inputs.iter().map(|input| input[i]).sum())
            .collect();
        let (results, _) = sum(&all, &inputs);
        for result in results {
            prop_assert_eq!(&result, &expected);
        }
    }

    #[test]
    fn any_gather_is_right(
        counts in prop::collection::vec(0_usize..40, 1..=64),
        algorithm in prop::sample::select(GATHERERS.to_vec()),
    ) {
        let mut offsets = vec![0];
        for count in &counts {
            offsets.push(offsets[offsets.len() - 1] + count);
        }
        let all = of_world(counts.len() as u32, |schedule, group| {
            schedule.all_gather(group, algorithm, Offsets(&offsets));
        });
        let inputs: Vec<Vec<i64>> = counts
            .iter()
            .enumerate()
            .map(|(rank, count)| (0..*count).map(|i| (rank * 1000 + i) as i64).collect())
            .collect();
        let (results, _) = sum(&all, &inputs);
        for result in results {
            prop_assert_eq!(&result, &inputs.concat());
        }
    }

    #[test]
    fn pieces_cover_everything_once(count in 0_usize..10_000, pieces in 1_u32..100) {
        let mut end = 0;
        for index in 0..pieces {
            let piece = piece(count, pieces, index);
            prop_assert_eq!(piece.start, end);
            prop_assert!(piece.len.abs_diff(count / pieces as usize) <= 1);
            end = piece.end();
        }
        prop_assert_eq!(end, count);
    }
}
