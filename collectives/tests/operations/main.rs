//! The other operations: every one, type, operator, world size and length against a plain reference. All-reduce, broadcast
//! and all-gather are in `matrix.rs`.

#![allow(clippy::cast_possible_wrap, clippy::float_cmp, clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod floats;
mod forms;
mod lanes;
mod mistakes;
mod pieces;

use common::value::{Value, combined, input, number};
use common::{Group, Kind};
use half::{bf16, f16};
use kolo_collectives::operation::OperationKind;
use kolo_collectives::schedule::{Algorithm, Choices, Model, Shape, Tuning};
use kolo_collectives::{
    CollectiveError, Communicator, Compression, DType, Gathered, Options, ReduceOp,
};
use kolo_transport::ids::Rank;

const WORLDS: [u32; 7] = [1, 2, 3, 4, 5, 7, 8];
const LENGTHS: [usize; 6] = [0, 1, 2, 3, 7, 61];

/// The part of a rank's numbers that goes to another one, for operations on parts.
fn parts<T: Value>(rank: u32, lengths: impl Fn(u32) -> usize, world: u32) -> Vec<T> {
    let total = (0..world).map(lengths).sum();
    input(rank, total)
}

fn check_reductions<T: Value>(comm: &Communicator, length: usize) {
    check_operators::<T>(comm, length, &ReduceOp::ALL);
}

fn check_operators<T: Value>(comm: &Communicator, length: usize, ops: &[ReduceOp]) {
    let (me, world) = (comm.rank().0, comm.world_size());
    for &op in ops {
        if op == ReduceOp::Adasum || !op.allows(T::DTYPE) {
            continue;
        }
        let what = format!("{op} of {length} {} in a world of {world}", T::DTYPE);
        let expected = combined::<T>(op, 0..world, length);

        let root = Rank((length as u32 + 1) % world);
        let mut data = input::<T>(me, length);
        comm.reduce(&mut data, op, root).unwrap();
        if comm.rank() == root {
            assert_eq!(data, expected, "reduce {what}");
        } else {
            assert_eq!(
                data,
                input::<T>(me, length),
                "reduce {what} touches no other rank's"
            );
        }

        // The first dimension is the length, or all is one row, or rows of two.
        for rows in [length, 1, length / 2] {
            if rows == 0 || !length.is_multiple_of(rows) {
                continue;
            }
            let mine = comm.rows_of(rows, comm.rank());
            let width = length / rows;
            let part = comm
                .reduce_scatter(&input::<T>(me, length), rows, op)
                .unwrap();
            assert_eq!(
                part,
                expected[mine.start * width..mine.end * width],
                "reduce_scatter {what}, {rows} rows"
            );
        }

        let (mut one, mut two, mut none) = (input::<T>(me, length), input::<T>(me, 3), vec![]);
        comm.all_reduce_grouped(&mut [&mut one, &mut none, &mut two], op)
            .unwrap();
        assert_eq!(one, expected, "grouped {what}");
        assert_eq!(two, combined::<T>(op, 0..world, 3), "grouped {what}");

        let mut group = vec![(one.len(), 1), (0, 0), (3, 3), (2 * length, length)];
        group.retain(|(length, rows)| *length > 0 || *rows == 0);
        let data: Vec<Vec<T>> = group.iter().map(|(length, _)| input(me, *length)).collect();
        let given: Vec<(&[T], usize)> = data
            .iter()
            .zip(&group)
            .map(|(data, (_, rows))| (&data[..], *rows))
            .collect();
        let parts = comm.reduce_scatter_grouped(&given, op).unwrap();
        let expected_parts: Vec<Vec<T>> = group
            .iter()
            .map(|(length, rows)| {
                let mine = comm.rows_of(*rows, comm.rank());
                let width = length.checked_div(*rows).unwrap_or(0);
                combined::<T>(op, 0..world, *length)[mine.start * width..mine.end * width].to_vec()
            })
            .collect();
        assert_eq!(parts, expected_parts, "reduce_scatter_grouped {what}");

        let mut into = vec![T::default(); length];
        comm.all_reduce_into(&input::<T>(me, length), &mut into, op)
            .unwrap();
        assert_eq!(into, expected, "all_reduce_into {what}");
    }
}

fn check_moves<T: Value>(comm: &Communicator, length: usize) {
    let (me, world) = (comm.rank().0, comm.world_size());
    let what = format!("{length} {} in a world of {world}", T::DTYPE);
    let root = Rank((length as u32 + 2) % world);
    let is_root = comm.rank() == root;
    let of_all: Vec<T> = (0..world).flat_map(|rank| input(rank, length)).collect();

    let gathered = comm.gather(&input::<T>(me, length), root).unwrap();
    assert_eq!(
        gathered,
        is_root.then(|| of_all.clone()),
        "gather of {what}"
    );

    let share = |rank: u32| (length + rank as usize * 3) % (length + 2);
    let gathered = comm
        .gather_varcount(&input::<T>(me, share(me)), root)
        .unwrap();
    let expected = is_root.then(|| Gathered {
        values: (0..world)
            .flat_map(|rank| input(rank, share(rank)))
            .collect(),
        counts: (0..world).map(share).collect(),
    });
    assert_eq!(gathered, expected, "gather_varcount of {what}");

    let buffers = [share(me), 0, length, 1].map(|length| input::<T>(me, length));
    let given = buffers.each_ref().map(Vec::as_slice);
    let gathered = comm.all_gather_grouped(&given).unwrap();
    let lengths = |rank| [share(rank), 0, length, 1];
    for (index, gathered) in gathered.iter().enumerate() {
        let counts: Vec<usize> = (0..world).map(|rank| lengths(rank)[index]).collect();
        let values: Vec<T> = (0..world)
            .flat_map(|rank| input(rank, counts[rank as usize]))
            .collect();
        assert_eq!(
            *gathered,
            Gathered { values, counts },
            "all_gather_grouped of {what}"
        );
    }
    assert_eq!(gathered.len(), 4);
    assert_eq!(comm.all_gather_grouped::<T>(&[]), Ok(vec![]));

    let all = parts::<T>(root.0, |_| length, world);
    let given = if is_root { &all[..] } else { &[] };
    let part = comm.scatter(given, length, root).unwrap();
    assert_eq!(
        part,
        all[length * me as usize..][..length],
        "scatter of {what}"
    );

    let all = parts::<T>(root.0, share, world);
    let counts: Vec<usize> = (0..world).map(share).collect();
    let before: usize = counts[..me as usize].iter().sum();
    let part = if is_root {
        comm.scatter_varcount(&all, &counts, root).unwrap()
    } else {
        comm.scatter_varcount(&[], &[], root).unwrap()
    };
    assert_eq!(
        part,
        all[before..before + share(me)],
        "scatter_varcount of {what}"
    );

    let received = comm.all_to_all(&parts::<T>(me, |_| length, world)).unwrap();
    let expected: Vec<T> = (0..world)
        .flat_map(|rank| {
            parts::<T>(rank, |_| length, world)[length * me as usize..][..length].to_vec()
        })
        .collect();
    assert_eq!(received, expected, "all_to_all of {what}");

    // How much goes from one rank to another, some nothing.
    let split = |from: u32, to: u32| (length + (from * 5 + to * 3) as usize) % (length + 2);
    let splits: Vec<usize> = (0..world).map(|to| split(me, to)).collect();
    let mut data = parts::<T>(me, |to| split(me, to), world);
    // What the splits leave over stays.
    data.push(T::default());
    let received = comm.all_to_all_varcount(&data, &splits).unwrap();
    for from in 0..world {
        let sent = parts::<T>(from, |to| split(from, to), world);
        let start: usize = (0..me).map(|to| split(from, to)).sum();
        assert_eq!(
            received.of(Rank(from)),
            &sent[start..start + split(from, me)],
            "all_to_all_varcount of {what}"
        );
    }

    // Around the circle, one way and the other.
    if world > 1 {
        let (next, before) = (Rank((me + 1) % world), Rank((me + world - 1) % world));
        let sent = comm.start().send(input::<T>(me, length), next);
        assert_eq!(
            comm.receive::<T>(before).unwrap(),
            input::<T>(before.0, length)
        );
        assert_eq!(sent.wait().unwrap(), input::<T>(me, length));
        let sent = comm.start().send(input::<T>(me, length), before);
        let mut into = vec![T::default(); length];
        comm.receive_into(&mut into, next).unwrap();
        assert_eq!(into, input::<T>(next.0, length));
        sent.wait().unwrap();
    }
}

macro_rules! for_all_types {
    ($check:ident($comm:expr, $length:expr)) => {
        $check::<bool>($comm, $length);
        $check::<u8>($comm, $length);
        $check::<i8>($comm, $length);
        $check::<u16>($comm, $length);
        $check::<i16>($comm, $length);
        $check::<u32>($comm, $length);
        $check::<i32>($comm, $length);
        $check::<u64>($comm, $length);
        $check::<i64>($comm, $length);
        $check::<f16>($comm, $length);
        $check::<bf16>($comm, $length);
        $check::<f32>($comm, $length);
        $check::<f64>($comm, $length);
    };
}
use for_all_types;

#[test]
fn reductions_are_right_for_every_type_and_operator() {
    for world in WORLDS {
        let group = Group::new(Kind::Memory, world);
        group.run(|comm| {
            for length in [0, 1, 2, 3, 5, 12, 31] {
                for_all_types!(check_reductions(comm, length));
            }
            check_reductions::<f32>(comm, 997);
        });
    }
}

#[test]
fn moves_are_right_for_every_type() {
    for world in WORLDS {
        let group = Group::new(Kind::Unix, world);
        group.run(|comm| {
            for length in [0, 1, 2, 3, 5, 13] {
                for_all_types!(check_moves(comm, length));
            }
            for length in LENGTHS {
                check_moves::<u16>(comm, length);
            }
        });
    }
}

/// Lengths around those at which some operation is done in another way: by another algorithm with this tuning, or in another
/// place of shared memory.
fn around_switches(tuning: &Tuning, kind: Kind, world: u32) -> Vec<usize> {
    const SIZE: usize = size_of::<f32>();
    let mut bytes = Vec::new();
    if kind == Kind::Shared {
        // From lines to slots, to data of which a part is withheld, from flat to slices, from slots to areas: of all ranks
        // together, and of one.
        for limit in [56, 4 << 10, 96 << 10, 256 << 10] {
            bytes.extend([limit, limit / world as usize]);
        }
    } else {
        let mut choices = Choices::new(*tuning, Shape::even(world, 1));
        for operation in OperationKind::ALL {
            let shares = match operation {
                OperationKind::AllReduce
                | OperationKind::Broadcast
                | OperationKind::Reduce
                | OperationKind::ReduceScatter => 1,
                _ => world as usize,
            };
            for range in choices.ranges(operation, None) {
                if range.to < 1 << 18 {
                    bytes.push(range.to as usize / shares);
                }
            }
        }
    }
    let mut lengths: Vec<usize> = bytes
        .into_iter()
        .flat_map(|bytes| {
            [
                (bytes / SIZE).saturating_sub(1),
                bytes / SIZE,
                bytes / SIZE + 1,
            ]
        })
        .collect();
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

#[test]
fn every_operation_is_right_around_every_switch() {
    // Low limits, so that all algorithms are met at short lengths.
    let tuning = Tuning {
        model: Model::default().slowed(400.0),
        ..Tuning::default()
    };
    for (kind, world) in WORLDS
        .into_iter()
        .flat_map(|world| [(Kind::Unix, world), (Kind::Shared, world)])
    {
        let group = Group::new(kind, world);
        let lengths = around_switches(&tuning, kind, world);
        assert!(
            world == 1 || lengths.len() > 2,
            "{kind:?} {world}: {lengths:?}"
        );
        group.run(|comm| {
            comm.set_tuning(tuning);
            for &length in &lengths {
                check_operators::<f32>(comm, length, &[ReduceOp::Sum, ReduceOp::Min]);
                check_moves::<u32>(comm, length);
                check_moves::<bool>(comm, length);
            }
        });
    }
}

#[test]
fn everything_is_right_in_shared_memory() {
    for world in WORLDS {
        let group = Group::new(Kind::Shared, world);
        group.run(|comm| {
            for length in [0, 1, 3, 13] {
                for_all_types!(check_reductions(comm, length));
                for_all_types!(check_moves(comm, length));
            }
        });
    }
}

#[test]
fn every_algorithm_is_right_on_lanes_that_hold_little() {
    for world in WORLDS {
        let group = Group::new(Kind::Narrow(100), world);
        for force in Algorithm::ALL {
            group.run(|comm| {
                comm.set_tuning(Tuning {
                    force: Some(force),
                    segment: Some(5),
                    ..Tuning::default()
                });
                for length in [0, 1, 5, 61] {
                    check_reductions::<f64>(comm, length);
                    check_moves::<i32>(comm, length);
                }
            });
        }
    }
}

#[test]
fn every_kind_of_operation_has_an_algorithm_that_is_tested() {
    for kind in OperationKind::ALL {
        assert!(!Algorithm::able(kind).is_empty(), "{kind}");
    }
    assert_eq!(DType::ALL.len(), 13);
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
                check_moves::<u8>(comm, length);
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
            let to = |from: u32| parts::<u8>(from, |_| each, world);
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
