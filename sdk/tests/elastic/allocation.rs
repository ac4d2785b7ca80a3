//! What a commit costs in memory. `kolo-bench commit` measures the time.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use kolo::elastic::{Elastic, ElasticSampler, Parts, State};

use crate::state::group;

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

struct Work {
    sampler: ElasticSampler,
    losses: Vec<f32>,
    model: Vec<f32>,
}

impl Elastic for Work {
    fn parts(&mut self, parts: &mut Parts<'_>) {
        parts.value("sampler", &mut self.sampler);
        parts.list("losses", &mut self.losses);
        parts.buffer("model", &mut self.model);
    }
}

fn state(model: usize) -> State<Work> {
    State::new(Work {
        sampler: ElasticSampler::with_global_batch(10_000, 2),
        losses: vec![0.5; 3],
        model: vec![1.0; model],
    })
}

/// One round allocates nothing, for a rank that waits for more than 0.1 s says so, and that is sent.
#[test]
fn a_third_commit_allocates_nothing() {
    let least = group(2, |ctx| {
        let mut state = state(10_000);
        let mut commit = || {
            let before = ALLOCATIONS.get();
            let batch = state.sampler.next_batch(ctx.rank(), 2).unwrap();
            state.sampler.record(&batch).unwrap();
            state.commit(ctx).unwrap();
            ALLOCATIONS.get() - before
        };
        commit();
        commit();
        (0..4).map(|_| commit()).min().unwrap()
    });
    assert_eq!(least, [0, 0]);
}
