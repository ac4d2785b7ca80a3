//! Introduction, data plane, losses, ends of workers in one generation.

use std::time::Duration;

use kolo_collectives::{CollectiveError, ReduceOp};
use kolo_transport::ids::{Generation, Rank};
use kolo_transport::wire::{Exit, FailureKind, ToWorker};

use super::caller::{function, says};
use super::node::{Group, hear, start_worker, tell};
use crate::call::test_failure;
use crate::context::Context;
use crate::worker::failure::ControlError;
use crate::worker::{EXIT_PROTOCOL, Fatal};
use crate::{Function, codec};

#[kolo::function]
pub(super) fn sum(ctx: &Context, mine: i64) -> Result<(i64, usize, usize), CollectiveError> {
    let mut data = [mine + i64::try_from(ctx.rank()).unwrap()];
    ctx.comm().all_reduce(&mut data, ReduceOp::Sum)?;
    Ok((data[0], ctx.rank(), ctx.local_rank()))
}

/// Groups, names and messages from one rank to one other, all at once.
#[kolo::function]
fn many_groups(ctx: &Context, _round: usize) -> Result<(Vec<u32>, Vec<u32>, i64), CollectiveError> {
    let numbers = |members: Vec<Rank>| members.into_iter().map(|rank| rank.0).collect();
    let (local, cross) = (ctx.local()?, ctx.cross()?);
    assert_eq!(local.rank().index(), ctx.local_rank());
    assert_eq!(cross.rank().index(), ctx.cross_rank());
    let comm = ctx.comm();
    let name = comm.named("sum").all_reduce(vec![1_i64], ReduceOp::Sum);
    let mut data = [1_i64];
    std::thread::scope(|scope| {
        let crossing = scope.spawn(|| cross.barrier());
        local.all_reduce(&mut data, ReduceOp::Sum)?;
        crossing.join().expect("a barrier does not panic")
    })?;
    assert_eq!(data[0], i64::try_from(ctx.local_size()).unwrap());
    let last = Rank(comm.world_size() - 1);
    match comm.rank() {
        Rank(0) => comm.send(&[5_u8], last)?,
        rank if rank == last => assert_eq!(comm.receive::<u8>(Rank(0))?, [5]),
        _ => {}
    }
    Ok((
        numbers(local.members()),
        numbers(cross.members()),
        name.wait()?[0],
    ))
}

/// Every rank sends to the next one, and none receives.
#[kolo::function]
fn sends_round(ctx: &Context) -> Result<String, String> {
    let comm = ctx.comm();
    comm.set_timeout(Duration::from_secs(4));
    let next = Rank((comm.rank().0 + 1) % comm.world_size());
    match comm.send(&[1_u8], next) {
        Ok(()) => Err("somebody has received it".to_owned()),
        Err(error) => Ok(error.to_string()),
    }
}

#[kolo::function]
fn fails_on(ctx: &Context, rank: usize) -> Result<(), String> {
    if ctx.rank() == rank {
        return Err("this rank does not want to".to_owned());
    }
    ctx.comm().barrier().map_err(|error| error.to_string())
}

#[kolo::function]
async fn waits_for_ever(ctx: &Context) -> Result<(), CollectiveError> {
    std::future::pending::<()>().await;
    ctx.comm().barrier_async().await
}

impl Group {
    pub(super) fn sums(&mut self) -> Vec<(i64, usize, usize)> {
        let results = self.call(sum, (10,));
        results.into_iter().map(Result::unwrap).collect()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn groups_have_links_of_their_own_inside_nodes_and_between_them() {
    let mut group = Group::start(&[1, 1, 2, 2, 2]).await;
    group.complete().await;
    for round in 0..2_usize {
        let results = group.call(many_groups, (round,));
        let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
        let (one, two) = (vec![0, 1], vec![2, 3, 4]);
        let expected = [
            (one.clone(), vec![0, 2], 5),
            (one, vec![1, 3], 5),
            (two.clone(), vec![0, 2], 5),
            (two.clone(), vec![1, 3], 5),
            (two, vec![4], 5),
        ];
        assert_eq!(results, expected);
    }
    group.stop().await;
}

/// Ranks that had no link to each other, and of which each waits for a higher one that does something else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn higher_ranks_are_asked_for_their_links_inside_nodes_and_between_them() {
    let mut group = Group::start(&[1, 1, 2]).await;
    group.complete().await;
    for (rank, result) in (0..).zip(group.call(sends_round, ())) {
        let error = result.unwrap();
        let (next, after) = ((rank + 1) % 3, (rank + 2) % 3);
        let does = format!("rank {next}: it is in send u8 to rank {after}");
        assert!(error.contains(&does), "rank {rank}: {error}");
    }
    group.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_comes_before_the_members_are_known_waits_for_them() {
    let mut group = Group::start(&[1, 2]).await;
    group.begin(&[0, 1], sum, &(0,));
    group.complete().await;
    for index in 0..2 {
        let (sum, _, _): (i64, usize, usize) = group.end(index).unwrap();
        assert_eq!(sum, 1);
    }
    group.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_fails_is_the_cause_of_the_others_failures_and_the_next_call_works() {
    let mut group = Group::start(&[1, 1, 2]).await;
    group.complete().await;
    // Linked before, and not.
    for culprit in [1_usize, 2, 0] {
        let results = group.call(fails_on, (culprit,));
        for (rank, result) in results.into_iter().enumerate() {
            let failure = result.unwrap_err();
            assert_eq!(failure.kind, FailureKind::Error);
            if rank == culprit {
                assert_eq!(failure.message, "this rank does not want to");
                assert_eq!(failure.caused_by, None);
            } else {
                assert_eq!(failure.caused_by, Some(Rank(culprit as u32)), "{failure:?}");
                says(&failure, "this rank does not want to");
            }
        }
        assert_eq!(group.sums()[0].0, 33);
    }
    group.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_rank_ends_the_waits_on_it_with_its_name() {
    let mut group = Group::start(&[1, 1, 1]).await;
    group.complete().await;
    assert_eq!(group.sums()[0].0, 33);
    // Rank 2 never gets the call.
    group.begin(&[0, 1], sum, &(0,));
    let failure = test_failure(2, Exit::Signal(9));
    for worker in &group.workers[..2] {
        // One of another generation changes nothing.
        for generation in [Generation(9), Generation(1)] {
            let failure = failure.clone();
            tell(
                &worker.control,
                ToWorker::RankLost {
                    generation,
                    failure,
                },
            )
            .await;
        }
    }
    for index in 0..2 {
        let failure = group.end::<()>(index).unwrap_err();
        assert_eq!(failure.caused_by, Some(Rank(2)), "{failure:?}");
        for part in ["rank 2 is lost", "pid 412", "SIGKILL"] {
            says(&failure, part);
        }
    }
    group.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancel_and_stop_are_heard_while_user_code_runs() {
    let mut group = Group::start(&[1]).await;
    group.complete().await;
    let worker = &mut group.workers[0];
    let call = worker
        .calls
        .send(function(waits_for_ever::NAME), &codec::encode(&()).unwrap());
    tell(&worker.control, ToWorker::Cancel { call }).await;
    assert_eq!(
        worker.calls.receive().1.unwrap_err().kind,
        FailureKind::Cancelled
    );
    group.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_notice_before_the_welcome_ends_the_worker_well() {
    let worker = start_worker();
    hear(&worker.control).await;
    tell(
        &worker.control,
        ToWorker::Stop {
            reason: "not needed".to_owned(),
        },
    )
    .await;
    drop(worker.control);
    worker.thread.join().unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_at_the_wrong_time_are_protocol_errors() {
    let nonsense = ToWorker::Certificate {
        certificate: vec![1],
        authority: vec![2],
    };
    let worker = start_worker();
    hear(&worker.control).await;
    tell(&worker.control, nonsense.clone()).await;
    let error = worker.thread.join().unwrap().unwrap_err();
    assert_eq!(error.code(), EXIT_PROTOCOL);
    assert!(
        matches!(error, Fatal::Control(ControlError::OutOfTurn { .. })),
        "{error}"
    );

    let worker = Group::start(&[1]).await.workers.remove(0);
    tell(&worker.control, nonsense).await;
    drop(worker.calls);
    let error = worker.thread.join().unwrap().unwrap_err();
    assert!(
        error
            .to_string()
            .contains("a certificate at the wrong time"),
        "{error}"
    );
}
