//! How processes end: stopped, left behind by their worker, closed with their warden, or without it.
#![allow(clippy::unwrap_used)] // a failed step is a failed test

mod common;

use std::time::{Duration, Instant};

use common::{LIMIT, Started, program, script, stat, warden, within};
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
async fn a_process_that_obeys_term_is_not_killed() {
    let warden = warden().await;
    let text = "trap 'echo got TERM; exit 5' TERM; sleep 1000 & echo ready; wait; wait";
    let mut started = script(text).start(&warden).await;
    assert_eq!(started.line().await, "ready");
    assert_eq!(within(started.child.stop(LONG)).await, Exit::Code(5));
    assert_eq!(started.lines().await, ["got TERM"]);
    // Again is no harm.
    assert_eq!(within(started.child.stop(LONG)).await, Exit::Code(5));
    within(warden.close()).await;
}

#[tokio::test]
async fn a_process_that_ignores_term_is_killed_after_the_grace() {
    let warden = warden().await;
    let text = "trap '' TERM; echo ready; while :; do sleep 1000; done";
    let mut started = script(text).start(&warden).await;
    assert_eq!(started.line().await, "ready");
    let grace = Duration::from_millis(200);
    let begin = Instant::now();
    assert_eq!(within(started.child.stop(grace)).await, Exit::Signal(9));
    assert!(begin.elapsed() >= grace);
    // `sleep` ignored it too and was in the group.
    assert_eq!(started.lines().await, [""; 0]);
    within(warden.close()).await;
}

#[tokio::test]
async fn a_process_that_stands_still_can_obey_too() {
    let warden = warden().await;
    let mut started = script("trap 'exit 6' TERM; echo ready; kill -STOP $$; exit 7")
        .start(&warden)
        .await;
    assert_eq!(started.line().await, "ready");
    let pid = started.child.pid();
    within(async {
        while stat(pid).unwrap()[0] != "T" {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let exit = within(started.child.stop(LONG)).await;
    assert_eq!(exit, Exit::Code(6));
    within(warden.close()).await;
}

#[tokio::test]
async fn signals_go_to_the_whole_group() {
    let warden = warden().await;
    let text = "(trap 'echo child; exit' USR1; echo ready; while :; do sleep 0.01; done) &
        trap 'echo leader' USR1; trap '' TERM; wait; wait";
    let mut started = script(text).start(&warden).await;
    assert_eq!(started.line().await, "ready");
    // The subshell's own sleep dies of it.
    started.child.signal(Signal::User1).unwrap();
    let mut lines = started.lines().await;
    lines.sort_unstable();
    assert_eq!(lines, ["child", "leader"]);
    within(started.child.wait()).await;
    let error = started.child.signal(Signal::User1).unwrap_err();
    let pid = started.child.pid();
    assert_eq!(error, SignalError::Ended { pid });
    within(warden.close()).await;
}

#[tokio::test]
async fn what_a_worker_leaves_in_its_group_or_session_ends_with_it() {
    let warden = warden().await;
    let other = script("exec sleep 1000").start(&warden).await;
    let in_group = script("trap '' TERM HUP; sleep 1000 & echo ready; exit 3");
    // With job control the shell gives it a group of its own.
    let text = "set -m; sleep 1000 & echo ready; exit 3";
    let in_session = program("/bin/bash", &["-c", text]);
    for request in [in_group, in_session] {
        let mut started = request.start(&warden).await;
        assert_eq!(within(started.child.wait()).await, Exit::Code(3));
        // The pipe ends, so the other process that had it is gone.
        assert_eq!(started.lines().await, ["ready"]);
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
    started
}

#[tokio::test]
async fn a_stray_ends_when_the_last_worker_has_ended() {
    let warden = warden().await;
    let mut started = with_a_stray(&warden).await;
    assert_eq!(started.lines().await, [""; 0]);
    // And the warden is still good.
    let next = script("exit 9").start(&warden).await;
    assert_eq!(within(next.child.wait()).await, Exit::Code(9));
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
    let mut started = script("trap '' TERM HUP; sleep 1000 & wait")
        .start(&warden)
        .await;
    drop(warden);
    assert_eq!(started.lines().await, [""; 0]);
    assert_eq!(within(started.child.wait()).await, Exit::Signal(9));
}

#[tokio::test]
async fn a_runtime_that_ends_ends_its_processes() {
    let request = script("trap '' TERM HUP; sleep 1000 & wait");
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
    let mut lines = kolo_process::LineReader::new(stdout).unwrap();
    assert_eq!(common::rest(&mut lines).await, [""; 0]);
    within(warden.close()).await;
}

#[tokio::test]
async fn when_the_warden_is_killed_its_processes_die_and_are_reported() {
    let warden = warden().await;
    let mut plain = script("trap '' TERM HUP; sleep 1000 & echo ready; wait")
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
        assert_eq!(within(started.child.wait()).await, Exit::Unknown);
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
    let mut lines = kolo_process::LineReader::new(request.stdout).unwrap();
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
async fn what_a_process_leaves_behind_lingers_until_it_is_released() {
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
    let mut request = program("/bin/sh", &["-c", text, "sh", fifo.to_str().unwrap()]);
    request.request.linger = true;
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
    within(started.child.release()).await;
    // Also what has left the session: nobody else is there whose it might be.
    assert_eq!(started.lines().await, [""; 0]);
    // Again is no harm.
    within(started.child.release()).await;
    within(warden.close()).await;
}
