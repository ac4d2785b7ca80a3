//! Why a worker can't work.

use kolo_transport::wire::span::Span;
use std::time::Duration;

use kolo_collectives::CollectiveError;
use kolo_transport::endpoint::BindError;
use kolo_transport::frame::FrameError;
use kolo_transport::identity::IdentityError;

/// For every step of the introduction, and of making a link.
pub(super) const STEP: Duration = Duration::from_secs(60);

/// Why a worker can't work.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    #[error("the control socket can't be used: {0}")]
    Socket(std::io::Error),
    #[error("the control socket brought what is no message: {0}")]
    Frame(FrameError),
    #[error("the node closed the control socket")]
    NodeGone,
    #[error("the node sent no {what} within {}", Span(STEP))]
    Late { what: &'static str },
    #[error("the node sent {what} at the wrong time")]
    OutOfTurn { what: &'static str },
    #[error(
        "the data plane is to listen on `{given}`, which is no list of addresses; KOLO_LISTEN and KOLO_NODE_IP are set by kolo's node daemon"
    )]
    NodeIp { given: String },
    #[error("no certificate for the data plane: {0}")]
    Certificate(#[from] IdentityError),
    #[error("the data plane can't listen: {0}")]
    Bind(#[from] BindError),
    #[error("the node's introduction makes no sense: {0}")]
    Group(#[from] CollectiveError),
}

impl From<FrameError> for ControlError {
    fn from(error: FrameError) -> Self {
        match error {
            // A daemon that is killed may do so in the middle of a message, in both directions.
            FrameError::Io(_) | FrameError::Truncated { .. } => Self::NodeGone,
            other => Self::Frame(other),
        }
    }
}
