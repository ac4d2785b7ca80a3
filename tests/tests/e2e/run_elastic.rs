//! `kolo run` of jobs that go on: any program, started anew when something is lost or comes.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::collections::BTreeSet;
use std::io::{BufReader, Read};
use std::process::{Child, ChildStdout, Command};

use kolo_harness::{TestCluster, kolo};
use kolo_transport::wire::{JobInfo, JobState};

use crate::run::{code, output, script, start, text};
use crate::support::soon;

/// The lines of all ranks without their prefix, sorted.
pub fn lines(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<String> = text(bytes)
        .lines()
        .map(|line| {
            line.split_once(">:")
                .map_or(line, |(_, rest)| rest)
                .to_owned()
        })
        .collect();
    lines.sort();
    lines
}

/// A command that does not end by itself.
const WAIT: &str = "exec sleep 1000";

#[test]
fn a_killed_worker_starts_the_group_anew_and_all_that_exit_with_0_end_it() {
    let script_text = format!(
        "echo $RANK/$WORLD_SIZE try $TORCHELASTIC_RESTART_COUNT/$TORCHELASTIC_MAX_RESTARTS gen $KOLO_GENERATION \
         group $GROUP_RANK/$GROUP_WORLD_SIZE port $MASTER_PORT meet $HOROVOD_GLOO_RENDEZVOUS_PORT; \
         if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then [ $RANK = 1 ] && kill -9 $$; {WAIT}; fi"
    );
    let out = output(script(
        kolo(),
        &["-n", "3", "--max-restarts", "2"],
        &script_text,
    ));
    assert_eq!(code(&out), 0, "{out:?}");
    let lines = lines(&out.stdout);
    assert_eq!(lines.len(), 6, "{lines:?}");
    let mut ports = BTreeSet::new();
    for (index, line) in lines.iter().enumerate() {
        let (rank, attempt) = (index / 2, index % 2);
        let start = format!(
            "{rank}/3 try {attempt}/2 gen {} group 0/1 port ",
            attempt + 1
        );
        assert!(line.starts_with(&start), "{line}");
        ports.insert(line[start.len()..].to_owned());
    }
    assert_eq!(ports.len(), 2, "each group has ports of its own: {ports:?}");
    let words: Vec<BTreeSet<&str>> = ports.iter().map(|port| port.split(' ').collect()).collect();
    let common: Vec<_> = words[0].intersection(&words[1]).collect();
    assert_eq!(common, [&"meet"]);
    let err = text(&out.stderr);
    let told: Vec<&str> = err
        .lines()
        .filter(|line| line.contains("started anew"))
        .collect();
    assert_eq!(told.len(), 1, "{err}");
    assert_eq!(
        told[0], "kolo: the group is started anew: 3 -> 3 workers, failures so far 1 of 2",
        "the reason was told before"
    );
    let fell = err.lines().find(|line| line.contains("signal 9 (SIGKILL)"));
    let fell = fell.unwrap();
    assert!(fell.starts_with("kolo: rank 1 on "), "{err}");
    assert!(
        fell.ends_with("; 2 workers are stopped; restart 1 of 2"),
        "{err}"
    );
}

#[test]
fn a_rank_that_always_fails_uses_up_the_restarts_and_its_exit_code_is_the_command_s() {
    let script_text = format!(
        "echo try $TORCHELASTIC_RESTART_COUNT; [ $RANK = 0 ] && {{ echo last words >&2; exit 7; }}; {WAIT}"
    );
    let out = output(script(
        kolo(),
        &["-n", "2", "--max-restarts", "2"],
        &script_text,
    ));
    assert_eq!(code(&out), 7, "{out:?}");
    let tries = lines(&out.stdout);
    for attempt in 0..=2 {
        let line = format!("try {attempt}");
        assert!(tries.contains(&line), "{tries:?}");
    }
    assert!(!tries.contains(&"try 3".to_owned()), "{tries:?}");
    let err = text(&out.stderr);
    assert!(
        err.contains("3 failures, allowed restarts: 2 (max_restarts); the first: "),
        "{err}"
    );
    assert!(
        err.contains("rank 0 on ") && err.contains("[0]<stderr>: last words"),
        "{err}"
    );

    // Without restarts it is as it always was.
    let out = output(script(
        kolo(),
        &["-n", "2", "--max-restarts", "0"],
        &script_text,
    ));
    assert_eq!(code(&out), 7, "{out:?}");
    assert!(!text(&out.stderr).contains("restarts"), "{out:?}");
}

#[test]
fn a_rank_that_is_done_waits_for_nobody_and_is_started_again_with_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = script(
        kolo(),
        &["-n", "2", "--max-restarts", "1", "--pass-env", "DONE"],
        "echo $RANK try $TORCHELASTIC_RESTART_COUNT; if [ $RANK = 0 ]; then : > \"$DONE\"; exit 0; fi; \
         until [ -e \"$DONE\" ]; do sleep 0.01; done; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 3",
    );
    command.env("DONE", dir.path().join("done"));
    let out = output(command);
    assert_eq!(code(&out), 0, "{out:?}");
    assert_eq!(
        lines(&out.stdout),
        ["0 try 0", "0 try 1", "1 try 0", "1 try 1"]
    );
}

#[test]
fn options_that_mean_nothing_here_say_what_to_write() {
    for (options, instead) in [
        (
            &["--rdzv-backend", "etcd"][..],
            "allowed are c10d and static",
        ),
        (&["--rdzv-endpoint", "h:1"], "--head HOST:PORT"),
        (
            &["--elastic", "horovod", "--on-change", "restart"],
            "give one of them",
        ),
    ] {
        let mut command = kolo();
        command.arg("run").args(options).arg("true");
        let out = output(command);
        assert_eq!(code(&out), 2, "{out:?}");
        let err = text(&out.stderr);
        assert!(err.contains(instead) && err.lines().count() == 1, "{err}");
        let mut command = kolo();
        command.args(["--format", "json", "run"]).args(options);
        let out = output({
            command.arg("true");
            command
        });
        let line: serde_json::Value = serde_json::from_slice(&out.stderr).unwrap();
        assert_eq!(line["exit_code"], code(&out), "{line}");
        assert!(line["reason"].as_str().unwrap().contains(instead), "{line}");
    }
}

pub async fn cluster(names: &[&str]) -> TestCluster {
    let builder = TestCluster::builder().nodes(names.len()).slots(2);
    builder
        .hostnames(names.iter().copied())
        .start()
        .await
        .unwrap()
}

pub type Started = (Child, BufReader<ChildStdout>, Vec<String>);

/// Starts a job and waits until so many ranks are ready.
pub async fn begin(command: Command, ranks: usize) -> Started {
    let starting = tokio::task::spawn_blocking(move || start(command, ranks));
    soon(starting).await.unwrap()
}

/// Waits until the head knows that all run: a loss before that is one of the start.
pub async fn healthy(cluster: &TestCluster) {
    let is_healthy = |jobs: &[JobInfo]| jobs[0].state == JobState::Healthy;
    let healthy = cluster.wait_for_jobs("the job is healthy", is_healthy);
    healthy.await.unwrap();
}

/// The rest of the output, the errors, and the exit code.
pub async fn end((mut child, mut reader, _): Started) -> (Vec<String>, String, i32) {
    let ending = tokio::task::spawn_blocking(move || {
        let (mut out, mut err) = (Vec::new(), String::new());
        reader.read_to_end(&mut out).unwrap();
        let mut stderr = child.stderr.take().unwrap();
        stderr.read_to_string(&mut err).unwrap();
        let status = child.wait().unwrap();
        (lines(&out), err, status.code().unwrap_or(-1))
    });
    soon(ending).await.unwrap()
}

/// Ends when the group has this size.
fn until_size(size: u32) -> String {
    format!(
        "if [ $WORLD_SIZE = {size} ]; then \
         echo $RANK/$WORLD_SIZE local $LOCAL_RANK/$LOCAL_WORLD_SIZE group $GROUP_RANK/$GROUP_WORLD_SIZE \
         role $ROLE_RANK/$ROLE_WORLD_SIZE horovod $HOROVOD_RANK/$HOROVOD_SIZE try $TORCHELASTIC_RESTART_COUNT; \
         else echo ready; {WAIT}; fi"
    )
}

#[tokio::test]
async fn a_lost_node_is_gone_without_and_costs_no_restart() {
    let mut cluster = cluster(&["a", "b"]).await;
    let options = [
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "0",
    ];
    let command = script(cluster.kolo().unwrap(), &options, &until_size(2));
    let started = begin(command, 4).await;
    healthy(&cluster).await;
    cluster.kill_node(0).unwrap();
    let (out, err, code) = end(started).await;
    assert_eq!(code, 0, "{err}");
    assert_eq!(
        out,
        [
            "0/2 local 0/2 group 0/1 role 0/2 horovod 0/2 try 0",
            "1/2 local 1/2 group 0/1 role 1/2 horovod 1/2 try 0"
        ],
        "{err}"
    );
    assert!(
        err.contains("the group is started anew: 4 -> 2 workers, failures so far 0 of 0"),
        "{err}"
    );
    assert!(err.contains(" on a: its node was lost: "), "{err}");
    cluster.stop().await.unwrap();
}

/// As collectives do: the survivors fail within milliseconds, and the head hears of the host later.
#[tokio::test]
async fn a_lost_node_costs_no_restart_though_its_peers_fail_first() {
    let mut cluster = cluster(&["a", "b"]).await;
    let options = [
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "0",
        "--pass-env",
        "GONE",
    ];
    let dir = tempfile::tempdir().unwrap();
    let gone = dir.path().join("gone");
    let text = "if [ $WORLD_SIZE = 1 ]; then echo alone try $TORCHELASTIC_RESTART_COUNT; exit 0; fi; echo ready; \
                if [ $HOROVOD_HOSTNAME = a ]; then until [ -e \"$GONE\" ]; do sleep 0.01; done; exit 1; fi; exec sleep 1000";
    let mut command = script(cluster.kolo().unwrap(), &options, text);
    command.env("GONE", &gone);
    let started = begin(command, 2).await;
    healthy(&cluster).await;
    // Nothing is heard of the node from now on.
    cluster.pause_node(1).unwrap();
    std::fs::write(&gone, "").unwrap();
    let is_stopped = |jobs: &[JobInfo]| jobs[0].state == JobState::Recovering;
    let stopped = cluster.wait_for_jobs("the group is stopped", is_stopped);
    stopped.await.unwrap();
    cluster.kill_node(1).unwrap();
    let (out, err, code) = end(started).await;
    assert_eq!(
        (code, out.as_slice()),
        (0, &["alone try 0".to_owned()][..]),
        "{err}"
    );
    cluster.stop().await.unwrap();
}

#[tokio::test]
async fn a_node_that_joins_starts_the_group_anew_with_more() {
    let mut cluster = cluster(&["a", "b"]).await;
    cluster.terminate_node(1).await.unwrap();
    let options = [
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "0",
    ];
    let command = script(cluster.kolo().unwrap(), &options, &until_size(4));
    let started = begin(command, 2).await;
    healthy(&cluster).await;
    cluster.restart_node(1).await.unwrap();
    let (out, err, code) = end(started).await;
    assert_eq!(code, 0, "{err}");
    let expected: Vec<String> = (0..4)
        .map(|rank| {
            let (group, local) = (rank / 2, rank % 2);
            format!("{rank}/4 local {local}/2 group {group}/2 role {rank}/4 horovod {rank}/4 try 0")
        })
        .collect();
    assert_eq!(out, expected, "{err}");
    assert!(
        err.contains("there is room for more; 2 workers are stopped")
            && err.contains("2 -> 4 workers, failures so far 0 of 0"),
        "{err}"
    );
    cluster.stop().await.unwrap();
}
