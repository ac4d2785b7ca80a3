//! How a job stops: notice, TERM, KILL, and when all is over.

use super::*;

#[test]
fn a_stop_goes_from_notice_to_term_to_kill() {
    let now = Instant::now();
    let mut core = ready(2, now);
    core.stop(now, "done");
    assert_eq!(core.next_deadline(), Some(now + GRACE));
    assert!(core.tick(now + GRACE / 2).is_empty());
    assert_eq!(
        core.tick(now + GRACE),
        [signal(0, Signal::Terminate), signal(1, Signal::Terminate)]
    );
    core.worker(now, at(0), exited(Exit::Signal(15)));
    assert_eq!(core.tick(now + GRACE * 2), [signal(1, Signal::Kill)]);
    let outputs = core.worker(now, at(1), exited(Exit::Signal(9)));
    assert_eq!(outputs.last(), Some(&Output::CloseWarden(STAY)));
    assert_eq!(core.next_deadline(), None, "nothing is left to try");
}

#[test]
fn a_worker_whose_end_is_not_seen_after_its_kill_does_not_hold_the_job() {
    let now = Instant::now();
    let mut core = ready(2, now);
    core.stop(now, "done");
    core.worker(now, at(0), exited(Exit::Signal(15)));
    // The first look at the time comes late: the end is waited for from the KILL on.
    let late = now + GRACE * 10;
    assert_eq!(
        core.tick(late),
        [signal(1, Signal::Terminate), signal(1, Signal::Kill)]
    );
    assert_eq!(core.next_deadline(), Some(late + KILLED));
    let outputs = core.tick(late + KILLED);
    assert!(core.take_reports().iter().any(|event| matches!(
        event,
        NodeEvent::WorkerExited { slot: Slot(1), failure, .. }
            if failure.exit == Exit::Unknown
                && failure.reason.as_deref().is_some_and(|reason| reason.contains("after its KILL"))
    )));
    assert_eq!(outputs.last(), Some(&Output::CloseWarden(STAY)));
    assert_eq!(core.next_deadline(), None);
    assert!(
        core.worker(late, at(1), exited(Exit::Signal(9))).is_empty(),
        "told once"
    );
    core.closed();
    assert!(core.is_gone());
}

#[test]
fn without_grace_a_stop_kills() {
    let now = Instant::now();
    let mut core = reserved();
    let mut start = testing::start(1);
    start.grace_ms = 0;
    begin(&mut core, start).unwrap();
    core.worker(now, at(0), WorkerEvent::Spawned { pid: 100 });
    core.worker(now, at(0), hello(0));
    let outputs = core.stop(now, "done");
    assert!(matches!(
        outputs[..],
        [
            Output::Tell(_, ToWorker::Stop { .. }),
            Output::Signal(_, Signal::Terminate),
            Output::Signal(_, Signal::Kill)
        ]
    ));
}

#[test]
fn absurd_times_do_not_overflow() {
    let now = Instant::now();
    let mut core = reserved();
    let mut start = testing::start(1);
    start.grace_ms = u64::MAX;
    start.hello_timeout_ms = u64::MAX;
    begin(&mut core, start).unwrap();
    core.worker(now, at(0), WorkerEvent::Spawned { pid: 100 });
    assert_eq!(core.next_deadline(), Some(now + MAX_WAIT));
    core.stop(now, "done");
    core.tick(now + MAX_WAIT * 3);
}

#[test]
fn a_worker_without_a_hello_is_terminated_at_once() {
    let now = Instant::now();
    let mut core = reserved();
    begin(&mut core, testing::start(2)).unwrap();
    core.worker(now, at(0), WorkerEvent::Spawned { pid: 100 });
    let outputs = core.stop(now, "done");
    assert!(matches!(outputs[0], Output::Answer { .. }));
    assert_eq!(outputs[1..], [signal(0, Signal::Terminate)]);
    // One whose process comes into being only now.
    let outputs = core.worker(now, at(1), WorkerEvent::Spawned { pid: 101 });
    assert_eq!(outputs[0], signal(1, Signal::Terminate));
    core.tick(now + GRACE * 2);
    core.worker(now, at(0), exited(Exit::Signal(15)));
    let outputs = core.worker(now, at(1), exited(Exit::Signal(15)));
    assert_eq!(outputs.last(), Some(&Output::CloseWarden(STAY)));
}

#[test]
fn a_stop_after_all_have_ended_closes_at_once() {
    let now = Instant::now();
    let mut core = ready(1, now);
    let outputs = core.worker(now, at(0), exited(Exit::Code(0)));
    assert!(
        !outputs.contains(&Output::CloseWarden(STAY)),
        "the head decides"
    );
    assert_eq!(core.stop(now, "over"), CLOSE);
}
