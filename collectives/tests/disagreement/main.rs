//! Ranks that ask for different things.

#![allow(
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::float_cmp,
    clippy::unwrap_used
)]

#[path = "../common/mod.rs"]
mod common;
mod deadlines;

use std::time::{Duration, Instant};

use common::{Group, Kind, LONG, sum};
use kolo_collectives::schedule::{Algorithm, Tuning};
use kolo_collectives::stall::Missing;
use kolo_collectives::{CollectiveError, Communicator, Compression, Element, Options, ReduceOp};
use kolo_transport::ids::Rank;

type Body = fn(&Communicator) -> Result<(), CollectiveError>;

fn all_to_all<T: Element>(comm: &Communicator, value: T) -> Result<(), CollectiveError> {
    comm.all_to_all(&vec![value; comm.world_size() as usize])
        .map(drop)
}

fn reduction(comm: &Communicator, options: Options) -> Result<(), CollectiveError> {
    comm.with(options)
        .all_reduce(&mut [1_f32; 4], ReduceOp::Sum)
}

/// What most ranks do, what one does, and how both read.
///
/// Horovod: `test_horovod_allreduce_error`, `_type_error` and `_scale_error`, `test_horovod_allgather_error` and `_type_error`,
/// `test_horovod_broadcast_rank_error`, `test_horovod_alltoall_type_error`, `test_horovod_reducescatter_error`.
const CASES: [(Body, Body, &str, &str); 22] = [
    (
        |comm| comm.barrier(),
        |comm| comm.all_reduce(&mut [1_f32], ReduceOp::Sum),
        "barrier",
        "all_reduce(sum) of 1 f32",
    ),
    (
        |comm| comm.all_reduce(&mut [1_f32; 4], ReduceOp::Sum),
        |comm| comm.all_reduce(&mut [1_f32; 5], ReduceOp::Sum),
        "all_reduce(sum) of 4 f32",
        "all_reduce(sum) of 5 f32",
    ),
    (
        |comm| comm.all_reduce(&mut [1_f32; 4], ReduceOp::Sum),
        |comm| comm.all_reduce(&mut [1_f32; 4], ReduceOp::Max),
        "all_reduce(sum) of 4 f32",
        "all_reduce(max) of 4 f32",
    ),
    (
        |comm| comm.all_reduce(&mut [1_i32; 4], ReduceOp::Sum),
        |comm| comm.all_reduce(&mut [1_f32; 4], ReduceOp::Sum),
        "all_reduce(sum) of 4 i32",
        "all_reduce(sum) of 4 f32",
    ),
    // The lengths of one are beyond what goes another way.
    (
        |comm| comm.all_reduce(&mut [1_u8; 4], ReduceOp::Sum),
        |comm| comm.all_reduce(&mut vec![1_u8; 4 << 20], ReduceOp::Sum),
        "all_reduce(sum) of 4 u8",
        "all_reduce(sum) of 4194304 u8",
    ),
    (
        |comm| reduction(comm, Options::new()),
        |comm| reduction(comm, Options::new().prescale(0.5)),
        "all_reduce(sum) of 4 f32",
        "all_reduce(sum) of 4 f32, prescale 0.5",
    ),
    (
        |comm| reduction(comm, Options::new()),
        |comm| reduction(comm, Options::new().postscale(2.0)),
        "all_reduce(sum) of 4 f32",
        "all_reduce(sum) of 4 f32, postscale 2",
    ),
    (
        |comm| reduction(comm, Options::new().compression(Compression::F16)),
        |comm| reduction(comm, Options::new().compression(Compression::Bf16)),
        "sent as f16",
        "sent as bf16",
    ),
    (
        |comm| reduction(comm, Options::new().shape(&[4, 1])),
        |comm| reduction(comm, Options::new().shape(&[2, 2])),
        "shape [4, 1]",
        "shape [2, 2]",
    ),
    (
        |comm| comm.all_reduce_grouped(&mut [&mut [1_u8; 3], &mut [1; 2]], ReduceOp::Sum),
        |comm| comm.all_reduce_grouped(&mut [&mut [1_u8; 2], &mut [1; 3]], ReduceOp::Sum),
        "shape [3, 2]",
        "shape [2, 3]",
    ),
    (
        |comm| comm.all_gather_grouped(&[&[1_u8; 3], &[1; 2]]).map(drop),
        |comm| {
            comm.all_gather_grouped(&[&[1_u8; 3], &[1; 2], &[]])
                .map(drop)
        },
        "all_gather_varcount u8 in 2 buffers",
        "all_gather_varcount u8 in 3 buffers",
    ),
    (
        |comm| {
            let buffers: [(&[u8], usize); 2] = [(&[1; 4], 4), (&[1; 4], 2)];
            comm.reduce_scatter_grouped(&buffers, ReduceOp::Sum)
                .map(drop)
        },
        |comm| {
            let buffers: [(&[u8], usize); 2] = [(&[1; 4], 2), (&[1; 4], 4)];
            comm.reduce_scatter_grouped(&buffers, ReduceOp::Sum)
                .map(drop)
        },
        "shape [4, 4, 4, 2]",
        "shape [4, 2, 4, 4]",
    ),
    (
        |comm| comm.broadcast(&mut [1_f64; 4], Rank(1)),
        |comm| comm.broadcast(&mut [1_f64; 4], Rank(0)),
        "broadcast of 4 f64 from root 1",
        "broadcast of 4 f64 from root 0",
    ),
    (
        |comm| comm.reduce(&mut [1_u16; 4], ReduceOp::Sum, Rank(0)),
        |comm| comm.reduce(&mut [1_u16; 4], ReduceOp::Sum, Rank(1)),
        "reduce(sum) of 4 u16 to root 0",
        "reduce(sum) of 4 u16 to root 1",
    ),
    (
        |comm| comm.reduce(&mut [1_u16; 4], ReduceOp::Min, Rank(0)),
        |comm| comm.reduce(&mut [1_u16; 4], ReduceOp::BitXor, Rank(0)),
        "reduce(min) of 4 u16 to root 0",
        "reduce(bit_xor) of 4 u16 to root 0",
    ),
    (
        |comm| {
            comm.reduce_scatter(&[1_u64; 12], 12, ReduceOp::Sum)
                .map(drop)
        },
        |comm| {
            comm.reduce_scatter(&[1_u64; 12], 6, ReduceOp::Sum)
                .map(drop)
        },
        "reduce_scatter(sum) of 12 u64 in 12 rows",
        "reduce_scatter(sum) of 12 u64 in 6 rows",
    ),
    (
        |comm| comm.all_gather(&[1_i64; 2]).map(drop),
        |comm| comm.all_gather(&[1_i64; 3]).map(drop),
        "all_gather of 2 i64",
        "all_gather of 3 i64",
    ),
    (
        |comm| comm.all_gather_varcount(&[1_i64; 2]).map(drop),
        |comm| comm.all_gather_varcount(&[1_f32; 2]).map(drop),
        "all_gather_varcount i64",
        "all_gather_varcount f32",
    ),
    (
        |comm| comm.gather(&[1_i64; 2], Rank(0)).map(drop),
        |comm| comm.gather(&[1_i64; 2], Rank(1)).map(drop),
        "gather of 2 i64 to root 0",
        "gather of 2 i64 to root 1",
    ),
    (
        |comm| comm.gather_varcount(&[true], Rank(0)).map(drop),
        |comm| comm.gather_varcount(&[1_u8], Rank(0)).map(drop),
        "gather_varcount bool to root 0",
        "gather_varcount u8 to root 0",
    ),
    (
        |comm| all_to_all(comm, 1_u8),
        |comm| all_to_all(comm, 1_i8),
        "all_to_all of 1 u8",
        "all_to_all of 1 i8",
    ),
    (
        |comm| comm.broadcast_object(Some(5), Rank(0)).map(drop),
        |comm| comm.all_gather_object(&5).map(drop),
        "broadcast_object from root 0",
        "all_gather_object",
    ),
];

/// On every rank, whoever it is that asks for something else, long before the deadline, whether there are links already or
/// not; and the communicator stays usable.
fn check(kind: Kind) {
    // What is compared is the same over all links: they have few ranks, and those between hosts take long to make.
    let (worlds, with_cold) = match kind {
        Kind::Memory => (&[2, 3, 4, 7][..], true),
        Kind::Shared => (&[2, 4][..], true),
        _ => (&[2, 3][..], false),
    };
    for &world in worlds {
        let warm = Group::new(kind, world);
        warm.run(|comm| sum(comm, 10).unwrap());
        for odd in [0, world - 1, world / 2] {
            for (most, one, most_ask, one_asks) in &CASES {
                let cold = with_cold.then(|| Group::new(kind, world));
                for group in std::iter::once(&warm).chain(&cold) {
                    let begun = Instant::now();
                    let results = group.run(|comm| {
                        if comm.rank() == Rank(odd) {
                            one(comm)
                        } else {
                            most(comm)
                        }
                    });
                    let place = format!("{kind:?} world {world} odd {odd} {most_ask}");
                    assert!(begun.elapsed() < LONG / 2, "{place}: by the deadline");
                    for result in results {
                        let error = result.expect_err(&place);
                        let text = error.to_string();
                        assert!(
                            matches!(error, CollectiveError::Mismatch { .. })
                                && text.contains(most_ask)
                                && text.contains(one_asks)
                                && text.contains(&format!("rank {odd}")),
                            "{place}: {text}"
                        );
                        assert_eq!(error.culprit_rank(), None);
                    }
                    group.run(|comm| sum(comm, 100).unwrap());
                }
            }
        }
    }
}

#[test]
fn ranks_that_disagree_all_hear_who_asked_for_what() {
    check(Kind::Memory);
}

#[test]
fn ranks_that_disagree_over_unix_sockets_all_hear_who_asked_for_what() {
    check(Kind::Unix);
}

#[test]
fn ranks_that_disagree_in_shared_memory_all_hear_who_asked_for_what() {
    check(Kind::Shared);
}

#[test]
fn ranks_that_disagree_between_hosts_all_hear_who_asked_for_what() {
    check(Kind::Tls);
    check(Kind::Quic);
}

/// An Adasum of several buffers is done one by one; none is no reason to say nothing.
#[test]
fn an_adasum_of_no_buffers_is_an_operation_too() {
    for kind in [Kind::Memory, Kind::Shared] {
        let group = Group::new(kind, 2);
        group.run(|comm| {
            let mut none: [&mut [f32]; 0] = [];
            assert_eq!(comm.all_reduce_grouped(&mut none, ReduceOp::Adasum), Ok(()));
            let (mut one, mut other) = ([1_f32; 3], [2_f32; 5]);
            let mut both: [&mut [f32]; 2] = [&mut one, &mut other];
            let buffers = if comm.rank() == Rank(0) {
                &mut both[..]
            } else {
                &mut none[..]
            };
            let error = comm.all_reduce_grouped(buffers, ReduceOp::Adasum);
            let error = error.unwrap_err();
            assert!(matches!(error, CollectiveError::Mismatch { .. }), "{error}");
            assert_eq!((one, other), ([1_f32; 3], [2_f32; 5]));
            comm.barrier().unwrap();
        });
    }
}

#[test]
fn different_tuning_is_a_mismatch_too() {
    let group = Group::new(Kind::Memory, 2);
    let tuning = Tuning {
        force: Some(Algorithm::Ring),
        ..Tuning::default()
    };
    group.members[1].set_tuning(tuning);
    for result in group.run(|comm| sum(comm, 8)) {
        let text = result.unwrap_err().to_string();
        assert!(
            text.contains("of 8 f64 by the flat algorithm")
                && text.contains("by the ring algorithm"),
            "{text}"
        );
    }
}

/// Operations of several parts (lengths, then values) have one number as all others: whatever ranks asked for, and wherever it
/// failed, their next operations are of the same iteration.
#[test]
fn ranks_are_in_step_after_operations_of_different_parts() {
    const CASES: [(Body, Body); 6] = [
        (
            |comm| comm.all_gather_varcount(&[1_u8]).map(drop),
            |comm| comm.all_gather(&[1_u8]).map(drop),
        ),
        (
            |comm| comm.broadcast_object(Some(5), Rank(0)).map(drop),
            |comm| comm.broadcast(&mut [1_u8], Rank(0)),
        ),
        (
            |comm| {
                let splits = vec![1; comm.world_size() as usize];
                comm.all_to_all_varcount(&vec![1_u8; splits.len()], &splits)
                    .map(drop)
            },
            |comm| all_to_all(comm, 1_u8),
        ),
        // It is wrong by itself.
        (
            |comm| all_to_all(comm, 1_u64),
            |comm| comm.all_to_all_varcount(&[1_u64], &[5, 5]).map(drop),
        ),
        (
            |comm| {
                comm.scatter_varcount(&[1_u8, 2], &[1, 1], Rank(0))
                    .map(drop)
            },
            |comm| comm.gather_varcount(&[1_u8], Rank(0)).map(drop),
        ),
        (
            |comm| {
                let buffers: &mut [&mut [f32]] = &mut [&mut [1.0], &mut [1.0], &mut [1.0]];
                comm.all_reduce_grouped(buffers, ReduceOp::Adasum)
            },
            |comm| comm.all_reduce(&mut [1_f32], ReduceOp::Adasum),
        ),
    ];
    for kind in [Kind::Memory, Kind::Shared] {
        for world in [2, 4] {
            for odd in 0..world {
                for (case, (most, one)) in CASES.iter().enumerate() {
                    let group = Group::new(kind, world);
                    group.run(|comm| {
                        let result = if comm.rank() == Rank(odd) {
                            one(comm)
                        } else {
                            most(comm)
                        };
                        let place = format!("{kind:?} {world} {odd} {case}");
                        result.expect_err(&place);
                        // A rank may hear only now that another one gave up. All of them are through with that.
                        for number in 1..=4_u32 {
                            let mut data = [number];
                            let iteration = comm.all_reduce(&mut data, ReduceOp::Sum);
                            let sum = number * world;
                            assert!(
                                iteration == Ok(()) && data == [sum],
                                "{place}: {data:?} {iteration:?}"
                            );
                        }
                    });
                }
            }
        }
    }
}

/// Roots that differ, or operations in which some rank has nothing to wait for: all ranks get the error, though each could be
/// done without the others.
#[test]
fn ranks_that_disagree_all_hear_who_asked_for_what_even_if_they_only_send() {
    let bodies: [(&str, Body); 6] = [
        ("broadcast", |comm| {
            comm.broadcast(&mut [1_u8; 3], comm.rank())
        }),
        ("broadcast", |comm| {
            let root = u32::from(comm.rank() == Rank(3));
            comm.broadcast(&mut [1_u8; 3], Rank(root))
        }),
        ("reduce", |comm| {
            let root = Rank(comm.rank().0 / 2);
            comm.reduce(&mut [1_u8; 3], ReduceOp::Sum, root)
        }),
        ("gather", |comm| {
            let length = if comm.rank() == Rank(2) { 4 } else { 3 };
            comm.gather(&vec![0_u8; length], Rank(0)).map(drop)
        }),
        ("scatter", |comm| {
            let length = if comm.rank() == Rank(3) { 2 } else { 3 };
            let data = vec![0_i64; length * comm.world_size() as usize];
            comm.scatter(&data, length, Rank(0)).map(drop)
        }),
        ("broadcast", |comm| {
            if comm.rank() == Rank(0) {
                comm.broadcast(&mut [1_u8; 3], Rank(0))
            } else {
                comm.reduce(&mut [1_u8; 3], ReduceOp::Sum, Rank(0))
            }
        }),
    ];
    for world in [2, 4, 5] {
        let group = Group::new(Kind::Unix, world);
        for (name, body) in &bodies {
            let results = group.run(body);
            if world == 2 && results.iter().all(Result::is_ok) {
                // The two ranks agree here.
                continue;
            }
            for result in results {
                let error = result.unwrap_err();
                assert!(matches!(error, CollectiveError::Mismatch { .. }), "{error}");
                assert!(error.to_string().contains(name), "{error}");
            }
            group.run(|comm| comm.barrier().unwrap());
        }
    }
}
