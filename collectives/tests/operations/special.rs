//! What has nothing to do with types and operators.

use super::*;

/// One rank of a host has a processor, as far as it knows: it looks before it sleeps, and a peer need not ring while it looks. The
/// turns of ranks that look, look for the last time and sleep are met in a long run of operations that are over soon.
#[test]
fn small_operations_over_rings_are_right_however_ranks_wait() {
    for world in 3..=5 {
        let group = Group::new(Kind::Ring, world);
        group.run(|comm| {
            comm.set_layout(Layout::of_slots(&vec![1; world as usize]))
                .unwrap();
            let me = comm.rank().0;
            for round in 0..400 {
                let length = 1 + round % 37;
                let value = |rank: u32, at: usize| (round * 7 + at * 3) as i64 + i64::from(rank);
                let of =
                    |rank: u32| -> Vec<i64> { (0..length).map(|at| value(rank, at)).collect() };

                let mut data = of(me);
                comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                let sums: Vec<i64> = (0..length)
                    .map(|at| (0..world).map(|rank| value(rank, at)).sum())
                    .collect();
                assert_eq!(data, sums, "all_reduce {round} of {world}");

                let all: Vec<i64> = (0..world).flat_map(of).collect();
                let gathered = comm.all_gather(&of(me)).unwrap();
                assert_eq!(gathered, all, "all_gather {round} of {world}");

                let root = round as u32 % world;
                let mut data = of(me);
                comm.broadcast(&mut data, Rank(root)).unwrap();
                assert_eq!(data, of(root), "broadcast {round} of {world}");
            }
        });
    }
}

#[test]
fn a_nan_on_one_rank_reaches_all() {
    let group = Group::new(Kind::Memory, 3);
    for op in ReduceOp::ALL {
        if op == ReduceOp::Adasum || !op.allows(DType::F64) {
            continue;
        }
        let results = group.run(|comm| {
            let mut data = [
                1.0,
                if comm.rank() == Rank(1) {
                    f64::NAN
                } else {
                    2.0
                },
            ];
            comm.all_reduce(&mut data, op).unwrap();
            data
        });
        for result in results {
            assert!(
                !result[0].is_nan() && result[1].is_nan(),
                "{op}: {result:?}"
            );
        }
    }
}

/// Links are made at first use and only where they are used.
#[test]
fn links_are_made_lazily_and_once() {
    let group = Group::new(Kind::Unix, 8);
    assert_eq!(group.links(), 0);
    for _ in 0..3 {
        group.run(|comm| comm.barrier().unwrap());
        // Distances 1, 2 and 4 around a circle of eight.
        assert_eq!(group.links(), 8 + 8 + 4);
    }
}

/// A communicator may be used from several threads of a rank: operations take turns.
#[test]
fn clones_take_turns() {
    let group = Group::new(Kind::Memory, 3);
    // All threads of a rank do the same, so that any order of turns is the same on every rank.
    group.run(|comm| {
        let clones = vec![comm.clone(); 4];
        run_each(&clones, |clone| {
            for _ in 0..50 {
                let mut data = [1_i32; 40];
                clone.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert_eq!(data, [3; 40]);
            }
        });
    });
}

#[test]
fn barriers_objects_and_ranks_that_join_are_right_between_hosts() {
    for (kind, world) in [Kind::Tls, Kind::Quic]
        .into_iter()
        .flat_map(|kind| [2, 3, 5].map(|world| (kind, world)))
    {
        let group = Group::new(kind, world);
        let met = std::sync::atomic::AtomicU32::new(0);
        group.run(|comm| {
            use std::sync::atomic::Ordering::SeqCst;
            let me = comm.rank().0;
            for round in 1..=3 {
                met.fetch_add(1, SeqCst);
                comm.barrier().unwrap();
                assert_eq!(met.load(SeqCst), round * world, "nobody is missing");
                comm.named("met").barrier().wait().unwrap();
            }

            let last = world - 1;
            let text = "x".repeat(50_000);
            let mine = (me == last).then(|| (last, text.clone()));
            let got: (u32, String) = comm.broadcast_object(mine, Rank(last)).unwrap();
            assert_eq!(got, (last, text));
            let all = comm.all_gather_object(&vec![me; me as usize]).unwrap();
            let expected: Vec<Vec<u32>> =
                (0..world).map(|rank| vec![rank; rank as usize]).collect();
            assert_eq!(all, expected);

            // Each rank has one operation more than the one before it.
            for round in 0..=me {
                let mut data = [i64::from(me) + 1];
                comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                let with_data = (round..world).map(|rank| i64::from(rank) + 1);
                assert_eq!(data, [with_data.sum::<i64>()], "round {round}");
            }
            assert_eq!(comm.join(), Ok(Rank(last)));
            // It is usable after that.
            let mut data = [1_u8];
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [world as u8]);
        });
    }
}

/// Long copies in shared memory go piece by piece: more of them than there are places, and the last one short.
#[test]
fn long_copies_in_shared_memory_arrive_whole() {
    for world in [2, 3] {
        let group = Group::new(Kind::Shared, world);
        group.run(|comm| {
            let me = comm.rank().0;
            // For what a root scatters, and what a rank gathers.
            for length in [(600 << 10) / world as usize + 1, (600 << 10) + 77] {
                let all: Vec<u8> = (0..world).flat_map(|rank| input(rank, length)).collect();
                let mine = input::<u8>(me, length);
                assert!(comm.all_gather(&mine).unwrap() == all);
                let waits = std::pin::pin!(comm.all_gather_async(&mine));
                assert!(wait(waits).unwrap() == all, "a task waits as well");
                for root in 0..world {
                    let mut data = mine.clone();
                    comm.broadcast(&mut data, Rank(root)).unwrap();
                    assert!(data == input::<u8>(root, length));
                }
            }
            let each = (8 << 20) / world as usize + 5;
            let to = |from: u32| input::<u8>(from, each * world as usize);
            let expected: Vec<u8> = (0..world)
                .flat_map(|from| to(from)[each * me as usize..][..each].to_vec())
                .collect();
            assert!(comm.all_to_all(&to(me)).unwrap() == expected);
            // A rank that asks for something else is told so, and what comes next is right.
            let mut data = vec![me as u8; 600_000];
            let result = if me == 0 {
                comm.barrier()
            } else {
                comm.broadcast(&mut data, Rank(0))
            };
            assert!(
                matches!(result, Err(CollectiveError::Mismatch { .. })),
                "{result:?}"
            );
            comm.broadcast(&mut data, Rank(1)).unwrap();
            assert!(data.iter().all(|value| *value == 1));
        });
    }
}

fn wait<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(future)
}

/// A number that all ranks draw alike.
struct Draw(u64);

impl Draw {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Every rank is in several groups, each worked on by a thread of its own, in a random order of operations that is the same
/// on all members.
#[test]
fn random_schedules_of_several_groups_at_once() {
    let world = 5;
    for (kind, seed) in [
        (Kind::Memory, 1),
        (Kind::Unix, 2),
        (Kind::Narrow(50), 3),
        (Kind::Shared, 4),
        (Kind::Ring, 5),
        (Kind::Tls, 6),
        (Kind::Quic, 7),
    ] {
        let group = Group::new(kind, world);
        let mut draw = Draw(seed);
        let sets: Vec<Vec<Rank>> = (0..6)
            .map(|_| {
                let mut set: Vec<u32> = (0..world).filter(|_| draw.below(3) > 0).collect();
                if set.is_empty() {
                    set = vec![0, world - 1];
                }
                let shift = draw.below(set.len() as u64) as usize;
                set.rotate_left(shift);
                set.into_iter().map(Rank).collect()
            })
            .collect();
        group.run(|comm| {
            let groups: Vec<Option<Communicator>> =
                sets.iter().map(|set| comm.group(set).unwrap()).collect();
            std::thread::scope(|scope| {
                for (index, group) in groups.iter().enumerate() {
                    let Some(group) = group else { continue };
                    scope.spawn(move || work(group, kind, seed * 100 + index as u64));
                }
                scope.spawn(|| work(comm, kind, seed * 100 + 77));
            });
        });
    }
}

fn work(comm: &Communicator, kind: Kind, seed: u64) {
    let mut draw = Draw(seed);
    let all = Sample::each(kind, comm.world_size(), &DType::ALL);
    for _ in 0..40 {
        let sample = Sample {
            length: (draw.below(50) * draw.below(50)) as usize,
            ..all[draw.below(all.len() as u64) as usize]
        };
        run_on(comm, &[sample]);
    }
}
