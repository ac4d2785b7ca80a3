//! Reductions.

use super::*;

pub(super) fn reduces<T: Value>(comm: &Communicator, op: ReduceOp, length: usize) {
    let mut data = mine::<T>(comm, length);
    comm.all_reduce(&mut data, op).unwrap();
    let expected = combined::<T>(op, members(comm), length);
    assert_eq!(data, expected, "{op} of {length} {}", T::DTYPE);
}

fn starts_reduce<T: Value>(comm: &Communicator, start: &Start, length: usize) -> Started {
    let handle = start.all_reduce(mine::<T>(comm, length), ReduceOp::Sum);
    Started::new(handle, combined::<T>(ReduceOp::Sum, 0..SIZE, length))
}

/// Five buffers, as Horovod's tests have it.
pub(super) fn reduces_group<T: Value>(comm: &Communicator, op: ReduceOp, length: usize) {
    let lengths = (length..).step_by(3).take(5);
    let expected: Vec<Vec<T>> = lengths
        .clone()
        .map(|length| combined(op, members(comm), length))
        .collect();
    let mut buffers: Vec<Vec<T>> = lengths.map(|length| mine(comm, length)).collect();
    let started = comm.start().all_reduce_grouped(buffers.clone(), op);
    let mut group: Vec<&mut [T]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
    comm.all_reduce_grouped(&mut group, op).unwrap();
    assert_eq!(buffers, expected, "{op} of {length} {}", T::DTYPE);
    assert_eq!(started.wait().unwrap(), expected);
}

fn scales<T: Element>(comm: &Communicator, value: T, expected: T) {
    let mut data = vec![value; 17];
    comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    assert_eq!(data, [expected; 17], "{}", T::DTYPE);
}

fn reduces_in_place<T: Value>(comm: &Communicator, length: usize) {
    let mut data = mine::<T>(comm, length);
    let place = data.as_ptr();
    comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    let sum = combined::<T>(ReduceOp::Sum, 0..SIZE, length);
    assert_eq!((data.as_ptr(), &data), (place, &sum), "{}", T::DTYPE);
    let data = comm.start().all_reduce(data, ReduceOp::Min).wait().unwrap();
    assert_eq!((data.as_ptr(), data), (place, sum), "{}", T::DTYPE);
}

#[test]
fn test_horovod_allreduce() {
    on_all(|comm| {
        each(of_numbers!(reduces), |check, length| {
            check(comm, ReduceOp::Sum, length);
        });
    });
}

/// Of integers it is truncated toward zero.
#[test]
fn test_horovod_allreduce_average() {
    on_all(|comm| {
        each(of_numbers!(reduces), |check, length| {
            check(comm, ReduceOp::Average, length);
        });
    });
}

/// Here flags have a least and a greatest value, too.
#[test]
fn test_horovod_allreduce_min() {
    on_all(|comm| {
        each(of_all!(reduces), |check, length| {
            check(comm, ReduceOp::Min, length);
        });
    });
}

#[test]
fn test_horovod_allreduce_max() {
    on_all(|comm| {
        each(of_all!(reduces), |check, length| {
            check(comm, ReduceOp::Max, length);
        });
    });
}

#[test]
fn test_horovod_allreduce_product() {
    on_all(|comm| {
        each(of_numbers!(reduces), |check, length| {
            check(comm, ReduceOp::Product, length);
        });
    });
}

#[test]
fn test_horovod_allreduce_inplace() {
    on_all(|comm| {
        each(of_numbers!(reduces_in_place), |check, length| {
            check(comm, length);
        });
    });
}

#[test]
fn test_horovod_allreduce_async_fused() {
    async_fused(of_numbers!(starts_reduce));
}

/// Of integers, the scaled input is truncated.
#[test]
fn test_horovod_allreduce_prescale() {
    on_all(|comm| {
        let half = comm.with(Options::new().prescale(0.5));
        with_numbers!(scales(&half), 3, 4, 6.0);
    });
}

/// Of integers, the scaled result is truncated.
#[test]
fn test_horovod_allreduce_postscale() {
    on_all(|comm| {
        let eighth = comm.with(Options::new().postscale(0.125));
        with_numbers!(scales(&eighth), 3, 1, 1.5);
    });
}

#[test]
fn test_horovod_allreduce_error() {
    let results = on_all(|comm| {
        // Another length, and the same length in another shape.
        let mut data = vec![1.0_f32; 17 + comm.rank().index() % 2];
        let length = comm.all_reduce(&mut data, ReduceOp::Sum);
        let mut dimensions = [2, 3, 4];
        dimensions.rotate_left(comm.rank().index() % 2);
        let shaped = comm.with(Options::new().shape(&dimensions));
        [length, shaped.all_reduce(&mut [0.0_f32; 24], ReduceOp::Sum)]
    });
    let shapes = ["[2, 3, 4]", "[3, 4, 2]"];
    each_mismatch(&results, [["of 17 f32", "of 18 f32"], shapes]);
}

#[test]
fn test_horovod_allreduce_type_error() {
    let results = on_all(|comm| {
        if comm.rank().0 % 2 == 0 {
            comm.all_reduce(&mut [1_i32; 17], ReduceOp::Sum)
        } else {
            comm.all_reduce(&mut [1_f32; 17], ReduceOp::Sum)
        }
    });
    all_mismatch(results, &["i32", "f32"]);
}

#[test]
fn test_horovod_allreduce_op_error() {
    let results = on_all(|comm| {
        let op = if comm.rank().0 == 2 {
            ReduceOp::Max
        } else {
            ReduceOp::Sum
        };
        comm.named("x").all_reduce(vec![1], op).wait().map(drop)
    });
    all_mismatch(results, &["sum", "max"]);
}

#[test]
fn test_horovod_allreduce_scale_error() {
    let results = on_all(|comm| {
        let factor = f64::from(comm.rank().0 % 2 + 1);
        comm.with(Options::new().prescale(factor))
            .all_reduce(&mut [1.0_f32], ReduceOp::Sum)
    });
    all_mismatch(results, &["prescale 2"]);
}

#[test]
fn test_horovod_allreduce_duplicate_name_error() {
    duplicate_name(
        |start| start.all_reduce(vec![1.0_f32], ReduceOp::Sum),
        |_| vec![4.0],
    );
}

/// Two layers have parameters of the same names. Those of the first are reduced, those of the second refused, also if they
/// are for another operation.
#[test]
fn test_duplicate_names() {
    on_all(|comm| {
        let reduce = |name| comm.named(name).all_reduce(vec![1.0_f32], ReduceOp::Sum);
        let first = if comm.rank() == Rank(0) {
            let first = ["weight", "bias"].map(reduce);
            in_use(reduce("weight"));
            in_use(comm.named("bias").broadcast(vec![1.0_f32], Rank(0)));
            comm.barrier().unwrap();
            first
        } else {
            // The first layer's can't end before rank 0 has tried the second's.
            comm.barrier().unwrap();
            ["weight", "bias"].map(reduce)
        };
        for handle in first {
            assert_eq!(handle.wait().unwrap(), [4.0]);
        }
    });
}

#[test]
fn test_horovod_grouped_allreduce() {
    on_all(|comm| {
        each(of_numbers!(reduces_group), |check, length| {
            check(comm, ReduceOp::Sum, length);
        });
    });
}

#[test]
fn test_horovod_grouped_allreduce_average() {
    on_all(|comm| {
        each(of_numbers!(reduces_group), |check, length| {
            check(comm, ReduceOp::Average, length);
        });
        let buffers = vec![vec![comm.rank().0 as f32; 5]; 5];
        let handle = comm
            .named("group")
            .all_reduce_grouped(buffers, ReduceOp::Average);
        assert_eq!(handle.wait().unwrap(), vec![vec![1.5; 5]; 5]);
    });
}

#[test]
fn test_horovod_grouped_allreduce_inplace() {
    on_all(|comm| {
        let places = |buffers: &[Vec<f32>]| -> Vec<_> { buffers.iter().map(Vec::as_ptr).collect() };
        let mut buffers: Vec<Vec<f32>> = (1..=5).map(|rows| mine(comm, rows * 17)).collect();
        let before = places(&buffers);
        let mut group: Vec<&mut [f32]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
        comm.all_reduce_grouped(&mut group, ReduceOp::Sum).unwrap();
        let sums: Vec<Vec<f32>> = (1..=5)
            .map(|rows| combined(ReduceOp::Sum, 0..SIZE, rows * 17))
            .collect();
        assert_eq!(buffers, sums);
        let started = comm
            .named("group")
            .all_reduce_grouped(buffers, ReduceOp::Max);
        let buffers = started.wait().unwrap();
        assert_eq!(buffers, sums);
        assert_eq!(places(&buffers), before);
    });
}
