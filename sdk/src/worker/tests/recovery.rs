//! Values of executables that outlive generations, as a driver asks for them.

use kolo_transport::ids::{Generation, ObjectId};
use kolo_transport::wire::{CallFailure, CallOp, FailureKind, FromWorker, Kept};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::caller::method;
use super::generations::hold;
use super::node::{Group, tell};
use super::user::{Counter, Tally};
use crate::Executable;
use crate::codec;

const OBJECT: ObjectId = ObjectId(7);

fn recover() -> CallOp {
    CallOp::Recover {
        object: OBJECT,
        class: Tally::NAME.to_owned(),
    }
}

const COMMIT: CallOp = CallOp::Commit { object: OBJECT };

/// Sum, length of the list, generation in which the value was made.
type Got = (u64, usize, u64);

impl Group {
    /// Sends an operation to these workers, and waits for all of them.
    fn each<T: DeserializeOwned>(
        &mut self,
        on: &[usize],
        op: &CallOp,
        args: &impl Serialize,
    ) -> Vec<Result<T, CallFailure>> {
        let args = codec::encode(args).unwrap();
        for index in on {
            self.workers[*index].calls.send(op.clone(), &args);
        }
        on.iter().map(|index| self.end(*index)).collect()
    }

    /// The same, if all succeed alike.
    fn all<T: DeserializeOwned + PartialEq + std::fmt::Debug>(
        &mut self,
        on: &[usize],
        op: &CallOp,
        args: &impl Serialize,
    ) -> T {
        let mut results: Vec<T> = (self.each(on, op, args).into_iter())
            .map(Result::unwrap)
            .collect();
        let first = results.remove(0);
        assert!(results.iter().all(|other| *other == first), "{results:?}");
        first
    }

    /// The next generation, with calls of the same number everywhere.
    async fn next(&mut self, ranks: &[usize]) {
        self.form(ranks);
        self.publish(ranks).await;
        let last = ranks.iter().map(|index| self.workers[*index].calls.last);
        let last = last.max().unwrap();
        for index in ranks {
            self.workers[*index].calls.last = last;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_go_back_to_their_last_commit_and_a_new_one_gets_it() {
    let mut group = Group::elastic(&[1, 1]).await;
    group.complete().await;
    group.all::<u64>(&[0, 1], &recover(), &(0,));
    group.all::<u64>(&[0, 1], &method(7, "add"), &(1,));
    // The driver holds for them.
    tell(&group.workers[1].control, hold(Generation(1))).await;
    // Messages come in order, and this one has an answer.
    group.publish(&[1]).await;
    assert_eq!(group.all::<u64>(&[0, 1], &COMMIT, &()), 1);
    for index in 0..2 {
        let told = group.told(index).await;
        assert!(matches!(told, FromWorker::Committed { .. }), "{told:?}");
    }
    // Work that is lost.
    group.all::<u64>(&[0, 1], &method(7, "add"), &(100,));
    let new = group.add(1).await;
    let next = [0, 1, new];
    group.next(&next).await;
    assert_eq!(group.all::<u64>(&next, &recover(), &(0,)), 1);
    // Each of them can hand the state on from now on (E-1).
    for index in next {
        let kept = Kept::Received;
        group.has_commit(index, (Generation(2), 3), kept).await;
    }
    let got = group.each::<Got>(&next, &method(7, "get"), &());
    assert_eq!(got, [Ok((2, 1, 1)), Ok((2, 1, 1)), Ok((2, 1, 2))]);
    group.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_value_in_an_unknown_state_is_made_again_and_keeps_its_commit() {
    let mut group = Group::elastic(&[1, 1]).await;
    group.complete().await;
    let both = [0, 1];
    group.all::<u64>(&both, &recover(), &(4,));
    group.all::<u64>(&both, &method(7, "add"), &(1,));
    group.all::<u64>(&both, &COMMIT, &());
    for broken in group.each::<()>(&both, &method(7, "breaks"), &()) {
        assert_eq!(broken.unwrap_err().kind, FailureKind::Panic);
    }
    for refused in group.each::<()>(&both, &COMMIT, &()) {
        assert_eq!(refused.unwrap_err().kind, FailureKind::Poisoned);
    }
    assert_eq!(group.all::<u64>(&both, &recover(), &(4,)), 1);
    assert_eq!(group.all::<Got>(&both, &method(7, "get"), &()), (6, 1, 1));
    // Code that names the parts may panic, too.
    group.all::<()>(&both, &method(7, "set"), &(666,));
    for broken in group.each::<()>(&both, &COMMIT, &()) {
        assert_eq!(broken.unwrap_err().kind, FailureKind::Panic);
    }
    assert_eq!(group.all::<u64>(&both, &recover(), &(4,)), 1);
    assert_eq!(group.all::<Got>(&both, &method(7, "get"), &()), (6, 1, 1));
    group.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_cannot_make_the_value_fails_all_and_others_are_kept() {
    let mut group = Group::elastic(&[1]).await;
    group.complete().await;
    group.all::<u64>(&[0], &recover(), &(13,));
    let op = CallOp::Create {
        object: ObjectId(8),
        class: Counter::NAME.to_owned(),
    };
    group.all::<()>(&[0], &op, &(1,));
    let failure = group
        .each::<()>(
            &[0],
            &CallOp::Commit {
                object: ObjectId(8),
            },
            &(),
        )
        .remove(0)
        .unwrap_err();
    assert!(
        failure.message.contains("has nothing to commit"),
        "{}",
        failure.message
    );
    let new = group.add(1).await;
    group.next(&[0, new]).await;
    // Only the first value has a handle.
    group.all::<()>(&[0, new], &CallOp::Retain, &[OBJECT]);
    let gone = group.each::<()>(&[0], &method(8, "fails"), &()).remove(0);
    assert_eq!(gone.unwrap_err().kind, FailureKind::UnknownTarget);
    group.workers[new].calls.last += 1;
    let failures = group.each::<u64>(&[0, new], &recover(), &(13,));
    for failure in failures {
        let failure = failure.unwrap_err();
        assert_eq!(failure.kind, FailureKind::Error);
        assert!(failure.message.contains("bad luck"), "{}", failure.message);
    }
    group.stop().await;
}
