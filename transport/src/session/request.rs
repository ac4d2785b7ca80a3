//! How requests end.

use crate::end::{CloseCode, ConnectionLost};
use crate::frame::FrameError;
use crate::wire::span::Span;

/// Why a request has no reply.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The connection ended. Whether the request was done is unknown.
    #[error(transparent)]
    Lost(#[from] ConnectionLost),
    /// No reply by the deadline. The peer was told that the reply is not wanted any more; whether the request
    /// was done is unknown.
    #[error("no reply within {}", Span(*after))]
    Deadline {
        /// The deadline.
        after: std::time::Duration,
    },
    /// The peer would not take the request.
    #[error("the peer refused the request: {code}")]
    Rejected {
        /// Why.
        code: CloseCode,
    },
    /// The peer ended the stream without a reply: its handler failed. Its log says more.
    #[error("the peer ended the request without a reply")]
    Unanswered,
    /// The reply is not what was expected, or the request can't be sent. Different versions, or a fault in kolo.
    #[error(transparent)]
    Frame(FrameError),
}

impl RequestError {
    /// Whether the same request, over a new connection if this one is lost, may succeed without any other
    /// change. It may have been done already: repeat only what does no harm twice.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Lost(lost) => lost.is_retryable(),
            Self::Deadline { .. } | Self::Unanswered => true,
            Self::Rejected { code } => matches!(code, CloseCode::Busy | CloseCode::Shutdown),
            Self::Frame(_) => false,
        }
    }
}

impl From<FrameError> for RequestError {
    fn from(error: FrameError) -> Self {
        match error {
            FrameError::Lost(lost) => Self::Lost(lost),
            FrameError::Reset(code) => Self::Rejected { code },
            FrameError::Truncated { got: 0 } => Self::Unanswered,
            other => Self::Frame(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_refused_is_not_asked_again() {
        let rejected = |code| RequestError::Rejected { code };
        assert!(RequestError::Lost(ConnectionLost::TimedOut).is_retryable());
        assert!(!RequestError::Lost(ConnectionLost::ClosedHere).is_retryable());
        assert!(rejected(CloseCode::Busy).is_retryable());
        assert!(!rejected(CloseCode::Forbidden).is_retryable());
    }
}
