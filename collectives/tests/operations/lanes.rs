//! Every operation over the lanes between hosts, which most other tests don't use.

use super::*;

const KINDS: [Kind; 2] = [Kind::Tls, Kind::Quic];

/// Those that `matrix.rs` has, by operator and as they are.
fn check_common<T: Value>(comm: &Communicator, length: usize, ops: &[ReduceOp]) {
    let (me, world) = (comm.rank().0, comm.world_size());
    let what = format!("{length} {} in a world of {world}", T::DTYPE);
    for &op in ops {
        if op == ReduceOp::Adasum || !op.allows(T::DTYPE) {
            continue;
        }
        let expected = combined::<T>(op, 0..world, length);
        let mut data = input::<T>(me, length);
        comm.all_reduce(&mut data, op).unwrap();
        assert_eq!(data, expected, "all_reduce({op}) of {what}");
        // One alone, and two that may be fused.
        let names = ["one", "two"].map(|name| {
            let named = comm.named(format!("{name} {op}"));
            named.all_reduce(input::<T>(me, length), op)
        });
        for named in names {
            assert_eq!(named.wait().unwrap(), expected, "named {op} of {what}");
        }
    }
    let root = Rank((length as u32 + 1) % world);
    let mut data = input::<T>(me, length);
    comm.broadcast(&mut data, root).unwrap();
    assert_eq!(data, input::<T>(root.0, length), "broadcast of {what}");

    let all: Vec<T> = (0..world).flat_map(|rank| input(rank, length)).collect();
    let gathered = comm.all_gather(&input::<T>(me, length)).unwrap();
    assert_eq!(gathered, all, "all_gather of {what}");

    let share = |rank: u32| (length + rank as usize * 3) % (length + 2);
    let gathered = comm
        .all_gather_varcount(&input::<T>(me, share(me)))
        .unwrap();
    let expected = Gathered {
        values: (0..world)
            .flat_map(|rank| input(rank, share(rank)))
            .collect(),
        counts: (0..world).map(share).collect(),
    };
    assert_eq!(gathered, expected, "all_gather_varcount of {what}");
}

fn check<T: Value>(comm: &Communicator, length: usize) {
    check_common::<T>(comm, length, &ReduceOp::ALL);
    check_reductions::<T>(comm, length);
    check_moves::<T>(comm, length);
}

#[test]
fn every_operation_and_type_is_right_between_hosts() {
    for (kind, world) in KINDS
        .into_iter()
        .flat_map(|kind| [2, 3, 5].map(|world| (kind, world)))
    {
        let group = Group::new(kind, world);
        group.run(|comm| {
            for_all_types!(check(comm, 5));
            check::<f32>(comm, 0);
            // More than a frame, and not a whole number for each rank.
            check_common::<f64>(comm, 20_001, &[ReduceOp::Sum, ReduceOp::Average]);
            check_operators::<i32>(comm, 20_001, &[ReduceOp::Sum]);
            check_moves::<u16>(comm, 40_001);
        });
    }
}

#[test]
fn barriers_objects_and_ranks_that_join_are_right_between_hosts() {
    for (kind, world) in KINDS
        .into_iter()
        .flat_map(|kind| [2, 3, 5].map(|world| (kind, world)))
    {
        let group = Group::new(kind, world);
        let met = std::sync::atomic::AtomicU32::new(0);
        group.run(|comm| {
            use std::sync::atomic::Ordering::SeqCst;
            let me = comm.rank().0;
            for round in 1..=3 {
                met.fetch_add(1, SeqCst);
                comm.barrier().unwrap();
                assert_eq!(met.load(SeqCst), round * world, "nobody is missing");
                comm.named("met").barrier().wait().unwrap();
            }

            let last = world - 1;
            let text = "x".repeat(50_000);
            let mine = (me == last).then(|| (last, text.clone()));
            let got: (u32, String) = comm.broadcast_object(mine, Rank(last)).unwrap();
            assert_eq!(got, (last, text));
            let all = comm.all_gather_object(&vec![me; me as usize]).unwrap();
            let expected: Vec<Vec<u32>> =
                (0..world).map(|rank| vec![rank; rank as usize]).collect();
            assert_eq!(all, expected);

            // Each rank has one operation more than the one before it.
            for round in 0..=me {
                let mut data = [i64::from(me) + 1];
                comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                let with_data = (round..world).map(|rank| i64::from(rank) + 1);
                assert_eq!(data, [with_data.sum::<i64>()], "round {round}");
            }
            assert_eq!(comm.join(), Ok(Rank(last)));
            // It is usable after that.
            let mut data = [1_u8];
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [world as u8]);
        });
    }
}
