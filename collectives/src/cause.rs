//! Why a rank gave an operation up, as it tells its peers. No I/O.
//!
//! The first cause travels on: a rank that gives up because of another one sends that one's name, so that
//! every rank names the same culprit, linked with it or not.

use std::time::Duration;

use kolo_transport::ids::{CallId, Rank};

use crate::error::{CollectiveError, DOING};
use crate::header::MAX_TEXT;
use crate::lane::LaneError;
use crate::stall::Missing;

/// Longest piece of text, in bytes. Longer ones are cut.
const TEXT: usize = 1024;
/// The same where there may be several.
const SHORT_TEXT: usize = 256;
/// Most late ranks that are named.
const RANKS: usize = 256;

/// Why a rank gave up.
#[derive(Debug, Clone, PartialEq, Eq)]
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
        /// Who does not come because of one of these, and how that is known.
        excused: Vec<Missing>,
    },
    /// It has not given up: a rank of which it needs nothing itself is gone, and who waits for that one may not know it.
    Gone {
        /// Which.
        rank: Rank,
        /// How it is known.
        reason: String,
    },
    /// A rank is lost.
    Lost {
        /// Which.
        rank: Rank,
        /// Why.
        reason: String,
        /// It is not its link that broke: it is gone, and nothing that needs it can work any more.
        for_good: bool,
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
            CollectiveError::PeerLost { rank, reason } => Self::Lost {
                rank,
                reason,
                for_good: false,
            },
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
            CollectiveError::Aborted { reason } | CollectiveError::Invalid { reason } => {
                Self::Failed { rank: me, reason }
            }
        }
    }

    /// Why `me` has no link to `peer`, of the group's ranks, whose numbers in the job are the second of each pair. `dials` says
    /// that it is `me` who has tried to make it.
    pub(crate) fn unlinked(
        error: &LaneError,
        (me, own): (Rank, Rank),
        (peer, theirs): (Rank, Rank),
        dials: bool,
    ) -> Self {
        match error {
            LaneError::NoDescriptors { rank, .. } => Self::Failed {
                rank: if *rank == own { me } else { peer },
                reason: error.to_string(),
            },
            // Others hear of it, too, and don't know who it was.
            _ => Self::Connect {
                rank: peer,
                reason: format!(
                    "{error} (rank {} has tried)",
                    if dials { own } else { theirs }
                ),
            },
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
            Self::Missed { late, excused } => CollectiveError::Deadline {
                operation: operation.to_owned(),
                waited: Duration::ZERO,
                late,
                doing: excused,
            },
            Self::Lost { rank, reason, .. } | Self::Gone { rank, reason } => {
                CollectiveError::PeerLost { rank, reason }
            }
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

    /// Whether who says it has given up.
    pub(crate) fn ends_operation(&self) -> bool {
        !matches!(
            self,
            Self::Stalled { .. } | Self::Missed { .. } | Self::Gone { .. }
        )
    }

    /// The rank that is gone, if one is.
    pub(crate) fn gone(&self) -> Option<(Rank, &str)> {
        match self {
            Self::Gone { rank, reason }
            | Self::Lost {
                rank,
                reason,
                for_good: true,
            } => Some((*rank, reason)),
            _ => None,
        }
    }

    /// The rank whose fault it is, if it is that of one that is not there.
    pub(crate) fn absent(&self) -> Option<Rank> {
        match self {
            Self::Lost { rank, .. } | Self::Connect { rank, .. } => Some(*rank),
            Self::Deadline { late, .. } => late.first().copied(),
            _ => None,
        }
    }

    /// The ranks that it names.
    pub(crate) fn ranks(&self) -> Vec<Rank> {
        match self {
            Self::Stalled { .. } => Vec::new(),
            Self::Gone { rank, .. }
            | Self::Lost { rank, .. }
            | Self::Failed { rank, .. }
            | Self::Left { rank, .. }
            | Self::Connect { rank, .. }
            | Self::Protocol { rank, .. } => vec![*rank],
            Self::Missed {
                late,
                excused: doing,
            }
            | Self::Deadline { late, doing, .. } => {
                let doing = doing.iter().map(|missing| missing.rank);
                late.iter().copied().chain(doing).collect()
            }
            Self::Mismatch { rank, other, .. } => vec![*rank, *other],
        }
    }

    /// The cause as payload, at most [`MAX_TEXT`] bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let mut put = |code: u8, micros: u64, ranks: &[Rank], texts: &[&str]| {
            out.push(code);
            out.extend_from_slice(&micros.to_le_bytes());
            let ranks = &ranks[..ranks.len().min(RANKS)];
            out.extend_from_slice(&(ranks.len() as u16).to_le_bytes());
            for rank in ranks {
                out.extend_from_slice(&rank.0.to_le_bytes());
            }
            out.push(texts.len() as u8);
            for text in texts {
                let text = cut(text);
                out.extend_from_slice(&(text.len() as u16).to_le_bytes());
                out.extend_from_slice(text.as_bytes());
            }
        };
        match self {
            Self::Stalled { asked } => put(0, 0, &[], &[asked]),
            Self::Lost {
                rank,
                reason,
                for_good,
            } => put(1, u64::from(*for_good), &[*rank], &[reason]),
            Self::Failed { rank, reason } => put(2, 0, &[*rank], &[reason]),
            Self::Left { rank, reason } => put(3, 0, &[*rank], &[reason]),
            Self::Deadline {
                waited,
                late,
                doing,
            } => {
                let micros = u64::try_from(waited.as_micros()).unwrap_or(u64::MAX);
                let (ranks, texts) = ranks_and_texts(late, doing);
                put(4, micros, &ranks, &texts);
            }
            Self::Mismatch {
                rank,
                asked,
                other,
                other_asked,
            } => put(5, 0, &[*rank, *other], &[asked, other_asked]),
            Self::Connect { rank, reason } => put(6, 0, &[*rank], &[reason]),
            Self::Protocol { rank, reason } => put(7, 0, &[*rank], &[reason]),
            Self::Gone { rank, reason } => put(8, 0, &[*rank], &[reason]),
            Self::Missed { late, excused } => {
                let (ranks, texts) = ranks_and_texts(late, excused);
                put(9, 0, &ranks, &texts);
            }
        }
        debug_assert!(out.len() <= MAX_TEXT);
        out
    }

    /// Parses a payload. `None` if it is no cause. Never panics.
    #[must_use]
    pub fn parse(payload: &[u8]) -> Option<Self> {
        let mut rest = payload;
        let code = take(&mut rest, 1)?[0];
        let micros = u64::from_le_bytes(take(&mut rest, 8)?.try_into().ok()?);
        let count = usize::from(u16_of(&mut rest)?);
        let ranks: Vec<Rank> = take(&mut rest, count * 4)?
            .chunks_exact(4)
            .map(|bytes| Rank(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])))
            .collect();
        let mut texts = Vec::new();
        for _ in 0..take(&mut rest, 1)?[0] {
            let length = usize::from(u16_of(&mut rest)?);
            let text = String::from_utf8_lossy(take(&mut rest, length)?).into_owned();
            texts.push(text);
        }
        if !rest.is_empty() {
            return None;
        }
        let mut texts = texts.into_iter();
        let mut text = || texts.next();
        let rank = || ranks.first().copied();
        Some(match code {
            0 => Self::Stalled { asked: text()? },
            1 => Self::Lost {
                rank: rank()?,
                reason: text()?,
                for_good: micros == 1,
            },
            2 => Self::Failed {
                rank: rank()?,
                reason: text()?,
            },
            3 => Self::Left {
                rank: rank()?,
                reason: text()?,
            },
            4 | 9 => {
                let count = ranks.len().checked_sub(texts.len())?;
                let doing = ranks[count..].iter().zip(texts);
                let doing = doing
                    .map(|(rank, doing)| Missing { rank: *rank, doing })
                    .collect();
                let late = ranks[..count].to_vec();
                if code == 9 {
                    return Some(Self::Missed {
                        late,
                        excused: doing,
                    });
                }
                Self::Deadline {
                    waited: Duration::from_micros(micros),
                    late,
                    doing,
                }
            }
            5 => Self::Mismatch {
                rank: rank()?,
                asked: text()?,
                other: ranks.get(1).copied()?,
                other_asked: text()?,
            },
            6 => Self::Connect {
                rank: rank()?,
                reason: text()?,
            },
            7 => Self::Protocol {
                rank: rank()?,
                reason: text()?,
            },
            8 => Self::Gone {
                rank: rank()?,
                reason: text()?,
            },
            _ => return None,
        })
    }
}

/// As many as are passed on; the last ranks are those of the texts.
fn ranks_and_texts<'a>(late: &[Rank], doing: &'a [Missing]) -> (Vec<Rank>, Vec<&'a str>) {
    let doing = &doing[..doing.len().min(DOING)];
    let late = &late[..late.len().min(RANKS - doing.len())];
    let of_texts = doing.iter().map(|missing| missing.rank);
    let texts = doing
        .iter()
        .map(|missing| cut_to(&missing.doing, SHORT_TEXT));
    (
        late.iter().copied().chain(of_texts).collect(),
        texts.collect(),
    )
}

fn take<'a>(rest: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (head, tail) = rest.split_at_checked(count)?;
    *rest = tail;
    Some(head)
}

fn u16_of(rest: &mut &[u8]) -> Option<u16> {
    let bytes = take(rest, 2)?;
    Some(u16::from_le_bytes([bytes[0], bytes[1]]))
}

/// At most [`TEXT`] bytes of a text, cut between two characters.
pub(crate) fn cut(text: &str) -> &str {
    cut_to(text, TEXT)
}

fn cut_to(text: &str, most: usize) -> &str {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_cause() -> impl Strategy<Value = Cause> {
        let named = || (any::<u32>().prop_map(Rank), ".{0,300}");
        prop_oneof![
            ".{0,300}".prop_map(|asked| Cause::Stalled { asked }),
            (named(), any::<bool>()).prop_map(|((rank, reason), for_good)| Cause::Lost {
                rank,
                reason,
                for_good
            }),
            named().prop_map(|(rank, reason)| Cause::Gone { rank, reason }),
            (
                prop::collection::vec(any::<u32>(), 0..80),
                prop::collection::vec(named(), 0..=DOING)
            )
                .prop_map(|(late, excused)| Cause::Missed {
                    late: late.into_iter().map(Rank).collect(),
                    excused: excused
                        .into_iter()
                        .map(|(rank, doing)| Missing {
                            rank,
                            doing: cut_to(&doing, SHORT_TEXT).to_owned(),
                        })
                        .collect(),
                }),
            named().prop_map(|(rank, reason)| Cause::Failed { rank, reason }),
            named().prop_map(|(rank, reason)| Cause::Left { rank, reason }),
            named().prop_map(|(rank, reason)| Cause::Connect { rank, reason }),
            named().prop_map(|(rank, reason)| Cause::Protocol { rank, reason }),
            (
                any::<u32>(),
                prop::collection::vec(any::<u32>(), 0..80),
                prop::collection::vec(named(), 0..=DOING)
            )
                .prop_map(|(micros, late, doing)| Cause::Deadline {
                    waited: Duration::from_micros(micros.into()),
                    late: late.into_iter().map(Rank).collect(),
                    doing: doing
                        .into_iter()
                        .map(|(rank, doing)| Missing {
                            rank,
                            doing: cut_to(&doing, SHORT_TEXT).to_owned(),
                        })
                        .collect(),
                }),
            (named(), named()).prop_map(|((rank, asked), (other, other_asked))| {
                Cause::Mismatch {
                    rank,
                    asked,
                    other,
                    other_asked,
                }
            }),
        ]
    }

    #[test]
    fn what_is_too_long_is_cut_to_the_limit() {
        let long = "ü".repeat(5000);
        let cause = Cause::Mismatch {
            rank: Rank(0),
            asked: long.clone(),
            other: Rank(1),
            other_asked: long,
        };
        let bytes = cause.encode();
        assert!(bytes.len() <= MAX_TEXT);
        let Some(Cause::Mismatch { other_asked, .. }) = Cause::parse(&bytes) else {
            panic!("it parses");
        };
        assert_eq!(other_asked, "ü".repeat(512));
        let late = (0..10_000).map(Rank).collect();
        let missing = |rank| Missing {
            rank: Rank(rank),
            doing: "ü".repeat(5000),
        };
        let bytes = Cause::Deadline {
            waited: Duration::MAX,
            late,
            doing: (7..20).map(missing).collect(),
        }
        .encode();
        assert!(bytes.len() <= MAX_TEXT);
        let Some(Cause::Deadline { late, doing, .. }) = Cause::parse(&bytes) else {
            panic!("it parses");
        };
        assert_eq!((late.len(), doing.len()), (252, 4));
        assert_eq!((doing[3].rank, doing[3].doing.len()), (Rank(10), 256));
    }

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

    proptest! {
        #[test]
        fn causes_survive_the_wire(cause in any_cause()) {
            prop_assert_eq!(Cause::parse(&cause.encode()), Some(cause));
        }

        #[test]
        fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Some(cause) = Cause::parse(&bytes) {
                prop_assert!(cause.encode().len() <= MAX_TEXT);
            }
        }

        #[test]
        fn a_cut_cause_is_no_cause(cause in any_cause(), cut in any::<prop::sample::Index>()) {
            let bytes = cause.encode();
            prop_assert_eq!(Cause::parse(&bytes[..cut.index(bytes.len())]), None);
        }
    }
}
