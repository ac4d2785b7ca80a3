//! `kolo run` against a head that does not do what it should, and what it refuses before it asks anybody.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

use kolo_transport::wire::{SubmitFrame, WorkerSignal};
use rustix::process::{Pid, Signal, kill_process};

use crate::fake::Fake;
use crate::kolo::kolo;

const LIMIT: Duration = Duration::from_secs(30);

/// Waits until the head has seen it.
fn until(fake: &Fake, mut seen: impl FnMut(&mut crate::fake::HeadState) -> bool) {
    let start = Instant::now();
    while !fake.change(&mut seen) {
        assert!(start.elapsed() < LIMIT, "it did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_head_that_does_not_end_a_job_is_not_waited_for_and_the_exit_code_is_that_of_the_signal() {
    let fake = Fake::new();
    let mut child = fake
        .command(&["run", "--grace", "0", "sleep", "1"])
        .spawn()
        .unwrap();
    let pid = Pid::from_raw(child.id().try_into().unwrap()).unwrap();
    until(&fake, |state| !state.submitted.is_empty());
    kill_process(pid, Signal::TERM).unwrap();
    until(&fake, |state| state.told == [SubmitFrame::Stop]);
    kill_process(pid, Signal::ALARM).unwrap();
    until(&fake, |state| state.told.last() == Some(&SubmitFrame::Kill));
    let status = child.wait().unwrap();
    let mut text = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    assert_eq!(status.code(), Some(143), "{text}");
    assert!(
        text.contains("the head did not end job-000000000000004d in time; `kolo jobs job-"),
        "{text}"
    );
}

#[test]
fn signals_that_come_while_the_job_starts_wait_until_its_workers_run() {
    let fake = Fake::new();
    fake.change(|state| state.starting = true);
    // With a group of its own it has a parent in another one, as below a shell.
    let mut child = fake
        .command(&["run", "sleep", "1"])
        .process_group(0)
        .spawn()
        .unwrap();
    let pid = Pid::from_raw(child.id().try_into().unwrap()).unwrap();
    until(&fake, |state| !state.submitted.is_empty());
    for signal in [Signal::USR1, Signal::USR1, Signal::TSTP] {
        kill_process(pid, signal).unwrap();
    }
    until(&fake, |_| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.contains(") T ")
    });
    assert!(fake.change(|state| state.told.is_empty()));
    fake.change(|state| state.starting = false);
    let both = [WorkerSignal::User1, WorkerSignal::Stop].map(SubmitFrame::Signal);
    until(&fake, |state| state.told == both);
    kill_process(pid, Signal::CONT).unwrap();
    let goes_on = SubmitFrame::Signal(WorkerSignal::Continue);
    until(&fake, |state| state.told.last() == Some(&goes_on));
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn an_interrupt_is_told_in_words_that_any_head_understands() {
    let fake = Fake::new();
    let mut child = fake.command(&["run", "sleep", "1"]).spawn().unwrap();
    let pid = Pid::from_raw(child.id().try_into().unwrap()).unwrap();
    until(&fake, |state| !state.submitted.is_empty());
    kill_process(pid, Signal::INT).unwrap();
    if !kolo_process::ignores(2) {
        let words = [SubmitFrame::Interrupt, SubmitFrame::Stop];
        until(&fake, |state| state.told == words);
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn what_can_t_be_used_is_refused_before_anything_is_started() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, b"\xff").unwrap();
    let file = file.to_str().unwrap();
    for (args, part) in [
        (&["--output-dir", file, "true"][..], "it is no directory"),
        (
            &["--output-dir", "/proc/x", "true"],
            "--output-dir /proc/x: ",
        ),
        (
            &["--hostfile", "/no/hosts", "true"],
            "the hostfile can't be read",
        ),
        (&["--hostfile", file, "true"], "no text in UTF-8"),
        (
            &["--config-file", "/no/file", "true"],
            "the --config-file can't be read",
        ),
        (&["--config-file", file, "true"], "no text in UTF-8"),
        (&["-H", "a", "true"], "--hosts: entry 1, `a`"),
        (&["--", ""], "the program is an empty word"),
    ] {
        let args: Vec<&str> = ["run", "--local"]
            .iter()
            .filter(|arg| {
                **arg == "run"
                    || !args
                        .iter()
                        .any(|arg| arg.starts_with("-H") || *arg == "--hostfile")
            })
            .chain(args)
            .copied()
            .collect();
        let line = kolo(&args).bad(2);
        assert!(line.contains(part), "{args:?}: {line}");
    }
}

#[test]
fn a_dry_run_shows_hosts_that_are_addresses() {
    let table = kolo(&["run", "-H", "[fd00::2]:1,b:1", "--dry-run", "true"]).good();
    let rows: Vec<Vec<&str>> = table
        .lines()
        .map(|line| line.split_whitespace().take(3).collect())
        .collect();
    assert_eq!(rows[1], ["0", "fd00::2", "0"], "{table}");
    assert_eq!(rows[2], ["1", "b", "0"], "{table}");
}
