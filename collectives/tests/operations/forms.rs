//! Factors, objects, handles and names.

use super::*;

/// Horovod: the rows with `prescale` and `postscale` of all-reduces, reduce-scatters and grouped reduce-scatters. Of integers the scaled
/// value is truncated toward zero: the input, or the result.
#[test]
fn factors_are_applied_to_every_type() {
    fn scales<T: Element>(comm: &Communicator, value: T, expected: T) {
        let mut data = [value; 17];
        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [expected; 17], "{}", T::DTYPE);
        let part = comm.reduce_scatter(&[value; 16], 8, ReduceOp::Sum).unwrap();
        assert_eq!(part, [expected; 4], "{}", T::DTYPE);
        let buffers: [(&[T], usize); 2] = [(&[value; 16], 8), (&[value; 4], 4)];
        let parts = comm.reduce_scatter_grouped(&buffers, ReduceOp::Sum);
        assert_eq!(parts.unwrap(), [vec![expected; 4], vec![expected]]);
    }
    macro_rules! each_scales {
        ($comm:expr, $value:expr, $whole:expr, $real:expr, $($integer:ty)*) => {
            $(scales($comm, $value as $integer, $whole as $integer);)*
            scales($comm, f16::from_f32($value), f16::from_f32($real));
            scales($comm, bf16::from_f32($value), bf16::from_f32($real));
            scales($comm, $value, $real);
            scales($comm, f64::from($value), f64::from($real));
        };
    }
    Group::new(Kind::Unix, 4).run(|comm| {
        for (options, whole, real) in [
            (Options::new().prescale(0.5), 4, 6.0),
            (Options::new().postscale(0.125), 1, 1.5),
        ] {
            let scaled = &comm.with(options);
            each_scales!(scaled, 3.0_f32, whole, real, u8 i8 u16 i16 u32 i32 u64 i64);
        }
    });
    for world in [1, 3] {
        Group::new(Kind::Memory, world).run(|comm| {
            let times = world as i32;
            let scaled = comm.with(Options::new().prescale(0.5).postscale(3.0));
            let mut data = [-3, 5, 7];
            scaled.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [-3 * times, 6 * times, 9 * times]);
            let mut data = [5];
            scaled.reduce(&mut data, ReduceOp::Max, Rank(0)).unwrap();
            assert_eq!(data, [if comm.rank() == Rank(0) { 6 } else { 5 }]);
        });
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
    for kind in [Kind::Memory, Kind::Unix] {
        let around = [
            (DType::U8, 1022..=1026),
            (DType::Bool, 1022..=1026),
            (DType::F16, 510..=514),
            (DType::F64, 0..=130),
        ];
        let samples = around.into_iter().flat_map(|(dtype, lengths)| {
            let lengths: Vec<usize> = lengths.collect();
            let sends = cases(kind, 2, &[dtype], &lengths).into_iter();
            sends.filter(|sample| sample.what == What::SendReceive)
        });
        run(&Group::new(kind, 2), &samples.collect::<Vec<_>>());
    }
}

/// Horovod: `test_horovod_allreduce_duplicate_name_error`, those of allgather, broadcast and reducescatter, and `test_duplicate_names`: a rank
/// uses a name twice, which fails there and leaves the first use alone.
#[test]
fn a_name_that_is_under_way_is_refused_and_goes_on() {
    Group::new(Kind::Unix, 4).run(|comm| {
        let named = comm.named("duplicate_name");
        for hasty in 0..4 {
            let start = || named.all_reduce(vec![1.0_f32; 4], ReduceOp::Sum);
            let first = (comm.rank() == Rank(hasty)).then(start);
            if first.is_some() {
                // Another operation has this one's name as well.
                for again in [start(), named.all_to_all(vec![0.0; 4])] {
                    let error = again.wait().unwrap_err().to_string();
                    assert!(error.contains("under way on this rank already"), "{error}");
                }
            }
            // The first can't end before that rank has tried again.
            comm.barrier().unwrap();
            let first = first.unwrap_or_else(start);
            assert_eq!(first.wait().unwrap(), [4.0; 4], "{hasty}");
        }
    });
}
