//! The rows of Horovod's parallel tests, by their names: `test_torch.py`, `test_process_sets_static.py`,
//! `test_tensorflow_process_sets_dynamic.py`, `test_timeline.py`, `test_adasum_pytorch.py`. What is about a framework
//! (gradients, optimizers, devices) has no counterpart here.

#![allow(
    clippy::unwrap_used,
    clippy::float_cmp,
    clippy::cast_possible_truncation
)]

mod common;

use common::{Group, Kind};
use half::f16;
use kolo_collectives::{
    CollectiveError, Communicator, Compression, Element, Handle, Options, ReduceOp,
};
use kolo_transport::ids::Rank;

const SIZE: u32 = 4;

/// One closure on all ranks of a new group.
fn on_all<R: Send>(body: impl Fn(&Communicator) -> R + Sync) -> Vec<R> {
    Group::new(Kind::Unix, SIZE).run(body)
}

/// 17 in each of so many dimensions, as Horovod's tests have it.
fn cube(dimensions: u32) -> usize {
    17_usize.pow(dimensions)
}

fn all_mismatch(results: Vec<Result<(), CollectiveError>>, words: &[&str]) {
    for result in results {
        let error = result.unwrap_err();
        assert!(matches!(error, CollectiveError::Mismatch { .. }), "{error}");
        for word in words {
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}

trait Small: Element {
    fn small(number: u32) -> Self;
}

macro_rules! small {
    ($($type:ty),*) => {$(
        impl Small for $type {
            fn small(number: u32) -> Self {
                number as $type
            }
        }
    )*};
}
small!(u8, i8, u16, i16, i32, i64, f32, f64);

impl Small for f16 {
    fn small(number: u32) -> Self {
        Self::from_f32(number as f32)
    }
}

fn each_type(comm: &Communicator, check: &dyn Fn(&Communicator, u32)) {
    for dimensions in 1..=3 {
        check(comm, dimensions);
    }
}

fn sums<T: Small>(comm: &Communicator, dimensions: u32) {
    let mut data = vec![T::small(comm.rank().0); cube(dimensions)];
    comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    assert_eq!(data, vec![T::small(6); cube(dimensions)]);
}

#[test]
fn test_horovod_allreduce() {
    on_all(|comm| {
        for sum in [
            sums::<i32>,
            sums::<i64>,
            sums::<f16>,
            sums::<f32>,
            sums::<f64>,
            sums::<u8>,
        ] {
            each_type(comm, &sum);
        }
    });
}

#[test]
fn test_horovod_allreduce_average() {
    on_all(|comm| {
        let mut data = vec![3.0 + comm.rank().0 as f32; cube(2)];
        comm.all_reduce(&mut data, ReduceOp::Average).unwrap();
        assert_eq!(data, vec![4.5; cube(2)]);
        let mut data = vec![3 + comm.rank().0 as i32; cube(2)];
        comm.all_reduce(&mut data, ReduceOp::Average).unwrap();
        assert_eq!(data, vec![4; cube(2)]);
    });
}

#[test]
fn test_horovod_allreduce_min_max_product() {
    on_all(|comm| {
        for (op, expected) in [
            (ReduceOp::Min, 1_i64),
            (ReduceOp::Max, 4),
            (ReduceOp::Product, 24),
        ] {
            let mut data = vec![i64::from(comm.rank().0 + 1); 50];
            comm.all_reduce(&mut data, op).unwrap();
            assert_eq!(data, vec![expected; 50], "{op}");
        }
    });
}

#[test]
fn test_horovod_allreduce_inplace() {
    on_all(|comm| {
        let mut data = vec![1_i64; cube(3)];
        let place = data.as_ptr();
        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!((data.as_ptr(), data[0]), (place, 4));
        let data = comm.start().all_reduce(data, ReduceOp::Sum).wait().unwrap();
        assert_eq!((data.as_ptr(), data[0]), (place, 16));
    });
}

#[test]
fn test_horovod_allreduce_async_fused() {
    on_all(|comm| {
        let handles: Vec<Handle<Vec<f32>>> = (0..60)
            .map(|index| {
                let name = format!("allreduce.noname.{index}");
                comm.named(name)
                    .all_reduce(vec![index as f32; cube(2)], ReduceOp::Sum)
            })
            .collect();
        for (index, handle) in handles.into_iter().enumerate() {
            assert_eq!(handle.wait().unwrap(), vec![4.0 * index as f32; cube(2)]);
        }
    });
}

#[test]
fn test_horovod_allreduce_prescale() {
    on_all(|comm| {
        let half = comm.with(Options::new().prescale(0.5));
        let mut data = vec![3.0_f64; 17];
        half.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [6.0; 17]);
        // Of integers, the scaled input is truncated.
        let mut data = vec![3_i32; 17];
        half.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [4; 17]);
    });
}

#[test]
fn test_horovod_allreduce_postscale() {
    on_all(|comm| {
        let half = comm.with(Options::new().postscale(0.125));
        let mut data = vec![3_i32; 17];
        half.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [1; 17]);
        let mut data = vec![f16::from_f32(3.0); 17];
        half.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [f16::from_f32(1.5); 17]);
    });
}

#[test]
fn test_horovod_allreduce_process_sets() {
    on_all(|comm| {
        let even = comm.group(&[Rank(0), Rank(2)]).unwrap();
        let odd = comm.group(&[Rank(1), Rank(3)]).unwrap();
        let set = even.or(odd).unwrap();
        let mut data = vec![comm.rank().0; cube(2)];
        set.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data[0], if comm.rank().0 % 2 == 0 { 2 } else { 4 });
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
        (length, shaped.all_reduce(&mut [0.0_f32; 24], ReduceOp::Sum))
    });
    let (lengths, shapes): (Vec<_>, Vec<_>) = results.into_iter().unzip();
    all_mismatch(lengths, &["of 17 f32", "of 18 f32"]);
    all_mismatch(shapes, &["[2, 3, 4]", "[3, 4, 2]"]);
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
    on_all(|comm| {
        let start = || {
            comm.named("duplicate")
                .all_reduce(vec![1.0_f32], ReduceOp::Sum)
        };
        if comm.rank() != Rank(0) {
            // The first can't end before rank 0 has tried twice.
            comm.barrier().unwrap();
            assert_eq!(start().wait().unwrap(), [4.0]);
            return;
        }
        let first = start();
        let error = start().wait().unwrap_err();
        assert!(
            error.to_string().contains("under way on this rank already"),
            "{error}"
        );
        comm.barrier().unwrap();
        assert_eq!(first.wait().unwrap(), [4.0]);
    });
}

#[test]
fn test_horovod_grouped_allreduce() {
    on_all(|comm| {
        let mut buffers: Vec<Vec<f64>> = (1..=5).map(|index| vec![1.0; index * 7]).collect();
        let mut group: Vec<&mut [f64]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
        comm.all_reduce_grouped(&mut group, ReduceOp::Sum).unwrap();
        assert!(buffers.iter().flatten().all(|value| *value == 4.0));
    });
}

#[test]
fn test_horovod_grouped_allreduce_average() {
    on_all(|comm| {
        let buffers = vec![vec![comm.rank().0 as f32; 5]; 5];
        let handle = comm
            .named("group")
            .all_reduce_grouped(buffers, ReduceOp::Average);
        assert_eq!(handle.wait().unwrap(), vec![vec![1.5; 5]; 5]);
    });
}

#[test]
fn test_horovod_allgather() {
    on_all(|comm| {
        for dimensions in 1..=3 {
            let all = comm
                .all_gather(&vec![comm.rank().0 as i16; cube(dimensions)])
                .unwrap();
            for rank in 0..4 {
                let share = &all[rank * cube(dimensions)..][..cube(dimensions)];
                assert!(share.iter().all(|value| *value == rank as i16));
            }
        }
    });
}

#[test]
fn test_horovod_allgather_variable_size() {
    on_all(|comm| {
        let sizes = [17, 32, 81, 12];
        let mine = vec![comm.rank().0 as u8; sizes[comm.rank().index()] * 17];
        let all = comm.all_gather_varcount(&mine).unwrap();
        for (rank, size) in (0..).zip(sizes) {
            assert_eq!(all.of(Rank(rank)), vec![rank as u8; size * 17]);
        }
    });
}

#[test]
fn test_horovod_allgather_type_error() {
    let results = on_all(|comm| {
        if comm.rank().0 % 2 == 0 {
            comm.all_gather_varcount(&[1_i32; 17]).map(drop)
        } else {
            comm.all_gather_varcount(&[1_f32; 17]).map(drop)
        }
    });
    all_mismatch(results, &["i32", "f32"]);
}

#[test]
fn test_horovod_broadcast() {
    on_all(|comm| {
        for root in 0..SIZE {
            let mut data = vec![f16::from_f32(comm.rank().0 as f32); cube(2)];
            comm.broadcast(&mut data, Rank(root)).unwrap();
            assert_eq!(data, vec![f16::from_f32(root as f32); cube(2)]);
        }
    });
}

#[test]
fn test_horovod_broadcast_error() {
    let results = on_all(|comm| {
        let mut data = vec![1_u8; 17 + comm.rank().index() % 2];
        comm.broadcast(&mut data, Rank(0))
    });
    all_mismatch(results, &["of 17 u8", "of 18 u8"]);
}

#[test]
fn test_horovod_broadcast_type_error() {
    let results = on_all(|comm| {
        if comm.rank().0 % 2 == 0 {
            comm.broadcast(&mut [1_i32; 17], Rank(0))
        } else {
            comm.broadcast(&mut [1_f32; 17], Rank(0))
        }
    });
    all_mismatch(results, &["i32", "f32"]);
}

/// Every rank thinks that it is the root.
#[test]
fn test_horovod_broadcast_rank_error() {
    let results = on_all(|comm| comm.broadcast(&mut [1_u8; 17], comm.rank()));
    all_mismatch(results, &["from root"]);
}

#[test]
fn test_horovod_reducescatter() {
    on_all(|comm| {
        for dimensions in 1..=3_u32 {
            let width = cube(dimensions - 1);
            let data = vec![comm.rank().0 as i32; 16 * width];
            let part = comm.reduce_scatter(&data, 16, ReduceOp::Sum).unwrap();
            assert_eq!(part, vec![6; 4 * width]);
            let part = comm
                .reduce_scatter(&vec![2.0_f32; 16 * width], 16, ReduceOp::Average)
                .unwrap();
            assert_eq!(part, vec![2.0; 4 * width]);
        }
    });
}

/// The first ranks get one row more, those that come last perhaps none.
#[test]
fn test_horovod_reducescatter_uneven() {
    on_all(|comm| {
        for rows in [0, 1, 2, 3, 5, 17] {
            let part = comm
                .reduce_scatter(&vec![1_u32; rows * 3], rows, ReduceOp::Sum)
                .unwrap();
            let mine = rows / 4 + usize::from(comm.rank().index() < rows % 4);
            assert_eq!(part, vec![4; mine * 3], "{rows}");
        }
    });
}

#[test]
fn test_horovod_reducescatter_error() {
    let results = on_all(|comm| {
        let rows = 2 + 2 * (comm.rank().index() % 2);
        comm.reduce_scatter(&[1_u8; 16], rows, ReduceOp::Sum)
            .map(drop)
    });
    all_mismatch(results, &["in 2 rows", "in 4 rows"]);
}

/// A number by itself has no first dimension to split.
#[test]
fn test_horovod_reducescatter_scalar_error() {
    let results = on_all(|comm| comm.reduce_scatter(&[1_u8], 0, ReduceOp::Sum).map(drop));
    for result in results {
        assert!(
            matches!(result, Err(CollectiveError::Invalid { .. })),
            "{result:?}"
        );
    }
}

#[test]
fn test_horovod_alltoall() {
    on_all(|comm| {
        let me = comm.rank().index();
        // Rank i gets i + 1 rows from each.
        let data: Vec<i64> = (0..4).flat_map(|to| vec![to as i64; to + 1]).collect();
        let received = comm.all_to_all_varcount(&data, &[1, 2, 3, 4]).unwrap();
        assert_eq!(received.values, vec![me as i64; 4 * (me + 1)]);
        assert_eq!(received.counts, [me + 1; 4]);
    });
}

#[test]
fn test_horovod_alltoall_equal_split() {
    on_all(|comm| {
        let data: Vec<f64> = (0..4).flat_map(|to| vec![f64::from(to); 17]).collect();
        let received = comm.all_to_all(&data).unwrap();
        assert_eq!(received, vec![f64::from(comm.rank().0); 4 * 17]);
    });
}

#[test]
fn test_horovod_alltoall_zero_splits() {
    on_all(|comm| {
        let splits = if comm.rank().0 == 0 {
            [0, 0, 0, 0]
        } else {
            [1, 0, 1, 0]
        };
        let data = [comm.rank().0; 2];
        let received = comm.all_to_all_varcount(&data, &splits).unwrap();
        let expected: &[u32] = if comm.rank().0 % 2 == 0 {
            &[1, 2, 3]
        } else {
            &[]
        };
        assert_eq!(received.values, expected);
    });
}

#[test]
fn test_horovod_alltoall_equal_split_length_error() {
    let results = on_all(|comm| comm.all_to_all(&[1_u8; 5]).map(drop));
    for result in results {
        assert!(
            matches!(result, Err(CollectiveError::Invalid { .. })),
            "{result:?}"
        );
    }
}

#[test]
fn test_horovod_alltoall_splits_error() {
    let results = on_all(|comm| {
        comm.all_to_all_varcount(&[1_u8; 4], &[1, 1, 1, 2])
            .map(drop)
    });
    for result in results {
        assert!(
            matches!(result, Err(CollectiveError::Invalid { .. })),
            "{result:?}"
        );
    }
}

#[test]
fn test_horovod_alltoall_type_error() {
    let results = on_all(|comm| {
        if comm.rank().0 % 2 == 0 {
            comm.all_to_all(&[1_i32; 4]).map(drop)
        } else {
            comm.all_to_all(&[1_f32; 4]).map(drop)
        }
    });
    all_mismatch(results, &["i32", "f32"]);
}

#[test]
fn test_compression_fp16() {
    on_all(|comm| {
        let short = comm.with(Options::new().compression(Compression::F16));
        let mut data = vec![0.1_f32; 17];
        short.all_reduce(&mut data, ReduceOp::Average).unwrap();
        assert!(data.iter().all(|value| (value - 0.1).abs() < 1e-4));
        let exact = f16::from_f32(0.1);
        assert!(
            data.iter()
                .all(|value| *value == f16::from_f32(*value).to_f32()),
            "{exact}"
        );
    });
}

#[test]
fn test_broadcast_object() {
    on_all(|comm| {
        let mine = (comm.rank() == Rank(0))
            .then(|| vec![("hello".to_owned(), 123), ("0".to_owned(), 456)]);
        let all = comm.broadcast_object(mine, Rank(0)).unwrap();
        assert_eq!(all[0].1, 123);
    });
}

#[test]
fn test_allgather_object() {
    on_all(|comm| {
        let all = comm
            .all_gather_object(&(comm.rank().0, comm.rank().to_string()))
            .unwrap();
        let expected: Vec<(u32, String)> = (0..4).map(|rank| (rank, rank.to_string())).collect();
        assert_eq!(all, expected);
    });
}

/// The average still divides by the size: (n - 1) / n.
#[test]
fn test_horovod_join_allreduce() {
    on_all(|comm| {
        if comm.rank().0 != 1 {
            let mut data = vec![1.0_f32; cube(2)];
            comm.all_reduce(&mut data, ReduceOp::Average).unwrap();
            assert_eq!(data, vec![0.75; cube(2)]);
        }
        let last = comm.join().unwrap();
        assert_eq!(last, Rank(3));
    });
}

#[test]
fn test_horovod_join_allgather() {
    on_all(|comm| {
        if comm.rank().0 != 0 {
            let error = comm.all_gather(&[1_u8]).unwrap_err();
            assert!(error.to_string().contains("has joined"), "{error}");
        }
        comm.join().unwrap();
    });
}

#[test]
fn test_horovod_join_broadcast() {
    on_all(|comm| {
        if comm.rank().0 != 0 {
            let error = comm.broadcast(&mut [1_u8], Rank(0)).unwrap_err();
            assert!(error.to_string().contains("has joined"), "{error}");
            // With another root nothing is in the way.
            comm.broadcast(&mut [1_u8], Rank(1)).unwrap();
        }
        comm.join().unwrap();
    });
}

#[test]
fn test_horovod_join_last_joined_rank() {
    on_all(|comm| {
        for last in 0..SIZE {
            if comm.rank() == Rank(last) {
                comm.all_reduce(&mut [1_u8], ReduceOp::Sum).unwrap();
            }
            assert_eq!(comm.join(), Ok(Rank(last)));
        }
    });
}

#[test]
fn test_horovod_barrier() {
    use std::sync::atomic::{AtomicU32, Ordering};
    let came = AtomicU32::new(0);
    on_all(|comm| {
        for round in 1..=10 {
            came.fetch_add(1, Ordering::SeqCst);
            comm.barrier().unwrap();
            assert!(came.load(Ordering::SeqCst) >= SIZE * round);
            comm.barrier().unwrap();
        }
    });
}

#[test]
fn test_process_set_add_remove() {
    on_all(|comm| {
        for _ in 0..3 {
            let set = comm.group(&[Rank(0), Rank(1)]).unwrap();
            assert_eq!(set.is_some(), comm.rank().0 < 2);
            if let Some(set) = set {
                let mut data = [1_u8];
                set.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert_eq!(data, [2]);
            }
        }
        assert!(comm.group(&[Rank(0), Rank(0)]).is_err());
        assert!(comm.group(&[Rank(17)]).is_err());
    });
}

#[test]
fn test_timeline() {
    let traces = on_all(|comm| {
        let data = comm
            .named("test_allreduce")
            .all_reduce(vec![1.0_f32; 17], ReduceOp::Sum);
        data.wait().unwrap();
        comm.trace().unwrap()
    });
    let trace = traces[0].as_ref().unwrap();
    assert!(trace.contains("\"all_reduce.test_allreduce\""), "{trace}");
    assert!(trace.contains("\"NEGOTIATE_ALL_REDUCE\""), "{trace}");
    serde_json::from_str::<serde_json::Value>(trace).unwrap();
}

#[test]
fn test_orthogonal() {
    on_all(|comm| {
        let mut data = vec![0.0_f64; 4];
        data[comm.rank().index()] = 2.0;
        comm.all_reduce(&mut data, ReduceOp::Adasum).unwrap();
        assert!(
            data.iter().all(|value| (value - 2.0).abs() < 1e-12),
            "{data:?}"
        );
    });
}

#[test]
fn test_parallel() {
    on_all(|comm| {
        let mut data = vec![1.25_f32; 4096];
        comm.all_reduce(&mut data, ReduceOp::Adasum).unwrap();
        assert!(data.iter().all(|value| (value - 1.25).abs() < 1e-6));
    });
}

#[test]
fn test_stability() {
    on_all(|comm| {
        // Tiny and large values, and nothing at all: no NaN comes out.
        for value in [1e-30_f32, 1e18, 0.0] {
            let mut data = vec![value * (1.0 + comm.rank().0 as f32); 64];
            comm.all_reduce(&mut data, ReduceOp::Adasum).unwrap();
            assert!(
                data.iter().all(|value| value.is_finite()),
                "{value}: {data:?}"
            );
        }
    });
}
