//! The rows of Horovod's `test/single/test_task_service.py`, by name. Where those look at the number of lines, these look
//! at every byte. kolo has no switch for what is captured: whoever wants one stream alone sends the other away.
//!
//! The two rows about a stream that fails on its way are in `tests/tests/netns/test_task_service.rs`; here is what happens
//! when the reader fails.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Output, Stdio};

use kolo_harness::{TestCluster, kolo};

use crate::run::{script, text};

const LINES: usize = 10_000;

/// Writes many lines.
fn cmd() -> String {
    format!("seq -f 'a very very useful log line #%.0f' {LINES}")
}

/// Writes one.
fn cmd_single_line() -> String {
    format!("{} | wc", cmd())
}

/// What [`cmd`] writes.
fn lines() -> String {
    let lines: Vec<String> = (1..=LINES)
        .map(|number| format!("a very very useful log line #{number}\n"))
        .collect();
    lines.concat()
}

/// Both streams at once.
fn cmd_with(stdout: &str, stderr: &str) -> String {
    format!("{{ {stderr}; }} >&2 & {stdout}; wait")
}

/// Runs it, with the streams that are wanted.
fn run(options: &[&str], command: &str, stdout: bool, stderr: bool) -> Output {
    let wanted = |is: bool| if is { Stdio::piped() } else { Stdio::null() };
    let out = script(kolo(), options, command)
        .stdout(wanted(stdout))
        .stderr(wanted(stderr))
        .spawn()
        .unwrap()
        .wait_with_output()
        .unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    out
}

/// Takes the time and the rank off each line, which must be there.
fn bare(stream: &[u8], name: &str) -> String {
    let prefix = format!("[0]<{name}>:");
    text(stream)
        .split_inclusive('\n')
        .map(|line| {
            let (time, rest) = line.split_once(' ').unwrap();
            assert!(time.len() == 24 && time.ends_with('Z'), "{line}");
            rest.strip_prefix(&prefix)
                .unwrap_or_else(|| panic!("{line}"))
        })
        .collect()
}

#[test]
fn test_run_command() {
    let command = cmd_with(&cmd_single_line(), &cmd_single_line());
    let out = run(&["--prefix", "none"], &command, true, true);
    assert_eq!(text(&out.stdout).lines().count(), 1, "{out:?}");
    assert_eq!(out.stdout, out.stderr);
    assert!(text(&out.stdout).contains(&LINES.to_string()));
}

#[test]
fn test_stream_command_output() {
    let out = run(&["--timestamps"], &cmd_with(&cmd(), &cmd()), true, true);
    let (stdout, stderr) = (bare(&out.stdout, "stdout"), bare(&out.stderr, "stderr"));
    assert!(stdout == lines() && stderr == lines());
}

#[test]
fn test_stream_command_output_stdout() {
    let command = cmd_with(&cmd(), &cmd_single_line());
    let out = run(&["--timestamps"], &command, true, false);
    assert!(bare(&out.stdout, "stdout") == lines());
}

#[test]
fn test_stream_command_output_stderr() {
    let command = cmd_with(&cmd_single_line(), &cmd());
    let out = run(&["--timestamps"], &command, false, true);
    assert!(bare(&out.stderr, "stderr") == lines());
}

#[test]
fn test_stream_command_output_neither() {
    run(&["--timestamps"], &cmd_with(&cmd(), &cmd()), false, false);
}

#[test]
fn test_stream_command_output_un_prefixed() {
    let command = cmd_with(&cmd(), &cmd());
    let out = run(&[], &command, true, true);
    let prefixed = |name: &str| lines().replace("a very", &format!("[0]<{name}>:a very"));
    assert!(text(&out.stdout) == prefixed("stdout") && text(&out.stderr) == prefixed("stderr"));
    let out = run(&["--prefix", "none"], &command, true, true);
    assert!(text(&out.stdout) == lines() && text(&out.stderr) == lines());
}

/// `test_stream_command_output_no_reconnect`, where the reader fails: the command fails, too.
/// (`a_reader_that_has_enough_ends_the_job` has the exit code.)
#[test]
fn test_stream_command_output_no_reconnect_of_the_launchers_reader() {
    let endless = cmd_with("yes", "yes");
    let read_some = |mut stream: Box<dyn Read + Send>| stream.read_exact(&mut [0; 1025]);
    let read_all =
        |mut stream: Box<dyn Read + Send>| std::io::copy(&mut stream, &mut std::io::sink());
    for faulty in ["stdout", "stderr"] {
        let mut child = script(kolo(), &[], &endless)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = Box::new(child.stdout.take().unwrap());
        let stderr = Box::new(child.stderr.take().unwrap());
        let (some, all): (Box<dyn Read + Send>, Box<dyn Read + Send>) = if faulty == "stdout" {
            (stdout, stderr)
        } else {
            (stderr, stdout)
        };
        let rest = std::thread::spawn(move || read_all(all));
        read_some(some).unwrap();
        assert!(!child.wait().unwrap().success(), "{faulty}");
        rest.join().unwrap().unwrap();
    }
}

/// Reads until a line is `last`; all that was read.
fn read_until(reader: &mut impl BufRead, last: &str) -> String {
    let mut all = String::new();
    loop {
        let begin = all.len();
        assert!(reader.read_line(&mut all).unwrap() > 0, "{all}");
        if all[begin..].trim_end().ends_with(last) {
            return all;
        }
    }
}

/// `test_stream_command_output_reconnect`, where the reader fails: who follows a job may go away and come back; the job
/// and the others do not notice, and what was written meanwhile is there.
#[tokio::test]
async fn test_stream_command_output_reconnect_of_one_who_follows() {
    let cluster = TestCluster::builder().start().await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let go = dir.path().join("go");
    let command = format!(
        "seq -f 'early %.0f' 100; echo begun; until [ -e {} ]; do sleep 0.02; done; \
         seq -f 'late %.0f' 100; echo end",
        go.display()
    );
    tokio::task::spawn_blocking(move || {
        let piped = |mut command: Command| {
            let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
            let stdout = BufReader::new(child.stdout.take().unwrap());
            (child, stdout)
        };
        let options = ["--prefix", "none"];
        let (mut job, mut out) = piped(script(cluster.kolo().unwrap(), &options, &command));
        let mut own = read_until(&mut out, "begun");
        let mut jobs = cluster.kolo().unwrap();
        let jobs = jobs.args(["--format", "json", "jobs"]).output().unwrap();
        let jobs: serde_json::Value = serde_json::from_slice(&jobs.stdout).unwrap();
        let id = jobs[0]["job"].as_str().unwrap();
        let follow = || {
            let mut command = cluster.kolo().unwrap();
            command.args(["logs", id, "--follow"]);
            piped(command)
        };
        let (mut faulty, mut reader) = follow();
        reader.read_exact(&mut [0; 1025]).unwrap();
        // It has nobody to write to any more.
        drop(reader);
        let (mut back, mut reader) = follow();
        let mut seen = read_until(&mut reader, "begun");
        std::fs::write(&go, "").unwrap();
        reader.read_to_string(&mut seen).unwrap();
        out.read_to_string(&mut own).unwrap();
        let expected: String = (1..=100)
            .map(|number| format!("early {number}\n"))
            .chain(["begun\n".to_owned()])
            .chain((1..=100).map(|number| format!("late {number}\n")))
            .chain(["end\n".to_owned()])
            .collect();
        assert_eq!(seen.replace("[0]<stdout>:", ""), expected);
        assert_eq!(own, expected);
        assert!(back.wait().unwrap().success() && job.wait().unwrap().success());
        faulty.wait().unwrap();
        cluster
    })
    .await
    .unwrap()
    .stop()
    .await
    .unwrap();
}
