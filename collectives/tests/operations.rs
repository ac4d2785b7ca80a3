//! The other operations: every one, type, operator, world size and length against a plain reference. All-reduce, broadcast
//! and all-gather are in `matrix.rs`.

#![allow(clippy::cast_possible_wrap, clippy::float_cmp, clippy::unwrap_used)]

mod common;

use common::value::{Value, input, number};
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

/// The combination of all ranks' values, element by element.
fn combined<T: Value>(op: ReduceOp, world: u32, length: usize) -> Vec<T> {
    (0..length)
        .map(|index| {
            let numbers: Vec<i64> = (0..world).map(|rank| number(rank, index)).collect();
            T::reference(op, &numbers)
        })
        .collect()
}

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
        let expected = combined::<T>(op, world, length);

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
        assert_eq!(two, combined::<T>(op, world, 3), "grouped {what}");

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
        // From flat to slices, from slots to areas: of all ranks together, and of one.
        for limit in [56, 96 << 10, 256 << 10] {
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
fn factors_are_applied_before_and_after() {
    for world in [1, 2, 3, 8] {
        let group = Group::new(Kind::Memory, world);
        group.run(|comm| {
            let scaled = comm.with(Options::new().prescale(2.0).postscale(0.5));
            let me = f64::from(comm.rank().0 + 1);
            let sum: f64 = (1..=world).map(f64::from).sum();
            let mut data = [me; 5];
            scaled.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [sum; 5]);
            let mut data = [me; 5];
            comm.with(Options::new().prescale(4.0))
                .reduce(&mut data, ReduceOp::Max, Rank(0))
                .unwrap();
            let expected = if comm.rank() == Rank(0) {
                4.0 * f64::from(world)
            } else {
                me
            };
            assert_eq!(data, [expected; 5]);
            let part = comm
                .with(Options::new().postscale(3.0))
                .reduce_scatter(&[1.0_f32; 8], 8, ReduceOp::Average)
                .unwrap();
            assert!(part.iter().all(|value| (value - 3.0).abs() < 1e-6));
            // Integers are truncated toward zero, after each factor.
            let mut data = [-3_i32, 5, 7];
            comm.with(Options::new().prescale(0.5))
                .all_reduce(&mut data, ReduceOp::Sum)
                .unwrap();
            let world = world as i32;
            assert_eq!(data, [-world, 2 * world, 3 * world]);
        });
    }
}

#[test]
fn compressed_values_are_the_same_on_all_ranks_and_close() {
    let group = Group::new(Kind::Unix, 3);
    for (compression, error) in [(Compression::F16, 1e-3), (Compression::Bf16, 8e-3)] {
        let results = group.run(|comm| {
            let short = comm.with(Options::new().compression(compression));
            let me = comm.rank().0;
            let values: Vec<f32> = (0..50)
                .map(|index| (index as f32).mul_add(0.37, me as f32 + 0.1))
                .collect();
            let mut sum = values.clone();
            short.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            let mut root = values.clone();
            short.broadcast(&mut root, Rank(1)).unwrap();
            let all = short.all_gather(&values).unwrap();
            let mut whole = [f64::from(me) + 0.1; 3];
            short.all_reduce(&mut whole, ReduceOp::Max).unwrap();
            // What is no float travels as it is.
            let mut integers = [1 << 20, 3];
            short.all_reduce(&mut integers, ReduceOp::Sum).unwrap();
            assert_eq!(integers, [3 << 20, 9]);
            let bits: Vec<u32> = sum
                .iter()
                .chain(&root)
                .chain(&all)
                .map(|value| value.to_bits())
                .collect();
            for (index, value) in sum.iter().enumerate() {
                let exact = 3.0 * (index as f32).mul_add(0.37, 0.1) + 3.0;
                assert!(
                    (value - exact).abs() <= exact * 4.0 * error,
                    "{value} {exact}"
                );
            }
            assert!((whole[0] - 2.1).abs() < 2.1 * f64::from(error));
            bits
        });
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
    }
}

#[test]
fn shapes_are_agreed_on() {
    let group = Group::new(Kind::Memory, 2);
    let results = group.run(|comm| {
        let shape = if comm.rank() == Rank(0) {
            [2, 3]
        } else {
            [3, 2]
        };
        let shaped = comm.with(Options::new().shape(&shape));
        let mut data = [1.0_f32; 6];
        let error = shaped.all_reduce(&mut data, ReduceOp::Sum).unwrap_err();
        assert_eq!(data, [1.0; 6]);
        let shaped = comm.with(Options::new().shape(&[2, 3]));
        shaped.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        error.to_string()
    });
    for error in results {
        assert!(
            error.contains("shape [2, 3]") && error.contains("shape [3, 2]"),
            "{error}"
        );
    }
}

#[test]
fn arguments_that_cannot_be_right_name_what_is_wrong_and_the_next_operation_works() {
    type Body = fn(&Communicator) -> Result<(), CollectiveError>;
    let wrong: [(Body, &str); 10] = [
        (
            |comm| comm.reduce_scatter(&[1_u8; 7], 2, ReduceOp::Sum).map(drop),
            "reduce_scatter of 7 elements in 2 rows",
        ),
        (
            |comm| comm.reduce_scatter_into(&[1_u8; 4], 4, &mut [0; 3], ReduceOp::Sum),
            "a buffer of 3 elements: it must have 2",
        ),
        (
            |comm| comm.all_to_all(&[1_u8; 7]).map(drop),
            "not a whole number for each of 2 ranks",
        ),
        (
            |comm| comm.all_to_all_varcount(&[1_u8; 7], &[1]).map(drop),
            "the splits of all_to_all_varcount on 2 ranks into a buffer of 1 elements: it must have 2",
        ),
        (
            |comm| comm.all_to_all_varcount(&[1_u8; 7], &[4, 4]).map(drop),
            "splits [4, 4] of 7 elements",
        ),
        (
            |comm| comm.scatter(&[1_u8; 5], 2, comm.rank()).map(drop),
            "the root gave 5 elements, which is not 2 for each of 2 ranks",
        ),
        (
            |comm| {
                comm.scatter_varcount(&[1_u8; 5], &[2, 2], comm.rank())
                    .map(drop)
            },
            "the root gave 5 elements in all",
        ),
        (
            |comm| comm.gather(&[1_u8], Rank(2)).map(drop),
            "gather to root 2: a world of 2 has ranks 0 to 1",
        ),
        (
            |comm| comm.all_reduce_into(&[1_u8; 2], &mut [0], ReduceOp::Sum),
            "a buffer of 1 elements: it must have 2",
        ),
        (
            |comm| comm.reduce(&mut [1.0_f32], ReduceOp::Adasum, Rank(0)),
            "reduce with adasum: it is defined for all_reduce only",
        ),
    ];
    let group = Group::new(Kind::Memory, 2);
    for (body, text) in wrong {
        for result in group.run(body) {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(text), "{error}\n{text}");
        }
        group.run(|comm| comm.barrier().unwrap());
    }
    // One rank alone is wrong: the others hear of it.
    let results = group.run(|comm| {
        let length = 6 + comm.rank().index();
        comm.all_to_all(&vec![0_u8; length]).map(drop)
    });
    assert!(matches!(
        results[0],
        Err(CollectiveError::PeerFailed { rank: Rank(1), .. })
    ));
    assert!(matches!(results[1], Err(CollectiveError::Invalid { .. })));
    for (error, to) in [
        (group.members[0].send(&[1_u8], Rank(0)), 0),
        (group.members[0].send(&[1_u8], Rank(2)), 2),
    ] {
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains(&format!("rank 0 can't send to rank {to}")),
            "{error}"
        );
    }
}

#[test]
fn a_receiver_with_another_buffer_or_type_fails_on_both_sides() {
    let group = Group::new(Kind::Unix, 2);
    let results = group.run(|comm| {
        if comm.rank() == Rank(0) {
            comm.send(&vec![1.0_f32; 100_000], Rank(1))
        } else {
            comm.receive_into(&mut [0.0_f32; 9], Rank(0))
        }
    });
    let text = results[1].as_ref().unwrap_err().to_string();
    assert!(text.contains("rank 0 sends 100000 f32"), "{text}");
    assert!(results[0].is_err());
    let results = group.run(|comm| {
        if comm.rank() == Rank(0) {
            comm.send(&vec![1.0_f32; 100_000], Rank(1))
        } else {
            comm.receive::<f64>(Rank(0)).map(drop)
        }
    });
    for result in results {
        let text = result.unwrap_err().to_string();
        assert!(
            text.contains("send f32 from rank 0") && text.contains("send f64"),
            "{text}"
        );
    }
    let results = group.run(|comm| match comm.rank() {
        Rank(0) => comm.send(&[5_u8], Rank(1)).map(|()| vec![]),
        _ => comm.receive::<u8>(Rank(0)),
    });
    assert_eq!(results[1], Ok(vec![5]));
}

#[test]
fn objects_of_any_type_reach_all_ranks() {
    let group = Group::new(Kind::Unix, 3);
    group.run(|comm| {
        let me = comm.rank().0;
        let mine = (me == 2).then(|| vec![Some("x".repeat(100_000)), None]);
        let got: Vec<Option<String>> = comm.broadcast_object(mine, Rank(2)).unwrap();
        assert_eq!(got, [Some("x".repeat(100_000)), None]);
        let all = comm.all_gather_object(&vec![me; me as usize]).unwrap();
        assert_eq!(all, [vec![], vec![1], vec![2, 2]]);
    });
    let results = group.run(|comm| comm.broadcast_object::<u32>(None, Rank(0)));
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(
            error.contains("rank 0 is the root and gave no value"),
            "{error}"
        );
    }
    // What one takes for a number is none.
    let results = group.run(|comm| {
        if comm.rank() == Rank(0) {
            comm.broadcast_object(Some("seven".to_owned()), Rank(0))
                .map(drop)
        } else {
            comm.broadcast_object::<u64>(None, Rank(0)).map(drop)
        }
    });
    assert!(results[0].is_ok());
    for result in &results[1..] {
        let error = result.as_ref().unwrap_err().to_string();
        assert!(error.contains("what rank 0 gave is no u64"), "{error}");
    }
    // An object and what looks like one are not the same.
    let results = group.run(|comm| {
        if comm.rank() == Rank(0) {
            comm.all_gather_object(&1_u8).map(drop)
        } else {
            comm.all_gather_varcount(&[1_u8]).map(drop)
        }
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("all_gather_object"), "{error}");
    }
}

#[test]
fn handles_run_in_order_beside_blocking_operations() {
    let group = Group::new(Kind::Unix, 3);
    group.run(|comm| {
        let me = comm.rank().index();
        let start = comm.start();
        for round in 0..20_usize {
            let sums: Vec<_> = (0..5)
                .map(|index| start.all_reduce(vec![(me + index) as i64; round], ReduceOp::Sum))
                .collect();
            // Comes after the five, on every rank.
            let mut last = [me as u8];
            comm.broadcast(&mut last, Rank(round as u32 % 3)).unwrap();
            assert_eq!(usize::from(last[0]), round % 3);
            assert!(
                sums.iter().all(kolo_collectives::Handle::poll),
                "they are done"
            );
            for (index, sum) in sums.into_iter().enumerate() {
                assert_eq!(sum.wait().unwrap(), vec![3 + 3 * index as i64; round]);
            }
        }
        // Every kind of them.
        let root = Rank(1);
        let is_root = comm.rank() == root;
        let reduced = start.reduce(vec![1_u32], ReduceOp::Sum, root);
        let scattered = start.reduce_scatter(vec![1_u32; 3], 3, ReduceOp::Sum);
        let gathered = start.all_gather(vec![me as u16]);
        let varied = start.all_gather_varcount(vec![1_i8; me]);
        let at_root = start.gather(vec![me as u16], root);
        let varied_at_root = start.gather_varcount(vec![me as u16; me], root);
        let data = if is_root { vec![1_u8, 2, 3] } else { vec![] };
        let counts = if is_root { vec![0, 1, 2] } else { vec![] };
        let part = start.scatter(data.clone(), 1, root);
        let varied_part = start.scatter_varcount(data, counts, root);
        let spread = start.broadcast(vec![me as f64], root);
        let exchanged = start.all_to_all(vec![me as u32; 3]);
        let varied_exchanged = start.all_to_all_varcount(vec![me as u32; 3], vec![1, 0, 2]);
        let met = start.barrier();
        let object = start.broadcast_object(is_root.then(|| "it".to_owned()), root);
        let objects = start.all_gather_object(me);
        let grouped = start.all_reduce_grouped(vec![vec![1_i32], vec![2; 2]], ReduceOp::Product);
        assert_eq!(grouped.wait().unwrap(), [vec![1], vec![8; 2]]);
        assert_eq!(reduced.wait().unwrap(), [if is_root { 3 } else { 1 }]);
        assert_eq!(scattered.wait().unwrap(), [3]);
        assert_eq!(gathered.wait().unwrap(), [0, 1, 2]);
        assert_eq!(varied.wait().unwrap().counts, [0, 1, 2]);
        assert_eq!(at_root.wait().unwrap(), is_root.then(|| vec![0, 1, 2]));
        assert_eq!(varied_at_root.wait().unwrap().is_some(), is_root);
        assert_eq!(part.wait().unwrap(), [me as u8 + 1]);
        assert_eq!(varied_part.wait().unwrap().len(), me);
        assert_eq!(spread.wait().unwrap(), [1.0]);
        assert_eq!(exchanged.wait().unwrap(), [0, 1, 2]);
        assert_eq!(varied_exchanged.wait().unwrap().counts, [[1, 0, 2][me]; 3]);
        met.wait().unwrap();
        assert_eq!(object.wait().unwrap(), "it");
        assert_eq!(objects.wait().unwrap(), [0, 1, 2]);
    });
}

#[tokio::test]
async fn handles_are_futures() {
    let group = kolo_collectives::local_group(2).unwrap();
    let handles: Vec<_> = group
        .iter()
        .map(|comm| comm.start().all_reduce(vec![2.0_f32], ReduceOp::Product))
        .collect();
    for handle in handles {
        assert_eq!(handle.await.unwrap(), [4.0]);
    }
}

#[test]
fn a_dropped_handle_goes_on_and_a_failed_one_gives_its_input_back() {
    let group = Group::new(Kind::Memory, 2);
    group.run(|comm| {
        drop(comm.start().all_reduce(vec![1], ReduceOp::Sum));
        let mut data = [1];
        comm.all_reduce(&mut data, ReduceOp::Max).unwrap();
        let length = 1 + comm.rank().index();
        let failure = comm
            .start()
            .all_reduce(vec![7_u8; length], ReduceOp::Sum)
            .wait_or_reclaim()
            .unwrap_err();
        assert!(
            matches!(failure.error, CollectiveError::Mismatch { .. }),
            "{failure:?}"
        );
        assert_eq!(failure.input, Some(vec![7; length]));
    });
    // The last clone may go while handles are under way.
    let handles: Vec<_> = group
        .members
        .iter()
        .map(|comm| comm.start().all_reduce(vec![1_i64; 100_000], ReduceOp::Sum))
        .collect();
    drop(group.members);
    for handle in handles {
        assert_eq!(handle.wait().unwrap(), vec![2; 100_000]);
    }
}

#[test]
fn every_kind_of_operation_has_an_algorithm_that_is_tested() {
    for kind in OperationKind::ALL {
        assert!(!Algorithm::able(kind).is_empty(), "{kind}");
    }
    assert_eq!(DType::ALL.len(), 13);
}
