//! Frames: a MessagePack head and a raw body, each with its length in front.
//!
//! ```text
//! +--------------+--------------+------------------+------------+
//! | head length  | body length  | head             | body       |
//! | u32, big end | u32, big end | MessagePack map  | any bytes  |
//! +--------------+--------------+------------------+------------+
//! ```
//!
//! The head is a message of [this crate](crate). The body is what the message carries for somebody else:
//! arguments, results, a piece of a file. A daemon passes a body on without a copy or a look.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Bytes before the head.
pub const PREFIX: usize = 8;

/// Nesting that a head may have. Wire types have no recursion; this stops hostile input.
const MAX_DEPTH: usize = 64;

/// How much a decoder asks for at once, and the most it sets aside on the word of a length field.
const READ_CHUNK: usize = 64 * 1024;

/// The longest frame that a side accepts, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Longest head.
    pub head: u32,
    /// Longest body.
    pub body: u32,
}

impl Limits {
    /// For requests and their replies: heads up to 4 MiB, no body.
    pub const CONTROL: Self = Self {
        head: 4 << 20,
        body: 0,
    };
    /// For calls and files: heads up to 4 MiB, bodies up to 1 GiB.
    pub const CALLS: Self = Self {
        head: 4 << 20,
        body: 1 << 30,
    };
    /// For a peer that is not authenticated yet: heads up to 64 KiB, no body.
    pub const JOIN: Self = Self {
        head: 64 << 10,
        body: 0,
    };
}

/// What is wrong with a frame itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidFrame {
    /// A length field is over the limit. Nothing of the frame was read.
    #[error("a frame's {part} of {given} bytes is over the limit of {limit}")]
    TooLong {
        /// `head` or `body`.
        part: &'static str,
        /// The length.
        given: u64,
        /// The limit.
        limit: u32,
    },
    /// The head is not the message that is expected here: not MessagePack, an unknown message, a missing field.
    #[error("a frame's head is not a {expected} message: {reason}")]
    Malformed {
        /// The type that was expected.
        expected: &'static str,
        /// What the decoder said.
        reason: String,
    },
    /// A head could not be encoded. A fault in kolo.
    #[error("a message could not be encoded: {0}")]
    Encode(String),
}

/// A message with its body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame<T> {
    /// The message.
    pub head: T,
    /// What it carries; often empty.
    pub body: Bytes,
}

/// Appends a frame's prefix and head to `out`. The caller sends `body_len` bytes of body right after.
///
/// # Errors
///
/// [`InvalidFrame::TooLong`] if the body's length does not fit the prefix; [`InvalidFrame::Encode`] if the
/// head has a type that MessagePack can't hold, which no wire message has.
pub fn encode_head<T: Serialize>(
    out: &mut BytesMut,
    head: &T,
    body_len: usize,
) -> Result<(), InvalidFrame> {
    let body_len = u32::try_from(body_len).map_err(|_| InvalidFrame::TooLong {
        part: "body",
        given: body_len as u64,
        limit: u32::MAX,
    })?;
    let start = out.len();
    out.put_u32(0);
    out.put_u32(body_len);
    let mut writer = out.writer();
    head.serialize(&mut rmp_serde::Serializer::new(&mut writer).with_struct_map())
        .map_err(|error| InvalidFrame::Encode(error.to_string()))?;
    let head_len = out.len() - start - PREFIX;
    let head_len = u32::try_from(head_len).map_err(|_| InvalidFrame::TooLong {
        part: "head",
        given: head_len as u64,
        limit: u32::MAX,
    })?;
    out[start..start + 4].copy_from_slice(&head_len.to_be_bytes());
    Ok(())
}

/// Appends a whole frame to `out`.
///
/// # Errors
///
/// As [`encode_head`].
pub fn encode<T: Serialize>(out: &mut BytesMut, head: &T, body: &[u8]) -> Result<(), InvalidFrame> {
    encode_head(out, head, body.len())?;
    out.extend_from_slice(body);
    Ok(())
}

/// Decodes one head.
///
/// # Errors
///
/// [`InvalidFrame::Malformed`] if it is not a `T`, is nested too deep or has bytes left over.
pub fn decode_head<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, InvalidFrame> {
    let malformed = |reason: String| InvalidFrame::Malformed {
        expected: std::any::type_name::<T>()
            .rsplit("::")
            .next()
            .unwrap_or_default(),
        reason,
    };
    let mut rest = bytes;
    let mut deserializer = rmp_serde::Deserializer::new(&mut rest);
    deserializer.set_max_depth(MAX_DEPTH);
    let head = T::deserialize(&mut deserializer).map_err(|error| malformed(error.to_string()))?;
    if rest.is_empty() {
        Ok(head)
    } else {
        Err(malformed(format!("{} bytes are left over", rest.len())))
    }
}

/// Cuts a stream of bytes into frames, without I/O.
#[derive(Debug)]
pub struct Decoder {
    buffer: BytesMut,
    limits: Limits,
}

impl Decoder {
    /// A decoder that accepts frames up to `limits`.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            buffer: BytesMut::new(),
            limits,
        }
    }

    /// Accepts longer (or only shorter) frames from here on.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Where to put the next bytes of the stream. It has room for at least some.
    pub fn buffer(&mut self) -> &mut BytesMut {
        // A large frame grows as it comes, not by what its prefix says.
        if self.buffer.capacity() - self.buffer.len() < READ_CHUNK / 2 {
            let missing = self.missing().clamp(READ_CHUNK, 64 * READ_CHUNK);
            self.buffer.reserve(missing);
        }
        &mut self.buffer
    }

    /// Bytes that came and were not given out as frames.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.buffer.len()
    }

    /// Whether a whole frame is here, or something that [`Decoder::next`] answers with an error.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        match self.lengths() {
            None => false,
            Some((head, body)) => {
                head > self.limits.head
                    || body > self.limits.body
                    || self.buffer.len() >= PREFIX + head as usize + body as usize
            }
        }
    }

    fn lengths(&self) -> Option<(u32, u32)> {
        let mut prefix = self.buffer.get(..PREFIX)?;
        Some((prefix.get_u32(), prefix.get_u32()))
    }

    fn missing(&self) -> usize {
        self.lengths().map_or(0, |(head, body)| {
            (PREFIX + head as usize + body as usize).saturating_sub(self.buffer.len())
        })
    }

    /// The next frame with its head still encoded; `None` if more bytes are needed.
    ///
    /// # Errors
    ///
    /// [`InvalidFrame::TooLong`]. The stream can't be used any further then.
    pub fn next_raw(&mut self) -> Result<Option<Frame<Bytes>>, InvalidFrame> {
        let Some((head_len, body_len)) = self.lengths() else {
            return Ok(None);
        };
        for (part, given, limit) in [
            ("head", head_len, self.limits.head),
            ("body", body_len, self.limits.body),
        ] {
            if given > limit {
                return Err(InvalidFrame::TooLong {
                    part,
                    given: u64::from(given),
                    limit,
                });
            }
        }
        if self.buffer.len() < PREFIX + head_len as usize + body_len as usize {
            return Ok(None);
        }
        self.buffer.advance(PREFIX);
        let head = self.buffer.split_to(head_len as usize).freeze();
        let body = self.buffer.split_to(body_len as usize).freeze();
        Ok(Some(Frame { head, body }))
    }

    /// The next frame; `None` if more bytes are needed.
    ///
    /// # Errors
    ///
    /// [`InvalidFrame::TooLong`] or [`InvalidFrame::Malformed`]. After the latter the stream is still in step.
    #[allow(clippy::should_implement_trait)] // the item type is the caller's choice
    pub fn next<T: DeserializeOwned>(&mut self) -> Result<Option<Frame<T>>, InvalidFrame> {
        let Some(raw) = self.next_raw()? else {
            return Ok(None);
        };
        Ok(Some(Frame {
            head: decode_head(&raw.head)?,
            body: raw.body,
        }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::SubmitFrame;

    fn frame(head: &impl Serialize, body: &[u8]) -> BytesMut {
        let mut out = BytesMut::new();
        encode(&mut out, head, body).unwrap();
        out
    }

    #[test]
    fn a_length_over_the_limit_is_refused_before_the_frame_is_read() {
        let mut decoder = Decoder::new(Limits { head: 10, body: 5 });
        decoder
            .buffer()
            .extend_from_slice(&[0, 0, 0, 11, 0, 0, 0, 0]);
        assert!(decoder.is_ready());
        let error = decoder.next_raw().unwrap_err();
        assert_eq!(
            error.to_string(),
            "a frame's head of 11 bytes is over the limit of 10"
        );
        let mut decoder = Decoder::new(Limits { head: 10, body: 5 });
        decoder
            .buffer()
            .extend_from_slice(&[0, 0, 0, 1, 0, 0, 0, 6]);
        assert!(matches!(
            decoder.next_raw(),
            Err(InvalidFrame::TooLong { part: "body", .. })
        ));
    }

    #[test]
    fn what_is_no_message_is_refused_and_the_stream_stays_in_step() {
        let mut decoder = Decoder::new(Limits::CONTROL);
        for bad in [&[0xc1_u8][..], &[0xa3, b'a', b'b', b'c'], &[], &[0x91; 200]] {
            let buffer = decoder.buffer();
            buffer.put_u32(bad.len() as u32);
            buffer.put_u32(0);
            buffer.extend_from_slice(bad);
            assert!(matches!(
                decoder.next::<SubmitFrame>(),
                Err(InvalidFrame::Malformed { .. })
            ));
        }
        let good = frame(&SubmitFrame::Stop, b"");
        decoder.buffer().extend_from_slice(&good);
        assert_eq!(
            decoder.next::<SubmitFrame>().unwrap().unwrap().head,
            SubmitFrame::Stop
        );
    }

    #[test]
    fn left_over_bytes_in_a_head_are_refused() {
        let mut head = rmp_serde::to_vec_named(&SubmitFrame::Stop).unwrap();
        head.push(0);
        let error = decode_head::<SubmitFrame>(&head).unwrap_err();
        assert!(
            error.to_string().contains("1 bytes are left over"),
            "{error}"
        );
    }

    #[test]
    fn a_claimed_length_takes_no_memory() {
        let mut decoder = Decoder::new(Limits {
            head: u32::MAX,
            body: u32::MAX,
        });
        decoder.buffer().extend_from_slice(&[0xff; 8]);
        assert!(decoder.buffer().capacity() < 16 << 20);
    }

    proptest! {
        #[test]
        fn frames_survive_any_cut(
            bodies in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..300), 0..8),
            cuts in proptest::collection::vec(1_usize..50, 1..50),
        ) {
            let mut stream = BytesMut::new();
            for (index, body) in bodies.iter().enumerate() {
                encode(&mut stream, &(index as u64), body).unwrap();
            }
            let mut decoder = Decoder::new(Limits::CALLS);
            let mut seen = Vec::new();
            for cut in cuts.iter().cycle() {
                if stream.is_empty() {
                    break;
                }
                let piece = stream.split_to((*cut).min(stream.len()));
                decoder.buffer().extend_from_slice(&piece);
                while let Some(frame) = decoder.next::<u64>().unwrap() {
                    prop_assert_eq!(frame.head, seen.len() as u64);
                    seen.push(frame.body.to_vec());
                }
            }
            prop_assert_eq!(seen, bodies);
            prop_assert_eq!(decoder.pending(), 0);
        }

        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let mut decoder = Decoder::new(Limits { head: 256, body: 256 });
            decoder.buffer().extend_from_slice(&bytes);
            for _ in 0..bytes.len() {
                if !matches!(decoder.next::<crate::HeadRequest>(), Ok(Some(_)) | Err(InvalidFrame::Malformed { .. })) {
                    break;
                }
            }
        }
    }
}
