//! The head's part of [joining](mod@crate::join): it lets joiners in, or not.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use crate::end::CloseCode;
use crate::frame::{FrameError, FrameReader, FrameWriter, InvalidFrame, Limits};
use crate::places::Kept;
use crate::wire::{JoinReply, JoinRequest, Refusal, RefusalKind};

/// Lets joiners in, or not. The head's part of joining.
pub trait JoinHandler: Send + Sync {
    /// Answers one joiner, and writes the one line about it to the log.
    ///
    /// Called on a thread on which it may block for a moment, for instance to store what
    /// [`TokenBook::redeem`](crate::TokenBook::redeem) changed. `peer` is the address that the request came from.
    fn join(&self, request: JoinRequest, peer: SocketAddr) -> JoinReply;
}

/// Answers one joiner on a connection that carries nothing else. The caller has a deadline for all of it.
pub(crate) async fn serve(
    connection: &quinn::Connection,
    peer: SocketAddr,
    handler: &Arc<dyn JoinHandler>,
    place: &Kept,
) -> Result<(), (CloseCode, String)> {
    let protocol = |error: FrameError| {
        let reason = match error {
            // What the decoder says may repeat a part of the secret.
            FrameError::Invalid(InvalidFrame::Malformed { .. }) => {
                "the join request is malformed".to_owned()
            }
            other => other.to_string(),
        };
        (CloseCode::Protocol, reason)
    };
    let (send, recv) = connection
        .accept_bi()
        .await
        .map_err(|error| (CloseCode::Protocol, error.to_string()))?;
    let request = FrameReader::new(recv, Limits::JOIN)
        .expect::<JoinRequest>()
        .await
        .map_err(protocol)?
        .head;
    place.heard();
    let handler = Arc::clone(handler);
    let reply = tokio::task::spawn_blocking(move || handler.join(request, peer))
        .await
        .unwrap_or_else(|error| {
            tracing::error!(%peer, %error, "joining failed");
            JoinReply::Refused(Refusal::new(
                RefusalKind::Internal,
                "the head could not handle the request; its log says more",
            ))
        });
    let mut writer = FrameWriter::new(send);
    writer.send(&reply, &[]).await.map_err(protocol)?;
    drop(writer.stream_mut().finish());
    // The joiner closes when it has the reply. One that does not is cut off by the deadline, or for another peer.
    place.rest(Instant::now());
    connection.closed().await;
    Ok(())
}
