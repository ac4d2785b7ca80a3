//! Factors, compression, shapes, objects and handles.

use super::*;

/// Of one rank alone, of a reduce on its root, and of negative integers, which are truncated toward zero: the rest is in
/// `factors_are_applied_to_every_type`.
#[test]
fn factors_are_applied_before_and_after() {
    for world in [1, 3, 8] {
        Group::new(Kind::Memory, world).run(|comm| {
            let me = comm.rank().0 as i32 + 1;
            let scaled = comm.with(Options::new().prescale(4.0));
            let mut data = [me; 5];
            scaled.reduce(&mut data, ReduceOp::Max, Rank(0)).unwrap();
            let most = 4 * world as i32;
            assert_eq!(data, [if comm.rank() == Rank(0) { most } else { me }; 5]);
            let mut data = [-3, 5, 7];
            let halved = comm.with(Options::new().prescale(0.5).postscale(3.0));
            halved.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [-1, 2, 3].map(|half| 3 * half * world as i32));
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

/// Horovod: `test_broadcast_object` and `test_allgather_object`, for process sets as well.
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
        if let Some(ends) = comm.group(&[Rank(2), Rank(0)]).unwrap() {
            let mine = (me == 0).then(|| me.to_string());
            assert_eq!(ends.broadcast_object(mine, Rank(1)).unwrap(), "0");
            assert_eq!(
                ends.all_gather_object(&(me, 'a')).unwrap(),
                [(2, 'a'), (0, 'a')]
            );
        }
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
    });
}

/// Operations without names run in one order. Those with names may run in any order, and beside each other.
#[test]
fn every_operation_can_be_started_with_a_name_and_without() {
    let group = Group::new(Kind::Unix, 3);
    group.run(|comm| each_started(comm, |_| comm.start()));
    group.run(|comm| each_started(comm, |name| comm.named(name)));
}

fn each_started(comm: &Communicator, start: impl Fn(&str) -> Start) {
    let me = comm.rank().index();
    let root = Rank(1);
    let is_root = comm.rank() == root;
    let data = if is_root { vec![1_u8, 2, 3] } else { vec![] };
    let counts = if is_root { vec![0, 1, 2] } else { vec![] };
    let sum = start("sum").all_reduce(vec![1_i32; 4], ReduceOp::Sum);
    let reduced = start("reduce").reduce(vec![1_u32], ReduceOp::Sum, root);
    let scattered = start("rows").reduce_scatter(vec![1_u32; 4], 4, ReduceOp::Sum);
    let gathered = start("gather").all_gather(vec![me as u16]);
    let varied = start("varied").all_gather_varcount(vec![1_i8; me]);
    let at_root = start("at root").gather(vec![me as u16], root);
    let varied_at_root = start("varied at root").gather_varcount(vec![me as u16; me], root);
    let part = start("part").scatter(data.clone(), 1, root);
    let varied_part = start("varied part").scatter_varcount(data, counts, root);
    let spread = start("spread").broadcast(vec![me as f64], root);
    let exchanged = start("exchange").all_to_all(vec![me as u32; 3]);
    let parts = start("parts").all_to_all_varcount(vec![me as u32; 3], vec![1, 0, 2]);
    let met = start("barrier").barrier();
    let object = start("object").broadcast_object(is_root.then(|| "it".to_owned()), root);
    let objects = start("objects").all_gather_object(me);
    let buffers = vec![vec![1_i32], vec![2; 2]];
    let grouped = start("buffers").all_reduce_grouped(buffers, ReduceOp::Product);
    let gathers = start("gathers").all_gather_grouped(vec![vec![me as u8; me], vec![1]]);
    let scatters =
        start("scatters").reduce_scatter_grouped(vec![(vec![1_u64; 3], 3)], ReduceOp::Sum);
    assert_eq!(sum.wait().unwrap(), [3; 4]);
    assert_eq!(reduced.wait().unwrap(), [if is_root { 3 } else { 1 }]);
    assert_eq!(scattered.wait().unwrap(), vec![3; [2, 1, 1][me]]);
    assert_eq!(gathered.wait().unwrap(), [0, 1, 2]);
    assert_eq!(varied.wait().unwrap().counts, [0, 1, 2]);
    assert_eq!(at_root.wait().unwrap(), is_root.then(|| vec![0, 1, 2]));
    assert_eq!(varied_at_root.wait().unwrap().is_some(), is_root);
    assert_eq!(part.wait().unwrap(), [me as u8 + 1]);
    assert_eq!(varied_part.wait().unwrap().len(), me);
    assert_eq!(spread.wait().unwrap(), [1.0]);
    assert_eq!(exchanged.wait().unwrap(), [0, 1, 2]);
    assert_eq!(parts.wait().unwrap().counts, [[1, 0, 2][me]; 3]);
    met.wait().unwrap();
    assert_eq!(object.wait().unwrap(), "it");
    assert_eq!(objects.wait().unwrap(), [0, 1, 2]);
    assert_eq!(grouped.wait().unwrap(), [vec![1], vec![8; 2]]);
    assert_eq!(gathers.wait().unwrap()[0].values, [1, 2, 2]);
    assert_eq!(scatters.wait().unwrap(), [[3]]);
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
fn values_that_fit_beside_their_number_arrive_as_those_that_do_not() {
    fn check<T: Value>(group: &Group, lengths: std::ops::RangeInclusive<usize>) {
        group.run(|comm| {
            for length in lengths.clone() {
                if comm.rank() == Rank(0) {
                    comm.send(&input::<T>(7, length), Rank(1)).unwrap();
                } else {
                    let received = comm.receive::<T>(Rank(0)).unwrap();
                    assert_eq!(received, input::<T>(7, length), "{length}");
                }
            }
        });
    }
    for kind in [Kind::Memory, Kind::Unix] {
        let group = Group::new(kind, 2);
        check::<u8>(&group, 1022..=1026);
        check::<bool>(&group, 1022..=1026);
        check::<f16>(&group, 510..=514);
        check::<f64>(&group, 0..=130);
    }
}
