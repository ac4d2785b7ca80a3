//! Named operations: started in another order on each rank, fused, disagreed about; with late or lost ranks in `lost.rs` and `gone.rs`.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

#[path = "../common/mod.rs"]
mod common;
mod gone;
mod lost;

use std::time::{Duration, Instant};

use common::{Fault, Group, Kind, LONG, at_once, run, until};
use kolo_collectives::operation::OperationKind;
use kolo_collectives::{CollectiveError, Communicator, Handle, ReduceOp};
use kolo_transport::ids::{CallId, Rank};

/// Started in another order on each rank, beside operations without names. While the first two run, the rest gets ready; then it is few
/// operations. With a threshold of 0 it is one for each.
///
/// Horovod: `test_barrier_with_multiple_collectives`, `test_horovod_allreduce_async_fused`, and those of allgather and reducescatter.
#[test]
fn names_may_come_in_any_order_and_small_ones_are_fused_with_their_like() {
    const COUNT: usize = 100;
    for (kind, world, is_fused) in [
        (Kind::Unix, 5_u32, true),
        (Kind::Shared, 3, true),
        (Kind::Unix, 2, false),
    ] {
        let group = Group::new(kind, world);
        let counters = group.run(|comm| {
            comm.set_fusion_threshold(if is_fused { 1 << 20 } else { 0 });
            let me = comm.rank().0;
            let of = |rank: u32, index| vec![rank * 1000 + index as u32; index % 7];
            let mut order: Vec<usize> = (0..COUNT).collect();
            order.rotate_left(me as usize * 31 % COUNT);
            let start = |index: usize| {
                // Lengths of 0, fewer rows than ranks, and rows that can't be split evenly are among them.
                let rows = vec![index as u64; 2 * (index % 9)];
                let named = |letter| comm.named(format!("{letter}{index}"));
                let max = named('r').all_reduce(of(me, index), ReduceOp::Max);
                let scatter = named('s').reduce_scatter(rows, index % 9, ReduceOp::Sum);
                (index, max, named('g').all_gather(of(me, index)), scatter)
            };
            let handles: Vec<_> = order.into_iter().map(start).collect();
            let mut data = [1_u32];
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [world]);
            comm.barrier().unwrap();
            for (index, max, gather, scatter) in handles {
                assert_eq!(max.wait().unwrap(), of(world - 1, index));
                let all: Vec<u32> = (0..world).flat_map(|rank| of(rank, index)).collect();
                assert_eq!(gather.wait().unwrap(), all);
                let mine = comm.rows_of(index % 9, comm.rank()).len();
                let sum = index as u64 * u64::from(world);
                assert_eq!(scatter.wait().unwrap(), vec![sum; 2 * mine]);
            }
            comm.counters().operations
        });
        for (kind, counted) in counters.into_iter().flatten() {
            if kind != OperationKind::Barrier {
                let is_less = counted.done < COUNT as u64;
                assert_eq!(is_less, is_fused, "{kind}: {counted:?}");
            }
        }
    }
}

#[test]
fn ranks_that_disagree_about_a_name_all_hear_of_it_and_others_go_on() {
    let group = Group::new(Kind::Unix, 3);
    group.run(|comm| {
        let me = comm.rank().index();
        let wrong = comm
            .named("w")
            .all_reduce(vec![0.0_f32; 2 + me / 2], ReduceOp::Sum);
        let right = comm.named("b").all_reduce(vec![1_u8], ReduceOp::Sum);
        let failure = wrong.wait_or_reclaim().unwrap_err();
        let CollectiveError::Mismatch {
            rank,
            asked,
            other,
            other_asked,
        } = &failure.error
        else {
            panic!("{failure:?}");
        };
        assert_eq!((*rank, *other), (Rank(0), Rank(2)));
        assert_eq!(asked, "all_reduce(sum) of 2 f32 named `w`");
        assert_eq!(other_asked, "all_reduce(sum) of 3 f32");
        assert_eq!(failure.input, Some(vec![0.0; 2 + me / 2]));
        assert_eq!(right.wait().unwrap(), [3]);
        // The name is free again.
        let again = comm.named("w").all_reduce(vec![1.0_f32], ReduceOp::Max);
        assert_eq!(again.wait().unwrap(), [1.0]);
    });
}

#[test]
fn names_have_up_to_1024_bytes() {
    Group::new(Kind::Memory, 2).run(|comm| {
        let sum = |length| {
            comm.named("n".repeat(length))
                .all_reduce(vec![1], ReduceOp::Sum)
        };
        let error = sum(1025).wait().unwrap_err().to_string();
        let expected = "the name of an operation has 1025 bytes: it may have up to 1024";
        assert!(error.contains(expected), "{error}");
        assert_eq!(sum(1024).wait(), Ok(vec![2]));
    });
}

#[test]
fn named_operations_end_with_the_call_that_they_are_of() {
    let group = Group::new(Kind::Unix, 2);
    for comm in &group.members {
        comm.begin_call(CallId(1));
    }
    group.run(|comm| comm.named("a").barrier().wait().unwrap());
    let waiting = group.members[0]
        .named("b")
        .all_reduce(vec![1], ReduceOp::Sum);
    group.members[1].abort_call(CallId(1), "user code panicked");
    let error = waiting.wait().unwrap_err();
    let CollectiveError::PeerFailed {
        rank: Rank(1),
        reason,
        ..
    } = &error
    else {
        panic!("{error}");
    };
    assert_eq!(reason, "user code panicked");
    for comm in &group.members {
        comm.begin_call(CallId(2));
    }
    let waiting = group.members[1]
        .named("b")
        .all_reduce(vec![1], ReduceOp::Sum);
    group.members[0].begin_call(CallId(3));
    let error = waiting.wait().unwrap_err();
    assert!(
        matches!(error, CollectiveError::PeerLeft { rank: Rank(0), .. }),
        "{error}"
    );
    group.members[1].begin_call(CallId(3));
    group.run(|comm| comm.named("b").barrier().wait().unwrap());
}

#[test]
fn a_rank_that_joined_takes_part_in_named_operations() {
    let group = Group::new(Kind::Unix, 3);
    group.run(|comm| {
        for epoch in 0..3 {
            let me = comm.rank().0;
            let batches = (me + epoch) % 3;
            for batch in 0..batches {
                let with_data = (0..3).filter(|rank| (rank + epoch) % 3 > batch).count() as u32;
                let sum = comm.named("sum").all_reduce(vec![1_u32], ReduceOp::Sum);
                let least = comm.named("min").all_reduce(vec![5_i8], ReduceOp::Min);
                let all = comm.named("all").all_gather_varcount(vec![me]);
                assert_eq!(sum.wait().unwrap(), [with_data]);
                assert_eq!(least.wait().unwrap(), [5]);
                assert_eq!(all.wait().unwrap().values.len(), with_data as usize);
            }
            comm.join().unwrap();
        }
    });
}

/// Operations that take several numbers, beside others, one after the other.
#[test]
fn operations_in_several_parts_keep_their_place() {
    Group::new(Kind::Unix, 2).run(|comm| {
        for round in 0..5 {
            let buffers = vec![vec![2.0_f32; 3]; 3];
            let adasum = comm.named("adasum");
            let adasum = adasum.all_reduce_grouped(buffers.clone(), ReduceOp::Adasum);
            let object = comm.named("object").all_gather_object(round);
            let sum = comm.named("sum").all_reduce(vec![1], ReduceOp::Sum);
            assert_eq!(adasum.wait().unwrap(), buffers);
            assert_eq!(object.wait().unwrap(), [round; 2]);
            assert_eq!(sum.wait().unwrap(), [2]);
        }
    });
}

/// A rank that goes on to its next call without waiting for its handles leaves the others, and not out of step.
#[test]
fn a_rank_that_leaves_a_call_early_is_in_step_in_the_next() {
    let group = Group::new(Kind::Unix, 2);
    for round in 0..30 {
        group.run(|comm| {
            comm.begin_call(CallId(2 * round));
            let early = u64::from(comm.rank().0) == round % 2;
            for index in 0..4 {
                let handle = comm
                    .named(format!("t{index}"))
                    .all_reduce(vec![1; 50], ReduceOp::Sum);
                if early {
                    continue;
                }
                match handle.wait() {
                    Ok(sum) => assert_eq!(sum, [2; 50]),
                    Err(error) => assert!(
                        !matches!(error, CollectiveError::Mismatch { .. }),
                        "{error}"
                    ),
                }
            }
        });
        group.run(|comm| {
            comm.begin_call(CallId(2 * round + 1));
            let sum = comm.named("t0").all_reduce(vec![5; 50], ReduceOp::Sum);
            assert_eq!(sum.wait(), Ok(vec![10; 50]));
        });
    }
}
