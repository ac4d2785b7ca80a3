//! Causes as bytes.

use super::Cause;
use crate::error::DOING;
pub(crate) use crate::header::cut;
use crate::header::{MAX_TEXT, cut_to};

/// Bytes of a text where there may be several.
const SHORT_TEXT: usize = 256;
/// Most ranks that are named.
const RANKS: usize = 256;

impl Cause {
    /// The cause as payload, at most [`MAX_TEXT`] bytes. What is too long is cut.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut cause = self.clone();
        cause.shorten();
        // Of such values it can't fail.
        let bytes = rmp_serde::to_vec(&cause).unwrap_or_default();
        debug_assert!((1..=MAX_TEXT).contains(&bytes.len()));
        bytes
    }

    /// Parses a payload. `None` if it is no cause. Never panics.
    #[must_use]
    pub fn parse(payload: &[u8]) -> Option<Self> {
        rmp_serde::from_slice(payload).ok()
    }

    fn shorten(&mut self) {
        let shorten = |text: &mut String| text.truncate(cut(text).len());
        match self {
            Self::Stalled { asked: text }
            | Self::Lost { reason: text, .. }
            | Self::Failed { reason: text, .. }
            | Self::Left { reason: text, .. }
            | Self::Connect { reason: text, .. }
            | Self::Protocol { reason: text, .. } => shorten(text),
            Self::Mismatch {
                asked, other_asked, ..
            } => {
                shorten(asked);
                shorten(other_asked);
            }
            Self::Missed { late } => late.truncate(RANKS),
            Self::Deadline { late, doing, .. } => {
                doing.truncate(DOING);
                for missing in &mut *doing {
                    let length = cut_to(&missing.doing, SHORT_TEXT).len();
                    missing.doing.truncate(length);
                }
                late.truncate(RANKS - doing.len());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kolo_transport::ids::Rank;
    use proptest::prelude::*;

    use super::*;
    use crate::stall::Missing;

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
