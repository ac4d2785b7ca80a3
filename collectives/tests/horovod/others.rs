//! Compression, ranks without data, process sets, timeline, Adasum.

use super::*;

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
