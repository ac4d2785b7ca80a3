//! The messages about named operations, and how they lie on a link: four bytes of length, then MessagePack. No I/O.

use serde::{Deserialize, Serialize};

use crate::cause::Cause;
use crate::header::{Data, HEADER, Header};
use crate::operation::{Operation, Tag};
use kolo_transport::ids::{Generation, Rank};

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

/// From a rank to the coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Up {
    /// The rank has started an operation.
    Ask {
        call: u64,
        name: String,
        operation: Vec<u8>,
        limit_ms: u64,
        /// Later ones have higher numbers.
        serial: u64,
        epoch: u64,
    },
    /// The rank has no more data.
    Join(Join),
    /// The join with this number is over, because all had joined or because the join failed.
    Unjoin { serial: u64, all: bool },
    /// Calls before this one are over on the rank.
    Over { before: u64, cause: Vec<u8> },
    /// What the rank does.
    Doing { text: String },
}

/// From the coordinator to a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
    /// These are given up.
    Fail {
        call: u64,
        /// As in [`Down::Run`].
        heard: u64,
        names: Vec<String>,
        cause: Vec<u8>,
    },
    /// The receiver is to say what it does.
    Query,
    /// These have waited for long.
    Stalled {
        call: u64,
        names: Vec<String>,
        waited_ms: u64,
        missing: Vec<(u32, String)>,
    },
}

pub(super) fn encode_operation(operation: Operation) -> Vec<u8> {
    let data = Data {
        generation: Generation(0),
        tag: Tag::default(),
        operation,
        step: 0,
        offset: 0,
        length: 0,
    };
    Header::Ask(data).encode().to_vec()
}

pub(super) fn decode_operation(bytes: &[u8]) -> Option<Operation> {
    let bytes: &[u8; HEADER] = bytes.try_into().ok()?;
    match Header::parse(bytes).ok()? {
        Header::Ask(data) => Some(data.operation),
        _ => None,
    }
}

/// Reads a cause. Bytes that are none are a failure of the sender.
pub(super) fn decode_cause(bytes: &[u8], rank: u32) -> Cause {
    Cause::parse(bytes).unwrap_or_else(|| Cause::Protocol {
        rank: Rank(rank),
        reason: "it sent a cause that is none".to_owned(),
    })
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
        let join = Join {
            serial: 1,
            call: 3,
            since: 2,
        };
        let messages = [
            Up::Join(join),
            Up::Ask {
                call: 3,
                name: "w".to_owned(),
                operation: encode_operation(Operation::BARRIER),
                limit_ms: 5,
                serial: 2,
                epoch: 0,
            },
        ];
        let mut bytes = Vec::new();
        for message in &messages {
            put(&mut bytes, message);
        }
        let last = bytes.pop().unwrap();
        let mut inbox = Inbox::default();
        inbox.push(&bytes);
        assert_eq!(inbox.take(), Ok(Some(Up::Join(join))));
        assert_eq!(inbox.take::<Up>(), Ok(None));
        inbox.push(&[last]);
        let Ok(Some(Up::Ask { operation, .. })) = inbox.take() else {
            panic!("it is complete");
        };
        assert_eq!(decode_operation(&operation), Some(Operation::BARRIER));
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
            prop_assert!(decode_operation(&bytes).is_none());
            decode_cause(&bytes, 1);
        }
    }
}
