//! Adasum.

use super::*;

/// Values that are alike, or each rank's in a place of its own: their average and their sum.
fn combines<T: Element + Into<f64>>(comm: &Communicator, round: fn(f64) -> T, is_parallel: bool) {
    for length in [4, 17, 4096] {
        let mut data: Vec<T> = (0..length)
            .map(|index| {
                let has_value = is_parallel || index % 4 == comm.rank().index();
                round(if has_value { 1.25 } else { 0.0 })
            })
            .collect();
        comm.all_reduce(&mut data, ReduceOp::Adasum).unwrap();
        for got in data {
            let got: f64 = got.into();
            assert!((got - 1.25).abs() < 1e-6, "{got} of {length} {}", T::DTYPE);
        }
    }
}

fn each_float(is_parallel: bool) {
    on_all(|comm| {
        combines(comm, f16::from_f64, is_parallel);
        combines(comm, |value| value as f32, is_parallel);
        combines(comm, |value| value, is_parallel);
    });
}

#[test]
fn test_orthogonal() {
    each_float(false);
}

#[test]
fn test_parallel() {
    each_float(true);
}

#[test]
fn test_stability() {
    on_all(|comm| {
        // Tiny and large values, and nothing at all: no NaN comes out.
        for value in [1e-30_f32, 1e18, 0.0] {
            let mut data = vec![value * (1.0 + comm.rank().0 as f32); 64];
            comm.all_reduce(&mut data, ReduceOp::Adasum).unwrap();
            let average = value * 2.5;
            assert!(
                data.iter()
                    .all(|got| (got - average).abs() <= 1e-6 * average),
                "{value}: {data:?}"
            );
        }
    });
}

/// Parallel values of which the ranks' sizes span what the type holds (its square root, as they are multiplied): the average
/// comes out.
fn averages_far_apart<T: Element + Into<f64>>(
    comm: &Communicator,
    round: fn(f64) -> T,
    (least, most): (f64, f64),
    tolerance: f64,
) {
    let size = |place: u32| {
        let share = f64::from(place + 1) / f64::from(SIZE);
        most.sqrt().powf(share) * least.powf(1.0 - share)
    };
    let values = |place: u32| -> Vec<T> {
        let directions = (0..1024).map(|index| f64::from(index % 13 - 6) + 0.5);
        directions
            .map(|direction| round(size(place) * direction / 8.0))
            .collect()
    };
    // Which rank has the largest ones, and who is paired with whom.
    for first in 0..SIZE {
        let mut data = values((comm.rank().0 + first) % SIZE);
        comm.all_reduce(&mut data, ReduceOp::Adasum).unwrap();
        let all: Vec<Vec<T>> = (0..SIZE).map(values).collect();
        for (index, got) in data.into_iter().map(Into::into).enumerate() {
            let sum: f64 = all.iter().map(|values| values[index].into()).sum();
            let expected = sum / f64::from(SIZE);
            assert!(
                (got - expected).abs() <= tolerance * expected.abs(),
                "{} of {}, {first}: {got}, not {expected}",
                index,
                T::DTYPE
            );
        }
    }
}

#[test]
fn test_stability_2() {
    on_all(|comm| {
        let halves = (f16::MIN_POSITIVE.to_f64(), f16::MAX.to_f64());
        averages_far_apart(comm, f16::from_f64, halves, 1e-2);
        let singles = (f64::from(f32::MIN_POSITIVE), f64::from(f32::MAX));
        averages_far_apart(comm, |value| value as f32, singles, 1e-5);
        // What is so small that its square is 0 counts as orthogonal. (Horovod's limit is higher.)
        let doubles = (f64::MIN_POSITIVE.sqrt(), f64::MAX);
        averages_far_apart(comm, |value| value, doubles, 1e-12);
    });
}
