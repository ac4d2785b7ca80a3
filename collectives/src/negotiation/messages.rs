//! The messages about named operations, and how they lie on a link: four bytes of length, then MessagePack. No I/O.

use std::time::Duration;

use kolo_transport::ids::Generation;
use serde::{Deserialize, Serialize};

use crate::cause::Cause;
use crate::error::CollectiveError;
use crate::header::{Data, HEADER, Header};
use crate::operation::{Operation, Tag};

/// Longest message, in bytes: a batch of the longest names fits.
pub(super) const MOST: usize = 16 << 20;

/// Longest name, in bytes.
pub(super) const NAME: usize = 1024;

/// Most names in one message.
pub(super) const BATCH: usize = 4096;

/// A rank's word that it has no more data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Join {
    /// Later ones have higher numbers.
    pub(super) serial: u64,
    pub(super) call: u64,
    /// The operation of the call without a name that would have been the rank's next.
    pub(super) since: u64,
}

/// A named operation of a call.
pub(super) type Key = (u64, String);

/// What a rank asks for by a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Request {
    #[serde(with = "as_header")]
    pub(super) operation: Operation,
    pub(super) limit: Duration,
    /// Later requests of the rank have higher numbers.
    pub(super) serial: u64,
    /// All ranks had joined last before this operation without a name of the call.
    pub(super) epoch: u64,
}

/// From a rank to the coordinator.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Up {
    /// The first word on a link: of the operations that were decided the rank has heard up to this call, and in it of those with
    /// lower numbers than this one.
    Heard { call: u64, next: u64 },
    /// The rank has started an operation.
    Ask { key: Key, request: Request },
    /// The rank has no more data.
    Join(Join),
    /// The join with this number is over, because all had joined or because the join failed.
    Unjoin { serial: u64, all: bool },
    /// Calls before this one are over on the rank.
    Over {
        before: u64,
        #[serde(with = "as_payload")]
        cause: CollectiveError,
    },
    /// What the rank does.
    Doing { text: String },
}

/// From the coordinator to a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Down {
    /// Run these now, as one operation with this number in the call.
    Run {
        call: u64,
        number: u64,
        /// The number of the last request that the coordinator had from the receiver: later ones are not meant.
        heard: u64,
        /// The receiver takes part without data, as it said by this join.
        follows: Option<u64>,
        names: Vec<String>,
    },
    /// An operation with this number was decided, and the receiver has not heard of it.
    Missed { call: u64, number: u64 },
    /// These are given up.
    Fail {
        call: u64,
        /// As in [`Down::Run`].
        heard: u64,
        names: Vec<String>,
        #[serde(with = "as_payload")]
        cause: CollectiveError,
    },
    /// The receiver is to say what it does.
    Query,
    /// These have waited for long.
    Stalled {
        call: u64,
        names: Vec<String>,
        waited: Duration,
        missing: Vec<(u32, String)>,
    },
}

/// An operation as the header of a frame has it.
mod as_header {
    use serde::de::Error as _;
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    use super::{Data, Generation, HEADER, Header, Operation, Tag};

    pub(super) fn serialize<S: Serializer>(
        operation: &Operation,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        let data = Data {
            generation: Generation(0),
            tag: Tag::default(),
            operation: *operation,
            step: 0,
            offset: 0,
            length: 0,
        };
        Header::Ask(data).encode()[..].serialize(to)
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Operation, D::Error> {
        let bytes = Vec::<u8>::deserialize(from)?;
        let header: Result<[u8; HEADER], _> = bytes.try_into();
        match header.map(|header| Header::parse(&header)) {
            Ok(Ok(Header::Ask(data))) => Ok(data.operation),
            _ => Err(D::Error::custom("an operation that is none")),
        }
    }
}

/// Why something failed, as in the payload of a frame.
mod as_payload {
    use serde::de::Error as _;
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    use super::{Cause, CollectiveError};

    pub(super) fn serialize<S: Serializer>(
        cause: &CollectiveError,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        Cause::Failure(cause.clone()).encode().serialize(to)
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(
        from: D,
    ) -> Result<CollectiveError, D::Error> {
        let bytes = Vec::<u8>::deserialize(from)?;
        match Cause::parse(&bytes) {
            Some(Cause::Failure(error)) => Ok(error),
            _ => Err(D::Error::custom("a cause that is none")),
        }
    }
}

/// Puts a message behind others.
pub(super) fn put<M: Serialize>(out: &mut Vec<u8>, message: &M) {
    let start = out.len();
    out.extend_from_slice(&[0; 4]);
    if let Err(error) = rmp_serde::encode::write(out, message) {
        // Numbers, texts and lists of them can always be serialised.
        tracing::error!(%error, "a message about named operations can't be serialised");
        out.truncate(start);
        return;
    }
    let length = (out.len() - start - 4) as u32;
    out[start..start + 4].copy_from_slice(&length.to_le_bytes());
}

/// Bytes that came, and are messages when they are complete.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    bytes: Vec<u8>,
    start: usize,
}

impl Inbox {
    /// More came.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 {
            // What is left is the beginning of one message.
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// Takes the first message, if it is complete.
    ///
    /// Fails if there is none that this version understands.
    pub(super) fn take<M: for<'a> Deserialize<'a>>(&mut self) -> Result<Option<M>, String> {
        let Some((length, rest)) = self.bytes[self.start..].split_first_chunk::<4>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length > MOST {
            return Err(format!(
                "a message of {length} bytes is over the limit of {MOST}"
            ));
        }
        let Some(message) = rest.get(..length) else {
            return Ok(None);
        };
        let message = rmp_serde::from_slice(message).map_err(|error| error.to_string())?;
        self.start += 4 + length;
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_come_one_by_one_and_bad_ones_are_seen() {
        let request = Request {
            operation: Operation::BARRIER,
            limit: Duration::from_millis(5),
            serial: 2,
            epoch: 0,
        };
        let messages = [
            Up::Heard { call: 3, next: 7 },
            Up::Over {
                before: 3,
                cause: CollectiveError::PeerLeft {
                    rank: kolo_transport::ids::Rank(1),
                    reason: "call 3 has begun".to_owned(),
                },
            },
            Up::Ask {
                key: (3, "w".to_owned()),
                request,
            },
        ];
        let mut bytes = Vec::new();
        for message in &messages {
            put(&mut bytes, message);
        }
        let last = bytes.pop().unwrap();
        let mut inbox = Inbox::default();
        inbox.push(&bytes);
        for message in &messages[..2] {
            assert_eq!(inbox.take(), Ok(Some(message.clone())));
        }
        assert_eq!(inbox.take::<Up>(), Ok(None));
        inbox.push(&[last]);
        assert_eq!(inbox.take(), Ok(Some(messages[2].clone())));
        assert_eq!(inbox.take::<Up>(), Ok(None));
        inbox.push(&[255; 9]);
        assert!(inbox.take::<Up>().unwrap_err().contains("limit"));
        let mut inbox = Inbox::default();
        inbox.push(&[1, 0, 0, 0, 5]);
        assert!(inbox.take::<Up>().is_err());
    }

    #[test]
    fn the_longest_batch_fits_a_message() {
        let names = vec!["n".repeat(NAME); BATCH];
        let mut bytes = Vec::new();
        let run = Down::Run {
            call: u64::MAX,
            number: u64::MAX,
            heard: u64::MAX,
            follows: Some(u64::MAX),
            names,
        };
        put(&mut bytes, &run);
        assert!(bytes.len() < MOST, "{}", bytes.len());
        let mut inbox = Inbox::default();
        inbox.push(&bytes);
        assert_eq!(inbox.take(), Ok(Some(run)));
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let mut inbox = Inbox::default();
            inbox.push(&bytes);
            drop(inbox.take::<Up>());
            let mut inbox = Inbox::default();
            inbox.push(&bytes);
            drop(inbox.take::<Down>());
        }
    }
}
