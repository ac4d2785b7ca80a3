//! What moves values and combines none.

use super::*;

/// What rank `from` has for rank `to`.
fn block(from: u32, to: u32, len: usize) -> Vec<i64> {
    let name = i64::from(from) * 10_000 + i64::from(to) * 100;
    (0..len as i64).map(|i| name + i).collect()
}

#[test]
fn all_gather_is_right_for_every_world_size_and_uneven_shares() {
    for (world, layout) in WORLDS.flat_map(layouts) {
        for &algorithm in Algorithm::able(OperationKind::AllGather) {
            for (shape, counts) in shares(world).into_iter().enumerate() {
                let offsets = offsets(&counts);
                let all = schedules(&layout, |schedule, group| {
                    schedule.all_gather(group, algorithm, Offsets(&offsets));
                });
                let inputs = named(&counts);
                let what = format!("all-gather {algorithm} of {counts:?}");
                let expected = vec![inputs.concat(); world as usize];
                let (works, traffic) = check(&all, &inputs, &expected, &what);
                if algorithm == Algorithm::Ring {
                    assert_eq!(works, vec![Works::Into; world as usize], "{what}");
                }
                if shape == 0 {
                    let equal = schedules(&layout, |schedule, group| {
                        schedule.all_gather(group, algorithm, Equal(3));
                    });
                    assert_eq!(all, equal, "{what}");
                    if layout.hosts() == 1 {
                        let each = 3 * (world as usize - 1);
                        assert_eq!(traffic.sent, vec![each; world as usize], "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn gather_and_scatter_are_right_for_every_world_size_root_and_uneven_shares() {
    for world in WORLDS {
        for root in roots(world) {
            for &algorithm in Algorithm::able(OperationKind::Gather) {
                for (shape, counts) in shares(world).into_iter().enumerate() {
                    let offsets = offsets(&counts);
                    let shares = named(&counts);
                    let of_root = at_root(world, root, &shares.concat());
                    let what = format!("{algorithm} of {counts:?}, root {root}");
                    let all = of_world(world, |schedule, group| {
                        schedule.gather(group, algorithm, root, Offsets(&offsets));
                    });
                    let (gathers, _) = check(&all, &shares, &of_root, &format!("gather {what}"));
                    let all = of_world(world, |schedule, group| {
                        schedule.scatter(group, algorithm, root, Offsets(&offsets));
                    });
                    for (rank, schedule) in (0..).zip(&all) {
                        assert_eq!(schedule.input.is_some(), rank == root);
                    }
                    let (scatters, _) = check(&all, &of_root, &shares, &format!("scatter {what}"));
                    // Where every rank has something, and not all of it.
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
fn broadcast_is_right_for_every_world_size_and_root() {
    for (world, layout) in WORLDS.flat_map(layouts) {
        for root in roots(world) {
            for &algorithm in Algorithm::able(OperationKind::Broadcast) {
                for count in [0, 1, 5, 2 * world as usize + 1] {
                    let all = schedules(&layout, |schedule, group| {
                        schedule.broadcast(group, algorithm, root, count);
                    });
                    for (rank, schedule) in (0..).zip(&all) {
                        assert_eq!(schedule.input.is_some(), rank == root);
                    }
                    let data: Vec<i64> = (1..=count as i64).collect();
                    let inputs = at_root(world, root, &data);
                    let what = format!("broadcast {algorithm} of {count}, root {root}");
                    let expected = vec![data; world as usize];
                    let (works, traffic) = check(&all, &inputs, &expected, &what);
                    assert_eq!(works, vec![Works::Into; world as usize], "{what}");
                    if algorithm != Algorithm::ScatterGather {
                        let sent: usize = traffic.sent.iter().sum();
                        assert_eq!(sent, count * (world as usize - 1), "{what}");
                    }
                    if algorithm == Algorithm::Binomial {
                        assert!(all.iter().all(|one| one.len() <= log2_up(world)));
                    }
                }
            }
        }
    }
}

#[test]
fn all_to_all_is_right_for_every_world_size_and_uneven_parts() {
    let uneven = |from: u32, to: u32| (from as usize * 3 + to as usize * 5) % 4;
    for world in WORLDS {
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
                let (works, traffic) = check(&all, &inputs, &expected, &what);
                let sent = (world as usize - 1) * len;
                assert_eq!(traffic.sent, vec![sent; world as usize]);
                if len > 0 {
                    assert_eq!(works, vec![Works::Apart; world as usize], "{what}");
                }
            }
            // Every rank has something else for every rank.
            let all = of_world(world, |schedule, group| {
                let me = group.rank;
                let send: Vec<usize> = (0..world).map(|other| uneven(me, other)).collect();
                let receive: Vec<usize> = (0..world).map(|other| uneven(other, me)).collect();
                let (send, receive) = (offsets(&send), offsets(&receive));
                schedule.all_to_all(group, algorithm, Offsets(&send), Offsets(&receive));
            });
            let inputs = each(&|me, other| block(me, other, uneven(me, other)));
            let expected = each(&|me, other| block(other, me, uneven(other, me)));
            check(&all, &inputs, &expected, &format!("uneven {algorithm}"));
        }
    }
}

#[test]
fn one_rank_sends_to_another() {
    for count in [0, 5] {
        let (mut one, mut other) = (Schedule::default(), Schedule::default());
        one.receive(1, count);
        other.send(0, count);
        let data: Vec<i64> = (1..=count as i64).collect();
        let (inputs, expected) = ([vec![], data.clone()], [data, vec![]]);
        let (works, _) = check(&[one, other], &inputs, &expected, "send");
        assert_eq!(works, [Works::Into, Works::Apart], "{count}");
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
