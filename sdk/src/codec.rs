//! How arguments and results become bytes: MessagePack with named fields.
//!
//! Only the driver and the worker look into these bytes; daemons pass them on. Both are the same program,
//! so a type may change its fields from one build to the next without a version of its own.

use std::io;
use std::ops::Deref;

use bytes::BufMut;
use kolo_transport::frame::Limits;
use rmp_serde::{decode, encode};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize, Serializer as _};

pub mod packed;

/// A value that does not become bytes, or bytes that do not become the value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// The type's `Serialize` refused the value, or it has a form that MessagePack does not hold, such as
    /// a sequence of unknown length. Give the field another type or `#[serde(with = ..)]`.
    #[error("a value of type `{type_name}` can't be encoded: {reason}")]
    Encode {
        /// The type, as the compiler prints it.
        type_name: &'static str,
        /// What serde or MessagePack said.
        reason: String,
    },
    /// The bytes are no value of this type: the sides disagree on the type, or its `Deserialize` refused it.
    #[error("{len} bytes are no value of type `{type_name}`: {reason}")]
    Decode {
        /// The type, as the compiler prints it.
        type_name: &'static str,
        /// How many bytes there were.
        len: usize,
        /// What serde or MessagePack said.
        reason: String,
    },
    /// The encoded value is longer than a frame's body may be. Send it in parts, or through storage that
    /// all ranks reach.
    #[error(
        "a value of type `{type_name}` takes more than {limit} bytes, the most that a call carries; send it in parts"
    )]
    TooLong {
        /// The type, as the compiler prints it.
        type_name: &'static str,
        /// The limit in bytes.
        limit: usize,
    },
}

/// The longest arguments and results of a call, in bytes.
const LIMIT: usize = Limits::CALLS.body as usize;

/// The bytes of a value, as a call carries it.
///
/// serde takes a `Vec<u8>` for a list of numbers, each of which takes one or two bytes and some time. [`packed`] makes bytes of
/// such vectors. Arguments and results that are such vectors are sent so in any case.
///
/// # Errors
///
/// [`CodecError::Encode`]; [`CodecError::TooLong`] as soon as there are more than 1 GiB.
///
/// ```
/// let bytes = kolo::codec::encode(&(7_u32, "seven"))?;
/// let back: (u32, String) = kolo::codec::decode(&bytes)?;
/// assert_eq!(back, (7, "seven".to_owned()));
/// # Ok::<(), kolo::codec::CodecError>(())
/// ```
pub fn encode<T: Serialize + ?Sized>(value: &T) -> Result<Vec<u8>, CodecError> {
    let mut bytes = Vec::with_capacity(128);
    encode_behind(&mut bytes, value)?;
    Ok(bytes)
}

/// Encodes a value behind others. `bytes` is no longer than [`encode`] allows then.
pub(crate) fn encode_behind<T: Serialize + ?Sized>(
    bytes: &mut Vec<u8>,
    value: &T,
) -> Result<(), CodecError> {
    append_argument(bytes, value, |value, out| {
        value.serialize(&mut rmp_serde::Serializer::new(out).with_struct_map())
    })
}

/// Encodes one more argument behind `bytes`.
pub(crate) fn append_argument<A: ?Sized>(
    bytes: &mut Vec<u8>,
    value: &A,
    encode: fn(&A, &mut Encoder<'_>) -> Result<(), encode::Error>,
) -> Result<(), CodecError> {
    append(bytes, LIMIT, |out| encode(value, out)).map_err(|error| error.of::<A>(LIMIT))
}

/// Writes an argument or a result: a vector of numbers as bytes, anything else as serde has it.
pub(crate) fn write<T: Serialize + 'static, B: BufMut + Deref<Target = [u8]>>(
    value: &T,
    out: &mut Limited<'_, B>,
) -> Result<(), encode::Error> {
    let mut serializer = rmp_serde::Serializer::new(out).with_struct_map();
    match packed::bytes_of(value) {
        Some(bytes) => serializer.serialize_bytes(bytes),
        None => value.serialize(&mut serializer),
    }
}

/// Reads what [`write`] has written. A vector of numbers may also be a list.
pub(crate) fn read<T: DeserializeOwned + 'static>(
    decoder: &mut Decoder<'_>,
) -> Result<T, decode::Error> {
    packed::take(decoder).unwrap_or_else(|| T::deserialize(decoder))
}

/// As [`encode`], for the result of a call.
#[cfg(test)]
pub(crate) fn encode_result<T: Serialize + 'static>(value: &T) -> Result<Vec<u8>, CodecError> {
    let mut bytes = Vec::new();
    append_argument(&mut bytes, value, write)?;
    Ok(bytes)
}

/// What arguments are written to.
pub(crate) type Encoder<'a> = Limited<'a, Vec<u8>>;

/// Why a value was not encoded.
pub(crate) enum Failed {
    /// It takes more than the limit.
    TooLong,
    /// It can't be encoded.
    Encode(encode::Error),
}

impl Failed {
    fn of<T: ?Sized>(self, limit: usize) -> CodecError {
        let type_name = std::any::type_name::<T>();
        match self {
            Self::TooLong => CodecError::TooLong { type_name, limit },
            Self::Encode(error) => CodecError::Encode {
                type_name,
                reason: error.to_string(),
            },
        }
    }
}

/// Lets `write` put bytes behind those in `out`, which has at most `end` of them then.
pub(crate) fn append<B: BufMut + Deref<Target = [u8]>>(
    out: &mut B,
    end: usize,
    write: impl FnOnce(&mut Limited<'_, B>) -> Result<(), encode::Error>,
) -> Result<(), Failed> {
    let mut out = Limited {
        out,
        end,
        over: false,
    };
    match write(&mut out) {
        Ok(()) => Ok(()),
        Err(_) if out.over => Err(Failed::TooLong),
        Err(error) => Err(Failed::Encode(error)),
    }
}

/// A buffer that takes no more than its limit, so that a value which is too long is not encoded to its end.
#[doc(hidden)]
#[derive(Debug)]
pub struct Limited<'a, B> {
    out: &'a mut B,
    end: usize,
    over: bool,
}

impl<B> Limited<'_, B> {
    #[cold]
    fn full(&mut self) -> io::Result<()> {
        self.over = true;
        Err(io::ErrorKind::FileTooLarge.into())
    }
}

// A list of bytes is written byte by byte: `write_all` of its own, inlined, makes that several times faster.
impl<B: BufMut + Deref<Target = [u8]>> io::Write for Limited<'_, B> {
    #[inline]
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_all(bytes)?;
        Ok(bytes.len())
    }

    #[inline]
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        if bytes.len() > self.end.saturating_sub(self.out.len()) {
            return self.full();
        }
        self.out.put_slice(bytes);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The value of some bytes, all of which must belong to it.
///
/// # Errors
///
/// [`CodecError::Decode`].
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
    decode_by(bytes, |decoder| T::deserialize(decoder))
}

/// As [`decode`], for the result of a call.
pub(crate) fn decode_result<T: DeserializeOwned + 'static>(bytes: &[u8]) -> Result<T, CodecError> {
    decode_by(bytes, read)
}

fn decode_by<T>(
    bytes: &[u8],
    read: fn(&mut Decoder<'_>) -> Result<T, decode::Error>,
) -> Result<T, CodecError> {
    let failed = |reason: String| CodecError::Decode {
        type_name: std::any::type_name::<T>(),
        len: bytes.len(),
        reason,
    };
    let mut decoder = Decoder::from_read_ref(bytes);
    let value = read(&mut decoder).map_err(|error| failed(reason(&error)))?;
    if is_at_end(&mut decoder) {
        Ok(value)
    } else {
        Err(failed("bytes are left over".to_owned()))
    }
}

/// A MessagePack decoder that borrows its bytes, so that strings and blobs are copied once.
pub(crate) type Decoder<'a> = rmp_serde::Deserializer<decode::ReadRefReader<'a, [u8]>>;

/// Whether a decoder has used all its bytes. It does not show what is left, but fails in its own way when
/// nothing is. A unit takes one byte, so it can't be cut short.
pub(crate) fn is_at_end(decoder: &mut Decoder<'_>) -> bool {
    matches!(<()>::deserialize(decoder), Err(decode::Error::InvalidMarkerRead(error)) if is_end(&error))
}

fn is_end(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::UnexpectedEof
}

/// Why bytes did not decode, without the words of the format.
pub(crate) fn reason(error: &decode::Error) -> String {
    match error {
        decode::Error::TypeMismatch(marker) => {
            let marker = format!("{marker:?}");
            let found = match marker.trim_start_matches("Fix") {
                "Null" => "nothing",
                "True" | "False" => "a bool",
                "F32" | "F64" => "a float",
                m if m.starts_with("Str") => "a string",
                m if m.starts_with("Bin") => "bytes",
                m if m.starts_with("Array") => "a list",
                m if m.starts_with("Map") => "a map",
                m if m.starts_with(['P', 'N', 'U', 'I']) => "an integer",
                _ => "something of no known kind",
            };
            format!("found {found}")
        }
        decode::Error::InvalidMarkerRead(error) | decode::Error::InvalidDataRead(error)
            if is_end(error) =>
        {
            "the bytes end too early".to_owned()
        }
        decode::Error::OutOfRange => "a number is out of the type's range".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_and_leftovers_are_refused() {
        let mut bytes = encode(&("a", 1.5)).unwrap();
        assert_eq!(decode::<(String, f64)>(&bytes), Ok(("a".to_owned(), 1.5)));
        let error = decode::<(String, bool)>(&bytes).unwrap_err().to_string();
        assert!(
            error.contains("(alloc::string::String, bool)`: invalid type: floating point"),
            "{error}"
        );
        for more in [0x00, 0xc0, 0xc1, 0x91, 0xff] {
            bytes.push(more);
            let error = decode::<(String, f64)>(&bytes).unwrap_err().to_string();
            assert!(error.ends_with("bytes are left over"), "{error}");
            bytes.pop();
        }
        for cut in 0..bytes.len() {
            let error = decode::<(String, f64)>(&bytes[..cut])
                .unwrap_err()
                .to_string();
            assert!(error.ends_with(": the bytes end too early"), "{error}");
        }
    }

    #[test]
    fn a_value_that_is_too_long_is_not_encoded_to_its_end() {
        let mut bytes = vec![7];
        let write = |count: usize| {
            move |out: &mut Limited<'_, Vec<u8>>| {
                vec![1_u8; count].serialize(&mut rmp_serde::Serializer::new(out))
            }
        };
        assert!(append(&mut bytes, 10, write(8)).is_ok());
        assert_eq!(bytes.len(), 10);
        let error = append(&mut bytes, 16, write(1_000)).unwrap_err();
        assert!(bytes.len() <= 16);
        assert_eq!(
            error.of::<Vec<u8>>(16).to_string(),
            "a value of type `alloc::vec::Vec<u8>` takes more than 16 bytes, the most that a call carries; send it in parts"
        );
    }

    #[test]
    fn what_was_found_is_told_in_plain_words() {
        #[derive(Debug, Deserialize, PartialEq)]
        struct Named {
            field: u8,
        }
        fn found<T: DeserializeOwned + std::fmt::Debug>(value: &impl Serialize) -> String {
            let error = decode::<T>(&encode(value).unwrap())
                .unwrap_err()
                .to_string();
            error.rsplit("`: ").next().unwrap().to_owned()
        }
        // What the format itself refuses.
        assert_eq!(found::<u8>(&"x"), "found a string");
        assert_eq!(found::<u8>(&"x".repeat(300)), "found a string");
        assert_eq!(found::<u8>(&vec![1_u8]), "found a list");
        // What serde refuses.
        assert_eq!(
            found::<u8>(&300),
            "invalid value: integer `300`, expected u8"
        );
        let map = std::collections::BTreeMap::from([("other", 1)]);
        assert!(
            found::<Named>(&map).contains("missing field"),
            "{}",
            found::<Named>(&map)
        );
    }

    #[test]
    fn unencodable_values_name_their_type() {
        struct Never;
        impl Serialize for Never {
            fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
                Err(serde::ser::Error::custom("no"))
            }
        }
        let error = encode(&[Never]).unwrap_err().to_string();
        assert!(error.contains("Never; 1]` can't be encoded: no"), "{error}");
    }
}
