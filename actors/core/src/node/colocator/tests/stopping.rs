//! How a job stops: notice, TERM, KILL, and when all is over.

use super::*;

/// A job with one worker, with a start of its own.
fn one(change: impl FnOnce(&mut StartWorkers)) -> Job {
    let mut start = testing::start(1);
    change(&mut start);
    Job::of(start)
}

#[test]
fn a_stop_goes_from_notice_to_term_to_kill() {
    let mut job = Job::ready(2);
    job.stop();
    assert_eq!(job.due(), Some(GRACE));
    assert_eq!(job.pass(GRACE / 2), []);
    let term = [signal(0, Signal::Terminate), signal(1, Signal::Terminate)];
    assert_eq!(job.pass(GRACE / 2), term);
    job.ends(at(0), Exit::Signal(15));
    assert_eq!(job.pass(GRACE), [signal(1, Signal::Kill)]);
    let outputs = job.ends(at(1), Exit::Signal(9));
    assert_eq!(outputs[outputs.len() - 2..], CLOSE);
    assert_eq!(job.due(), None, "nothing is left to try");
}

#[test]
fn a_worker_whose_end_is_not_seen_after_its_kill_does_not_hold_the_job() {
    let mut job = Job::ready(2);
    job.stop();
    job.ends(at(0), Exit::Signal(15));
    job.core.take_reports();
    // The first look at the time comes late: the end is waited for from the KILL on.
    let both = [signal(1, Signal::Terminate), signal(1, Signal::Kill)];
    assert_eq!(job.pass(GRACE * 10), both);
    assert_eq!(job.due(), Some(KILLED));
    let outputs = job.pass(KILLED);
    let reports = job.core.take_reports();
    assert!(matches!(
        &reports[0],
        NodeEvent::WorkerExited { slot: Slot(1), failure, .. }
            if failure.exit == Exit::Unknown
                && failure.reason.as_deref().is_some_and(|reason| reason.contains("after its KILL"))
    ));
    assert_eq!(outputs[outputs.len() - 2..], CLOSE);
    assert_eq!(job.due(), None);
    assert_eq!(job.ends(at(1), Exit::Signal(9)), [], "told once");
    job.core.closed();
    assert!(job.core.is_gone());
}

#[test]
fn without_grace_a_stop_kills() {
    let mut job = one(|start| start.grace_ms = 0);
    job.greets(at(0));
    let outputs = job.stop();
    assert!(matches!(outputs[0], Output::Tell(_, ToWorker::Stop { .. })));
    let both = [signal(0, Signal::Terminate), signal(0, Signal::Kill)];
    assert_eq!(outputs[1..], both);
}

#[test]
fn absurd_times_do_not_overflow() {
    let mut job = one(|start| (start.grace_ms, start.hello_timeout_ms) = (u64::MAX, u64::MAX));
    assert_eq!(job.due(), Some(MAX_WAIT));
    job.stop();
    job.pass(MAX_WAIT * 3);
}

#[test]
fn a_worker_without_a_hello_is_terminated_at_once() {
    let mut job = Job::reserved();
    job.begin(testing::start(2)).unwrap();
    job.runs(at(0));
    let outputs = job.stop();
    assert!(matches!(outputs[0], Output::Answer { .. }));
    assert_eq!(outputs[1..], [signal(0, Signal::Terminate)]);
    // One whose process comes into being only now.
    assert_eq!(job.runs(at(1))[0], signal(1, Signal::Terminate));
    job.pass(GRACE * 2);
    job.ends(at(0), Exit::Signal(15));
    let outputs = job.ends(at(1), Exit::Signal(15));
    assert_eq!(outputs[outputs.len() - 2..], CLOSE);
}

#[test]
fn a_stop_after_all_have_ended_closes_at_once() {
    let mut job = Job::ready(1);
    let outputs = job.ends(at(0), Exit::Code(0));
    // The head decides.
    assert!(!outputs.contains(&Output::CloseWarden(STAY)));
    assert_eq!(job.stop(), CLOSE);
}
