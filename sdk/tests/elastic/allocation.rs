//! What a commit costs.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Instant;

use kolo::collectives::{Communicator, local_group, peers};
use kolo::elastic::{Elastic, ElasticSampler, Parts, State};
use kolo::{Context, Rank, ReduceOp};

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
    let group = local_group(2).unwrap();
    let least = run(group, |ctx| {
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

/// Beside copying the state, a commit costs at most 1.2 times an all-reduce of 4 bytes. Not a test of every run: the machine must be idle.
///
/// `cargo test --release -p kolo --test elastic -- --ignored --nocapture a_commit_costs`
#[test]
#[ignore = "measures time"]
fn a_commit_costs_little_more_than_an_all_reduce() {
    const ROUNDS: u32 = 2_000;
    const OPERATIONS: u32 = 100;
    let folder = tempfile::tempdir().unwrap();
    let join = |rank| {
        let folder = folder.path().to_owned();
        std::thread::spawn(move || peers::Local::in_folder(folder).join(Rank(rank), 2).unwrap())
    };
    let joined: Vec<_> = [0, 1].map(join).into_iter().collect();
    let group: Vec<Communicator> = joined
        .into_iter()
        .map(|rank| rank.join().unwrap())
        .collect();
    // Nanoseconds of an all-reduce, of a commit, and of both in a group of one, by which the copy is known. The least of many
    // short rounds counts: that of a round in which the system ran both ranks at once.
    let measured = run(group, |ctx| {
        let alone = Context::for_tests(local_group(1).unwrap().remove(0));
        let (mut shared, mut own) = (state(0), state(0));
        let time = |round: &mut dyn FnMut()| {
            let start = Instant::now();
            (0..OPERATIONS).for_each(|_| round());
            start.elapsed().as_secs_f64() / f64::from(OPERATIONS) * 1e9
        };
        let reduce = |ctx: &Context| ctx.comm().all_reduce(&mut [1_u32], ReduceOp::Max).unwrap();
        let mut least = [f64::INFINITY; 4];
        for _ in 0..ROUNDS {
            let times = [
                time(&mut || reduce(ctx)),
                time(&mut || shared.commit(ctx).unwrap()),
                time(&mut || reduce(&alone)),
                time(&mut || own.commit(&alone).unwrap()),
            ];
            for (least, time) in least.iter_mut().zip(times) {
                *least = least.min(time);
            }
        }
        least
    });
    for [reduce, commit, reduce_alone, commit_alone] in measured {
        let copy = commit_alone - reduce_alone;
        let ratio = (commit - copy) / reduce;
        println!(
            "all-reduce {reduce:.0} ns, commit {commit:.0} ns, of which copy {copy:.0} ns: {ratio:.3} times"
        );
        assert!(ratio <= 1.2);
    }
}

fn run<R: Send>(group: Vec<Communicator>, rank: impl Fn(&Context) -> R + Sync) -> Vec<R> {
    let contexts: Vec<_> = group.into_iter().map(Context::for_tests).collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (contexts.iter())
            .map(|ctx| scope.spawn(|| rank(ctx)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}
