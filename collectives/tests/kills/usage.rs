//! What a process has: descriptors, threads, memory.

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

/// Of this process, in bytes.
pub(crate) fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

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
    assert!(!maps.contains("kolo-arena"), "shared memory is left");
}
