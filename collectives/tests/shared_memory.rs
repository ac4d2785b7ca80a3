//! Ranks that share memory, in threads, with every kind of trouble. Those that are killed are in `kills.rs`.

#![allow(clippy::unwrap_used, clippy::cast_sign_loss, clippy::float_cmp)]

mod common;

use std::time::Duration;

use common::{Group, Kind, LONG, run};
use kolo_collectives::schedule::{Algorithm, Tuning};
use kolo_collectives::{CollectiveError, Communicator, ReduceOp};
use kolo_transport::ids::{CallId, Rank};

fn lanes_of_last(comm: &Communicator) -> Vec<&'static str> {
    comm.records().last().unwrap().lanes.names().collect()
}

#[test]
fn where_one_rank_shares_nothing_all_use_links() {
    for odd in 0..3 {
        let group = Group::new(Kind::Unshared(odd), 3);
        group.run(|comm| {
            for _ in 0..3 {
                let mut data = [1_i32; 10];
                comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert_eq!(data, [3; 10]);
            }
            assert_eq!(lanes_of_last(comm), ["shm-ring"]);
        });
    }
}

/// The attempt goes on where it was. The others ask each other meanwhile what they wait for.
#[test]
fn a_first_operation_that_fails_does_not_end_the_attempt_to_share() {
    for late in 0..3 {
        let group = Group::new(Kind::Shared, 3);
        group.set_timeout(Duration::from_millis(150));
        let present = || (group.members.iter()).filter(|comm| comm.rank() != Rank(late));
        for result in run(present(), Communicator::barrier) {
            let error = result.unwrap_err();
            assert_eq!(error.culprit_rank(), Some(Rank(late)), "{error}");
        }
        group.set_timeout(LONG);
        let error = group.members[late as usize].barrier().unwrap_err();
        assert_eq!(error.culprit_rank(), Some(Rank(late)), "{error}");
        group.run(|comm| {
            let mut data = [1_u32; 10];
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [3; 10]);
            assert!(lanes_of_last(comm).contains(&"shm"), "late {late}");
        });
    }
}

#[test]
fn an_algorithm_that_is_asked_for_is_used_over_the_links() {
    let group = Group::new(Kind::Shared, 3);
    group.run(|comm| {
        let mut data = [1_i64; 10];
        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        comm.set_tuning(Tuning {
            force: Some(Algorithm::Ring),
            ..Tuning::default()
        });
        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(lanes_of_last(comm), ["shm-ring"]);
        comm.set_tuning(Tuning::default());
        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [27; 10]);
        assert!(lanes_of_last(comm).contains(&"shm"));
    });
}

#[test]
fn buffers_are_reduced_in_place_and_keep_their_input_when_it_fails() {
    let group = Group::new(Kind::Shared, 3);
    group.run(|comm| {
        for length in [0, 1, 300_001] {
            let mut buffer = comm.buffer::<f64>(length).unwrap();
            assert!(buffer.is_shared());
            assert!(buffer.iter().all(|value| *value == 0.0));
            buffer.fill(f64::from(comm.rank().0));
            for sum in [3.0, 9.0] {
                comm.all_reduce_buffer(&mut buffer, ReduceOp::Sum).unwrap();
                assert!(buffer.iter().all(|value| *value == sum));
            }
            // It is a slice for all else.
            comm.broadcast(&mut buffer, Rank(1)).unwrap();
        }
        let flags = comm.buffer::<bool>(5).unwrap();
        assert!(!flags.is_shared());
    });
    let mut buffers: Vec<_> = group.run(|comm| {
        let mut buffer = comm.buffer::<i32>(1000).unwrap();
        buffer.fill(7);
        buffer
    });
    group.set_timeout(Duration::from_millis(100));
    std::thread::scope(|scope| {
        for (comm, buffer) in group.members.iter().zip(&mut buffers).take(2) {
            scope.spawn(move || {
                let error = comm.all_reduce_buffer(buffer, ReduceOp::Sum).unwrap_err();
                assert_eq!(error.culprit_rank(), Some(Rank(2)), "{error}");
                assert!(buffer.iter().all(|value| *value == 7));
            });
        }
    });
    // The late one hears of it, and then it works.
    let error = group.members[2].all_reduce_buffer(&mut buffers[2], ReduceOp::Sum);
    let error = error.unwrap_err();
    assert_eq!(error.culprit_rank(), Some(Rank(2)), "{error}");
    group.set_timeout(LONG);
    std::thread::scope(|scope| {
        for (comm, buffer) in group.members.iter().zip(&mut buffers) {
            scope.spawn(move || {
                comm.all_reduce_buffer(buffer, ReduceOp::Sum).unwrap();
                assert!(buffer.iter().all(|value| *value == 21));
            });
        }
    });
    // A buffer outlives its communicator.
    drop(group);
    assert_eq!(buffers[0][999], 21);
}

#[test]
fn a_buffer_on_one_rank_and_a_slice_on_another_disagree() {
    let group = Group::new(Kind::Shared, 2);
    let errors = group.run(|comm| {
        let mut buffer = comm.buffer::<f32>(10).unwrap();
        if comm.rank() == Rank(0) {
            comm.all_reduce_buffer(&mut buffer, ReduceOp::Sum)
                .unwrap_err()
        } else {
            comm.all_reduce(&mut [0_f32; 10], ReduceOp::Sum)
                .unwrap_err()
        }
    });
    for error in errors {
        assert!(matches!(error, CollectiveError::Mismatch { .. }), "{error}");
    }
    group.run(|comm| comm.barrier().unwrap());
}

/// Also if all others are there already, and only wait for this rank's data.
#[test]
fn an_operation_of_a_call_that_was_aborted_here_does_not_end_well() {
    let group = Group::new(Kind::Shared, 3);
    let results = group.run(|comm| {
        comm.begin_call(CallId(1));
        comm.barrier().unwrap();
        let mut data = vec![1_u32; 50_000];
        if comm.rank() == Rank(1) {
            std::thread::sleep(Duration::from_millis(100));
            comm.abort_call(CallId(1), "no");
        }
        comm.all_reduce(&mut data, ReduceOp::Sum)
    });
    for (rank, result) in (0..).zip(results) {
        match result.unwrap_err() {
            CollectiveError::Aborted { .. } => assert_eq!(rank, 1),
            CollectiveError::PeerFailed { rank: failed, .. } => assert_eq!(failed, Rank(1)),
            other => panic!("{other}"),
        }
    }
}

#[tokio::test]
async fn tasks_share_memory_too() {
    let group = Group::new(Kind::Shared, 3);
    let tasks: Vec<_> = group
        .members
        .iter()
        .cloned()
        .map(|comm| {
            tokio::spawn(async move {
                for length in [1, 50_000, 3] {
                    let mut data = vec![i64::from(comm.rank().0); length];
                    comm.all_reduce_async(&mut data, ReduceOp::Sum).await?;
                    assert_eq!(data, vec![3; length]);
                }
                comm.barrier_async().await
            })
        })
        .collect();
    for task in tasks {
        assert_eq!(task.await.unwrap(), Ok(()));
    }
    // Its runtime may not be dropped in async code.
    tokio::task::spawn_blocking(move || drop(group))
        .await
        .unwrap();
}

#[test]
fn a_buffer_that_no_memory_can_hold_is_an_error_on_every_rank() {
    for kind in [Kind::Shared, Kind::Memory] {
        let group = Group::new(kind, 2);
        for length in [usize::MAX, usize::MAX / 8, 1 << 55] {
            for error in group.run(|comm| comm.buffer::<u64>(length).unwrap_err()) {
                assert!(matches!(error, CollectiveError::Invalid { .. }), "{error}");
                assert!(error.to_string().contains(&length.to_string()), "{error}");
            }
        }
        group.run(|comm| comm.barrier().unwrap());
    }
}

/// A handle takes the buffer and gives it back, with a name or without, whether it went well or not.
#[test]
fn buffers_go_through_handles() {
    for kind in [Kind::Shared, Kind::Unix] {
        let group = Group::new(kind, 2);
        group.run(|comm| {
            for start in [comm.start(), comm.named("sum")] {
                let mut buffer = comm.buffer::<i32>(1000).unwrap();
                let shared = buffer.is_shared();
                assert_eq!(shared, kind == Kind::Shared);
                buffer.fill(2);
                let buffer = start.all_reduce_buffer(buffer, ReduceOp::Sum).wait();
                let mut buffer = buffer.unwrap();
                assert!(buffer.iter().all(|value| *value == 4));
                assert_eq!(buffer.is_shared(), shared);
                let op = if comm.rank() == Rank(0) {
                    ReduceOp::Sum
                } else {
                    ReduceOp::Max
                };
                buffer[7] = 5;
                let failure = start.all_reduce_buffer(buffer, op).wait_or_reclaim();
                let failure = failure.err().unwrap();
                assert!(matches!(failure.error, CollectiveError::Mismatch { .. }));
                let buffer = failure.input.unwrap();
                assert_eq!((buffer[6], buffer[7]), (4, 5));
            }
        });
    }
}

/// Nobody else is late then.
#[test]
fn a_rank_that_does_not_get_to_know_whether_memory_is_shared_says_so() {
    let group = Group::new(Kind::Undecided(0), 2);
    group.set_timeout(Duration::from_millis(200));
    let errors = group.run(|comm| comm.barrier().unwrap_err());
    for error in &errors {
        assert_eq!(error.culprit_rank(), Some(Rank(0)), "{error}");
    }
    let why = errors[0].to_string();
    assert!(why.contains("does not know yet whether"), "{why}");
}

#[test]
fn a_buffer_of_another_communicator_is_reduced_as_any_memory() {
    Group::new(Kind::Shared, 2).run(|comm| {
        let other = comm.group(&[Rank(0), Rank(1)]).unwrap().unwrap();
        for length in [3, 1000, 100_000, 3 << 20] {
            let mut buffer = comm.buffer::<f32>(length).unwrap();
            buffer.fill(comm.rank().0 as f32);
            other.all_reduce_buffer(&mut buffer, ReduceOp::Sum).unwrap();
            assert!(buffer.iter().all(|value| *value == 1.0), "{length}");
            // And it is the first one's still.
            comm.all_reduce_buffer(&mut buffer, ReduceOp::Sum).unwrap();
            assert!(buffer.iter().all(|value| *value == 2.0), "{length}");
        }
    });
}
