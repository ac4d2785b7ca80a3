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

fn any_header() -> impl Strategy<Value = Header> {
    let types = || prop::option::of(prop::sample::select(DType::ALL.to_vec()));
    let operation = (
        prop::sample::select(OperationKind::ALL.to_vec()),
        types(),
        prop::option::of(prop::sample::select(ReduceOp::ALL.to_vec())),
        prop::option::of(0..u32::MAX),
        prop::sample::select(Algorithm::ALL.to_vec()),
        types(),
        any::<u8>(),
        any::<[u64; 5]>(),
    )
        .prop_map(
            |(kind, dtype, reduce, root, algorithm, wire, segment, numbers)| Operation {
                kind,
                dtype,
                reduce,
                root,
                count: numbers[0],
                rows: numbers[1],
                shape: numbers[2],
                prescale: Factor::from_bits(numbers[3]),
                postscale: Factor::from_bits(numbers[4]),
                wire,
                algorithm,
                segment,
            },
        );
    let tag = any::<(u64, u64)>().prop_map(|(call, word)| Tag::of_word(call, word));
    let generation = any::<u64>().prop_map(Generation);
    prop_oneof![
        (any::<[u64; 2]>(), generation.clone(), any::<[u32; 2]>()).prop_map(
            |([job, group], generation, [rank, world])| Header::Hello {
                job: JobId(job),
                generation,
                rank: Rank(rank),
                group,
                world,
            }
        ),
        (
            generation.clone(),
            tag.clone(),
            any::<u32>(),
            0..=MAX_TEXT as u32
        )
            .prop_map(|(generation, tag, rank, length)| Header::Doing {
                generation,
                tag,
                rank: Rank(rank),
                length,
            }),
        Just(Header::Welcome),
        (
            generation.clone(),
            prop::sample::select(Share::ALL.to_vec())
        )
            .prop_map(|(generation, share)| Header::Share { generation, share }),
        (
            prop::sample::select(Refusal::ALL.to_vec()),
            0..=MAX_TEXT as u32
        )
            .prop_map(|(why, length)| Header::Refusal { why, length }),
        (
            generation.clone(),
            tag.clone(),
            operation,
            any::<u32>(),
            any::<u64>(),
            (0..3_u8, 0..=SEGMENT as u32)
        )
            .prop_map(
                |(generation, tag, operation, step, offset, (kind, length))| {
                    let data = Data {
                        generation,
                        tag,
                        operation,
                        step,
                        offset,
                        length: if kind == 0 { length } else { 0 },
                    };
                    match kind {
                        0 => Header::Data(data),
                        1 => Header::Ask(data),
                        _ => Header::Consent(data),
                    }
                }
            ),
        (generation.clone(), tag, 0..=MAX_TEXT as u32).prop_map(|(generation, tag, length)| {
            Header::AbortOperation {
                generation,
                tag,
                length,
            }
        }),
        (generation, any::<u64>(), 0..=MAX_TEXT as u32).prop_map(|(generation, call, length)| {
            Header::AbortCall {
                generation,
                call,
                length,
            }
        }),
    ]
}

proptest! {
    #[test]
    fn headers_survive_the_wire(header in any_header()) {
        prop_assert_eq!(Header::parse(&header.encode()), Ok(header));
    }

    #[test]
    fn random_bytes_never_panic_and_lengths_stay_bounded(
        bytes in prop::array::uniform32(any::<u8>()),
        more in prop::array::uniform32(any::<u8>()),
        last in prop::array::uniform32(any::<u8>()),
        plausible in any::<bool>(),
        kind in 0_u8..12,
    ) {
        let mut all = [0; HEADER];
        all[..32].copy_from_slice(&bytes);
        all[32..64].copy_from_slice(&more);
        all[64..].copy_from_slice(&last);
        if plausible {
            all[..6].copy_from_slice(&[b'k', b'o', b'l', b'o', VERSION, kind]);
        }
        if let Ok(header) = Header::parse(&all) {
            prop_assert!(header.length() <= SEGMENT);
            prop_assert_eq!(Header::parse(&header.encode()), Ok(header));
        }
    }
}
