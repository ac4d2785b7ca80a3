//! Losses, and tables of members.

use kolo_wire::ids::Incarnation;

use super::*;

#[test]
fn a_loss_is_told_once_to_callers_and_to_the_workers_that_are_left() {
    let now = Instant::now();
    let mut core = ready(3, now);
    let outputs = core.worker(now, at(1), exited(Exit::Signal(9)));
    let (own, _) = report(&mut core);
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
    let told: Vec<Slot> = outputs
        .iter()
        .filter_map(|output| match output {
            Output::Tell(worker, ToWorker::RankLost { failure, .. }) => {
                assert!(failure.stderr_tail.is_empty(), "nobody reads it");
                Some(worker.slot)
            }
            _ => None,
        })
        .collect();
    assert_eq!(told, [Slot(0), Slot(2)]);
    // The head says the same later.
    assert!(core.rank_lost(Generation(1), own).unwrap().is_empty());
    // Ranks of other nodes.
    assert_eq!(core.rank_lost(Generation(1), failure(7)).unwrap().len(), 2);
    let stale = core.rank_lost(Generation(2), failure(8)).unwrap_err();
    assert_eq!(stale.kind, RefusalKind::Stale);
}

#[test]
fn workers_that_stop_hear_of_no_losses() {
    let now = Instant::now();
    let mut core = ready(3, now);
    core.stop(now, "done");
    assert_eq!(core.stop(now, "again"), []);
    let outputs = core.worker(now, at(1), exited(Exit::Code(0)));
    assert!(
        matches!(outputs[..], [Output::Lost(Loss { stopping: true, .. })]),
        "{outputs:?}"
    );
    let (own, expected) = report(&mut core);
    assert!(expected);
    assert_eq!(own.reason.as_deref(), Some("the job was stopped: done"));
    assert_eq!(core.rank_lost(Generation(1), failure(7)).unwrap(), []);
}

#[test]
fn a_worker_that_comes_after_a_loss_learns_of_it() {
    let now = Instant::now();
    let mut core = running(2, now);
    core.worker(now, at(0), exited(Exit::Code(1)));
    let outputs = core.worker(now, at(1), hello(1));
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
    let closed = || WorkerEvent::Closed { socket: "call" };
    for (event, wait, reason) in [
        (fault(), Duration::ZERO, "it sends nonsense; its end"),
        (closed(), HANG_UP, "it closed its call socket"),
    ] {
        let mut now = Instant::now();
        let mut core = ready(2, now);
        let mut outputs = core.worker(now, at(0), event);
        now += wait;
        outputs.extend(core.tick(now));
        assert_eq!(outputs, [signal(0, Signal::Kill)]);
        // Again is no reason to wait longer.
        core.worker(now + KILLED / 2, at(0), fault());
        now += KILLED;
        assert_eq!(core.next_deadline(), Some(now));
        let outputs = core.tick(now);
        assert!(matches!(
            &outputs[..],
            [Output::Lost(loss), Output::Tell(worker, ToWorker::RankLost { .. })]
                if loss.failure.exit == Exit::Unknown && *worker == at(1)
        ));
        let (failure, expected) = report(&mut core);
        assert!(!expected && failure.exit == Exit::Unknown);
        let said = failure.reason.unwrap();
        assert!(
            said.starts_with(reason) && said.ends_with("after its KILL"),
            "{said}"
        );
        assert_eq!(core.next_deadline(), None);
        assert_eq!(core.worker(now, at(0), exited(Exit::Signal(9))), []);
    }
}

#[test]
fn tables_that_do_not_fit_are_refused() {
    let now = Instant::now();
    let mut core = ready(2, now);
    core.membership(testing::table(2, 3)).unwrap();
    let stale = core.membership(testing::table(2, 2)).unwrap_err();
    assert_eq!(stale.kind, RefusalKind::Stale);
    assert!(
        core.membership(testing::table(2, 3)).is_ok(),
        "again is fine"
    );
    let mut other = testing::table(2, 4);
    other.job = JobId(8);
    assert_eq!(
        core.membership(other).unwrap_err().kind,
        RefusalKind::Invalid
    );
    let unknown = testing::table(3, 4);
    assert_eq!(
        core.membership(unknown).unwrap_err().kind,
        RefusalKind::Invalid
    );
    let mut wrong = testing::table(2, 4);
    wrong.members.swap(0, 1);
    assert_eq!(
        core.membership(wrong).unwrap_err().kind,
        RefusalKind::Invalid
    );
    core.stop(now, "done");
    let late = core.membership(testing::table(2, 4)).unwrap_err();
    assert_eq!(late.kind, RefusalKind::Stopped);
}

#[test]
fn a_new_generation_gives_new_ranks() {
    let now = Instant::now();
    let mut core = ready(2, now);
    let mut table = testing::table(2, 2);
    table.members[0].slot = Slot(1);
    table.members[1].slot = Slot(0);
    core.membership(table).unwrap();
    let outputs = core.worker(now, at(1), exited(Exit::Code(3)));
    assert_eq!(report(&mut core).0.rank, Rank(0));
    assert!(matches!(
        outputs[0],
        Output::Lost(Loss { slot: Slot(1), .. })
    ));
}
