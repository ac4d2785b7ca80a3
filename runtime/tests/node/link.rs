//! Workers and what they ask the node for.

use std::sync::atomic::Ordering;

use crate::bed::Bed;
use crate::logs::{logs, rest};

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
    let mut stream = logs(&connection, id, &[], None, false).await.unwrap();
    let lines = rest(&mut stream).await;
    let cluster = bed.node.credentials().identity().cluster;
    let identity = format!("identity kolo://{cluster}/worker/{id}/0");
    assert!(
        lines.iter().any(|line| line.text == identity.as_bytes()),
        "{lines:?}"
    );
    bed.end().await;
}
