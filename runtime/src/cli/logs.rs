//! `kolo logs`: the output of workers, straight from the nodes that run them.

use std::time::Duration;

use kolo_transport::endpoint::Endpoint;
use kolo_transport::frame::Limits;
use kolo_transport::ids::Rank;
use kolo_transport::session::{Connection, FrameReceiver};
use kolo_transport::wire::ink;
use kolo_transport::wire::{
    JobInfo, LogBatch, LogLine, NodeReply, NodeRequest, PlacedNode, Refusal, Stdio,
};
use serde::Serialize;
use tokio::sync::mpsc;

use super::args::{Connect, Format, Logs};
use super::client::{Client, goodbye};
use super::error::{CliError, FAILURE};
use super::output::{Output, now_ms, timestamp};

/// How long a node may take until its first answer, and between two pieces of what it has already.
const ANSWER: Duration = Duration::from_secs(10);

/// Batches that wait to be printed. More wait at the nodes.
const QUEUE: usize = 64;

/// What a shell reports for a command that was ended by Ctrl-C.
const INTERRUPTED: u8 = 130;

/// Output of the ranks of one node.
struct Source {
    name: String,
    endpoint: Endpoint,
    // Dropped last: the stream ends with it.
    _connection: Connection,
    frames: FrameReceiver,
}

pub(super) async fn run(
    options: &Logs,
    connect: &Connect,
    format: Format,
    out: &mut Output<'_>,
) -> Result<u8, CliError> {
    let client = Client::connect(&connect.config()).await?;
    let job = client.find(&options.job).await?;
    let wanted = wanted(&job, &options.ranks)?;
    let mut sources = Vec::new();
    let mut failed = Vec::new();
    let opened = futures_util::future::join_all(
        wanted
            .iter()
            .map(|(node, ranks)| open(&client, &job, node, ranks.clone(), options)),
    )
    .await;
    for source in opened {
        match source {
            Ok(source) => sources.push(source),
            Err(error) => failed.push(error),
        }
    }
    let endpoints: Vec<Endpoint> = sources
        .iter()
        .map(|source| source.endpoint.clone())
        .collect();
    let style = Style::of(options, format);
    let code = tokio::select! {
        printed = print(sources, options.follow, style, out, &mut failed) => {
            printed?;
            None
        }
        _ = tokio::signal::ctrl_c() => Some(INTERRUPTED),
    };
    out.flush()?;
    for endpoint in &endpoints {
        goodbye(endpoint).await;
    }
    client.close().await;
    match (code, failed.len()) {
        (Some(code), _) => Ok(code),
        (None, 0) => Ok(0),
        // What the others had is printed; one failure is told as it is.
        (None, 1) => Err(failed.remove(0)),
        (None, _) => {
            let texts: Vec<String> = failed.iter().map(ToString::to_string).collect();
            Err(CliError::Nodes {
                code: failed
                    .iter()
                    .map(CliError::exit_code)
                    .max()
                    .unwrap_or(FAILURE),
                text: texts.join("; "),
            })
        }
    }
}

/// The nodes that have output of these ranks (of all, if none are given), each with the ranks to ask for.
fn wanted<'a>(
    job: &'a JobInfo,
    ranks: &[u32],
) -> Result<Vec<(&'a PlacedNode, Vec<Rank>)>, CliError> {
    let known = || job.nodes.iter().flat_map(|node| &node.ranks);
    if let Some(unknown) = ranks
        .iter()
        .find(|rank| !known().any(|known| known.0 == **rank))
    {
        return Err(CliError::Usage(match known().max() {
            Some(last) => format!(
                "{} has no rank {unknown}; its ranks are 0 to {last}",
                job.job
            ),
            None => format!("{} ({}) has no workers yet", job.job, job.state),
        }));
    }
    Ok(job
        .nodes
        .iter()
        .filter_map(|node| {
            let chosen: Vec<Rank> = node
                .ranks
                .iter()
                .copied()
                .filter(|rank| ranks.is_empty() || ranks.contains(&rank.0))
                .collect();
            (!chosen.is_empty()).then_some((node, chosen))
        })
        .collect())
}

async fn open(
    client: &Client,
    job: &JobInfo,
    node: &PlacedNode,
    ranks: Vec<Rank>,
    options: &Logs,
) -> Result<Source, CliError> {
    let name = format!("{} ({})", node.hostname, node.node);
    let (endpoint, connection) = client.node(node, true).await?;
    let mut stream = connection
        .open(Limits::CONTROL)
        .await
        .map_err(|error| CliError::lost(&name, error))?;
    let request = NodeRequest::Logs {
        job: job.job,
        ranks,
        tail: options.tail,
        follow: options.follow,
    };
    stream
        .send
        .send(&request, &[])
        .await
        .map_err(|error| CliError::stream(&name, error))?;
    stream.send.finish();
    let reply = stream
        .recv
        .expect_within::<NodeReply>(ANSWER)
        .await
        .map_err(|error| CliError::stream(&name, error))?;
    match reply.head {
        NodeReply::Logs => Ok(Source {
            name,
            endpoint,
            _connection: connection,
            frames: stream.recv,
        }),
        NodeReply::Refused(refusal) => {
            let message = format!("{name}: {}", refusal.message);
            Err(Refusal::new(refusal.kind, message).into())
        }
        _ => Err(CliError::Answer(name)),
    }
}

/// Which lines are printed, and how.
#[derive(Debug, Clone, Copy)]
struct Style {
    format: Format,
    timestamps: bool,
    /// Older lines are left out, in milliseconds since 1970.
    oldest: u64,
}

impl Style {
    fn of(options: &Logs, format: Format) -> Self {
        let since = options.since.map(|ago| ago.as_millis() as u64);
        Self {
            format,
            timestamps: options.timestamps,
            oldest: since.map_or(0, |ago| now_ms().saturating_sub(ago)),
        }
    }
}

/// Prints what the sources have. The failure of one does not keep the others from being printed.
async fn print(
    sources: Vec<Source>,
    follow: bool,
    style: Style,
    out: &mut Output<'_>,
    failed: &mut Vec<CliError>,
) -> Result<(), CliError> {
    let (sender, mut batches) = mpsc::channel(QUEUE);
    for mut source in sources {
        let sender = sender.clone();
        tokio::spawn(async move {
            loop {
                let batch = match next(&mut source, follow).await {
                    Ok(Some(batch)) => Ok(batch.lines),
                    Ok(None) => return,
                    Err(error) => Err(error),
                };
                let ended = batch.is_err();
                if sender.send(batch).await.is_err() || ended {
                    return;
                }
            }
        });
    }
    drop(sender);
    let mut kept = Vec::new();
    while let Some(batch) = batches.recv().await {
        match batch {
            Ok(lines) if follow => {
                for line in &lines {
                    write(line, style, out)?;
                }
            }
            Ok(lines) => kept.extend(lines),
            Err(error) => failed.push(error),
        }
        // Whatever came last: nothing may come for long.
        if follow && batches.is_empty() {
            out.flush()?;
        }
    }
    // What is not followed is complete, so it can be told in the order in which it happened.
    kept.sort_by_key(|line| (line.time_ms, line.rank, line.seq));
    kept.iter().try_for_each(|line| write(line, style, out))
}

async fn next(source: &mut Source, follow: bool) -> Result<Option<LogBatch>, CliError> {
    let Source { name, frames, .. } = source;
    let stream = |error| CliError::stream(name.as_str(), error);
    let batch = if follow {
        // The connection's own timeout ends the wait for a node that is gone.
        frames.next::<LogBatch>().await.map_err(stream)?
    } else {
        tokio::time::timeout(ANSWER, frames.next::<LogBatch>())
            .await
            .map_err(|_| CliError::Request {
                what: name.clone(),
                error: kolo_transport::session::RequestError::Deadline { after: ANSWER },
            })?
            .map_err(stream)?
    };
    Ok(batch.map(|frame| frame.head))
}

#[derive(Serialize)]
struct JsonLine<'a> {
    rank: u32,
    stream: &'static str,
    seq: u64,
    time_ms: u64,
    text: std::borrow::Cow<'a, str>,
}

fn write(line: &LogLine, style: Style, out: &mut Output<'_>) -> Result<(), CliError> {
    if line.time_ms < style.oldest {
        return Ok(());
    }
    let stream = match line.stream {
        Stdio::Stdout => "stdout",
        Stdio::Stderr => "stderr",
    };
    match style.format {
        Format::Json => out.json_line(&JsonLine {
            rank: line.rank.0,
            stream,
            seq: line.seq,
            time_ms: line.time_ms,
            text: String::from_utf8_lossy(&line.text),
        }),
        Format::Table => {
            // The worker's own bytes, as it has written them.
            if style.timestamps {
                out.bytes(format!("{} ", timestamp(line.time_ms)).as_bytes())?;
            }
            let prefix = format!("[{}]<{stream}>:", line.rank).into_bytes();
            if out.has_colours() {
                out.bytes(&ink::prefix(&prefix, line.rank.0, line.stream))?;
            } else {
                out.bytes(&prefix)?;
            }
            out.bytes(&line.text)?;
            out.bytes(b"\n")
        }
    }
}
