//! From options to a group, or to an error.

use super::*;

#[tokio::test]
async fn a_program_is_sent_to_nodes_that_lack_it_before_the_workers_start() {
    let fake = Fake::new(2).await;
    let starting = fake.start(Executor::builder().hosts(2).output(Output::Silent));
    let mut job = fake.submitted().await;
    assert_eq!(job.spec.placement, Placement::Spread { hosts: 2, slots: 1 });
    job.placed(&fake, &[false, true]).await;
    let (program, mut stream) = match soon(fake.nodes[0].request()).await {
        (NodeRequest::PutProgram { program }, stream) => (program, stream),
        other => panic!("{other:?}"),
    };
    let mut hasher = blake3::Hasher::new();
    while let Some(piece) = soon(stream.recv.next::<fake::Piece>()).await.unwrap() {
        hasher.update(&piece.body);
    }
    assert_eq!(hasher.count(), program.size);
    assert_eq!(hasher.finalize().as_bytes(), &program.hash.0);
    assert_eq!(program, job.spec.program);
    // The head is told when the node has it, and not before.
    let early = tokio::time::timeout(Duration::from_millis(30), job.frame()).await;
    assert!(early.is_err(), "{early:?}");
    stream.send.send(&NodeReply::Done, &[]).await.unwrap();
    assert_eq!(soon(job.frame()).await, Some(SubmitFrame::ProgramReady));
    job.healthy(&fake).await;
    for node in &fake.nodes {
        node.attach(Generation(1)).await;
    }
    let executor = soon(starting).await.unwrap().unwrap();
    assert_eq!((executor.world_size(), executor.job()), (2, job.job));
    assert_eq!(executor.table().members.len(), 2);
}

#[tokio::test]
async fn a_node_that_refuses_the_program_is_named() {
    let fake = Fake::new(1).await;
    let starting = fake.start(Executor::builder().workers(1).output(Output::Silent));
    let mut job = fake.submitted().await;
    job.placed(&fake, &[false]).await;
    let (_, mut stream) = soon(fake.nodes[0].request()).await;
    let refusal = Refusal::new(
        RefusalKind::TooLarge,
        "the program has 9 GiB; allowed are 4",
    );
    stream
        .send
        .send(&NodeReply::Refused(refusal), &[])
        .await
        .unwrap();
    let error = soon(starting).await.unwrap().unwrap_err();
    assert!(matches!(error, StartError::NodeRefused { .. }));
    assert!(
        error
            .to_string()
            .contains("host-0 refused the program: the program has 9 GiB"),
        "{error}"
    );
    assert_eq!(
        soon(job.frame()).await,
        None,
        "the job's stream ends, which ends the job"
    );
}

#[tokio::test]
async fn a_refusal_of_the_head_is_shown_with_the_worker_that_failed() {
    let fake = Fake::new(1).await;
    let starting = fake.start(Executor::builder().workers(4).output(Output::Silent));
    let mut job = fake.submitted().await;
    let refusal = Refusal::new(RefusalKind::Unplaceable, "requested 4 workers, available 2");
    job.ended(JobState::Failed, Some(refusal), None).await;
    let error = soon(starting).await.unwrap().unwrap_err();
    assert!(error.is_retryable());
    assert!(
        error
            .to_string()
            .contains("requested 4 workers, available 2"),
        "{error}"
    );

    let starting = fake.start(Executor::builder().workers(1).output(Output::Silent));
    let mut job = fake.submitted().await;
    job.placed(&fake, &[true]).await;
    let refusal = Refusal::new(RefusalKind::Worker, "rank 0 ended while it was starting");
    let failure = failure(&job, 0, Exit::Code(3));
    job.ended(JobState::Failed, Some(refusal), Some(failure))
        .await;
    let error = soon(starting).await.unwrap().unwrap_err();
    assert!(!error.is_retryable());
    let text = error.to_string();
    assert!(
        text.contains("exit code 3") && text.contains("last words"),
        "{text}"
    );
}

#[tokio::test]
async fn a_node_that_is_somebody_else_is_not_called() {
    let fake = Fake::new(1).await;
    let starting = fake.start(Executor::builder().workers(1).output(Output::Silent));
    let mut job = fake.submitted().await;
    let mut nodes = job.place(&fake, [(0, true)]);
    nodes[0].address = fake.cluster.head();
    job.send(&JobEvent::Placed {
        job: job.job,
        nodes,
    })
    .await;
    let error = soon(starting).await.unwrap().unwrap_err();
    assert!(
        matches!(error, StartError::NodeUnreachable { .. }),
        "{error}"
    );
    assert!(error.to_string().contains("host-0"), "{error}");
}

#[tokio::test]
async fn a_start_that_takes_too_long_says_what_it_waited_for() {
    let fake = Fake::new(1).await;
    let builder = Executor::builder().workers(1).output(Output::Silent);
    let starting = fake.start(builder.start_timeout(Duration::from_millis(1)));
    let mut job = fake.submitted().await;
    let error = soon(starting).await.unwrap().unwrap_err();
    assert!(matches!(error, StartError::TimedOut { .. }), "{error}");
    assert!(error.to_string().contains("waiting for a place"), "{error}");
    assert_eq!(soon(job.frame()).await, None);
}

#[tokio::test]
async fn a_start_that_is_dropped_ends_the_job() {
    let fake = Fake::new(1).await;
    let starting = fake.start(Executor::builder().workers(1).output(Output::Silent));
    let mut job = fake.submitted().await;
    starting.abort();
    assert_eq!(soon(job.frame()).await, None);
}

#[tokio::test]
async fn a_head_that_goes_while_starting_is_told() {
    let fake = Fake::new(1).await;
    let starting = fake.start(Executor::builder().workers(1).output(Output::Silent));
    let job = fake.submitted().await;
    drop(job);
    let error = soon(starting).await.unwrap().unwrap_err();
    assert!(matches!(error, StartError::HeadLost { .. }), "{error}");
    assert!(error.is_retryable());
}

#[tokio::test]
async fn the_job_has_what_was_asked_for() {
    let fake = Fake::new(1).await;
    let builder = Executor::builder()
        .workers(3)
        .name("mine")
        .cpus_per_worker(0.5)
        .use_gpu(true)
        .gpus_per_worker(2)
        .resource("fpga", 1)
        .env("A", "b")
        .args(["-v"])
        .grace(Duration::from_secs(1))
        .rendezvous(true);
    let _starting = fake.start(builder);
    let spec = fake.submitted().await.spec;
    assert_eq!(
        (spec.name.as_str(), spec.per_worker.to_string().as_str()),
        ("mine", "0.5 cpus, 2 gpus, 1 fpga")
    );
    assert_eq!(
        (spec.env["A"].as_str(), spec.args.as_slice()),
        ("b", &["-v".to_owned()][..])
    );
    assert_eq!(
        (spec.start_timeout_ms, spec.grace_ms, spec.rendezvous),
        (30_000, 1000, true)
    );
    assert_eq!(spec.placement, Placement::Pack { workers: 3 });
}
