//! Ranks that read nothing for long, and what others say to them meanwhile: nobody is lost because of that.

#![allow(clippy::unwrap_used)]

mod common;

use std::future::Future;
use std::task::{Context, Waker};

use common::{Group, Kind, force, sum, until};
use kolo_collectives::schedule::Algorithm;
use kolo_collectives::{CollectiveError, Communicator, ReduceOp};
use kolo_transport::ids::Rank;

/// Their notices are more than a link holds, and what may wait beside it.
const CANCELLED: u64 = 4000;

/// The peer reads as fast as it can, in the same operations.
#[test]
fn many_operations_that_are_given_up_before_their_turn_end_no_link() {
    for kind in [Kind::Memory, Kind::Unix, Kind::Ring, Kind::Tls] {
        let group = Group::new(kind, 2);
        group.run(|comm| comm.barrier().unwrap());
        let (busy, other) = (&group.members[0], &group.members[1]);
        let mut cx = Context::from_waker(Waker::noop());
        let mut turn = Box::pin(busy.barrier_async());
        assert!(turn.as_mut().poll(&mut cx).is_pending());
        give_up_before_their_turn(busy);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                group.runtime.block_on(turn).unwrap();
                sum(busy, 1000).unwrap();
            });
            other.barrier().unwrap();
            hears_that_zero_went_on(other);
            sum(other, 1000).unwrap();
        });
    }
}

/// The peer reads nothing before all is said, behind the rest of a frame that is half sent.
#[test]
fn who_gives_up_again_and_again_ends_no_link_to_who_does_not_read() {
    // Much more than any of the links holds.
    const LENGTH: usize = 4 << 20;
    for kind in [Kind::Narrow(10_000), Kind::Unix, Kind::Tls] {
        let group = Group::new(kind, 2);
        force(&group, Algorithm::Halving);
        group.run(|comm| sum(comm, 10).unwrap());
        let links = group.links();
        let (busy, late) = (&group.members[0], &group.members[1]);
        let mut cx = Context::from_waker(Waker::noop());
        let mut data = vec![1.0_f64; LENGTH];
        let mut summing = Box::pin(busy.all_reduce_async(&mut data, ReduceOp::Sum));
        assert!(summing.as_mut().poll(&mut cx).is_pending());
        give_up_before_their_turn(busy);
        drop(summing);
        until(|| busy.next_tag().operation == 2 + CANCELLED);
        assert_that_zero_went_on(&sum(late, LENGTH).unwrap_err());
        std::thread::scope(|scope| {
            scope.spawn(|| sum(busy, 100_000).unwrap());
            hears_that_zero_went_on(late);
            sum(late, 100_000).unwrap();
        });
        assert_eq!(group.links(), links, "{kind:?}");
    }
}

/// Another operation has its turn.
fn give_up_before_their_turn(comm: &Communicator) {
    let mut cx = Context::from_waker(Waker::noop());
    for _ in 0..CANCELLED {
        let mut waits = Box::pin(comm.barrier_async());
        assert!(waits.as_mut().poll(&mut cx).is_pending());
    }
}

fn hears_that_zero_went_on(comm: &Communicator) {
    for _ in 0..CANCELLED {
        assert_that_zero_went_on(&comm.barrier().unwrap_err());
    }
}

/// It has said so, or has said something about a later operation.
fn assert_that_zero_went_on(error: &CollectiveError) {
    let went_on = match error {
        CollectiveError::PeerFailed { reason, .. } => reason.contains("was cancelled"),
        CollectiveError::PeerLeft { .. } => true,
        _ => false,
    };
    assert!(went_on, "{error}");
    assert_eq!(error.culprit_rank(), Some(Rank(0)), "{error}");
}
