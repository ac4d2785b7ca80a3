//! What links that callers drive need of the process, in a process of its own.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod common;

use std::fs::File;
use std::thread;
use std::time::{Duration, Instant};

use common::lent::{Bed, LONG, block_on, one_thread};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

fn open() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// No descriptor can be had as long as this lives.
struct Exhausted {
    before: Rlimit,
    _files: Vec<File>,
}

impl Exhausted {
    fn new() -> Self {
        let before = getrlimit(Resource::Nofile);
        let current = Some(256);
        setrlimit(Resource::Nofile, Rlimit { current, ..before }).unwrap();
        let files = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
        Self {
            before,
            _files: files,
        }
    }
}

impl Drop for Exhausted {
    fn drop(&mut self) {
        setrlimit(Resource::Nofile, self.before).unwrap();
    }
}

#[test]
fn links_go_on_without_descriptors_and_leave_none_behind() {
    let bed = Bed::new(LONG);
    let mut caller = block_on(bed.caller());
    block_on(caller.ask(0, b"the first"));
    // A runtime that has ended leaves nothing open.
    let before = open();
    one_thread().block_on(caller.until_driven_here());
    let begun = Instant::now();
    while open() > before {
        assert!(begun.elapsed() < LONG, "{} more are open", open() - before);
        thread::sleep(Duration::from_millis(1));
    }
    // One that drives the links hands them back, and takes them over again, when the process has no descriptor left.
    let runtime = one_thread();
    let late = one_thread();
    runtime.block_on(caller.until_driven_here());
    let exhausted = Exhausted::new();
    for _ in 0..2 {
        // By then nobody awaits anything there.
        thread::sleep(Duration::from_millis(200));
        block_on(async {
            let answer = bed.runtime.timeout(LONG, caller.ask(1, b"elsewhere"));
            assert!(answer.await.is_some());
        });
        runtime.block_on(caller.until_driven_here());
    }
    // A new one can't watch them then, and gets its answers.
    thread::sleep(Duration::from_millis(200));
    late.block_on(async {
        let answer = bed.runtime.timeout(LONG, caller.ask(1, b"late"));
        assert!(answer.await.is_some());
    });
    drop(exhausted);
}
