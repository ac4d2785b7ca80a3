//! What stands in a flag: one word for an operation and all that ranks must agree on.

use crate::header::{Data, HEADER, Header};
use crate::operation::{Operation, Tag};
use kolo_transport::ids::Generation;

use super::map::{Map, RECORD_WORDS};

const _: () = assert!(RECORD_WORDS * 8 == HEADER);

/// A digest of what ranks must agree on, apart from the tag.
pub(crate) fn digest(operation: &Operation) -> u64 {
    let header = header(Tag::default(), operation);
    let mut digest = 0x9e37_79b9_7f4a_7c15;
    for word in words(&header) {
        digest = mix(digest ^ word, 0xa076_1d64_78bd_642f);
    }
    digest
}

/// The flag of an operation: two operations have the same one only if tag and request are the same (or by one chance
/// in 2^62). The lowest bit is free.
pub(crate) fn ticket(tag: Tag, digest: u64) -> u64 {
    let call = mix(tag.call ^ digest, 0xe703_7ed1_a0b4_28db);
    (mix(call ^ tag.word(), 0x8ebc_6af0_9c88_c6e3) << 2) | 2
}

/// Which of a rank's two flags an operation has. Neighbours have different ones, parts of an operation the same: the first part
/// is short, so that all have left it soon.
pub(crate) fn parity(tag: Tag) -> usize {
    ((tag.call ^ tag.operation) & 1) as usize
}

fn mix(a: u64, b: u64) -> u64 {
    let product = u128::from(a ^ 0x2d35_8dcc_aa6c_78a5) * u128::from(b);
    (product as u64) ^ ((product >> 64) as u64)
}

fn header(tag: Tag, operation: &Operation) -> [u8; HEADER] {
    Header::Data(Data {
        generation: Generation(0),
        tag,
        operation: *operation,
        step: 0,
        offset: 0,
        length: 0,
    })
    .encode()
}

fn words(bytes: &[u8; HEADER]) -> impl Iterator<Item = u64> + '_ {
    bytes.chunks_exact(8).map(|bytes| {
        let mut word = [0; 8];
        word.copy_from_slice(bytes);
        u64::from_le_bytes(word)
    })
}

/// Which words of a header hold the tag.
const TAG_WORDS: [usize; 2] = [3, 4];

/// Writes what the flag stands for, for others' error messages. `all` or only the tag.
pub(crate) fn write_record(map: &Map, me: usize, tag: Tag, operation: &Operation, all: bool) {
    use std::sync::atomic::Ordering::Relaxed;
    let parity = parity(tag);
    if all {
        for (index, word) in words(&header(tag, operation)).enumerate() {
            map.record(me, parity, index).store(word, Relaxed);
        }
    } else {
        map.record(me, parity, TAG_WORDS[0])
            .store(tag.call, Relaxed);
        map.record(me, parity, TAG_WORDS[1])
            .store(tag.word(), Relaxed);
    }
}

/// What a rank's flag stands for; `None` if it has none, or is just writing another.
pub(crate) fn read_record(map: &Map, rank: usize, parity: usize) -> Option<(Tag, Operation)> {
    use std::sync::atomic::Ordering::{Acquire, Relaxed};
    let flag = map.front(rank, parity).load(Acquire);
    let mut bytes = [0; HEADER];
    for (index, piece) in bytes.chunks_exact_mut(8).enumerate() {
        piece.copy_from_slice(&map.record(rank, parity, index).load(Relaxed).to_le_bytes());
    }
    let Ok(Header::Data(data)) = Header::parse(&bytes) else {
        return None;
    };
    // A record that is half written does not fit the flag.
    let fits = ticket(data.tag, digest(&data.operation)) == flag & !super::rules::GONE;
    fits.then_some((data.tag, data.operation))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::OperationKind;
    use crate::{DType, ReduceOp};

    #[test]
    fn tickets_tell_operations_apart() {
        let operation = Operation::new(OperationKind::AllReduce, Some(DType::F32), 4);
        let mut seen = std::collections::BTreeSet::new();
        for call in 0..50 {
            for number in 0..50 {
                let tag = Tag::new(call, number);
                let parts = [tag, tag.next_part()];
                for (reduce, tag) in [None, Some(ReduceOp::Sum), Some(ReduceOp::Max)]
                    .into_iter()
                    .flat_map(|reduce| parts.map(|tag| (reduce, tag)))
                {
                    let ticket = ticket(
                        tag,
                        digest(&Operation {
                            reduce,
                            ..operation
                        }),
                    );
                    assert_eq!(ticket & 3, 2);
                    assert!(seen.insert(ticket));
                }
                assert_eq!(parity(tag), parity(tag.next_part()));
                assert_ne!(parity(tag), parity(Tag::new(call, number + 1)));
            }
        }
        let other = Operation {
            count: 5,
            ..operation
        };
        assert_ne!(digest(&operation), digest(&other));
    }
}
