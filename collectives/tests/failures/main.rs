//! What happens when ranks die, come late or lose their links.

#![allow(
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::float_cmp,
    clippy::unwrap_used
)]

#[path = "../common/mod.rs"]
mod common;
mod deadlines;
mod elsewhere;
mod links;

use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use common::victim::{
    COUNT, NoConnector, frame, lonely, notice, read_notice, right, runtime, write,
};
use common::{Fault, GENERATION, Group, JOB, Kind, LONG, faulty, force, others, run, sum, until};
use kolo_collectives::cause::{Cause, Excuse};
use kolo_collectives::header::{Data, HEADER, Header, SENDER};
use kolo_collectives::lane::{Connecting, Gone, MemoryLane};
use kolo_collectives::operation::{Operation, OperationKind, Tag};
use kolo_collectives::peers::Local;
use kolo_collectives::schedule::{Algorithm, Tuning};
use kolo_collectives::{
    Acceptor, CollectiveError, Communicator, Connector, DType, GroupId, Lane, LaneError, ReduceOp,
    local_group,
};
use kolo_transport::ids::{CallId, Rank};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

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
        assert!(error.to_string().contains(" link ended"), "{error}");
    }
}

/// Its own words need no answer, and what is written into a ring seems to go well: a look at the link now and then tells.
#[test]
fn who_only_sends_hears_that_the_receiver_is_gone() {
    let mut group = Group::new(Kind::Ring, 2);
    let peer = group.members.remove(1);
    let own = &group.members[0];
    std::thread::scope(|scope| {
        let (taken, is_taken) = channel();
        let (gone, is_gone) = channel();
        scope.spawn(move || {
            peer.receive::<f32>(Rank(0)).unwrap();
            peer.send(&[1.0_f32; 4], Rank(0)).unwrap();
            is_taken.recv().unwrap();
            drop(peer);
            gone.send(()).unwrap();
        });
        // On this thread, which has waited for the link and for an answer, and so looks before it sleeps.
        scope.spawn(move || {
            own.send(&[1.0_f32; 4], Rank(1)).unwrap();
            assert_eq!(own.receive::<f32>(Rank(1)).unwrap(), [1.0; 4]);
            taken.send(()).unwrap();
            is_gone.recv().unwrap();
            // The ring holds them all.
            let error = (0..300).find_map(|_| own.send(&[1.0_f32; 4], Rank(1)).err());
            let error = error.expect("it hears of it");
            assert_eq!(error.culprit_rank(), Some(Rank(1)), "{error}");
        });
    });
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

/// On a link everything has its place: what a peer says last stands behind what it sent for later steps.
#[test]
fn an_abort_is_heard_by_a_rank_that_waits_for_another_one() {
    for kind in [Kind::Memory, Kind::Unix, Kind::Tls] {
        let group = Group::new(kind, 4);
        force(&group, Algorithm::Ring);
        let count = Fault::kill();
        group.set_fault(1, &count);
        group.run(|comm| comm.begin_call(CallId(1)));
        let begun = Instant::now();
        // Rank 3 is late and makes no links. So rank 2, which has to send to it, does not come beyond its first step.
        let errors = run(&group.members[..3], |comm| {
            std::thread::scope(|scope| {
                let summing = scope.spawn(|| sum(comm, 4000));
                if comm.rank() == Rank(1) {
                    // Rank 2 has what rank 1 sends in its second step: each is a quarter.
                    until(|| count.written() >= 2 * 1000 * size_of::<f64>());
                    comm.abort_call(CallId(1), "it failed");
                }
                summing.join().unwrap().unwrap_err()
            })
        });
        assert!(begun.elapsed() < LONG / 2, "{kind:?}: {errors:?}");
        for error in [&errors[0], &errors[2]] {
            assert_eq!(error.culprit_rank(), Some(Rank(1)), "{kind:?}: {error}");
        }
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

/// Adasum looks at each buffer as a whole, one after the other; those that were done are as they were, too.
#[test]
fn an_adasum_of_several_buffers_that_fails_leaves_all_as_they_were() {
    let input = |comm: &Communicator| {
        let first = if comm.rank() == Rank(0) { 1.0 } else { 2.0 };
        [vec![first; 100], vec![first; 100_000]]
    };
    for by_handle in [false, true] {
        let group = Group::new(Kind::Memory, 2);
        let fault = Fault::cut();
        for rank in 0..2 {
            group.set_fault(rank, &fault);
        }
        group.run(|comm| {
            let mut given = input(comm);
            let mut buffers = given.each_mut().map(Vec::as_mut_slice);
            comm.all_reduce_grouped(&mut buffers, ReduceOp::Adasum)
                .unwrap();
            assert!(given.iter().flatten().all(|value| *value == 1.5_f32));
        });
        // In the middle of the second buffer.
        fault.arm(200_000);
        let errors = group.run(|comm| {
            let mut given = input(comm);
            let error = if by_handle {
                let start = comm.start();
                let handle = start.all_reduce_grouped(given.to_vec(), ReduceOp::Adasum);
                let failure = handle.wait_or_reclaim().err().unwrap();
                given = failure.input.unwrap().try_into().unwrap();
                failure.error
            } else {
                let mut buffers = given.each_mut().map(Vec::as_mut_slice);
                let result = comm.all_reduce_grouped(&mut buffers, ReduceOp::Adasum);
                result.unwrap_err()
            };
            assert!(given == input(comm), "a buffer was changed: {error}");
            error
        });
        for error in errors {
            assert!(matches!(error, CollectiveError::PeerLost { .. }), "{error}");
        }
    }
}

#[test]
fn a_group_of_no_ranks_or_a_rank_outside_it_is_refused() {
    assert!(matches!(
        local_group(0),
        Err(CollectiveError::Invalid { .. })
    ));
    let runtime = runtime();
    let (connector, handle) = (Arc::new(NoConnector), runtime.handle().clone());
    let many = Communicator::new(Rank(0), u32::MAX, GENERATION, JOB, connector, handle);
    let error = many.unwrap_err().to_string();
    assert!(error.contains("1048576 at most"), "{error}");
    let error = Local::in_folder("/nowhere").join(Rank(0), u32::MAX);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("1048576 at most"), "{error}");
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

/// A rank that is an operation ahead names who was lost, and not who gave up because of that and left.
#[test]
fn who_left_because_of_a_loss_is_not_the_one_that_is_lost() {
    one_leaves_because_two_is_lost(|_| ());
}

/// The same if it is a call ahead.
#[test]
fn who_left_a_call_because_of_a_loss_is_not_the_one_that_is_lost() {
    one_leaves_because_two_is_lost(|comm| comm.begin_call(CallId(1)));
}

fn one_leaves_because_two_is_lost(goes_on: impl Fn(&Communicator)) {
    let runtime = runtime();
    let handle = runtime.handle().clone();
    let comm =
        Communicator::new(Rank(0), 3, GENERATION, JOB, Arc::new(NoConnector), handle).unwrap();
    let ends = [1, 2].map(|rank| {
        let (mine, theirs) = MemoryLane::pair(1 << 20);
        let accepted = comm.acceptor().accept(Rank(rank), Box::new(mine));
        accepted.unwrap();
        theirs
    });
    comm.set_timeout(Duration::from_millis(1));
    comm.barrier().unwrap_err();
    goes_on(&comm);
    comm.set_timeout(LONG);
    let [mut one, _two] = ends;
    let cause = Cause::Lost {
        rank: Rank(2),
        reason: "its link broke".to_owned(),
        for_good: false,
    };
    write(&runtime, &mut one, &notice(Tag::default(), &cause));
    drop(one);
    let error = comm.barrier().unwrap_err();
    assert_eq!(error.culprit_rank(), Some(Rank(2)), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("its link broke (rank 1 gave up operation 0 of call 0 because of it"),
        "{text}"
    );
}

/// Makes one link to each of the ranks below, which a network may break.
#[derive(Debug)]
struct MadeOnce(Mutex<HashMap<u32, Box<dyn Lane>>>);

impl Connector for MadeOnce {
    fn connect(&self, peer: Rank) -> Connecting {
        let lane = self.0.lock().unwrap().remove(&peer.0);
        Box::pin(async move {
            lane.ok_or_else(|| LaneError::Unreachable {
                reason: format!("nothing listens where rank {peer} was"),
            })
        })
    }
}

/// Rank 2 of three, to whose first operation the others did not come, and the other ends of its links, which can't be made again.
fn after_a_deadline(
    runtime: &Runtime,
    wrap: impl Fn(MemoryLane) -> Box<dyn Lane>,
) -> (Communicator, Vec<MemoryLane>) {
    let (mine, ends): (Vec<_>, Vec<_>) = [0, 1]
        .map(|_| MemoryLane::pair(1 << 20))
        .into_iter()
        .unzip();
    let lanes = (0..).zip(mine.into_iter().map(wrap)).collect();
    let connector = Arc::new(MadeOnce(Mutex::new(lanes)));
    let handle = runtime.handle().clone();
    let comm = Communicator::new(Rank(2), 3, GENERATION, JOB, connector, handle).unwrap();
    comm.set_timeout(Duration::from_millis(100));
    comm.barrier().unwrap_err();
    comm.set_timeout(LONG);
    (comm, ends)
}

fn link_to_0_broke() -> Cause {
    Cause::Lost {
        rank: Rank(0),
        reason: "its link broke".to_owned(),
        for_good: false,
    }
}

/// It said why it goes on a link that has ended since, and that can't be made again.
#[test]
fn who_left_because_of_a_loss_and_can_not_be_reached_is_not_the_one_that_is_lost() {
    let runtime = runtime();
    let fault = Fault::cut();
    let (comm, mut ends) = after_a_deadline(&runtime, |lane| faulty(Box::new(lane), &fault));
    let cause = link_to_0_broke();
    let mut one = ends.remove(1);
    write(&runtime, &mut one, &notice(Tag::default(), &cause));
    drop(one);
    let error = comm.broadcast(&mut [0_u8], Rank(1)).unwrap_err();
    assert_eq!(error.culprit_rank(), Some(Rank(0)), "{error}");
    assert!(error.to_string().contains("rank 1 gave up"), "{error}");
}

/// Rank 1 gave up operation 0 because its link to rank 0 broke. Both have come to operation 1, where rank 1 dies.
#[test]
fn who_has_come_is_not_the_one_that_is_lost() {
    let runtime = runtime();
    let (comm, mut ends) = after_a_deadline(&runtime, |lane| Box::new(lane));
    let cause = link_to_0_broke();
    let ask = Header::Ask(of_broadcast());
    let mut one = ends.remove(1);
    write(&runtime, &mut one, &notice(Tag::default(), &cause));
    write(&runtime, &mut one, &ask.encode());
    write(&runtime, &mut ends[0], &ask.encode());
    drop(one);
    let error = comm.broadcast(&mut [0_u8], Rank(1)).unwrap_err();
    assert_eq!(error.culprit_rank(), Some(Rank(1)), "{error}");
}

/// What a rank says first in a broadcast from rank 1, which is operation 1.
fn of_broadcast() -> Data {
    Data {
        generation: GENERATION,
        tag: Tag::new(0, 1),
        operation: Operation {
            root: Some(1),
            ..Operation::new(OperationKind::Broadcast, Some(DType::U8), 1)
        },
        step: 0,
        offset: 0,
        length: 0,
    }
}

/// Rank 0 has come to operation 1 and is killed. What it had sent to rank 1 before is lost, which gives up operation 0 because of
/// that, and leaves.
#[test]
fn who_had_come_before_it_was_killed_is_the_one_that_is_lost() {
    let runtime = runtime();
    let broadcast = Operation {
        algorithm: Algorithm::Binomial,
        ..of_broadcast().operation
    };
    // All that is needed of it, and not.
    let words = [
        Header::Consent(Data {
            operation: broadcast,
            step: 1,
            ..of_broadcast()
        }),
        Header::Ask(of_broadcast()),
    ];
    for (said, ends_first) in words.into_iter().zip([true, false]) {
        let (comm, mut ends) = after_a_deadline(&runtime, |lane| Box::new(lane));
        let (mut one, mut zero) = (ends.remove(1), ends.remove(0));
        write(&runtime, &mut zero, &said.encode());
        let cause = link_to_0_broke();
        write(&runtime, &mut one, &notice(Tag::default(), &cause));
        let mut data = [0_u8];
        let mut waits = Box::pin(comm.broadcast_async(&mut data, Rank(1)));
        let mut cx = Context::from_waker(Waker::noop());
        let (first, then) = if ends_first { (zero, one) } else { (one, zero) };
        // This rank has given its word, then.
        for ends in [None, Some(first)] {
            drop(ends);
            let polled = waits.as_mut().poll(&mut cx);
            assert!(polled.is_pending(), "{said:?}: {polled:?}");
        }
        drop(then);
        let error = runtime.block_on(waits).unwrap_err();
        assert_eq!(error.culprit_rank(), Some(Rank(0)), "{said:?}: {error}");
    }
}

/// Rank 0 has sent what this rank wants later, and is killed: its end stands behind that. Rank 1 lost it in operation 0, and leaves.
#[test]
fn who_was_ahead_when_it_was_killed_is_the_one_that_is_lost() {
    let runtime = runtime();
    // Of the second step of a barrier: in the first one this rank waits for rank 1.
    let ahead = Header::Data(Data {
        operation: Operation {
            algorithm: Algorithm::Dissemination,
            ..Operation::new(OperationKind::Barrier, None, 0)
        },
        step: 1,
        ..of_broadcast()
    });
    for ends_first in [true, false] {
        let (comm, mut ends) = after_a_deadline(&runtime, |lane| Box::new(lane));
        let (mut one, mut zero) = (ends.remove(1), ends.remove(0));
        write(&runtime, &mut zero, &ahead.encode());
        let cause = link_to_0_broke();
        write(&runtime, &mut one, &notice(Tag::default(), &cause));
        let mut waits = Box::pin(comm.barrier_async());
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(Arc::clone(&wakes));
        let mut cx = Context::from_waker(&waker);
        let (first, then) = if ends_first { (zero, one) } else { (one, zero) };
        for ends in [None, Some(first)] {
            drop(ends);
            let polled = waits.as_mut().poll(&mut cx);
            assert!(polled.is_pending(), "{polled:?}");
        }
        wakes.0.store(0, Ordering::SeqCst);
        drop(then);
        // It is not looked at only because nothing else comes for a while.
        assert!(wakes.0.load(Ordering::SeqCst) > 0);
        let polled = waits.as_mut().poll(&mut cx);
        let Poll::Ready(Err(error)) = polled else {
            panic!("all ends are there: {polled:?}");
        };
        assert_eq!(error.culprit_rank(), Some(Rank(0)), "{error}");
    }
}

/// Rank 3, for which this one waits, has lost rank 2, and that one rank 1, which is gone, too, or seems to be there. If rank 2 said that in
/// an earlier operation than rank 3, it was not because of it that rank 3 lost it.
#[test]
fn who_left_because_of_one_that_left_is_not_the_one_that_is_lost() {
    let runtime = runtime();
    for (order, lost_in, lost) in [
        (&[3, 2, 1][..], 0, 1),
        (&[3, 1, 2], 0, 1),
        (&[1, 2, 3], 0, 1),
        (&[2, 3, 1], 0, 1),
        (&[2, 3], 0, 1),
        (&[3, 2], 0, 1),
        (&[3, 2], 1, 2),
    ] {
        let handle = runtime.handle().clone();
        let comm =
            Communicator::new(Rank(0), 4, GENERATION, JOB, Arc::new(NoConnector), handle).unwrap();
        let mut ends = [1, 2, 3].map(|rank| {
            let (mine, theirs) = MemoryLane::pair(1 << 20);
            let accepted = comm.acceptor().accept(Rank(rank), Box::new(mine));
            accepted.unwrap();
            Some(theirs)
        });
        comm.set_timeout(Duration::from_millis(1));
        for _ in 0..2 {
            comm.barrier().unwrap_err();
        }
        comm.set_timeout(LONG);
        for (rank, culprit, operation) in [(2, 1, 0), (3, 2, lost_in)] {
            let cause = Cause::Lost {
                rank: Rank(culprit),
                reason: "its link broke".to_owned(),
                for_good: false,
            };
            let words = notice(Tag::new(0, operation), &cause);
            write(&runtime, ends[rank - 1].as_mut().unwrap(), &words);
        }
        let mut waits = Box::pin(comm.barrier_async());
        let mut cx = Context::from_waker(Waker::noop());
        let mut polled = waits.as_mut().poll(&mut cx);
        for &rank in order {
            // Before, if no more ends count.
            if polled.is_pending() {
                ends[rank - 1] = None;
                polled = waits.as_mut().poll(&mut cx);
            }
        }
        let error = match polled {
            Poll::Ready(result) => result,
            // Its end may still be seen.
            Poll::Pending => runtime.block_on(waits),
        };
        let error = error.unwrap_err();
        assert_eq!(error.culprit_rank(), Some(Rank(lost)), "{order:?}: {error}");
    }
}

/// A peer that reads nothing has said that it has lost the same rank: this one ends at once, and does not wait until it reads.
#[test]
fn who_knows_of_the_loss_is_not_waited_for() {
    let runtime = runtime();
    // The peer's words are read before the end of the lost rank's link, and behind it.
    for (stuck, lost) in [(1, 2), (2, 1)] {
        let handle = runtime.handle().clone();
        let comm =
            Communicator::new(Rank(0), 3, GENERATION, JOB, Arc::new(NoConnector), handle).unwrap();
        comm.set_tuning(Tuning {
            force: Some(Algorithm::Flat),
            ..Tuning::default()
        });
        // Less than one frame of the operation.
        let [mut words, ends] = [stuck, lost].map(|rank| {
            let (mine, theirs) = MemoryLane::pair(4096);
            let accepted = comm.acceptor().accept(Rank(rank), Box::new(mine));
            accepted.unwrap();
            theirs
        });
        let mut data = vec![1_i32; 100_000];
        let mut waits = Box::pin(comm.broadcast_async(&mut data, Rank(0)));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(waits.as_mut().poll(&mut cx).is_pending());
        let cause = Cause::Lost {
            rank: Rank(lost),
            reason: "its link broke".to_owned(),
            for_good: false,
        };
        write(&runtime, &mut words, &notice(Tag::default(), &cause));
        drop(ends);
        let polled = waits.as_mut().poll(&mut cx);
        let lost = Rank(lost);
        assert!(
            matches!(&polled, Poll::Ready(Err(CollectiveError::PeerLost { rank, .. })) if *rank == lost),
            "{polled:?}"
        );
    }
}

/// Nobody is lost, and the peers read nothing: both have given up, too. One of them the operation after that, which hears of it.
#[test]
fn who_has_given_up_is_not_waited_for_and_is_heard_in_the_next_operation() {
    let runtime = runtime();
    let handle = runtime.handle().clone();
    let comm =
        Communicator::new(Rank(0), 3, GENERATION, JOB, Arc::new(NoConnector), handle).unwrap();
    comm.set_timeout(LONG);
    comm.set_tuning(Tuning {
        force: Some(Algorithm::Flat),
        ..Tuning::default()
    });
    let [mut one, mut two] = [1, 2].map(|rank| {
        // Less than one frame of the operation.
        let (mine, theirs) = MemoryLane::pair(4096);
        let accepted = comm.acceptor().accept(Rank(rank), Box::new(mine));
        accepted.unwrap();
        theirs
    });
    let mut data = vec![1_i32; 100_000];
    let mut waits = Box::pin(comm.broadcast_async(&mut data, Rank(0)));
    let mut cx = Context::from_waker(Waker::noop());
    assert!(waits.as_mut().poll(&mut cx).is_pending());
    let failed = |rank, reason: &str| Cause::Failed {
        rank: Rank(rank),
        reason: reason.to_owned(),
    };
    // Of its second step: in the first one this rank waits for rank 2.
    let barrier = Header::Data(Data {
        operation: Operation {
            algorithm: Algorithm::Dissemination,
            ..Operation::new(OperationKind::Barrier, None, 0)
        },
        step: 1,
        ..of_broadcast()
    });
    write(&runtime, &mut one, &barrier.encode());
    write(
        &runtime,
        &mut one,
        &notice(Tag::new(0, 1), &failed(1, "later")),
    );
    write(
        &runtime,
        &mut two,
        &notice(Tag::default(), &failed(2, "now")),
    );
    let polled = waits.as_mut().poll(&mut cx);
    let Poll::Ready(Err(error)) = polled else {
        panic!("all have given up: {polled:?}");
    };
    assert_eq!(error.culprit_rank(), Some(Rank(1)), "{error}");
    drop(waits);
    let error = comm.barrier().unwrap_err().to_string();
    assert!(error.contains("later"), "{error}");
}

/// Rank 1 is ahead and has given up there. This rank, which waits for others and hears nothing for a while, sees that in an operation for
/// which it says nothing.
#[test]
fn what_was_seen_before_its_time_is_seen_again() {
    let runtime = runtime();
    let handle = runtime.handle().clone();
    let comm =
        Communicator::new(Rank(0), 4, GENERATION, JOB, Arc::new(NoConnector), handle).unwrap();
    let ends = [1, 2, 3].map(|rank| {
        let (mine, theirs) = MemoryLane::pair(1 << 20);
        comm.acceptor().accept(Rank(rank), Box::new(mine)).unwrap();
        theirs
    });
    let [mut one, _two, _three] = ends;
    // Nothing comes from rank 1 in a barrier of four.
    let data = Header::Data(Data {
        operation: Operation {
            algorithm: Algorithm::Dissemination,
            ..Operation::new(OperationKind::Barrier, None, 0)
        },
        ..of_broadcast()
    });
    let cause = Cause::Failed {
        rank: Rank(1),
        reason: "it has had enough".to_owned(),
    };
    write(&runtime, &mut one, &data.encode());
    write(&runtime, &mut one, &notice(Tag::new(0, 1), &cause));
    comm.set_timeout(Duration::from_millis(300));
    let error = comm.barrier().unwrap_err();
    assert!(matches!(error, CollectiveError::Deadline { .. }), "{error}");
    comm.set_timeout(LONG);
    let error = comm.barrier().unwrap_err();
    assert!(error.to_string().contains("had enough"), "{error}");
}

/// Of a peer that reads nothing only that is taken for its end which says that it has given up as much as this rank.
#[test]
fn who_has_given_up_less_or_nothing_is_waited_for() {
    let runtime = runtime();
    let failed = |rank| Cause::Failed {
        rank: Rank(rank),
        reason: "it has had enough!".to_owned(),
    };
    let of_operation = |rank| notice(Tag::default(), &failed(rank));
    let of_call = |rank| {
        let text = failed(rank).encode();
        let header = Header::AbortCall {
            generation: GENERATION,
            call: 0,
            length: text.len() as u32,
        };
        frame(header, &text)
    };
    let mut data = vec![1_i32; 100_000];
    // Values that read as a reason.
    let values = failed(2).encode();
    assert_eq!(values.len() % 4, 0);
    let header = Header::Data(Data {
        tag: Tag::default(),
        operation: Operation {
            root: Some(0),
            algorithm: Algorithm::Binomial,
            ..Operation::new(
                OperationKind::Broadcast,
                Some(DType::I32),
                data.len() as u64,
            )
        },
        length: values.len() as u32,
        ..of_broadcast()
    });
    for (of_one, of_two, is_over) in [
        (of_operation(1), of_operation(2), true),
        (of_operation(1), frame(header, &values), false),
        (of_call(1), of_operation(2), false),
        (of_call(1), of_call(2), true),
    ] {
        let handle = runtime.handle().clone();
        let comm =
            Communicator::new(Rank(0), 3, GENERATION, JOB, Arc::new(NoConnector), handle).unwrap();
        comm.set_tuning(Tuning {
            force: Some(Algorithm::Binomial),
            ..Tuning::default()
        });
        let [mut one, mut two] = [1, 2].map(|rank| {
            // Less than one frame of the operation.
            let (mine, theirs) = MemoryLane::pair(4096);
            comm.acceptor().accept(Rank(rank), Box::new(mine)).unwrap();
            theirs
        });
        let mut waits = Box::pin(comm.broadcast_async(&mut data, Rank(0)));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(waits.as_mut().poll(&mut cx).is_pending());
        write(&runtime, &mut two, &of_two);
        write(&runtime, &mut one, &of_one);
        let polled = waits.as_mut().poll(&mut cx);
        assert_eq!(
            polled.is_ready(),
            is_over,
            "{of_one:?}, {of_two:?}: {polled:?}"
        );
        let error = runtime.block_on(async {
            match polled {
                Poll::Ready(result) => result,
                Poll::Pending => waits.await,
            }
        });
        let error = error.unwrap_err();
        assert!(
            matches!(error, CollectiveError::PeerFailed { rank: Rank(1), .. }),
            "{error}"
        );
    }
}

/// A rank that waits elsewhere, and one that has come meanwhile.
#[test]
fn what_a_lost_rank_did_is_told_if_it_had_not_come() {
    let runtime = runtime();
    for has_come in [false, true] {
        let handle = runtime.handle().clone();
        let comm =
            Communicator::new(Rank(0), 2, GENERATION, JOB, Arc::new(NoConnector), handle).unwrap();
        comm.set_timeout(LONG);
        let (mine, mut one) = MemoryLane::pair(1 << 20);
        comm.acceptor().accept(Rank(1), Box::new(mine)).unwrap();
        let text = b"it sleeps";
        let doing = Header::Doing {
            generation: GENERATION,
            tag: Tag::default(),
            rank: SENDER,
            length: text.len() as u32,
        };
        write(&runtime, &mut one, &frame(doing, text));
        if has_come {
            let ask = Header::Ask(Data {
                tag: Tag::default(),
                operation: Operation::new(OperationKind::Barrier, None, 0),
                ..of_broadcast()
            });
            write(&runtime, &mut one, &ask.encode());
        }
        drop(one);
        let error = comm.barrier().unwrap_err().to_string();
        assert_eq!(
            error.contains("it had said: it sleeps"),
            !has_come,
            "{error}"
        );
        assert!(error.contains("rank 1 is lost"), "{error}");
    }
}

/// Counts how often who waits is woken.
#[derive(Debug, Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Rank 1 has lost rank 0 in another group and is gone, and can't be linked again. The end of rank 0's link is seen after that, or
/// it is there.
#[test]
fn who_left_because_of_one_whose_end_is_not_seen_yet_is_not_the_one_that_is_lost() {
    let runtime = runtime();
    for is_there in [false, true] {
        let fault = Fault::cut();
        let (comm, mut ends) = after_a_deadline(&runtime, |lane| faulty(Box::new(lane), &fault));
        let cause = Cause::LostElsewhere {
            rank: Rank(0),
            reason: "its link broke".to_owned(),
        };
        let (mut one, zero) = (ends.remove(1), ends.remove(0));
        write(&runtime, &mut one, &notice(Tag::default(), &cause));
        drop(one);
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(Arc::clone(&wakes));
        let mut cx = Context::from_waker(&waker);
        let mut data = [0_u8];
        let mut waits = Box::pin(comm.broadcast_async(&mut data, Rank(1)));
        for _ in 0..2 {
            // The second time that there is no new link.
            let polled = waits.as_mut().poll(&mut cx);
            assert!(polled.is_pending(), "{polled:?}");
            until(|| wakes.0.swap(0, Ordering::SeqCst) > 0);
        }
        let zero = Some(zero).filter(|_| is_there);
        let error = runtime.block_on(waits).unwrap_err();
        drop(zero);
        let lost = Rank(u32::from(is_there));
        assert_eq!(error.culprit_rank(), Some(lost), "{error}");
        let text = error.to_string();
        assert_eq!(text.contains("nothing listens where"), is_there, "{text}");
    }
}

/// Lengths come before values: a rank may be in the second part when another one gives up the first.
#[test]
fn who_gives_up_a_part_of_an_operation_ends_it_for_those_that_are_further() {
    for kind in [Kind::Unix, Kind::Shared] {
        let group = Group::new(kind, 2);
        group.run(|comm| comm.all_gather_varcount(&[1_u8]).map(drop).unwrap());
        let mut cx = Context::from_waker(Waker::noop());
        let mut first = Box::pin(group.members[0].all_gather_varcount_async(&[1_u8]));
        assert!(first.as_mut().poll(&mut cx).is_pending());
        let begun = Instant::now();
        let error = std::thread::scope(|scope| {
            let other = scope.spawn(|| group.members[1].all_gather_varcount(&[1_u8]));
            until(|| group.members[1].records().last().unwrap().tag.part == 1);
            drop(first);
            other.join().unwrap().unwrap_err()
        });
        assert!(error.to_string().contains("was cancelled"), "{error}");
        assert!(begun.elapsed() < LONG / 2, "{kind:?}");
    }
}
