//! Many at once, and nothing left of them. Alone in its process, because it counts what is open and what is a child.
#![allow(clippy::unwrap_used)] // a failed step is a failed test

mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{LIMIT, children, script, warden, within};
use kolo_process::Warden;
use kolo_transport::wire::Exit;

const MANY: usize = 64;

/// The number of open files, once no thread of a warden's keeper is left: such a thread may be waking a task, and so keep
/// parts of a runtime, for a moment longer than the runtime lives.
fn open_files() -> usize {
    let keeps = |task: std::io::Result<std::fs::DirEntry>| {
        let name = task.and_then(|task| std::fs::read_to_string(task.path().join("comm")));
        name.is_ok_and(|name| name.trim_end() == "kolo-keeper")
    };
    let begin = Instant::now();
    while std::fs::read_dir("/proc/self/task").unwrap().any(keeps) {
        assert!(begin.elapsed() < LIMIT, "the keeper's thread has not ended");
        std::thread::yield_now();
    }
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

async fn round() {
    let warden = Arc::new(warden().await);
    let mut starts = tokio::task::JoinSet::new();
    let mut readers = Vec::new();
    for index in 0..MANY {
        // Every fourth can't be started.
        let mut request = script(&format!("echo {index} $$; read line <&3; exit {index}"));
        if index % 4 == 0 {
            request.request.program = "/no/such/program".into();
        }
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let request = request.fd(theirs.into(), 3);
        let (stdout, request) = (request.stdout, request.request);
        readers.push((ours, common::LineReader::new(stdout)));
        let warden = warden.clone();
        starts.spawn(async move { (index, warden.spawn(request).await) });
    }
    let mut started: Vec<_> = (0..MANY).map(|_| None).collect();
    while let Some(start) = within(starts.join_next()).await {
        let (index, child) = start.unwrap();
        started[index] = child.ok();
    }
    // All run at the same time.
    assert_eq!(children(warden.pid()).len(), MANY * 3 / 4);
    for (index, ((ours, mut lines), child)) in readers.into_iter().zip(started).enumerate() {
        let Some(child) = child else {
            assert_eq!(index % 4, 0);
            assert_eq!(common::rest(&mut lines).await, [""; 0]);
            continue;
        };
        let expected = format!("{index} {}", child.pid());
        assert_eq!(within(lines.next_line()).await, Some(expected));
        assert_eq!(child.exit(), None);
        drop(ours);
        let code = i32::try_from(index).unwrap();
        assert_eq!(within(child.wait()).await, Exit::Code(code));
        assert_eq!(within(lines.next_line()).await, None);
    }
    // Reaped, every one.
    assert_eq!(children(warden.pid()), []);
    within(Arc::into_inner(warden).unwrap().close()).await;
}

#[test]
fn many_at_once_leave_nothing_behind() {
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    // What the standard library and tokio open once for the process.
    runtime().block_on(round());
    let before = open_files();
    runtime().block_on(round());
    assert_eq!(open_files(), before);
    assert_eq!(children(std::process::id()), []);

    // A runtime that ends under a warden, and a start that is given up, can't wait; the processes are reaped all the same.
    let started = runtime().block_on(async {
        let warden = warden().await;
        let child = script("exec sleep 1000").start(&warden).await.child;
        // No warden: it writes for ever and reads nothing.
        let exe = Path::new("/usr/bin/yes");
        let given_up =
            tokio::time::timeout(Duration::from_millis(50), Warden::start(exe, common::OWNER))
                .await;
        assert!(given_up.is_err());
        (warden, child)
    });
    drop(started);
    let begin = Instant::now();
    while !children(std::process::id()).is_empty() || open_files() != before {
        assert!(
            begin.elapsed() < LIMIT,
            "{:?}",
            children(std::process::id())
        );
        std::thread::yield_now();
    }
}
