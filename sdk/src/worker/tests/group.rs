//! Introduction, data plane, losses, ends of workers in one generation.

use std::time::Duration;

use kolo_collectives::{CollectiveError, ReduceOp};
use kolo_transport::ids::Rank;
use kolo_transport::wire::ToWorker;

use super::node::{Group, hear, start_worker, tell};
use crate::context::Context;
use crate::worker::failure::ControlError;
use crate::worker::{EXIT_PROTOCOL, Fatal};

#[kolo::function]
pub(super) fn sum(ctx: &Context, mine: i64) -> Result<(i64, usize, usize), CollectiveError> {
    let mut data = [mine + i64::try_from(ctx.rank()).unwrap()];
    ctx.comm().all_reduce(&mut data, ReduceOp::Sum)?;
    Ok((data[0], ctx.rank(), ctx.local_rank()))
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

impl Group {
    pub(super) fn sums(&mut self) -> Vec<(i64, usize, usize)> {
        let results = self.call(sum, (10,));
        results.into_iter().map(Result::unwrap).collect()
    }
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
