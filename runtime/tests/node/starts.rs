//! How jobs come to a node, and how their workers start or fail to.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use kolo_runtime::ProgramSource;
use kolo_transport::ids::{JobId, NodeId};
use kolo_transport::wire::{
    Exit, Milli, NodeEvent, NodeReply, NodeRequest, Program, ProgramHash, RefusalKind, Resources,
    StartWorkers,
};
use tempfile::TempDir;

use crate::bed::{Bed, own_program};

fn refused(reply: NodeReply) -> (RefusalKind, String) {
    match reply {
        NodeReply::Refused(refusal) => (refusal.kind, refusal.message),
        other => panic!("{other:?} is no refusal"),
    }
}

#[tokio::test]
async fn workers_get_their_environment_in_order_of_precedence() {
    let bed = Bed::start().await;
    let mut start = bed.job(2, "");
    start.env.insert("SHARED".to_owned(), "job".to_owned());
    start.env.insert("OVERRIDDEN".to_owned(), "job".to_owned());
    start.slots[1]
        .env
        .insert("OVERRIDDEN".to_owned(), "slot".to_owned());
    start
        .user_env
        .insert("KOLO_RANK".to_owned(), "9".to_owned());
    let per_worker = Resources {
        gpus: 1,
        ..Resources::default()
    };
    let reserve = NodeRequest::Reserve {
        job: start.job,
        per_worker,
        workers: 2,
        lease_ms: 60_000,
        program: start.program.hash,
        installed: None,
        health_check: None,
    };
    // The same again only renews it.
    for _ in 0..2 {
        let reply = bed.head.ask(reserve.clone()).await;
        let NodeReply::Reserved {
            has_program,
            free_port,
            ..
        } = reply
        else {
            panic!("{reply:?}");
        };
        assert!(has_program);
        assert_ne!(free_port, 0);
    }
    let reply = bed.head.ask(NodeRequest::Start(start.clone())).await;
    let NodeReply::Started { pids } = reply else {
        panic!("{reply:?}");
    };
    for _ in 0..2 {
        assert!(matches!(
            bed.head.event().await,
            NodeEvent::WorkerReady { .. }
        ));
    }
    let job = crate::bed::Job {
        bed: &bed,
        id: start.job,
        pids: pids.iter().map(|(_, pid)| *pid).collect(),
    };
    let mut calls = job.attach().await;
    for rank in 0..2 {
        let env = calls.call(rank, "env").await;
        let has = |line: &str| env.lines().any(|other| other == line);
        assert!(has("CUDA_VISIBLE_DEVICES=0,1"), "the union: {env}");
        assert!(has("SHARED=job"));
        assert!(has(if rank == 1 {
            "OVERRIDDEN=slot"
        } else {
            "OVERRIDDEN=job"
        }));
        assert!(has(&format!("KOLO_RANK={rank}")));
        assert!(has("KOLO_WORKER_FDS=3,4"));
        assert!(has(&format!("KOLO_JOB={}", start.job)));
        let pid = calls.call(rank, "pid").await;
        assert_eq!(pid, pids[rank as usize].1.to_string());
    }
    job.stop().await;
    bed.end().await;
}

#[tokio::test]
async fn what_is_not_there_is_not_reserved_and_comes_back_in_the_end() {
    let bed = Bed::start().await;
    let reserve = |job, cpus| NodeRequest::Reserve {
        job,
        per_worker: Resources {
            cpus: Milli::units(cpus),
            ..Resources::default()
        },
        workers: 1,
        lease_ms: 60_000,
        program: ProgramHash([0; 32]),
        installed: None,
        health_check: None,
    };
    let (first, second) = (JobId(1), JobId(2));
    let reply = bed.head.ask(reserve(first, 3)).await;
    assert!(
        matches!(
            reply,
            NodeReply::Reserved {
                has_program: false,
                ..
            }
        ),
        "{reply:?}"
    );
    let (kind, message) = refused(bed.head.ask(reserve(second, 2)).await);
    assert_eq!(kind, RefusalKind::Unplaceable);
    assert_eq!(message, "this node lacks cpus: requested 2, available 1");
    let reply = bed.head.ask(NodeRequest::Release { job: first }).await;
    assert_eq!(reply, NodeReply::Done);
    // Answered means free.
    let reply = bed.head.ask(reserve(second, 4)).await;
    assert!(matches!(reply, NodeReply::Reserved { .. }), "{reply:?}");
    let unknown = NodeRequest::Release { job: JobId(3) };
    assert_eq!(bed.head.ask(unknown).await, NodeReply::Done);
    bed.end().await;
}

#[tokio::test]
async fn a_reservation_that_is_not_committed_in_time_is_released() {
    let bed = Bed::start().await;
    let start = bed.job(1, "");
    let all = Resources {
        cpus: Milli::units(4),
        ..Resources::default()
    };
    let reserve = |job, lease_ms| NodeRequest::Reserve {
        job,
        per_worker: all.clone(),
        workers: 1,
        lease_ms,
        program: start.program.hash,
        installed: None,
        health_check: None,
    };
    bed.head.ask(reserve(start.job, 50)).await;
    let event = bed.head.event().await;
    assert_eq!(event, NodeEvent::JobGone { job: start.job });
    let (kind, message) = refused(bed.head.ask(NodeRequest::Start(start.clone())).await);
    assert_eq!(kind, RefusalKind::NotFound);
    assert!(message.contains("lease has ended"), "{message}");
    let reply = bed.head.ask(reserve(JobId(2), 60_000)).await;
    assert!(matches!(reply, NodeReply::Reserved { .. }), "{reply:?}");
    bed.end().await;
}

#[tokio::test]
async fn a_start_that_contradicts_itself_is_refused_and_holds_nothing() {
    let bed = Bed::start().await;
    let mut start = bed.job(2, "");
    bed.reserve(&start).await;
    start.slots[1].member.node = NodeId(7);
    let (kind, message) = refused(bed.head.ask(NodeRequest::Start(start.clone())).await);
    assert_eq!(kind, RefusalKind::Invalid);
    assert!(message.contains("is for node-"), "{message}");
    // It is as if it had never been there.
    let (kind, _) = refused(bed.head.ask(NodeRequest::Start(bed.job(2, ""))).await);
    assert_eq!(kind, RefusalKind::NotFound);
    // Nothing was reserved for more workers than that.
    let one = bed.job(1, "");
    bed.reserve(&one).await;
    let mut two = bed.job(2, "");
    two.job = one.job;
    let (kind, _) = refused(bed.head.ask(NodeRequest::Start(two)).await);
    assert_eq!(kind, RefusalKind::Invalid);
    bed.end().await;
}

#[tokio::test]
async fn a_program_that_is_not_on_the_node_is_not_started() {
    let bed = Bed::start().await;
    let mut start = bed.job(1, "");
    start.program.hash = ProgramHash([7; 32]);
    bed.reserve(&start).await;
    let (kind, message) = refused(bed.head.ask(NodeRequest::Start(start)).await);
    assert_eq!(kind, RefusalKind::NotFound);
    assert!(message.contains("must be sent before"), "{message}");
    bed.end().await;
}

/// A job whose program is a file of this content and mode; why it does not start.
async fn fails_as(content: &[u8], mode: u32) -> String {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("program");
    std::fs::write(&path, content).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    let hash = ProgramHash([1; 32]);
    let bed = Bed::start_with(|config| {
        config.programs = ProgramSource {
            preloaded: vec![(hash, path)],
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
    bed.stop(start.job).await;
    bed.end().await;
    failure.reason.unwrap()
}

#[tokio::test]
async fn a_file_that_is_not_executable_is_named() {
    let reason = fails_as(b"#!/bin/sh\n", 0o600).await;
    assert!(reason.contains("permission denied"), "{reason}");
}

#[tokio::test]
async fn a_file_that_is_no_program_is_named() {
    let reason = fails_as(b"just text", 0o700).await;
    assert!(
        reason.contains("not a program for this machine"),
        "{reason}"
    );
    let reason = fails_as(b"#!/no/such/interpreter\n", 0o700).await;
    assert!(reason.contains("interpreter"), "{reason}");
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

async fn killed_for(change: impl FnOnce(&mut StartWorkers), mode: &str) -> String {
    let bed = Bed::start().await;
    let mut start = bed.job(1, mode);
    change(&mut start);
    let failure = bed.fails(&start).await;
    assert_eq!(failure.exit, Exit::Signal(9));
    bed.stop(start.job).await;
    bed.end().await;
    failure.reason.unwrap()
}

#[tokio::test]
async fn a_program_that_never_says_hello_is_killed() {
    let reason = killed_for(|start| start.hello_timeout_ms = 100, "silent").await;
    assert!(
        reason.contains("did not say hello within 100ms"),
        "{reason}"
    );
}

#[tokio::test]
async fn a_program_that_talks_nonsense_is_killed() {
    let reason = killed_for(|_| {}, "garbage").await;
    assert!(reason.contains("its control socket"), "{reason}");
}

#[tokio::test]
async fn a_program_that_hangs_up_is_killed() {
    let reason = killed_for(|_| {}, "hang-up").await;
    assert!(reason.contains("closed its control socket"), "{reason}");
}

#[tokio::test]
async fn a_worker_that_becomes_another_program_is_refused() {
    let dir = TempDir::new().unwrap();
    let copy = dir.path().join("copy");
    std::fs::copy(own_program().1, &copy).unwrap();
    let name = copy.to_str().unwrap().to_owned();
    let change = |start: &mut StartWorkers| {
        start
            .user_env
            .insert("TEST_WORKER_COPY".to_owned(), name.clone());
    };
    let reason = killed_for(change, "replace").await;
    assert!(reason.contains(&name), "{reason}");
    assert!(reason.contains("not the job's program"), "{reason}");
}

#[tokio::test]
async fn a_worker_that_registers_other_functions_is_refused() {
    let bed = Bed::start().await;
    let start = bed.job(2, "registry");
    bed.launch(&start).await;
    // Whoever comes first is right; the other has to go.
    let mut events = [bed.head.event().await, bed.head.event().await];
    events.sort_by_key(|event| matches!(event, NodeEvent::WorkerExited { .. }));
    assert!(matches!(events[0], NodeEvent::WorkerReady { .. }));
    let NodeEvent::WorkerExited { failure, .. } = &events[1] else {
        panic!("{events:?}");
    };
    let reason = failure.reason.as_deref().unwrap();
    assert!(reason.contains("registers other functions"), "{reason}");
    bed.stop(start.job).await;
    bed.end().await;
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

#[tokio::test]
async fn many_workers_start_side_by_side() {
    let bed = Bed::start().await;
    let job = tokio::time::timeout(Duration::from_secs(60), bed.healthy(16, ""))
        .await
        .unwrap();
    let mut calls = job.attach().await;
    let ranks: Vec<u32> = (0..16).collect();
    calls.send(&ranks, "rank", b"").await;
    let mut seen = Vec::new();
    for _ in 0..16 {
        let (_, rank, _, body) = calls.result().await;
        assert_eq!(body, rank.to_string());
        seen.push(rank.0);
    }
    seen.sort_unstable();
    assert_eq!(seen, ranks);
    job.stop().await;
    bed.end().await;
}
