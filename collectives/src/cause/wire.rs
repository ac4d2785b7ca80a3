//! Causes as bytes.

use std::time::Duration;

use kolo_transport::ids::Rank;

use super::Cause;
use crate::error::DOING;
pub(crate) use crate::header::cut;
use crate::header::{MAX_TEXT, cut_to};
use crate::stall::Missing;

/// The same where there may be several.
const SHORT_TEXT: usize = 256;
/// Most late ranks that are named.
const RANKS: usize = 256;

impl Cause {
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
            Self::Lost { rank, reason } => put(1, 0, &[*rank], &[reason]),
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
            Self::Missed { late } => put(9, 0, late, &[]),
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
            },
            2 => Self::Failed {
                rank: rank()?,
                reason: text()?,
            },
            3 => Self::Left {
                rank: rank()?,
                reason: text()?,
            },
            4 => {
                let (late, of_texts) = ranks.split_at(ranks.len().checked_sub(texts.len())?);
                let doing = of_texts.iter().zip(texts);
                let doing = doing.map(|(rank, doing)| Missing { rank: *rank, doing });
                Self::Deadline {
                    waited: Duration::from_micros(micros),
                    late: late.to_vec(),
                    doing: doing.collect(),
                }
            }
            9 => Self::Missed { late: ranks },
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
            _ => return None,
        })
    }
}

/// As many as are passed on; the last ranks are those of the texts.
fn ranks_and_texts<'a>(late: &[Rank], doing: &'a [Missing]) -> (Vec<Rank>, Vec<&'a str>) {
    let (of_texts, texts): (Vec<_>, Vec<_>) = doing
        .iter()
        .take(DOING)
        .map(|one| (one.rank, cut_to(&one.doing, SHORT_TEXT)))
        .unzip();
    let late = &late[..late.len().min(RANKS - of_texts.len())];
    ([late, &of_texts[..]].concat(), texts)
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_cause() -> impl Strategy<Value = Cause> {
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
            ".{0,300}".prop_map(|asked| Cause::Stalled { asked }),
            named().prop_map(|(rank, reason)| Cause::Lost { rank, reason }),
            late().prop_map(|late| Cause::Missed { late }),
            named().prop_map(|(rank, reason)| Cause::Failed { rank, reason }),
            named().prop_map(|(rank, reason)| Cause::Left { rank, reason }),
            named().prop_map(|(rank, reason)| Cause::Connect { rank, reason }),
            named().prop_map(|(rank, reason)| Cause::Protocol { rank, reason }),
            (any::<u32>(), late(), doing()).prop_map(|(micros, late, doing)| Cause::Deadline {
                waited: Duration::from_micros(micros.into()),
                late,
                doing,
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
