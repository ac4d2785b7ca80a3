//! What a rank makes of descriptors and flags that are not right.

use std::os::fd::AsFd;
use std::sync::Arc;

use kolo_transport::ids::{Generation, JobId};
use rustix::fs::{MemfdFlags, SealFlags};

use super::arena::{Arena, Outcome};
use super::map::{Map, Owner, Place, SLOT};
use super::ticket;
use crate::operation::{Operation, OperationKind, Tag};
use crate::{CollectiveError, DType, ReduceOp};

const OWNER: Owner = Owner {
    job: JobId(5),
    generation: Generation(2),
    world: 2,
};

fn why(owner: Owner, descriptor: impl AsFd) -> String {
    Map::open(descriptor.as_fd(), owner)
        .unwrap_err()
        .to_string()
}

#[test]
fn what_is_not_the_groups_memory_is_refused() {
    let (_map, descriptor) = Map::create(OWNER).unwrap();
    Map::open(descriptor.as_fd(), OWNER).unwrap();
    let other = |change: fn(&mut Owner)| {
        let mut owner = OWNER;
        change(&mut owner);
        why(owner, &descriptor)
    };
    assert!(other(|owner| owner.job = JobId(6)).contains("of another job"));
    assert!(other(|owner| owner.generation = Generation(1)).contains("of another generation"));
    assert!(other(|owner| owner.world = 3).contains("another length"));
    assert!(other(|owner| owner.world = 65).contains("more ranks"));

    let file = std::fs::File::open("/proc/self/exe").unwrap();
    assert!(why(OWNER, &file).contains("no memory file"));
    let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
    assert!(why(OWNER, &socket).contains("no memory file"));
    let memory = |seals: SealFlags| {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = rustix::fs::memfd_create("kolo-test", flags).unwrap();
        rustix::fs::ftruncate(&memory, 4096).unwrap();
        rustix::fs::fcntl_add_seals(&memory, seals).unwrap();
        memory
    };
    assert!(why(OWNER, memory(SealFlags::GROW)).contains("not sealed"));
    let sealed = memory(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL);
    assert!(why(OWNER, sealed).contains("another length"));
    // As long as it should be, and empty.
    let length = rustix::fs::fstat(&descriptor).unwrap().st_size;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let empty = rustix::fs::memfd_create("kolo-test", flags).unwrap();
    rustix::fs::ftruncate(&empty, length.cast_unsigned()).unwrap();
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&empty, seals).unwrap();
    assert!(why(OWNER, empty).contains("another magic word"));
    // Nobody can make it shorter.
    assert!(rustix::fs::ftruncate(&descriptor, 0).is_err());
}

#[test]
#[should_panic(expected = "are not in a place")]
fn nothing_outside_a_place_is_touched() {
    let (map, _descriptor) = Map::create(OWNER).unwrap();
    map.read(1, Place::Slot(0), SLOT - 3, &mut [0; 4]);
}

fn pair() -> (Arena, Arena) {
    let (map, descriptor) = Map::create(OWNER).unwrap();
    let other = Map::open(descriptor.as_fd(), OWNER).unwrap();
    (Arena::new(Arc::new(map), 0), Arena::new(Arc::new(other), 1))
}

fn sum(count: u64) -> Operation {
    Operation {
        reduce: Some(ReduceOp::Sum),
        ..Operation::new(OperationKind::AllReduce, Some(DType::U8), count)
    }
}

const TAG: Tag = Tag {
    call: 0,
    operation: 0,
};

/// A peer that says that its buffer is elsewhere is named, and nothing is read there.
#[test]
fn buffers_outside_the_memory_are_a_broken_protocol() {
    for wrong in [u64::MAX, u64::MAX - 63, 1, super::map::HEAP as u64 + 64] {
        let (mut one, other) = pair();
        let buffer = one.heap.buffer::<u8>(100).unwrap();
        let halves = buffer.halves(&one.map).unwrap();
        let begun = one.begin_buffers(TAG, &sum(100), halves).unwrap();
        assert_eq!(begun, Outcome::Pending);
        let map = Arc::clone(&other.map);
        map.write(1, Place::Inline(0), 0, &[wrong.to_le_bytes(); 2].concat());
        let ticket = ticket::ticket(TAG, ticket::digest(&sum(100)));
        super::rules::give(map.front(1, 0), ticket);
        let error = one.advance(&[]).unwrap_err();
        assert!(matches!(error, CollectiveError::Protocol { .. }), "{error}");
        assert_eq!(error.culprit_rank().unwrap().0, 1);
    }
}

/// Noise in a peer's flags, records and data makes errors or wrong sums, never anything worse.
#[test]
fn noise_of_a_peer_does_no_harm() {
    let (mut one, other) = pair();
    let map = Arc::clone(&other.map);
    let mut random = 88_172_645_463_325_252_u64;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    for number in 0..300 {
        let tag = Tag {
            call: 0,
            operation: number,
        };
        let request = sum([8, 2000, 400_000][number as usize % 3]);
        let input = vec![1; request.count as usize];
        for parity in 0..2 {
            for index in 0..super::map::RECORD_WORDS {
                map.record(1, parity, index)
                    .store(next(), std::sync::atomic::Ordering::SeqCst);
            }
            map.front(1, parity)
                .store(next(), std::sync::atomic::Ordering::SeqCst);
        }
        map.write(1, Place::Slot(0), 0, &next().to_le_bytes());
        let mut result = input.clone();
        let begun = one.begin(tag, &request, false, &[], &input).unwrap();
        assert_eq!(begun, Outcome::Pending);
        assert!(one.observe().is_ok());
        assert!(one.lacks(1) && one.late().len() == 1);
        if number % 2 == 0 {
            let ticket = ticket::ticket(tag, ticket::digest(&request));
            super::rules::give(map.front(1, ticket::parity(tag)), ticket);
            map.second(1)
                .store(ticket, std::sync::atomic::Ordering::SeqCst);
            assert_eq!(one.advance(&input), Ok(Outcome::Ready));
            one.store(&[], &mut result);
        } else {
            one.give_up();
            assert_eq!(result, input);
        }
    }
}

/// Steps of two ranks in any order, each of which may give up: who ends well has the right sum.
#[test]
fn who_ends_well_has_the_right_sum() {
    let mut random = 362_436_069_u64;
    let mut next = move |limit: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % limit
    };
    for _ in 0..30 {
        let (one, other) = pair();
        let mut ranks = [one, other];
        // Where each is: the number of its operation, and whether it is in it.
        let mut at = [(0_u64, false); 2];
        let mut inputs = [Vec::new(), Vec::new()];
        for _ in 0..400 {
            let me = next(2) as usize;
            let (number, inside) = at[me];
            // Nobody is further ahead than one that has failed can be.
            if number > at[1 - me].0 + 3 {
                continue;
            }
            let request = sum([5, 300, 300_000][number as usize % 3]);
            let tag = Tag {
                call: 0,
                operation: number,
            };
            let outcome = if inside {
                ranks[me].advance(&inputs[me])
            } else {
                let value = (number * 3 + me as u64) as u8;
                inputs[me] = vec![value; request.count as usize];
                at[me].1 = true;
                ranks[me].begin(tag, &request, false, &[], &inputs[me])
            };
            match outcome.unwrap() {
                Outcome::Ready => {
                    let mut result = inputs[me].clone();
                    ranks[me].store(&[], &mut result);
                    let expected = (number * 6 + 1) as u8;
                    assert_eq!(result, vec![expected; result.len()], "operation {number}");
                    at[me] = (number + 1, false);
                }
                Outcome::Pending if next(8) == 0 => {
                    ranks[me].give_up();
                    at[me] = (number + 1, false);
                }
                Outcome::Pending => {}
                Outcome::Elsewhere => panic!("nobody has joined"),
            }
        }
    }
}
