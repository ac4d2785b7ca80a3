//! Process sets, which are groups here, and barriers.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::*;

fn ranks(numbers: impl IntoIterator<Item = u32>) -> Vec<Rank> {
    numbers.into_iter().map(Rank).collect()
}

/// Its members and who this rank is there, and that it works.
fn check_set(comm: &Communicator, set: &Communicator, expected: impl IntoIterator<Item = u32>) {
    let expected: Vec<u32> = expected.into_iter().collect();
    assert_eq!(members(set), expected);
    assert_eq!(set.world_size() as usize, expected.len());
    assert_eq!(set.rank_of(comm.rank()), Some(set.rank()));
    assert_eq!(set.all_gather(&[comm.rank().0]).unwrap(), expected);
    let mut sum = [comm.rank().0];
    set.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    assert_eq!(sum, [expected.iter().sum::<u32>()]);
}

#[test]
fn test_horovod_allreduce_process_sets() {
    on_halves(|set| {
        each(of_numbers!(reduces_sum), |check, length| check(set, length));
    });
}

fn reduces_sum<T: Value>(set: &Communicator, length: usize) {
    reduce::reduces::<T>(set, ReduceOp::Sum, length);
}

#[test]
fn test_horovod_grouped_allreduce_process_sets() {
    use reduce::reduces_group;
    on_halves(|set| {
        each(of_numbers!(reduces_group), |check, length| {
            check(set, ReduceOp::Sum, length);
        });
    });
}

#[test]
fn test_horovod_allgather_process_sets() {
    use moves::gathers;
    on_halves(|set| each(of_all!(gathers), |check, length| check(set, length)));
}

#[test]
fn test_horovod_grouped_allgather_process_sets() {
    use moves::gathers_group;
    on_halves(|set| {
        each(of_all!(gathers_group), |check, length| check(set, length));
    });
}

/// Roots are ranks of the set here, as all ranks in arguments; Horovod takes those of the job.
#[test]
fn test_horovod_broadcast_process_sets() {
    use moves::broadcasts;
    on_halves(|set| {
        each(of_all!(broadcasts), |check, length| check(set, length));
        let error = set.broadcast(&mut [1_u8], Rank(2)).unwrap_err();
        assert!(error.to_string().contains("ranks 0 to 1"), "{error}");
    });
}

#[test]
fn test_horovod_alltoall_process_sets() {
    use moves::exchanges;
    on_halves(|set| each(of_all!(exchanges), |check, length| check(set, length)));
}

#[test]
fn test_horovod_reducescatter_process_sets() {
    use scatter::scatters;
    on_halves(|set| {
        each(of_numbers!(scatters), |check, length| {
            check(set, ReduceOp::Sum, length);
        });
    });
}

#[test]
fn test_horovod_grouped_reducescatter_process_sets() {
    use scatter::scatters_group;
    on_halves(|set| {
        each(of_numbers!(scatters_group), |check, length| {
            check(set, ReduceOp::Sum, length);
        });
    });
}

#[test]
fn test_broadcast_object_process_sets() {
    on_halves(|set| {
        let object = |rank: u32| vec![("hello".to_owned(), vec![rank]), ("0".to_owned(), vec![])];
        for (root, of_job) in (0..).zip(members(set)) {
            let mine = (set.rank() == Rank(root)).then(|| object(of_job));
            let theirs = set.broadcast_object(mine, Rank(root)).unwrap();
            assert_eq!(theirs, object(of_job));
        }
    });
}

#[test]
fn test_allgather_object_process_sets() {
    on_halves(|set| {
        let mine = members(set)[set.rank().index()];
        let all = set.all_gather_object(&(mine, mine.to_string())).unwrap();
        let expected = members(set)
            .into_iter()
            .map(|rank| (rank, rank.to_string()));
        assert_eq!(all, expected.collect::<Vec<_>>());
    });
}

/// Sets that are made before all else. A rank need not make those in which it is not.
#[test]
fn test_static() {
    on_all(|comm| {
        let alone = comm.group(&[Rank(0)]).unwrap();
        // The order counts here, where Horovod sorts: it is that of the ranks in the set.
        let up = comm.group(&ranks(1..SIZE)).unwrap();
        let down = comm.group(&ranks((1..SIZE).rev())).unwrap();
        // What there is already makes another set, which Horovod refuses: it has an order of operations of its own.
        let again = comm.group(&ranks(0..SIZE)).unwrap().unwrap();
        assert_eq!(
            (alone.is_some(), up.is_some()),
            (comm.rank().0 == 0, comm.rank().0 != 0)
        );
        assert_eq!(comm.group_id(), GroupId::WORLD);
        check_set(comm, comm, 0..SIZE);
        check_set(comm, &again, 0..SIZE);
        for set in alone.iter().chain(&up).chain(&down).chain([&again]) {
            assert_ne!(set.group_id(), GroupId::WORLD);
        }
        if let Some(alone) = alone {
            check_set(comm, &alone, [0]);
            return;
        }
        let (up, down) = (up.unwrap(), down.unwrap());
        check_set(comm, &up, 1..SIZE);
        check_set(comm, &down, (1..SIZE).rev());
        assert_ne!(up.group_id(), down.group_id());
    });
}

/// Where Horovod takes communicators of MPI, a split makes sets of ranks by color; here, too, copies are sets of their own.
#[test]
fn test_multi_comm() {
    on_all(|comm| {
        let me = comm.rank().0;
        let split = || comm.split(Some(me % 2), i64::from(me)).unwrap().unwrap();
        let (sub, copy) = (split(), split());
        let effective = half(comm);
        let first = comm.group(&[Rank(0)]).unwrap();
        let ids = [sub.group_id(), copy.group_id(), effective.group_id()];
        for (index, id) in ids.iter().enumerate() {
            assert!(!ids[..index].contains(id), "{ids:?}");
        }
        // The same on all members.
        let theirs = comm.all_gather(&ids.map(|id| id.0)).unwrap();
        for member in members(&sub) {
            assert_eq!(theirs[3 * member as usize..][..3], ids.map(|id| id.0));
        }
        let handles =
            [&sub, &copy, &effective].map(|set| set.start().all_reduce(vec![me], ReduceOp::Sum));
        for handle in handles {
            assert_eq!(handle.wait().unwrap(), [2 + 2 * (me % 2)]);
        }
        for set in [&sub, &copy, &effective] {
            check_set(comm, set, [me % 2, me % 2 + 2]);
        }
        assert_eq!(first.is_some(), me == 0);
        if let Some(first) = first {
            check_set(comm, &first, [0]);
        }
    });
}

/// A set goes with its communicator.
#[test]
fn test_horovod_add_get_remove_process_set() {
    on_all(|comm| {
        let mut before = Vec::new();
        for _ in 0..3 {
            let one = comm.group(&[Rank(0)]).unwrap();
            let two = comm.group(&ranks(1..SIZE)).unwrap();
            assert_eq!(
                (one.is_some(), two.is_some()),
                (comm.rank().0 == 0, comm.rank().0 != 0)
            );
            let (set, expected) = match (&one, &two) {
                (Some(one), _) => (one, ranks([0])),
                (_, two) => (two.as_ref().unwrap(), ranks(1..SIZE)),
            };
            check_set(comm, set, expected.iter().map(|rank| rank.0));
            // All members have one number for it, which does not come again.
            let id = set.group_id();
            assert_eq!(set.all_gather(&[id.0]).unwrap(), vec![id.0; expected.len()]);
            assert!(id != GroupId::WORLD && !before.contains(&id));
            assert!(id.to_string().starts_with("group "), "{id}");
            before.push(id);
        }
        // Others overlap with what there is, or are the same in another order.
        let ends = comm.group(&[Rank(0), Rank(SIZE - 1)]).unwrap();
        assert_eq!(ends.is_some(), [0, SIZE - 1].contains(&comm.rank().0));
        if let Some(ends) = ends {
            check_set(comm, &ends, [0, SIZE - 1]);
        }
        let all = comm.group(&ranks((0..SIZE).rev())).unwrap().unwrap();
        check_set(comm, &all, (0..SIZE).rev());
        for wrong in [&[][..], &[0, 0], &[17]] {
            let error = comm.group(&ranks(wrong.iter().copied())).unwrap_err();
            assert!(matches!(error, CollectiveError::Invalid { .. }), "{error}");
        }
        drop(all);
        check_set(comm, comm, 0..SIZE);
    });
}

#[test]
fn test_horovod_barrier() {
    let came = AtomicU32::new(0);
    on_all(|comm| {
        for round in 1..=10 {
            came.fetch_add(1, Ordering::SeqCst);
            comm.barrier().unwrap();
            assert!(came.load(Ordering::SeqCst) >= SIZE * round);
            comm.barrier().unwrap();
        }
    });
}

#[test]
fn test_process_set_barrier_op() {
    let (passed, rank_0_came) = (AtomicU32::new(0), AtomicBool::new(false));
    on_all(|comm| {
        let set = half(comm);
        match comm.rank() {
            Rank(0) => {
                // The odd ranks wait for nobody else.
                until(|| passed.load(Ordering::SeqCst) == 2);
                rank_0_came.store(true, Ordering::SeqCst);
                set.barrier().unwrap();
            }
            Rank(2) => {
                set.barrier().unwrap();
                assert!(rank_0_came.load(Ordering::SeqCst));
            }
            _ => {
                set.barrier().unwrap();
                passed.fetch_add(1, Ordering::SeqCst);
            }
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn test_global_barrier_op() {
    let (waiting, rank_0_came) = (AtomicU32::new(0), AtomicBool::new(false));
    on_all(|comm| {
        if comm.rank() == Rank(0) {
            until(|| waiting.load(Ordering::SeqCst) == SIZE - 1);
            rank_0_came.store(true, Ordering::SeqCst);
            comm.barrier().unwrap();
            return;
        }
        let barrier = comm.start().barrier();
        assert!(!barrier.poll(), "rank 0 is not there");
        waiting.fetch_add(1, Ordering::SeqCst);
        barrier.wait().unwrap();
        assert!(rank_0_came.load(Ordering::SeqCst));
    });
}

/// By name beside the barrier, and in the order of the ranks' calls, where it comes after what was started.
#[test]
fn test_barrier_with_multiple_collectives() {
    on_all(|comm| {
        for is_named in [true, false] {
            let start = |name: &str| {
                if is_named {
                    comm.named(name)
                } else {
                    comm.start()
                }
            };
            let eye: Vec<f32> = (0..25)
                .map(|index| f32::from(u8::from(index % 6 == 0)))
                .collect();
            let broadcast = start("broadcast").broadcast(mine::<f32>(comm, 9), Rank(0));
            let gathers = [eye.clone(), vec![0.0; 25]].map(|data| {
                (
                    start(&format!("gather of {}", data[0])).all_gather(data.clone()),
                    data,
                )
            });
            let reduce = start("reduce").all_reduce(eye.clone(), ReduceOp::Average);
            comm.barrier().unwrap();
            if !is_named {
                assert!(reduce.poll(), "the barrier came after it");
            }
            assert_eq!(reduce.wait().unwrap(), eye);
            for (handle, data) in gathers {
                assert_eq!(handle.wait().unwrap(), data.repeat(4));
            }
            assert_eq!(broadcast.wait().unwrap(), input::<f32>(0, 9));
        }
    });
}
