//! How processes end: stopped, left behind by their worker, closed with their warden, or without it.
#![allow(clippy::unwrap_used)] // a failed step is a failed test

mod common;

use std::time::{Duration, Instant};

use common::{LIMIT, Started, program, script, stat, stop, warden, within};
use kolo_process::{Signal, SignalError, SpawnError, Warden};
use kolo_transport::wire::Exit;
use rustix::process::Pid;

/// Long enough that it can't be what a passing test waits for.
const LONG: Duration = LIMIT;

fn kill(pid: u32) {
    let pid = Pid::from_raw(pid.cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

#[tokio::test]
async fn a_signal_of_users_reaches_who_does_something_about_it_and_nobody_else() {
    let warden = warden().await;
    // The shell in between and `sleep` would die of it.
    let program = "trap 'echo caught; exit 3' USR1; echo ready; while :; do sleep 0.01; done";
    for wrapper in [
        "sh -c \"$1\"; exit $?",
        "setsid --wait sh -c \"$1\"; exit $?",
    ] {
        let mut request = script(wrapper);
        request
            .request
            .args
            .extend(["sh".to_owned(), program.to_owned()]);
        let mut started = request.start(&warden).await;
        assert_eq!(started.line().await, "ready");
        started.child.signal(Signal::User2).unwrap();
        started.child.signal(Signal::User1).unwrap();
        assert_eq!(started.lines().await, ["caught"]);
        assert_eq!(within(started.child.gone()).await, Exit::Code(3));
        let error = started.child.signal(Signal::User1).unwrap_err();
        let pid = started.child.pid();
        assert_eq!(error, SignalError::Ended { pid });
    }
    within(warden.close()).await;
}

#[tokio::test]
async fn everything_below_a_process_stands_still_and_goes_on_with_it() {
    let warden = warden().await;
    let text = "setsid sh -c 'echo $$; exec sleep 1000' & wait";
    let mut started = script(text).start(&warden).await;
    let apart = started.line().await.parse().unwrap();
    for (signal, is) in [
        (Signal::Stop, true),
        (Signal::Continue, false),
        (Signal::Stop, true),
    ] {
        started.child.signal(signal).unwrap();
        for pid in [started.child.pid(), apart] {
            within(async {
                while (stat(pid).unwrap()[0] == "T") != is {
                    tokio::task::yield_now().await;
                }
            })
            .await;
        }
    }
    within(stop(&started.child, LONG)).await;
    assert_eq!(started.lines().await, [""; 0]);
    within(warden.close()).await;
}

/// Saves when it is asked to end, which takes a moment.
const SAVES: &str = "save() { sleep 0.2; echo saved; exit 3; }
    trap save TERM; echo ready; while :; do sleep 0.01; done";

/// What may stand between a worker and its program, which is `$1`.
const WRAPPERS: [(&str, &str); 8] = [
    ("nothing", "exec sh -c \"$1\""),
    ("a shell", "sh -c \"$1\"; exit $?"),
    (
        "another shell",
        "exec bash -c 'sh -c \"$1\"; exit $?' bash \"$1\"",
    ),
    (
        "two shells",
        "sh -c 'sh -c \"$1\"; exit $?' sh \"$1\"; exit $?",
    ),
    ("a shell that does not wait", "sh -c \"$1\" & sleep 1000"),
    ("a session", "setsid --wait sh -c \"$1\"; exit $?"),
    (
        "a group",
        "exec bash -c 'set -m; sh -c \"$1\" & wait' bash \"$1\"",
    ),
    (
        "two forks and a session",
        "(setsid sh -c \"$1\" &); sleep 1000",
    ),
];

fn wrapped(wrapper: &str, program: &str) -> common::Request {
    let mut request = script(wrapper);
    let arguments = ["sh".to_owned(), program.to_owned()];
    request.request.args.extend(arguments);
    request
}

#[tokio::test]
async fn everything_below_a_process_that_is_stopped_has_the_whole_grace() {
    let warden = warden().await;
    // All at once: one that is done does not take the others along.
    let mut all = Vec::new();
    for (name, wrapper) in WRAPPERS {
        let mut started = wrapped(wrapper, SAVES).start(&warden).await;
        assert_eq!(started.line().await, "ready", "{name}");
        all.push((name, started));
    }
    for (_, started) in &all {
        started.child.signal(Signal::Terminate).unwrap();
    }
    for (name, mut started) in all {
        within(started.child.gone()).await;
        assert_eq!(started.lines().await, ["saved"], "{name}");
    }
    within(warden.close()).await;
}

#[tokio::test]
async fn what_is_left_when_the_process_had_ended_before_the_stop_has_it_too() {
    let warden = warden().await;
    for start in [
        "sh -c \"$1\" & read line",
        "(setsid sh -c \"$1\" &); read line",
    ] {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let text = format!("{{ {start}; exit 4; }} <&3");
        let request = wrapped(&text, SAVES).fd(theirs.into(), 3);
        let mut started = request.start(&warden).await;
        assert_eq!(started.line().await, "ready");
        drop(ours);
        assert_eq!(within(started.child.wait()).await, Exit::Code(4));
        assert_eq!(within(stop(&started.child, LONG)).await, Exit::Code(4));
        assert_eq!(started.lines().await, ["saved"]);
    }
    within(warden.close()).await;
}

#[tokio::test]
async fn what_stands_still_can_obey_too() {
    let warden = warden().await;
    let text = "trap 'echo obeyed; exit' TERM; echo $$; kill -STOP $$; exit 7";
    for wrapper in ["exec sh -c \"$1\"", "setsid --wait sh -c \"$1\"; exit $?"] {
        let mut started = wrapped(wrapper, text).start(&warden).await;
        let pid: u32 = started.line().await.parse().unwrap();
        within(async {
            while stat(pid).unwrap()[0] != "T" {
                tokio::task::yield_now().await;
            }
        })
        .await;
        within(stop(&started.child, LONG)).await;
        assert_eq!(started.lines().await, ["obeyed"], "{wrapper}");
    }
    within(warden.close()).await;
}

#[tokio::test]
async fn what_ignores_a_notice_is_killed_after_the_grace_whatever_is_above_it() {
    let warden = warden().await;
    let deaf = "trap '' TERM; echo ready; while :; do sleep 1000; done";
    for (name, wrapper) in WRAPPERS {
        let mut started = wrapped(wrapper, deaf).start(&warden).await;
        assert_eq!(started.line().await, "ready", "{name}");
        let grace = Duration::from_millis(200);
        let begin = Instant::now();
        within(stop(&started.child, grace)).await;
        assert!(begin.elapsed() >= grace, "{name}");
        assert_eq!(started.lines().await, [""; 0], "{name}");
    }
    within(warden.close()).await;
}

#[tokio::test]
async fn a_notice_comes_once_to_each_process_through_however_many_workers() {
    let warden = warden().await;
    let counts = "trap 'echo term' TERM; trap 'echo int; exit' INT; echo ready; while :; do sleep 0.01; done";
    // A shell lets nothing that it starts with `&` hear an interrupt.
    let wrapper = "setsid -f sh -c \"$1\"; sleep 1000";
    let mut one = wrapped(wrapper, counts).start(&warden).await;
    assert_eq!(one.line().await, "ready");
    let deaf = "trap '' TERM INT; echo ready; while :; do sleep 1000; done";
    let mut other = script(deaf).start(&warden).await;
    assert_eq!(other.line().await, "ready");
    one.child.signal(Signal::Terminate).unwrap();
    assert_eq!(one.line().await, "term");
    // It has lost its worker by now, and is the business of all.
    for child in [&other.child, &one.child] {
        child.signal(Signal::Terminate).unwrap();
    }
    other.child.signal(Signal::Interrupt).unwrap();
    assert_eq!(one.lines().await, ["int"]);
    within(one.child.gone()).await;
    assert_eq!(other.child.exit(), None);
    within(stop(&other.child, Duration::ZERO)).await;
    within(warden.close()).await;
}

#[tokio::test]
async fn what_ignores_an_interrupt_is_terminated_when_nobody_is_left_who_does_not() {
    let warden = warden().await;
    // What a shell does not wait for ignores INT, and can't do anything else.
    let text =
        "sh -c \"trap 'echo terminated; exit' TERM; echo ready; while :; do sleep 0.01; done\" &
        (trap 'sleep 0.3; echo interrupted; exit' INT; echo ready; while :; do sleep 0.01; done)";
    let mut started = wrapped("sh -c \"$1\"; exit $?", text).start(&warden).await;
    for _ in 0..2 {
        assert_eq!(started.line().await, "ready");
    }
    started.child.signal(Signal::Interrupt).unwrap();
    // The second may need the first until it has ended.
    assert_eq!(started.lines().await, ["interrupted", "terminated"]);
    within(started.child.gone()).await;
    within(warden.close()).await;
}

#[tokio::test]
async fn what_a_process_forks_to_save_with_gets_no_notice() {
    let warden = warden().await;
    // The wrapper dies at once; what saves has a child by then, and a second notice comes.
    let saves = "trap 'sh -c \"echo saving; sleep 0.3; echo saved\"; exit' TERM; echo ready; while :; do sleep 0.01; done";
    let mut started = wrapped("sh -c \"$1\"; exit $?", saves).start(&warden).await;
    assert_eq!(started.line().await, "ready");
    started.child.signal(Signal::Terminate).unwrap();
    assert_eq!(started.line().await, "saving");
    within(stop(&started.child, LONG)).await;
    assert_eq!(started.lines().await, ["saved"]);
    within(warden.close()).await;
}

#[tokio::test]
async fn what_a_worker_leaves_in_its_group_or_session_lives_until_it_is_killed() {
    let warden = warden().await;
    let other = script("exec sleep 1000").start(&warden).await;
    let in_group = script("trap '' TERM INT; sleep 1000 & echo ready; exit 3");
    // With job control the shell gives it a group of its own.
    let text = "set -m; sleep 1000 & echo ready; exit 3";
    let in_session = program("/bin/bash", &["-c", text]);
    for request in [in_group, in_session] {
        let mut started = request.start(&warden).await;
        assert_eq!(within(started.child.wait()).await, Exit::Code(3));
        assert_eq!(started.line().await, "ready");
        started.child.signal(Signal::Kill).unwrap();
        // The pipe ends, so the other process that had it is gone.
        assert_eq!(started.lines().await, [""; 0]);
        assert_eq!(within(started.child.gone()).await, Exit::Code(3));
    }
    assert_eq!(other.child.exit(), None);
    within(warden.close()).await;
}

/// A worker that leaves a process behind, twice forked and in a session of its own, and then ends as it is told.
async fn with_a_stray(warden: &Warden) -> Started {
    let text = "(setsid sh -c 'echo stray; exec sleep 1000' &); read line; exit 4";
    let text = format!("{{ {text}; }} <&3");
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut started = script(&text).fd(theirs.into(), 3).start(warden).await;
    assert_eq!(started.line().await, "stray");
    drop(ours);
    assert_eq!(within(started.child.wait()).await, Exit::Code(4));
    started.child.signal(Signal::Kill).unwrap();
    assert_eq!(within(started.child.gone()).await, Exit::Code(4));
    started
}

#[tokio::test]
async fn a_stray_ends_when_the_last_worker_is_killed() {
    let warden = warden().await;
    let mut started = with_a_stray(&warden).await;
    assert_eq!(started.lines().await, [""; 0]);
    // And the warden is still good.
    let next = script("exit 9").start(&warden).await;
    assert_eq!(within(next.child.gone()).await, Exit::Code(9));
    within(warden.close()).await;
}

#[tokio::test]
async fn a_stray_may_live_while_other_workers_do_and_ends_on_close() {
    let warden = warden().await;
    let other = script("exec sleep 1000").start(&warden).await;
    let mut started = with_a_stray(&warden).await;
    let others = common::children(warden.pid());
    assert_eq!(others.len(), 2, "{others:?}");
    within(warden.close()).await;
    assert_eq!(started.lines().await, [""; 0]);
    assert_eq!(other.child.exit(), Some(Exit::Signal(9)));
    assert_eq!(others.into_iter().find_map(stat), None);
}

#[tokio::test]
async fn dropping_the_warden_ends_its_processes() {
    let warden = warden().await;
    let mut started = script("trap '' TERM INT; sleep 1000 & wait")
        .start(&warden)
        .await;
    drop(warden);
    assert_eq!(started.lines().await, [""; 0]);
    assert_eq!(within(started.child.wait()).await, Exit::Signal(9));
}

#[tokio::test]
async fn a_runtime_that_ends_ends_its_processes() {
    let request = script("trap '' TERM INT; sleep 1000 & wait");
    let (stdout, request) = (request.stdout, request.request);
    let short_lived = std::thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let warden = warden().await;
            let child = within(warden.spawn(request)).await.unwrap();
            (warden, child)
        })
    });
    let (warden, child) = short_lived.join().unwrap();
    // The handle lives on, and its runtime does not.
    let error = within(warden.spawn(script("exit 0").request))
        .await
        .unwrap_err();
    assert!(matches!(error, SpawnError::WardenLost { .. }), "{error}");
    assert!(warden.is_lost());
    assert_eq!(within(child.wait()).await, Exit::Unknown);
    let mut lines = common::LineReader::new(stdout);
    assert_eq!(common::rest(&mut lines).await, [""; 0]);
    within(warden.close()).await;
}

#[tokio::test]
async fn when_the_warden_is_killed_its_processes_die_and_are_reported() {
    let warden = warden().await;
    let mut plain = script("trap '' TERM INT; sleep 1000 & echo ready; wait")
        .start(&warden)
        .await;
    // In the worker's session, but in a group of its own.
    let mut apart = program(
        "/bin/bash",
        &["-c", "set -m; sleep 1000 & echo ready; wait"],
    )
    .start(&warden)
    .await;
    assert_eq!(plain.line().await, "ready");
    assert_eq!(apart.line().await, "ready");
    kill(warden.pid());
    for started in [&mut plain, &mut apart] {
        assert_eq!(within(started.child.gone()).await, Exit::Unknown);
        assert_eq!(started.lines().await, [""; 0]);
        assert!(matches!(
            started.child.signal(Signal::Kill),
            Err(SignalError::Ended { .. })
        ));
    }
    let request = script("exit 0").request;
    let error = within(warden.spawn(request)).await.unwrap_err();
    assert_eq!(
        error,
        SpawnError::WardenLost {
            path: "/bin/sh".into()
        }
    );
    within(warden.close()).await;
}

#[tokio::test]
async fn a_spawn_that_nobody_waits_for_leaves_no_process() {
    let warden = warden().await;
    let request = script("exec sleep 1000");
    let mut lines = common::LineReader::new(request.stdout);
    {
        let spawn = warden.spawn(request.request);
        tokio::pin!(spawn);
        // One poll sends the request.
        tokio::select! {
            biased;
            started = &mut spawn => panic!("{started:?}"),
            () = std::future::ready(()) => {}
        }
    }
    // It may have been sent or not; in both cases nobody has the pipe in the end, and the warden goes on.
    assert_eq!(common::rest(&mut lines).await, [""; 0]);
    let next = script("exit 9").start(&warden).await;
    assert_eq!(within(next.child.wait()).await, Exit::Code(9));
    within(warden.close()).await;
}

#[tokio::test]
async fn a_burst_of_forks_is_caught() {
    let warden = warden().await;
    // Each process leaves two, in sessions of their own, and ends at once: 2^6 at the end of the chain.
    let text = "f() { if [ $1 -gt 0 ]; then setsid sh -c \"$2\" sh $(($1 - 1)) \"$2\" & setsid sh -c \"$2\" sh $(($1 - 1)) \"$2\" &
        else echo end of a chain; exec sleep 1000; fi; }; f $1 \"$2\"";
    let mut request = script("sh -c \"$1\" sh 6 \"$1\"; exec sleep 1000");
    request
        .request
        .args
        .extend(["sh".to_owned(), text.to_owned()]);
    let mut started = request.start(&warden).await;
    // In the middle of it.
    assert_eq!(started.line().await, "end of a chain");
    within(warden.close()).await;
    started.lines().await;
}

#[tokio::test]
async fn what_a_process_leaves_behind_may_go_on_with_its_output() {
    let warden = warden().await;
    let text = "(read go; echo late; exec sleep 1000) < \"$1\" & setsid sleep 1000 & echo ended";
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    rustix::fs::mkfifoat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
    )
    .unwrap();
    let request = program("/bin/sh", &["-c", text, "sh", fifo.to_str().unwrap()]);
    let mut started = request.start(&warden).await;
    assert_eq!(started.line().await, "ended");
    assert_eq!(within(started.child.wait()).await, Exit::Code(0));
    // Another one that ends does not take it along.
    let other = script("exit 3").start(&warden).await;
    assert_eq!(within(other.child.wait()).await, Exit::Code(3));
    let go = within(tokio::task::spawn_blocking(move || {
        std::fs::write(fifo, "go\n")
    }))
    .await;
    go.unwrap().unwrap();
    assert_eq!(
        started.line().await,
        "late",
        "it lives, and its pipe is open"
    );
    // It may be gone: its end came before or after the other left the session of the first.
    other.child.signal(Signal::Kill).ok();
    started.child.signal(Signal::Kill).unwrap();
    // Also what has left the session: nobody else is there whose it might be.
    assert_eq!(started.lines().await, [""; 0]);
    within(started.child.gone()).await;
    // Again is no harm.
    assert!(started.child.signal(Signal::Kill).is_err());
    within(warden.close()).await;
}

#[tokio::test]
async fn a_directory_of_the_processes_is_gone_with_their_warden() {
    // Closed in order, and killed.
    for is_killed in [false, true] {
        let warden = warden().await;
        let (one, other) = tokio::join!(warden.folder(), warden.folder());
        let folder = one.unwrap().to_owned();
        assert_eq!(other.unwrap(), folder);
        let mode = std::os::unix::fs::PermissionsExt::mode(
            &std::fs::metadata(&folder).unwrap().permissions(),
        );
        assert_eq!(mode & 0o777, 0o700);
        let mut started = script(&format!("echo x > {}/file; echo ready", folder.display()))
            .start(&warden)
            .await;
        assert_eq!(started.line().await, "ready");
        assert!(folder.join("file").exists());
        if is_killed {
            kill(warden.pid());
            within(warden.gone()).await;
            assert!(warden.folder().await.is_ok_and(|path| path == folder));
        } else {
            within(warden.close()).await;
        }
        assert!(!folder.exists());
    }
}
