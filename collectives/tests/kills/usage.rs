//! What a process has: descriptors, threads, memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use super::*;

pub(crate) fn fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// What a process makes once, with its first runtime, and a thread when it blocks for the first time.
pub(crate) fn warm() {
    drop(Runtime::new().unwrap());
    kolo_transport::direct::block_on(|| None, || false, async {});
}

/// But for those of tests, which wait for each other and are named after them.
pub(crate) fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")));
    let is_test = |name: &String| {
        ["a_rank", "survivor", "child"]
            .iter()
            .any(|test| name.starts_with(test))
    };
    // One that has ended meanwhile has no name.
    names.flatten().filter(|name| !is_test(name)).count()
}

/// Bytes that are allocated in this process, but for what C libraries have. (Its memory by the system's word says less: allocators
/// keep some for later.)
pub(crate) fn allocated() -> usize {
    ALLOCATED.load(Relaxed)
}

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call is passed on to the system's allocator with the same arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`, which is that of the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`; all memory here comes from the system's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Waits until there are no more descriptors and threads than before: runtimes end in the background.
pub(crate) fn settled(before: (usize, usize)) {
    let begun = Instant::now();
    while fds() > before.0 || threads() > before.1 {
        let left = (fds(), threads());
        assert!(
            begun.elapsed() < LONG / 2,
            "descriptors and threads: {before:?} before, {left:?} after"
        );
        std::thread::sleep(Duration::from_millis(2));
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("memfd:kolo-"), "shared memory is left");
}
