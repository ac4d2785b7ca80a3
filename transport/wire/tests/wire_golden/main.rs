//! Every wire message, byte for byte.
//!
//! `golden/wire-v1.txt` holds one line for each: name, MessagePack in hexadecimal, JSON. The JSON is what is encoded. A change of
//! the bytes is a change of the protocol: additions must decode the old lines, anything else needs a new ALPN. For a new message or
//! field write the JSON, with `-` for the bytes, and run this test with `KOLO_BLESS=1`, which writes the bytes.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod kinds;
mod value;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::PathBuf;

use bytes::BytesMut;
use kolo_wire::frame::{PREFIX, decode_head, encode_head};
use kolo_wire::{FailureKind, RefusalKind};
use serde::Serialize;
use serde::de::DeserializeOwned;
use value::Value;

/// What a message is decoded from.
enum Given<'a> {
    Packed(&'a [u8]),
    Json(&'a str),
}

/// Decodes a message, and encodes it again: as MessagePack and as JSON.
type Again = fn(Given<'_>) -> Result<(Vec<u8>, String), String>;

fn again<T: Serialize + DeserializeOwned>(given: Given<'_>) -> Result<(Vec<u8>, String), String> {
    let message: T = match given {
        Given::Packed(packed) => decode_head(packed).map_err(|error| error.to_string())?,
        Given::Json(json) => serde_json::from_str(json).map_err(|error| error.to_string())?,
    };
    let mut out = BytesMut::new();
    encode_head(&mut out, &message, 0).unwrap();
    Ok((
        out[PREFIX..].to_vec(),
        serde_json::to_string(&message).unwrap(),
    ))
}

/// One line of the golden file.
struct Case {
    name: String,
    packed: Vec<u8>,
    json: String,
    again: Again,
}

fn cases() -> Vec<Case> {
    let golden = std::fs::read_to_string(golden_path()).unwrap();
    let case = |line: &str| {
        let [name, packed, json] = line.splitn(3, ' ').collect::<Vec<_>>()[..] else {
            panic!("a line is a name, bytes and JSON: {line}");
        };
        Case {
            name: name.to_owned(),
            packed: if packed == "-" {
                Vec::new()
            } else {
                unhex(packed)
            },
            json: json.to_owned(),
            again: kinds::of(name.split("::").next().unwrap()),
        }
    };
    golden.lines().map(case).collect()
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
fn every_message_has_a_line() {
    let cases = cases();
    let have: BTreeSet<&str> = cases.iter().map(|case| case.name.as_str()).collect();
    let names = kinds::names();
    assert_eq!(have, names.iter().map(String::as_str).collect());
}

#[test]
fn messages_are_what_they_were() {
    let mut cases = cases();
    if std::env::var_os("KOLO_BLESS").is_some() {
        let mut golden = String::new();
        for case in &mut cases {
            let (packed, json) = (case.again)(Given::Json(&case.json)).unwrap();
            writeln!(golden, "{} {} {json}", case.name, hex(&packed)).unwrap();
            (case.packed, case.json) = (packed, json);
        }
        std::fs::write(golden_path(), golden).unwrap();
    }
    for case in cases {
        let expected = Ok((case.packed.clone(), case.json.clone()));
        assert_eq!(
            (case.again)(Given::Json(&case.json)),
            expected,
            "{}",
            case.name
        );
        assert_eq!(
            (case.again)(Given::Packed(&case.packed)),
            expected,
            "{}",
            case.name
        );
        let variant = case
            .name
            .split_once("::")
            .map_or("", |(_, variant)| variant);
        let is_named = case.json.to_lowercase().contains(&variant.to_lowercase());
        assert!(is_named, "{}: {}", case.name, case.json);
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
        let again = (case.again)(Given::Packed(&grown));
        assert_eq!(again, Ok((case.packed, case.json.clone())), "{}", case.name);
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
            let error = (case.again)(Given::Packed(&packed)).unwrap_err();
            assert!(error.contains("Unheard"), "{}: {error}", case.name);
        }
    }
}
