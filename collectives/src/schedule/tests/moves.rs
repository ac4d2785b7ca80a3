//! What moves values and combines none.

use super::*;

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

/// A value of a buffer. What nobody has written is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Marked(i64);

impl Default for Marked {
    fn default() -> Self {
        Self(-77)
    }
}

/// Which buffer a rank can do without another one in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Works {
    /// That for the result.
    Into,
    /// That of the input and that for the result.
    Apart,
    /// None of the caller's.
    Buffered,
}

/// Where each rank works. Its result has to be what is expected, though it was not copied from anywhere.
fn works(all: &[Schedule], inputs: &[Vec<i64>], expected: &[Vec<i64>], what: &str) -> Vec<Works> {
    let whole: Vec<Schedule> = all
        .iter()
        .map(|schedule| Schedule {
            outputs: vec![Output {
                from: Span::between(0, schedule.buffer),
                to: 0,
            }],
            ..schedule.clone()
        })
        .collect();
    let marked: Vec<Vec<Marked>> = inputs
        .iter()
        .map(|input| input.iter().copied().map(Marked).collect())
        .collect();
    let sum = |a: Marked, b: Marked| Marked(a.0 + b.0);
    let moved = run(&whole, &marked, sum, |value| value);
    // All that is in the buffers in the end.
    let (left, _) = moved.unwrap();
    all.iter()
        .enumerate()
        .map(|(rank, schedule)| {
            let left: Vec<i64> = left[rank].iter().map(|value| value.0).collect();
            let (input, expected) = (&inputs[rank], &expected[rank]);
            if schedule.is_into(expected.len()) {
                assert_eq!(left, *expected, "{what}: rank {rank}");
                return Works::Into;
            }
            let Some(written) = schedule.is_apart(input.len(), expected.len()) else {
                return Works::Buffered;
            };
            for (at, (left, given)) in left.iter().zip(input).enumerate() {
                let is_written = (written.start..written.end()).contains(&at);
                assert!(is_written || left == given, "{what}: rank {rank}");
            }
            // What is of the input is there before the rest comes.
            let mut result = left[written.start..written.end()].to_vec();
            for output in &schedule.outputs {
                if output.from.start < written.start || output.from.end() > written.end() {
                    let from = &input[output.from.start..output.from.end()];
                    result[output.to..output.to + from.len()].copy_from_slice(from);
                }
            }
            assert_eq!(result, *expected, "{what}: rank {rank}");
            Works::Apart
        })
        .collect()
}

/// On one host, on hosts of two, and on two hosts by turns.
fn layouts(world: u32) -> [Layout; 3] {
    let hosts = |host: fn(u32) -> u32| -> Vec<u32> { (0..world).map(host).collect() };
    [
        Layout::single(world),
        Layout::of_hosts(&hosts(|rank| rank / 2)),
        Layout::of_hosts(&hosts(|rank| rank % 2)),
    ]
}

/// For the root alone.
fn at_root(world: u32, root: u32, values: &[i64]) -> Vec<Vec<i64>> {
    (0..world)
        .map(|rank| {
            if rank == root {
                values.to_vec()
            } else {
                Vec::new()
            }
        })
        .collect()
}

#[test]
fn all_gathers_that_work_in_the_result_leave_nothing_but_it() {
    for world in 1..=9 {
        for layout in layouts(world) {
            for &algorithm in Algorithm::able(OperationKind::AllGather) {
                for counts in shares(world) {
                    let offsets = offsets(&counts);
                    let all = schedules(&layout, |schedule, group| {
                        schedule.all_gather(group, algorithm, Offsets(&offsets));
                    });
                    let inputs = named(&counts);
                    let expected = vec![inputs.concat(); world as usize];
                    let what = format!("all-gather {algorithm} of {counts:?}");
                    let works = works(&all, &inputs, &expected, &what);
                    if algorithm == Algorithm::Ring {
                        assert_eq!(works, vec![Works::Into; world as usize], "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn gathers_and_scatters_that_work_in_the_callers_buffers_are_right() {
    for world in 1..=9 {
        for root in 0..world {
            for &algorithm in Algorithm::able(OperationKind::Gather) {
                for (shape, counts) in shares(world).into_iter().enumerate() {
                    let offsets = offsets(&counts);
                    let shares = named(&counts);
                    let of_root = at_root(world, root, &shares.concat());
                    let what = format!("{algorithm} of {counts:?}, root {root}");
                    let all = of_world(world, |schedule, group| {
                        schedule.gather(group, algorithm, root, Offsets(&offsets));
                    });
                    let gathers = works(&all, &shares, &of_root, &format!("gather {what}"));
                    let all = of_world(world, |schedule, group| {
                        schedule.scatter(group, algorithm, root, Offsets(&offsets));
                    });
                    let scatters = works(&all, &of_root, &shares, &format!("scatter {what}"));
                    // Where everybody has something, and it is not all of it.
                    if algorithm == Algorithm::Linear && shape == 0 && world > 1 {
                        let expected = |root_works, others_work| {
                            let mut works = vec![others_work; world as usize];
                            works[root as usize] = root_works;
                            works
                        };
                        assert_eq!(gathers, expected(Works::Into, Works::Apart), "{what}");
                        assert_eq!(scatters, expected(Works::Apart, Works::Into), "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn broadcasts_that_work_in_the_callers_buffer_leave_nothing_but_the_data() {
    for world in 1..=9 {
        for layout in layouts(world) {
            for root in 0..world {
                for &algorithm in Algorithm::able(OperationKind::Broadcast) {
                    for count in [0, 1, 5, 2 * world as usize + 1] {
                        let all = schedules(&layout, |schedule, group| {
                            schedule.broadcast(group, algorithm, root, count, 2);
                        });
                        let data: Vec<i64> = (1..=count as i64).collect();
                        let expected = vec![data.clone(); world as usize];
                        let inputs = at_root(world, root, &data);
                        let what = format!("broadcast {algorithm} of {count}, root {root}");
                        let works = works(&all, &inputs, &expected, &what);
                        assert_eq!(works, vec![Works::Into; world as usize], "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn exchanges_that_work_in_the_callers_buffers_are_right() {
    let block = |from: u32, to: u32, len: usize| -> Vec<i64> {
        let name = i64::from(from) * 10_000 + i64::from(to) * 100;
        (0..len as i64).map(|i| name + i).collect()
    };
    let uneven = |from: u32, to: u32| (from as usize * 3 + to as usize * 5) % 4;
    for world in 1..=9 {
        let each = |make: &dyn Fn(u32, u32) -> Vec<i64>| -> Vec<Vec<i64>> {
            (0..world)
                .map(|me| (0..world).flat_map(|other| make(me, other)).collect())
                .collect()
        };
        for &algorithm in Algorithm::able(OperationKind::AllToAll) {
            for len in [0, 1, 3] {
                let all = of_world(world, |schedule, group| {
                    schedule.all_to_all(group, algorithm, Equal(len), Equal(len));
                });
                let inputs = each(&|me, other| block(me, other, len));
                let expected = each(&|me, other| block(other, me, len));
                let what = format!("all-to-all {algorithm} of {len}");
                let works = works(&all, &inputs, &expected, &what);
                if algorithm != Algorithm::Bruck && len > 0 {
                    assert_eq!(works, vec![Works::Apart; world as usize], "{what}");
                }
            }
        }
        for &algorithm in Algorithm::able(OperationKind::AllToAllVarcount) {
            let all = of_world(world, |schedule, group| {
                let me = group.rank;
                let send: Vec<usize> = (0..world).map(|other| uneven(me, other)).collect();
                let receive: Vec<usize> = (0..world).map(|other| uneven(other, me)).collect();
                let (send, receive) = (offsets(&send), offsets(&receive));
                schedule.all_to_all(group, algorithm, Offsets(&send), Offsets(&receive));
            });
            let inputs = each(&|me, other| block(me, other, uneven(me, other)));
            let expected = each(&|me, other| block(other, me, uneven(other, me)));
            works(&all, &inputs, &expected, &format!("uneven {algorithm}"));
        }
    }
    for count in [0, 5] {
        let (mut one, mut other) = (Schedule::default(), Schedule::default());
        one.receive(1, count);
        other.send(0, count);
        let data: Vec<i64> = (1..=count as i64).collect();
        let (inputs, expected) = ([vec![], data.clone()], [data, vec![]]);
        let works = works(&[one, other], &inputs, &expected, "send");
        assert_eq!(works, [Works::Into, Works::Apart], "{count}");
    }
}

/// They combine values, but where they work is asked in the same way: who only hands on what it combined has no result, and still
/// can't work in its input.
#[test]
fn reductions_that_work_in_the_callers_buffers_are_right() {
    for world in 1..=9 {
        for layout in layouts(world) {
            for count in [0, 1, 5, 2 * world as usize + 1] {
                let (inputs, sums) = (inputs(world, count), sums(world, count, false));
                for &algorithm in Algorithm::able(OperationKind::AllReduce) {
                    let all = schedules(&layout, |schedule, group| {
                        schedule.all_reduce(group, algorithm, count, 2, false);
                    });
                    let expected = vec![sums.clone(); world as usize];
                    works(&all, &inputs, &expected, &format!("{algorithm} of {count}"));
                }
                for root in 0..world {
                    for &algorithm in Algorithm::able(OperationKind::Reduce) {
                        let all = schedules(&layout, |schedule, group| {
                            schedule.reduce(group, algorithm, root, count, 2, false);
                        });
                        let what = format!("{algorithm} of {count}, root {root}");
                        works(&all, &inputs, &at_root(world, root, &sums), &what);
                    }
                }
                for &algorithm in Algorithm::able(OperationKind::ReduceScatter) {
                    let (rows, width) = (count, 1);
                    let rows = Rows { rows, width, world };
                    let all = schedules(&layout, |schedule, group| {
                        schedule.reduce_scatter(group, algorithm, rows, false);
                    });
                    let expected: Vec<Vec<i64>> = (0..world)
                        .map(|rank| rows.span(rank))
                        .map(|part| sums[part.start..part.end()].to_vec())
                        .collect();
                    let what = format!("{algorithm} of {rows:?}");
                    let works = works(&all, &inputs, &expected, &what);
                    // Others hand on what they have added up.
                    if world == 2 && count > 0 {
                        assert!(!works.contains(&Works::Buffered), "{what}");
                    }
                }
            }
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
