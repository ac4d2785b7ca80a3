//! Who is there, compression, ranks without data, timeline.

use super::*;

#[test]
fn test_horovod_rank() {
    assert_eq!(on_all(|comm| comm.rank().0), [0, 1, 2, 3]);
}

#[test]
fn test_horovod_size() {
    assert_eq!(on_all(Communicator::world_size), [SIZE; 4]);
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

/// All but rank 1, which is in `join`.
fn sums_without_1<T: Value>(comm: &Communicator, length: usize) {
    let mut data = mine::<T>(comm, length);
    comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    let expected = combined::<T>(ReduceOp::Sum, [0, 2, 3], length);
    assert_eq!(data, expected, "{length} {}", T::DTYPE);
}

/// The average still divides by the size: (n - 1) / n.
#[test]
fn test_horovod_join_allreduce() {
    on_all(|comm| {
        if comm.rank().0 != 1 {
            each(of_numbers!(sums_without_1), |check, length| {
                check(comm, length);
            });
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

/// Horovod refuses a gather beside a rank that joined; here one of any lengths gets nothing of it.
#[test]
fn a_rank_that_joined_gives_nothing_to_gathers_and_takes_part_in_groups() {
    on_all(|comm| {
        if comm.rank().0 != 1 {
            let me = comm.rank().0;
            let all = comm
                .all_gather_grouped(&[&[me][..], &[], &[me; 2]])
                .unwrap();
            assert_eq!(all.len(), 3);
            assert_eq!(
                (&all[0].values[..], &all[0].counts[..]),
                (&[0, 2, 3][..], &[1, 0, 1, 1][..])
            );
            assert_eq!(all[1].counts, [0; 4]);
            assert_eq!(
                (&all[2].values[..], &all[2].counts[..]),
                (&[0, 0, 2, 2, 3, 3][..], &[2, 0, 2, 2][..])
            );
            let (four, five) = ([1_u64; 4], [2_u64; 5]);
            let buffers: [(&[u64], usize); 2] = [(&four, 4), (&five, 5)];
            let mine = comm
                .reduce_scatter_grouped(&buffers, ReduceOp::Sum)
                .unwrap();
            let rows = comm.rows_of(5, comm.rank()).len();
            assert_eq!(mine, [vec![3], vec![6; rows]]);
        }
        assert_eq!(comm.join().unwrap(), Rank(3));
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

/// Whether the trace of all so far has so many of these operations. Only rank 0 has it.
fn check_timeline(comm: &Communicator, count: usize) {
    let Some(trace) = comm.trace().unwrap() else {
        assert_ne!(comm.rank(), Rank(0));
        return;
    };
    assert_eq!(comm.rank(), Rank(0));
    assert!(trace.contains("\"NEGOTIATE_ALL_REDUCE\""), "{trace}");
    assert!(
        trace.contains("start_time_since_epoch_in_micros"),
        "{trace}"
    );
    let json: serde_json::Value = serde_json::from_str(&trace).unwrap();
    for rank in 0..SIZE {
        let events = json["traceEvents"].as_array().unwrap().iter();
        let of_rank = events
            .filter(|event| event["name"] == "all_reduce.test_allreduce" && event["pid"] == rank);
        assert_eq!(of_rank.count(), count, "rank {rank}: {trace}");
    }
}

/// Nothing is switched on or off, and nobody names a file: each trace has all so far. There are no cycles to be marked.
#[test]
fn test_timeline_api() {
    on_all(|comm| {
        for count in 1..=4 {
            let named = comm.named("test_allreduce");
            let sum = named.all_reduce(vec![1.0_f32, 2.0, 3.0], ReduceOp::Sum);
            assert_eq!(sum.wait().unwrap(), [4.0, 8.0, 12.0]);
            check_timeline(comm, count);
        }
        check_timeline(comm, 4);
    });
}
