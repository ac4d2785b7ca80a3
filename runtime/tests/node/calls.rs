//! Calls through a node.

use kolo_transport::ids::{CallId, DriverId, Generation, JobId, Rank};
use kolo_transport::wire::{
    CallFrame, CallOp, CallReply, Exit, FailureKind, NodeReply, NodeRequest, Outcome, RankFailure,
    RefusalKind,
};
use kolo_transport::{RandomId as _, Stream};
use tempfile::TempDir;

use crate::bed::{Bed, attach, call_frame, connect, driver, soon};

fn kind(outcome: Outcome) -> FailureKind {
    match outcome {
        Outcome::Failed(failure) => failure.kind,
        Outcome::Returned => panic!("it returned"),
    }
}

#[tokio::test]
async fn calls_run_once_and_in_order_on_each_rank() {
    let bed = Bed::start().await;
    let job = bed.healthy(2, "").await;
    let mut calls = job.attach().await;
    // More than fits into one write or one socket.
    let count = 5000_u64;
    let sent = async {
        for number in 0..count {
            let ranks: &[u32] = match number % 3 {
                0 => &[0],
                1 => &[1],
                _ => &[0, 1],
            };
            calls
                .send(ranks, "echo", number.to_string().as_bytes())
                .await;
        }
        let mut next = [Vec::new(), Vec::new()];
        for number in 0..count {
            if number % 3 != 1 {
                next[0].push(number);
            }
            if number % 3 != 0 {
                next[1].push(number);
            }
        }
        let mut seen = [Vec::new(), Vec::new()];
        while seen[0].len() + seen[1].len() < next[0].len() + next[1].len() {
            let (call, rank, outcome, body) = calls.result().await;
            assert_eq!(outcome, Outcome::Returned);
            let number: u64 = std::str::from_utf8(&body).unwrap().parse().unwrap();
            assert_eq!(call, CallId(number + 1));
            seen[rank.index()].push(number);
        }
        assert_eq!(seen, next);
    };
    soon(sent).await;
    job.stop().await;
    bed.end().await;
}

#[tokio::test]
async fn a_worker_that_does_not_read_holds_up_its_callers_and_nothing_is_lost() {
    let bed = Bed::start().await;
    let job = bed.healthy(2, "").await;
    let mut calls = job.attach().await;
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("go");
    let wait = format!("await-file:{}", file.display());
    calls.send(&[0], &wait, b"").await;
    // Far more than any queue holds.
    let body = vec![5; 1 << 20];
    let count = 64;
    let mut other = job.attach().await;
    other.next = 1_000_000;
    let Stream { send, recv } = &mut calls.stream;
    let sending = async {
        for number in 2..2 + count {
            let frame = call_frame(CallId(number), &[0], "echo");
            send.send(&frame, &body).await.unwrap();
        }
    };
    tokio::pin!(sending);
    // The driver's stream is held up, and those to other workers are not.
    for _ in 0..100 {
        tokio::select! {
            () = &mut sending => panic!("somebody swallows everything"),
            rank = other.call(1, "rank") => assert_eq!(rank, "1"),
        }
    }
    std::fs::write(&file, b"").unwrap();
    let receiving = async {
        for number in 1..2 + count {
            let frame = recv.expect::<CallReply>().await.unwrap();
            let CallReply::Result { call, outcome, .. } = frame.head else {
                panic!("{frame:?}");
            };
            assert_eq!((call, outcome), (CallId(number), Outcome::Returned));
            assert_eq!(frame.body.len(), if number == 1 { 0 } else { body.len() });
        }
    };
    soon(async { tokio::join!(sending, receiving) }).await;
    job.stop().await;
    bed.end().await;
}

#[tokio::test]
async fn a_call_is_cancelled_on_the_ranks_that_are_named() {
    let bed = Bed::start().await;
    let job = bed.healthy(2, "").await;
    let mut calls = job.attach().await;
    let call = calls.send(&[0, 1], "await-cancel", b"").await;
    calls.cancel(call, &[1]).await;
    let (answered, rank, outcome, _) = calls.result().await;
    assert_eq!((answered, rank), (call, Rank(1)));
    assert_eq!(kind(outcome), FailureKind::Cancelled);
    // One that is unknown or over changes nothing.
    calls.cancel(CallId(99), &[]).await;
    calls.cancel(call, &[1]).await;
    assert_eq!(calls.call(1, "rank").await, "1");
    calls.cancel(call, &[]).await;
    let (answered, rank, outcome, _) = calls.result().await;
    assert_eq!((answered, rank), (call, Rank(0)));
    assert_eq!(kind(outcome), FailureKind::Cancelled);
    // A call that waits behind another is cancelled before it runs.
    let first = calls.send(&[0], "await-cancel", b"").await;
    let second = calls.send(&[0], "await-cancel", b"").await;
    calls.cancel(second, &[]).await;
    calls.cancel(first, &[]).await;
    assert_eq!(calls.result().await.0, first);
    assert_eq!(calls.result().await.0, second);
    job.stop().await;
    bed.end().await;
}

#[tokio::test]
async fn only_the_owner_attaches_and_only_to_the_current_generation() {
    let bed = Bed::start().await;
    let job = bed.healthy(1, "").await;
    let stranger = driver(&bed.runtime, &bed.head.authority, DriverId::random());
    let connection = connect(&stranger, &bed.node).await;
    let refusal = attach(&connection, job.id, 1).await.unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::Forbidden);
    let connection = bed.connect().await;
    let refusal = attach(&connection, job.id, 2).await.unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::Stale);
    let refusal = attach(&connection, JobId(1), 1).await.unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::NotFound);
    job.stop().await;
    bed.end().await;
}

#[tokio::test]
async fn what_is_wrong_is_answered_and_ends_nothing_else() {
    let bed = Bed::start().await;
    let job = bed.healthy(2, "").await;
    let mut calls = job.attach().await;
    // Calls for another generation, or another rank.
    let frame = CallFrame::Call {
        call: CallId(700),
        generation: Generation(2),
        ranks: vec![Rank(0)],
        deadline_ms: None,
        op: CallOp::Function {
            name: "rank".to_owned(),
        },
    };
    calls.stream.send.send(&frame, &[]).await.unwrap();
    let (call, rank, outcome, _) = calls.result().await;
    assert_eq!((call, rank), (CallId(700), Rank(0)));
    assert_eq!(kind(outcome), FailureKind::Stale);
    calls.send(&[5, 0], "rank", b"").await;
    let mut results = [calls.result().await, calls.result().await];
    results.sort_by_key(|result| result.1);
    assert_eq!(results[0].2, Outcome::Returned);
    assert_eq!(results[1].1, Rank(5));
    assert_eq!(kind(results[1].2.clone()), FailureKind::NoSuchRank);

    // C-1: a rank that is named twice runs the call once, and nothing more comes of it.
    let call = calls.send(&[1, 0, 1, 1, 0], "rank", b"").await;
    let mut results = [calls.result().await, calls.result().await];
    results.sort_by_key(|result| result.1);
    for (rank, (answered, from, outcome, _)) in results.into_iter().enumerate() {
        assert_eq!((answered, from), (call, Rank(rank as u32)));
        assert_eq!(outcome, Outcome::Returned);
    }
    // A result that nobody asked for is dropped.
    assert_eq!(calls.call(0, "unasked").await, "asked");
    assert_eq!(calls.call(1, "rank").await, "1");

    // Nonsense from a driver ends its channel only.
    let connection = bed.connect().await;
    let mut stream = attach(&connection, job.id, 1).await.unwrap();
    let nonsense = [0, 0, 0, 1, 0, 0, 0, 0, 0xc1];
    stream.send.send_encoded(&nonsense).await.unwrap();
    let end = soon(stream.recv.next::<CallReply>()).await;
    assert!(!matches!(end, Ok(Some(_))), "{end:?}");
    assert_eq!(calls.call(0, "rank").await, "0");
    job.stop().await;
    bed.end().await;
}

/// More than fit into any queue of the worker's control socket, which the head's messages go through as well.
#[tokio::test]
async fn any_number_of_calls_is_cancelled_and_the_worker_lives() {
    let bed = Bed::start().await;
    let job = bed.healthy(1, "").await;
    let mut calls = job.attach().await;
    let count = 3000;
    for _ in 0..count {
        calls.send(&[0], "await-cancel", b"").await;
    }
    for call in 1..=count / 2 {
        calls.cancel(CallId(call), &[]).await;
    }
    // The rest goes with the channel.
    drop(calls);
    let mut calls = job.attach().await;
    calls.next = 1_000_000;
    // If one were forgotten, this would wait for ever.
    assert_eq!(calls.call(0, "rank").await, "0");
    job.stop().await;
    bed.end().await;
}

#[tokio::test]
async fn a_driver_that_calls_nobody_and_reads_no_answers_is_held_up() {
    let bed = Bed::start().await;
    let job = bed.healthy(1, "").await;
    let mut calls = job.attach().await;
    let mut other = job.attach().await;
    let nobody: Vec<u32> = (1..1000).collect();
    let send = &mut calls.stream.send;
    // Some 100 MB of answers.
    let sending = async {
        for number in 0..1000 {
            let frame = call_frame(CallId(number), &nobody, "rank");
            send.send(&frame, &[]).await.unwrap();
        }
    };
    tokio::pin!(sending);
    let end = std::time::Instant::now() + std::time::Duration::from_secs(2);
    while std::time::Instant::now() < end {
        tokio::select! {
            () = &mut sending => panic!("the node keeps all the answers"),
            rank = other.call(0, "rank") => assert_eq!(rank, "0"),
        }
    }
    job.stop().await;
    bed.end().await;
}

#[tokio::test]
async fn a_loss_on_another_node_reaches_workers_and_not_callers_twice() {
    let bed = Bed::start().await;
    let mut start = bed.job(2, "");
    start.world_size = 3;
    let job = bed.healthy_with(start).await;
    let mut calls = job.attach().await;
    let call = calls.send(&[0, 1], "await-loss:2", b"").await;
    let failure = RankFailure {
        rank: Rank(2),
        node: kolo_transport::ids::NodeId(9),
        hostname: "elsewhere".to_owned(),
        pid: 4711,
        exit: Exit::Signal(9),
        reason: None,
        stderr_tail: vec!["far away".to_owned()],
        account: None,
    };
    let lost = |generation| NodeRequest::RankLost {
        job: job.id,
        generation: Generation(generation),
        failure: failure.clone(),
    };
    let reply = bed.head.ask(lost(9)).await;
    assert!(
        matches!(&reply, NodeReply::Refused(refusal) if refusal.kind == RefusalKind::Stale),
        "{reply:?}"
    );
    for _ in 0..2 {
        assert_eq!(bed.head.ask(lost(1)).await, NodeReply::Done);
    }
    // Callers hear it from the rank's own node, which is not this one.
    for _ in 0..2 {
        let (answered, _, outcome, _) = calls.result().await;
        assert_eq!((answered, outcome), (call, Outcome::Returned));
    }
    assert_eq!(calls.call(0, "rank").await, "0");
    job.stop().await;
    bed.end().await;
}

#[tokio::test]
async fn a_worker_that_answers_nonsense_is_killed() {
    let bed = Bed::start().await;
    let job = bed.healthy(2, "").await;
    let mut calls = job.attach().await;
    calls.send(&[0], "garbage", b"").await;
    let (failure, _) = calls.loss().await;
    assert_eq!((failure.rank, failure.exit), (Rank(0), Exit::Signal(9)));
    let reason = failure.reason.unwrap();
    assert!(reason.contains("its call socket"), "{reason}");
    calls.send(&[1], "hang-up", b"").await;
    let (failure, _) = calls.loss().await;
    let reason = failure.reason.unwrap();
    assert!(reason.contains("closed its call socket"), "{reason}");
    job.stop().await;
    bed.end().await;
}
