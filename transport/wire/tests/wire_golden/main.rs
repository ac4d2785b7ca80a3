//! Every wire message, byte for byte.
//!
//! `golden/wire-v1.txt` holds one line for each: name, MessagePack in hexadecimal, JSON for people. A change of that file
//! is a change of the protocol: additions must decode the old lines, anything else needs a new ALPN. After an intended
//! change run this test with `KOLO_BLESS=1`, which writes the file anew.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod examples;
mod required;
mod value;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::PathBuf;

use bytes::BytesMut;
use examples::cases;
use kolo_wire::frame::{PREFIX, decode_head, encode_head};
use kolo_wire::head::Beat;
use kolo_wire::identity::Role;
use kolo_wire::ids::{
    CallId, ClusterId, CrossRank, DriverId, Generation, Incarnation, JobId, LocalRank, NodeId,
    ObjectId, Rank, Slot,
};
use kolo_wire::*;
use required::required;
use serde::Serialize;
use serde::de::DeserializeOwned;
use value::Value;

/// One message of the protocol.
struct Case {
    name: String,
    packed: Vec<u8>,
    json: String,
    /// Decodes and encodes again.
    again: fn(&[u8]) -> Result<Vec<u8>, String>,
}

fn pack(message: &impl Serialize) -> Vec<u8> {
    let mut out = BytesMut::new();
    encode_head(&mut out, message, 0).unwrap();
    out[PREFIX..].to_vec()
}

fn case<T: Serialize + DeserializeOwned>(kind: &str, message: &T) -> Case {
    let json = serde_json::to_value(message).unwrap();
    // Enums: the variant is the text itself or the only key.
    let variant = match &json {
        serde_json::Value::String(name) => Some(name.clone()),
        serde_json::Value::Object(map) if map.len() == 1 => map
            .keys()
            .next()
            .filter(|key| key.starts_with(|c: char| c.is_ascii_uppercase()))
            .cloned(),
        _ => None,
    };
    Case {
        name: variant.map_or_else(|| kind.to_owned(), |variant| format!("{kind}::{variant}")),
        packed: pack(message),
        // From the message and not from `json`, whose order of keys depends on how serde_json is built.
        json: serde_json::to_string(message).unwrap(),
        again: |bytes| {
            decode_head::<T>(bytes)
                .map(|message| pack(&message))
                .map_err(|error| error.to_string())
        },
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2)
        .map(|index| u8::from_str_radix(&text[2 * index..2 * index + 2], 16).unwrap())
        .collect()
}

fn golden_path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/wire-v1.txt")
}

#[test]
fn every_message_has_an_example() {
    let cases = cases();
    let have: BTreeSet<&str> = cases.iter().map(|case| case.name.as_str()).collect();
    let missing: Vec<_> = required()
        .into_iter()
        .filter(|name| !have.contains(name))
        .collect();
    assert!(missing.is_empty(), "no example of {missing:?}");
}

#[test]
fn messages_are_what_they_were() {
    let cases = cases();
    let now: String = cases
        .iter()
        .flat_map(|case| {
            [&case.name, " ", &hex(&case.packed), " ", &case.json, "\n"].map(str::to_owned)
        })
        .collect();
    if std::env::var_os("KOLO_BLESS").is_some() {
        std::fs::write(golden_path(), &now).unwrap();
    }
    let golden = std::fs::read_to_string(golden_path()).unwrap();
    for (line, (was, is)) in golden.lines().zip(now.lines()).enumerate() {
        assert_eq!(
            was,
            is,
            "line {} of wire-v1.txt; see the head of this test",
            line + 1
        );
    }
    assert_eq!(
        golden.lines().count(),
        now.lines().count(),
        "lines of wire-v1.txt"
    );
}

#[test]
fn old_messages_decode() {
    let golden = std::fs::read_to_string(golden_path()).unwrap();
    let cases = cases();
    assert!(golden.lines().count() > 60);
    for (line, case) in golden.lines().zip(&cases) {
        let packed = unhex(line.split(' ').nth(1).unwrap());
        assert_eq!((case.again)(&packed).unwrap(), case.packed, "{}", case.name);
    }
}

#[test]
fn messages_with_unknown_fields_decode() {
    let mut changed = 0;
    for case in cases() {
        let mut added = 0;
        let value: Value = rmp_serde::from_slice(&case.packed).unwrap();
        assert_eq!(
            rmp_serde::to_vec_named(&value).unwrap(),
            case.packed,
            "{}",
            case.name
        );
        let grown = rmp_serde::to_vec_named(&value.with_unknown_fields(&mut added)).unwrap();
        let again = (case.again)(&grown);
        assert_eq!(
            again.as_ref(),
            Ok(&case.packed),
            "{}: {}",
            case.name,
            case.json
        );
        let has_struct = case
            .json
            .match_indices("{\"")
            .any(|(at, _)| case.json[at + 2..].starts_with(|c: char| c.is_ascii_lowercase()));
        assert_eq!(added > 0, has_struct, "{}: {added} fields added", case.name);
        changed += added;
    }
    assert!(changed > 60, "{changed}");
}

#[test]
fn kinds_of_a_later_version_decode_and_messages_do_not() {
    let packed = rmp_serde::to_vec_named(&"Unheard").unwrap();
    assert_eq!(
        rmp_serde::from_slice::<RefusalKind>(&packed).unwrap(),
        RefusalKind::Other
    );
    assert_eq!(
        rmp_serde::from_slice::<FailureKind>(&packed).unwrap(),
        FailureKind::Other
    );
    for case in cases() {
        if case.name.contains("::") {
            let error = (case.again)(&packed).unwrap_err();
            assert!(error.contains("Unheard"), "{}: {error}", case.name);
        }
    }
}
