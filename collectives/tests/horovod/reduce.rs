//! Reductions.

use super::*;

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
