//! Of the header.

use proptest::prelude::*;

use super::*;

fn data() -> Data {
    Data {
        generation: Generation(3),
        tag: Tag::new(7, 9),
        operation: Operation {
            reduce: Some(ReduceOp::Max),
            algorithm: Algorithm::Ring,
            wire: Some(DType::Bf16),
            segment: 18,
            prescale: Factor::new(0.5),
            rows: 50,
            shape: 6,
            ..Operation::new(OperationKind::AllReduce, Some(DType::F32), 1000)
        },
        step: 2,
        offset: 262_144,
        length: 64,
    }
}

#[test]
fn the_layout_is_fixed() {
    let bytes = Header::Data(data()).encode();
    assert!(bytes.starts_with(&BEGINNING));
    let mut expected = vec![b'k', b'o', b'l', b'o', 7, 4, 1, 7, 4, 3, 10, 18];
    expected.extend_from_slice(&u32::MAX.to_le_bytes());
    // The number of the operation is above 16 bits for its part.
    for field in [3_u64, 7, 9 << 16, 1000] {
        expected.extend_from_slice(&field.to_le_bytes());
    }
    expected.extend_from_slice(&2_u32.to_le_bytes());
    expected.extend_from_slice(&64_u32.to_le_bytes());
    expected.extend_from_slice(&262_144_u64.to_le_bytes());
    for factor in [0.5_f64, 1.0] {
        expected.extend_from_slice(&factor.to_le_bytes());
    }
    for field in [50_u64, 6] {
        expected.extend_from_slice(&field.to_le_bytes());
    }
    assert_eq!(bytes.to_vec(), expected);
}

#[test]
fn what_is_not_understood_is_named() {
    let good = Header::Data(data()).encode();
    let with = |at: usize, value: u8| {
        let mut bytes = good;
        bytes[at] = value;
        Header::parse(&bytes).unwrap_err().to_string()
    };
    assert!(with(0, b'H').contains("instead of `kolo`"));
    assert_eq!(with(4, 9), "data-plane protocol version 9, this side has 7");
    assert_eq!(with(5, 77), "unknown frame code 77");
    assert_eq!(with(6, 77), "unknown operation code 77");
    assert_eq!(with(7, 77), "unknown type code 77");
    assert_eq!(with(8, 77), "unknown operator code 77");
    assert_eq!(with(9, 77), "unknown algorithm code 77");
    assert_eq!(with(10, 77), "unknown wire type code 77");
    assert_eq!(
        with(55, 1),
        "a payload of 16777280 bytes is over the limit of 262144"
    );
}

proptest! {
    /// Codes that are known make a header, and what is read is written again as the same.
    #[test]
    fn headers_survive_the_wire_and_random_bytes_never_panic(
        bytes in prop::collection::vec(any::<u8>(), HEADER),
        is_known in any::<bool>(),
        kind in 1_u8..11,
        codes in prop::array::uniform5(1_u8..5),
    ) {
        let mut all: [u8; HEADER] = bytes.try_into().unwrap();
        if is_known {
            all[..5].copy_from_slice(&BEGINNING);
            all[5] = kind;
            all[6..11].copy_from_slice(&codes);
            // A length of one byte, or of none.
            all[53 - usize::from(matches!(kind, 7 | 8))..56].fill(0);
        }
        let parsed = Header::parse(&all);
        prop_assert!(parsed.is_ok() || !is_known);
        if let Ok(header) = parsed {
            prop_assert!(header.length() <= SEGMENT);
            let again = header.encode();
            prop_assert_eq!(Header::parse(&again), Ok(header));
            // All of it says something.
            let is_full = matches!(header, Header::Data(_) | Header::Ask(_) | Header::Consent(_));
            prop_assert!(!is_full || again == all);
        }
    }
}
