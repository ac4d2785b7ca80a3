#![allow(clippy::cast_possible_wrap)] // small numbers

use proptest::prelude::*;

use super::simulate::{Traffic, run};
use super::*;

const WORLDS: std::ops::RangeInclusive<u32> = 1..=64;
const REDUCERS: [Algorithm; 3] = [Algorithm::Gather, Algorithm::Halving, Algorithm::Ring];
const GATHERERS: [Algorithm; 2] = [Algorithm::Bruck, Algorithm::Ring];

fn schedules(world: u32, make: impl Fn(&mut Schedule, Group)) -> Vec<Schedule> {
    // One that is reused, as the engine does: nothing of the previous operation may be left.
    let mut schedule = Schedule::default();
    schedule.broadcast(Group { rank: 0, world: 7 }, 3, 5);
    (0..world)
        .map(|rank| {
            make(&mut schedule, Group { rank, world });
            schedule.clone()
        })
        .collect()
}

fn lengths(world: u32) -> Vec<usize> {
    let world = world as usize;
    let mut lengths = vec![0, 1, 2, 3, 17, world - 1, world, world + 1, 2 * world + 1];
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

fn sum(schedules: &[Schedule], inputs: &[Vec<i64>]) -> (Vec<Vec<i64>>, Traffic) {
    let world = schedules.len() as i64;
    run(schedules, inputs, |a, b| a + b, |value| value / world).unwrap()
}

#[test]
fn all_reduce_is_right_for_every_world_size() {
    for world in WORLDS {
        for algorithm in REDUCERS {
            for count in lengths(world) {
                for divide in [false, true] {
                    let all = schedules(world, |schedule, group| {
                        schedule.all_reduce(group, algorithm, count, divide);
                    });
                    let inputs: Vec<Vec<i64>> = (0..i64::from(world))
                        .map(|rank| (0..count as i64).map(|i| (rank + 1) * (i + 3)).collect())
                        .collect();
                    let total = i64::from(world) * i64::from(world + 1) / 2;
                    let by = if divide && world > 1 {
                        i64::from(world)
                    } else {
                        1
                    };
                    let expected: Vec<i64> =
                        (0..count as i64).map(|i| total * (i + 3) / by).collect();
                    let (results, _) = sum(&all, &inputs);
                    for result in results {
                        assert_eq!(result, expected, "{algorithm} world {world} count {count}");
                    }
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
            let all = schedules(world, |schedule, group| {
                schedule.all_reduce(group, algorithm, count, false);
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
    // The order itself, as text: the strongest form of "the same bits".
    for world in WORLDS {
        for algorithm in REDUCERS {
            let count = world as usize + 1;
            let all = schedules(world, |schedule, group| {
                schedule.all_reduce(group, algorithm, count, false);
            });
            // Values are hashes of expression trees.
            let inputs: Vec<Vec<u64>> = (0..u64::from(world))
                .map(|rank| (0..count as u64).map(|i| rank << 32 | i).collect())
                .collect();
            let tree = |a: u64, b: u64| {
                a.wrapping_mul(6_364_136_223_846_793_005)
                    .rotate_left(17)
                    .wrapping_add(b.wrapping_mul(1_442_695_040_888_963_407) ^ 0x9e37)
            };
            let (results, _) = run(&all, &inputs, tree, |value| value).unwrap();
            assert!(
                results.windows(2).all(|pair| pair[0] == pair[1]),
                "{algorithm} {world}"
            );
        }
    }
}

#[test]
fn all_gather_is_right_for_every_world_size_and_uneven_shares() {
    for world in WORLDS {
        for algorithm in GATHERERS {
            for shape in 0..4_usize {
                let counts: Vec<usize> = (0..world as usize)
                    .map(|rank| match shape {
                        0 => 0,
                        1 => 3,
                        2 => rank % 4,
                        _ => usize::from(rank + 1 == world as usize) * 5,
                    })
                    .collect();
                let mut offsets = vec![0];
                for count in &counts {
                    offsets.push(offsets[offsets.len() - 1] + count);
                }
                let all = schedules(world, |schedule, group| {
                    schedule.all_gather(group, algorithm, Offsets(&offsets));
                });
                if shape == 1 {
                    let equal = schedules(world, |schedule, group| {
                        schedule.all_gather(group, algorithm, Equal(3));
                    });
                    assert_eq!(all, equal);
                }
                let inputs: Vec<Vec<i64>> = counts
                    .iter()
                    .enumerate()
                    .map(|(rank, count)| (0..*count).map(|i| (rank * 100 + i + 1) as i64).collect())
                    .collect();
                let expected = inputs.concat();
                let (results, traffic) = sum(&all, &inputs);
                for result in results {
                    assert_eq!(result, expected, "{algorithm} world {world} shape {shape}");
                }
                if shape == 1 {
                    let each = 3 * (world as usize - 1);
                    assert_eq!(traffic.sent, vec![each; world as usize]);
                }
            }
        }
    }
}

#[test]
fn broadcast_is_right_for_every_world_size_and_root() {
    for world in WORLDS {
        for root in 0..world {
            for count in [0, 1, 5] {
                let all = schedules(world, |schedule, group| {
                    schedule.broadcast(group, root, count);
                });
                let inputs: Vec<Vec<i64>> = (0..world)
                    .map(|rank| vec![i64::from(rank) + 1; count])
                    .collect();
                for (rank, schedule) in all.iter().enumerate() {
                    assert_eq!(schedule.input.is_some(), rank as u32 == root);
                }
                let (results, traffic) = sum(&all, &inputs);
                for result in results {
                    assert_eq!(result, inputs[root as usize], "world {world} root {root}");
                }
                assert_eq!(
                    traffic.sent.iter().sum::<usize>(),
                    count * (world as usize - 1)
                );
                assert!(all.iter().all(|one| one.len() <= log2_up(world)));
            }
        }
    }
}

#[test]
fn nobody_leaves_a_barrier_before_all_have_come() {
    for world in WORLDS {
        let all = schedules(world, Schedule::barrier);
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
            let all = schedules(world, |schedule, group| {
                schedule.all_reduce(group, algorithm, count, false);
            });
            (sum(&all, &inputs).1.sent, all)
        };
        let (ring, all) = traffic(Algorithm::Ring);
        assert_eq!(ring, vec![2 * (n - 1) * 5; n]);
        assert!(all.iter().all(|one| one.len() == 2 * (n - 1)));

        let (gather, all) = traffic(Algorithm::Gather);
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
    }
}

#[test]
fn the_first_step_of_a_pair_is_found_by_its_peers() {
    let mut schedule = Schedule::default();
    schedule.all_reduce(Group { rank: 1, world: 4 }, Algorithm::Ring, 8, true);
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
    let outside = Action::Divide {
        span: Span::between(0, 3),
    };
    assert!(error(&[&[outside]], &[]).contains("outside"));
}

proptest! {
    #[test]
    fn any_reduction_of_any_length_is_right(
        world in WORLDS,
        count in 0_usize..700,
        algorithm in prop::sample::select(REDUCERS.to_vec()),
        seed in any::<u32>(),
    ) {
        let all = schedules(world, |schedule, group| {
            schedule.all_reduce(group, algorithm, count, false);
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
        let all = schedules(counts.len() as u32, |schedule, group| {
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
