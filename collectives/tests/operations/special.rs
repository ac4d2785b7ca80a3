//! What has nothing to do with types and operators.

use super::*;

/// One rank of a host has a processor, as far as it knows: it looks before it sleeps, and a peer need not ring while it looks. The
/// turns of ranks that look, look for the last time and sleep are met in a long run of operations that are over soon.
#[test]
fn small_operations_over_rings_are_right_however_ranks_wait() {
    for world in [3, 5] {
        let group = Group::new(Kind::Ring, world);
        let alone = Layout::of_slots(&vec![1; world as usize]);
        group.run(|comm| comm.set_layout(alone.clone()).unwrap());
        let all = Sample::each(Kind::Ring, world, &[DType::I64]).into_iter();
        let some = all.filter(|sample| sample.op.is_none_or(|op| op == ReduceOp::Sum));
        let samples: Vec<Sample> = some.flat_map(|one| one.of_lengths(&[1, 5, 37])).collect();
        run(&group, &samples.repeat(10));
    }
}

#[test]
fn a_nan_on_one_rank_reaches_all() {
    let allows = |op: &ReduceOp| *op != ReduceOp::Adasum && op.allows(DType::F64);
    Group::new(Kind::Memory, 3).run(|comm| {
        let second = [2.0, f64::NAN, 2.0][comm.rank().index()];
        for op in ReduceOp::ALL.into_iter().filter(allows) {
            let mut data = [1.0, second];
            comm.all_reduce(&mut data, op).unwrap();
            assert_eq!(data.map(f64::is_nan), [false, true], "{op}: {data:?}");
        }
    });
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
