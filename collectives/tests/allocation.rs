//! After the first operation of a size, nothing is allocated.

#![allow(clippy::unwrap_used)]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::{Group, Kind};
use kolo_collectives::ReduceOp;
use kolo_transport::ids::Rank;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

fn count() {
    // A thread that ends has no cell any more, and is not measured.
    let _counted = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every call is passed on to the system's allocator with the same arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `alloc`, which is that of the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`; all memory here comes from the system's.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `realloc`; all memory here comes from the system's.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn nothing_is_allocated_after_the_first_operation_of_a_size() {
    let group = Group::new(Kind::Unix, 4);
    let counts = group.run(|comm| {
        let mut short = vec![1.0_f32; 100];
        let mut long = vec![1.0_f64; 300_000];
        let mut all = vec![0.0_f32; 400];
        let mut round = || {
            comm.all_reduce(&mut short, ReduceOp::Sum).unwrap();
            comm.all_reduce(&mut long, ReduceOp::Max).unwrap();
            comm.broadcast(&mut long, Rank(2)).unwrap();
            comm.all_gather_into(&short, &mut all).unwrap();
            comm.barrier().unwrap();
        };
        // Twice: which stages and read buffers are needed may depend on who is how fast.
        round();
        round();
        let before = ALLOCATIONS.get();
        round();
        round();
        ALLOCATIONS.get() - before
    });
    assert_eq!(counts, [0; 4]);
}
