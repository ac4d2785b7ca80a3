//! Signals to `kolo run`.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kolo_harness::{TestCluster, kolo};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::run::{pid, script, start, text};
use crate::support::is_running;

const LIMIT: Duration = Duration::from_secs(60);

/// A program that says which signal it got, and ends.
const POLITE: &str = "trap 'echo int; exit 0' INT; trap 'echo term; exit 0' TERM; \
                      echo ready; while :; do sleep 0.05; done";

/// A program that is deaf, and tells its process id.
const DEAF: &str = "trap '' TERM INT; echo $$; echo ready; while :; do sleep 0.05; done";

/// Whether this process, and so what it starts, ignores a signal.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() >> (signal - 1) & 1 == 1
}

/// All that is left of its output; its exit code and its standard error.
fn finish(mut child: Child, mut out: impl Read) -> (Option<i32>, String, String) {
    let mut printed = Vec::new();
    out.read_to_end(&mut printed).unwrap();
    let mut err = Vec::new();
    child.stderr.take().unwrap().read_to_end(&mut err).unwrap();
    let code = child.wait().unwrap().code();
    (code, text(&printed), text(&err))
}

/// The letter of a process's state; `None` if it is gone.
fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(')').next()?.trim_start().chars().next()
}

#[track_caller]
fn until(what: &str, mut seen: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !seen() {
        assert!(begin.elapsed() < LIMIT, "it did not happen: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The process ids that workers have told.
fn told(lines: &[String]) -> Vec<u32> {
    lines
        .iter()
        .filter_map(|line| line.rsplit(':').next()?.parse().ok())
        .collect()
}

fn times(text: &str, part: &str) -> usize {
    text.matches(part).count()
}

#[test]
fn every_signal_that_would_kill_it_ends_the_job_in_order_and_is_named() {
    for (signal, number, name) in [
        (Signal::HUP, 1, "SIGHUP"),
        (Signal::INT, 2, "SIGINT"),
        (Signal::QUIT, 3, "SIGQUIT"),
        (Signal::ALARM, 14, "SIGALRM"),
        (Signal::TERM, 15, "SIGTERM"),
        (Signal::XCPU, 24, "SIGXCPU"),
        (Signal::VTALARM, 26, "SIGVTALRM"),
        (Signal::PROF, 27, "SIGPROF"),
        (Signal::IO, 29, "SIGIO"),
        (Signal::POWER, 30, "SIGPWR"),
    ] {
        if is_ignored(number) {
            // Under `nohup`, or in the background of a script: `kolo run` respects that.
            continue;
        }
        let command = script(kolo(), &["-n", "2", "--grace", "600"], POLITE);
        let (child, out, _) = start(command, 2);
        kill_process(pid(&child), signal).unwrap();
        let (code, printed, err) = finish(child, out);
        assert_eq!(code, Some(128 + number), "{err}");
        let heard = if number == 2 { ":int" } else { ":term" };
        assert_eq!(times(&printed, heard), 2, "{name}: {printed} {err}");
        let line = format!("kolo: {name}: ending the job; the workers have 10m");
        assert!(err.contains(&line), "{err}");
    }
}

#[test]
fn the_same_signal_to_the_command_and_to_its_group_is_one() {
    let saves =
        "trap 'sleep 0.5; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done";
    // With nothing between kolo and the program, and with a shell that waits for it.
    let below = format!("trap : INT TERM; sh -c \"{saves}\"; true");
    for program in [saves, &below] {
        let mut command = script(kolo(), &["-n", "2", "--grace", "600"], program);
        command.process_group(0);
        let (child, out, _) = start(command, 2);
        kill_process(pid(&child), Signal::TERM).unwrap();
        kill_process_group(pid(&child), Signal::TERM).unwrap();
        let (code, printed, err) = finish(child, out);
        assert_eq!(code, Some(143), "{err}");
        assert_eq!(times(&printed, ":saved"), 2, "{printed} {err}");
    }
}

#[test]
fn another_signal_or_the_same_after_a_second_ends_it_at_once() {
    for (second, pause) in [
        (Signal::ALARM, Duration::ZERO),
        (Signal::TERM, Duration::from_millis(1100)),
    ] {
        let begin = Instant::now();
        let command = script(kolo(), &["-n", "2", "--grace", "600"], DEAF);
        let (mut child, _out, lines) = start(command, 2);
        kill_process(pid(&child), Signal::TERM).unwrap();
        let mut err = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        err.read_line(&mut said).unwrap();
        assert!(said.contains("SIGTERM: ending the job"), "{said}");
        // What counts is the time between the two.
        std::thread::sleep(pause);
        kill_process(pid(&child), second).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(143));
        assert!(begin.elapsed() < LIMIT);
        for worker in told(&lines) {
            assert!(!is_running(worker), "{worker}");
        }
    }
}

#[test]
fn ctrl_c_is_int_then_term_then_kill_in_one_grace_time() {
    if is_ignored(2) {
        return;
    }
    let program = "case $RANK in \
         0) trap 'echo int; exit 0' INT; trap 'echo term; exit 0' TERM;; \
         1) trap '' INT; trap 'echo term; exit 0' TERM;; \
         2) trap '' INT TERM;; esac; \
         echo ready; while :; do sleep 0.05; done";
    let (child, out, _) = start(script(kolo(), &["-n", "3", "--grace", "2"], program), 3);
    let begin = Instant::now();
    kill_process(pid(&child), Signal::INT).unwrap();
    let (code, printed, err) = finish(child, out);
    assert_eq!(code, Some(130), "{err}");
    assert_eq!(printed, "[0]<stdout>:int\n[1]<stdout>:term\n", "{err}");
    assert!(begin.elapsed() >= Duration::from_secs(2), "{err}");
}

/// `SIGUSR1` is for a checkpoint, `SIGUSR2` for the end.
fn user_signals(command: Command) {
    let program = "trap 'echo usr1' USR1; trap 'echo usr2; exit 0' USR2; \
                   echo ready; while :; do sleep 0.05; done";
    let (child, mut out, _) = start(script(command, &["-n", "2"], program), 2);
    let mut lines = String::new();
    for round in 1..=2 {
        kill_process(pid(&child), Signal::USR1).unwrap();
        while times(&lines, ":usr1") < 2 * round {
            assert!(out.read_line(&mut lines).unwrap() > 0, "{lines}");
        }
    }
    kill_process(pid(&child), Signal::USR2).unwrap();
    let (code, printed, err) = finish(child, out);
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(times(&printed, ":usr2"), 2, "{printed} {err}");
    assert!(!err.contains("kolo: "), "{err}");
}

/// Longer than anybody waits for a launcher that says nothing.
const MISSED: Duration = Duration::from_secs(3);

/// Ctrl-Z, `fg`, and then the end by a word.
fn job_control(command: Command) {
    // A shell that starts others is not seen to stand still while one of them does before it runs.
    let dir = tempfile::tempdir().unwrap();
    let program = format!(
        "cd {}; mkfifo $RANK; exec 3<>$RANK; trap 'echo usr1; exit 0' USR1; echo $$; echo ready; \
         while :; do read -r line <&3; done",
        dir.path().display()
    );
    let mut command = script(command, &["-n", "2"], &program);
    // With a group of its own it has a parent in another one, as below a shell.
    command.process_group(0);
    let (child, out, lines) = start(command, 2);
    let workers = told(&lines);
    assert_eq!(workers.len(), 2, "{lines:?}");
    let all = |stopped: bool| {
        let is_stopped = |pid: u32| state(pid) == Some('T');
        workers.iter().all(|pid| is_stopped(*pid) == stopped) && is_stopped(child.id()) == stopped
    };
    for pause in [MISSED, Duration::ZERO] {
        kill_process_group(pid(&child), Signal::TSTP).unwrap();
        until("all stand still", || all(true));
        std::thread::sleep(pause);
        kill_process_group(pid(&child), Signal::CONT).unwrap();
        until("all go on", || all(false));
    }
    // What can't be caught stops nobody else.
    kill_process(pid(&child), Signal::STOP).unwrap();
    until("it stands still", || state(child.id()) == Some('T'));
    std::thread::sleep(MISSED);
    let goes_on = |pid: &u32| state(*pid).is_some_and(|state| state != 'T');
    assert!(workers.iter().all(goes_on));
    kill_process(pid(&child), Signal::USR1).unwrap();
    kill_process(pid(&child), Signal::CONT).unwrap();
    let (code, printed, err) = finish(child, out);
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(times(&printed, ":usr1"), 2, "{printed} {err}");
}

#[test]
fn user_signals_and_job_control_are_for_the_workers() {
    user_signals(kolo());
    job_control(kolo());
}

/// On one that misses a driver soon.
#[tokio::test]
async fn on_a_cluster_user_signals_and_job_control_are_for_the_workers() {
    let lease = Duration::from_secs(1);
    let cluster = TestCluster::builder().nodes(2).slots(1).lease(lease);
    let cluster = cluster.start().await.unwrap();
    let [one, other] = [(); 2].map(|()| cluster.kolo().unwrap());
    tokio::task::spawn_blocking(|| {
        user_signals(one);
        job_control(other);
    })
    .await
    .unwrap();
    cluster.stop().await.unwrap();
}

#[test]
fn workers_that_stand_still_end_when_they_are_told_to() {
    let mut command = script(kolo(), &["-n", "2", "--grace", "600"], POLITE);
    command.process_group(0);
    let (child, out, _) = start(command, 2);
    kill_process(pid(&child), Signal::TSTP).unwrap();
    until("it stands still", || state(child.id()) == Some('T'));
    // As `kill %1` of a shell: it goes on to hear it.
    kill_process(pid(&child), Signal::TERM).unwrap();
    kill_process(pid(&child), Signal::CONT).unwrap();
    let (code, printed, err) = finish(child, out);
    assert_eq!(code, Some(143), "{err}");
    assert_eq!(times(&printed, ":term"), 2, "{printed} {err}");
}

#[test]
fn output_that_nobody_reads_does_not_hold_up_a_second_signal() {
    // With the report in the same pipe, and in another that is read.
    for together in [true, false] {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let mut command = script(
            kolo(),
            &["-n", "2", "--grace", "600"],
            "echo $$ >&2; exec yes",
        );
        command.stdout(writer.try_clone().unwrap());
        if together {
            command.stderr(writer.try_clone().unwrap());
        } else {
            command.stderr(Stdio::piped());
        }
        let mut child = command.spawn().unwrap();
        drop(command);
        until("the pipe is full", || {
            let mut fds = [PollFd::new(&writer, PollFlags::OUT)];
            poll(&mut fds, Some(&Timespec::default())).unwrap() == 0
        });
        kill_process(pid(&child), Signal::TERM).unwrap();
        // Of two that wait the one with the lower number comes first.
        kill_process(pid(&child), Signal::PROF).unwrap();
        until("it ends", || child.try_wait().unwrap().is_some());
        assert_eq!(child.wait().unwrap().code(), Some(143));
        drop(reader);
    }
}

#[test]
fn in_a_session_of_its_own_and_in_the_background_of_a_script_signals_reach_the_workers() {
    let job = script(kolo(), &["-n", "2", "--grace", "600"], POLITE);
    let wrap = |words: &[&str]| {
        let mut command = Command::new(words[0]);
        let command_line = command.args(&words[1..]).arg(job.get_program());
        command_line.args(job.get_args()).stdin(Stdio::null());
        for (name, value) in job.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    };
    let (child, out, _) = start(wrap(&["setsid"]), 2);
    kill_process(pid(&child), Signal::TERM).unwrap();
    let (code, printed, err) = finish(child, out);
    assert_eq!(
        (code, times(&printed, ":term")),
        (Some(143), 2),
        "{printed} {err}"
    );

    // A shell without job control has what is in its background ignore SIGINT.
    let background = "\"$@\" & job=$!; echo job $job; wait $job; echo code $?";
    let (child, out, lines) = start(wrap(&["sh", "-c", background, "sh"]), 2);
    let job = lines
        .iter()
        .find_map(|line| line.strip_prefix("job "))
        .unwrap();
    let job = Pid::from_raw(job.parse().unwrap()).unwrap();
    kill_process(job, Signal::INT).unwrap();
    kill_process(job, Signal::TERM).unwrap();
    let (_, printed, err) = finish(child, out);
    assert_eq!(times(&printed, ":term"), 2, "{printed} {err}");
    assert!(printed.contains("code 143"), "{printed} {err}");
    assert!(!err.contains("SIGINT"), "{err}");
}

fn children(pid: u32) -> Vec<u32> {
    std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))
        .unwrap_or_default()
        .split_whitespace()
        .map(|pid| pid.parse().unwrap())
        .collect()
}

#[test]
fn if_either_of_its_two_processes_is_killed_nothing_is_left() {
    for front in [true, false] {
        let (child, out, lines) = start(script(kolo(), &["-n", "2"], DEAF), 2);
        let runner = children(child.id());
        assert_eq!(runner.len(), 1);
        let victim = if front { child.id() } else { runner[0] };
        kill_process(Pid::from_raw(victim as i32).unwrap(), Signal::KILL).unwrap();
        let (code, _, err) = finish(child, out);
        if !front {
            assert_eq!(code, Some(137), "{err}");
            assert!(
                err.contains("kolo: the process that ran the job ended with signal 9 (SIGKILL)"),
                "{err}"
            );
        }
        for pid in told(&lines).into_iter().chain(runner) {
            until("all are gone", || !is_running(pid));
        }
    }
}
