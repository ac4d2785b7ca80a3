//! Slices and places are where they should be, every order of steps gives every rank the sum, and who gives up has its input.

use std::sync::Arc;

use kolo_transport::ids::Rank;

use super::super::{Arena, Outcome};
use super::*;
use crate::shm::bed::{self, tag};

fn sum(length: usize) -> Operation {
    bed::sum(length as u64)
}

#[test]
fn slices_are_all_of_a_piece_and_places_do_not_overlap() {
    for world in 2..=64 {
        let long = round_piece(world);
        for length in [
            ROUNDS,
            ROUNDS + 1,
            ROUNDS + long - 3,
            ROUNDS + 5 * long + 77,
        ] {
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
        let rounds = Rounds::of(&sum(ROUNDS), world).unwrap();
        let mut places: Vec<(usize, usize)> = (0..ROUND_PLACES)
            .map(|piece| (rounds.place(piece), long))
            .chain(
                (0..ROUND_PLACES)
                    .map(|piece| (rounds.slice_place(world, piece), rounds.longest(world))),
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
    let plain = sum(ROUNDS);
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

/// Ranks with their data: the bytes of rank r are r + 1.
fn ranks(world: usize, crowded: bool, length: usize) -> Vec<(Arena, Vec<u8>)> {
    let of = |(me, arena)| (arena, data(me, length));
    (0..).zip(bed::ranks(world, crowded)).map(of).collect()
}

fn data(me: usize, length: usize) -> Vec<u8> {
    vec![me as u8 + 1; length]
}

/// And it is the one that is waited for, until it comes to the next operation.
#[test]
fn a_rank_that_leaves_in_the_middle_has_its_input_and_is_late() {
    let length = ROUNDS;
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
    let expected = vec![6; length];
    assert!(ranks.iter().all(|(_, data)| *data == expected));
}

#[test]
fn ranks_without_a_processor_each_do_it_in_slices() {
    let mut ranks = ranks(2, true, ROUNDS);
    let (arena, data) = &mut ranks[0];
    assert!(!arena.streams(&sum(ROUNDS)));
    let begun = arena.begin(tag(1), &sum(ROUNDS), false, &[], data, &mut []);
    assert_eq!(begun, Ok(Outcome::Pending));
}

#[test]
fn buffers_that_do_not_fit_are_refused_before_anything_is_given() {
    let mut ranks = ranks(2, false, ROUNDS);
    let (arena, data) = &mut ranks[0];
    let in_two = arena.begin(tag(1), &sum(ROUNDS), false, &[], data, &mut [0; 5]);
    let in_one = arena.begin_in_place(tag(1), &sum(ROUNDS), false, &mut data[..5], true);
    for begun in [in_two, in_one] {
        let error = begun.unwrap_err();
        assert!(error.to_string().contains("5 bytes"), "{error}");
        assert!(!arena.is_open());
    }
}

/// Whatever a peer writes in its word and its window, this rank comes to its end, and writes nothing else.
#[test]
fn a_peers_count_moves_nothing_out_of_its_place() {
    let mut ranks = ranks(2, false, ROUNDS);
    for (arena, data) in &mut ranks {
        arena
            .begin_in_place(tag(1), &sum(ROUNDS), false, data, true)
            .unwrap();
    }
    let map = Arc::clone(ranks[1].0.map());
    map.given(1).set(u64::MAX);
    let (arena, data) = &mut ranks[0];
    assert_eq!(arena.advance(&[], data), Ok(Outcome::Ready));
    assert!(!arena.lacks(1));
}
