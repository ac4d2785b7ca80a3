//! Pieces are where they should be, and every order of steps gives every rank what is its.

use std::sync::Arc;

use kolo_transport::ids::Rank;

use super::super::{Arena, Outcome};
use super::*;
use crate::shm::bed::{self, tag};

const KINDS: [OperationKind; 6] = [
    OperationKind::Broadcast,
    OperationKind::AllGather,
    OperationKind::Gather,
    OperationKind::Scatter,
    OperationKind::AllToAll,
    OperationKind::ReduceScatter,
];

fn operation(kind: OperationKind, count: usize, root: usize) -> Operation {
    let rooted = matches!(
        kind,
        OperationKind::Broadcast | OperationKind::Gather | OperationKind::Scatter
    );
    let is_combined = kind == OperationKind::ReduceScatter;
    Operation {
        root: rooted.then_some(root as u32),
        reduce: is_combined.then_some(ReduceOp::Sum),
        rows: if is_combined { count as u64 } else { 0 },
        ..Operation::new(kind, Some(DType::U8), count as u64)
    }
}

/// Elements of each rank's share, for about so many bytes that a rank gives.
fn count(kind: OperationKind, bytes: usize, world: usize) -> usize {
    match kind {
        OperationKind::Scatter | OperationKind::AllToAll => bytes.div_ceil(world),
        _ => bytes,
    }
}

#[test]
fn the_pieces_of_a_stream_are_all_of_it_and_nobody_elses_place() {
    for (kind, world) in KINDS
        .into_iter()
        .flat_map(|kind| (2..=64).map(move |world| (kind, world)))
    {
        for bytes in [0, 1, 3 * window(world) + 12_345] {
            let bytes = limits::pieces(kind) + bytes;
            let count = count(kind, bytes, world);
            let stream = Stream::of(&operation(kind, count, world - 1), world).unwrap();
            let mut source = 0;
            for reader in 0..world {
                let mut end = 0;
                for piece in 0..stream.pieces(world) {
                    let range = stream.range(world, piece, reader);
                    assert_eq!(range.start, end);
                    assert!(
                        !range.is_empty() || reader > 0,
                        "the first rank has the most"
                    );
                    assert!(range.len() <= stream.piece(world));
                    end = range.end;
                }
                assert_eq!(end, stream.length(reader));
                if stream.is_split {
                    assert_eq!(stream.source(reader), source);
                    source += end;
                }
            }
            assert!(!stream.is_split || source == stream.given(world));
            // Those that are there at once do not overlap.
            let lanes = if stream.is_split { world } else { 1 };
            let mut all: Vec<usize> = (0..places(world))
                .flat_map(|piece| (0..lanes).map(move |reader| (piece, reader)))
                .map(|(piece, reader)| stream.place(world, piece, reader))
                .collect();
            all.push(window(world));
            assert!(
                all.windows(2)
                    .all(|pair| pair[0] + stream.piece(world) <= pair[1])
            );
            assert_eq!(
                stream.place(world, places(world), 0),
                stream.place(world, 0, 0),
                "places are used in turn"
            );
        }
    }
}

#[test]
fn what_is_short_or_converted_or_an_object_is_no_stream() {
    let plain = operation(
        OperationKind::Broadcast,
        limits::pieces(OperationKind::Broadcast),
        0,
    );
    assert!(Stream::of(&plain, 2).is_some());
    let other = |change: fn(&mut Operation)| {
        let mut operation = plain;
        change(&mut operation);
        Stream::of(&operation, 2)
    };
    assert_eq!(other(|operation| operation.count -= 1), None);
    assert_eq!(other(|operation| operation.wire = Some(DType::F16)), None);
    assert_eq!(other(|operation| operation.dtype = Some(DType::Bool)), None);
    assert_eq!(
        other(|operation| operation.shape = Mark::Object.encode()),
        None
    );
    assert_eq!(
        other(|operation| operation.kind = OperationKind::AllGatherVarcount),
        None
    );
    let kind = OperationKind::ReduceScatter;
    let mut reduced = operation(kind, limits::pieces(kind), 0);
    assert!(Stream::of(&reduced, 2).is_some());
    reduced.reduce = Some(ReduceOp::Adasum);
    assert_eq!(Stream::of(&reduced, 2), None);
}

/// Each with its input and its result, of an all-gather: the bytes of rank r are r.
fn ranks(world: usize, length: usize) -> Vec<(Arena, Vec<u8>, Vec<u8>)> {
    let of = |(me, arena)| (arena, vec![me; length], vec![0; world * length]);
    (0..).zip(bed::ranks(world, false)).map(of).collect()
}

/// A rank that gives up in the middle keeps its pieces until nobody reads them any more, and is the one that is waited for.
#[test]
fn a_rank_that_leaves_in_the_middle_is_late_and_held() {
    let length = 3 * window(3);
    let request = operation(OperationKind::AllGather, length, 0);
    let mut ranks = ranks(3, length);
    let begin = |(arena, input, result): &mut (Arena, Vec<u8>, Vec<u8>), number| {
        let begun = arena.begin(tag(number), &request, false, &[], input, result);
        begun.unwrap()
    };
    let step = |(arena, input, result): &mut (Arena, Vec<u8>, Vec<u8>)| {
        arena.advance(input, result).unwrap()
    };
    for rank in &mut ranks {
        begin(rank, 1);
    }
    // Rank 2 gives some pieces and no more.
    for rank in &mut ranks {
        assert_eq!(step(rank), Outcome::Pending);
    }
    ranks[2].0.leave();
    assert_eq!(begin(&mut ranks[2], 2), Outcome::Pending);
    for me in [0, 1, 2].repeat(20) {
        assert_eq!(step(&mut ranks[me]), Outcome::Pending);
    }
    for (me, (arena, ..)) in ranks[..2].iter().enumerate() {
        assert_eq!(arena.late(), [Rank(2)], "rank {me}");
        assert!(arena.lacks(2) && arena.lacks(1 - me as u32));
    }
    // When they have left, it goes on.
    assert_eq!(ranks[2].0.late().len(), 2);
    for rank in &mut ranks[..2] {
        rank.0.leave();
    }
    for rank in &mut ranks[..2] {
        begin(rank, 2);
    }
    let mut ready = 0;
    while ready < 3 {
        // Each takes a step, whoever is ready before.
        let all = ranks.iter_mut().map(step);
        ready = all.filter(|outcome| *outcome == Outcome::Ready).count();
    }
    let expected = [0, 1, 2].map(|rank| vec![rank; length]).concat();
    assert!(ranks.iter().all(|(.., result)| *result == expected));
}

/// Whatever a peer writes in its words and its window, only what is in them changes.
#[test]
fn a_peers_counts_move_nothing_out_of_its_place() {
    let length = 1 << 20;
    let request = operation(OperationKind::AllGather, length, 0);
    let mut ranks = ranks(2, length);
    for (arena, input, result) in &mut ranks {
        let begun = arena.begin(tag(1), &request, false, &[], input, result);
        assert_eq!(begun, Ok(Outcome::Pending));
    }
    let map = Arc::clone(ranks[1].0.map());
    let (arena, input, result) = &mut ranks[0];
    for value in [u64::MAX, u64::MAX - 3, 1 << 63] {
        map.given(1).set(value);
        map.taken(1).set(value);
        arena.advance(input, result).unwrap();
    }
    // All that it could take, from a rank that says that it has given all.
    assert_eq!(arena.advance(input, result), Ok(Outcome::Ready));
    assert!(result[..length] == input[..]);
}
