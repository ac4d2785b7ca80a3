//! Workers that outlive generations: tables, revocations, late messages, links of other generations, elastic loops.

use std::time::Duration;

use kolo_collectives::{CollectiveError, ReduceOp};
use kolo_transport::ids::{CallId, Generation, Rank};
use kolo_transport::wire::worker::FailedOperation;
use kolo_transport::wire::{Exit, FailureKind, FromWorker, Kept, ToWorker};

use super::caller::says;
use super::group::sum;
use super::node::{Group, tell};
use crate::call::test_failure;
use crate::context::Context;
use crate::elastic::{State, Value};
use crate::error::{Error, Result};

#[derive(serde::Serialize, serde::Deserialize)]
struct Steps {
    done: u64,
    /// How many ranks have done each, added up.
    by: u64,
}

/// An elastic loop that goes on in the first generation until that ends, and in others up to a step. One rank may have an error
/// of its own after some steps of the first.
#[kolo::function]
fn steps(ctx: &Context, last: u64, fails: Option<(usize, u64)>) -> Result<(Generation, u64, u64)> {
    let mut state = State::new(Value(Steps { done: 0, by: 0 }));
    ctx.elastic(&mut state, |ctx, state| {
        let is_first = ctx.generation() == Generation(1);
        while is_first || state.done < last {
            if is_first && fails == Some((ctx.rank(), state.done)) {
                return Err(Error::msg("no luck"));
            }
            let mut by = [1];
            ctx.comm().all_reduce(&mut by, ReduceOp::Sum)?;
            state.by += by[0];
            state.done += 1;
            state.commit(ctx)?;
        }
        Ok((ctx.generation(), state.done, state.by))
    })
}

/// The ranks that do not come to a barrier.
#[kolo::function]
fn is_late(ctx: &Context) -> Result<Vec<Rank>> {
    let comm = ctx.comm();
    let timeout = comm.timeout();
    comm.set_timeout(Duration::from_millis(100));
    let error = comm.barrier().unwrap_err();
    comm.set_timeout(timeout);
    match error {
        CollectiveError::Deadline { late, .. } => Ok(late),
        other => Err(other.into()),
    }
}

fn revoke(generation: Generation, lost: &[Rank]) -> ToWorker {
    ToWorker::Revoke {
        generation,
        cause: "its node has burnt down".to_owned(),
        lost: lost.to_vec(),
    }
}

pub(super) fn hold(generation: Generation) -> ToWorker {
    ToWorker::Hold {
        generation,
        why: "a host joins".to_owned(),
    }
}

impl Group {
    /// What the loop of a worker has said when it waits for the next generation: its commit, and what has failed.
    async fn holding(&mut self, index: usize) -> (u64, Option<FailedOperation>) {
        let generation = Generation(1);
        loop {
            match self.told(index).await {
                FromWorker::Committed {
                    generation: its, ..
                } => assert_eq!(its, generation),
                FromWorker::Holding {
                    generation: its,
                    commit,
                    failed,
                } => {
                    assert_eq!(its, generation);
                    return (commit, failed);
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_survivor_gets_another_rank_and_late_messages_are_refused() {
    for nodes in [[1, 1, 1], [1, 1, 2]] {
        let mut group = Group::elastic(&nodes).await;
        group.complete().await;
        assert_eq!(group.sums()[2].1, 2);
        group.form(&[0, 2]);
        // The table may come again.
        group.publish(&[0, 2]).await;
        group.publish(&[2]).await;
        let local_rank = usize::from(nodes[2] == 1);
        assert_eq!(group.sums(), [(21, 0, 0), (21, 1, local_rank)]);

        let old = Generation(1);
        let failure = test_failure(0, Exit::Signal(9));
        let mut table = group.table.clone();
        table.generation = old;
        for message in [
            ToWorker::RankLost {
                generation: old,
                failure,
            },
            revoke(old, &[Rank(0)]),
            ToWorker::Membership(table.into()),
            revoke(Generation(3), &[Rank(0)]),
            // A socket that came with nothing would be told.
            ToWorker::Peer {
                rank: Rank(0),
                generation: old,
            },
        ] {
            tell(&group.workers[2].control, message).await;
        }
        assert_eq!(group.sums(), [(21, 0, 0), (21, 1, local_rank)]);
        assert!(group.has_told_nothing());
        // A call is for the generation in which it begins.
        group.workers[2].calls.generation = old;
        group.begin(&[2], sum, &(0,));
        let failure = group.end::<()>(2).unwrap_err();
        assert_eq!(failure.kind, FailureKind::Stale);
        let text = "the call is for generation 1, but this worker is in generation 2";
        assert_eq!(failure.message, text);
        group.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_without_a_generation_takes_no_calls_and_joins_a_later_one() {
    let mut group = Group::elastic(&[1, 2]).await;
    group.complete().await;
    let spare = group.add(2).await;
    group.begin(&[spare], sum, &(0,));
    let failure = group.end::<()>(spare).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Stale);
    says(&failure, "in no generation");
    group.form(&[0, 1, spare]);
    group.complete().await;
    // All count calls alike.
    for worker in &mut group.workers {
        worker.calls.last = 5;
    }
    assert_eq!(group.sums(), [(33, 0, 0), (33, 1, 0), (33, 2, 1)]);
    // And one that is left out idles.
    group.form(&[0, spare]);
    group.complete().await;
    group.begin(&[1], sum, &(0,));
    assert_eq!(group.end::<()>(1).unwrap_err().kind, FailureKind::Stale);
    assert_eq!(group.sums(), [(21, 0, 0), (21, 1, 0)]);
    group.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_generation_that_is_revoked_ends_its_waits_with_the_lost_rank_and_the_cause() {
    for lost in [&[Rank(1)][..], &[]] {
        let mut group = Group::elastic(&[1, 1]).await;
        group.complete().await;
        group.begin(&[0], sum, &(0,));
        tell(&group.workers[0].control, revoke(Generation(1), lost)).await;
        let failure = group.end::<()>(0).unwrap_err();
        assert_eq!(failure.caused_by, lost.first().copied());
        says(&failure, "its node has burnt down");
        assert!(!failure.stopping, "the job goes on");
        assert_eq!(failure.kind, FailureKind::GenerationOver);
        group.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_is_seen_at_the_same_commit_on_all_ranks_and_the_loop_goes_on_from_there() {
    let mut group = Group::elastic(&[1, 2]).await;
    group.complete().await;
    group.begin(&[0, 1], steps, &(0, None));
    for index in 0..2 {
        // The first is the state's sync.
        group
            .has_commit(index, (Generation(1), 2), Kept::Made)
            .await;
    }
    // One rank hears of it.
    tell(&group.workers[1].control, hold(Generation(1))).await;
    let (commit, failed) = group.holding(0).await;
    assert_eq!((group.holding(1).await, failed), ((commit, None), None));
    group.form(&[0, 1]);
    group.publish(&[0, 1]).await;
    for index in 0..2 {
        // Nothing is done again.
        let done = commit - 1;
        assert_eq!(group.end(index), Ok((Generation(2), done, 2 * done)));
    }
    // The hold was for the generation before.
    group.begin(&[0, 1], steps, &(3, None));
    for index in 0..2 {
        assert_eq!(group.end(index), Ok((Generation(2), 3, 6)));
    }
    group.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_elastic_loop_goes_on_after_a_loss_with_a_new_rank_and_a_new_worker() {
    for nodes in [[1, 1, 1], [1, 1, 2]] {
        let mut group = Group::elastic(&nodes).await;
        group.complete().await;
        let args = (20, Some((1, 5)));
        group.begin(&[0, 1, 2], steps, &args);
        assert_eq!(group.end::<()>(1).unwrap_err().message, "no luck");
        for index in [0, 2] {
            let (commit, failed) = group.holding(index).await;
            let failed = failed.unwrap();
            assert_eq!(failed.culprit, Some(Rank(1)));
            assert!(failed.reason.contains("no luck"), "{}", failed.reason);
            // The sync and five steps, or the step before if the other rank was faster.
            assert!((5..=6).contains(&commit), "{commit}");
        }
        let new = group.add(1).await;
        group.form(&[0, 2, new]);
        // The new worker gets the call that runs.
        group.publish(&[0, 2, new]).await;
        group.begin(&[new], steps, &args);
        let ends = [0, 2, new].map(|index| group.end::<(Generation, u64, u64)>(index));
        assert_eq!(ends[0], Ok((Generation(2), 20, 60)));
        assert_eq!(ends, [ends[0].clone(), ends[0].clone(), ends[0].clone()]);
        // Callers hear in which generation, if that is not the one that the call was for.
        let ended_in = [0, 2, new].map(|index| group.workers[index].calls.ended_in.0);
        assert_eq!(ended_in, [2, 2, 0]);
        for worker in &mut group.workers {
            worker.calls.last = 5;
        }
        assert_eq!(group.sums()[1].1, 1, "rank 2 has become rank 1");
        group.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_loop_whose_worker_is_left_out_says_so() {
    let mut group = Group::elastic(&[1, 1]).await;
    group.complete().await;
    group.begin(&[0, 1], steps, &(0, None));
    for index in 0..2 {
        assert!(matches!(
            group.told(index).await,
            FromWorker::Committed { .. }
        ));
    }
    group.form(&[0]);
    group.publish(&[0, 1]).await;
    let failure = group.end::<()>(1).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Left, "{}", failure.message);
    let (generation, ..): (Generation, u64, u64) = group.end(0).unwrap();
    assert_eq!(generation, Generation(2));
    group.stop().await;
}

/// G-1, in both directions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn links_of_another_generation_are_refused_and_a_peer_that_is_behind_is_waited_for() {
    let mut group = Group::elastic(&[1, 2, 3]).await;
    group.complete().await;
    // Worker 2 is not in the next generation, and does not know that.
    group.form(&[0, 1]);
    group.publish(&[0]).await;
    group.begin(&[2], sum, &(0,));
    let failure = group.end::<()>(2).unwrap_err();
    for part in [
        "the link is of another generation",
        "rank 0 is in generation 2, rank 2 in generation 1",
    ] {
        says(&failure, part);
    }
    // Worker 0 has not heard of the third generation, and is late there.
    group.form(&[0, 1]);
    group.publish(&[1]).await;
    group.begin(&[1], is_late, &());
    assert_eq!(group.end(1), Ok(vec![Rank(0)]));
    group.publish(&[0]).await;
    group.workers[0].calls.last = 1;
    group.begin(&[0, 1], sum, &(0,));
    for index in 0..2 {
        assert_eq!(group.end(index), Ok((1_i64, index, 0_usize)));
    }
    group.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_loop_of_a_static_job_ends_at_once_with_its_own_error() {
    let mut group = Group::start(&[1, 1]).await;
    group.complete().await;
    for last in 0..2 {
        let ends = group.call(steps, (last, Some((1, 3))));
        let [first, second] = &ends[..] else {
            panic!("{ends:?}");
        };
        assert_eq!(second.as_ref().unwrap_err().message, "no luck");
        let failure = first.as_ref().unwrap_err();
        assert_eq!(failure.caused_by, Some(Rank(1)));
        assert!(!failure.stopping);
        assert!(
            failure.message.starts_with("rank 1 failed in call")
                && failure.message.ends_with("no luck"),
            "{}",
            failure.message
        );
        // The communicator works on.
        assert_eq!(group.sums()[1], (21, 1, 1));
    }
    assert!(group.has_told_nothing());
    group.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_loop_that_waits_for_a_generation_ends_with_the_reason() {
    let ends: [(&str, u64); 4] = [
        ("the job ends with generation 1: the test ends", 60_000),
        ("this worker is not in generation 2", 60_000),
        (
            "the call is not wanted any more, and waits for no generation after 1",
            60_000,
        ),
        ("no generation after 1 came within 20ms", 20),
    ];
    for (case, (expected, within)) in ends.into_iter().enumerate() {
        let mut group = Group::start_with(&[1, 1], Some(within)).await;
        group.complete().await;
        group.begin(&[0], steps, &(0, None));
        let control = std::sync::Arc::clone(&group.workers[0].control);
        tell(&control, revoke(Generation(1), &[Rank(1)])).await;
        assert_eq!(group.holding(0).await.0, 0);
        match case {
            0 => {
                let reason = "the test ends".to_owned();
                tell(&control, ToWorker::Stop { reason }).await;
            }
            1 => {
                group.form(&[1]);
                let table = group.table.clone();
                tell(&control, ToWorker::Membership(table.into())).await;
            }
            2 => tell(&control, ToWorker::Cancel { call: CallId(1) }).await,
            _ => {}
        }
        let failure = group.end::<()>(0).unwrap_err();
        let text = &failure.message;
        assert!(
            text.starts_with("rank 1 is lost") && text.contains(expected),
            "{text}"
        );
        assert_eq!(
            (failure.caused_by, failure.stopping),
            (Some(Rank(1)), case == 0)
        );
        group.stop().await;
    }
}
