//! What each rank of a job is at: for the report of a job whose time is over.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use kolo_transport::frame::Limits;
use kolo_transport::ids::{JobId, Rank};
use kolo_transport::session::Stream;
use kolo_transport::wire::{
    HeadReply, HeadRequest, JobInfo, LogBatch, LogLine, NodeReply, NodeRequest, PlacedNode,
    WorkerState,
};

use super::super::link::Link;
use super::super::output::timestamp;
use super::prefix::stream_name;

/// How long head and nodes may take together.
const PATIENCE: Duration = Duration::from_secs(5);

/// Ranks that are told of one by one.
const TOLD: usize = 64;

/// The longest part of a last line that is shown, in characters.
const LONGEST: usize = 200;

/// A line for each rank: its place, its state and its last line. There is no job if it has no nodes yet.
pub(super) async fn survey(link: Arc<Link>, job: Option<JobId>) -> Vec<String> {
    let Some(job) = job else {
        return vec!["the job has no nodes yet".to_owned()];
    };
    let asking = async {
        let request = HeadRequest::Job { job };
        let info = match link.head.request(&request, PATIENCE).await {
            Ok(HeadReply::Job(info)) => info,
            Ok(_) => return vec!["the head does not know the job".to_owned()],
            Err(error) => {
                return vec![format!(
                    "the head does not say what the ranks are at: {error}"
                )];
            }
        };
        let last = join_all(info.nodes.iter().map(|node| last_lines(&link, job, node))).await;
        let last = last.into_iter().flatten().map(|line| (line.rank, line));
        let mut of_rank = HashMap::<Rank, LogLine>::new();
        for (rank, line) in last {
            // Of a group that was started anew a rank may have been on several nodes.
            let known = of_rank.entry(rank).or_insert_with(|| line.clone());
            if line.time_ms >= known.time_ms {
                *known = line;
            }
        }
        told(&info, &of_rank)
    };
    match tokio::time::timeout(PATIENCE, asking).await {
        Ok(lines) => lines,
        Err(_) => vec![format!(
            "head and nodes do not say within {PATIENCE:?} what the ranks are at"
        )],
    }
}

/// The last line of each rank on a node; none if the node does not say.
async fn last_lines(link: &Link, job: JobId, node: &PlacedNode) -> Vec<LogLine> {
    let mut lines = Vec::new();
    let reading = async {
        let (_endpoint, connection) = link.node(node).await.ok()?;
        let Stream { mut send, mut recv } = connection.open(Limits::CONTROL).await.ok()?;
        let request = NodeRequest::Logs {
            job,
            ranks: Vec::new(),
            tail: Some(1),
            follow: false,
        };
        send.send(&request, &[]).await.ok()?;
        send.finish();
        let reply = recv.expect::<NodeReply>().await.ok()?;
        if let NodeReply::Logs = reply.head {
            while let Ok(Some(batch)) = recv.next::<LogBatch>().await {
                lines.extend(batch.head.lines);
            }
        }
        Some(())
    };
    drop(tokio::time::timeout(PATIENCE / 2, reading).await);
    lines
}

fn told(info: &JobInfo, last: &HashMap<Rank, LogLine>) -> Vec<String> {
    let mut lines: Vec<String> = info
        .workers
        .iter()
        .take(TOLD)
        .map(|worker| {
            let member = &worker.member;
            let state = match &worker.exit {
                Some(exit) => format!("ended with {exit}"),
                None if worker.state == WorkerState::Ready => "runs".to_owned(),
                None => format!("is {}", worker.state),
            };
            let said = match last.get(&member.rank) {
                Some(line) => format!(
                    "last line at {} on {}: {}",
                    timestamp(line.time_ms),
                    stream_name(line.stream),
                    shown(&line.text)
                ),
                None => "no line of output".to_owned(),
            };
            format!(
                "rank {} on {} (pid {}) {state}; {said}",
                member.rank, member.hostname, worker.pid
            )
        })
        .collect();
    if info.workers.len() > TOLD {
        lines.push(format!(
            "and {} ranks more; `kolo jobs {}` shows all",
            info.workers.len() - TOLD,
            info.job
        ));
    }
    lines
}

/// A line of a worker, made fit for one of this command's own.
fn shown(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    // Of a line that was written over, the last state.
    let text = text.trim_end().rsplit('\r').next().unwrap_or_default();
    let plain = text.chars().map(|char| match char {
        char if char.is_control() => ' ',
        char => char,
    });
    plain.take(LONGEST).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_last_line_is_one_line_without_control_characters() {
        assert_eq!(shown(b"50%\r100%\r"), "100%");
        assert_eq!(shown(b"a\x1b[31mb\tc\xff"), "a [31mb c\u{fffd}");
        assert_eq!(shown(&[b'x'; 999]).len(), LONGEST);
    }
}
