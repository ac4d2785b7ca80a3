//! What the tests of torch's launcher and of Horovod's elastic runs ask for, by their names: jobs of `kolo run` that are started anew.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::io::Read;
use std::process::Output;

use kolo_harness::kolo;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use crate::run::{cluster, code, output, pid, script, start, text};

/// A command that does not end by itself.
const WAIT: &str = "exec sleep 1000";
/// How often the group was started before, from its environment.
const TRY: &str = "echo try $TORCHELASTIC_RESTART_COUNT";

/// `kolo run` on this machine.
fn run(options: &[&str], script_text: &str) -> Output {
    let options = [options, &["--prefix", "none"]].concat();
    output(script(kolo(), &options, script_text))
}

fn sorted(output: &Output) -> Vec<String> {
    crate::run::sorted(&output.stdout)
}

fn restarts(output: &Output) -> usize {
    text(&output.stderr).matches("is started anew").count()
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
    assert_eq!(sorted(&out), ["0/4 0 0", "1/4 1 0", "2/4 2 0", "3/4 3 0"]);
}

#[test]
fn test_launch_elastic_worker_raise_exception() {
    let options = [
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "0",
    ];
    let out = run(&options, &format!("[ $RANK = 1 ] && exit 9; {WAIT}"));
    assert_eq!((code(&out), restarts(&out)), (9, 0), "{out:?}");
    let err = text(&out.stderr);
    // When the group is stopped, and at the end.
    assert_eq!(err.matches("rank 1 on ").count(), 2, "{err}");
    assert!(!err.contains("rank 0 on "), "{err}");
}

#[tokio::test]
async fn test_launch_elastic_multiple_agents() {
    let cluster = cluster(2).await;
    let command = script(
        cluster.kolo().unwrap(),
        &[
            "--nnodes",
            "1:2",
            "--nproc-per-node",
            "2",
            "--prefix",
            "none",
        ],
        &format!("[ $WORLD_SIZE = 4 ] && echo $RANK of $GROUP_RANK && exit 0; {WAIT}"),
    );
    let running = tokio::task::spawn_blocking(move || output(command));
    let out = running.await.unwrap();
    assert_eq!(code(&out), 0, "{out:?}");
    assert_eq!(sorted(&out), ["0 of 0", "1 of 0", "2 of 1", "3 of 1"]);
    cluster.stop().await.unwrap();
}

#[test]
fn test_min_max_nodes_parse() {
    for bad in ["a", "a:b", "1:2:3", "2:1", "0:1", ":2", "1:"] {
        let out = run(&["--nnodes", bad], "true");
        assert_eq!(code(&out), 2, "{bad}: {out:?}");
        let err = text(&out.stderr);
        assert!(err.contains(bad) && err.contains("nnodes"), "{bad}: {err}");
    }
}

#[test]
fn test_wrapper_fn_kill_script_process() {
    let command = script(
        kolo(),
        &["-n", "2", "--max-restarts", "3", "--prefix", "none"],
        &format!("echo $$ ready; {WAIT}"),
    );
    let (mut child, _reader, lines) = start(command, 2);
    kill_process(pid(&child), Signal::TERM).unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(128 + 15));
    for line in lines {
        let number = line.split(' ').next().unwrap().parse().unwrap();
        let worker = Pid::from_raw(number).unwrap();
        test_kill_process(worker).unwrap_err();
    }
    let mut err = String::new();
    let mut stderr = child.stderr.take().unwrap();
    stderr.read_to_string(&mut err).unwrap();
    assert!(!err.contains("started anew"), "{err}");
}

#[test]
fn test_all_ranks_failure() {
    let out = run(
        &["-n", "2", "--max-restarts", "1"],
        &format!("{TRY}; exit 5"),
    );
    assert_eq!(code(&out), 5, "{out:?}");
    // One that fails first takes the other along, perhaps before that has said a word.
    let tries = sorted(&out);
    assert!(tries.contains(&"try 1".to_owned()), "{tries:?}");
    assert!(!tries.contains(&"try 2".to_owned()), "{tries:?}");
    let err = text(&out.stderr);
    assert!(err.contains("2 failures, allowed restarts: 1"), "{err}");
}

#[test]
fn test_reset_limit() {
    let options = ["-n", "1", "--max-restarts", "5", "--reset-limit", "1"];
    let out = run(&options, &format!("{TRY}; exit 4"));
    assert_eq!(code(&out), 4, "{out:?}");
    assert_eq!(sorted(&out), ["try 0", "try 1"]);
    assert!(text(&out.stderr).contains("(reset_limit)"), "{out:?}");
}

#[tokio::test]
async fn test_min_hosts_timeout() {
    let cluster = cluster(1).await;
    // There is room for both workers, on one host.
    let options = [
        "--nnodes",
        "2:3",
        "--nproc-per-node",
        "1",
        "--elastic-timeout",
        "1",
    ];
    let command = script(cluster.kolo().unwrap(), &options, "true");
    let running = tokio::task::spawn_blocking(move || output(command));
    let out = running.await.unwrap();
    assert_eq!(code(&out), 1, "{out:?}");
    let err = text(&out.stderr);
    assert!(err.contains("needed are at least 2"), "{err}");
    cluster.stop().await.unwrap();
}
