//! How connections, streams and requests end.

use std::fmt;

use quinn::VarInt;

macro_rules! codes {
    ($($(#[$doc:meta])* $code:ident $text:literal)*) => {
        /// Why one side ended a connection or a stream. A typed QUIC application error code.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum CloseCode {
            $($(#[$doc])* $code,)*
            /// A code of a later version.
            Other(u32),
        }

        /// The place of each is its number.
        const CODES: &[CloseCode] = &[$(CloseCode::$code),*];

        impl fmt::Display for CloseCode {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(Self::$code => $text,)*
                    Self::Other(number) => return write!(f, "code {number}"),
                })
            }
        }
    };
}

// Numbers are part of the protocol: a new code goes to the end.
codes! {
    /// All is said. Also what a dropped connection or stream sends.
    Done "done"
    /// The process is stopping.
    Shutdown "shutdown"
    /// The result is not wanted any more.
    Cancelled "cancelled"
    /// The peer has no certificate of this cluster.
    Unauthenticated "not authenticated"
    /// The peer's role or identity may not do this.
    Forbidden "forbidden"
    /// The peer sent what the protocol does not allow.
    Protocol "protocol violation"
    /// The peer belongs to another generation (G-1).
    StaleGeneration "stale generation"
    /// Another connection or stream of this kind from the same peer is there, or has taken its place.
    Duplicate "duplicate"
    /// A frame is over the limit.
    TooLarge "too large"
    /// Too much at once; try again.
    Busy "busy"
    /// A fault on the side that closes; its log says more.
    Internal "internal error"
    /// The peer's lease ran out: it counts as lost.
    LeaseExpired "lease expired"
    /// What was awaited did not come in time.
    Deadline "deadline exceeded"
    /// The peer was revoked: the operator has put it out of the cluster.
    Revoked "revoked"
    /// The process has ended as by a crash, and its workers have ended before.
    Dead "dead"
}

impl CloseCode {
    /// The number on the wire.
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Self::Other(number) => number,
            known => CODES
                .iter()
                .position(|code| *code == known)
                .map_or(u32::MAX, |index| index as u32),
        }
    }

    /// The code of a number on the wire.
    #[must_use]
    pub fn from_number(number: u64) -> Self {
        usize::try_from(number)
            .ok()
            .and_then(|index| CODES.get(index).copied())
            .unwrap_or_else(|| Self::Other(u32::try_from(number).unwrap_or(u32::MAX)))
    }

    pub(crate) fn varint(self) -> VarInt {
        VarInt::from_u32(self.number())
    }
}

impl From<VarInt> for CloseCode {
    fn from(code: VarInt) -> Self {
        Self::from_number(code.into_inner())
    }
}

/// How a connection ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionLost {
    /// The peer closed it.
    #[error("the peer closed the connection: {code}{}", with_reason(reason))]
    Closed {
        /// Why.
        code: CloseCode,
        /// Why, in words.
        reason: String,
    },
    /// This side closed it.
    #[error("the connection was closed here")]
    ClosedHere,
    /// Nothing came for the idle timeout: the peer, its host or the network between is gone.
    #[error("the peer did not answer any more")]
    TimedOut,
    /// The peer does not know the connection any more: it has heard nothing for so long that it gave it up (it was stopped for a
    /// while, say).
    #[error("the peer does not know the connection any more")]
    Reset,
    /// A QUIC or TLS error.
    #[error("the connection failed: {reason}")]
    Failed {
        /// What the library said.
        reason: String,
    },
}

pub(crate) fn with_reason(reason: &str) -> String {
    if reason.is_empty() {
        String::new()
    } else {
        format!(": {reason}")
    }
}

impl ConnectionLost {
    /// Whether a new connection to the same peer may work: it or the network failed, and nobody refused.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Closed { code, .. } => matches!(
                code,
                CloseCode::Done
                    | CloseCode::Shutdown
                    | CloseCode::Busy
                    | CloseCode::Internal
                    | CloseCode::LeaseExpired
                    | CloseCode::Deadline
            ),
            Self::TimedOut | Self::Reset => true,
            Self::ClosedHere | Self::Failed { .. } => false,
        }
    }
}

impl From<quinn::ConnectionError> for ConnectionLost {
    fn from(error: quinn::ConnectionError) -> Self {
        match error {
            quinn::ConnectionError::ApplicationClosed(close) => Self::Closed {
                code: close.error_code.into(),
                // The peer chose the words: keep them short and printable.
                reason: String::from_utf8_lossy(&close.reason)
                    .chars()
                    .filter(|c| !c.is_control())
                    .take(500)
                    .collect(),
            },
            quinn::ConnectionError::LocallyClosed => Self::ClosedHere,
            quinn::ConnectionError::TimedOut => Self::TimedOut,
            quinn::ConnectionError::Reset => Self::Reset,
            other => Self::Failed {
                reason: other.to_string(),
            },
        }
    }
}

/// How the sending half of a stream ended, as far as the peer told.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum StreamEnd {
    /// The peer does not want any more: it cancelled, or dropped its end.
    Stopped(CloseCode),
    /// It was finished, and the peer has all of it.
    Delivered,
    /// The connection ended.
    Lost(ConnectionLost),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_keep_their_numbers() {
        for (index, code) in CODES.iter().enumerate() {
            assert_eq!(code.number() as usize, index);
            assert_eq!(CloseCode::from_number(index as u64), *code);
        }
        assert_eq!(CloseCode::StaleGeneration.number(), 6);
        assert_eq!(CloseCode::Deadline.number(), 12);
        assert_eq!(CloseCode::from_number(99), CloseCode::Other(99));
        assert_eq!(CloseCode::Other(99).number(), 99);
        assert_eq!(CloseCode::from_number(u64::MAX), CloseCode::Other(u32::MAX));
    }

    #[test]
    fn what_may_be_tried_again() {
        let closed = |code| ConnectionLost::Closed {
            code,
            reason: String::new(),
        };
        assert!(closed(CloseCode::Shutdown).is_retryable());
        assert!(!closed(CloseCode::Forbidden).is_retryable());
        assert!(!closed(CloseCode::StaleGeneration).is_retryable());
        assert!(ConnectionLost::TimedOut.is_retryable());
        assert!(!ConnectionLost::ClosedHere.is_retryable());
    }
}
