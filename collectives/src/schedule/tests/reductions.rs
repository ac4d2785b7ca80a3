//! What combines values.

use super::*;

#[test]
fn all_reduce_is_right_for_every_world_size() {
    for (world, layout) in WORLDS.flat_map(layouts) {
        let able = Algorithm::able(OperationKind::AllReduce);
        for &algorithm in if world <= 9 { able } else { &REDUCERS } {
            for (index, count) in lengths(world).into_iter().enumerate() {
                let finish = index % 2 == world as usize % 2;
                let segment = if index % 3 == 0 { 3 } else { count.max(1) };
                let all = schedules(&layout, |schedule, group| {
                    schedule.all_reduce(group, algorithm, count, segment, finish);
                });
                let expected = vec![sums(world, count, finish); world as usize];
                let what = format!("{algorithm} of {count}, world {world}");
                if world <= 9 {
                    check(&all, &inputs(world, count), &expected, &what);
                } else {
                    assert_eq!(sum(&all, &inputs(world, count)).0, expected, "{what}");
                }
            }
        }
    }
}

/// So sums of floats have the same bits on every rank.
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
    for (world, layout) in WORLDS.flat_map(layouts) {
        for root in roots(world) {
            for &algorithm in Algorithm::able(OperationKind::Reduce) {
                for count in [0, 1, 5, world as usize + 2] {
                    let all = schedules(&layout, |schedule, group| {
                        schedule.reduce(group, algorithm, root, count, true);
                    });
                    let expected = at_root(world, root, &sums(world, count, true));
                    let what = format!("{algorithm} of {count}, root {root}");
                    check(&all, &inputs(world, count), &expected, &what);
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
                let sums = sums(world, count, true);
                let expected: Vec<Vec<i64>> = (0..world)
                    .map(|rank| split.span(rank))
                    .map(|part| sums[part.start..part.end()].to_vec())
                    .collect();
                for (rank, part) in expected.iter().enumerate() {
                    // The first `rows % world` ranks have one row more.
                    let more = usize::from(rank < rows % world as usize);
                    assert_eq!(part.len(), (rows / world as usize + more) * width);
                }
                let what = format!("{algorithm} of {split:?}");
                let (works, _) = check(&all, &inputs(world, count), &expected, &what);
                // Ranks of more pass on what they have added up.
                if world == 2 && count > 0 {
                    assert!(!works.contains(&Works::Buffered), "{what}");
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
