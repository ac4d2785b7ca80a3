//! Groups whose members change.

use super::*;
use crate::error::{CallError, RecoveryError};

const FIRST: Generation = Generation(1);
const SECOND: Generation = Generation(2);

fn lost(job: &FakeJob, slot: u32, rank: u32) -> CallReply {
    CallReply::Lost {
        slot: Slot(slot),
        incarnation: Incarnation::FIRST,
        failure: failure(job, rank, Exit::Signal(9)),
        stopping: false,
    }
}

fn generation_over(error: &CallError) -> (Generation, &[Rank]) {
    assert!(error.is_retryable(), "{error}");
    match error {
        CallError::GenerationOver {
            generation, lost, ..
        } => (*generation, lost),
        _ => panic!("{error:?}"),
    }
}

#[tokio::test]
async fn a_run_goes_on_through_losses_and_joins() {
    let fake = Fake::new(3).await;
    let (executor, mut job) = fake
        .elastic(Executor::builder().workers(1..=3), &[0, 0, 1])
        .await;
    let mut changes = executor.generations();
    let run = tokio::spawn(executor.run(add, 1).into_future());
    let (call, ranks, ..) = fake.nodes[0].call().await;
    assert_eq!(ranks, [Rank(0), Rank(1)]);
    assert_eq!(fake.nodes[1].call().await.0, call);
    // Slot 0 is lost. A node joins that lacks the program.
    fake.nodes[0].reply(&lost(&job, 0, 0), &[]).await;
    job.places(&fake, &[2], false).await;
    let (request, mut stream) = soon(fake.nodes[2].request()).await;
    assert!(
        matches!(request, NodeRequest::PutProgram { .. }),
        "{request:?}"
    );
    while soon(stream.recv.next::<fake::Piece>())
        .await
        .unwrap()
        .is_some()
    {}
    stream.send.send(&NodeReply::Done, &[]).await.unwrap();
    assert_eq!(soon(job.frame()).await, Some(SubmitFrame::ProgramReady));
    let members = [(1, 1, 0), (2, 1, 1), (7, 1, 2)];
    job.generation(&fake, 2, "a worker was lost", &members)
        .await;
    fake.attach(&members, SECOND).await;
    // The new process alone gets the call, which keeps its number.
    let (same, ranks, ..) = fake.nodes[2].call().await;
    assert_eq!((same, ranks), (call, vec![Rank(2)]));
    assert_eq!((executor.generation(), executor.world_size()), (SECOND, 3));
    assert_eq!(executor.table().members[2].slot, Slot(7));
    // Those that stayed answer where they got it.
    fake.nodes[0]
        .answers(FIRST, call, (1, SECOND), &10_u32)
        .await;
    fake.nodes[2]
        .answers(SECOND, call, (7, SECOND), &70_u32)
        .await;
    fake.nodes[1]
        .answers(FIRST, call, (2, SECOND), &20_u32)
        .await;
    assert_eq!(soon(run).await.unwrap().unwrap(), [10, 20, 70]);
    // Nobody calls over the first channels any more.
    fake.nodes[0].hung_up(FIRST).await;
    fake.nodes[1].hung_up(FIRST).await;
    let first = soon(changes.next()).await.unwrap();
    assert_eq!((first.before, first.joined.len()), (0, 3));
    let second = soon(changes.next()).await.unwrap();
    assert_eq!((second.before, &second.left[..]), (3, &[Rank(0)][..]));
    assert_eq!(second.joined, [Rank(2)]);
    assert_eq!(second.table.cause, "a worker was lost");
    // A job that has replaced what it lost ends well.
    let stopping = tokio::spawn(async move { executor.shutdown().await });
    assert_eq!(soon(job.frame()).await, Some(SubmitFrame::Done));
    assert_eq!(soon(job.frame()).await, Some(SubmitFrame::Stop));
    job.ended(JobState::Succeeded, None, None).await;
    let gone = Refusal::new(RefusalKind::NotFound, "gone");
    fake.answer_job(HeadReply::Refused(gone)).await;
    assert_eq!(soon(stopping).await.unwrap().unwrap().len(), 3);
    assert!(soon(changes.next()).await.is_none());
}

#[tokio::test]
async fn other_calls_fail_with_their_generation_and_are_taken_by_the_next() {
    let fake = Fake::new(1).await;
    let (executor, mut job) = fake
        .elastic(Executor::builder().workers(1..=2), &[0, 0])
        .await;
    let node = &fake.nodes[0];
    let well = tokio::spawn(executor.on(Rank(0)).run(add, 1).into_future());
    let (kept, ..) = node.call().await;
    let hit = tokio::spawn(executor.on(Rank(1)).run(add, 1).into_future());
    node.call().await;
    let mut each = executor.submit(add, 1);
    let (both, ..) = node.call().await;
    node.reply(&lost(&job, 1, 1), &[]).await;
    let error = soon(hit).await.unwrap().unwrap_err();
    assert_eq!(generation_over(&error), (FIRST, &[Rank(1)][..]));
    assert_eq!(
        (error.kind(), error.rank()),
        (CallErrorKind::GenerationOver, Some(Rank(1)))
    );
    assert!(error.to_string().contains("last words"), "{error}");
    let error = soon(each.remove(1)).await.unwrap_err();
    assert_eq!(generation_over(&error).0, FIRST);
    // Calls on a rank that is well go on; nothing new is taken.
    let refused = soon(executor.on(Rank(0)).run(add, 1)).await.unwrap_err();
    assert_eq!(generation_over(&refused), (FIRST, &[Rank(1)][..]));
    node.returns(kept, Rank(0), &5_u32).await;
    assert_eq!(soon(well).await.unwrap().unwrap(), 5);
    let other = executor.clone();
    let mut recovered = tokio::spawn(async move { other.recovered().await });
    settle(&mut recovered).await;
    job.generation(&fake, 2, "a worker was lost", &[(0, 1, 0)])
        .await;
    node.attach(SECOND).await;
    let next = soon(recovered).await.unwrap().unwrap();
    assert_eq!((next.generation, next.world_size), (SECOND, 1));
    assert_eq!(next.cause, "a worker was lost");
    let again = tokio::spawn(executor.on(Rank(0)).run(add, 1).into_future());
    let (call, ranks, ..) = node.call().await;
    assert!(call > both && ranks == [Rank(0)], "{call} {ranks:?}");
    node.answers(SECOND, call, (0, SECOND), &6_u32).await;
    assert_eq!(soon(again).await.unwrap().unwrap(), 6);
    // A call of the first generation ends there all the same.
    node.answers(FIRST, both, (0, FIRST), &7_u32).await;
    assert_eq!(soon(each.remove(0)).await.unwrap(), 7);
    node.hung_up(FIRST).await;
}

#[tokio::test]
async fn calls_between_generations_wait_if_they_are_to() {
    let fake = Fake::new(1).await;
    let builder = Executor::builder().workers(1..=2).wait_for_recovery(true);
    let (executor, mut job) = fake.elastic(builder, &[0, 0]).await;
    let node = &fake.nodes[0];
    let hit = tokio::spawn(executor.on(Rank(1)).run(add, 1).into_future());
    node.call().await;
    node.reply(&lost(&job, 1, 1), &[]).await;
    generation_over(&soon(hit).await.unwrap().unwrap_err());
    let mut waiting = tokio::spawn(executor.on(Rank(0)).run(add, 1).into_future());
    let mut run = tokio::spawn(executor.run(add, 1).into_future());
    settle(&mut waiting).await;
    settle(&mut run).await;
    job.generation(&fake, 2, "a worker was lost", &[(0, 1, 0)])
        .await;
    node.attach(SECOND).await;
    for _ in 0..2 {
        let (call, ranks, ..) = node.call().await;
        assert_eq!(ranks, [Rank(0)]);
        node.answers(SECOND, call, (0, SECOND), &8_u32).await;
    }
    assert_eq!(soon(waiting).await.unwrap().unwrap(), 8);
    assert_eq!(soon(run).await.unwrap().unwrap(), [8]);
    // The end is no generation to wait for.
    let hit = tokio::spawn(executor.on(Rank(0)).run(add, 1).into_future());
    node.call().await;
    node.reply(&lost(&job, 0, 0), &[]).await;
    generation_over(&soon(hit).await.unwrap().unwrap_err());
    let mut late = tokio::spawn(executor.on(Rank(0)).run(add, 1).into_future());
    settle(&mut late).await;
    job.ended(JobState::Failed, None, None).await;
    assert_eq!(
        soon(late).await.unwrap().unwrap_err().kind(),
        CallErrorKind::Ended
    );
}

/// A group of two, to which the next one is added between calls.
#[tokio::test]
async fn a_group_changes_between_two_calls_and_cuts_none() {
    for waits in [false, true] {
        let fake = Fake::new(1).await;
        let builder = Executor::builder().workers(1..=3).wait_for_recovery(waits);
        let (executor, mut job) = fake.elastic(builder, &[0, 0]).await;
        let node = &fake.nodes[0];
        let run = tokio::spawn(executor.run(add, 1).into_future());
        let (spanning, ..) = node.call().await;
        let one = tokio::spawn(executor.on(Rank(1)).run(add, 1).into_future());
        let (plain, ..) = node.call().await;
        job.send(&JobEvent::Hold { generation: FIRST }).await;
        node.returns(plain, Rank(1), &1_u32).await;
        assert_eq!(soon(one).await.unwrap().unwrap(), 1);
        // The other one is under way, and more may come.
        let one = tokio::spawn(executor.on(Rank(0)).run(add, 1).into_future());
        let (plain, ..) = node.call().await;
        for rank in [Rank(0), Rank(1)] {
            node.returns(spanning, rank, &2_u32).await;
        }
        assert_eq!(soon(run).await.unwrap().unwrap(), [2, 2]);
        node.returns(plain, Rank(0), &3_u32).await;
        assert_eq!(soon(one).await.unwrap().unwrap(), 3);
        let holding = SubmitFrame::Holding { generation: FIRST };
        assert_eq!(soon(job.frame()).await, Some(holding));
        // A run is not lost in between, and neither are others if they are to wait.
        let mut run = tokio::spawn(executor.run(add, 1).into_future());
        settle(&mut run).await;
        let mut other = tokio::spawn(executor.on(Rank(1)).run(add, 1).into_future());
        if waits {
            settle(&mut other).await;
        } else {
            let refused = soon(&mut other).await.unwrap().unwrap_err();
            assert_eq!(generation_over(&refused), (FIRST, &[][..]));
        }
        let members = [(0, 1, 0), (1, 1, 0), (2, 1, 0)];
        job.generation(&fake, 2, "1 new", &members).await;
        node.attach(SECOND).await;
        for _ in 0..=usize::from(waits) {
            let (call, ranks, ..) = node.call().await;
            for rank in ranks {
                let place = (rank.0, SECOND);
                node.answers(SECOND, call, place, &4_u32).await;
            }
        }
        assert_eq!(soon(run).await.unwrap().unwrap(), [4, 4, 4]);
        if waits {
            assert_eq!(soon(other).await.unwrap().unwrap(), 4);
        }
        // Without a call the change is taken at once. What is said of an older generation is late.
        for generation in [FIRST, SECOND] {
            job.send(&JobEvent::Hold { generation }).await;
        }
        let holding = SubmitFrame::Holding { generation: SECOND };
        assert_eq!(soon(job.frame()).await, Some(holding));
    }
}

#[tokio::test]
async fn a_job_that_can_not_recover_says_why() {
    let fake = Fake::new(1).await;
    let (executor, mut job) = fake
        .elastic(Executor::builder().workers(2..=2), &[0, 0])
        .await;
    let run = tokio::spawn(executor.run(add, 1).into_future());
    let node = &fake.nodes[0];
    node.call().await;
    node.reply(&lost(&job, 1, 1), &[]).await;
    let refusal = Refusal::new(RefusalKind::Timeout, "1 worker is left of at least 2");
    let last = failure(&job, 1, Exit::Signal(9));
    job.ended(JobState::Failed, Some(refusal), Some(last.clone()))
        .await;
    let error = soon(run).await.unwrap().unwrap_err();
    assert_eq!(
        error.to_string(),
        "`add` has no result: 1 worker is left of at least 2"
    );
    assert_eq!(error.stderr_tail(), ["last words"]);
    assert!(!error.is_retryable());
    let refused = soon(executor.run(add, 1)).await.unwrap_err();
    assert_eq!(refused.kind(), CallErrorKind::Ended);
    let ended = RecoveryError::Ended {
        job: job.job,
        reason: "1 worker is left of at least 2".to_owned(),
        failure: Some(Box::new(last)),
    };
    assert_eq!(soon(executor.recovered()).await, Err(ended));
}

#[tokio::test]
async fn a_generation_that_is_over_before_it_can_be_called_is_left_out() {
    let fake = Fake::new(1).await;
    let builder = Executor::builder().workers(1..=2).output(Output::Silent);
    let starting = fake.start(builder);
    let mut job = fake.submitted().await;
    let node = &fake.nodes[0];
    job.places(&fake, &[0], true).await;
    assert_eq!(soon(job.frame()).await, Some(SubmitFrame::ProgramReady));
    let stale = NodeReply::Refused(Refusal::new(RefusalKind::Stale, "generation 2 is next"));
    job.generation(&fake, 1, "", &[(0, 1, 0)]).await;
    let (_, mut stream) = soon(node.request()).await;
    stream.send.send(&stale, &[]).await.unwrap();
    job.generation(&fake, 2, "", &[(0, 1, 0), (1, 1, 0)]).await;
    node.attach(SECOND).await;
    let executor = soon(starting).await.unwrap().unwrap();
    assert_eq!((executor.generation(), executor.world_size()), (SECOND, 2));
    // Also later.
    let call = tokio::spawn(executor.run(add, 1).into_future());
    let (id, ..) = node.call().await;
    job.generation(&fake, 3, "", &[(0, 1, 0), (1, 1, 0), (2, 1, 0)])
        .await;
    let (_, mut stream) = soon(node.request()).await;
    stream.send.send(&stale, &[]).await.unwrap();
    let members = [(0, 1, 0), (2, 1, 0)];
    job.generation(&fake, 4, "", &members).await;
    node.attach(Generation(4)).await;
    let (same, ranks, ..) = node.call().await;
    assert_eq!((same, ranks), (id, vec![Rank(1)]));
    node.answers(SECOND, id, (0, Generation(4)), &1_u32).await;
    node.answers(Generation(4), id, (2, Generation(4)), &2_u32)
        .await;
    assert_eq!(soon(call).await.unwrap().unwrap(), [1, 2]);
}

#[tokio::test]
async fn a_group_without_a_head_ends_with_its_first_loss() {
    for head_first in [true, false] {
        let fake = Fake::new(1).await;
        let builder = Executor::builder().workers(1..=2);
        let (executor, job) = fake.elastic(builder, &[0, 0]).await;
        let run = tokio::spawn(executor.run(add, 1).into_future());
        let node = &fake.nodes[0];
        node.call().await;
        // The node stops its workers after a lease, which is no failure of theirs.
        let loss = CallReply::Lost {
            slot: Slot(1),
            incarnation: Incarnation::FIRST,
            failure: failure(&job, 1, Exit::Code(0)),
            stopping: true,
        };
        if !head_first {
            node.reply(&loss, &[]).await;
        }
        fake.kill_head();
        drop(job);
        if head_first {
            let mut status = executor.inner.status.clone();
            let is_lost = |status: &JobStatus| matches!(status, JobStatus::HeadLost { .. });
            soon(status.wait_for(is_lost)).await.unwrap();
            assert!(!run.is_finished());
            node.reply(&loss, &[]).await;
        }
        let error = soon(run).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), CallErrorKind::Ended, "{error}");
        assert!(error.to_string().contains("the head at"), "{error}");
        let ended = soon(executor.recovered()).await;
        assert!(matches!(ended, Err(RecoveryError::Ended { .. })));
    }
}

#[tokio::test]
async fn values_of_executables_are_refused_and_fixed_groups_do_not_recover() {
    let fake = Fake::new(1).await;
    let (executor, _job) = fake
        .elastic(Executor::builder().workers(1..=2), &[0, 0])
        .await;
    let error = soon(executor.create::<Counter>(7))
        .await
        .map(drop)
        .unwrap_err();
    assert!(matches!(error, CallError::Elastic { .. }), "{error}");
    let (fixed, job, fake) = Fake::group(1, 2).await;
    assert_eq!(soon(fixed.recovered()).await.unwrap().generation, FIRST);
    let mut changes = fixed.generations();
    assert_eq!(soon(changes.next()).await.unwrap().joined.len(), 2);
    assert!(soon(changes.next()).await.is_none());
    let hit = tokio::spawn(fixed.on(Rank(1)).run(add, 1).into_future());
    fake.nodes[0].call().await;
    fake.nodes[0].reply(&lost(&job, 1, 1), &[]).await;
    assert!(!soon(hit).await.unwrap().unwrap_err().is_retryable());
    let job = job.job;
    assert_eq!(
        soon(fixed.recovered()).await,
        Err(RecoveryError::Fixed { job })
    );
}
