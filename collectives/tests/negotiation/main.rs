//! Named operations: started in another order on each rank, fused, disagreed about; with late or lost ranks in `lost.rs`.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

#[path = "../common/mod.rs"]
mod common;
mod lost;

use std::time::{Duration, Instant};

use common::{Fault, Group, Kind, LONG, run, until};
use kolo_collectives::operation::OperationKind;
use kolo_collectives::{CollectiveError, Communicator, Handle, ReduceOp};
use kolo_transport::ids::{CallId, Rank};

/// Horovod: `test_barrier_with_multiple_collectives`.
#[test]
fn names_may_come_in_any_order_beside_operations_without_names() {
    for world in [1, 2, 3, 5] {
        let group = Group::new(Kind::Unix, world);
        group.run(|comm| {
            let me = comm.rank().index();
            for round in 0..10_usize {
                let count = 17;
                let handles: Vec<(usize, Handle<Vec<f64>>)> = (0..count)
                    .map(|index| {
                        // Another order on each rank, and in each round.
                        let name = (index * (1 + me) * 3 + round) % count;
                        let data = vec![name as f64; name];
                        (
                            name,
                            comm.named(format!("grad.{name}"))
                                .all_reduce(data, ReduceOp::Sum),
                        )
                    })
                    .collect();
                let mut data = [1_u32];
                comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert_eq!(data, [world]);
                comm.barrier().unwrap();
                for (name, handle) in handles {
                    let expected = vec![name as f64 * f64::from(world); name];
                    assert_eq!(handle.wait().unwrap(), expected);
                }
            }
        });
    }
}

/// Horovod: `test_timeline` and `test_timeline_api`. Nothing is switched on or off, and nobody names a file: each trace has all so far.
#[test]
fn traces_tell_names_and_how_long_they_were_negotiated() {
    Group::new(Kind::Unix, 4).run(|comm| {
        for count in 1..=3 {
            let named = comm.named("test_allreduce");
            let sum = named.all_reduce(vec![1.0_f32, 2.0, 3.0], ReduceOp::Sum);
            assert_eq!(sum.wait().unwrap(), [4.0, 8.0, 12.0]);
            let trace = comm.trace().unwrap();
            assert_eq!(trace.is_some(), comm.rank() == Rank(0));
            let Some(trace) = trace else { continue };
            assert!(trace.contains("\"NEGOTIATE_ALL_REDUCE\""), "{trace}");
            assert!(trace.contains("start_time_since_epoch_in_micros"));
            let json: serde_json::Value = serde_json::from_str(&trace).unwrap();
            for rank in 0..4 {
                let events = json["traceEvents"].as_array().unwrap().iter();
                let of_rank = events.filter(|event| {
                    event["name"] == "all_reduce.test_allreduce" && event["pid"] == rank
                });
                assert_eq!(of_rank.count(), count, "rank {rank}: {trace}");
            }
        }
    });
}

/// While the first two run, the rest gets ready; then it is few operations. With a threshold of 0 it is one for each.
#[test]
fn small_ones_are_fused() {
    for (threshold, fused) in [(1 << 20, true), (0, false)] {
        let group = Group::new(Kind::Unix, 2);
        let count = 200;
        let done = group.run(|comm| {
            comm.set_fusion_threshold(threshold);
            let handles: Vec<Handle<Vec<u32>>> = (0..count)
                .map(|index| {
                    comm.named(format!("t{index}"))
                        .all_reduce(vec![index; 10], ReduceOp::Sum)
                })
                .collect();
            for (index, handle) in (0..).zip(handles) {
                assert_eq!(handle.wait().unwrap(), vec![2 * index; 10]);
            }
            comm.counters()
                .operations
                .into_iter()
                .find(|(kind, _)| *kind == OperationKind::AllReduce)
                .unwrap()
                .1
        });
        for counted in done {
            assert_eq!(counted.bytes, 8000);
            if fused {
                assert!(counted.done < u64::from(count), "{counted:?}");
            } else {
                assert_eq!(counted.done, u64::from(count));
            }
        }
    }
}

#[test]
fn gathers_and_scatters_are_fused_with_their_like() {
    for kind in [Kind::Unix, Kind::Shared] {
        let world = 3_usize;
        let group = Group::new(kind, world as u32);
        let count = 100;
        let done = group.run(|comm| {
            let me = comm.rank().index();
            let mut order: Vec<usize> = (0..count).collect();
            order.rotate_left(me * 31);
            let mut handles: Vec<_> = order
                .into_iter()
                .map(|index| {
                    // Lengths of 0, fewer rows than ranks, and rows that can't be split evenly are among them.
                    let given = vec![(me * 1000 + index) as u32; index % 7];
                    let rows = vec![index as i64; 2 * (index % 9)];
                    let gather = comm.named(format!("g{index}")).all_gather(given);
                    let scatter = comm.named(format!("s{index}")).reduce_scatter(
                        rows,
                        index % 9,
                        ReduceOp::Sum,
                    );
                    (index, gather, scatter)
                })
                .collect();
            handles.sort_by_key(|(index, ..)| *index);
            for (index, gather, scatter) in handles {
                let all: Vec<u32> = (0..world)
                    .flat_map(|rank| vec![(rank * 1000 + index) as u32; index % 7])
                    .collect();
                assert_eq!(gather.wait().unwrap(), all, "{index}");
                let mine = comm.rows_of(index % 9, comm.rank()).len();
                let sum = vec![(world * index) as i64; 2 * mine];
                assert_eq!(scatter.wait().unwrap(), sum, "{index}");
            }
            [OperationKind::AllGather, OperationKind::ReduceScatter].map(|kind| {
                let operations = comm.counters().operations;
                let of_kind = operations.into_iter().find(|(of, _)| *of == kind);
                of_kind.unwrap().1.done
            })
        });
        for counted in done {
            assert!(
                counted.iter().all(|done| *done < count as u64),
                "{counted:?}"
            );
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
fn names_that_can_not_be_used_are_refused() {
    let group = Group::new(Kind::Memory, 2);
    let sum = |rank: usize, name: String| {
        let named = group.members[rank].named(name);
        named.all_reduce(vec![1], ReduceOp::Sum)
    };
    let longest = || "n".repeat(1024);
    let first = sum(0, longest());
    for (name, expected) in [
        (longest(), "is under way on this rank already"),
        (
            "n".repeat(1025),
            "the name of an operation has 1025 bytes: it may have up to 1024",
        ),
    ] {
        let error = sum(0, name).wait().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let other = sum(1, longest());
    assert_eq!((first.wait(), other.wait()), (Ok(vec![2]), Ok(vec![2])));
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
    let group = Group::new(Kind::Unix, 2);
    group.run(|comm| {
        for round in 0..5 {
            let buffers = vec![vec![2.0_f32; 3]; 3];
            let adasum = comm
                .named("adasum")
                .all_reduce_grouped(buffers.clone(), ReduceOp::Adasum);
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

/// Whatever the order of a group, whoever is its first rank, and whichever rank comes first.
#[test]
fn names_work_in_groups_of_any_order() {
    for kind in [Kind::Memory, Kind::Unix, Kind::Shared, Kind::Tls] {
        let group = Group::new(kind, 3);
        for (order, first) in [([2, 0, 1], 0), ([2, 1, 0], 2), ([1, 2, 0], 1)] {
            let begun = std::sync::Barrier::new(3);
            group.run(|comm| {
                let members = comm.group(&order.map(Rank)).unwrap().unwrap();
                let name = || members.named("a").all_gather(vec![comm.rank().0]);
                let started = (comm.rank() == Rank(first)).then(name);
                begun.wait();
                let all = started.unwrap_or_else(name).wait().unwrap();
                assert_eq!(all, order);
            });
        }
    }
}
