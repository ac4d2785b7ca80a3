//! Workers and what they ask the node for.

use std::sync::atomic::Ordering;

use kolo_transport::wire::NodeRequest;

use crate::bed::{Bed, soon};

#[tokio::test]
async fn two_workers_of_a_node_get_a_socket_to_each_other_as_often_as_they_ask() {
    let bed = Bed::start().await;
    let job = bed.healthy(3, "").await;
    let mut calls = job.attach().await;
    // The higher rank asks, twice.
    calls.send(&[0], "swap:1", b"from zero").await;
    calls.send(&[1], "swap:0", b"from one").await;
    let mut results = [calls.result().await, calls.result().await];
    results.sort_by_key(|result| result.1);
    assert_eq!(results[0].3, "1 from one");
    assert_eq!(results[1].3, "0 from zero");
    job.stop().await;
    bed.end().await;
}

#[tokio::test]
async fn workers_get_certificates_from_the_head() {
    let bed = Bed::start().await;
    let mut start = bed.job(1, "");
    start.needs_data_plane = true;
    // The head has much to do, and its first answers are no last words.
    bed.head.unsigned.store(2, Ordering::Relaxed);
    let job = bed.healthy_with(start).await;
    assert_eq!(bed.head.unsigned.load(Ordering::Relaxed), 0);
    let connection = bed.connect().await;
    let id = job.id;
    job.stop().await;
    let mut stream = connection
        .open(kolo_transport::Limits::CONTROL)
        .await
        .unwrap();
    let request = NodeRequest::Logs {
        job: id,
        ranks: Vec::new(),
        tail: None,
        follow: false,
    };
    stream.send.send(&request, &[]).await.unwrap();
    soon(stream.recv.expect::<kolo_transport::wire::NodeReply>())
        .await
        .unwrap();
    let batch = soon(stream.recv.expect::<kolo_transport::wire::LogBatch>())
        .await
        .unwrap();
    let cluster = bed.node.credentials().identity().cluster;
    let identity = format!("identity kolo://{cluster}/worker/{id}/0");
    let lines = batch.head.lines;
    assert!(
        lines.iter().any(|line| line.text == identity.as_bytes()),
        "{lines:?}"
    );
    bed.end().await;
}
