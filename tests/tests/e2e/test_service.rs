//! The rows of Horovod's `test/single/test_service.py` about requests, by name: a request is a command that `kolo run` runs
//! on a cluster, its answer the exit code and the output. Those about services that are shut down are in
//! `runtime/tests/daemons/test_service.rs`, and `tests/tests/netns/test_service.rs` has the probes of interfaces side by side.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::time::{Duration, Instant};

use kolo_harness::TestCluster;

use crate::run::{output, script, text};

async fn cluster(slots: u32) -> TestCluster {
    let builder = TestCluster::builder().slots(slots);
    builder.start().await.unwrap()
}

/// Each of five waits until all have begun: one after the other none would end.
#[tokio::test]
async fn test_concurrent_requests_basic() {
    let cluster = cluster(5).await;
    let dir = tempfile::tempdir().unwrap();
    let requests: Vec<_> = (0..5)
        .map(|number| {
            let meets = format!(
                "cd {}; touch {number}; until [ \"$(ls | wc -l)\" = 5 ]; do sleep 0.02; done",
                dir.path().display()
            );
            let command = script(cluster.kolo().unwrap(), &["-n", "1"], &meets);
            tokio::task::spawn_blocking(|| output(command))
        })
        .collect();
    for request in requests {
        let out = request.await.unwrap();
        assert!(out.status.success(), "{out:?}");
    }
    cluster.stop().await.unwrap();
}

/// A code that is not zero, of a command that says nothing.
#[tokio::test]
async fn test_exit_code() {
    let cluster = cluster(1).await;
    let mut command = cluster.kolo().unwrap();
    command.args(["run", "false"]);
    let out = tokio::task::spawn_blocking(|| output(command))
        .await
        .unwrap();
    assert_eq!((out.status.code(), out.stdout.len()), (Some(1), 0));
    assert!(
        text(&out.stderr).contains("ended with exit code 1"),
        "{out:?}"
    );
    cluster.stop().await.unwrap();
}

/// A stream that has nothing for a long time, and then all.
#[tokio::test]
async fn test_stream() {
    let cluster = cluster(1).await;
    let began = Instant::now();
    let command = script(
        cluster.kolo().unwrap(),
        &["--prefix", "none"],
        "sleep 2; printf 'slept 2.0'",
    );
    let out = tokio::task::spawn_blocking(|| output(command))
        .await
        .unwrap();
    assert_eq!(text(&out.stdout), "slept 2.0", "{out:?}");
    assert!(out.status.success() && began.elapsed() >= Duration::from_secs(2));
    cluster.stop().await.unwrap();
}
