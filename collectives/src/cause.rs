//! Why a rank gave an operation up, as it tells its peers. No I/O.
//!
//! The first cause travels on: a rank that gives up because of another one sends that one's name, so that
//! every rank names the same culprit, linked with it or not.

mod wire;

use std::fmt;
use std::time::Duration;

use kolo_transport::ids::{CallId, Generation, Rank};
use serde::{Deserialize, Serialize};

pub(crate) use self::wire::cut;
use crate::error::CollectiveError;
use crate::header::Header;
use crate::operation::Tag;
use crate::stall::Missing;

/// Why a rank gave up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Cause {
    /// It has not given up: its deadline passed, and it asks who is still there before it names anyone.
    Stalled {
        /// What it asked for: ranks that all wait for others may disagree and not know it.
        asked: String,
    },
    /// It has not given up: it or others that have told it miss these after its deadline.
    Missed {
        /// Whom.
        late: Vec<Rank>,
    },
    /// A rank is lost.
    Lost {
        /// Which.
        rank: Rank,
        /// Why.
        reason: String,
    },
    /// A rank failed.
    Failed {
        /// Which.
        rank: Rank,
        /// Why.
        reason: String,
    },
    /// A rank went on without this operation.
    Left {
        /// Which.
        rank: Rank,
        /// Where it is.
        reason: String,
    },
    /// The deadline passed.
    Deadline {
        /// The sender's time limit.
        waited: Duration,
        /// Who was late.
        late: Vec<Rank>,
        /// What some of them do instead.
        doing: Vec<Missing>,
    },
    /// Two ranks disagree.
    Mismatch {
        /// The rank that saw it.
        rank: Rank,
        /// What it asked for.
        asked: String,
        /// The other one.
        other: Rank,
        /// What that asked for.
        other_asked: String,
    },
    /// A rank can't be reached.
    Connect {
        /// Which.
        rank: Rank,
        /// Why.
        reason: String,
    },
    /// A rank broke the protocol.
    Protocol {
        /// Which.
        rank: Rank,
        /// How.
        reason: String,
    },
}

impl Cause {
    /// What `me` tells its peers when it gives up with `error`.
    #[must_use]
    pub fn of(error: &CollectiveError, me: Rank) -> Self {
        match error.clone() {
            CollectiveError::PeerLost { rank, reason } => Self::Lost { rank, reason },
            CollectiveError::PeerFailed { rank, reason, .. } => Self::Failed { rank, reason },
            CollectiveError::PeerLeft { rank, reason } => Self::Left { rank, reason },
            CollectiveError::Deadline {
                waited,
                late,
                doing,
                ..
            } => Self::Deadline {
                waited,
                late,
                doing,
            },
            CollectiveError::Mismatch {
                rank,
                asked,
                other,
                other_asked,
            } => Self::Mismatch {
                rank,
                asked,
                other,
                other_asked,
            },
            CollectiveError::Connect { rank, reason } => Self::Connect { rank, reason },
            CollectiveError::Protocol { rank, reason } => Self::Protocol { rank, reason },
            CollectiveError::Aborted { reason }
            | CollectiveError::Revoked { reason }
            | CollectiveError::Invalid { reason } => Self::Failed { rank: me, reason },
        }
    }

    /// Why rank `own` of the job has no link to `peer` of the group, which is `theirs` in the job. `dials` says that `own` has tried
    /// to make it.
    pub(crate) fn unlinked(
        error: &impl fmt::Display,
        own: Rank,
        (peer, theirs): (Rank, Rank),
        dials: bool,
    ) -> Self {
        // Others hear of it, too, and don't know which rank it was.
        Self::Connect {
            rank: peer,
            reason: format!(
                "{error} (rank {} has tried)",
                if dials { own } else { theirs }
            ),
        }
    }

    /// The error of a rank that gives up because of this, if it is `me` who is at fault: nobody else has failed.
    pub(crate) fn into_own_error(self, me: Rank, call: CallId, operation: &str) -> CollectiveError {
        match self {
            Self::Failed { rank, reason } if rank == me => CollectiveError::Aborted { reason },
            other => other.into_error(call, operation),
        }
    }

    /// The error of a rank that is told this cause while it is in `operation` of `call`.
    #[must_use]
    pub fn into_error(self, call: CallId, operation: &str) -> CollectiveError {
        match self {
            // Nobody gives up with these.
            Self::Stalled { .. } => CollectiveError::Deadline {
                operation: operation.to_owned(),
                waited: Duration::ZERO,
                late: Vec::new(),
                doing: Vec::new(),
            },
            Self::Missed { late } => CollectiveError::Deadline {
                operation: operation.to_owned(),
                waited: Duration::ZERO,
                late,
                doing: Vec::new(),
            },
            Self::Lost { rank, reason } => CollectiveError::PeerLost { rank, reason },
            Self::Failed { rank, reason } => CollectiveError::PeerFailed { rank, call, reason },
            Self::Left { rank, reason } => CollectiveError::PeerLeft { rank, reason },
            Self::Deadline {
                waited,
                late,
                doing,
            } => CollectiveError::Deadline {
                operation: operation.to_owned(),
                waited,
                late,
                doing,
            },
            Self::Mismatch {
                rank,
                asked,
                other,
                other_asked,
            } => CollectiveError::Mismatch {
                rank,
                asked,
                other,
                other_asked,
            },
            Self::Connect { rank, reason } => CollectiveError::Connect { rank, reason },
            Self::Protocol { rank, reason } => CollectiveError::Protocol { rank, reason },
        }
    }

    /// The frame that says it of an operation.
    pub(crate) fn notice(&self, generation: Generation, tag: Tag) -> Vec<u8> {
        let text = self.encode();
        let header = Header::AbortOperation {
            generation,
            tag,
            length: text.len() as u32,
        };
        header.with(&text)
    }

    /// The frame that says that a rank takes part in no more operations of a call because of it.
    pub(crate) fn call_notice(&self, generation: Generation, call: u64) -> Vec<u8> {
        let text = self.encode();
        let header = Header::AbortCall {
            generation,
            call,
            length: text.len() as u32,
        };
        header.with(&text)
    }

    /// Whether a rank that says it has given up.
    pub(crate) fn ends_operation(&self) -> bool {
        !matches!(self, Self::Stalled { .. } | Self::Missed { .. })
    }

    /// The ranks that it names.
    pub(crate) fn ranks(&self) -> Vec<Rank> {
        match self {
            Self::Stalled { .. } => Vec::new(),
            Self::Lost { rank, .. }
            | Self::Failed { rank, .. }
            | Self::Left { rank, .. }
            | Self::Connect { rank, .. }
            | Self::Protocol { rank, .. } => vec![*rank],
            Self::Missed { late } => late.clone(),
            Self::Deadline { late, doing, .. } => {
                let doing = doing.iter().map(|missing| missing.rank);
                late.iter().copied().chain(doing).collect()
            }
            Self::Mismatch { rank, other, .. } => vec![*rank, *other],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_passes_on_its_first_cause() {
        let errors = [
            CollectiveError::PeerLost {
                rank: Rank(1),
                reason: "killed".into(),
            },
            CollectiveError::PeerFailed {
                rank: Rank(1),
                call: CallId(4),
                reason: "panic".into(),
            },
            CollectiveError::PeerLeft {
                rank: Rank(1),
                reason: "in call 5".into(),
            },
            CollectiveError::Deadline {
                operation: "barrier".into(),
                waited: Duration::from_secs(1),
                late: vec![Rank(1), Rank(2)],
                doing: vec![Missing {
                    rank: Rank(2),
                    doing: "it sleeps".into(),
                }],
            },
            CollectiveError::Connect {
                rank: Rank(1),
                reason: "refused".into(),
            },
            CollectiveError::Protocol {
                rank: Rank(1),
                reason: "magic".into(),
            },
            CollectiveError::Mismatch {
                rank: Rank(0),
                asked: "barrier".into(),
                other: Rank(1),
                other_asked: "broadcast".into(),
            },
        ];
        for error in errors {
            let told = Cause::parse(&Cause::of(&error, Rank(0)).encode()).unwrap();
            assert_eq!(told.into_error(CallId(4), "barrier"), error);
        }
        let own = CollectiveError::Invalid {
            reason: "no such root".into(),
        };
        assert_eq!(
            Cause::of(&own, Rank(3)).into_error(CallId(4), "barrier"),
            CollectiveError::PeerFailed {
                rank: Rank(3),
                call: CallId(4),
                reason: "no such root".into()
            }
        );
    }
}
