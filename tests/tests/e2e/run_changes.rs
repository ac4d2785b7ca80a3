//! `kolo run` of jobs that go on: nodes that are drained, signals, and what is killed in the middle.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::time::Duration;

use kolo_harness::{TestCluster, kolo};
use rustix::process::{Signal, kill_process};

use crate::run::{pid, script, start};
use crate::run_elastic::{begin, cluster, end, healthy, lines};
use crate::support::{gone, soon};

/// Two nodes of two slots, at least one of them, and no failure is allowed.
const OPTIONS: [&str; 6] = [
    "--nnodes",
    "1:2",
    "--nproc-per-node",
    "2",
    "--max-restarts",
    "0",
];

/// Waits in a first group, where it ends with code 9 at TERM and at USR1; ends well in a later group of this size.
fn until_size(size: u32) -> String {
    format!(
        "if [ $KOLO_GENERATION -gt 1 ] && [ $WORLD_SIZE = {size} ]; then \
         echo $RANK/$WORLD_SIZE try $TORCHELASTIC_RESTART_COUNT; exit 0; fi; \
         trap 'exit 9' TERM USR1; echo $$; echo ready; while :; do sleep 0.05; done"
    )
}

/// The process ids that the workers have printed.
fn workers(printed: &[String]) -> Vec<u32> {
    let numbers = printed.iter().filter_map(|line| line.rsplit(':').next());
    numbers.filter_map(|number| number.parse().ok()).collect()
}

/// The ranks of a group of two that has not used up a restart.
const TWO: [&str; 2] = ["0/2 try 0", "1/2 try 0"];

async fn drain(cluster: &TestCluster, node: usize) {
    let mut kolo = cluster.kolo().unwrap();
    let node = cluster.node_id(node).unwrap().to_string();
    kolo.args(["node", "drain", &node]).stdin(Stdio::null());
    let out = tokio::task::spawn_blocking(move || kolo.output());
    let out = out.await.unwrap().unwrap();
    assert!(out.status.success(), "{out:?}");
}

#[tokio::test]
async fn a_drained_node_is_gone_without_and_its_workers_exits_are_no_failures() {
    // By an operator, and by a signal to the daemon.
    for by_operator in [true, false] {
        let mut cluster = cluster(&["a", "b"]).await;
        let command = script(cluster.kolo().unwrap(), &OPTIONS, &until_size(2));
        let started = begin(command, 4).await;
        healthy(&cluster).await;
        if by_operator {
            drain(&cluster, 0).await;
        } else {
            cluster.terminate_node(0).await.unwrap();
        }
        let (out, err, code) = end(started).await;
        assert_eq!(code, 0, "{err}");
        assert_eq!(out, TWO, "{err}");
        let line = err.lines().find(|line| line.contains("started anew"));
        let line = line.unwrap();
        assert!(
            line.contains("4 -> 2 workers, failures so far 0 of 0"),
            "{err}"
        );
        assert!(err.contains("kolo: a leaves: "), "{err}");
        cluster.stop().await.unwrap();
    }
}

#[tokio::test]
async fn a_daemon_that_is_killed_and_started_again_has_its_workers_again() {
    let mut cluster = cluster(&["a", "b"]).await;
    let command = script(cluster.kolo().unwrap(), &OPTIONS, &until_size(4));
    let started = begin(command, 4).await;
    healthy(&cluster).await;
    cluster.kill_node(1).unwrap();
    cluster.restart_node(1).await.unwrap();
    let (out, err, code) = end(started).await;
    assert_eq!(code, 0, "{err}");
    let last: Vec<&String> = out.iter().filter(|line| line.contains("try")).collect();
    assert_eq!(
        last,
        ["0/4 try 0", "1/4 try 0", "2/4 try 0", "3/4 try 0"],
        "{err}"
    );
    cluster.stop().await.unwrap();
}

#[tokio::test]
async fn a_killed_launcher_takes_the_workers_of_all_nodes_along() {
    let cluster = cluster(&["a", "b"]).await;
    let command = script(cluster.kolo().unwrap(), &OPTIONS, &until_size(2));
    let (mut child, _out, printed) = begin(command, 4).await;
    healthy(&cluster).await;
    child.kill().unwrap();
    child.wait().unwrap();
    let workers = workers(&printed);
    assert_eq!(workers.len(), 4);
    for worker in workers {
        gone(worker).await;
    }
    let over = cluster.wait_until("the cluster is idle", |info| info.running_jobs == 0);
    over.await.unwrap();
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

#[tokio::test]
async fn without_the_head_the_launcher_and_the_workers_end() {
    let mut cluster = cluster(&["a", "b"]).await;
    let command = script(cluster.kolo().unwrap(), &OPTIONS, &until_size(2));
    let started = begin(command, 4).await;
    healthy(&cluster).await;
    let workers = workers(&started.2);
    cluster.kill_head().unwrap();
    let (_, err, code) = end(started).await;
    assert_eq!(code, 4, "{err}");
    for worker in workers {
        gone(worker).await;
    }
}

#[test]
fn exits_after_a_user_signal_cost_no_restart_and_term_is_the_end() {
    let options = [
        "-n",
        "2",
        "--min-np",
        "1",
        "--max-restarts",
        "0",
        "--grace",
        "600",
    ];
    for signal in [Signal::USR1, Signal::TERM] {
        let command = script(kolo(), &options, &until_size(2));
        let (child, out, printed) = start(command, 2);
        kill_process(pid(&child), signal).unwrap();
        let (out, err, code) = rest(child, out);
        if signal == Signal::USR1 {
            assert_eq!(
                (code, &out[..]),
                (Some(0), &TWO.map(str::to_owned)[..]),
                "{err}"
            );
            assert!(
                err.contains("2 -> 2 workers, failures so far 0 of 0"),
                "{err}"
            );
            assert!(err.contains(": left: exit code 9"), "{err}");
        } else {
            assert_eq!((code, out.len()), (Some(143), 0), "{err}");
            assert!(!err.contains("started anew"), "{err}");
        }
        assert_eq!(workers(&printed).len(), 2);
    }
}

/// The rest of the output, the errors, and the exit code.
fn rest(
    mut child: std::process::Child,
    mut out: impl std::io::Read,
) -> (Vec<String>, String, Option<i32>) {
    let (mut printed, mut err) = (Vec::new(), String::new());
    out.read_to_end(&mut printed).unwrap();
    let mut stderr = child.stderr.take().unwrap();
    std::io::Read::read_to_string(&mut stderr, &mut err).unwrap();
    (lines(&printed), err, child.wait().unwrap().code())
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
    command.arg("run").args(OPTIONS).arg("--").arg(&program);
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
    let expected =
        "there is room for 2 workers; needed are at least 3, and no more came within 1 s";
    assert!(err.contains(expected), "{err}");
    assert!(err.contains("; the last failure: rank 2 on b "), "{err}");
    cluster.stop().await.unwrap();
}
