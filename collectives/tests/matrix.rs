//! Every operation, type, operator, world size and length against a plain reference.

#![allow(
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::float_cmp,
    clippy::unwrap_used
)]

mod common;

use common::value::{Value, combined, input, number};
use common::{Group, Kind, run};
use half::{bf16, f16};
use kolo_collectives::operation::OperationKind;
use kolo_collectives::schedule::{Algorithm, Choices, Layout, Model, Shape, Tuning};
use kolo_collectives::{CollectiveError, Communicator, Compression, DType, Options, ReduceOp};
use kolo_transport::ids::Rank;

const WORLDS: [u32; 7] = [1, 2, 3, 4, 5, 7, 8];

fn check_type<T: Value>(comm: &Communicator, length: usize) {
    let (me, world) = (comm.rank().0, comm.world_size());
    for op in ReduceOp::ALL {
        if op == ReduceOp::Adasum || !op.allows(T::DTYPE) {
            continue;
        }
        let mut data = input::<T>(me, length);
        comm.all_reduce(&mut data, op).unwrap();
        assert_eq!(
            data,
            combined::<T>(op, 0..world, length),
            "all_reduce({op}) of {length} {}, world {world}",
            T::DTYPE
        );
    }

    let root = (length as u32 + 1) % world;
    let mut data = input::<T>(me, length);
    comm.broadcast(&mut data, Rank(root)).unwrap();
    assert_eq!(data, input::<T>(root, length));

    let all: Vec<T> = (0..world).flat_map(|rank| input(rank, length)).collect();
    assert_eq!(comm.all_gather(&input::<T>(me, length)).unwrap(), all);

    // Other lengths on every rank; some have none.
    let share = |rank: u32| (length + rank as usize * 3) % (length + 2);
    let gathered = comm
        .all_gather_varcount(&input::<T>(me, share(me)))
        .unwrap();
    for rank in 0..world {
        assert_eq!(gathered.counts[rank as usize], share(rank));
        assert_eq!(gathered.of(Rank(rank)), input::<T>(rank, share(rank)));
    }
    comm.barrier().unwrap();
}

fn check_all_types(comm: &Communicator, lengths: &[usize]) {
    for &length in lengths {
        check_type::<i32>(comm, length);
        check_type::<i64>(comm, length);
        check_type::<f32>(comm, length);
        check_type::<f64>(comm, length);
    }
    for &length in lengths.iter().filter(|length| **length < 20) {
        check_type::<bool>(comm, length);
        check_type::<i8>(comm, length);
        check_type::<u8>(comm, length);
        check_type::<i16>(comm, length);
        check_type::<u16>(comm, length);
        check_type::<u32>(comm, length);
        check_type::<u64>(comm, length);
        check_type::<f16>(comm, length);
        check_type::<bf16>(comm, length);
    }
}

/// Lengths at which the algorithm changes, with this tuning.
fn around_switches(tuning: &Tuning, world: u32) -> Vec<usize> {
    let mut choices = Choices::new(*tuning, Shape::even(world, 1));
    let mut lengths = Vec::new();
    for (kind, of_all) in [
        (OperationKind::AllReduce, 1),
        (OperationKind::Broadcast, 1),
        (OperationKind::AllGather, world as usize),
    ] {
        for range in choices.ranges(kind, None) {
            if range.to < 1 << 24 {
                for size in [4, 8] {
                    let switch = range.to as usize / of_all / size;
                    lengths.extend([switch.saturating_sub(1), switch, switch + 1]);
                }
            }
        }
    }
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

fn matrix(kind: Kind) {
    // Low limits, so that all algorithms are met at short lengths.
    let tuning = Tuning {
        model: Model::default().slowed(40.0),
        ..Tuning::default()
    };
    for world in WORLDS {
        let group = Group::new(kind, world);
        let mut lengths = vec![0, 1, 2, 3, 17, 1021];
        lengths.extend(around_switches(&tuning, world));
        group.run(|comm| {
            comm.set_tuning(tuning);
            check_all_types(comm, &lengths);
        });
    }
}

#[test]
fn everything_is_right_over_memory() {
    matrix(Kind::Memory);
}

#[test]
fn everything_is_right_over_unix_sockets() {
    matrix(Kind::Unix);
}

#[test]
fn everything_is_right_over_rings() {
    matrix(Kind::Ring);
}

#[test]
fn everything_is_right_in_shared_memory() {
    matrix(Kind::Shared);
}

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
fn every_algorithm_is_right_at_every_length_and_on_lanes_that_hold_little() {
    for world in WORLDS {
        let group = Group::new(Kind::Narrow(100), world);
        for force in Algorithm::ALL {
            group.run(|comm| {
                comm.set_tuning(Tuning {
                    force: Some(force),
                    ..Tuning::default()
                });
                for length in [0, 1, 2, 3, 17, 251] {
                    check_type::<f32>(comm, length);
                }
            });
        }
    }
}

/// More than lanes hold, more than a segment, both directions at once, and not a whole number of segments.
#[test]
fn long_messages_cross_without_deadlock() {
    for (kind, world) in [
        (Kind::Unix, 2),
        (Kind::Memory, 3),
        (Kind::Unix, 4),
        (Kind::Memory, 5),
        (Kind::Ring, 2),
        (Kind::Ring, 4),
    ] {
        let group = Group::new(kind, world);
        let tuning = Tuning::default();
        let mut lengths = vec![(1 << 20) + 3];
        lengths.extend(
            around_switches(&tuning, world)
                .into_iter()
                .filter(|len| *len > 1021),
        );
        group.run(|comm| {
            for &length in &lengths {
                let mut data = input::<f64>(comm.rank().0, length);
                comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                for (index, value) in data.iter().enumerate() {
                    let sum: i64 = (0..world).map(|rank| number(rank, index)).sum();
                    assert!(
                        (*value - sum as f64).abs() < 1e-9,
                        "element {index} of {length}"
                    );
                }
                comm.broadcast(&mut data, Rank(world - 1)).unwrap();
                let all = comm.all_gather(&data[..length / 4]).unwrap();
                assert_eq!(all.len(), length / 4 * world as usize);
                assert!(
                    all.chunks_exact(length / 4)
                        .all(|share| share == &data[..length / 4])
                );
            }
        });
    }
}

#[test]
fn float_sums_have_the_same_bits_on_every_rank_and_in_every_run() {
    let length = 5000;
    for world in WORLDS {
        for &force in Algorithm::able(OperationKind::AllReduce) {
            let sums = || {
                let group = Group::new(Kind::Unix, world);
                group.run(|comm| {
                    comm.set_tuning(Tuning {
                        force: Some(force),
                        ..Tuning::default()
                    });
                    let mut data: Vec<f32> = (0..length)
                        .map(|index: u32| {
                            let mixed = (comm.rank().0 * 7919 + index)
                                .wrapping_mul(2_654_435_761)
                                .rotate_left(13);
                            // NaNs with payloads of their own, and terms of very different size.
                            if mixed.is_multiple_of(101) {
                                f32::from_bits(0x7fc0_0000 | comm.rank().0)
                            } else {
                                (mixed as f32 - 2e9) * 10_f32.powi((mixed % 17) as i32 - 8)
                            }
                        })
                        .collect();
                    comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    data.iter()
                        .map(|value| value.to_bits())
                        .collect::<Vec<u32>>()
                })
            };
            let (one, two) = (sums(), sums());
            assert!(
                one.windows(2).all(|pair| pair[0] == pair[1]),
                "{force} {world}"
            );
            assert_eq!(one, two, "{force} {world}");
        }
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

#[test]
fn averages_of_integers_truncate_toward_zero() {
    let group = Group::new(Kind::Memory, 4);
    let results = group.run(|comm| {
        let mut data = [i64::from(comm.rank().0) - 3, 7, -7, 0];
        comm.all_reduce(&mut data, ReduceOp::Average).unwrap();
        data
    });
    assert_eq!(results, vec![[-1, 7, -7, 0]; 4]);
}

/// Two hosts of different size, as far as algorithms know.
#[test]
fn two_levels_are_right_on_uneven_hosts() {
    for slots in [&[1, 1][..], &[2, 3], &[1, 4, 2], &[4, 4]] {
        let layout = Layout::of_slots(slots);
        let group = Group::new(Kind::Narrow(300), layout.world());
        group.run(|comm| comm.set_layout(layout.clone()).unwrap());
        for force in Algorithm::ALL {
            group.run(|comm| {
                comm.set_tuning(Tuning {
                    force: Some(force),
                    ..Tuning::default()
                });
                for length in [0, 1, 7, 100] {
                    check_type::<f32>(comm, length);
                }
            });
        }
        let other = Layout::single(layout.world() + 1);
        let error = group.members[0].set_layout(other).unwrap_err();
        assert!(
            matches!(error, CollectiveError::Invalid { .. }),
            "{error:?}"
        );
    }
}

#[test]
fn adasum_averages_what_is_alike_and_adds_what_is_orthogonal() {
    for world in [1, 2, 4, 8] {
        let group = Group::new(Kind::Unix, world);
        for force in [Algorithm::Doubling, Algorithm::Halving] {
            let results = group.run(|comm| {
                comm.set_tuning(Tuning {
                    force: Some(force),
                    ..Tuning::default()
                });
                let me = comm.rank().index();
                let mut alike = vec![1.5_f32; 33];
                comm.all_reduce(&mut alike, ReduceOp::Adasum).unwrap();
                let mut orthogonal = vec![0.0_f64; 11];
                orthogonal[me] = 3.0;
                comm.all_reduce(&mut orthogonal, ReduceOp::Adasum).unwrap();
                let mut short = vec![f16::ONE; 5];
                comm.all_reduce(&mut short, ReduceOp::Adasum).unwrap();
                (alike, orthogonal, short)
            });
            for (alike, orthogonal, short) in results {
                assert_eq!(alike, vec![1.5; 33]);
                for (index, value) in orthogonal.iter().enumerate() {
                    let expected = if index < world as usize { 3.0 } else { 0.0 };
                    assert!((value - expected).abs() < 1e-12, "{orthogonal:?}");
                }
                assert_eq!(short, vec![f16::ONE; 5]);
            }
        }
    }
}

/// What an operator can't do is an error on every rank, and the communicator stays usable.
#[test]
fn what_is_not_defined_is_refused_on_every_rank() {
    for (kind, world) in [
        (Kind::Memory, 3_u32),
        (Kind::Unix, 5),
        (Kind::Shared, 3),
        (Kind::Shared, 6),
        (Kind::Memory, 2),
        (Kind::Shared, 4),
    ] {
        let group = Group::new(kind, world);
        group.run(|comm| {
            let mut data = [1.0_f32];
            let error = comm.all_reduce(&mut data, ReduceOp::BitAnd).unwrap_err();
            assert!(
                error.to_string().contains("f32 allows average, sum"),
                "{error}"
            );
            if !world.is_power_of_two() {
                let error = comm.all_reduce(&mut data, ReduceOp::Adasum).unwrap_err();
                let next = world.next_power_of_two();
                let says = format!("power of two of ranks (such as {next})");
                assert!(error.to_string().contains(&says), "{error}");
                let named = comm.named("a").all_reduce(vec![1.0_f64], ReduceOp::Adasum);
                let error = named.wait().unwrap_err();
                assert!(error.to_string().contains(&says), "{error}");
            }
            let error = comm
                .reduce(&mut data, ReduceOp::Adasum, Rank(0))
                .unwrap_err();
            assert!(error.to_string().contains("for all_reduce only"), "{error}");
            // It would be combined as it travels.
            let short = comm.with(Options::new().compression(Compression::Bf16));
            let error = short.all_reduce(&mut data, ReduceOp::Adasum).unwrap_err();
            let says = if world.is_power_of_two() {
                "sent as bf16: adasum of bf16 is not defined"
            } else {
                "power of two"
            };
            assert!(error.to_string().contains(says), "{error}");
            let error = comm.all_reduce(&mut [true], ReduceOp::Sum).unwrap_err();
            assert!(error.to_string().contains("sum of bool"), "{error}");
            let scaled = comm.with(Options::new().prescale(2.0));
            let error = scaled.all_reduce(&mut [true], ReduceOp::Max).unwrap_err();
            assert!(error.to_string().contains("leave it at 1"), "{error}");
            assert_eq!(data, [1.0]);
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [world as f32]);
        });
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

#[test]
fn a_large_world_works() {
    let group = Group::new(Kind::Memory, 64);
    group.run(|comm| {
        for length in [0, 1, 100, 20_000] {
            check_type::<i64>(comm, length);
        }
    });
}

/// A communicator may be used from several threads of a rank: operations take turns.
#[test]
fn clones_take_turns() {
    let group = Group::new(Kind::Memory, 3);
    // All threads of a rank do the same, so that any order of turns is the same on every rank.
    group.run(|comm| {
        let clones = vec![comm.clone(); 4];
        run(&clones, |clone| {
            for _ in 0..50 {
                let mut data = [1_i32; 40];
                clone.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert_eq!(data, [3; 40]);
            }
        });
    });
}

#[test]
fn two_groups_work_at_once() {
    let (one, two) = (Group::new(Kind::Unix, 4), Group::new(Kind::Unix, 4));
    let pairs: Vec<(&Communicator, &Communicator)> = one.members.iter().zip(&two.members).collect();
    std::thread::scope(|scope| {
        for (one, two) in pairs {
            for comm in [one, two] {
                scope.spawn(move || check_all_types(comm, &[0, 17, 1021]));
            }
        }
    });
}
