//! Slices and places are where they should be, every order of steps gives every rank the sum, and who gives up has its input.

use super::super::super::map::{Map, Owner};
use super::super::Own;
use super::super::numbers::Numbers;
use super::*;
use kolo_transport::ids::{Generation, JobId, Rank};
use std::os::fd::AsFd;

fn sum(length: usize) -> Operation {
    Operation {
        reduce: Some(ReduceOp::Sum),
        ..Operation::new(OperationKind::AllReduce, Some(DType::U8), length as u64)
    }
}

const fn tag(operation: u64) -> Tag {
    Tag::new(0, operation)
}

#[test]
fn slices_are_all_of_a_piece_and_places_do_not_overlap() {
    for world in 2..=64 {
        let long = piece(world);
        for length in [LEAST, LEAST + 1, LEAST + long - 3, LEAST + 5 * long + 77] {
            let rounds = Rounds::of(&sum(length), world).unwrap();
            let mut end = 0;
            for piece in 0..rounds.pieces() {
                assert_eq!(rounds.piece(piece).start, end);
                for rank in 0..world {
                    let slice = rounds.slice(world, piece, rank);
                    assert!(slice.start == end && slice.end >= end);
                    assert!(slice.len() <= rounds.longest(world));
                    end = slice.end;
                }
                assert_eq!(rounds.piece(piece).end, end);
            }
            assert_eq!(end, length);
        }
        let rounds = Rounds::of(&sum(LEAST), world).unwrap();
        let mut places: Vec<(usize, usize)> = (0..PLACES)
            .map(|piece| (rounds.place(piece), long))
            .chain(
                (0..PLACES).map(|piece| (rounds.slice_place(world, piece), rounds.longest(world))),
            )
            .collect();
        places.push((rounds.window(world), 0));
        assert!(
            places
                .windows(2)
                .all(|pair| pair[0].0 + pair[0].1 <= pair[1].0)
        );
    }
}

#[test]
fn what_is_short_or_converted_or_no_number_is_not_done_in_rounds() {
    let plain = sum(LEAST);
    assert!(Rounds::of(&plain, 2).is_some());
    let other = |change: fn(&mut Operation)| {
        let mut operation = plain;
        change(&mut operation);
        Rounds::of(&operation, 2)
    };
    assert_eq!(other(|operation| operation.count -= 1), None);
    assert_eq!(other(|operation| operation.wire = Some(DType::F16)), None);
    assert_eq!(other(|operation| operation.dtype = Some(DType::Bool)), None);
    assert_eq!(
        other(|operation| operation.reduce = Some(ReduceOp::Adasum)),
        None
    );
    assert_eq!(
        other(|operation| operation.kind = OperationKind::AllGather),
        None
    );
}

/// Ranks with their data.
fn ranks(world: usize, crowded: bool, length: usize) -> Vec<(Arena, Vec<u8>)> {
    let owner = Owner {
        job: JobId(1),
        generation: Generation(0),
        world: world as u32,
    };
    let (_map, descriptor) = Map::create(owner, crowded).unwrap();
    (0..world)
        .map(|me| {
            let map = Map::open(descriptor.as_fd(), owner).unwrap();
            (Arena::new(Arc::new(map), me as u32), data(me, length))
        })
        .collect()
}

/// Bytes after which everything is the same again: no multiple of a slice.
const PERIOD: usize = 65_521;

fn repeated(length: usize, byte: impl Fn(usize) -> u8) -> Vec<u8> {
    let period: Vec<u8> = (0..PERIOD).map(byte).collect();
    let mut data = period.repeat(length.div_ceil(PERIOD));
    data.truncate(length);
    data
}

fn byte(me: usize, at: usize) -> u8 {
    (at * 7 + at / 251 + me * 31) as u8
}

fn data(me: usize, length: usize) -> Vec<u8> {
    repeated(length, |at| byte(me, at))
}

fn total(world: usize, length: usize) -> Vec<u8> {
    let sum = |at| (0..world).fold(0, |sum: u8, me| sum.wrapping_add(byte(me, at)));
    repeated(length, sum)
}

#[test]
fn every_order_of_steps_gives_every_rank_the_sum() {
    let mut numbers = Numbers(3);
    for world in [2, 3] {
        let length = LEAST + piece(world) + 12_345;
        let (request, expected) = (sum(length), total(world, length));
        let mut ranks = ranks(world, false, length);
        // Twice in a row, in one buffer and in two: one may be in the second one while others are in the first one.
        let mut results = vec![vec![0; length]; world];
        let mut begun = vec![0_u64; world];
        let mut ended = vec![0_u64; world];
        while ended.iter().any(|ended| *ended < 2) {
            let me = numbers.below(world);
            let (arena, data) = &mut ranks[me];
            if ended[me] == 2 {
                continue;
            }
            let result = &mut results[me];
            let begins = begun[me] == ended[me];
            begun[me] += u64::from(begins);
            let outcome = match (begun[me], begins) {
                (1, true) => arena.begin(tag(1), &request, false, &[], data, result),
                (1, false) => arena.advance(data, result),
                (_, true) => arena.begin_in_place(tag(2), &request, false, data, true),
                (_, false) => arena.advance(&[], data),
            };
            if outcome.unwrap() == Outcome::Ready {
                let has = if begun[me] == 1 { &*result } else { &*data };
                assert!(*has == expected, "rank {me} of {world}");
                assert!(!arena.lacks((me as u32 + 1) % world as u32));
                arena.store::<u8>(&[], Own::Given, &mut []);
                ended[me] += 1;
            }
        }
    }
}

/// Only the root has one, in its own buffer or another one.
#[test]
fn every_order_of_steps_gives_the_root_of_a_reduce_the_sum() {
    let mut numbers = Numbers(8);
    for (world, root) in [(2, 1), (3, 0)] {
        let length = LEAST + 77;
        let request = Operation {
            kind: OperationKind::Reduce,
            root: Some(root as u32),
            ..sum(length)
        };
        let mut ranks = ranks(world, false, length);
        for (operation, in_place) in [(1, false), (2, true)] {
            let mut result = vec![0; length];
            let mut begun = vec![false; world];
            let mut ended = vec![false; world];
            while ended.contains(&false) {
                let me = numbers.below(world);
                let (arena, data) = &mut ranks[me];
                if ended[me] {
                    continue;
                }
                let begins = !std::mem::replace(&mut begun[me], true);
                let outcome = match (me == root, in_place, begins) {
                    (true, true, true) => {
                        arena.begin_in_place(tag(operation), &request, false, data, true)
                    }
                    (true, true, false) => arena.advance(&[], data),
                    (is_root, _, begins) => {
                        let into: &mut [u8] = if is_root { &mut result } else { &mut [] };
                        if begins {
                            arena.begin(tag(operation), &request, false, &[], data, into)
                        } else {
                            arena.advance(data, into)
                        }
                    }
                };
                if outcome.unwrap() == Outcome::Ready {
                    arena.store::<u8>(&[], Own::Given, &mut []);
                    ended[me] = true;
                }
            }
            for (me, (_, data)) in ranks.iter_mut().enumerate() {
                let has = if in_place { &*data } else { &result };
                if me == root {
                    assert!(*has == total(world, length), "root {root} of {world}");
                } else {
                    assert!(*data == self::data(me, length), "rank {me} has no result");
                }
            }
        }
    }
}

#[test]
fn a_root_whose_reduce_is_given_up_has_its_input() {
    let length = LEAST + 5;
    let request = Operation {
        kind: OperationKind::Reduce,
        root: Some(0),
        ..sum(length)
    };
    let mut ranks = ranks(2, false, length);
    let [(root, data), (other, given)] = &mut ranks[..] else {
        panic!("there are two");
    };
    root.begin_in_place(tag(1), &request, false, data, true)
        .unwrap();
    other
        .begin(tag(1), &request, false, &[], given, &mut [])
        .unwrap();
    for _ in 0..9 {
        assert_eq!(root.advance(&[], data), Ok(Outcome::Pending));
        assert_eq!(other.advance(given, &mut []), Ok(Outcome::Pending));
    }
    assert!(
        *data != self::data(0, length),
        "it has a part of the result"
    );
    other.leave();
    assert_eq!(root.advance(&[], data), Ok(Outcome::Pending));
    root.undo(data);
    root.leave();
    assert!(*data == self::data(0, length));
}

/// And it is the one that is waited for, until it comes to the next operation.
#[test]
fn a_rank_that_leaves_in_the_middle_has_its_input_and_is_late() {
    let length = LEAST;
    let mut ranks = ranks(3, false, length);
    for (arena, data) in &mut ranks {
        arena
            .begin_in_place(tag(1), &sum(length), false, data, true)
            .unwrap();
    }
    for _ in 0..7 {
        for (arena, data) in &mut ranks {
            assert_eq!(arena.advance(&[], data), Ok(Outcome::Pending));
        }
    }
    for (me, (_, has)) in ranks.iter().enumerate() {
        assert!(
            *has != data(me, length),
            "rank {me} has a part of the result"
        );
    }
    let leave = |(arena, data): &mut (Arena, Vec<u8>)| {
        arena.undo(data);
        arena.leave();
    };
    leave(&mut ranks[2]);
    assert!(ranks[2].1 == data(2, length));
    for _ in 0..5 {
        for (arena, data) in &mut ranks[..2] {
            assert_eq!(arena.advance(&[], data), Ok(Outcome::Pending));
        }
    }
    for me in [0, 1] {
        let arena = &ranks[me].0;
        assert_eq!(arena.late(), [Rank(2)], "rank {me}");
        assert!(arena.lacks(2) && arena.lacks(1 - me as u32));
    }
    for me in [0, 1] {
        leave(&mut ranks[me]);
        assert!(ranks[me].1 == data(me, length));
        // There is nothing to put back any more.
        ranks[me].0.undo(&mut []);
    }
    let mut ready = 0;
    for (arena, data) in &mut ranks {
        arena
            .begin_in_place(tag(2), &sum(length), false, data, false)
            .unwrap();
    }
    while ready < 3 {
        ready = 0;
        for (arena, data) in &mut ranks {
            ready += usize::from(arena.advance(&[], data) == Ok(Outcome::Ready));
        }
    }
    let expected = total(3, length);
    assert!(ranks.iter().all(|(_, data)| *data == expected));
}

#[test]
fn ranks_without_a_processor_each_do_it_in_slices() {
    let mut ranks = ranks(2, true, LEAST);
    let (arena, data) = &mut ranks[0];
    assert!(!arena.streams(&sum(LEAST)));
    let begun = arena.begin(tag(1), &sum(LEAST), false, &[], data, &mut []);
    assert_eq!(begun, Ok(Outcome::Pending));
}

#[test]
fn buffers_that_do_not_fit_are_refused_before_anything_is_given() {
    let mut ranks = ranks(2, false, LEAST);
    let (arena, data) = &mut ranks[0];
    let in_two = arena.begin(tag(1), &sum(LEAST), false, &[], data, &mut [0; 5]);
    let in_one = arena.begin_in_place(tag(1), &sum(LEAST), false, &mut data[..5], true);
    for begun in [in_two, in_one] {
        let error = begun.unwrap_err();
        assert!(error.to_string().contains("5 bytes"), "{error}");
        assert!(!arena.is_open());
    }
}

/// Whatever a peer writes in its word and its window, this rank comes to its end, and writes nothing else.
#[test]
fn a_peers_count_moves_nothing_out_of_its_place() {
    let mut ranks = ranks(2, false, LEAST);
    for (arena, data) in &mut ranks {
        arena
            .begin_in_place(tag(1), &sum(LEAST), false, data, true)
            .unwrap();
    }
    let map = Arc::clone(&ranks[1].0.map);
    map.given(1).set(u64::MAX);
    let (arena, data) = &mut ranks[0];
    assert_eq!(arena.advance(&[], data), Ok(Outcome::Ready));
    assert!(!arena.lacks(1));
}
