//! What happens when ranks die, come late or lose their links.

#![allow(
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::float_cmp,
    clippy::unwrap_used
)]

mod authority;
#[path = "../common/mod.rs"]
mod common;
mod deadlines;
mod links;
mod revoked;

use std::future::Future;
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier, Mutex};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use common::victim::{NoConnector, frame, lonely, read_frame, runtime, write};
use common::{Fault, GENERATION, Group, JOB, Kind, LONG, at_once, force, others, run, sum, until};
use kolo_collectives::cause::Cause;
use kolo_collectives::header::{HEADER, Header};
use kolo_collectives::lane::{Connecting, MemoryLane};
use kolo_collectives::schedule::Algorithm;
use kolo_collectives::{
    Acceptor, CollectiveError, Communicator, Connector, GroupId, Lane, LaneError, ReduceOp,
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
                for after in [0, 100_000, 700_000] {
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

/// Adasum looks at each buffer as a whole, one after the other; those that were done are as they were, too.
#[test]
fn an_adasum_of_several_buffers_that_fails_leaves_all_as_they_were() {
    for by_handle in [false, true] {
        let group = Group::new(Kind::Memory, 2);
        let fault = Fault::cut();
        for rank in 0..2 {
            group.set_fault(rank, &fault);
        }
        let adasum = |comm: &Communicator| {
            let first = 1.0 + comm.rank().0 as f32;
            let input = [vec![first; 100], vec![first; 100_000]];
            if by_handle {
                let handle = comm.start();
                let handle = handle.all_reduce_grouped(input.to_vec(), ReduceOp::Adasum);
                let failure = handle.wait_or_reclaim().err()?;
                assert!(failure.input.unwrap() == input, "a buffer was changed");
                return Some(failure.error);
            }
            let mut given = input.clone();
            let mut buffers = given.each_mut().map(Vec::as_mut_slice);
            let error = comm.all_reduce_grouped(&mut buffers, ReduceOp::Adasum);
            let error = error.err()?;
            assert!(given == input, "a buffer was changed: {error}");
            Some(error)
        };
        assert_eq!(group.run(adasum), [None, None]);
        // In the middle of the second buffer.
        fault.arm(200_000);
        for error in group.run(adasum) {
            let is_lost = matches!(error, Some(CollectiveError::PeerLost { .. }));
            assert!(is_lost, "{error:?}");
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
    let group = local_group(1).unwrap();
    let error = group[0].broadcast(&mut [1_i32], Rank(1)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "broadcast from root 1: a world of 1 has ranks 0 to 0"
    );
    let (lane, _other) = MemoryLane::pair(1);
    let acceptor = group[0].acceptor();
    assert!(acceptor.accept(Rank(0), Box::new(lane)).is_err());
    drop(group);
    let (lane, _other) = MemoryLane::pair(1);
    let error = acceptor.accept(Rank(0), Box::new(lane)).unwrap_err();
    assert!(error.to_string().contains("is gone"), "{error}");
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
