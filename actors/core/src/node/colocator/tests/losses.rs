//! Losses, and tables of members.

use super::*;

#[test]
fn a_loss_is_told_once_to_callers_and_to_the_workers_that_are_left() {
    let mut job = Job::ready(3);
    let outputs = job.ends(at(1), Exit::Signal(9));
    let (own, _) = job.report();
    assert_eq!(own.pid, 101);
    assert_eq!(own.reason, None, "the process itself ended");
    assert_eq!(own.stderr_tail, ["last words"]);
    let lost = Output::Lost(Loss {
        job: STAY.job,
        slot: Slot(1),
        incarnation: Incarnation::FIRST,
        failure: own.clone(),
        stopping: false,
    });
    assert_eq!(outputs[0], lost);
    let message = ToWorker::RankLost {
        generation: FIRST,
        failure: RankFailure {
            stderr_tail: Vec::new(), // nobody reads it
            ..own.clone()
        },
    };
    assert_eq!(
        told(&outputs),
        [0, 2].map(|slot| (at(slot), message.clone()))
    );
    // The head says the same later.
    assert_eq!(job.core.rank_lost(FIRST, own).unwrap(), []);
    // Ranks of other nodes.
    let outputs = job.core.rank_lost(FIRST, failure(7)).unwrap();
    assert_eq!(hear_of_a_loss(&outputs), [at(0), at(2)]);
    let stale = job.core.rank_lost(Generation(2), failure(8));
    assert_eq!(stale.unwrap_err().kind, RefusalKind::Stale);
}

#[test]
fn workers_that_stop_hear_of_no_losses() {
    let mut job = Job::ready(3);
    job.stop();
    assert_eq!(job.stop(), [], "again");
    let outputs = job.ends(at(1), Exit::Code(0));
    let [Output::Lost(Loss { stopping: true, .. })] = &outputs[..] else {
        panic!("{outputs:?}");
    };
    let (own, expected) = job.report();
    assert!(expected);
    assert_eq!(own.reason.as_deref(), Some("the job was stopped: done"));
    assert_eq!(job.core.rank_lost(FIRST, failure(7)).unwrap(), []);
}

#[test]
fn a_worker_that_comes_after_a_loss_learns_of_it() {
    let mut job = Job::running(2);
    job.ends(at(0), Exit::Code(1));
    let outputs = job.greets(at(1));
    assert!(matches!(
        outputs[..],
        [
            Output::Tell(_, ToWorker::Welcome { .. }),
            Output::Tell(_, ToWorker::RankLost { .. })
        ]
    ));
}

#[test]
fn f1_a_worker_that_was_killed_and_does_not_end_is_a_loss_all_the_same() {
    let fault = || WorkerEvent::Fault {
        reason: "it sends nonsense".to_owned(),
    };
    let closed = WorkerEvent::Closed { socket: "call" };
    for (event, wait, reason) in [
        (fault(), Duration::ZERO, "it sends nonsense; its end"),
        (closed, HANG_UP, "it closed its call socket"),
    ] {
        let mut job = Job::ready(2);
        let mut outputs = job.has(at(0), event);
        outputs.extend(job.pass(wait));
        assert_eq!(outputs, [signal(0, Signal::Kill)]);
        // Again is no reason to wait longer.
        job.now += KILLED / 2;
        job.has(at(0), fault());
        assert_eq!(job.due(), Some(KILLED / 2));
        let outputs = job.pass(KILLED / 2);
        assert!(matches!(&outputs[0], Output::Lost(loss) if loss.failure.exit == Exit::Unknown));
        assert_eq!(hear_of_a_loss(&outputs[1..]), [at(1)]);
        let (failure, expected) = job.report();
        assert_eq!((failure.exit, expected), (Exit::Unknown, false));
        let said = failure.reason.unwrap();
        assert!(said.starts_with(reason), "{said}");
        assert!(said.ends_with("after its KILL"), "{said}");
        assert_eq!(job.due(), None);
        assert_eq!(job.ends(at(0), Exit::Signal(9)), []);
    }
}

#[test]
fn tables_that_do_not_fit_are_refused() {
    let mut job = Job::ready(2);
    job.core.membership(testing::table(2, 3)).unwrap();
    job.core.membership(testing::table(2, 3)).unwrap();
    let mut other = testing::table(2, 4);
    other.job = JobId(8);
    let mut wrong = testing::table(2, 4);
    wrong.members.swap(0, 1);
    for (table, kind) in [
        (testing::table(2, 2), RefusalKind::Stale),
        (other, RefusalKind::Invalid),
        (testing::table(3, 4), RefusalKind::Invalid),
        (wrong, RefusalKind::Invalid),
    ] {
        assert_eq!(job.core.membership(table).unwrap_err().kind, kind);
    }
    job.stop();
    let late = job.core.membership(testing::table(2, 4)).unwrap_err();
    assert_eq!(late.kind, RefusalKind::Stopped);
}

#[test]
fn a_new_generation_gives_new_ranks() {
    let mut job = Job::ready(2);
    let mut table = testing::table(2, 2);
    table.members[0].slot = Slot(1);
    table.members[1].slot = Slot(0);
    job.core.membership(table).unwrap();
    let outputs = job.ends(at(1), Exit::Code(3));
    assert_eq!(job.report().0.rank, Rank(0));
    assert!(matches!(&outputs[0], Output::Lost(lost) if lost.slot == Slot(1)));
}
