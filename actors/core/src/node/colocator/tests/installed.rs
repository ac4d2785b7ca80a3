//! Workers whose program is installed.

use kolo_wire::{Installed, WorkerSignal};

use super::*;

fn running(workers: u32, now: Instant) -> Colocator {
    let mut core = reserved();
    let mut start = testing::start(workers);
    start.installed = Some(Installed {
        program: "train".to_owned(),
        ..Installed::default()
    });
    begin(&mut core, start).unwrap();
    for slot in 0..workers {
        core.worker(now, at(slot), WorkerEvent::Spawned { pid: 100 + slot });
    }
    core
}

#[test]
fn no_hello_is_waited_for_and_an_end_is_just_an_end() {
    let now = Instant::now();
    let mut core = running(2, now);
    assert_eq!(core.slot(Slot(0)), Some(SlotState::Running));
    assert_eq!(core.next_deadline(), None);
    assert_eq!(core.tick(now + HELLO), []);
    let outputs = core.worker(now, at(0), exited(Exit::Code(3)));
    assert!(
        !outputs
            .iter()
            .any(|output| matches!(output, Output::Tell(..)))
    );
    let (failure, expected) = report(&mut core);
    assert_eq!(
        (failure.exit, failure.reason, expected),
        (Exit::Code(3), None, false)
    );
}

#[test]
fn a_stop_is_term_at_once_and_kill_after_the_grace() {
    let now = Instant::now();
    let mut core = running(1, now);
    assert_eq!(core.stop(now, "done"), [signal(0, Signal::Terminate)]);
    assert_eq!(core.next_deadline(), Some(now + GRACE));
    assert_eq!(core.tick(now + GRACE), [signal(0, Signal::Kill)]);
    let outputs = core.worker(now, at(0), exited(Exit::Signal(9)));
    assert_eq!(outputs.last(), Some(&Output::CloseWarden(STAY)));
}

#[test]
fn an_interrupt_is_int_then_term_then_kill_in_one_grace_time() {
    let now = Instant::now();
    let later = now + GRACE * 3 / 4;
    let mut core = running(2, now);
    assert_eq!(
        core.interrupt(now, "done"),
        [signal(0, Signal::Interrupt), signal(1, Signal::Interrupt)]
    );
    assert_eq!(core.interrupt(now, "again"), []);
    assert_eq!(core.next_deadline(), Some(later));
    // Who ends at INT hears nothing else.
    core.worker(now, at(1), exited(Exit::Code(1)));
    assert_eq!(core.tick(later), [signal(0, Signal::Terminate)]);
    assert_eq!(core.next_deadline(), Some(now + GRACE));
    assert_eq!(core.tick(now + GRACE), [signal(0, Signal::Kill)]);

    // A stop that has begun goes on as it was.
    let mut core = running(1, now);
    core.stop(now, "done");
    assert_eq!(core.interrupt(now, "done"), []);
    assert_eq!(core.next_deadline(), Some(now + GRACE));
    assert_eq!(core.tick(now + GRACE), [signal(0, Signal::Kill)]);

    // A kill does not wait, and one that just starts hears it, too.
    let mut core = running(1, now);
    core.interrupt(now, "done");
    assert_eq!(core.kill_all(now, "at once"), [signal(0, Signal::Kill)]);
    let mut core = reserved();
    let mut start = testing::start(1);
    start.installed = Some(Installed::default());
    begin(&mut core, start).unwrap();
    let outputs = core.interrupt(now, "done");
    assert!(matches!(outputs[..], [Output::Answer { .. }]));
    let spawned = WorkerEvent::Spawned { pid: 100 };
    assert_eq!(
        core.worker(now, at(0), spawned)[0],
        signal(0, Signal::Interrupt)
    );
}

#[test]
fn without_a_grace_an_interrupt_is_all_three_at_once() {
    let now = Instant::now();
    let mut core = reserved();
    let mut start = testing::start(1);
    start.installed = Some(Installed::default());
    start.grace_ms = 0;
    begin(&mut core, start).unwrap();
    core.worker(now, at(0), WorkerEvent::Spawned { pid: 100 });
    assert_eq!(
        core.interrupt(now, "done"),
        [
            signal(0, Signal::Interrupt),
            signal(0, Signal::Terminate),
            signal(0, Signal::Kill)
        ]
    );
}

#[test]
fn a_signal_goes_once_to_each_worker_that_runs_and_ends_nothing() {
    let now = Instant::now();
    let mut core = running(2, now);
    let all = |kind| [0, 1].map(|slot| signal(slot, Signal::Pass(kind)));
    assert_eq!(
        core.signal(1, WorkerSignal::User1).unwrap(),
        all(WorkerSignal::User1)
    );
    assert_eq!(core.signal(1, WorkerSignal::User1).unwrap(), []);
    assert_eq!(
        core.signal(2, WorkerSignal::Stop).unwrap(),
        all(WorkerSignal::Stop)
    );
    assert_eq!(core.next_deadline(), None);
    core.worker(now, at(1), exited(Exit::Code(0)));
    assert_eq!(
        core.signal(3, WorkerSignal::Continue).unwrap(),
        [signal(0, Signal::Pass(WorkerSignal::Continue))]
    );
    // Those that are about to end hear what ends them.
    core.stop(now, "done");
    assert_eq!(core.signal(4, WorkerSignal::User2).unwrap(), []);
    // A program of kolo's own would die of it.
    let mut core = reserved();
    begin(&mut core, testing::start(1)).unwrap();
    assert!(core.signal(1, WorkerSignal::User1).is_err());
}

#[test]
fn a_kill_does_not_wait_for_the_grace() {
    let now = Instant::now();
    let mut core = running(2, now);
    core.stop(now, "done");
    core.worker(now, at(1), exited(Exit::Signal(15)));
    assert_eq!(core.kill_all(now, "at once"), [signal(0, Signal::Kill)]);
    assert_eq!(core.kill_all(now, "again"), []);
    core.worker(now, at(0), exited(Exit::Signal(9)));
    assert_eq!(core.closed(), [Output::EndOutput(STAY.job)]);

    let mut core = running(1, now);
    assert_eq!(core.kill_all(now, "at once"), [signal(0, Signal::Kill)]);
    let mut core = reserved();
    assert_eq!(core.kill_all(now, "unused"), CLOSE);
}
