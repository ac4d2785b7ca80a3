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
    check(Kind::Unix);
}

#[test]
fn nothing_is_allocated_over_rings_either() {
    check(Kind::Ring);
}

#[test]
fn nothing_is_allocated_in_shared_memory_either() {
    check(Kind::Shared);
}

/// What one round allocates after the first: that of several which allocates least, for a rank that waits for more than 0.1 s says so, and that is sent.
fn least(mut round: impl FnMut()) -> usize {
    round();
    let rounds = (0..4).map(|_| {
        let before = ALLOCATIONS.get();
        round();
        ALLOCATIONS.get() - before
    });
    rounds.min().unwrap()
}

fn check(kind: Kind) {
    let group = Group::new(kind, 4);
    let counts = group.run(|comm| {
        let mut short = vec![1.0_f32; 100];
        let mut long = vec![1.0_f64; 300_000];
        let mut all = vec![0.0_f32; 400];
        let (me, world) = (comm.rank().index(), 4);
        let root = Rank(1);
        let (mut half, mut part, given) = (vec![1_u16; 64], vec![0_u16; 16], [1_u16; 64]);
        let mut varied = kolo_collectives::Gathered::default();
        let mut exchanged = kolo_collectives::Gathered::default();
        let mut shares = Vec::new();
        let options = kolo_collectives::Options::new()
            .prescale(2.0)
            .shape(&[10, 10]);
        let scaled = comm.with(options.compression(kolo_collectives::Compression::Bf16));
        let (ones, mut into) = (vec![1.0_f32; 5000], vec![0.0_f32; 5000]);
        let mut buffer = comm.buffer::<f32>(70_000).unwrap();
        buffer.fill(1.0);
        least(|| {
            let mut others = [1_i64; 50];
            scaled.all_reduce(&mut short, ReduceOp::Average).unwrap();
            comm.all_reduce_grouped(&mut [&mut others[..], &mut [2; 3]], ReduceOp::Sum)
                .unwrap();
            comm.reduce(&mut half, ReduceOp::BitOr, root).unwrap();
            comm.reduce_scatter_into(&half, 4, &mut part, ReduceOp::Max)
                .unwrap();
            comm.gather_into(&part, if me == 1 { &mut half } else { &mut [] }, root)
                .unwrap();
            comm.scatter_into(&half, &mut part, root).unwrap();
            comm.all_to_all_into(&given, &mut half).unwrap();
            comm.all_gather_varcount_into(&short[..me], &mut varied)
                .unwrap();
            comm.gather_varcount_into(&short[..me], &mut varied, root)
                .unwrap();
            comm.scatter_varcount_into(&half, &[10, 20, 30, 4], &mut shares, root)
                .unwrap();
            comm.all_to_all_varcount_into(&half, &[me, 1, 2, 3], &mut exchanged)
                .unwrap();
            let (next, before) = (Rank((me as u32 + 1) % world), Rank((me as u32 + 3) % world));
            if me % 2 == 0 {
                comm.send(&part, next).unwrap();
            }
            comm.receive_into(&mut half[..part.len()], before).unwrap();
            if me % 2 == 1 {
                comm.send(&part, next).unwrap();
            }
            comm.all_reduce(&mut short, ReduceOp::Sum).unwrap();
            comm.all_reduce(&mut long, ReduceOp::Max).unwrap();
            comm.broadcast(&mut long, Rank(2)).unwrap();
            comm.all_gather_into(&short, &mut all).unwrap();
            comm.all_reduce_into(&ones, &mut into, ReduceOp::Sum)
                .unwrap();
            comm.all_reduce(&mut into, ReduceOp::Adasum).unwrap();
            comm.all_reduce_buffer(&mut buffer, ReduceOp::Max).unwrap();
            comm.barrier().unwrap();
        })
    });
    assert_eq!(counts, [0; 4]);
}

/// Through shared memory piece by piece, and in rounds (on a machine with one processor in slices).
#[test]
fn nothing_is_allocated_for_long_data_in_shared_memory() {
    const LENGTH: usize = (24 << 20) / size_of::<f64>() + 1001;
    let group = Group::new(Kind::Shared, 2);
    let counts = group.run(|comm| {
        let ones = vec![1.0_f64; LENGTH];
        let (mut data, mut part) = (ones.clone(), vec![0.0; LENGTH / 2]);
        let mut buffer = comm.buffer::<f64>(LENGTH).unwrap();
        buffer.fill(1.0);
        let root = Rank(1);
        least(|| {
            comm.all_reduce(&mut data, ReduceOp::Max).unwrap();
            comm.all_reduce_into(&ones, &mut data, ReduceOp::Min)
                .unwrap();
            comm.reduce(&mut data, ReduceOp::Max, root).unwrap();
            comm.all_reduce_buffer(&mut buffer, ReduceOp::Max).unwrap();
            let even = LENGTH / 2 * 2;
            comm.reduce_scatter_into(&ones[..even], even, &mut part, ReduceOp::Sum)
                .unwrap();
            comm.broadcast(&mut data, root).unwrap();
            comm.scatter_into(&data[..even], &mut part, root).unwrap();
            comm.all_gather_into(&part, &mut data[..even]).unwrap();
            comm.all_to_all_into(&ones[..even], &mut data[..even])
                .unwrap();
        })
    });
    assert_eq!(counts, [0; 2]);
}
