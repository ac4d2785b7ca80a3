//! How jobs end.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kolo_transport::CloseCode;
use kolo_transport::ids::CallId;
use kolo_transport::wire::CallReply;

use crate::bed::{Bed, Calls, gone, soon};

#[tokio::test]
async fn what_was_answered_before_the_end_arrives_at_a_driver_that_reads_late() {
    let bed = Bed::start().await;
    let job = bed.healthy(1, "").await;
    let mut calls = job.attach().await;
    let body = vec![7; 1 << 20];
    // More than the stream takes without being read, so that the rest waits in the node.
    for _ in 0..5 {
        calls.send(&[0], "echo", &body).await;
    }
    let connection = bed.connect().await;
    // The worker has answered all of them when it answers this.
    let mut probe = Calls::open(connection, job.id).await;
    probe.next = 200;
    assert_eq!(probe.call(0, "rank").await, "0");
    job.stop().await;
    for number in 1..=5 {
        let (call, _, _, result) = calls.result().await;
        assert_eq!((call, result.len()), (CallId(number), body.len()));
    }
    assert!(calls.loss().await.1);
    let end = soon(calls.stream.recv.next::<CallReply>()).await;
    assert!(matches!(end, Ok(None)), "{end:?}");
    bed.end().await;
}

#[tokio::test]
async fn a_node_waits_for_its_jobs_whatever_becomes_of_the_head() {
    let bed = Bed::start().await;
    let job = bed.healthy(1, "").await;
    let mut calls = job.attach().await;
    let mut registrations = bed.head.registrations.lock().await;
    assert!(!soon(registrations.recv()).await.unwrap().draining);
    bed.head.forbid.store(true, Ordering::Relaxed);
    let mut drained = Box::pin(bed.node.drain(Duration::from_secs(3600)));
    // The head does not know the node any more,
    let goes_on = async {
        bed.head.hang_up(CloseCode::Internal).await;
        // comes back,
        assert!(soon(registrations.recv()).await.unwrap().draining);
        // and goes for good.
        bed.head.endpoint.close(CloseCode::Internal, "");
        assert_eq!(calls.call(0, "rank").await, "0");
    };
    tokio::select! {
        biased;
        done = &mut drained => panic!("a job runs: {done}"),
        () = goes_on => {}
    }
    calls.send(&[0], "die", b"").await;
    assert!(soon(drained).await);
    drop(registrations);
    drop(job);
    bed.end().await;
}

#[tokio::test]
async fn the_drain_of_a_node_ends_by_the_word_of_the_head_or_its_time() {
    let bed = Bed::start().await;
    let job = bed.healthy(1, "").await;
    // The head knows better what is on its way here.
    assert!(bed.node.drain(Duration::from_secs(3600)).await);
    bed.head.forbid.store(true, Ordering::Relaxed);
    assert!(!bed.node.drain(Duration::from_millis(100)).await);
    bed.head.forbid.store(false, Ordering::Relaxed);
    job.stop().await;
    bed.end().await;
}

#[tokio::test]
async fn a_node_does_not_wait_longer_for_its_jobs_than_it_was_told() {
    let bed = Bed::start_with(|config| config.stop_timeout = Duration::from_millis(100)).await;
    // It ignores the notice, and TERM comes after a minute.
    let job = bed.healthy(1, "stubborn").await;
    let pid = job.pids[0];
    let begin = Instant::now();
    let Bed { node, head, .. } = bed;
    soon(node.stop()).await;
    assert!(begin.elapsed() < Duration::from_secs(30));
    gone(pid).await;
    head.endpoint.close(CloseCode::Done, "");
}

#[tokio::test]
async fn a_node_whose_stop_is_given_up_or_that_is_killed_or_dropped_leaves_nothing() {
    for end in ["given up", "killed", "dropped"] {
        let bed = Bed::start().await;
        let job = bed.healthy(1, "stubborn").await;
        let mut calls = job.attach().await;
        let grandchild: u32 = calls.call(0, "grandchild").await.parse().unwrap();
        let pid = job.pids[0];
        let Bed { node, .. } = bed;
        match end {
            "given up" => {
                let stopped = tokio::time::timeout(Duration::from_millis(50), node.stop()).await;
                assert!(stopped.is_err());
            }
            "killed" => node.kill(),
            _ => drop(node),
        }
        gone(pid).await;
        gone(grandchild).await;
    }
}
