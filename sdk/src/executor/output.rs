//! What workers print.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{IsTerminal as _, Write as _};
use std::sync::{Arc, LazyLock};

use kolo_transport::frame::{FrameError, Limits};
use kolo_transport::ids::{JobId, NodeId};
use kolo_transport::session::Connection;
use kolo_transport::wire::ink;
use kolo_transport::wire::{LogBatch, LogLine, NodeReply, NodeRequest, PlacedNode, Stdio};
use tokio::task::JoinSet;

use super::nodes::Channels;

/// What becomes of the lines that workers print.
#[derive(Clone, Default)]
pub enum Output {
    /// They go to this process's own standard output and standard error, each as `[RANK]<stdout>:LINE` or
    /// `[RANK]<stderr>:LINE`, with colours on a terminal. The default.
    #[default]
    Inherit,
    /// They are not fetched. The nodes keep the last ones: `kolo logs JOB` shows them, and the error of a lost worker has
    /// the last lines of its standard error.
    Silent,
    /// They are given to a function; see [`Output::callback`].
    Callback(Arc<dyn Fn(LogLine) + Send + Sync>),
}

impl Output {
    /// Gives every line to `callback`: lines of one rank in order, from several threads if there are several nodes. It may
    /// block; then further lines wait, and workers do not.
    pub fn callback(callback: impl Fn(LogLine) + Send + Sync + 'static) -> Self {
        Self::Callback(Arc::new(callback))
    }

    fn say(&self, line: &str) {
        if matches!(self, Self::Inherit) {
            // A terminal that is gone shows nothing.
            drop(writeln!(std::io::stderr(), "kolo: {line}"));
        } else {
            tracing::warn!("{line}");
        }
    }

    /// Delivers lines. Blocks.
    fn deliver(&self, lines: Vec<LogLine>) {
        match self {
            Self::Silent => {}
            Self::Callback(callback) => lines.into_iter().for_each(|line| callback(line)),
            Self::Inherit => {
                let (mut out, mut err) = (Vec::new(), Vec::new());
                for line in &lines {
                    match line.stream {
                        Stdio::Stdout => format_line(&mut out, line, COLOURS[0]),
                        Stdio::Stderr => format_line(&mut err, line, COLOURS[1]),
                    }
                }
                let write = || -> std::io::Result<()> {
                    std::io::stdout().lock().write_all(&out)?;
                    std::io::stderr().lock().write_all(&err)
                };
                if let Err(error) = write() {
                    tracing::debug!(%error, "output of workers has nowhere to go");
                }
            }
        }
    }
}

/// Whether standard output and standard error are terminals that show colours.
static COLOURS: LazyLock<[bool; 2]> = LazyLock::new(|| {
    [
        std::io::stdout().is_terminal(),
        std::io::stderr().is_terminal(),
    ]
    .map(|is_terminal| is_terminal && ink::is_wanted(std::env::var_os))
});

fn format_line(out: &mut Vec<u8>, line: &LogLine, is_coloured: bool) {
    let stream = match line.stream {
        Stdio::Stdout => "stdout",
        Stdio::Stderr => "stderr",
    };
    let prefix = format!("[{}]<{stream}>:", line.rank).into_bytes();
    out.extend(if is_coloured {
        ink::prefix(&prefix, line.rank.0, line.stream)
    } else {
        prefix
    });
    out.extend_from_slice(&line.text);
    out.push(b'\n');
}

impl fmt::Debug for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inherit => "Inherit",
            Self::Silent => "Silent",
            Self::Callback(_) => "Callback",
        })
    }
}

/// Delivers what the workers of a job print.
pub(super) struct Printing {
    job: JobId,
    output: Output,
    /// The nodes whose workers are heard.
    followed: BTreeSet<NodeId>,
    tasks: JoinSet<()>,
}

impl Printing {
    pub(super) fn new(job: JobId, output: Output) -> Self {
        Self {
            job,
            output,
            followed: BTreeSet::new(),
            tasks: JoinSet::new(),
        }
    }

    /// Tells the user something beside the output of workers. Nobody waits for who reads.
    pub(super) fn say(&self) -> impl Fn(String) + Send + use<> {
        let output = self.output.clone();
        move |line| {
            let output = output.clone();
            tokio::task::spawn_blocking(move || output.say(&line));
        }
    }

    /// Follows the nodes of a generation that are not followed yet. `placed` are all nodes of the job.
    pub(super) fn follow(&mut self, channels: &Channels, placed: &[PlacedNode]) {
        if matches!(self.output, Output::Silent) {
            return;
        }
        // A node that comes again has new workers, whose output nobody has asked for.
        (self.followed).retain(|node| placed.iter().any(|placed| placed.node == *node));
        for node in &channels.nodes {
            if let Some(connection) = channels.connection(node.node)
                && self.followed.insert(node.node)
            {
                let (connection, output) = (connection.clone(), self.output.clone());
                self.tasks.spawn(follow(connection, self.job, output));
            }
        }
    }

    /// Waits until no worker prints any more.
    pub(super) async fn ended(&mut self) {
        while self.tasks.join_next().await.is_some() {}
    }
}

/// Delivers what the job's workers on one node print, until they have ended.
async fn follow(connection: Connection, job: JobId, output: Output) {
    if let Err(error) = try_follow(&connection, job, output).await {
        tracing::warn!(%job, node = %connection.peer().name, %error, "the output of workers is not delivered any more");
    }
}

async fn try_follow(connection: &Connection, job: JobId, output: Output) -> Result<(), FrameError> {
    // Lines have up to 64 KiB; a batch of many must fit.
    let mut stream = connection.open(Limits::CALLS).await?;
    let request = NodeRequest::Logs {
        job,
        ranks: Vec::new(),
        tail: None,
        follow: true,
    };
    stream.send.send(&request, &[]).await?;
    match stream.recv.expect::<NodeReply>().await?.head {
        NodeReply::Logs => {}
        NodeReply::Refused(refusal) => {
            tracing::warn!(%job, %refusal, "a node does not give the output of its workers");
            return Ok(());
        }
        other => {
            tracing::warn!(%job, reply = ?other, "a node answered something that does not fit");
            return Ok(());
        }
    }
    while let Some(batch) = stream.recv.next::<LogBatch>().await? {
        let output = output.clone();
        // A terminal or a callback may block, which must not hold up calls. What comes meanwhile waits at the node.
        if tokio::task::spawn_blocking(move || output.deliver(batch.head.lines))
            .await
            .is_err()
        {
            tracing::warn!(%job, "the output callback panicked; the lines of that batch are lost");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kolo_transport::ids::Rank;

    use super::*;

    #[test]
    fn lines_have_rank_and_stream_and_keep_their_bytes() {
        let line = |stream, text: &[u8]| LogLine {
            rank: Rank(3),
            stream,
            seq: 0,
            time_ms: 0,
            text: text.to_vec(),
        };
        let mut out = Vec::new();
        format_line(&mut out, &line(Stdio::Stdout, b"loss \xff 0.5"), false);
        format_line(&mut out, &line(Stdio::Stderr, b""), false);
        assert_eq!(out, b"[3]<stdout>:loss \xff 0.5\n[3]<stderr>:\n");
        out.clear();
        format_line(&mut out, &line(Stdio::Stderr, b"no"), true);
        assert_eq!(out, b"\x1b[31m[3]<stderr>:\x1b[0mno\n");
    }
}
