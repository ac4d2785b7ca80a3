//! Why a node does not start.

use kolo_transport::descriptors::TooFewDescriptors;
use kolo_transport::wire::Refusal;
use kolo_transport::{
    BindError, CloseCode, ConnectError, ConnectionLost, JoinError, RequestError, Role,
};

use super::config::ResourcesError;
use super::programs::ProgramsError;

/// Why a node did not start. Nothing of it is left then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The declared resources are wrong. Correct them.
    #[error(transparent)]
    Resources(#[from] ResourcesError),
    /// The directory for programs or a preloaded program can't be used. Correct path or permissions.
    #[error(transparent)]
    Programs(#[from] ProgramsError),
    /// The cluster could not be joined with the token. If it is retryable the head was not there in time.
    #[error("the cluster could not be joined: {0}")]
    Join(JoinError),
    /// The credentials are not a node's. Join with a token for nodes.
    #[error("the credentials are those of a {0}; a node needs a node's")]
    Identity(Role),
    /// The identity that the head has just given can't be kept in its folder; the token may be used up. Check the folder,
    /// and give another token.
    #[error(
        "the new identity can't be kept: {0}; check the folder, and give another token if this one is used up"
    )]
    Keep(kolo_transport::IdentityError),
    /// The address to listen on can't be used.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The head could not be reached in time, or is not the head of this cluster.
    #[error("the head could not be reached: {0}")]
    Connect(ConnectError),
    /// The head did not answer the registration.
    #[error("the head did not answer the registration: {0}")]
    Register(RequestError),
    /// The head refused the registration, for the reason it gives.
    #[error("the head refused the registration: {0}")]
    Refused(Refusal),
    /// The head's answer is none to a registration. Use the same version of kolo on all hosts.
    #[error(
        "the head answered the registration with {0}; use the same version of kolo on all hosts"
    )]
    Answer(String),
    /// There are too few descriptors. Raise the limit of open files.
    #[error(transparent)]
    Descriptors(#[from] TooFewDescriptors),
    /// Threads could not be started. Look at the limits of processes and memory.
    #[error("the node's threads could not be started: {0}")]
    Threads(std::io::Error),
}

impl From<JoinError> for NodeError {
    fn from(error: JoinError) -> Self {
        Self::Join(error)
    }
}

impl NodeError {
    /// Whether an administrator has put this node out of the cluster: only they can let it in again.
    #[must_use]
    pub fn is_revoked(&self) -> bool {
        matches!(
            self,
            Self::Connect(ConnectError::Lost {
                lost: ConnectionLost::Closed {
                    code: CloseCode::Revoked,
                    ..
                },
                ..
            })
        )
    }

    /// Whether another attempt may work without any change on this side.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Join(error) => error.is_retryable(),
            Self::Connect(error) => error.is_retryable(),
            Self::Register(error) => error.is_retryable(),
            Self::Refused(refusal) => refusal.is_retryable(),
            _ => false,
        }
    }
}
