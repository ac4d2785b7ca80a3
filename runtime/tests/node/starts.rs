//! How jobs come to a node, and how their workers start or fail to.

use std::os::unix::fs::PermissionsExt;

use kolo_runtime::ProgramSource;
use kolo_transport::wire::{Exit, Program, ProgramHash};
use tempfile::TempDir;

use crate::bed::{Bed, own_program};

#[tokio::test]
async fn a_file_that_can_not_be_executed_is_named() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("program");
    for (content, mode, part) in [
        (&b"#!/bin/sh\n"[..], 0o600, "permission denied"),
        (b"just text", 0o700, "not a program for this machine"),
        (b"#!/no/such/interpreter\n", 0o700, "interpreter"),
    ] {
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        let hash = ProgramHash([1; 32]);
        let bed = Bed::start_with(|config| {
            config.programs = ProgramSource {
                preloaded: vec![(hash, path.clone())],
                ..ProgramSource::default()
            };
        })
        .await;
        let mut start = bed.job(1, "");
        start.program = Program {
            hash,
            size: content.len() as u64,
            name: "program".to_owned(),
        };
        let failure = bed.fails(&start).await;
        assert_eq!(failure.pid, 0);
        assert!(failure.was_not_started(), "{failure}");
        let reason = failure.reason.unwrap();
        assert!(reason.contains(part), "{reason}");
        bed.stop(start.job).await;
        bed.end().await;
    }
}

#[tokio::test]
async fn a_program_that_ends_at_once_is_reported_with_its_last_words() {
    let bed = Bed::start().await;
    let start = bed.job(1, "exit");
    let failure = bed.fails(&start).await;
    assert_eq!(failure.exit, Exit::Code(3));
    assert_ne!(failure.pid, 0);
    assert_eq!(failure.hostname, "bed");
    assert_eq!(failure.stderr_tail, ["nothing to do"]);
    assert!(failure.reason.unwrap().contains("before it said hello"));
    bed.stop(start.job).await;
    bed.end().await;
}

#[tokio::test]
async fn a_program_that_does_not_speak_as_it_should_is_killed() {
    let dir = TempDir::new().unwrap();
    let copy = dir.path().join("copy");
    std::fs::copy(own_program().1, &copy).unwrap();
    let copy = copy.to_str().unwrap();
    for (mode, parts) in [
        ("garbage", ["its control socket", ""]),
        ("hang-up", ["closed its control socket", ""]),
        ("replace", [copy, "not the job's program"]),
    ] {
        let bed = Bed::start().await;
        let mut start = bed.job(1, mode);
        let name = "TEST_WORKER_COPY".to_owned();
        start.user_env.insert(name, copy.to_owned());
        let failure = bed.fails(&start).await;
        assert_eq!(failure.exit, Exit::Signal(9), "{mode}");
        let reason = failure.reason.unwrap();
        assert!(parts.iter().all(|part| reason.contains(part)), "{reason}");
        bed.stop(start.job).await;
        bed.end().await;
    }
}

#[tokio::test]
async fn a_node_without_a_warden_says_so_and_lives_on() {
    let bed = Bed::start_with(|config| config.warden_exe = Some("/no/such/warden".into())).await;
    let start = bed.job(1, "");
    let failure = bed.fails(&start).await;
    assert!(failure.reason.unwrap().contains("/no/such/warden"));
    bed.stop(start.job).await;
    bed.end().await;
}
