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
