//! What depends on how floats are rounded: half types, values that travel as such, Adasum, and the bits of sums.

use super::*;

/// A value that neither half type has, another one for each rank and index.
fn rough(rank: u32, index: usize) -> f32 {
    let mixed = (rank * 7919 + index as u32).wrapping_mul(2_654_435_761) >> 8;
    (mixed as f32 / 16_777_216.0).mul_add(6.0, -3.0)
}

fn rough_all(rank: u32, length: usize) -> Vec<f32> {
    (0..length).map(|index| rough(rank, index)).collect()
}

/// As it is after it has travelled.
fn rounded(compression: Compression, value: f32) -> f32 {
    match compression {
        Compression::F16 => f16::from_f32(value).to_f32(),
        Compression::Bf16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

fn check_compressed(comm: &Communicator, compression: Compression, length: usize) {
    let (me, world) = (comm.rank().0, comm.world_size());
    let short = comm.with(Options::new().compression(compression));
    let what = format!("{length} {compression:?} in a world of {world}");
    let mine = rough_all(me, length);
    let travelled = |rank: u32, count: usize| -> Vec<f32> {
        rough_all(rank, count)
            .into_iter()
            .map(|value| rounded(compression, value))
            .collect()
    };
    assert!(length < 9 || travelled(me, length) != mine, "they round");
    let root = Rank(length as u32 % world);
    let is_root = comm.rank() == root;

    // The greatest is the same in whatever order; so is a sum of two.
    let mut ops = vec![ReduceOp::Max];
    if world == 2 {
        ops.push(ReduceOp::Sum);
    }
    for op in ops {
        let expected: Vec<f32> = (0..length)
            .map(|index| {
                let values = (0..world).map(|rank| rounded(compression, rough(rank, index)));
                match op {
                    ReduceOp::Max => values.fold(f32::NEG_INFINITY, f32::max),
                    _ => rounded(compression, values.sum()),
                }
            })
            .collect();
        let mut data = mine.clone();
        short.all_reduce(&mut data, op).unwrap();
        assert_eq!(data, expected, "all_reduce {op} of {what}");
        let mut data = mine.clone();
        short
            .all_reduce_grouped(&mut [&mut data[..], &mut [1.0]], op)
            .unwrap();
        assert_eq!(data, expected, "grouped {op} of {what}");
        // Several that may be fused.
        let named = ["a", "b", "c"].map(|name| short.named(name).all_reduce(mine.clone(), op));
        for named in named {
            assert_eq!(named.wait().unwrap(), expected, "named {op} of {what}");
        }
        let mut data = mine.clone();
        short.reduce(&mut data, op, root).unwrap();
        let whole = if is_root { &expected } else { &mine };
        assert_eq!(&data, whole, "reduce {op} of {what}");
        let part = short.reduce_scatter(&mine, length, op).unwrap();
        let rows = comm.rows_of(length, comm.rank());
        assert_eq!(part, expected[rows], "reduce_scatter {op} of {what}");
    }

    let mut data = mine.clone();
    short.broadcast(&mut data, root).unwrap();
    assert_eq!(data, travelled(root.0, length), "broadcast of {what}");
    let all: Vec<f32> = (0..world)
        .flat_map(|rank| travelled(rank, length))
        .collect();
    assert_eq!(
        short.all_gather(&mine).unwrap(),
        all,
        "all_gather of {what}"
    );
    let gathered = short.gather(&mine, root).unwrap();
    assert_eq!(gathered, is_root.then_some(all), "gather of {what}");

    let share = |rank: u32| (length + rank as usize * 3) % (length + 2);
    let varied = Gathered {
        values: (0..world)
            .flat_map(|rank| travelled(rank, share(rank)))
            .collect(),
        counts: (0..world).map(share).collect(),
    };
    let mine = rough_all(me, share(me));
    let gathered = short.all_gather_varcount(&mine).unwrap();
    assert_eq!(gathered, varied, "all_gather_varcount of {what}");
    let gathered = short.gather_varcount(&mine, root).unwrap();
    assert_eq!(
        gathered,
        is_root.then_some(varied),
        "gather_varcount of {what}"
    );

    let total = length * world as usize;
    let given = if is_root {
        rough_all(root.0, total)
    } else {
        vec![]
    };
    let part = short.scatter(&given, length, root).unwrap();
    let at = length * me as usize;
    let of = |rank: u32| travelled(rank, total)[at..at + length].to_vec();
    assert_eq!(part, of(root.0), "scatter of {what}");
    let counts: Vec<usize> = (0..world).map(share).collect();
    let given = rough_all(root.0, counts.iter().sum());
    let part = if is_root {
        short.scatter_varcount(&given, &counts, root).unwrap()
    } else {
        short.scatter_varcount(&[], &[], root).unwrap()
    };
    let before: usize = counts[..me as usize].iter().sum();
    let expected = &travelled(root.0, given.len())[before..before + share(me)];
    assert_eq!(part, expected, "scatter_varcount of {what}");

    let exchanged: Vec<f32> = (0..world).flat_map(of).collect();
    let data = rough_all(me, total);
    assert_eq!(
        short.all_to_all(&data).unwrap(),
        exchanged,
        "all_to_all of {what}"
    );
    let splits = vec![length; world as usize];
    let received = short.all_to_all_varcount(&data, &splits).unwrap();
    assert_eq!(received.values, exchanged, "all_to_all_varcount of {what}");

    let (next, before) = (Rank((me + 1) % world), Rank((me + world - 1) % world));
    let sent = short.start().send(rough_all(me, length), next);
    let received = short.receive::<f32>(before).unwrap();
    assert_eq!(received, travelled(before.0, length), "send of {what}");
    sent.wait().unwrap();
}

#[test]
fn compressed_values_arrive_as_they_are_rounded() {
    for (kind, world) in [Kind::Memory, Kind::Ring, Kind::Shared, Kind::Tls]
        .into_iter()
        .flat_map(|kind| [2, 3].map(|world| (kind, world)))
    {
        let group = Group::new(kind, world);
        group.run(|comm| {
            for compression in [Compression::F16, Compression::Bf16] {
                for length in [1, 13, 3001] {
                    check_compressed(comm, compression, length);
                }
            }
        });
    }
}

/// Plain Adasum of all ranks' vectors: of each two, then of each two of these.
fn adasum_of(mut all: Vec<Vec<f64>>) -> Vec<f64> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    while all.len() > 1 {
        all = all
            .chunks(2)
            .map(|pair| {
                let (a, b) = (&pair[0], &pair[1]);
                let factor = |own: f64| match own {
                    0.0 => 1.0,
                    own => 1.0 - dot(a, b) / (2.0 * own),
                };
                let (left, right) = (factor(dot(a, a)), factor(dot(b, b)));
                a.iter().zip(b).map(|(a, b)| left * a + right * b).collect()
            })
            .collect();
    }
    all.remove(0)
}

/// Of numbers that all types have, with a part that all ranks share.
fn gradient(rank: u32, length: usize) -> Vec<i64> {
    (0..length)
        .map(|index| number(rank, index * index) + (index as i64 % 5) - 1)
        .collect()
}

/// `error` is relative to the greatest value.
fn check_adasum<T: kolo_collectives::Element>(
    comm: &Communicator,
    length: usize,
    from: fn(i64) -> T,
    to: fn(T) -> f64,
    error: f64,
) {
    let world = comm.world_size();
    let close = |got: &[T], how: &str| {
        assert_eq!(got.len(), length);
        let inputs = |rank| {
            gradient(rank, length)
                .into_iter()
                .map(|v| v as f64)
                .collect()
        };
        let all: Vec<Vec<f64>> = (0..world).map(inputs).collect();
        let sum = |index: usize| all.iter().map(|one| one[index]).sum::<f64>();
        let sums: Vec<f64> = (0..length).map(sum).collect();
        let expected = adasum_of(all);
        let most = expected.iter().fold(1.0, |most: f64, v| most.max(v.abs()));
        // Neither what a sum nor what an average would give.
        for share in [1.0, 1.0 / f64::from(world)] {
            let is_near = |(sum, value): (&f64, &f64)| (sum * share - value).abs() <= error * most;
            assert!(length < 9 || !sums.iter().zip(&expected).all(is_near));
        }
        for (index, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let got = to(*got);
            assert!(
                (got - expected).abs() <= error * most,
                "{how} {index} of {length} {}, world {world}: {got} is not {expected}",
                T::DTYPE
            );
        }
    };
    let mine: Vec<T> = gradient(comm.rank().0, length)
        .into_iter()
        .map(from)
        .collect();
    let mut data = mine.clone();
    comm.all_reduce(&mut data, ReduceOp::Adasum).unwrap();
    close(&data, "all_reduce");
    let mut into = vec![T::default(); length];
    comm.all_reduce_into(&mine, &mut into, ReduceOp::Adasum)
        .unwrap();
    close(&into, "all_reduce_into");
    // Each of a group by itself.
    let (mut one, mut two) = (mine.clone(), mine.clone());
    comm.all_reduce_grouped(&mut [&mut one, &mut [], &mut two], ReduceOp::Adasum)
        .unwrap();
    close(&one, "grouped");
    close(&two, "grouped");
    let mut buffer = comm.buffer::<T>(length).unwrap();
    buffer.copy_from_slice(&mine);
    comm.all_reduce_buffer(&mut buffer, ReduceOp::Adasum)
        .unwrap();
    close(&buffer, "all_reduce_buffer");
    let named = ["a", "b"].map(|name| comm.named(name).all_reduce(mine.clone(), ReduceOp::Adasum));
    for named in named {
        close(&named.wait().unwrap(), "named");
    }
}

#[test]
fn adasum_is_that_of_a_plain_reference() {
    for (kind, world) in [
        (Kind::Memory, 2),
        (Kind::Memory, 8),
        (Kind::Shared, 2),
        (Kind::Shared, 4),
        (Kind::Shared, 8),
        (Kind::Ring, 4),
        (Kind::Tls, 4),
        (Kind::Quic, 2),
    ] {
        let group = Group::new(kind, world);
        group.run(|comm| {
            for length in [1, 3, 17, 130, 1023, 4099] {
                check_adasum(comm, length, |v| f16::from_f32(v as f32), f16::to_f64, 4e-3);
                check_adasum(comm, length, |v| v as f32, f64::from, 1e-5);
                check_adasum(comm, length, |v| v as f64, |v| v, 1e-11);
            }
        });
    }
}

/// 1 is half of what separates the values of a half type there: with it alone nothing changes, twice it does.
#[test]
fn sums_of_half_types_in_shared_memory_are_rounded_once() {
    fn check<T: kolo_collectives::Element>(comm: &Communicator, from: fn(f32) -> T, great: f32) {
        let (me, world) = (comm.rank().0, comm.world_size());
        let sum = from(great + (world - 1) as f32);
        assert!(sum != from(great));
        // Whichever two were combined first, one of the ranks that have the great value is among them.
        for (length, with_great) in [1, 20, 3001, 70_001]
            .into_iter()
            .flat_map(|length| (0..world).map(move |rank| (length, rank)))
        {
            let mine = vec![from(if me == with_great { great } else { 1.0 }); length];
            let what = format!("{length} {}, great on {with_great}", T::DTYPE);
            let mut data = mine.clone();
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert!(data.iter().all(|value| *value == sum), "{what}");
            let mut data = mine.clone();
            comm.reduce(&mut data, ReduceOp::Sum, Rank(1)).unwrap();
            let expected = if me == 1 { sum } else { mine[0] };
            assert!(data.iter().all(|value| *value == expected), "reduce {what}");
            let part = comm.reduce_scatter(&mine, length, ReduceOp::Sum).unwrap();
            assert_eq!(part.len(), comm.rows_of(length, comm.rank()).len());
            assert!(part.iter().all(|value| *value == sum), "scatter {what}");
        }
    }
    for world in [3, 5] {
        let group = Group::new(Kind::Shared, world);
        group.run(|comm| {
            check(comm, f16::from_f32, 2048.0);
            check(comm, bf16::from_f32, 256.0);
        });
    }
}

/// Of two values, as the nearest one, of two that are as near the even one.
#[test]
fn sums_of_two_half_values_are_rounded_to_the_nearest() {
    fn check<T: kolo_collectives::Element>(comm: &Communicator, from: fn(f32) -> T, great: f32) {
        let me = comm.rank().0;
        // The next values are 2 apart.
        for (one, other, sum) in [
            (great, 1.0, great),
            (great + 2.0, 1.0, great + 4.0),
            (great, 1.5, great + 2.0),
            (great, 3.0, great + 4.0),
            (great + 2.0, -1.0, great),
        ] {
            for length in [1, 37, 3001] {
                let mut data = vec![from(if me == 0 { one } else { other }); length];
                comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert_eq!(data, vec![from(sum); length], "{} {one} {other}", T::DTYPE);
            }
        }
    }
    for kind in [
        Kind::Memory,
        Kind::Ring,
        Kind::Shared,
        Kind::Tls,
        Kind::Quic,
    ] {
        let group = Group::new(kind, 2);
        group.run(|comm| {
            check(comm, f16::from_f32, 2048.0);
            check(comm, bf16::from_f32, 256.0);
        });
    }
}

/// With the algorithm that is chosen, and whatever the lane.
#[test]
fn float_sums_have_the_same_bits_on_every_rank_and_in_another_group() {
    for (kind, world) in [Kind::Memory, Kind::Shared, Kind::Ring, Kind::Tls]
        .into_iter()
        .flat_map(|kind| [3, 4].map(|world| (kind, world)))
    {
        let mut lengths = vec![1, 5, 1000, 100_003];
        let sums = Sample::each(kind, world, &[DType::F32]).into_iter();
        let sum = sums
            .map(|sample| Sample {
                slowed: 1,
                ..sample
            })
            .next()
            .unwrap();
        lengths.extend(sum.around_switches().map(|sample| sample.length));
        lengths.retain(|length| *length < 200_000);
        // Of very different size, so that another order gives another sum.
        let value = |rank: u32, index| {
            let value = rough(rank, index);
            value * 10_f32.powi((value.to_bits() % 9) as i32)
        };
        let in_order = |index| (0..world).map(|rank| value(rank, index)).sum::<f32>();
        let backwards = |index| (0..world).rev().map(|rank| value(rank, index)).sum::<f32>();
        let sums = || {
            let group = Group::new(kind, world);
            group.run(|comm| {
                let sum = |length: &usize| {
                    let mut data: Vec<f32> = (0..*length)
                        .map(|index| value(comm.rank().0, index))
                        .collect();
                    comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    data.iter()
                        .map(|value| value.to_bits())
                        .collect::<Vec<u32>>()
                };
                lengths.iter().map(sum).collect::<Vec<_>>()
            })
        };
        assert!(
            (0..5).any(|index| in_order(index) != backwards(index)),
            "another order gives other bits"
        );
        let (one, two) = (sums(), sums());
        for (rank, other) in one.iter().chain(&two).enumerate() {
            for (length, (bits, expected)) in lengths.iter().zip(other.iter().zip(&one[0])) {
                assert!(bits == expected, "{kind:?} {world} {rank}: {length}");
            }
        }
    }
}
