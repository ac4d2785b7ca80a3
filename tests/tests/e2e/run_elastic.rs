//! `kolo run` of jobs that go on: any program, started anew when something is lost or comes. Tests that are called `test_` are those of
//! torch's launcher and of Horovod's elastic runs with that name.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::Duration;

use kolo_harness::{TestCluster, kolo};
use kolo_transport::wire::{JobInfo, JobState};
use rustix::process::{Signal, kill_process};

use crate::run::{code, output, pid, script, start, text, words};
use crate::support::{gone, is_running, soon};

/// Two nodes of two slots, at least one of them, and no failure is allowed.
const OPTIONS: &str = "--nnodes 1:2 --nproc-per-node 2 --max-restarts 0";

/// A command that does not end by itself.
const WAIT: &str = "exec sleep 1000";

/// Waits in a first group, where it ends with code 9 at TERM and at USR1; ends well in a later group of this size.
fn until_size(size: u32) -> String {
    format!(
        "if [ $KOLO_GENERATION -gt 1 ] && [ $WORLD_SIZE = {size} ]; then \
         echo $RANK/$WORLD_SIZE local $LOCAL_RANK/$LOCAL_WORLD_SIZE group $GROUP_RANK/$GROUP_WORLD_SIZE \
         role $ROLE_RANK/$ROLE_WORLD_SIZE horovod $HOROVOD_RANK/$HOROVOD_SIZE try $TORCHELASTIC_RESTART_COUNT; exit 0; fi; \
         trap 'exit 9' TERM USR1; echo $$; echo ready; while :; do sleep 0.05; done"
    )
}

/// What the ranks of such a group say, on hosts of two, if no restart was used up.
fn whole(size: u32) -> Vec<String> {
    let hosts = size / 2;
    let line = |rank| {
        let (host, local) = (rank / 2, rank % 2);
        format!(
            "{rank}/{size} local {local}/2 group {host}/{hosts} role {rank}/{size} horovod {rank}/{size} try 0"
        )
    };
    (0..size).map(line).collect()
}

/// The lines of all ranks without their prefix, sorted.
fn lines(bytes: &[u8]) -> Vec<String> {
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

/// `kolo run` on this machine.
fn run(options: &[&str], program: &str) -> Output {
    output(script(kolo(), options, program))
}

/// The process ids that the workers have printed.
fn workers(printed: &[String]) -> Vec<u32> {
    let numbers = printed.iter().filter_map(|line| line.rsplit(':').next());
    numbers.filter_map(|number| number.parse().ok()).collect()
}

async fn cluster(names: &[&str]) -> TestCluster {
    let builder = TestCluster::builder().nodes(names.len()).slots(2);
    builder
        .hostnames(names.iter().copied())
        .start()
        .await
        .unwrap()
}

type Started = (Child, BufReader<ChildStdout>, Vec<String>);

/// Starts a job and waits until so many ranks are ready.
async fn begin(command: Command, ranks: usize) -> Started {
    let starting = tokio::task::spawn_blocking(move || start(command, ranks));
    soon(starting).await.unwrap()
}

/// Waits until the head knows that all run: a loss before that is one of the start.
async fn healthy(cluster: &TestCluster) {
    let is_healthy = |jobs: &[JobInfo]| jobs.iter().any(|job| job.state == JobState::Healthy);
    let healthy = cluster.wait_for_jobs("the job is healthy", is_healthy);
    healthy.await.unwrap();
}

/// The rest of the output, the errors, and the exit code.
fn rest((mut child, mut reader, _): Started) -> (Vec<String>, String, i32) {
    let (mut out, mut err) = (Vec::new(), String::new());
    reader.read_to_end(&mut out).unwrap();
    let mut stderr = child.stderr.take().unwrap();
    stderr.read_to_string(&mut err).unwrap();
    let status = child.wait().unwrap();
    (lines(&out), err, status.code().unwrap_or(-1))
}

async fn end(started: Started) -> (Vec<String>, String, i32) {
    let ending = tokio::task::spawn_blocking(move || rest(started));
    soon(ending).await.unwrap()
}

/// `kolo node WORD` of the node `a`.
async fn node_a(cluster: &TestCluster, word: &str) {
    let mut kolo = cluster.kolo().unwrap();
    kolo.args(["node", word, "a"]).stdin(Stdio::null());
    let out = tokio::task::spawn_blocking(move || kolo.output());
    let out = out.await.unwrap().unwrap();
    assert!(out.status.success(), "{out:?}");
}

#[test]
fn a_killed_worker_starts_the_group_anew_and_all_that_exit_with_0_end_it() {
    let dir = tempfile::tempdir().unwrap();
    let said = dir.path().join("said");
    let said = said.display();
    let script_text = format!(
        "echo $RANK/$WORLD_SIZE try $TORCHELASTIC_RESTART_COUNT/$TORCHELASTIC_MAX_RESTARTS gen $KOLO_GENERATION \
         group $GROUP_RANK/$GROUP_WORLD_SIZE port $MASTER_PORT meet $HOROVOD_GLOO_RENDEZVOUS_PORT; \
         [ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0; : > {said}.$RANK; [ $RANK = 1 ] || {WAIT}; \
         until [ -e {said}.0 ] && [ -e {said}.2 ]; do sleep 0.01; done; kill -9 $$"
    );
    let out = run(&["-n", "3", "--max-restarts", "2"], &script_text);
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
    let (anew, healed) = told[0].split_once("; healed in ").unwrap();
    assert_eq!(
        anew, "kolo: the group is started anew: 3 -> 3 workers, failures so far 1 of 2",
        "the reason was told before"
    );
    assert!(healed.ends_with('s'), "{healed}");
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
    let out = run(&["-n", "2", "--max-restarts", "2"], &script_text);
    assert_eq!(code(&out), 7, "{out:?}");
    let tries = lines(&out.stdout);
    for attempt in 0..=2 {
        let line = format!("try {attempt}");
        assert!(tries.contains(&line), "{tries:?}");
    }
    assert!(!tries.contains(&"try 3".to_owned()), "{tries:?}");
    let err = text(&out.stderr);
    assert!(
        err.contains("3 failures, allowed restarts: 2 (--max-restarts); the first: "),
        "{err}"
    );
    assert!(
        err.contains("rank 0 on ") && err.contains("[0]<stderr>:last words"),
        "{err}"
    );
    // Two failures with a restart, and the last one: none is told twice.
    assert!(err.matches(" (pid ").count() <= 3, "{err}");

    // Without restarts it is as it always was.
    let out = run(&["-n", "2", "--max-restarts", "0"], &script_text);
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

/// And when its daemon is back, the group is whole again.
#[tokio::test]
async fn a_lost_node_is_gone_without_and_costs_no_restart() {
    let mut cluster = cluster(&["a", "b"]).await;
    let command = script(cluster.kolo().unwrap(), &words(OPTIONS), &until_size(4));
    let (child, mut reader, printed) = begin(command, 4).await;
    healthy(&cluster).await;
    cluster.kill_node(0).unwrap();
    let two_are_ready = tokio::task::spawn_blocking(move || {
        let (mut text, mut ready) = (String::new(), 0);
        while ready < 2 {
            let from = text.len();
            assert!(reader.read_line(&mut text).unwrap() > 0, "{text}");
            ready += usize::from(text[from..].ends_with("ready\n"));
        }
        reader
    });
    let reader = soon(two_are_ready).await.unwrap();
    cluster.restart_node(0).await.unwrap();
    let (out, err, code) = end((child, reader, printed)).await;
    assert_eq!(code, 0, "{err}");
    assert_eq!(out, whole(4), "{err}");
    for part in [
        " on a: its node was lost: ",
        "the group is started anew: 4 -> 2 workers, failures so far 0 of 0",
        "there is room for more; 2 workers are stopped",
        "2 -> 4 workers, failures so far 0 of 0",
    ] {
        assert!(err.contains(part), "no `{part}` in {err}");
    }
    cluster.stop().await.unwrap();
}

#[tokio::test]
async fn a_drained_node_is_gone_without_and_its_workers_exits_are_no_failures() {
    let mut cluster = cluster(&["a", "b"]).await;
    // By an operator, and by a signal to the daemon.
    for by_operator in [true, false] {
        let command = script(cluster.kolo().unwrap(), &words(OPTIONS), &until_size(2));
        let started = begin(command, 4).await;
        healthy(&cluster).await;
        if by_operator {
            node_a(&cluster, "drain").await;
        } else {
            cluster.terminate_node(0).await.unwrap();
        }
        let (out, err, code) = end(started).await;
        assert_eq!(code, 0, "{err}");
        assert_eq!(out, whole(2), "{err}");
        let line = err.lines().find(|line| line.contains("started anew"));
        let line = line.unwrap();
        assert!(
            line.contains("4 -> 2 workers, failures so far 0 of 0"),
            "{err}"
        );
        assert!(err.contains("kolo: a leaves: "), "{err}");
        if by_operator {
            node_a(&cluster, "undrain").await;
        }
    }
    cluster.stop().await.unwrap();
}

/// Nobody is left to kill a discovery script that hangs.
#[tokio::test]
async fn a_killed_launcher_takes_its_discovery_script_along() {
    let cluster = cluster(&["a"]).await;
    let dir = tempfile::tempdir().unwrap();
    let hosts = dir.path().join("hosts.sh");
    // The first look tells the host, the next ones hang with a child.
    let text = "cd \"${0%/*}\"; if mkdir first 2>/dev/null; then echo a:2; exit; fi; \
                sleep 1000 & echo $$ $! > new; mv new pids; wait";
    std::fs::write(&hosts, text).unwrap();
    let discovery = format!("sh {}", hosts.display());
    let options = ["-n", "2", "--host-discovery-script", &discovery];
    let command = script(cluster.kolo().unwrap(), &options, &until_size(9));
    let (mut child, _out, printed) = begin(command, 2).await;
    let pids = dir.path().join("pids");
    let hangs = async {
        loop {
            match std::fs::read_to_string(&pids) {
                Ok(pids) => return pids,
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    };
    let pids = soon(hangs).await;
    child.kill().unwrap();
    child.wait().unwrap();
    let pids = pids.split_whitespace().map(|pid| pid.parse().unwrap());
    for pid in pids.chain(workers(&printed)) {
        gone(pid).await;
    }
    cluster.stop().await.unwrap();
}

/// Also `test_wrapper_fn_kill_script_process` of torch's launcher.
#[test]
fn exits_after_a_user_signal_cost_no_restart_and_term_is_the_end() {
    let options = words("-n 2 --min-np 1 --max-restarts 0 --grace 600");
    for signal in [Signal::USR1, Signal::TERM] {
        let command = script(kolo(), &options, &until_size(2));
        let started = start(command, 2);
        let workers = workers(&started.2);
        kill_process(pid(&started.0), signal).unwrap();
        let (out, err, code) = rest(started);
        if signal == Signal::USR1 {
            assert_eq!((code, out), (0, whole(2)), "{err}");
            assert!(
                err.contains("2 -> 2 workers, failures so far 0 of 0"),
                "{err}"
            );
            assert!(err.contains(": left: exit code 9"), "{err}");
        } else {
            assert_eq!((code, out.len()), (143, 0), "{err}");
            assert!(!err.contains("started anew"), "{err}");
        }
        assert_eq!(workers.len(), 2);
        assert!(!workers.into_iter().any(is_running));
    }
}

/// A group of the nodes that can run the program.
#[tokio::test]
async fn a_node_that_can_not_run_the_program_is_left_out_and_named() {
    let mut cluster = cluster(&["a", "b"]).await;
    cluster.terminate_node(1).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("train");
    let text = "#!/bin/sh\ntrap 'exit 0' TERM; echo ready; while :; do sleep 0.05; done\n";
    std::fs::write(&program, text).unwrap();
    std::fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    let mut command = cluster.kolo().unwrap();
    command
        .arg("run")
        .args(words(OPTIONS))
        .arg("--")
        .arg(&program);
    command.stdin(Stdio::null());
    let started = begin(command, 2).await;
    healthy(&cluster).await;
    let job = cluster.wait_for_jobs("there is a job", |jobs| jobs.len() == 1);
    let job = job.await.unwrap()[0].job;

    // It is on no host any more when the second one is asked.
    std::fs::remove_file(&program).unwrap();
    cluster.restart_node(1).await.unwrap();
    let left_out = async {
        loop {
            let info = cluster.job(job).await.unwrap();
            let membership = info.membership.unwrap();
            if let [left_out] = &membership.left_out[..] {
                return left_out.clone();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let left_out = soon(left_out).await;
    assert_eq!(left_out.hostname, "b");
    let expected = format!("the program `{}` does not exist", program.display());
    assert!(left_out.why.contains(&expected), "{left_out:?}");
    kill_process(pid(&started.0), Signal::TERM).unwrap();
    let (_, err, code) = end(started).await;
    assert_eq!(code, 143, "{err}");
    assert!(!err.contains("started anew"), "{err}");
    cluster.stop().await.unwrap();
}

#[tokio::test]
async fn fewer_workers_than_the_fewest_end_the_job_after_the_elastic_timeout() {
    let mut cluster = cluster(&["a", "b"]).await;
    let options = ["--min-np", "3", "--max-np", "4", "--elastic-timeout", "1"];
    let command = script(cluster.kolo().unwrap(), &options, &until_size(2));
    let started = begin(command, 4).await;
    healthy(&cluster).await;
    cluster.kill_node(1).unwrap();
    let (_, err, code) = end(started).await;
    assert_eq!(code, 1, "{err}");
    let expected = "there is room for 2 workers; needed are at least 3, and no more came within 1s";
    assert!(err.contains(expected), "{err}");
    assert!(err.contains("; the last failure: rank 2 on b "), "{err}");
    cluster.stop().await.unwrap();
}

#[test]
fn test_launch_elastic() {
    let options = ["--nnodes", "1:2", "--nproc-per-node", "4"];
    let out = run(
        &options,
        "echo $RANK/$WORLD_SIZE $LOCAL_RANK $TORCHELASTIC_MAX_RESTARTS",
    );
    assert_eq!(code(&out), 0, "{out:?}");
    // This machine is one host, so that the size can't change.
    assert_eq!(
        lines(&out.stdout),
        ["0/4 0 0", "1/4 1 0", "2/4 2 0", "3/4 3 0"]
    );
}

#[test]
fn test_launch_elastic_worker_raise_exception() {
    let out = run(&words(OPTIONS), &format!("[ $RANK = 1 ] && exit 9; {WAIT}"));
    assert_eq!(code(&out), 9, "{out:?}");
    let err = text(&out.stderr);
    // At the end, and when the group is stopped if all of it ran by then.
    let told = err.matches("rank 1 on ").count();
    assert!((1..=2).contains(&told), "{err}");
    assert!(!err.contains("rank 0 on "), "{err}");
    assert!(!err.contains("is started anew"), "{err}");
}

#[tokio::test]
async fn test_launch_elastic_multiple_agents() {
    let cluster = cluster(&["a", "b"]).await;
    let command = script(
        cluster.kolo().unwrap(),
        &words(OPTIONS),
        &format!("[ $WORLD_SIZE = 4 ] && echo $RANK of $GROUP_RANK && exit 0; {WAIT}"),
    );
    let running = tokio::task::spawn_blocking(move || output(command));
    let out = running.await.unwrap();
    assert_eq!(code(&out), 0, "{out:?}");
    assert_eq!(lines(&out.stdout), ["0 of 0", "1 of 0", "2 of 1", "3 of 1"]);
    cluster.stop().await.unwrap();
}

#[test]
fn test_reset_limit() {
    let options = ["-n", "1", "--max-restarts", "5", "--reset-limit", "1"];
    let out = run(&options, "echo try $TORCHELASTIC_RESTART_COUNT; exit 4");
    assert_eq!(code(&out), 4, "{out:?}");
    assert_eq!(lines(&out.stdout), ["try 0", "try 1"]);
    assert!(text(&out.stderr).contains("(--reset-limit)"), "{out:?}");
}
