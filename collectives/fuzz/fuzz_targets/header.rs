//! Headers, and the payload that tells why a rank gave up.

#![no_main]

use kolo_collectives::cause::Cause;
use kolo_collectives::header::{BEGINNING, HEADER, Header, SEGMENT};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Some(cause) = Cause::parse(bytes) {
        // Texts may be cut, and what is cut stays as it is.
        let again = Cause::parse(&cause.encode()).expect("what is written can be read");
        assert_eq!(Cause::parse(&again.encode()), Some(again));
    }
    let Some((header, _)) = bytes.split_first_chunk::<HEADER>() else {
        return;
    };
    let mut header = *header;
    // Half of the cases get past the first look.
    if header[0] & 1 == 0 {
        header[..BEGINNING.len()].copy_from_slice(&BEGINNING);
    }
    let Ok(parsed) = Header::parse(&header) else {
        return;
    };
    assert!(parsed.length() <= SEGMENT);
    assert_eq!(Header::parse(&parsed.encode()), Ok(parsed));
    if let Header::Data(data) | Header::Ask(data) | Header::Consent(data) = parsed {
        assert!(!data.operation.to_string().is_empty());
        for world in [1, 2, 7, u32::MAX] {
            // Whether it is possible or not: nothing overflows.
            drop(data.operation.check(world));
        }
    }
});
