//! The head's way to a node: the connection that the node keeps.

use std::time::Duration;

use kolo_actors::head::{NodeLink, SendFuture};
use kolo_core::head::job::Reply;
use kolo_transport::wire::{NodeReply, NodeRequest, RefusalKind};
use kolo_transport::{CloseCode, Connection, RequestError};

/// A node's connection.
pub(super) struct Link(pub(super) Connection);

impl NodeLink for Link {
    fn request(&self, request: NodeRequest, deadline: Duration) -> SendFuture<Reply> {
        let connection = self.0.clone();
        Box::pin(async move {
            match connection.request(&request, deadline).await {
                Ok(NodeReply::Refused(refusal)) if is_certain(refusal.kind) => {
                    Reply::Refused(refusal)
                }
                Ok(NodeReply::Refused(refusal)) => Reply::Unknown(refusal.message),
                Ok(answer) => Reply::Answer(answer),
                Err(error @ RequestError::Deadline { .. }) => {
                    tracing::warn!(node = %connection.peer().name, %error, "a node does not answer");
                    Reply::Unknown(error.to_string())
                }
                Err(error) => Reply::Unknown(error.to_string()),
            }
        })
    }

    fn close(&self, code: CloseCode, reason: &str) {
        self.0.close(code, reason);
    }
}

/// Whether a node that refuses for this reason has left nothing half done.
fn is_certain(kind: RefusalKind) -> bool {
    !matches!(kind, RefusalKind::Internal | RefusalKind::Other)
}
