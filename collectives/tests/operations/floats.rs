//! What depends on how floats are rounded: half types, values that travel as such, Adasum, and the bits of sums.

use super::*;

/// A value that neither half type has, another one for each rank and index.
fn rough(rank: u32, index: usize) -> f32 {
    let mixed = (rank * 7919 + index as u32).wrapping_mul(2_654_435_761) >> 8;
    (mixed as f32 / 16_777_216.0).mul_add(6.0, -3.0)
}

/// Horovod: `test_compression_fp16`.
#[test]
fn compressed_values_arrive_as_they_are_rounded() {
    for (kind, world) in [Kind::Memory, Kind::Ring, Kind::Shared, Kind::Tls]
        .into_iter()
        .flat_map(|kind| [2, 3].map(|world| (kind, world)))
    {
        let all = cases(kind, world, &[DType::F32, DType::F64], &[1, 13, 3001]).into_iter();
        let exact = [None, Some(ReduceOp::Sum), Some(ReduceOp::Max)];
        let samples: Vec<Sample> = all
            .filter(|sample| exact.contains(&sample.op) && sample.what != What::AllReduceBuffer)
            .flat_map(|sample| {
                [Compression::F16, Compression::Bf16].map(|short| Sample { short, ..sample })
            })
            .collect();
        let group = Group::new(kind, world);
        run(&group, &samples);
        group.run(|comm| {
            // What is no float travels as it is.
            let short = comm.with(Options::new().compression(Compression::F16));
            let mut integers = [(1 << 20) + 1, 3];
            short.all_reduce(&mut integers, ReduceOp::Max).unwrap();
            assert_eq!(integers, [(1 << 20) + 1, 3]);
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

/// `error` is relative to the greatest value.
fn check_adasum<T: Element + Into<f64>>(
    comm: &Communicator,
    length: usize,
    from: fn(f64) -> T,
    error: f64,
) {
    let world = comm.world_size();
    // Numbers that all types have, with a part that all ranks share.
    let of_rank = |rank| -> Vec<f64> {
        let numbers = (0..length).map(|at| number(rank, at * at) + (at as i64 % 5) - 1);
        numbers.map(|number| number as f64).collect()
    };
    let all: Vec<Vec<f64>> = (0..world).map(of_rank).collect();
    let sums: Vec<f64> = (0..length)
        .map(|index| all.iter().map(|one| one[index]).sum())
        .collect();
    let expected = adasum_of(all);
    let most = expected.iter().fold(1.0, |most: f64, v| most.max(v.abs()));
    let is_near = |got: f64, expected: f64| (got - expected).abs() <= error * most;
    // Neither what a sum nor what an average would give.
    for share in [1.0, 1.0 / f64::from(world)] {
        let mut pairs = sums.iter().zip(&expected);
        assert!(length < 9 || !pairs.all(|(sum, value)| is_near(sum * share, *value)));
    }
    let close = |got: &[T], how: &str| {
        assert_eq!(got.len(), length);
        for (index, (got, expected)) in got.iter().zip(&expected).enumerate() {
            assert!(
                is_near((*got).into(), *expected),
                "{how} {index} of {length} {}, world {world}: {got:?} is not {expected}",
                T::DTYPE
            );
        }
    };
    let mine: Vec<T> = of_rank(comm.rank().0).into_iter().map(from).collect();
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
                check_adasum(comm, length, f16::from_f64, 4e-3);
                check_adasum(comm, length, |v| v as f32, 1e-5);
                check_adasum(comm, length, |v| v, 1e-11);
            }
        });
    }
}

/// 1 is half of what separates the values of a half type there: with it alone nothing changes, twice it does.
#[test]
fn sums_of_half_types_in_shared_memory_are_rounded_once() {
    fn check<T: Element>(comm: &Communicator, from: fn(f32) -> T, great: f32) {
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

/// Horovod: `test_stability` and `test_stability_2`. Parallel values of which the ranks' sizes span what the type holds (its square
/// root, as they are multiplied). The average comes out.
fn averages_far_apart<T: Element + Into<f64>>(
    comm: &Communicator,
    round: fn(f64) -> T,
    (least, most): (f64, f64),
    tolerance: f64,
) {
    let values = |place: u32| -> Vec<T> {
        let share = f64::from(place + 1) / 4.0;
        let size = most.sqrt().powf(share) * least.powf(1.0 - share);
        let directions = (0..1024).map(|index| f64::from(index % 13 - 6) + 0.5);
        directions
            .map(|direction| round(size * direction / 8.0))
            .collect()
    };
    let all = [0, 1, 2, 3].map(values);
    // Which rank has the largest ones, and who is paired with whom.
    for first in 0..4 {
        let mut data = all[(comm.rank().index() + first) % 4].clone();
        comm.all_reduce(&mut data, ReduceOp::Adasum).unwrap();
        for (index, got) in data.into_iter().enumerate() {
            let sum: f64 = all.iter().map(|values| values[index].into()).sum();
            let (got, expected): (f64, f64) = (got.into(), sum / 4.0);
            assert!(
                (got - expected).abs() <= tolerance * expected.abs(),
                "{index} of {}, {first}: {got}, not {expected}",
                T::DTYPE
            );
        }
    }
}

#[test]
fn adasum_of_values_far_apart_is_their_average() {
    Group::new(Kind::Unix, 4).run(|comm| {
        let halves = (f16::MIN_POSITIVE.to_f64(), f16::MAX.to_f64());
        averages_far_apart(comm, f16::from_f64, halves, 1e-2);
        let singles = (f64::from(f32::MIN_POSITIVE), f64::from(f32::MAX));
        averages_far_apart(comm, |value| value as f32, singles, 1e-5);
        // What is so small that its square is 0 counts as orthogonal. (Horovod's limit is higher.)
        let doubles = (f64::MIN_POSITIVE.sqrt(), f64::MAX);
        averages_far_apart(comm, |value| value, doubles, 1e-12);
    });
}
