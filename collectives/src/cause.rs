//! Why a rank gave an operation up, as it tells its peers. No I/O.
//!
//! The first cause travels on: a rank that gives up because of another one sends that one's name, so that
//! every rank names the same culprit, linked with it or not.

use kolo_transport::ids::{CallId, Generation, Rank};
use serde::{Deserialize, Serialize};

use crate::error::{CollectiveError, DOING};
pub(crate) use crate::header::cut;
use crate::header::{Header, MAX_TEXT, cut_to};
use crate::operation::Tag;

/// Bytes of a text where there may be several.
const SHORT_TEXT: usize = 256;
/// Most ranks that are named.
const RANKS: usize = 256;

/// What a rank says of an operation that does not end well.
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
    /// It has given up, with this error, as others [are told](Cause::of) of it.
    Failure(CollectiveError),
}

impl Cause {
    /// What `me` tells its peers when it gives up with `error`.
    #[must_use]
    pub fn of(error: &CollectiveError, me: Rank) -> Self {
        Self::Failure(match error.clone() {
            CollectiveError::Aborted { reason }
            | CollectiveError::Revoked { reason }
            | CollectiveError::Invalid { reason } => CollectiveError::PeerFailed {
                rank: me,
                call: CallId(0),
                reason,
            },
            error => error,
        })
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
        matches!(self, Self::Failure(_))
    }

    /// The ranks that it names.
    pub(crate) fn ranks(&self) -> Vec<Rank> {
        match self {
            Self::Stalled { .. } => Vec::new(),
            Self::Missed { late } => late.clone(),
            Self::Failure(error) => {
                let mut error = error.clone();
                error.ranks_mut().into_iter().map(|rank| *rank).collect()
            }
        }
    }

    /// The cause as payload, at most [`MAX_TEXT`] bytes. What is too long is cut, and what only the sender has is left out: the call
    /// and the operation.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut cause = self.clone();
        match &mut cause {
            Self::Stalled { asked } => shorten(asked),
            Self::Missed { late } => late.truncate(RANKS),
            Self::Failure(error) => shorten_error(error),
        }
        // Of such values it can't fail.
        let bytes = rmp_serde::to_vec(&cause).unwrap_or_default();
        debug_assert!((1..=MAX_TEXT).contains(&bytes.len()));
        bytes
    }

    /// Parses a payload. `None` if it is no cause, or an error that a rank can have of itself alone. Never panics.
    #[must_use]
    pub fn parse(payload: &[u8]) -> Option<Self> {
        let cause = rmp_serde::from_slice(payload).ok()?;
        let is_of_the_rank_alone = matches!(
            cause,
            Self::Failure(
                CollectiveError::Aborted { .. }
                    | CollectiveError::Revoked { .. }
                    | CollectiveError::Invalid { .. }
            )
        );
        (!is_of_the_rank_alone).then_some(cause)
    }
}

fn shorten(text: &mut String) {
    text.truncate(cut(text).len());
}

fn shorten_error(error: &mut CollectiveError) {
    match error {
        CollectiveError::PeerFailed { call, reason, .. } => {
            *call = CallId(0);
            shorten(reason);
        }
        CollectiveError::PeerLost { reason, .. }
        | CollectiveError::PeerLeft { reason, .. }
        | CollectiveError::Connect { reason, .. }
        | CollectiveError::Protocol { reason, .. }
        | CollectiveError::Aborted { reason }
        | CollectiveError::Revoked { reason }
        | CollectiveError::Invalid { reason } => shorten(reason),
        CollectiveError::Mismatch {
            asked, other_asked, ..
        } => {
            shorten(asked);
            shorten(other_asked);
        }
        CollectiveError::Deadline {
            operation,
            late,
            doing,
            ..
        } => {
            operation.clear();
            doing.truncate(DOING);
            for missing in &mut *doing {
                let length = cut_to(&missing.doing, SHORT_TEXT).len();
                missing.doing.truncate(length);
            }
            late.truncate(RANKS - doing.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::stall::Missing;

    const CALL: CallId = CallId(4);

    /// An error of call 4, in a barrier, that is not the own fault of the rank that has it.
    fn any_error() -> impl Strategy<Value = CollectiveError> {
        let named = || (any::<u32>().prop_map(Rank), ".{0,300}");
        let late = || prop::collection::vec(any::<u32>().prop_map(Rank), 0..80);
        let missing = || {
            named().prop_map(|(rank, doing)| Missing {
                rank,
                doing: cut_to(&doing, SHORT_TEXT).to_owned(),
            })
        };
        let doing = || prop::collection::vec(missing(), 0..=DOING);
        prop_oneof![
            named().prop_map(|(rank, reason)| CollectiveError::PeerLost { rank, reason }),
            named().prop_map(|(rank, reason)| CollectiveError::PeerFailed {
                rank,
                call: CALL,
                reason
            }),
            named().prop_map(|(rank, reason)| CollectiveError::PeerLeft { rank, reason }),
            named().prop_map(|(rank, reason)| CollectiveError::Connect { rank, reason }),
            named().prop_map(|(rank, reason)| CollectiveError::Protocol { rank, reason }),
            (any::<u32>(), late(), doing()).prop_map(|(micros, late, doing)| {
                CollectiveError::Deadline {
                    operation: "barrier".to_owned(),
                    waited: Duration::from_micros(micros.into()),
                    late,
                    doing,
                }
            }),
            (named(), named()).prop_map(|((rank, asked), (other, other_asked))| {
                CollectiveError::Mismatch {
                    rank,
                    asked,
                    other,
                    other_asked,
                }
            }),
        ]
    }

    /// What comes of a cause at the other end.
    fn sent(cause: &Cause) -> Option<Cause> {
        let bytes = cause.encode();
        assert!(bytes.len() <= MAX_TEXT);
        Cause::parse(&bytes)
    }

    #[test]
    fn a_ranks_own_fault_is_told_with_its_name() {
        let reason = || "no such root".to_owned();
        for own in [
            CollectiveError::Invalid { reason: reason() },
            CollectiveError::Aborted { reason: reason() },
            CollectiveError::Revoked { reason: reason() },
        ] {
            let Some(Cause::Failure(told)) = sent(&Cause::of(&own, Rank(3))) else {
                panic!("it is a failure");
            };
            let expected = CollectiveError::PeerFailed {
                rank: Rank(3),
                call: CALL,
                reason: reason(),
            };
            assert_eq!(told.heard_in(CALL, "barrier"), expected);
        }
    }

    #[test]
    fn what_is_too_long_is_cut_to_the_limit() {
        let long = "ü".repeat(5000);
        let mismatch = CollectiveError::Mismatch {
            rank: Rank(0),
            asked: long.clone(),
            other: Rank(1),
            other_asked: long.clone(),
        };
        let Some(Cause::Failure(CollectiveError::Mismatch { other_asked, .. })) =
            sent(&Cause::Failure(mismatch))
        else {
            panic!("it parses");
        };
        assert_eq!(other_asked, "ü".repeat(512));
        let missing = |rank| Missing {
            rank: Rank(rank),
            doing: long.clone(),
        };
        let deadline = CollectiveError::Deadline {
            operation: long.clone(),
            waited: Duration::MAX,
            late: (0..10_000).map(Rank).collect(),
            doing: (7..20).map(missing).collect(),
        };
        let Some(Cause::Failure(CollectiveError::Deadline { late, doing, .. })) =
            sent(&Cause::Failure(deadline))
        else {
            panic!("it parses");
        };
        assert_eq!((late.len(), doing.len()), (252, 4));
        assert_eq!((doing[3].rank, doing[3].doing.len()), (Rank(10), 256));
    }

    proptest! {
        #[test]
        fn an_error_passes_on_its_first_cause(error in any_error()) {
            let told = sent(&Cause::of(&error, Rank(0)));
            let Some(Cause::Failure(told)) = told else {
                panic!("{told:?} is no failure");
            };
            prop_assert_eq!(told.heard_in(CALL, "barrier"), error);
        }

        #[test]
        fn what_is_asked_at_a_deadline_survives_the_wire(asked in ".{0,300}", late in prop::collection::vec(any::<u32>(), 0..80)) {
            let late = late.into_iter().map(Rank).collect();
            for cause in [Cause::Stalled { asked }, Cause::Missed { late }] {
                prop_assert_eq!(sent(&cause), Some(cause));
            }
        }

        #[test]
        fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Some(cause) = Cause::parse(&bytes) {
                prop_assert!(cause.encode().len() <= MAX_TEXT);
            }
        }

        #[test]
        fn a_cut_cause_is_no_cause(error in any_error(), cut in any::<prop::sample::Index>()) {
            let bytes = Cause::Failure(error).encode();
            prop_assert_eq!(Cause::parse(&bytes[..cut.index(bytes.len())]), None);
        }
    }
}
