//! A rank that gets no memory for a result: all ranks hear of it, and the next operation works.

#![allow(clippy::unwrap_used)]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::{Group, Kind};
use kolo_collectives::{CollectiveError, Communicator, Options, ReduceOp};
use kolo_transport::ids::Rank;

thread_local! {
    /// More than that a thread does not get in one piece.
    static MOST: Cell<usize> = const { Cell::new(usize::MAX) };
}

struct Scarce;

fn is_there(size: usize) -> bool {
    // A thread that ends has no limit any more.
    MOST.try_with(|most| size <= most.get()).unwrap_or(true)
}

// SAFETY: every call is passed on to the system's allocator with the same arguments, or gets nothing, which any may.
unsafe impl GlobalAlloc for Scarce {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !is_there(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract of `alloc`, which is that of the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !is_there(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract of `alloc_zeroed`, which is that of the system's.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`; all memory here comes from the system's.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !is_there(size) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract of `realloc`; all memory here comes from the system's.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Scarce = Scarce;

/// Of `u64`: what is given is there, and as much once more is not.
const LENGTH: usize = 1 << 17;

type Body = fn(&Communicator, &mut [u64]) -> Result<(), CollectiveError>;

/// Rank 1 has no memory left; the other ranks have.
fn without_memory(kind: Kind, body: Body) {
    let group = Group::new(kind, 2);
    let results = group.run(|comm| {
        comm.barrier().unwrap();
        let mut data = vec![1; LENGTH];
        if comm.rank() == Rank(1) {
            MOST.set(LENGTH / 2);
        }
        let result = body(comm, &mut data);
        MOST.set(usize::MAX);
        assert!(data.iter().all(|value| *value == 1), "what was given");
        result
    });
    let [zeros, ones] = &results[..] else {
        unreachable!("there are two");
    };
    let error = ones.clone().unwrap_err();
    let invalid = matches!(error, CollectiveError::Invalid { .. });
    assert!(invalid && error.to_string().contains("memory"), "{error}");
    let error = zeros.clone().unwrap_err();
    let failed = matches!(error, CollectiveError::PeerFailed { rank: Rank(1), .. });
    assert!(failed, "{error}");
    for result in group.run(|comm| comm.all_gather(&[comm.rank().0])) {
        assert_eq!(result, Ok(vec![0, 1]));
    }
}

/// For the result, or to pack several buffers.
#[test]
fn an_operation_that_gets_no_memory_fails_on_all_ranks() {
    let bodies: [Body; 5] = [
        |comm, data| comm.all_gather(data).map(drop),
        |comm, data| {
            let runtime = tokio::runtime::Builder::new_current_thread().build();
            let gathered = comm.all_gather_async(data);
            runtime.unwrap().block_on(gathered).map(drop)
        },
        |comm, data| comm.gather(data, Rank(1)).map(drop),
        |comm, data| comm.all_to_all(data).map(drop),
        |comm, data| comm.all_reduce_grouped(&mut [data], ReduceOp::Sum),
    ];
    for body in bodies {
        for kind in [Kind::Unix, Kind::Shared] {
            without_memory(kind, body);
        }
    }
}

/// What was in them is kept.
#[test]
fn an_adasum_of_several_buffers_without_memory_to_keep_them_fails_on_all_ranks() {
    without_memory(Kind::Unix, |comm, data| {
        let mut first = [1.0_f32; 10];
        let mut second: Vec<f32> = Vec::new();
        // It has this memory already.
        MOST.with(|most| {
            let was = most.replace(usize::MAX);
            second.resize(data.len(), 1.0);
            most.set(was);
        });
        let buffers = &mut [&mut first[..], &mut second[..]];
        let result = comm.all_reduce_grouped(buffers, ReduceOp::Adasum);
        assert!(
            first
                .iter()
                .chain(&second)
                .all(|value| value.total_cmp(&1.0).is_eq())
        );
        result
    });
}

/// Alone, a rank packs nothing.
#[test]
fn several_buffers_of_a_world_of_one_take_no_memory() {
    let group = Group::new(Kind::Shared, 1);
    let alone = &group.members[0];
    let (mut first, mut second) = (vec![1_u64; LENGTH], [2_u64; 10]);
    // What any operation of this length works in is there from here on.
    let mut all = vec![0_u64; LENGTH + second.len()];
    alone.all_reduce(&mut all, ReduceOp::Sum).unwrap();
    MOST.set(LENGTH / 2);
    let result = alone.all_reduce_grouped(&mut [&mut first, &mut second], ReduceOp::Average);
    MOST.set(usize::MAX);
    assert_eq!(result, Ok(()));
    assert!(first.iter().all(|value| *value == 1) && second == [2; 10]);
    // What has a factor is computed all the same.
    let scaled = alone.with(Options::new().prescale(2.0));
    let result = scaled.all_reduce_grouped(&mut [&mut first, &mut second], ReduceOp::Sum);
    assert_eq!(result, Ok(()));
    assert!(first.iter().all(|value| *value == 2) && second == [4; 10]);
}
