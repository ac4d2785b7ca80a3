//! Jobs whose driver and head are both gone.

use std::cell::Cell;
use std::time::{Duration, Instant};

use kolo_transport::ids::CallId;
use kolo_transport::wire::{NodeReply, NodeRequest};
use kolo_transport::{CloseCode, Limits};

use crate::bed::{Bed, call_frame, gone, is_running, soon};

/// How long the nodes of these tests wait.
const TIMEOUT: Duration = Duration::from_millis(300);

async fn bed() -> Bed {
    Bed::start_with(|config| config.orphan_timeout = TIMEOUT).await
}

impl Bed {
    /// The head dies and does not come back.
    fn lose_head(&self) {
        self.head.endpoint.close(CloseCode::Internal, "");
    }
}

#[tokio::test]
async fn a_driver_that_follows_the_output_is_there() {
    let bed = bed().await;
    let job = bed.healthy(1, "").await;
    let mut calls = job.attach().await;
    let connection = bed.connect().await;
    let mut stream = connection.open(Limits::CONTROL).await.unwrap();
    let follow = NodeRequest::Logs {
        job: job.id,
        ranks: Vec::new(),
        tail: Some(0),
        follow: true,
    };
    stream.send.send(&follow, &[]).await.unwrap();
    let reply = soon(stream.recv.expect::<NodeReply>()).await.unwrap().head;
    assert_eq!(reply, NodeReply::Logs);
    bed.lose_head();
    assert_eq!(calls.call(0, "rank").await, "0");
    drop(calls);
    let end = Instant::now() + TIMEOUT * 4;
    while Instant::now() < end {
        assert!(is_running(job.pids[0]));
        tokio::time::sleep(TIMEOUT / 10).await;
    }
    let pid = job.pids[0];
    drop(job);
    connection.close(CloseCode::Done, "");
    gone(pid).await;
    bed.end().await;
}

/// Its channel is held up by a worker that does not read, so that nobody reads the stream at whose end it would show that the
/// driver is gone.
#[tokio::test]
async fn a_driver_that_is_gone_is_missed_also_behind_a_worker_that_does_not_read() {
    let bed = bed().await;
    let mut start = bed.job(1, "");
    // It does not hear the notice.
    start.grace_ms = 100;
    let job = bed.healthy_with(start).await;
    let mut calls = job.attach().await;
    calls
        .send(&[0], "await-file:/no/such/file/anywhere", b"")
        .await;
    let body = vec![5; 1 << 20];
    let sent = Cell::new(0);
    let send = &mut calls.stream.send;
    let sending = async {
        for number in 0..200 {
            let frame = call_frame(CallId(1000 + number), &[0], "echo");
            send.send(&frame, &body).await.unwrap();
            sent.set(number);
        }
    };
    tokio::pin!(sending);
    // Until nothing has gone any more while other requests were served many times.
    let connection = bed.connect().await;
    let hash = bed.program.hash;
    let (mut seen, mut still) = (0, 0);
    while still < 200 {
        let ask = NodeRequest::HasProgram { hash };
        tokio::select! {
            () = &mut sending => panic!("somebody swallows everything"),
            reply = connection.request(&ask, TIMEOUT * 100) => {
                let reply: NodeReply = reply.unwrap();
                assert_eq!(reply, NodeReply::HasProgram(true));
            }
        }
        still = if sent.get() == seen { still + 1 } else { 0 };
        seen = sent.get();
    }
    let pid = job.pids[0];
    drop(job);
    bed.lose_head();
    // The whole process is gone.
    bed.driver.close(CloseCode::Internal, "");
    gone(pid).await;
    bed.end().await;
}
