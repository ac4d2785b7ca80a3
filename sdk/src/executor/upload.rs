//! Giving the program to a node.

use std::time::Instant;

use kolo_transport::frame::{Frame, FrameError, Limits};
use kolo_transport::session::{Connection, FrameSender, Stream};
use kolo_transport::wire::{NodeReply, NodeRequest, PlacedNode, Program};
use serde::Serialize;

use super::program::Pieces;
use crate::error::StartError;

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
) -> Result<(), StartError> {
    let lost = |error: FrameError| StartError::NodeUnreachable {
        hostname: node.hostname.clone(),
        address: node.address,
        reason: error.to_string(),
    };
    let began = Instant::now();
    tracing::info!(node = %node.node, bytes = program.size, "sending the program");
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
        sent = send_all(send, node, program) => sent,
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
            tracing::info!(node = %node.node, bytes = program.size, seconds, "program sent");
            Ok(())
        }
        NodeReply::Refused(refusal) => Err(StartError::NodeRefused {
            hostname: node.hostname.clone(),
            what: "the program",
            refusal,
        }),
        other => Err(StartError::Unexpected {
            from: node.hostname.clone(),
            reply: format!("{other:?}"),
        }),
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
    node: &PlacedNode,
    program: &Program,
) -> Result<(), Sending> {
    let request = NodeRequest::PutProgram {
        program: program.clone(),
    };
    stream.send(&request, &[]).await.map_err(Sending::Stream)?;
    let mut pieces = Pieces::open(PIECE).map_err(|error| Sending::File(error.to_string()))?;
    let mut sent = 0;
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
        sent += piece.len() as u64;
        stream
            .send_bytes(&Piece {}, piece)
            .await
            .map_err(Sending::Stream)?;
        tracing::debug!(node = %node.node, sent, of = program.size, "sending the program");
    }
}
