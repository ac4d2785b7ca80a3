//! Why a collective operation failed.

use std::fmt;
use std::time::Duration;

use kolo_transport::ids::{CallId, Rank};
use kolo_transport::wire::span::Span;
use serde::{Deserialize, Serialize};

use crate::stall::Missing;

/// Why a collective operation failed on this rank. The caller's input is as it was (F-2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// The control plane has said that a rank is lost, or its link has ended and nobody has said why (then the rank may live).
    /// The group needs a new generation; restart the rank or the job.
    #[error("rank {rank} is lost: {reason}")]
    PeerLost {
        /// The lost rank.
        rank: Rank,
        /// What is known.
        reason: String,
    },
    /// A rank failed in the same call and left the operation: its user code returned an error or
    /// panicked, or it gave the operation up. Look at that rank's own error; the next call can work.
    #[error("rank {rank} failed in call {call}: {reason}")]
    PeerFailed {
        /// The rank that failed first.
        rank: Rank,
        /// In which call.
        call: CallId,
        /// What it said.
        reason: String,
    },
    /// A rank is already in a later operation or call and will not come back to this one. All ranks must
    /// make the same collective calls in the same order; a call that uses collectives must run on all ranks.
    #[error("rank {rank} left this operation: {reason}")]
    PeerLeft {
        /// The rank that left.
        rank: Rank,
        /// Where it is, and where this rank is.
        reason: String,
    },
    /// The deadline passed. `late` names the ranks that did not come or stopped answering. See what they do
    /// instead, or set a longer time with [`Communicator::set_timeout`](crate::Communicator::set_timeout).
    #[error(
        "{operation} did not end within {}; {}",
        Span(*waited),
        late_ranks(late, doing)
    )]
    Deadline {
        /// The operation, as this rank asked for it.
        operation: String,
        /// How long it has waited: its time limit, and over links the time in which the ranks ask each other who is late.
        waited: Duration,
        /// The ranks that were late, in order. Empty if only this rank's own earlier operation was.
        late: Vec<Rank>,
        /// What is known of what some of them do instead, and of ranks that wait for this one in another operation: where one
        /// sends and the other reduces, say, both end here. Of at most four.
        doing: Vec<Missing>,
    },
    /// Ranks asked for different things at the same place. Both are named; make them agree.
    ///
    /// It is seen where a frame of one rank meets another that asked for something else, and passed on from there to all
    /// that are in the operation. Ranks that only wait ask each other after 0.1 s.
    #[error("ranks disagree: rank {rank} asked for {asked}, but rank {other} for {other_asked}")]
    Mismatch {
        /// The rank that saw it.
        rank: Rank,
        /// What that rank asked for.
        asked: String,
        /// The other rank.
        other: Rank,
        /// What the other rank asked for.
        other_asked: String,
    },
    /// No link to a rank could be made. The next operation tries again.
    #[error("can't connect to rank {rank}: {reason}")]
    Connect {
        /// To whom.
        rank: Rank,
        /// Why not.
        reason: String,
    },
    /// A rank sent what is no frame of this protocol, version or generation. A fault in kolo, or two
    /// programs of different versions in one group.
    #[error("rank {rank} broke the data plane's protocol: {reason}")]
    Protocol {
        /// Who.
        rank: Rank,
        /// What came.
        reason: String,
    },
    /// This rank itself gave the operation up: its call was aborted or replaced by a newer one.
    #[error("the operation was given up on this rank: {reason}")]
    Aborted {
        /// Why.
        reason: String,
    },
    /// The communicator was [revoked](crate::Communicator::revoke): its job ends, say. No operation works any more.
    #[error("no operation goes on: {reason}")]
    Revoked {
        /// Why.
        reason: String,
    },
    /// The arguments can't be right on this rank.
    #[error("{reason}")]
    Invalid {
        /// What was given and what is allowed.
        reason: String,
    },
}

/// Most ranks of which an error says what they do.
pub(crate) const DOING: usize = 4;

fn late_ranks(late: &[Rank], doing: &[Missing]) -> String {
    let mut text = match late {
        [] => "it had no turn: its time was too short, or an earlier operation of this rank is still under way"
            .to_owned(),
        [one] => format!("late: rank {one}"),
        many => {
            let names: Vec<String> = many.iter().map(ToString::to_string).collect();
            format!("late: ranks {}", names.join(", "))
        }
    };
    for Missing { rank, doing } in doing {
        text.extend(["; rank ", &rank.to_string(), ": ", doing]);
    }
    text
}

impl CollectiveError {
    /// There is no link to a rank, to which rank `tried` of the job was to make one.
    pub(crate) fn unlinked(rank: Rank, error: &impl fmt::Display, tried: u32) -> Self {
        // Others hear of it, too, and don't know which rank it was.
        let reason = format!("{error} (rank {tried} has tried)");
        Self::Connect { rank, reason }
    }

    /// The rank that caused it. If it is another rank, this error is an echo of what that rank reports itself (or of its
    /// loss); it is this rank itself where that came late. `None` for what is no one rank's fault (a mismatch), or is this
    /// rank's own.
    #[must_use]
    pub fn culprit_rank(&self) -> Option<Rank> {
        match self {
            Self::PeerLost { rank, .. }
            | Self::PeerFailed { rank, .. }
            | Self::PeerLeft { rank, .. }
            | Self::Connect { rank, .. }
            | Self::Protocol { rank, .. } => Some(*rank),
            Self::Deadline { late, .. } => late.first().copied(),
            Self::Mismatch { .. }
            | Self::Aborted { .. }
            | Self::Revoked { .. }
            | Self::Invalid { .. } => None,
        }
    }

    /// The ranks that it names.
    pub(crate) fn ranks_mut(&mut self) -> Vec<&mut Rank> {
        match self {
            Self::PeerLost { rank, .. }
            | Self::PeerFailed { rank, .. }
            | Self::PeerLeft { rank, .. }
            | Self::Connect { rank, .. }
            | Self::Protocol { rank, .. } => vec![rank],
            Self::Deadline { late, doing, .. } => {
                let doing = doing.iter_mut().map(|missing| &mut missing.rank);
                late.iter_mut().chain(doing).collect()
            }
            Self::Mismatch { rank, other, .. } => vec![rank, other],
            Self::Aborted { .. } | Self::Revoked { .. } | Self::Invalid { .. } => Vec::new(),
        }
    }

    /// The same with other numbers for ranks.
    pub(crate) fn with_ranks(mut self, map: impl Fn(Rank) -> Rank) -> Self {
        for rank in self.ranks_mut() {
            *rank = map(*rank);
        }
        if let Self::Deadline { late, .. } = &mut self {
            // A group may have its members in another order.
            late.sort_unstable();
        }
        self
    }

    /// As it is for a rank that is told of it in this operation of this call.
    pub(crate) fn heard_in(mut self, in_call: CallId, in_operation: &str) -> Self {
        match &mut self {
            Self::PeerFailed { call, .. } => *call = in_call,
            Self::Deadline { operation, .. } => in_operation.clone_into(operation),
            _ => {}
        }
        self
    }

    /// The same with other words for operations.
    pub(crate) fn with_operations(mut self, map: impl Fn(String) -> String) -> Self {
        match &mut self {
            Self::Deadline { operation, .. } => *operation = map(std::mem::take(operation)),
            Self::Mismatch {
                asked, other_asked, ..
            } => {
                *asked = map(std::mem::take(asked));
                *other_asked = map(std::mem::take(other_asked));
            }
            _ => {}
        }
        self
    }

    /// Whether the same operation may succeed on this communicator if all ranks try it again.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::PeerFailed { .. }
            | Self::PeerLeft { .. }
            | Self::Deadline { .. }
            | Self::Connect { .. }
            | Self::Aborted { .. } => true,
            Self::PeerLost { .. }
            | Self::Mismatch { .. }
            | Self::Protocol { .. }
            | Self::Revoked { .. }
            | Self::Invalid { .. } => false,
        }
    }
}
