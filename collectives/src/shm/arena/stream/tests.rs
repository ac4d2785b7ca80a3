//! Pieces are where they should be, and every order of steps gives every rank what is its.

use super::super::super::map::{Map, Owner};
use super::super::Own;
use super::super::numbers::Numbers;
use super::super::{Arena, Outcome};
use super::*;
use crate::operation::Tag;
use kolo_transport::ids::{Generation, JobId};
use std::os::fd::AsFd;
use std::sync::Arc;

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
            let bytes = least(kind) + bytes;
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
    let plain = operation(OperationKind::Broadcast, least(OperationKind::Broadcast), 0);
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
    let mut reduced = operation(kind, least(kind), 0);
    assert!(Stream::of(&reduced, 2).is_some());
    reduced.reduce = Some(ReduceOp::Adasum);
    assert_eq!(Stream::of(&reduced, 2), None);
}

fn byte(from: usize, to: usize, at: usize) -> u8 {
    (at * 7 + at / 251 + from * 31 + to * 59) as u8
}

/// One rank's buffers, and what shall be in the second one.
struct Rank {
    arena: Arena,
    input: Vec<u8>,
    result: Vec<u8>,
    expected: Vec<u8>,
}

fn ranks(world: usize, request: &Operation) -> Vec<Rank> {
    let owner = Owner {
        job: JobId(1),
        generation: Generation(0),
        world: world as u32,
    };
    let (_map, descriptor) = Map::create(owner, false).unwrap();
    let stream = Stream::of(request, world).unwrap();
    // Of one for all, `to` is the giver itself.
    let given = |from: usize, to: usize| {
        let all = 0..stream.length(to);
        let to = if stream.is_split { to } else { from };
        all.map(move |at| byte(from, to, at))
    };
    (0..world)
        .map(|me| {
            let (input, result) = stream.lengths(world, me);
            let to_all = 0..if stream.is_split { world } else { 1 };
            let data = to_all.flat_map(|to| given(me, to)).collect::<Vec<_>>();
            let from: Vec<usize> = match stream.from {
                Some(from) => vec![from],
                None => (0..world).collect(),
            };
            let expected: Vec<u8> = if stream.combined.is_some() {
                let sum =
                    |at| (0..world).fold(0_u8, |sum, from| sum.wrapping_add(byte(from, me, at)));
                (0..stream.length(me)).map(sum).collect()
            } else {
                from.into_iter().flat_map(|from| given(from, me)).collect()
            };
            Rank {
                arena: Arena::new(
                    Arc::new(Map::open(descriptor.as_fd(), owner).unwrap()),
                    me as u32,
                ),
                input: data[..input].to_vec(),
                result: vec![0; result],
                expected: expected.into_iter().take(result).collect(),
            }
        })
        .collect()
}

#[test]
fn every_order_of_steps_gives_every_rank_what_is_its() {
    let mut numbers = Numbers(5);
    for (kind, world) in KINDS
        .into_iter()
        .flat_map(|kind| [2, 3, 5].map(|world| (kind, world)))
    {
        let bytes = least(kind) + numbers.below(2 * window(world));
        let root = numbers.below(world);
        let request = operation(kind, count(kind, bytes, world), root);
        let mut ranks = ranks(world, &request);
        // Several in a row: one may be in the next one while others are in this one.
        let mut begun = vec![0_u64; world];
        let mut ended = vec![0_u64; world];
        while ended.iter().any(|ended| *ended < 3) {
            let me = numbers.below(world);
            let Rank {
                arena,
                input,
                result,
                expected,
            } = &mut ranks[me];
            if ended[me] == 3 {
                continue;
            }
            let outcome = if begun[me] == ended[me] {
                begun[me] += 1;
                result.fill(0);
                let tag = Tag::new(0, begun[me]);
                arena.begin(tag, &request, false, &[], input, result)
            } else {
                arena.advance(input, result)
            };
            if outcome.unwrap() == Outcome::Ready {
                assert!(result == expected, "{request} on rank {me} of {world}");
                assert!(!arena.lacks((me as u32 + 1) % world as u32));
                arena.store::<u8>(&[], Own::At(input), result);
                ended[me] += 1;
            }
        }
    }
}

/// A rank that gives up in the middle keeps its pieces until nobody reads them any more, and is the one that is waited for.
#[test]
fn a_rank_that_leaves_in_the_middle_is_late_and_held() {
    let request = operation(OperationKind::AllGather, 3 * window(3), 0);
    let mut ranks = ranks(3, &request);
    let tag = |operation| Tag::new(0, operation);
    for rank in &mut ranks {
        rank.arena
            .begin(tag(1), &request, false, &[], &rank.input, &mut rank.result)
            .unwrap();
    }
    let step = |rank: &mut Rank| rank.arena.advance(&rank.input, &mut rank.result).unwrap();
    // Rank 2 gives some pieces and no more.
    for me in [0, 1, 2] {
        assert_eq!(step(&mut ranks[me]), Outcome::Pending);
    }
    ranks[2].arena.leave();
    let again = {
        let rank = &mut ranks[2];
        rank.arena
            .begin(tag(2), &request, false, &[], &rank.input, &mut rank.result)
            .unwrap()
    };
    assert_eq!(again, Outcome::Pending);
    for _ in 0..20 {
        for me in [0, 1, 2] {
            assert_eq!(step(&mut ranks[me]), Outcome::Pending);
        }
    }
    for me in [0, 1] {
        assert_eq!(
            ranks[me].arena.late(),
            [kolo_transport::ids::Rank(2)],
            "rank {me}"
        );
        assert!(ranks[me].arena.lacks(2) && ranks[me].arena.lacks(1 - me as u32));
    }
    // When they have left, it goes on.
    assert_eq!(ranks[2].arena.late().len(), 2);
    for me in [0, 1] {
        ranks[me].arena.leave();
    }
    for me in [0, 1] {
        let rank = &mut ranks[me];
        rank.arena
            .begin(tag(2), &request, false, &[], &rank.input, &mut rank.result)
            .unwrap();
    }
    let mut ready = [false; 3];
    while ready != [true; 3] {
        for me in 0..3 {
            ready[me] = step(&mut ranks[me]) == Outcome::Ready;
        }
    }
    for rank in &ranks {
        assert!(rank.result == rank.expected);
    }
}

#[test]
fn buffers_that_do_not_fit_are_refused_before_anything_is_given() {
    let request = operation(OperationKind::AllGather, window(2), 0);
    let mut ranks = ranks(2, &request);
    let rank = &mut ranks[0];
    let tag = Tag::new(0, 1);
    let error = rank
        .arena
        .begin(tag, &request, false, &[], &rank.input, &mut [0; 5])
        .unwrap_err();
    assert!(error.to_string().contains("5 bytes"), "{error}");
    assert!(!rank.arena.is_open());
}

/// Whatever a peer writes in its words and its window, only what is in them changes.
#[test]
fn a_peers_counts_move_nothing_out_of_its_place() {
    let request = operation(OperationKind::AllToAll, 4 << 20, 0);
    let mut ranks = ranks(2, &request);
    let tag = Tag::new(0, 1);
    for rank in &mut ranks {
        rank.arena
            .begin(tag, &request, false, &[], &rank.input, &mut rank.result)
            .unwrap();
    }
    let map = Arc::clone(&ranks[1].arena.map);
    let rank = &mut ranks[0];
    for value in [u64::MAX, u64::MAX - 3, 1 << 63] {
        map.given(1).set(value);
        map.taken(1).set(value);
        rank.arena.advance(&rank.input, &mut rank.result).unwrap();
    }
    // All that it could take, from a rank that says that it has given all.
    assert_eq!(
        rank.arena.advance(&rank.input, &mut rank.result),
        Ok(Outcome::Ready)
    );
    let own = rank.expected.len() / 2;
    assert!(rank.result[..own] == rank.expected[..own]);
}
