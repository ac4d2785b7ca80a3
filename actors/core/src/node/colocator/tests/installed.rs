//! Workers whose program is installed.

use kolo_wire::{Installed, WorkerSignal};

use super::*;

fn installed(workers: u32, grace_ms: u64) -> StartWorkers {
    let mut start = testing::start(workers);
    start.installed = Some(Installed::default());
    start.grace_ms = grace_ms;
    start
}

fn running(workers: u32) -> Job {
    Job::of(installed(workers, GRACE.as_millis() as u64))
}

impl Job {
    fn interrupt(&mut self) -> Vec<Output> {
        self.core.interrupt(self.now, "done")
    }

    fn kill_all(&mut self) -> Vec<Output> {
        self.core.kill_all(self.now, "at once")
    }
}

#[test]
fn no_hello_is_waited_for_and_an_end_is_just_an_end() {
    let mut job = running(2);
    assert_eq!(job.core.slot(Slot(0)), Some(SlotState::Running));
    assert_eq!(job.due(), None);
    assert_eq!(job.pass(HELLO), []);
    assert_eq!(told(&job.ends(at(0), Exit::Code(3))), []);
    let (failure, expected) = job.report();
    assert_eq!((failure.exit, failure.reason), (Exit::Code(3), None));
    assert!(!expected);
}

#[test]
fn a_stop_is_term_at_once_and_kill_after_the_grace() {
    let mut job = running(1);
    assert_eq!(job.stop(), [signal(0, Signal::Terminate)]);
    assert_eq!(job.due(), Some(GRACE));
    assert_eq!(job.pass(GRACE), [signal(0, Signal::Kill)]);
    let outputs = job.ends(at(0), Exit::Signal(9));
    assert_eq!(outputs.last(), Some(&Output::CloseWarden(STAY)));
}

#[test]
fn an_interrupt_is_int_then_term_then_kill_in_one_grace_time() {
    let mut job = running(2);
    let both = [signal(0, Signal::Interrupt), signal(1, Signal::Interrupt)];
    assert_eq!(job.interrupt(), both);
    assert_eq!(job.interrupt(), [], "again");
    assert_eq!(job.due(), Some(GRACE * 3 / 4));
    // Who ends at INT hears nothing else.
    job.ends(at(1), Exit::Code(1));
    assert_eq!(job.pass(GRACE * 3 / 4), [signal(0, Signal::Terminate)]);
    assert_eq!(job.due(), Some(GRACE / 4));
    assert_eq!(job.pass(GRACE / 4), [signal(0, Signal::Kill)]);

    // A stop that has begun goes on as it was.
    let mut job = running(1);
    job.stop();
    assert_eq!(job.interrupt(), []);
    assert_eq!(job.due(), Some(GRACE));
    assert_eq!(job.pass(GRACE), [signal(0, Signal::Kill)]);

    // A kill does not wait, and one that just starts hears it, too.
    let mut job = running(1);
    job.interrupt();
    assert_eq!(job.kill_all(), [signal(0, Signal::Kill)]);
    let mut job = Job::reserved();
    job.begin(installed(1, 5000)).unwrap();
    assert!(matches!(job.interrupt()[..], [Output::Answer { .. }]));
    assert_eq!(job.runs(at(0))[0], signal(0, Signal::Interrupt));

    // Without a grace it is all three at once.
    let mut job = Job::of(installed(1, 0));
    let all = [Signal::Interrupt, Signal::Terminate, Signal::Kill];
    assert_eq!(job.interrupt(), all.map(|kind| signal(0, kind)));
}

#[test]
fn a_signal_goes_once_to_each_worker_that_runs_and_ends_nothing() {
    let mut job = running(2);
    let all = |kind| [0, 1].map(|slot| signal(slot, Signal::Pass(kind)));
    let send = |job: &mut Job, seq, kind| job.core.signal(seq, kind).unwrap();
    let (first, stop) = (WorkerSignal::User1, WorkerSignal::Stop);
    assert_eq!(send(&mut job, 1, first), all(first));
    assert_eq!(send(&mut job, 1, first), []);
    assert_eq!(send(&mut job, 2, stop), all(stop));
    assert_eq!(job.due(), None);
    job.ends(at(1), Exit::Code(0));
    let go_on = WorkerSignal::Continue;
    assert_eq!(send(&mut job, 3, go_on), all(go_on)[..1]);
    // Those that are about to end hear what ends them.
    job.stop();
    assert_eq!(send(&mut job, 4, WorkerSignal::User2), []);
    // A program of kolo's own would die of it.
    assert!(Job::running(1).core.signal(1, first).is_err());
}

#[test]
fn a_kill_does_not_wait_for_the_grace() {
    let mut job = running(2);
    job.stop();
    job.ends(at(1), Exit::Signal(15));
    assert_eq!(job.kill_all(), [signal(0, Signal::Kill)]);
    assert_eq!(job.kill_all(), [], "again");
    job.ends(at(0), Exit::Signal(9));
    assert_eq!(job.core.closed(), [Output::EndOutput(STAY.job)]);

    assert_eq!(running(1).kill_all(), [signal(0, Signal::Kill)]);
    assert_eq!(Job::reserved().kill_all(), CLOSE);
}
