//! Giving the program to a node.

use std::io::{IsTerminal as _, Write as _};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kolo_transport::frame::{Frame, FrameError, Limits};
use kolo_transport::session::{Connection, FrameSender, Stream};
use kolo_transport::wire::{NodeReply, NodeRequest, PlacedNode, Program};
use serde::Serialize;

use crate::error::StartError;
use crate::program::Pieces;

/// Bytes of the program in one frame.
const PIECE: usize = 512 * 1024;

/// The head of a frame that carries a piece: an empty map.
#[derive(Serialize)]
struct Piece {}

/// Sends the program; returns when the node has checked and kept it.
pub(crate) async fn upload(
    connection: &Connection,
    node: &PlacedNode,
    program: &Program,
    progress: &Progress,
) -> Result<(), StartError> {
    let lost = |error: FrameError| StartError::unreachable(node, &error);
    let began = Instant::now();
    tracing::debug!(node = %node.node, bytes = program.size, "sending the program");
    let _line = progress.begin(program.size);
    let mut stream = connection
        .open(Limits::CONTROL)
        .await
        .map_err(|error| lost(error.into()))?;
    let Stream { send, recv } = &mut stream;
    let mut replied = std::pin::pin!(recv.expect::<NodeReply>());
    // A node that says no does so before the end, and may stop reading: its word counts first.
    let sent = tokio::select! {
        biased;
        reply = replied.as_mut() => Err(Sending::Answered(reply)),
        sent = send_all(send, program, progress) => sent,
    };
    let reply = match sent {
        Ok(()) => replied.await,
        Err(Sending::Answered(reply)) => reply,
        Err(Sending::File(reason)) => {
            return Err(StartError::Program {
                path: "/proc/self/exe".into(),
                reason,
            });
        }
        Err(Sending::Stream(error)) => replied.await.map_err(|_| error),
    };
    let reply = reply.map_err(lost)?.head;
    match reply {
        NodeReply::Done => {
            let seconds = began.elapsed().as_secs_f64();
            tracing::debug!(node = %node.node, bytes = program.size, seconds, "program sent");
            Ok(())
        }
        other => Err(StartError::unfit(node, "the program", other)),
    }
}

/// Why not all was sent.
enum Sending {
    Answered(Result<Frame<NodeReply>, FrameError>),
    Stream(FrameError),
    File(String),
}

async fn send_all(
    stream: &mut FrameSender,
    program: &Program,
    progress: &Progress,
) -> Result<(), Sending> {
    let request = NodeRequest::PutProgram {
        program: program.clone(),
    };
    stream.send(&request, &[]).await.map_err(Sending::Stream)?;
    let mut pieces = Pieces::open(PIECE).map_err(|error| Sending::File(error.to_string()))?;
    loop {
        // A disk may be slow, which must not hold up other streams.
        let read = tokio::task::spawn_blocking(move || {
            let piece = pieces.next();
            (pieces, piece)
        });
        let (rest, piece) = read
            .await
            .map_err(|error| Sending::File(error.to_string()))?;
        let piece = piece.map_err(|error| Sending::File(error.to_string()))?;
        if piece.is_empty() {
            stream.finish();
            return Ok(());
        }
        pieces = rest;
        let length = piece.len() as u64;
        stream
            .send_bytes(&Piece {}, piece)
            .await
            .map_err(Sending::Stream)?;
        progress.sent(length);
    }
}

/// How long the program may be on its way before a line on the terminal says so, and between two such lines.
const QUIET: Duration = Duration::from_millis(500);
const BETWEEN: Duration = Duration::from_millis(200);

/// How much of the program has gone to all nodes that lack it, for a line on a terminal.
#[derive(Default)]
pub(super) struct Progress(Mutex<Share>);

#[derive(Default)]
struct Share {
    /// Nodes that are being sent the program.
    nodes: usize,
    sent: u64,
    all: u64,
    /// When the line is written next.
    next: Option<Instant>,
    is_shown: bool,
}

/// Ends the line when it is dropped for the last node.
struct Line<'a>(&'a Progress);

impl Progress {
    fn begin(&self, size: u64) -> Line<'_> {
        self.change(|share, now| {
            share.nodes += 1;
            share.all += size;
            share.next.get_or_insert(now + QUIET);
            None
        });
        Line(self)
    }

    fn sent(&self, bytes: u64) {
        self.change(|share, now| share.sent(now, bytes));
    }

    fn change(&self, change: impl FnOnce(&mut Share, Instant) -> Option<String>) {
        let mut share = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(text) = change(&mut share, Instant::now())
            && std::io::stderr().is_terminal()
        {
            // A terminal that is gone shows nothing.
            drop(write!(std::io::stderr(), "{text}"));
        }
    }
}

impl Drop for Line<'_> {
    fn drop(&mut self) {
        self.0.change(|share, _| share.end());
    }
}

impl Share {
    fn sent(&mut self, now: Instant, bytes: u64) -> Option<String> {
        self.sent += bytes;
        self.next.filter(|next| *next <= now)?;
        self.next = Some(now + BETWEEN);
        self.is_shown = true;
        let percent = self.sent.min(self.all) * 100 / self.all.max(1);
        Some(format!("\rkolo: sending the program: {percent} % "))
    }

    /// A node has the program, or will not get it.
    fn end(&mut self) -> Option<String> {
        self.nodes -= 1;
        if self.nodes > 0 {
            return None;
        }
        // Clears the line.
        let text = self.is_shown.then(|| "\r\x1b[K".to_owned());
        *self = Self::default();
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_takes_long_is_told_of_until_all_nodes_have_it() {
        let began = Instant::now();
        let mut share = Share {
            nodes: 2,
            all: 200,
            next: Some(began + QUIET),
            ..Share::default()
        };
        assert_eq!(share.sent(began, 10), None);
        let told = |percent| Some(format!("\rkolo: sending the program: {percent} % "));
        assert_eq!(share.sent(began + QUIET, 70), told(40));
        assert_eq!(share.sent(began + QUIET, 20), None);
        assert_eq!(share.sent(began + QUIET + BETWEEN, 100), told(100));
        assert_eq!(share.end(), None);
        assert_eq!(share.end().as_deref(), Some("\r\x1b[K"));
        // What takes no time leaves no line behind.
        share.nodes = 1;
        assert_eq!(share.end(), None);
    }
}
