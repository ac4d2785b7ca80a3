//! Losses, ends and output.

use super::*;

#[tokio::test]
async fn a_loss_of_another_process_of_the_slot_is_none() {
    let (executor, job, fake) = Fake::group(1, 1).await;
    let call = tokio::spawn(executor.run(add, 1).into_future());
    let (id, ..) = fake.nodes[0].call().await;
    let failure = failure(&job, 0, Exit::Signal(9));
    let lost = CallReply::Lost {
        slot: Slot(0),
        incarnation: Incarnation(7),
        failure,
        stopping: false,
    };
    fake.nodes[0].reply(&lost, &[]).await;
    fake.nodes[0].returns(id, Rank(0), &1_u32).await;
    assert_eq!(soon(call).await.unwrap().unwrap(), [1]);
}

#[tokio::test]
async fn a_job_that_fails_ends_every_call_with_the_first_cause() {
    let (executor, mut job, fake) = Fake::group(2, 1).await;
    let call = tokio::spawn(executor.on(Rank(0)).run(add, 1).into_future());
    fake.nodes[0].call().await;
    // Its own worker is stopped because of another.
    let stopped = failure(&job, 0, Exit::Signal(15));
    let lost = CallReply::Lost {
        slot: Slot(0),
        incarnation: Incarnation::FIRST,
        failure: stopped,
        stopping: true,
    };
    fake.nodes[0].reply(&lost, &[]).await;
    let cause = failure(&job, 1, Exit::Signal(11));
    job.ended(JobState::Failed, None, Some(cause.clone())).await;
    let error = soon(call).await.unwrap().unwrap_err();
    assert_eq!(
        (error.rank(), error.exit()),
        (Some(Rank(1)), Some(Exit::Signal(11)))
    );
    soon(executor.ended()).await;
    assert!(soon(executor.run(add, 1)).await.is_err());
    let error = soon(executor.shutdown()).await.unwrap_err();
    assert!(
        matches!(error, ShutdownError::Failed { failure: Some(failure), .. } if *failure == cause)
    );
}

#[tokio::test]
async fn shutdown_asks_the_head_and_gives_the_exits() {
    let (executor, mut job, fake) = Fake::group(1, 2).await;
    let pending = tokio::spawn(executor.run(add, 1).into_future());
    let (call, ..) = fake.nodes[0].call().await;
    let other = executor.clone();
    let stopping = tokio::spawn(async move { other.shutdown().await });
    // The first for heads that know it, the second for all.
    assert_eq!(soon(job.frame()).await, Some(SubmitFrame::Done));
    assert_eq!(soon(job.frame()).await, Some(SubmitFrame::Stop));
    // No new calls; the one that runs may end.
    let refused = soon(executor.run(add, 2)).await.unwrap_err();
    assert_eq!(
        refused.to_string(),
        "`add` has no result: the group was shut down"
    );
    fake.nodes[0].returns(call, Rank(0), &1_u32).await;
    fake.nodes[0].returns(call, Rank(1), &2_u32).await;
    assert_eq!(soon(pending).await.unwrap().unwrap(), [1, 2]);
    job.ended(JobState::Succeeded, None, None).await;
    let info = job.info(&[Some(Exit::Code(0)), None]);
    fake.answer_job(HeadReply::Job(info)).await;
    let exits = soon(stopping).await.unwrap().unwrap();
    assert_eq!(exits.len(), 2);
    assert_eq!(
        (exits[0].rank, exits[0].exit),
        (Rank(0), Some(Exit::Code(0)))
    );
    assert_eq!((exits[1].rank, exits[1].exit), (Rank(1), None));
    // Again, with the same answer; a head that knows no more is no failure.
    let again = tokio::spawn(async move { executor.shutdown().await });
    fake.answer_job(HeadReply::Refused(Refusal::new(
        RefusalKind::NotFound,
        "gone",
    )))
    .await;
    assert_eq!(soon(again).await.unwrap().unwrap()[0].exit, None);
}

#[tokio::test]
async fn calls_go_on_while_the_head_is_away() {
    let (executor, job, fake) = Fake::group(1, 1).await;
    fake.kill_head();
    drop(job);
    let status = executor.inner.status.clone();
    soon(
        status
            .clone()
            .wait_for(|status| matches!(status, JobStatus::HeadLost { .. })),
    )
    .await
    .unwrap();
    let call = tokio::spawn(executor.run(add, 1).into_future());
    let (id, ..) = fake.nodes[0].call().await;
    fake.nodes[0].returns(id, Rank(0), &1_u32).await;
    assert_eq!(soon(call).await.unwrap().unwrap(), [1]);
    let error = soon(executor.shutdown()).await.unwrap_err();
    assert!(matches!(error, ShutdownError::HeadLost { .. }), "{error}");
}
