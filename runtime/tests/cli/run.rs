//! `kolo run` against a head that does not do what it should, and what it refuses before it asks anybody.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::time::{Duration, Instant};

use kolo_transport::wire::{SubmitFrame, WorkerSignal};
use rustix::process::{Pid, Signal, kill_process};

use crate::fake::Fake;
use crate::kolo::{Ran, command, kolo};

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
fn a_third_signal_does_not_wait_for_a_head_that_was_told_to_kill() {
    let fake = Fake::new();
    let mut child = fake.command(&["run", "sleep", "1"]).spawn().unwrap();
    let pid = Pid::from_raw(child.id().try_into().unwrap()).unwrap();
    until(&fake, |state| !state.submitted.is_empty());
    kill_process(pid, Signal::TERM).unwrap();
    until(&fake, |state| state.told == [SubmitFrame::Stop]);
    // Those that come with the second count as the second, whose time none of them makes longer.
    let start = Instant::now();
    let status = loop {
        kill_process(pid, Signal::ALARM).unwrap();
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        assert!(start.elapsed() < LIMIT, "it did not end");
        std::thread::sleep(Duration::from_millis(20));
    };
    let mut text = String::new();
    let mut err = child.stderr.take().unwrap();
    err.read_to_string(&mut text).unwrap();
    assert_eq!(status.code(), Some(143), "{text}");
    assert!(
        text.contains(
            "a third signal came before the end of job-000000000000004d; `kolo jobs job-"
        ),
        "{text}"
    );
    let told = [SubmitFrame::Stop, SubmitFrame::Kill];
    assert!(fake.change(|state| state.told == told));
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
fn a_signal_before_the_job_begins_ends_it_in_order_and_one_for_workers_ends_nothing() {
    let fake = Fake::new();
    // A head that does not answer.
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    silent.set_read_timeout(Some(LIMIT)).unwrap();
    let mut child = fake
        .command(&["--connect-timeout", "600", "run", "sleep", "1"])
        .env("KOLO_HEAD", silent.local_addr().unwrap().to_string())
        .spawn()
        .unwrap();
    silent.recv(&mut [0; 2048]).unwrap();
    let pid = Pid::from_raw(child.id().try_into().unwrap()).unwrap();
    let mut err = BufReader::new(child.stderr.take().unwrap());
    kill_process(pid, Signal::USR1).unwrap();
    let mut line = String::new();
    err.read_line(&mut line).unwrap();
    assert!(line.starts_with("kolo: SIGUSR1: not passed on"), "{line}");
    kill_process(pid, Signal::ALARM).unwrap();
    let mut rest = String::new();
    err.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "kolo: SIGALRM: ended before the job began\n");
    assert_eq!(child.wait().unwrap().code(), Some(142));
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

/// `kolo run` on this machine, with the tools of this machine.
fn here(args: &[&str]) -> Ran {
    let mut run = command(Path::new("/nonexistent"), &[&["run"], args].concat());
    run.env("PATH", "/usr/local/bin:/usr/bin:/bin");
    Ran::of(&run.output().unwrap())
}

#[test]
fn a_dry_run_refuses_what_a_run_refuses_with_the_same_words() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let file = path("file");
    std::fs::write(&file, "no program").unwrap();
    // The kernel would refuse it, since it only begins as a program does.
    let damaged = path("damaged");
    std::fs::write(&damaged, b"\x7fELFxxxx").unwrap();
    std::fs::set_permissions(&damaged, std::fs::Permissions::from_mode(0o755)).unwrap();
    let long = "x".repeat(300);
    for (args, code) in [
        (&["--output-dir", &file, "true"][..], 2),
        (&["--output-dir", "/proc/x", "true"], 2),
        (&["--name", &long, "true"], 2),
        (&["-n", "1025", "true"], 2),
        (&["-e", "KOLO_RANK=1", "true"], 2),
        (&["--gpus-per-worker", "4000000", "true"], 2),
        (&["--gpus-per-worker", "4000", "true"], 2),
        (&["--cwd", "/no/such/folder", "true"], 126),
        (&["--cwd", &file, "true"], 126),
        (&["--", &file], 126),
        (&["--", &damaged], 126),
        (&["--interfaces", "nosuch0", "true"], 1),
        (&["no-such-program"], 127),
        (&["-H", "localhost:1", "no-such-program"], 127),
        (&["./no-such-program"], 127),
    ] {
        // The node of a run has an id that is drawn.
        let words = |line: String| match line.split_once("(node-") {
            Some((before, after)) => format!("{before}{}", &after[16..]),
            None => line,
        };
        let run = words(here(args).bad(code));
        let dry = words(here(&[&["--dry-run"], args].concat()).bad(code));
        assert_eq!(run, dry, "{args:?}");
        let json = here(&[&["--dry-run", "--format", "json"], args].concat());
        assert_eq!((json.code, json.out.as_str()), (code, ""), "{json:?}");
    }
    // It makes nothing.
    let out = path("a/b/c");
    here(&["--dry-run", "--output-dir", &out, "true"]).good();
    assert!(!dir.path().join("a").exists());
}

#[test]
fn a_job_that_takes_too_long_is_ended_with_a_word_on_each_rank() {
    let out = here(&[
        "-n",
        "2",
        "--timeout",
        "2s",
        "--grace",
        "1",
        "--",
        "sh",
        "-c",
        "echo step $RANK >&2; exec sleep 1000",
    ]);
    assert_eq!((out.code, out.out.as_str()), (124, ""), "{}", out.err);
    assert!(
        out.err
            .contains("kolo: the job has run for 2s, which is its --timeout, and is ended\n"),
        "{}",
        out.err
    );
    for rank in 0..2 {
        let told = out
            .err
            .lines()
            .find(|line| line.starts_with(&format!("kolo: rank {rank} on ")));
        let told = told.unwrap_or_else(|| panic!("{}", out.err));
        assert!(told.contains(") runs; last line at "), "{told}");
        assert!(told.ends_with(&format!("on stderr: step {rank}")), "{told}");
    }
    let out = here(&["--timeout", "1h", "true"]);
    assert_eq!((out.code, out.err.as_str()), (0, ""));
}

#[test]
fn a_dry_run_of_a_job_that_goes_on_shows_how_it_begins() {
    let out = here(&["--dry-run", "-n", "2", "--min-np", "1", "true"]);
    assert_eq!((out.code, out.err.as_str()), (0, ""), "{}", out.out);
    assert_eq!(
        out.out
            .lines()
            .filter(|line| line.starts_with(['0', '1']))
            .count(),
        2,
        "{}",
        out.out
    );
    let line = "the job begins so, and goes on with 1 to 2 workers; restarts after failures: 3\n";
    assert!(out.out.contains(line), "{}", out.out);
}

#[test]
fn output_goes_where_torchrun_has_it_and_what_is_redirected_is_not_shown() {
    let dir = tempfile::tempdir().unwrap();
    let logs = dir.path().to_str().unwrap();
    let out = here(&[
        "--standalone",
        "--nproc-per-node=2",
        "--log-dir",
        logs,
        "-r",
        "3",
        "-t",
        "1:2",
        "--role",
        "trainer",
        "--",
        "sh",
        "-c",
        "echo out $RANK $ROLE_NAME; echo err $RANK >&2",
    ]);
    assert_eq!((out.code, out.out.as_str()), (0, ""), "{}", out.err);
    let shown: Vec<&str> = out
        .err
        .lines()
        .filter(|line| line.starts_with('['))
        .collect();
    assert_eq!(shown, ["[1]<stderr>:err 1"]);
    let job = std::fs::read_dir(logs)
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    let read = |name: &str| std::fs::read_to_string(job.join("attempt_0").join(name)).unwrap();
    assert_eq!(read("0/stdout.log"), "out 0 trainer\n");
    assert_eq!(read("1/stderr.log"), "err 1\n");
}

#[test]
fn arguments_are_as_many_as_the_system_takes() {
    let mut args = vec!["--", "sh", "-c", "echo $#", "sh"];
    args.extend(std::iter::repeat_n("x", 50_000));
    let ran = here(&args);
    assert_eq!(
        (ran.code, ran.out.as_str()),
        (0, "[0]<stdout>:50000\n"),
        "{}",
        ran.err
    );
    // What the system does not take it says itself.
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.toml");
    let words = vec!["\"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\""; 20_000].join(",");
    std::fs::write(&file, format!("program = [\"true\", {words}]\n")).unwrap();
    let script = "ulimit -Ss 1024 && exec \"$@\"";
    let mut shell = std::process::Command::new("sh");
    shell
        .args([
            "-c",
            script,
            "sh",
            env!("CARGO_BIN_EXE_kolo"),
            "run",
            "--local",
            "--config-file",
        ])
        .arg(&file)
        .env_clear()
        .env("PATH", "/usr/bin:/bin");
    let ran = Ran::of(&shell.output().unwrap());
    let line = ran.bad(126);
    assert!(
        line.contains("arguments and environment are more than the system takes"),
        "{line}"
    );
}
