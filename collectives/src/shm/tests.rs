//! What a rank makes of descriptors, flags and data that are not right, and of peers that give up.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kolo_transport::ids::{Generation, JobId, Rank};
use rustix::fs::{MemfdFlags, SealFlags};

use super::arena::{Arena, Outcome, Own, way_in_shared_memory};
use super::bed::{Case, FROM, Numbers, ROWS, owner, pair, ranks, sum, tag};
use super::buffer::Buffers;
use super::map::{AREA, HEAP, INLINE, Map, Owner, Place, RECORD_WORDS};
use super::{rules, ticket};
use crate::element::Element;
use crate::operation::{Operation, OperationKind as Kind, Tag};
use crate::{CollectiveError, DType, ReduceOp};

/// So many bytes two ranks reduce in slices.
const SLICED: u64 = 4_400_000;

/// So many bytes go piece by piece: copies, and what is split among ranks.
const COPIED: usize = 512 << 10;
const SPLIT: usize = 6 << 20;
/// So many are reduced in rounds.
const ROUNDS: usize = 12 << 20;
/// From so many bytes on data are given in another part of the area.
const LONG: usize = 8 << 10;

#[test]
fn lengths_here_have_the_ways_that_they_are_chosen_for() {
    let way = |count| way_in_shared_memory(&sum(count), 2, 2);
    assert_eq!(way(SLICED), Some("slices"));
    assert_eq!(way(ROUNDS as u64), Some("rounds"));
    let way =
        |kind, count| way_in_shared_memory(&Operation::new(kind, Some(DType::U8), count), 2, 2);
    assert_eq!(way(Kind::AllGather, COPIED as u64), Some("pieces"));
    assert_eq!(way(Kind::AllToAll, SPLIT as u64 / 2), Some("pieces"));
    assert_eq!(way(Kind::AllToAll, SPLIT as u64 / 2 - 1), Some("flat"));
}

/// All operations around the lengths at which something changes.
fn check_all<T: Element + From<u8>>(world: usize) {
    let (mut ranks, mut numbers) = (ranks(world, false), Numbers(world as u64));
    let mut operation = 0;
    for kind in [
        Kind::AllReduce,
        Kind::Reduce,
        Kind::ReduceScatter,
        Kind::Broadcast,
        Kind::AllGather,
        Kind::AllToAll,
        Kind::Scatter,
        Kind::Gather,
        Kind::GatherVarcount,
    ] {
        let unit = match kind {
            Kind::ReduceScatter => ROWS,
            Kind::AllToAll | Kind::Scatter => world,
            _ => 1,
        };
        let of = |bytes: usize| bytes / size_of::<T>();
        let (from, long) = (of(FROM), of(LONG));
        let mut lengths = vec![
            unit,
            of(INLINE) + 1,
            from - 1,
            from,
            from + unit,
            long - 1,
            long,
            long + unit,
            31 * long + long / 3,
            of(COPIED) + 77 * unit,
        ];
        // As long as it takes without optimisation: not for every world.
        if world == 2 || size_of::<T>() == 1 && world == 3 {
            lengths.extend(match kind {
                Kind::ReduceScatter | Kind::AllToAll => vec![of(SPLIT) + 1001 * unit],
                Kind::AllReduce => vec![of(SLICED as usize), of(ROUNDS) + 333],
                Kind::Reduce => vec![of(SLICED as usize) + 1, of(ROUNDS) + 333_333],
                _ => vec![],
            });
        }
        for (index, given) in lengths.into_iter().enumerate() {
            let case = Case::<T>::new(kind, world, index % world, given);
            // By itself, and two in a row; the longest ones only so.
            let is_longest = given > of(COPIED) + 77 * unit;
            for times in 1 + u64::from(is_longest)..=2 {
                case.play(&mut ranks, operation..operation + times, &mut numbers);
                operation += times;
            }
        }
    }
}

#[test]
fn every_order_of_steps_gives_every_rank_its_result_and_shows_nothing_that_was_not_given() {
    for world in [2, 3, 5] {
        check_all::<u8>(world);
        check_all::<u32>(world);
    }
}

fn why(owner: Owner, descriptor: impl AsFd) -> String {
    Map::open(descriptor.as_fd(), owner)
        .unwrap_err()
        .to_string()
}

#[test]
fn what_is_not_the_groups_memory_is_refused() {
    let (_map, descriptor) = Map::create(owner(2), false).unwrap();
    Map::open(descriptor.as_fd(), owner(2)).unwrap();
    let other = |change: fn(&mut Owner)| {
        let mut owner = owner(2);
        change(&mut owner);
        why(owner, &descriptor)
    };
    assert!(other(|owner| owner.job = JobId(6)).contains("of another job"));
    assert!(other(|owner| owner.generation = Generation(1)).contains("of another generation"));
    assert!(other(|owner| owner.world = 3).contains("another length"));
    assert!(other(|owner| owner.world = 65).contains("more ranks"));

    let file = std::fs::File::open("/proc/self/exe").unwrap();
    assert!(why(owner(2), &file).contains("no memory file"));
    let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
    assert!(why(owner(2), &socket).contains("no memory file"));
    let memory = |seals: SealFlags| {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = rustix::fs::memfd_create("kolo-test", flags).unwrap();
        rustix::fs::ftruncate(&memory, 4096).unwrap();
        rustix::fs::fcntl_add_seals(&memory, seals).unwrap();
        memory
    };
    assert!(why(owner(2), memory(SealFlags::GROW)).contains("not sealed"));
    let sealed = memory(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL);
    assert!(why(owner(2), sealed).contains("another length"));
    // As long as it should be, and empty.
    let length = rustix::fs::fstat(&descriptor).unwrap().st_size;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let empty = rustix::fs::memfd_create("kolo-test", flags).unwrap();
    rustix::fs::ftruncate(&empty, length.cast_unsigned()).unwrap();
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&empty, seals).unwrap();
    assert!(why(owner(2), empty).contains("another magic word"));
    // Nobody can make it shorter.
    assert!(rustix::fs::ftruncate(&descriptor, 0).is_err());
}

#[test]
#[should_panic(expected = "are not in a place")]
fn nothing_outside_a_place_is_touched() {
    let (map, _descriptor) = Map::create(owner(2), false).unwrap();
    map.read(1, Place::Area, AREA - 3, &mut [0; 4]);
}

const TAG: Tag = Tag::new(0, 0);

/// A peer that says that its buffer is elsewhere is named, and nothing is read there.
#[test]
fn buffers_outside_the_memory_are_a_broken_protocol() {
    for wrong in [u64::MAX, u64::MAX - 63, 1, HEAP as u64 + 64] {
        let [mut one, other] = pair();
        let buffer = one.buffer::<u8>(100).unwrap();
        let halves = buffer.halves(one.map()).unwrap();
        let begun = one.begin_buffers(TAG, &sum(100), halves, &buffer).unwrap();
        assert_eq!(begun, Outcome::Pending);
        let map = Arc::clone(other.map());
        map.write(1, Place::Inline(0), 0, &[wrong.to_le_bytes(); 2].concat());
        let ticket = ticket::ticket(TAG, ticket::digest(&sum(100)));
        rules::give(map.front(1, 0), ticket);
        let error = one.advance(&buffer, &mut []).unwrap_err();
        assert!(matches!(error, CollectiveError::Protocol { .. }), "{error}");
        assert_eq!(error.culprit_rank().unwrap().0, 1);
    }
}

/// Noise in a peer's flags, records and data makes errors or wrong sums, never anything worse.
#[test]
fn noise_of_a_peer_does_no_harm() {
    let [mut one, other] = pair();
    let map = Arc::clone(other.map());
    let mut numbers = Numbers(11);
    let mut next = || numbers.next();
    for number in 0..300 {
        let tag = Tag::new(0, number);
        let request = sum([8, 2000, 400_000][number as usize % 3]);
        let input = vec![1; request.count as usize];
        for parity in 0..2 {
            for index in 0..RECORD_WORDS {
                map.record(1, parity, index).store(next(), Ordering::SeqCst);
            }
            map.front(1, parity).store(next(), Ordering::SeqCst);
        }
        // Where its data begin, too.
        for parity in 0..2 {
            map.inline(1, parity, 0).store(next(), Ordering::SeqCst);
        }
        let mut result = input.clone();
        let begun = one
            .begin(tag, &request, false, &[], &input, &mut [])
            .unwrap();
        assert_eq!(begun, Outcome::Pending);
        assert!(one.observe().is_ok());
        assert!(one.lacks(1) && one.late().len() == 1);
        if number % 2 == 0 {
            let ticket = ticket::ticket(tag, ticket::digest(&request));
            rules::give(map.front(1, ticket::parity(tag)), ticket);
            map.second(1).store(ticket, Ordering::SeqCst);
            assert_eq!(one.advance(&input, &mut []), Ok(Outcome::Ready));
            one.store(&[], Own::Given, &mut result);
        } else {
            one.leave();
            assert_eq!(result, input);
        }
    }
}

/// Steps of two ranks in any order, each of which may give up: who ends well has the right sum.
#[test]
fn who_ends_well_has_the_right_sum() {
    let mut numbers = Numbers(13);
    for _ in 0..12 {
        let mut ranks = pair();
        // Where each is: the number of its operation, and whether it is in it.
        let mut at = [(0_u64, false); 2];
        let mut inputs = [Vec::new(), Vec::new()];
        for _ in 0..400 {
            let me = numbers.below(2);
            let (number, inside) = at[me];
            // Nobody is further ahead than one that has failed can be.
            if number > at[1 - me].0 + 3 {
                continue;
            }
            let request = sum([5, 300, 300_000, 20_000, SLICED][number as usize % 5]);
            let outcome = if inside {
                ranks[me].advance(&inputs[me], &mut [])
            } else {
                let value = (number * 3 + me as u64) as u8;
                inputs[me] = vec![value; request.count as usize];
                at[me].1 = true;
                ranks[me].begin(tag(number), &request, false, &[], &inputs[me], &mut [])
            };
            match outcome.unwrap() {
                Outcome::Ready => {
                    let mut result = inputs[me].clone();
                    ranks[me].store(&[], Own::Given, &mut result);
                    let expected = (number * 6 + 1) as u8;
                    assert_eq!(result, vec![expected; result.len()], "operation {number}");
                    at[me] = (number + 1, false);
                }
                Outcome::Pending if numbers.below(8) == 0 => {
                    ranks[me].leave();
                    at[me] = (number + 1, false);
                }
                Outcome::Pending => {}
                Outcome::Elsewhere => panic!("nobody has joined"),
            }
        }
    }
}

/// Places are used in turn, and nothing is written to one whose data are still read, whatever became of the operations since.
#[test]
fn nothing_is_given_where_an_older_operation_is_still_read() {
    let request = sum(1 << 20);
    let [mut one, mut slow] = pair();
    let inputs = [vec![1; 1 << 20], vec![2; 1 << 20]];
    let begin = |arena: &mut Arena, me: usize, operation| {
        let begun = arena.begin(tag(operation), &request, false, &[], &inputs[me], &mut []);
        begun.unwrap()
    };
    assert_eq!(begin(&mut one, 0, 0), Outcome::Pending);
    // The slow one has everything that it needs, and has not copied it yet.
    assert_eq!(begin(&mut slow, 1, 0), Outcome::Ready);
    assert_eq!(one.advance(&inputs[0], &mut []), Ok(Outcome::Ready));
    one.leave();
    // Whichever place it is, some of these would be that of the first one.
    let mut held = 0;
    for operation in (1..20).step_by(2) {
        assert_eq!(begin(&mut one, 0, operation), Outcome::Pending);
        held += u32::from(one.must_poll());
        if one.must_poll() {
            assert_eq!(one.late(), [Rank(1)]);
        }
        one.leave();
    }
    assert!((2..8).contains(&held), "{held} of 10");
    let mut result = inputs[1].clone();
    slow.store(&[], Own::InResult, &mut result);
    assert!(result.iter().all(|byte| *byte == 3));
    for operation in (21..30).step_by(2) {
        assert_eq!(begin(&mut one, 0, operation), Outcome::Pending);
        assert!(!one.must_poll());
        one.leave();
    }
}

/// Two ranks wait for a third that is slow, and give up before they have given anything. That must not look to either as if the
/// other one were still in the operation before.
#[test]
fn who_gives_up_before_giving_holds_nobody() {
    let request = sum(300);
    let input = vec![1; 300];
    let mut result = vec![0_u8; 300];
    let [mut one, mut other, mut slow]: [Arena; 3] = ranks(3, false).try_into().unwrap();
    for rank in [&mut one, &mut other, &mut slow] {
        rank.begin(tag(0), &request, false, &[], &input, &mut [])
            .unwrap();
    }
    for rank in [&mut one, &mut other] {
        assert_eq!(rank.advance(&input, &mut []), Ok(Outcome::Ready));
        rank.store(&[], Own::Given, &mut result);
        assert_eq!(result, [3; 300]);
    }
    // The slow one has not copied anything yet.
    assert_eq!(slow.advance(&input, &mut []), Ok(Outcome::Ready));
    for operation in 1..3 {
        for rank in [&mut one, &mut other] {
            let begun = rank.begin(tag(operation), &request, false, &[], &input, &mut []);
            assert_eq!(begun, Ok(Outcome::Pending));
            assert_eq!(rank.must_poll(), operation == 2);
        }
        one.leave();
        other.leave();
    }
    slow.store(&[], Own::Given, &mut result);
    assert_eq!(result, [3; 300]);
    for operation in 1..4 {
        let begun = slow.begin(tag(operation), &request, false, &[], &input, &mut []);
        assert_eq!(begun, Ok(Outcome::Pending));
        slow.leave();
    }
    for rank in [&mut one, &mut other, &mut slow] {
        let begun = rank.begin(tag(4), &request, false, &[], &input, &mut []);
        assert!(begun.is_ok() && !rank.must_poll(), "{:?}", rank.late());
    }
    for rank in [&mut one, &mut other, &mut slow] {
        assert_eq!(rank.advance(&input, &mut []), Ok(Outcome::Ready));
    }
}

/// An old flag would count as one that all have set.
#[test]
fn numbers_of_operations_only_grow() {
    let [mut one, _other] = pair();
    let tag = |call, operation| Tag::new(call, operation);
    let mut begin = |tag| {
        let begun = one.begin(tag, &sum(3), false, &[], &[1; 3], &mut []);
        one.leave();
        begun
    };
    assert_eq!(begin(tag(4, 7)), Ok(Outcome::Pending));
    assert_eq!(begin(tag(5, 0)), Ok(Outcome::Pending));
    for old in [tag(5, 0), tag(4, 8), tag(0, 0)] {
        let error = begin(old).unwrap_err().to_string();
        assert!(error.contains("growing order"), "{error}");
    }
    assert_eq!(begin(tag(5, 1)), Ok(Outcome::Pending));
}

/// The places of two buffers, and what is in them.
fn halves(arena: &Arena, buffer: &super::buffer::SharedBuffer<u8>) -> Buffers {
    buffer.halves(arena.map()).unwrap()
}

/// The rank's own words in the memory are for others: it writes where its own buffer is, whatever stands there.
#[test]
fn a_peer_can_not_send_a_rank_to_another_buffer_of_its_own() {
    let [mut one, mut other] = pair();
    let (mut buffer, mut bystander) = (
        one.buffer::<u8>(100).unwrap(),
        one.buffer::<u8>(100).unwrap(),
    );
    buffer.fill(1);
    bystander.fill(9);
    let mut theirs = other.buffer::<u8>(100).unwrap();
    theirs.fill(2);
    let (own, wrong) = (halves(&one, &buffer), halves(&one, &bystander));
    one.begin_buffers(TAG, &sum(100), own, &buffer).unwrap();
    let words = [
        (wrong.input as u64).to_le_bytes(),
        (wrong.input as u64).to_le_bytes(),
    ];
    other.map().write(0, Place::Inline(0), 0, &words.concat());
    let place = halves(&other, &theirs);
    other.begin_buffers(TAG, &sum(100), place, &theirs).unwrap();
    assert_eq!(one.advance(&buffer, &mut []), Ok(Outcome::Ready));
    one.leave();
    buffer.turn();
    // The first slice of the two is this rank's.
    assert_eq!(buffer[..64], [3; 64]);
}

/// Also by an error at the first look, before anything is waited for.
#[test]
fn a_failed_operation_of_buffers_is_given_up() {
    let [mut one, mut other] = pair();
    let buffer = one.buffer::<u8>(100).unwrap();
    let ticket = ticket::ticket(TAG, ticket::digest(&sum(100)));
    let wrong = [7_u64.to_le_bytes(); 2].concat();
    other.map().write(1, Place::Inline(0), 0, &wrong);
    rules::give(other.map().front(1, 0), ticket);
    let place = halves(&one, &buffer);
    let error = one
        .begin_buffers(TAG, &sum(100), place, &buffer)
        .unwrap_err();
    assert!(matches!(error, CollectiveError::Protocol { .. }), "{error}");
    assert!(!one.is_open());
    assert!(rules::is_gone(other.map().front(0, 0), ticket));
    let begun = other.begin_buffers(tag(1), &sum(100), place, &buffer);
    assert!(begun.is_ok());
}

/// A buffer of an operation that failed here is not used again while a peer may write it, and is when none can.
#[test]
fn what_late_peers_write_is_nobody_elses() {
    let [mut one, mut other] = pair();
    let mut buffer = one.buffer::<u8>(5000).unwrap();
    let theirs = other.buffer::<u8>(5000).unwrap();
    let (own, place) = (halves(&one, &buffer), halves(&other, &theirs));
    buffer.taint();
    one.begin_buffers(TAG, &sum(5000), own, &buffer).unwrap();
    // It is in the middle of it: it has combined its slice, and waits.
    let begun = other
        .begin_buffers(TAG, &sum(5000), place, &theirs)
        .unwrap();
    assert_eq!(begun, Outcome::Pending);
    one.leave();
    drop(buffer);
    let next = one.buffer::<u8>(5000).unwrap();
    assert_ne!(halves(&one, &next), own);
    // What it writes now is in nobody's memory.
    let late = vec![77; 5000];
    other.map().write(0, Place::Heap(own.output), 0, &late);
    other.map().write(0, Place::Heap(own.input), 0, &late);
    assert!(next.iter().all(|value| *value == 0));
    other.leave();
    let again = one.buffer::<u8>(5000).unwrap();
    assert_eq!(halves(&one, &again), own);
    assert!(again.iter().all(|value| *value == 0));
}

/// Not every byte is a `bool`.
#[test]
fn whatever_byte_a_peer_gives_a_bool_is_a_bool() {
    let kinds = [
        (Kind::AllReduce, Some(ReduceOp::Max)),
        (Kind::AllReduce, Some(ReduceOp::BitXor)),
        (Kind::AllGather, None),
        (Kind::Broadcast, None),
        (Kind::AllToAll, None),
    ];
    let mut operation = 0;
    let [mut one, other] = pair();
    for (kind, reduce) in kinds {
        for count in [1, 7, 56, 57, 1000, 300_000, SLICED as usize] {
            let request = Operation {
                reduce,
                root: (kind == Kind::Broadcast).then_some(1),
                ..Operation::new(kind, Some(DType::Bool), count as u64)
            };
            let tag = tag(operation);
            operation += 1;
            let given = match kind {
                Kind::AllToAll => 2 * count,
                _ => count,
            };
            let (parity, noise) = (ticket::parity(tag), vec![0xfe; given]);
            let ticket = ticket::ticket(tag, ticket::digest(&request));
            let in_slices = reduce.is_some() && count as u64 == SLICED;
            if given > INLINE {
                other.map().write(1, Place::Area, 0, &noise);
                other.map().inline(1, parity, 0).store(0, Ordering::SeqCst);
            } else {
                other.map().write(1, Place::Inline(parity), 0, &noise);
            }
            rules::give(other.map().front(1, parity), ticket);
            rules::give(other.map().second(1), ticket);
            let input = vec![1; given];
            let begun = one.begin(tag, &request, false, &[], &input, &mut []);
            assert_eq!(begun, Ok(Outcome::Ready), "{request}");
            let mut result = match kind {
                Kind::AllGather | Kind::AllToAll => vec![false; 2 * count],
                _ => vec![false; count],
            };
            one.store(&[], Own::At(&input), &mut result);
            rules::leave(other.map().done(1, parity), ticket);
            let bytes = crate::element::bytes_of(&result);
            assert!(bytes.iter().all(|byte| *byte < 2), "{request}");
            // The last byte of slices is the peer's work.
            let last = in_slices || reduce != Some(ReduceOp::BitXor);
            assert_eq!(bytes[bytes.len() - 1], u8::from(last), "{request}");
        }
    }
}

#[test]
fn a_notice_and_what_ends_the_operation_are_news_for_who_looks() {
    let is_over = Arc::default();
    let owner = owner(2);
    let (map, descriptor) = Map::create(owner, false).unwrap();
    let mut first = Arena::new(Arc::new(map), 0, Arc::clone(&is_over));
    let second = Map::open(descriptor.as_fd(), owner).unwrap();
    let second = Arena::new(Arc::new(second), 1, Arc::default());
    assert!(!first.is_other_news());
    second.tell();
    assert!(first.is_other_news() && !second.is_other_news());
    first.listen_to_links();
    assert!(!first.is_other_news());
    is_over.store(true, Ordering::Relaxed);
    assert!(first.is_other_news() && !second.is_other_news());
}
