//! Calls that fail, begin or end, and operations that are given up.

#![allow(
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::float_cmp,
    clippy::unwrap_used
)]

mod common;

use std::sync::mpsc;
use std::time::{Duration, Instant};

use common::{Group, Kind, LONG, force, others, sum};
use kolo_collectives::schedule::Algorithm;
use kolo_collectives::{CollectiveError, Communicator, ReduceOp, local_group};
use kolo_transport::ids::{CallId, Rank};

/// Also ranks without a link to the failed one hear its name, and not that of the rank in between, whose own code may do nothing.
#[test]
fn a_rank_that_fails_a_call_ends_it_on_all_and_the_next_call_works() {
    for (kind, world, ring) in [
        (Kind::Memory, 2_u32, false),
        (Kind::Memory, 5, false),
        // As it is, whatever lanes a run of all tests is over: their links are counted.
        (Kind::Narrow(1 << 16), 8, true),
        (Kind::Unix, 3, false),
        (Kind::Unix, 8, false),
    ] {
        // Also a rank to which nobody can make a link, and one that can make none.
        for fails in [0, world - 1, world / 2] {
            let group = Group::new(kind, world);
            if ring {
                force(&group, Algorithm::Ring);
                group.run(|comm| sum(comm, 100).unwrap());
                assert_eq!(group.links(), 8);
            }
            let begun = Instant::now();
            for call in 1..=6 {
                let results = group.run(|comm| {
                    comm.begin_call(CallId(call));
                    assert_eq!(comm.last_failure(), None);
                    if call % 2 == 0 {
                        return sum(comm, 50_000);
                    }
                    // In the first call before any link is there, later in the middle of the call.
                    if call > 1 {
                        // It may be over before the first operation is, on ranks that are slow.
                        sum(comm, 10)?;
                    }
                    if comm.rank() == Rank(fails) {
                        comm.abort_call(CallId(call), "user code said no");
                        return sum(comm, 50_000);
                    }
                    let result = sum(comm, 50_000);
                    assert_eq!(comm.last_failure(), result.clone().err());
                    if call == 3 {
                        // Its user code gives up as well; its own notice is an echo.
                        comm.abort_call(CallId(call), "all_reduce failed");
                    }
                    result
                });
                if call % 2 == 0 {
                    assert!(results.iter().all(Result::is_ok), "{results:?}");
                    continue;
                }
                let aborted = results[fails as usize].clone().unwrap_err();
                assert!(
                    matches!(aborted, CollectiveError::Aborted { .. }),
                    "{aborted}"
                );
                for result in others(results, fails) {
                    let expected = CollectiveError::PeerFailed {
                        rank: Rank(fails),
                        call: CallId(call),
                        reason: "user code said no".to_owned(),
                    };
                    let place = format!("{kind:?} world {world} fails {fails} call {call}");
                    assert_eq!(result, Err(expected), "{place}");
                }
            }
            assert!(begun.elapsed() < LONG / 2);
        }
    }
}

#[test]
fn an_abort_ends_an_operation_that_is_under_way_on_another_thread() {
    let group = Group::new(Kind::Unix, 2);
    let comm = &group.members[0];
    comm.begin_call(CallId(9));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| comm.barrier());
        // An operation of another thread has its turn after the barrier; this one waits for it to begin.
        while comm.last_failure().is_none() {
            comm.abort_call(CallId(9), "cancelled by the driver");
            std::thread::yield_now();
        }
        assert_eq!(
            waiting.join().unwrap(),
            Err(CollectiveError::Aborted {
                reason: "cancelled by the driver".to_owned()
            })
        );
    });
    // The peer, which comes later, hears of it.
    let peer = &group.members[1];
    peer.begin_call(CallId(9));
    let error = peer.barrier().unwrap_err();
    assert_eq!(error.culprit_rank(), Some(Rank(0)), "{error}");
    // An abort of another call than the present one does nothing.
    for comm in &group.members {
        comm.begin_call(CallId(10));
        comm.abort_call(CallId(9), "late");
    }
    group.run(|comm| comm.barrier().unwrap());
}

#[test]
fn a_rank_in_another_call_is_named_and_the_later_call_works() {
    let group = Group::new(Kind::Unix, 3);
    group.run(|comm| {
        comm.begin_call(CallId(4));
        comm.barrier().unwrap();
    });
    // Rank 0 runs call 5 alone; the others are in call 6 and wait there for rank 0.
    let results = group.run(|comm| {
        if comm.rank() == Rank(0) {
            comm.begin_call(CallId(5));
            let alone = sum(comm, 100_000);
            comm.abort_call(CallId(5), "it failed");
            comm.begin_call(CallId(6));
            sum(comm, 100_000).unwrap();
            alone
        } else {
            comm.begin_call(CallId(6));
            sum(comm, 100_000)
        }
    });
    let error = results[0].clone().unwrap_err();
    assert!(matches!(error, CollectiveError::PeerLeft { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("call 6") && text.contains("call 5"), "{text}");
    assert_eq!(results[1..], [Ok(()), Ok(())]);
}

#[test]
fn a_call_that_begins_ends_the_operation_of_the_one_before() {
    let group = Group::new(Kind::Unix, 2);
    let comm = &group.members[0];
    std::thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        let waiting = scope.spawn(move || {
            sender.send(()).unwrap();
            comm.barrier()
        });
        receiver.recv().unwrap();
        let mut call = 0;
        while !waiting.is_finished() {
            call += 1;
            comm.begin_call(CallId(call));
            std::thread::yield_now();
        }
        let error = waiting.join().unwrap().unwrap_err();
        assert!(matches!(error, CollectiveError::Aborted { .. }), "{error}");
    });
}

#[test]
fn an_operation_that_is_dropped_is_cancelled_on_all_ranks() {
    let group = Group::new(Kind::Unix, 3);
    group.run(|comm| sum(comm, 10).unwrap());
    let results = group.run(|comm| {
        if comm.rank() != Rank(2) {
            return sum(comm, 300_000);
        }
        poll_once_and_drop(comm);
        Ok(())
    });
    for result in others(results, 2) {
        let error = result.unwrap_err();
        assert_eq!(error.culprit_rank(), Some(Rank(2)), "{error}");
        assert!(error.to_string().contains("was cancelled"), "{error}");
    }
    group.run(|comm| sum(comm, 300_000).unwrap());
}

/// Polls an operation, on no runtime at all, and drops it.
fn poll_once_and_drop(comm: &Communicator) {
    let mut data = vec![1.0_f64; 300_000];
    let mut operation = Box::pin(comm.all_reduce_async(&mut data, ReduceOp::Sum));
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(operation.as_mut().poll(&mut cx).is_pending());
    drop(operation);
    assert!(data.iter().all(|value| *value == 1.0));
}

#[tokio::test]
async fn async_forms_share_one_thread() {
    let group = local_group(4).unwrap();
    let tasks: Vec<_> = group
        .into_iter()
        .map(|comm| {
            tokio::spawn(async move {
                let me = i64::from(comm.rank().0);
                let mut data = vec![me; 100_000];
                comm.all_reduce_async(&mut data, ReduceOp::Sum).await?;
                assert_eq!(data, vec![6; 100_000]);
                comm.broadcast_async(&mut data, Rank(2)).await?;
                assert_eq!(comm.all_gather_async(&[me]).await?, [0, 1, 2, 3]);
                let gathered = comm
                    .all_gather_varcount_async(&vec![me; me as usize])
                    .await?;
                assert_eq!(gathered.values, [1, 2, 2, 3, 3, 3]);
                comm.barrier_async().await
            })
        })
        .collect();
    for task in tasks {
        assert_eq!(task.await.unwrap(), Ok(()));
    }
}

/// A blocking operation on the only thread of a runtime can't work, but it ends.
#[tokio::test]
async fn operations_in_async_code_end_by_their_deadline() {
    let group = local_group(2).unwrap();
    group[0].set_timeout(Duration::from_millis(30));
    for result in [group[0].barrier_async().await, group[0].barrier()] {
        let error = result.unwrap_err();
        assert_eq!(error.culprit_rank(), Some(Rank(1)), "{error}");
    }
}

#[test]
fn an_operation_waits_for_its_turn_no_longer_than_its_deadline() {
    let group = Group::new(Kind::Memory, 2);
    let comm = &group.members[1];
    std::thread::scope(|scope| {
        let first = scope.spawn(|| sum(comm, 10));
        // The first one has its turn when it makes its link. Rank 0 never comes.
        while group.links() == 0 {
            std::thread::yield_now();
        }
        comm.set_timeout(Duration::from_millis(20));
        let error = comm.barrier().unwrap_err();
        assert!(
            matches!(&error, CollectiveError::Deadline { late, .. } if late.is_empty()),
            "{error}"
        );
        assert!(
            error.to_string().contains("an earlier operation"),
            "{error}"
        );
        comm.rank_lost(Rank(0), "the test is over");
        assert_eq!(
            first.join().unwrap().unwrap_err().culprit_rank(),
            Some(Rank(0))
        );
    });
}
