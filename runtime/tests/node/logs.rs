//! Output of workers.

use kolo_transport::ids::{DriverId, JobId, Rank};
use kolo_transport::wire::{
    LogBatch, LogLine, NodeReply, NodeRequest, Refusal, RefusalKind, Stdio,
};
use kolo_transport::{Connection, Limits, RandomId as _, Stream};

use crate::bed::{Bed, connect, driver, soon};

pub(crate) async fn logs(
    connection: &Connection,
    job: JobId,
    ranks: &[u32],
    tail: Option<u32>,
    follow: bool,
) -> Result<Stream, Refusal> {
    let mut stream = connection.open(Limits::CONTROL).await.unwrap();
    let ranks = ranks.iter().copied().map(Rank).collect();
    let request = NodeRequest::Logs {
        job,
        ranks,
        tail,
        follow,
    };
    stream.send.send(&request, &[]).await.unwrap();
    match soon(stream.recv.expect()).await.unwrap().head {
        NodeReply::Logs => Ok(stream),
        NodeReply::Refused(refusal) => Err(refusal),
        other => panic!("{other:?}"),
    }
}

/// What the test's own calls printed: libtest says something too.
fn own(lines: Vec<LogLine>) -> Vec<LogLine> {
    let ours = |line: &LogLine| line.text.starts_with(b"out ") || line.text.starts_with(b"err ");
    lines.into_iter().filter(ours).collect()
}

pub(crate) async fn rest(stream: &mut Stream) -> Vec<LogLine> {
    let mut lines = Vec::new();
    while let Some(batch) = soon(stream.recv.next::<LogBatch>()).await.unwrap() {
        lines.extend(batch.head.lines);
    }
    lines
}

#[tokio::test]
async fn lines_come_with_rank_and_stream_while_they_are_printed_and_after() {
    let bed = Bed::start().await;
    let job = bed.healthy(2, "").await;
    let id = job.id;
    let mut calls = job.attach().await;
    let connection = bed.connect().await;
    let mut follower = logs(&connection, id, &[], None, true).await.unwrap();
    calls.call(0, "print:3").await;
    let mut seen = Vec::new();
    while seen.len() < 6 {
        let batch = soon(follower.recv.expect::<LogBatch>()).await.unwrap();
        seen.extend(own(batch.head.lines));
    }
    for stream in [Stdio::Stdout, Stdio::Stderr] {
        let texts: Vec<String> = seen
            .iter()
            .filter(|line| line.stream == stream)
            .map(|line| String::from_utf8_lossy(&line.text).into_owned())
            .collect();
        let name = if stream == Stdio::Stdout {
            "out"
        } else {
            "err"
        };
        assert_eq!(texts, [0, 1, 2].map(|line| format!("{name} {line}")));
    }
    assert!(seen.iter().all(|line| line.rank == Rank(0)));
    assert!(seen.is_sorted_by_key(|line| line.seq));
    calls.call(1, "print:1").await;
    // Without following, the stream ends though the job goes on.
    let mut now = logs(&connection, id, &[], None, false).await.unwrap();
    rest(&mut now).await;
    let unknown = logs(&connection, JobId(1), &[], None, true).await;
    assert_eq!(unknown.unwrap_err().kind, RefusalKind::NotFound);
    job.stop().await;
    // The end of the job ends the stream, with everything that was said.
    let lines = own(rest(&mut follower).await);
    assert_eq!(lines.len(), 2);
    assert!(lines.iter().all(|line| line.rank == Rank(1)));
    // And it can be read when the job is over, by any driver.
    let operator = driver(&bed.runtime, &bed.head.authority, DriverId::random());
    let connection = connect(&operator, &bed.node).await;
    let mut all = logs(&connection, id, &[], None, true).await.unwrap();
    assert_eq!(own(rest(&mut all).await).len(), 8);
    let mut one = logs(&connection, id, &[1], None, false).await.unwrap();
    assert_eq!(own(rest(&mut one).await).len(), 2);
    let mut tail = logs(&connection, id, &[], Some(1), false).await.unwrap();
    assert_eq!(rest(&mut tail).await.len(), 2, "one line of each rank");
    bed.end().await;
}
