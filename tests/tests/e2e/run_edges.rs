//! `kolo run` with programs and surroundings that are not as one hopes.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use kolo_harness::{TestCluster, kolo};

use crate::run::{code, output, script, sorted, text, words};
use crate::support::is_running;

/// Nothing is left when `kolo run` has ended.
fn is_gone(pid: &[u8]) {
    let pid = text(pid).trim().parse().unwrap();
    assert!(!is_running(pid), "{pid} is left");
}

#[test]
fn what_a_worker_leaves_behind_may_finish_its_output() {
    // As `exec > >(tee log)` does it: whoever writes the last lines is no child that is waited for.
    let late = "(i=0; while [ $i -lt 2000 ]; do echo $i; i=$((i+1)); done; sleep 0.3; echo late) & echo early";
    let ran = output(script(kolo(), &["--prefix", "none"], late));
    let out = text(&ran.stdout);
    assert_eq!(ran.status.code(), Some(0), "{ran:?}");
    assert_eq!(out.lines().count(), 2002, "{}", text(&ran.stderr));
    assert!(out.ends_with("late\n"));
}

#[test]
fn what_a_worker_leaves_behind_for_ever_is_killed_after_the_grace() {
    let start = Instant::now();
    let options = ["--prefix", "none", "--grace", "0.3"];
    let ran = output(script(kolo(), &options, "sleep 1000 & echo $!"));
    assert_eq!(ran.status.code(), Some(0), "{ran:?}");
    assert!(start.elapsed() < Duration::from_secs(20));
    is_gone(&ran.stdout);
    // What holds no output is not waited for, and does not stay either.
    let start = Instant::now();
    let options = ["--prefix", "none", "--grace", "600"];
    let quiet = "sleep 1000 > /dev/null 2>&1 & echo $!";
    let ran = output(script(kolo(), &options, quiet));
    assert_eq!(ran.status.code(), Some(0), "{ran:?}");
    assert!(start.elapsed() < Duration::from_secs(60));
    is_gone(&ran.stdout);
}

#[test]
fn a_failure_is_told_without_waiting_for_what_was_left_behind() {
    let start = Instant::now();
    let ran = output(script(
        kolo(),
        &["-n", "2", "--grace", "600"],
        "sleep 1000 & if [ $RANK = 1 ]; then echo bad >&2; exit 7; fi; wait",
    ));
    assert_eq!(ran.status.code(), Some(7), "{ran:?}");
    assert!(start.elapsed() < Duration::from_secs(60), "{ran:?}");
    assert!(text(&ran.stderr).contains("[1]<stderr>:bad"), "{ran:?}");
}

#[test]
fn an_input_that_does_not_block_is_read_to_its_end() {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    rustix::io::ioctl_fionbio(&reader, true).unwrap();
    let mut command = kolo();
    command.args(["run", "--prefix", "none", "--", "sh", "-c", "echo up; cat"]);
    let mut child = command
        .stdin(Stdio::from(reader))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // It holds the other end of the pipe.
    drop(command);
    let mut out = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut out, &mut line).unwrap();
    assert_eq!(line, "up\n", "by now nothing was there to be read");
    let mut writer = std::fs::File::from(writer);
    writer.write_all(b"input\n").unwrap();
    drop(writer);
    line.clear();
    std::io::Read::read_to_string(&mut out, &mut line).unwrap();
    assert_eq!(line, "input\n");
    assert!(child.wait().unwrap().success());
}

#[test]
fn what_is_no_program_is_one_clear_line_and_nothing_is_started() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run");
    let refused = |args: &str, expected, part: &str| {
        let mut command = kolo();
        command.current_dir(dir.path()).arg("run").args(words(args));
        let ran = output(command);
        let err = text(&ran.stderr);
        assert_eq!((code(&ran), ran.stdout.len()), (expected, 0), "{err}");
        assert_eq!(err.lines().count(), 1, "{err}");
        assert!(err.contains(part), "{err}");
    };
    for (first, part) in [
        (
            "touch started\n",
            "neither a program for this machine nor a script",
        ),
        (
            "#!/no/such/interpreter\n",
            "`/no/such/interpreter`, which its first line names",
        ),
        ("#!/bin/sh\r\ntouch started\r\n", "carriage return"),
    ] {
        std::fs::write(&file, first).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        refused("-n 2 ./run", 126, part);
    }
    assert!(!dir.path().join("started").exists());
    let missing = "kolo: the program `no-such-program` is not in PATH (on ";
    refused("-n 2 no-such-program", 127, missing);
    refused("/nowhere/x", 127, "`/nowhere/x` does not exist (on ");
    refused("/etc/passwd", 126, "no execute permission");
    refused("--cwd /nowhere true", 126, "--cwd");
}

#[test]
fn what_the_head_refuses_has_the_exit_code_of_a_wrong_command_line() {
    let ran = output(script(kolo(), &["--interfaces", "nobody=lo"], "true"));
    assert_eq!(ran.status.code(), Some(2), "{ran:?}");
    assert!(text(&ran.stderr).contains("`nobody`"), "{ran:?}");
}

/// `kolo run` with limits of open files, as `ulimit` sets them.
fn limited(limits: &str, options: &str) -> std::process::Output {
    let mut command = std::process::Command::new("sh");
    let kolo = kolo();
    command
        .envs(
            kolo.get_envs()
                .filter_map(|(name, value)| Some((name, value?))),
        )
        .args(["-c", &format!("{limits}; exec \"$0\" run {options}")])
        .arg(kolo.get_program())
        .stdin(Stdio::null());
    output(command)
}

#[test]
fn many_workers_have_room_whatever_the_soft_limit_of_open_files_is() {
    let ran = limited("ulimit -Sn 128", "-n 40 -- sh -c 'ulimit -Sn'");
    assert_eq!(ran.status.code(), Some(0), "{ran:?}");
    // Where there is room the limit is not touched: workers have it from here.
    let ran = limited(
        "ulimit -Sn 1000",
        "-n 2 --prefix none -- sh -c 'ulimit -Sn'",
    );
    assert_eq!(text(&ran.stdout), "1000\n1000\n", "{ran:?}");
}

#[test]
fn a_host_without_room_for_the_workers_is_no_program_that_can_not_be_executed() {
    let ran = limited("ulimit -n 64", "-n 40 true");
    let err = text(&ran.stderr);
    assert_eq!(ran.status.code(), Some(1), "{err}");
    assert!(err.contains("open files"), "{err}");
}

#[test]
fn the_report_is_a_line_of_its_own_whatever_was_printed_before() {
    let mut command = kolo();
    command.args(["--format", "json"]);
    let out = output(script(command, &["-n", "1"], "printf partial >&2; exit 3"));
    assert_eq!(out.status.code(), Some(3), "{out:?}");
    let err = text(&out.stderr);
    let report: serde_json::Value = serde_json::from_str(err.lines().last().unwrap()).unwrap();
    assert_eq!(report["exit_code"], 3);
    assert!(err.lines().any(|line| line.ends_with("partial")), "{err}");

    // Also of a job that never was.
    let mut command = kolo();
    command.args(["--format", "json", "run", "--rdzv-backend", "etcd", "true"]);
    let out = output(command);
    assert_eq!(out.status.code(), Some(2), "{out:?}");
    let report: serde_json::Value = serde_json::from_slice(&out.stderr).unwrap();
    let reason = report["reason"].as_str().unwrap();
    assert!(reason.contains("allowed are c10d and static"), "{reason}");
    assert_eq!(report["exit_code"], 2);
}

#[tokio::test]
async fn on_a_cluster_nodes_of_one_name_are_told_apart() {
    let builder = TestCluster::builder().nodes(2).slots(2);
    let cluster = builder.hostnames(["one", "one"]).start().await.unwrap();
    let tell = "echo $HOROVOD_HOSTNAME $KOLO_HOSTNAME";
    let command = script(cluster.kolo().unwrap(), &["-n", "4"], tell);
    let out = tokio::task::spawn_blocking(move || output(command));
    let out = out.await.unwrap();
    assert_eq!(code(&out), 0, "{out:?}");
    let lines = sorted(&out.stdout);
    assert_eq!(lines[..2], ["[0]<stdout>:one one", "[1]<stdout>:one one"]);
    for (rank, line) in (2..).zip(&lines[2..]) {
        let start = format!("[{rank}]<stdout>:one-node-");
        assert!(line.starts_with(&start) && line.ends_with(" one"), "{line}");
    }
    let mut command = cluster.kolo().unwrap();
    command.args(["run", "-H", "one:2", "true"]);
    let out = tokio::task::spawn_blocking(move || output(command));
    let out = out.await.unwrap();
    let err = text(&out.stderr);
    assert_eq!(code(&out), 2, "{err}");
    assert!(
        err.contains("2 nodes of the cluster are called `one`: give the id"),
        "{err}"
    );
    cluster.stop().await.unwrap();
}
