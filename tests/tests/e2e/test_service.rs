//! The rows of Horovod's `test/single/test_service.py` about requests, by name: a request is a command that `kolo run` runs
//! on a cluster, its answer the exit code and the output. Those about services that are shut down are in
//! `runtime/tests/daemons/test_service.rs`, and `tests/tests/netns/test_service.rs` has the probes of interfaces side by side.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use kolo_harness::TestCluster;

use crate::run::{output, script, text};

#[tokio::test]
async fn requests_of_commands() {
    let cluster = TestCluster::builder().slots(5).start().await.unwrap();
    test_concurrent_requests_basic(&cluster).await;
    test_exit_code(&cluster).await;
    test_stream(&cluster).await;
    cluster.stop().await.unwrap();
}

async fn ended(command: Command) -> Output {
    let running = tokio::task::spawn_blocking(|| output(command));
    running.await.unwrap()
}

/// Each of five waits until all have begun: one after the other none would end.
async fn test_concurrent_requests_basic(cluster: &TestCluster) {
    let dir = tempfile::tempdir().unwrap();
    let requests: Vec<_> = (0..5)
        .map(|number| {
            let meets = format!(
                "cd {}; touch {number}; until [ \"$(ls | wc -l)\" = 5 ]; do sleep 0.02; done",
                dir.path().display()
            );
            let command = script(cluster.kolo().unwrap(), &["-n", "1"], &meets);
            tokio::spawn(ended(command))
        })
        .collect();
    for request in requests {
        let out = request.await.unwrap();
        assert!(out.status.success(), "{out:?}");
    }
}

/// A code that is not zero, of a command that says nothing.
async fn test_exit_code(cluster: &TestCluster) {
    let mut command = cluster.kolo().unwrap();
    command.args(["run", "false"]);
    let out = ended(command).await;
    assert_eq!((out.status.code(), out.stdout.len()), (Some(1), 0));
    let err = text(&out.stderr);
    assert!(err.contains("ended with exit code 1"), "{err}");
}

/// A stream that has nothing for a long time, and then all.
async fn test_stream(cluster: &TestCluster) {
    let began = Instant::now();
    let sleeps = "sleep 2; printf 'slept 2.0'";
    let command = script(cluster.kolo().unwrap(), &["--prefix", "none"], sleeps);
    let out = ended(command).await;
    assert_eq!(text(&out.stdout), "slept 2.0", "{out:?}");
    assert!(out.status.success() && began.elapsed() >= Duration::from_secs(2));
}
