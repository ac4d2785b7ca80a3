//! Vectors of numbers as bytes: the form in which kolo sends them, also for fields of a user's own types.
//!
//! serde takes a `Vec<u8>` or a `Vec<f32>` for a list of values, each of which is encoded by itself: seconds for 100 MB, and a
//! minute in a build that is not optimised. An argument or a result that *is* such a vector is sent as bytes without further
//! ado. Where the vector is a field of another type, this module does the same:
//!
//! ```
//! #[derive(serde::Serialize, serde::Deserialize)]
//! struct Batch {
//!     epoch: u32,
//!     #[serde(with = "kolo::codec::packed")]
//!     pixels: Vec<f32>,
//! }
//! ```
//!
//! The elements are `bool`, the integers of 8 to 64 bits, `f32` and `f64`. Their bytes have the order of this machine, as all
//! processes of a group run the same program. Formats for people, such as JSON, get a list.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;

use kolo_collectives::Element;
use rmp_serde::decode;
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::Decoder;

/// Encodes a vector of numbers; for `#[serde(with = "kolo::codec::packed")]`.
///
/// # Errors
///
/// Those of the serializer.
pub fn serialize<E, S>(values: &[E], serializer: S) -> Result<S::Ok, S::Error>
where
    E: Element + Serialize,
    S: Serializer,
{
    if serializer.is_human_readable() {
        values.serialize(serializer)
    } else {
        serializer.serialize_bytes(E::as_bytes(values))
    }
}

/// Decodes a vector of numbers; for `#[serde(with = "kolo::codec::packed")]`. A list of numbers is taken as well.
///
/// # Errors
///
/// Those of the deserializer, and a number of bytes that makes up no whole number of elements.
pub fn deserialize<'de, E, D>(deserializer: D) -> Result<Vec<E>, D::Error>
where
    E: Element + Deserialize<'de>,
    D: Deserializer<'de>,
{
    struct Values<E>(PhantomData<E>);

    impl<'de, E: Element + Deserialize<'de>> Visitor<'de> for Values<E> {
        type Value = Vec<E>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of {} or its bytes", E::DTYPE)
        }

        fn visit_bytes<R: serde::de::Error>(self, bytes: &[u8]) -> Result<Vec<E>, R> {
            let size = E::DTYPE.size();
            if !bytes.len().is_multiple_of(size) {
                return Err(R::invalid_length(bytes.len(), &self));
            }
            let mut values = vec![E::default(); bytes.len() / size];
            E::take_bytes(&mut values, bytes);
            Ok(values)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<E>, A::Error> {
            let mut values = Vec::new();
            while let Some(value) = list.next_element()? {
                values.push(value);
            }
            Ok(values)
        }
    }

    if deserializer.is_human_readable() {
        deserializer.deserialize_seq(Values(PhantomData))
    } else {
        deserializer.deserialize_bytes(Values(PhantomData))
    }
}

macro_rules! vectors_of {
    ($($element:ty)*) => {
        /// The bytes of a value that is a vector of numbers.
        pub(super) fn bytes_of<T: 'static>(value: &T) -> Option<&[u8]> {
            let value: &dyn Any = value;
            $(if let Some(values) = value.downcast_ref::<Vec<$element>>() {
                return Some(<$element>::as_bytes(values));
            })*
            None
        }

        /// Decodes a value if its type is a vector of numbers.
        pub(super) fn take<T: 'static>(decoder: &mut Decoder<'_>) -> Option<Result<T, decode::Error>> {
            let mut value: Option<T> = None;
            let place: &mut dyn Any = &mut value;
            $(if let Some(place) = place.downcast_mut::<Option<Vec<$element>>>() {
                return match deserialize(decoder) {
                    Ok(values) => {
                        *place = Some(values);
                        value.map(Ok)
                    }
                    Err(error) => Some(Err(error)),
                };
            })*
            None
        }
    };
}
vectors_of!(u8 i8 u16 i16 u32 i32 u64 i64 f32 f64 bool);

#[cfg(test)]
mod tests {
    use super::super::{CodecError, decode, decode_result, encode, encode_result};
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Batch {
        #[serde(with = "super")]
        pixels: Vec<f32>,
    }

    #[test]
    fn vectors_of_numbers_are_bytes_and_come_back() {
        fn check<E: Element + Serialize + serde::de::DeserializeOwned>(values: &Vec<E>) {
            let packed = encode_result(values).unwrap();
            let size = values.len() * E::DTYPE.size();
            // A marker, a length, and the bytes.
            assert_eq!(packed.len(), size + 2, "{}", E::DTYPE);
            assert_eq!(&decode_result::<Vec<E>>(&packed).unwrap(), values);
            // As serde encodes the vector.
            let plain = encode(values).unwrap();
            assert_eq!(&decode_result::<Vec<E>>(&plain).unwrap(), values);
        }
        check::<u8>(&vec![0, 200, 7]);
        check::<i16>(&vec![-300, 5]);
        check::<u32>(&vec![1 << 30, 0]);
        check::<i64>(&vec![i64::MIN, 1]);
        check::<f32>(&vec![0.1, f32::MAX]);
        check::<f64>(&vec![0.1, f64::MIN]);
        check(&vec![true, false]);
        check::<u8>(&Vec::new());
    }

    #[test]
    fn other_types_are_as_serde_has_them() {
        let value = (vec![1_u8, 2], "text".to_owned());
        assert_eq!(encode_result(&value), encode(&value));
        assert_eq!(
            decode_result::<(Vec<u8>, String)>(&encode(&value).unwrap()),
            Ok(value)
        );
    }

    #[test]
    fn a_field_is_bytes_if_it_says_so() {
        let batch = Batch {
            pixels: vec![0.5; 100],
        };
        let bytes = encode(&batch).unwrap();
        assert!(bytes.len() < 4 * 100 + 16, "{}", bytes.len());
        assert_eq!(decode::<Batch>(&bytes), Ok(batch));
    }

    #[test]
    fn bytes_that_are_no_such_vector_are_told() {
        let bytes = encode_result(&vec![1_u8, 2, 3]).unwrap();
        let error = decode_result::<Vec<f32>>(&bytes).unwrap_err();
        assert!(matches!(error, CodecError::Decode { .. }));
        assert!(error.to_string().contains("invalid length 3"), "{error}");
        let text = encode("text").unwrap();
        let error = decode_result::<Vec<f32>>(&text).unwrap_err().to_string();
        assert!(error.contains("a list of f32 or its bytes"), "{error}");
    }
}
