//! Workers whose program is installed.

use kolo_transport::wire::Installed;

use super::*;

fn running(workers: u32, now: Instant) -> Colocator {
    let mut core = reserved();
    let mut start = testing::start(workers);
    start.installed = Some(Installed {
        program: "train".to_owned(),
        ..Installed::default()
    });
    core.start(start).unwrap();
    for slot in 0..workers {
        core.worker(now, Slot(slot), WorkerEvent::Spawned { pid: 100 + slot });
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
    let actions = core.worker(now, Slot(0), exited(Exit::Code(3)));
    assert!(
        !actions
            .iter()
            .any(|action| matches!(action, Action::Tell(..)))
    );
    let (failure, expected) = report(&actions);
    assert_eq!(
        (failure.exit, failure.reason, expected),
        (Exit::Code(3), None, false)
    );
}

#[test]
fn a_stop_is_term_at_once_and_kill_after_the_grace() {
    let now = Instant::now();
    let mut core = running(1, now);
    assert_eq!(core.stop(now, "done"), [Action::Terminate(Slot(0))]);
    assert_eq!(core.next_deadline(), Some(now + GRACE));
    assert_eq!(core.tick(now + GRACE), [Action::Kill(Slot(0))]);
    let actions = core.worker(now, Slot(0), exited(Exit::Signal(9)));
    assert_eq!(actions.last(), Some(&Action::Close));
}

#[test]
fn a_kill_does_not_wait_for_the_grace() {
    let now = Instant::now();
    let mut core = running(2, now);
    core.stop(now, "done");
    core.worker(now, Slot(1), exited(Exit::Signal(15)));
    assert_eq!(core.kill_all(now, "at once"), [Action::Kill(Slot(0))]);
    assert_eq!(core.kill_all(now, "again"), []);
    core.worker(now, Slot(0), exited(Exit::Signal(9)));
    assert_eq!(core.closed(), [Action::Gone { report: true }]);

    let mut core = running(1, now);
    assert_eq!(core.kill_all(now, "at once"), [Action::Kill(Slot(0))]);
    let mut core = reserved();
    assert_eq!(core.kill_all(now, "unused"), [Action::Close]);
}
