//! What happens when ranks die, come late, disagree, fail or leave.

#![allow(
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::float_cmp,
    clippy::unwrap_used
)]

mod common;

use std::sync::Barrier;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use common::{Fault, Group, Kind, LONG, run};
use kolo_collectives::schedule::{Algorithm, Tuning};
use kolo_collectives::{CollectiveError, Communicator, ReduceOp, local_group};
use kolo_transport::ids::{CallId, Rank};

/// Every other rank's result.
fn others<R>(results: Vec<R>, rank: u32) -> Vec<R> {
    results
        .into_iter()
        .enumerate()
        .filter(|(index, _)| *index != rank as usize)
        .map(|(_, result)| result)
        .collect()
}

fn force(group: &Group, algorithm: Algorithm) {
    for comm in &group.members {
        comm.set_tuning(Tuning {
            force: Some(algorithm),
            ..Tuning::default()
        });
    }
}

fn sum(comm: &Communicator, length: usize) -> Result<(), CollectiveError> {
    let input: Vec<f64> = (0..length).map(|index| index as f64).collect();
    let mut data = input.clone();
    let result = comm.all_reduce(&mut data, ReduceOp::Sum);
    match &result {
        Ok(()) => {
            let world = f64::from(comm.world_size());
            assert!(data.iter().zip(&input).all(|(a, b)| *a == world * b));
        }
        // F-2
        Err(_) => assert_eq!(data, input, "a failed operation leaves the input as it was"),
    }
    result
}

#[test]
fn a_rank_that_dies_in_the_middle_ends_all_survivors_with_its_name() {
    let length = 200_000;
    for kind in [Kind::Memory, Kind::Unix] {
        for algorithm in [Algorithm::Ring, Algorithm::Halving, Algorithm::Flat] {
            for dies in [0, 3, 4] {
                for after in [0, 10, 100_000, 700_000] {
                    let mut group = Group::new(kind, 5);
                    force(&group, algorithm);
                    let fault = Fault::kill();
                    group.set_fault(dies, &fault);
                    group.run(|comm| sum(comm, 10).unwrap());
                    fault.arm(after);
                    let begun = Instant::now();
                    let results = others(group.run(|comm| sum(comm, length)), dies);
                    assert!(
                        begun.elapsed() < LONG / 2,
                        "it ended by itself, not by the deadline"
                    );
                    for result in results {
                        let error = result.unwrap_err();
                        assert!(
                            matches!(&error, CollectiveError::PeerLost { .. }),
                            "{kind:?} {algorithm} {dies} {after}: {error}"
                        );
                        // The dying rank's view of its neighbours is wrong, and nobody believes it.
                        assert_eq!(error.culprit_rank(), Some(Rank(dies)), "{error}");
                        assert!(!error.is_retryable());
                    }
                    // It stays lost.
                    drop(group.members.remove(dies as usize));
                    for result in group.run(Communicator::barrier) {
                        assert_eq!(result.unwrap_err().culprit_rank(), Some(Rank(dies)));
                    }
                }
            }
        }
    }
}

#[test]
fn a_communicator_that_is_dropped_is_a_lost_rank() {
    let mut group = Group::new(Kind::Unix, 3);
    group.run(|comm| comm.barrier().unwrap());
    drop(group.members.remove(1));
    let results = group.run(|comm| comm.broadcast(&mut [1_i32; 100], Rank(1)));
    for result in results {
        let error = result.unwrap_err();
        assert_eq!(error.culprit_rank(), Some(Rank(1)), "{error}");
        assert!(error.to_string().contains("unix link ended"), "{error}");
    }
}

/// A rank may go as soon as it has what it needs; that is no failure of the others.
#[test]
fn a_rank_that_is_done_may_go() {
    for _ in 0..20 {
        let group = Group::new(Kind::Unix, 4);
        let members = group.members.clone();
        drop(group.members);
        std::thread::scope(|scope| {
            for comm in members {
                scope.spawn(move || {
                    comm.barrier().unwrap();
                    comm.all_reduce(&mut [1_i64; 10], ReduceOp::Max).unwrap();
                    drop(comm);
                });
            }
        });
    }
}

#[test]
fn a_loss_from_the_control_plane_ends_every_wait_at_once() {
    let group = Group::new(Kind::Unix, 4);
    let begun = Instant::now();
    let waiting = Barrier::new(4);
    std::thread::scope(|scope| {
        let threads: Vec<_> = group.members[..3]
            .iter()
            .map(|comm| {
                scope.spawn(|| {
                    waiting.wait();
                    sum(comm, 1000)
                })
            })
            .collect();
        waiting.wait();
        // Only one of them is told: the others hear it from it, or later from the control plane.
        group.members[1].rank_lost(Rank(3), "killed by signal 9");
        group.members[0].rank_lost(Rank(3), "killed by signal 9");
        group.members[2].rank_lost(Rank(3), "killed by signal 9");
        for thread in threads {
            assert_eq!(
                thread.join().unwrap(),
                Err(CollectiveError::PeerLost {
                    rank: Rank(3),
                    reason: "killed by signal 9".to_owned()
                })
            );
        }
    });
    assert!(begun.elapsed() < LONG / 2);
    // What comes later fails without a wait.
    let error = group.members[0].barrier().unwrap_err();
    assert_eq!(error.culprit_rank(), Some(Rank(3)));
}

#[test]
fn the_deadline_names_the_rank_that_did_not_come() {
    for world in [2_u32, 3, 8] {
        for late in [0, world - 1] {
            for algorithm in [Algorithm::Flat, Algorithm::Halving, Algorithm::Ring] {
                let group = Group::new(Kind::Memory, world);
                force(&group, algorithm);
                let warm = world % 2 == 0;
                if warm {
                    group.run(|comm| sum(comm, 50).unwrap());
                }
                group.set_timeout(Duration::from_millis(100));
                let present: Vec<&Communicator> = group
                    .members
                    .iter()
                    .filter(|comm| comm.rank() != Rank(late))
                    .collect();
                for result in run(present, |comm| sum(comm, 50)) {
                    let error = result.unwrap_err();
                    let CollectiveError::Deadline { late: named, .. } = &error else {
                        panic!("world {world} late {late} {algorithm}: {error}");
                    };
                    assert_eq!(*named, [Rank(late)], "world {world} {algorithm}: {error}");
                    assert!(error.is_retryable());
                    let text = error.to_string();
                    assert!(text.contains("all_reduce(sum) of 50 f64"), "{text}");
                }
            }
        }
    }
}

/// A leaf of the tree waits for its parent, which waits for the root: the root is named, not the parent.
#[test]
fn the_deadline_names_a_late_root_and_not_those_that_wait_for_it() {
    let group = Group::new(Kind::Unix, 8);
    group.set_timeout(Duration::from_millis(100));
    let results = run(&group.members[1..], |comm| {
        comm.broadcast(&mut [0_f32; 5], Rank(0))
    });
    for result in results {
        let error = result.unwrap_err();
        assert_eq!(error.culprit_rank(), Some(Rank(0)), "{error}");
    }
}

/// A rank that has come, and then stands still (as by SIGSTOP).
#[test]
fn the_deadline_names_a_rank_that_stopped_in_the_middle() {
    for algorithm in [Algorithm::Ring, Algorithm::Halving] {
        let group = Group::new(Kind::Memory, 4);
        force(&group, algorithm);
        let fault = Fault::freeze();
        group.set_fault(2, &fault);
        group.run(|comm| sum(comm, 10).unwrap());
        group.set_timeout(Duration::from_millis(200));
        // Its own deadline is far away, and its links move nothing.
        group.members[2].set_timeout(Duration::from_secs(3));
        fault.arm(300_000);
        let results = group.run(|comm| sum(comm, 500_000));
        for result in others(results, 2) {
            let error = result.unwrap_err();
            assert_eq!(error.culprit_rank(), Some(Rank(2)), "{algorithm}: {error}");
        }
    }
}

#[test]
fn a_late_rank_hears_that_it_was_late_and_the_next_operation_works() {
    let group = Group::new(Kind::Unix, 3);
    group.run(|comm| sum(comm, 10).unwrap());
    group.set_timeout(Duration::from_millis(100));
    for result in run(&group.members[..2], |comm| sum(comm, 10)) {
        assert_eq!(result.unwrap_err().culprit_rank(), Some(Rank(2)));
    }
    let error = sum(&group.members[2], 10).unwrap_err();
    assert_eq!(
        error.culprit_rank(),
        Some(Rank(2)),
        "it is named itself: {error}"
    );
    group.set_timeout(LONG);
    group.run(|comm| sum(comm, 100_000).unwrap());
}

#[test]
fn ranks_that_disagree_all_hear_who_asked_for_what() {
    type Body = fn(&Communicator) -> Result<(), CollectiveError>;
    let cases: [(Body, Body, &str, &str); 7] = [
        (
            |comm| comm.barrier(),
            |comm| comm.all_reduce(&mut [1_f32], ReduceOp::Sum),
            "barrier",
            "all_reduce(sum) of 1 f32",
        ),
        (
            |comm| comm.all_reduce(&mut [1_f32; 4], ReduceOp::Sum),
            |comm| comm.all_reduce(&mut [1_f32; 5], ReduceOp::Sum),
            "all_reduce(sum) of 4 f32",
            "all_reduce(sum) of 5 f32",
        ),
        (
            |comm| comm.all_reduce(&mut [1_f32; 4], ReduceOp::Sum),
            |comm| comm.all_reduce(&mut [1_f32; 4], ReduceOp::Max),
            "all_reduce(sum) of 4 f32",
            "all_reduce(max) of 4 f32",
        ),
        (
            |comm| comm.all_reduce(&mut [1_i32; 4], ReduceOp::Sum),
            |comm| comm.all_reduce(&mut [1_f32; 4], ReduceOp::Sum),
            "all_reduce(sum) of 4 i32",
            "all_reduce(sum) of 4 f32",
        ),
        (
            |comm| comm.broadcast(&mut [1_f64; 4], Rank(1)),
            |comm| comm.broadcast(&mut [1_f64; 4], Rank(0)),
            "broadcast of 4 f64 from root 1",
            "broadcast of 4 f64 from root 0",
        ),
        (
            |comm| comm.all_gather(&[1_i64; 2]).map(|_| ()),
            |comm| comm.all_gather(&[1_i64; 3]).map(|_| ()),
            "all_gather of 2 i64",
            "all_gather of 3 i64",
        ),
        (
            |comm| comm.all_gather_varcount(&[1_i64; 2]).map(|_| ()),
            |comm| comm.all_gather_varcount(&[1_f32; 2]).map(|_| ()),
            "all_gather_varcount i64",
            "all_gather_varcount f32",
        ),
    ];
    for world in [2, 3, 4, 7] {
        for odd in [0, world - 1, world / 2] {
            for (most, one, most_ask, one_asks) in &cases {
                for warm in [false, true] {
                    let group = Group::new(Kind::Memory, world);
                    // Who sends to whom in a broadcast depends on the root. Ranks that disagree on it may send
                    // nothing to each other, and find out when they ask each other at the deadline.
                    if most_ask.contains("root") {
                        group.set_timeout(Duration::from_millis(100));
                    }
                    if warm {
                        group.run(|comm| {
                            for root in 0..world {
                                comm.broadcast(&mut [0_i32], Rank(root)).unwrap();
                            }
                        });
                    }
                    let results = group.run(|comm| {
                        if comm.rank() == Rank(odd) {
                            one(comm)
                        } else {
                            most(comm)
                        }
                    });
                    // In a broadcast a rank may have done all that it thinks it has to do. If that is so for all
                    // of them, they hear of it in the next operation.
                    let next = if results.iter().all(Result::is_err) {
                        Vec::new()
                    } else {
                        assert!(
                            most_ask.contains("root"),
                            "world {world} odd {odd} {most_ask}"
                        );
                        group.run(|comm| sum(comm, 10))
                    };
                    let errors: Vec<CollectiveError> = results
                        .into_iter()
                        .chain(next)
                        .filter_map(Result::err)
                        .collect();
                    assert!(!errors.is_empty(), "world {world} odd {odd} {most_ask}");
                    for error in errors {
                        let text = error.to_string();
                        assert!(
                            matches!(error, CollectiveError::Mismatch { .. })
                                && text.contains(most_ask)
                                && text.contains(one_asks)
                                && text.contains(&format!("rank {odd}")),
                            "world {world} odd {odd} {most_ask}: {text}"
                        );
                        assert_eq!(error.culprit_rank(), None);
                    }
                    // The communicator stays usable.
                    group.run(|comm| sum(comm, 100).unwrap());
                }
            }
        }
    }
}

#[test]
fn different_tuning_is_a_mismatch_too() {
    let group = Group::new(Kind::Memory, 2);
    let tuning = Tuning {
        force: Some(Algorithm::Ring),
        ..Tuning::default()
    };
    group.members[1].set_tuning(tuning);
    for result in group.run(|comm| sum(comm, 8)) {
        let text = result.unwrap_err().to_string();
        assert!(
            text.contains("of 8 f64 by the flat algorithm")
                && text.contains("by the ring algorithm"),
            "{text}"
        );
    }
}

#[test]
fn arguments_that_cannot_be_right_fail_here_and_are_told_to_the_others() {
    let group = Group::new(Kind::Unix, 3);
    group.run(|comm| comm.barrier().unwrap());
    let results = group.run(|comm| {
        let root = if comm.rank() == Rank(1) { 3 } else { 2 };
        comm.broadcast(&mut [1_i32; 3], Rank(root))
    });
    assert_eq!(
        results[1],
        Err(CollectiveError::Invalid {
            reason: "broadcast from root 3: a world of 3 has ranks 0 to 2".to_owned()
        })
    );
    // Rank 0 gets its data from rank 2 by way of rank 1, or not at all; rank 2 has what it needs.
    for result in [&results[0], &results[2]] {
        if let Err(error) = result {
            assert_eq!(error.culprit_rank(), Some(Rank(1)), "{error}");
        }
    }
    let results = group.run(|comm| {
        let room = if comm.rank() == Rank(1) { 5 } else { 6 };
        comm.all_gather_into(&[1_i32; 2], &mut vec![0; room])
    });
    assert!(matches!(&results[1], Err(CollectiveError::Invalid { .. })));
    for result in others(results, 1) {
        assert_eq!(result.unwrap_err().culprit_rank(), Some(Rank(1)));
    }
    group.run(|comm| sum(comm, 100).unwrap());
}

/// A network may break while both sides live. Between operations that costs nothing; in the middle of one it
/// costs that one.
#[test]
fn links_that_broke_are_made_again() {
    for (world, after) in [(2, 0), (2, 50_000), (5, 0), (5, 50_000)] {
        let group = Group::new(Kind::Memory, world);
        let fault = Fault::cut();
        for rank in 0..world {
            group.set_fault(rank, &fault);
        }
        group.run(|comm| sum(comm, 10).unwrap());
        let links = group.links();
        // All links that are there end when so many bytes more have gone over them together.
        fault.arm(after);
        let begun = Instant::now();
        for result in group.run(|comm| sum(comm, 100_000)) {
            if after == 0 {
                assert_eq!(result, Ok(()));
            } else {
                let error = result.unwrap_err();
                assert!(matches!(error, CollectiveError::PeerLost { .. }), "{error}");
            }
        }
        // Where one side only has noticed, the other does in the next operation.
        let mut attempts = 0;
        while group.run(|comm| sum(comm, 1000)).iter().any(Result::is_err) {
            attempts += 1;
            assert!(attempts < 4, "the group does not find together again");
        }
        assert!(begun.elapsed() < LONG / 2);
        assert!(group.links() > links);
    }
}

#[test]
fn a_rank_that_fails_a_call_ends_it_on_all_and_the_next_call_works() {
    for kind in [Kind::Memory, Kind::Unix] {
        for world in [2_u32, 3, 5, 8] {
            // Also a rank to which nobody can make a link, and one that can make none.
            for fails in [0, world - 1, world / 2] {
                let group = Group::new(kind, world);
                let begun = Instant::now();
                for call in 1..=4 {
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
                        // Its user code gives up as well; its own notice is an echo.
                        comm.abort_call(CallId(call), "all_reduce failed");
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
                        assert_eq!(
                            result,
                            Err(CollectiveError::PeerFailed {
                                rank: Rank(fails),
                                call: CallId(call),
                                reason: "user code said no".to_owned()
                            }),
                            "{kind:?} world {world} fails {fails} call {call}"
                        );
                    }
                }
                assert!(begun.elapsed() < LONG / 2);
            }
        }
    }
}

/// Ranks without a link to the failed one still hear its name, and not that of the rank in between.
#[test]
fn the_first_cause_travels_along_the_ring() {
    let group = Group::new(Kind::Memory, 8);
    force(&group, Algorithm::Ring);
    group.run(|comm| {
        comm.begin_call(CallId(1));
        sum(comm, 100).unwrap();
    });
    let ring = group.links();
    assert_eq!(ring, 8);
    let results = group.run(|comm| {
        if comm.rank() == Rank(5) {
            comm.abort_call(CallId(1), "index out of bounds");
            return Ok(());
        }
        let result = sum(comm, 100_000);
        comm.abort_call(CallId(1), "something else");
        result
    });
    for result in others(results, 5) {
        assert_eq!(result.unwrap_err().culprit_rank(), Some(Rank(5)));
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
fn frames_of_an_older_call_are_dropped() {
    let group = Group::new(Kind::Unix, 2);
    // Rank 1 sends in call 1, where rank 0 never is, and is told nothing: it gives up by its deadline.
    let late = &group.members[1];
    late.begin_call(CallId(1));
    late.set_timeout(Duration::from_millis(50));
    assert!(late.all_reduce(&mut [1_f32; 1000], ReduceOp::Sum).is_err());
    late.set_timeout(LONG);
    let sums = group.run(|comm| {
        comm.begin_call(CallId(2));
        let mut data = [2_f32; 1000];
        comm.all_reduce(&mut data, ReduceOp::Sum).map(|()| data)
    });
    for result in sums {
        assert_eq!(result, Ok([4_f32; 1000]));
    }
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

#[test]
fn an_operation_that_is_dropped_before_its_turn_is_cancelled_too() {
    let group = Group::new(Kind::Unix, 2);
    let (early, late) = (&group.members[1], &group.members[0]);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| early.barrier());
        // It has its turn when it makes its link.
        while group.links() == 0 {
            std::thread::yield_now();
        }
        poll_once_and_drop(early);
        late.barrier().unwrap();
        first.join().unwrap().unwrap();
    });
    let error = sum(late, 300_000).unwrap_err();
    assert_eq!(error.culprit_rank(), Some(Rank(1)), "{error}");
    assert!(
        error.to_string().contains("cancelled before its turn"),
        "{error}"
    );
    group.run(|comm| sum(comm, 300_000).unwrap());
}

/// A rank that hears of a failed call tells those that are ahead of it, though its own code does nothing.
#[test]
fn the_news_of_a_failed_call_reaches_ranks_in_other_operations() {
    let group = Group::new(Kind::Unix, 3);
    group.run(|comm| {
        comm.begin_call(CallId(1));
        // From every root: now all are linked with all.
        for root in 0..3 {
            comm.broadcast(&mut [0_i32], Rank(root)).unwrap();
        }
    });
    let results = group.run(|comm| match comm.rank() {
        // Sends and is through with the broadcast; then it waits in the barrier.
        Rank(0) => comm
            .broadcast(&mut [1_i32], Rank(0))
            .and_then(|()| comm.barrier()),
        Rank(1) => {
            comm.abort_call(CallId(1), "user code said no");
            Ok(())
        }
        _ => comm
            .broadcast(&mut [1_i32], Rank(0))
            .and_then(|()| comm.barrier()),
    });
    for result in others(results, 1) {
        assert_eq!(result.unwrap_err().culprit_rank(), Some(Rank(1)));
    }
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

#[tokio::test]
async fn an_async_deadline_fires() {
    let group = local_group(2).unwrap();
    group[0].set_timeout(Duration::from_millis(30));
    let error = group[0].barrier_async().await.unwrap_err();
    assert_eq!(error.culprit_rank(), Some(Rank(1)), "{error}");
}

/// A blocking operation on the only thread of a runtime can't work, but it ends.
#[tokio::test]
async fn a_blocking_operation_in_async_code_ends_by_its_deadline() {
    let group = local_group(2).unwrap();
    group[0].set_timeout(Duration::from_millis(30));
    let error = group[0].barrier().unwrap_err();
    assert_eq!(error.culprit_rank(), Some(Rank(1)), "{error}");
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

#[test]
fn a_group_of_no_ranks_or_a_rank_outside_it_is_refused() {
    assert!(matches!(
        local_group(0),
        Err(CollectiveError::Invalid { .. })
    ));
    let group = local_group(1).unwrap();
    let error = group[0].broadcast(&mut [1_i32], Rank(1)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "broadcast from root 1: a world of 1 has ranks 0 to 0"
    );
    let (lane, _other) = kolo_collectives::lane::MemoryLane::pair(1);
    let acceptor = group[0].acceptor();
    assert!(acceptor.accept(Rank(0), Box::new(lane)).is_err());
    drop(group);
    let (lane, _other) = kolo_collectives::lane::MemoryLane::pair(1);
    let error = acceptor.accept(Rank(0), Box::new(lane)).unwrap_err();
    assert!(error.to_string().contains("is gone"), "{error}");
}
