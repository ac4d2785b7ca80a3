//! Workers that end because their job is being stopped.

use super::*;

#[test]
fn a_worker_that_is_being_stopped_is_not_the_first_cause() {
    let (mut table, now) = table(3);
    whole(&mut table, 2, "w");
    nothing(&table.lost(now, failure(0, Exit::Signal(15)), true));
    let cause = failure(2, Exit::Signal(11));
    let end = End {
        reason: "a worker was lost".to_owned(),
        failure: Some(cause),
    };
    let error = error(table.finish(end), "w");
    assert_eq!(
        (error.rank(), error.exit()),
        (Some(Rank(2)), Some(Exit::Signal(11)))
    );
}

#[test]
fn a_loss_that_is_an_echo_waits_for_another_loss() {
    let (mut table, now) = table(2);
    whole(&mut table, 2, "w");
    nothing(&table.lost(now, failure(0, Exit::Signal(15)), true));
    assert_eq!(
        error(table.lost(now, failure(1, Exit::Signal(9)), false), "w").rank(),
        Some(Rank(1))
    );
}

fn stopped(rank: u32) -> RankFailure {
    let mut failure = failure(rank, Exit::Code(0));
    failure.reason = Some("the job was stopped: by an operator".to_owned());
    failure
}

/// It says that the job was stopped and why, and not which worker was the first to go.
fn check_stopped(error: &CallError) {
    assert_eq!(
        error.to_string(),
        "`f` has no result: the job was stopped: by an operator"
    );
    assert_eq!((error.kind(), error.rank()), (CallErrorKind::Ended, None));
}

#[test]
fn an_echo_of_a_worker_that_is_being_stopped_is_the_stop() {
    let (mut table, now) = table(4);
    let call = whole(&mut table, 4, "w");
    nothing(&failed(&mut table, now, call, 3, Some(1)));
    nothing(&table.lost(now, stopped(1), true));
    nothing(&failed(&mut table, now, call, 2, Some(3)));
    nothing(&table.tick(now + ECHO_WAIT / 2));
    check_stopped(&error(table.tick(now + ECHO_WAIT), "w"));
    // Later calls, together and one by one; those on others go on.
    let mut call_on =
        |list: &[u32], waiters| send(&mut table, ranks(list.iter().copied()), waiters);
    check_stopped(&call_on(&[0, 1], Waiters::Whole("w")).unwrap_err());
    let mut taken = call_on(&[0, 1], Waiters::Each(vec!["a", "b"])).unwrap();
    assert_eq!(taken.send_to, ranks([0]));
    check_stopped(&taken.completions.remove(0).result.unwrap_err());
    assert!(call_on(&[0, 2], Waiters::Whole("w")).is_ok());
}

#[test]
fn a_worker_that_leaves_after_its_result_is_the_stop() {
    // It closed its links before the other had all that it needed; together, one by one, and in a circle.
    let (mut table, now) = table(2);
    let call = whole(&mut table, 2, "w");
    nothing(&returned(&mut table, now, call, 1));
    nothing(&failed(&mut table, now, call, 0, Some(1)));
    nothing(&table.lost(now, stopped(1), true));
    check_stopped(&error(table.tick(now + LEAVE_WAIT), "w"));

    let (mut table, now) = self::table(2);
    let call = each(&mut table, &["a", "b"]);
    assert_eq!(returned(&mut table, now, call, 1).completions.len(), 1);
    nothing(&failed(&mut table, now, call, 0, Some(1)));
    nothing(&table.lost(now, stopped(1), true));
    check_stopped(&error(table.tick(now + LEAVE_WAIT), "a"));

    let (mut table, now) = self::table(2);
    let call = whole(&mut table, 2, "w");
    nothing(&failed(&mut table, now, call, 0, Some(1)));
    nothing(&failed(&mut table, now, call, 1, Some(0)));
    nothing(&table.lost(now, stopped(1), true));
    nothing(&table.lost(now, stopped(0), true));
    check_stopped(&error(table.tick(now + LEAVE_WAIT), "w"));
}

#[test]
fn each_waiter_and_a_deadline_are_told_of_a_stop() {
    let (mut table, now) = table(2);
    let call = each(&mut table, &["a", "b"]);
    nothing(&failed(&mut table, now, call, 0, Some(1)));
    nothing(&table.lost(now, stopped(1), true));
    let effects = table.tick(now + ECHO_WAIT);
    assert_eq!(effects.completions.len(), 2);
    for completion in effects.completions {
        check_stopped(&completion.result.unwrap_err());
    }
    let (mut table, now) = self::table(2);
    let after = ECHO_WAIT / 2;
    let deadline = Some((now + after, after));
    table
        .register(
            Instant::now(),
            "f".to_owned(),
            ranks(0..2),
            deadline,
            Waiters::Whole("w"),
        )
        .unwrap();
    nothing(&table.lost(now, stopped(1), true));
    check_stopped(&error(table.tick(now + after), "w"));
}

#[test]
fn a_stop_hides_no_failure_of_its_own() {
    let (mut table, now) = table(3);
    let call = whole(&mut table, 3, "w");
    nothing(&table.lost(now, stopped(1), true));
    assert_eq!(
        error(failed(&mut table, now, call, 2, None), "w").rank(),
        Some(Rank(2))
    );
}

#[test]
fn a_worker_that_its_node_stopped_is_no_cause_of_the_end() {
    let (mut table, now) = table(2);
    whole(&mut table, 2, "w");
    nothing(&table.lost(now, stopped(1), true));
    let end = End {
        reason: "rank 1 ended".to_owned(),
        failure: Some(stopped(1)),
    };
    check_stopped(&error(table.finish(end), "w"));
    let refused = send(&mut table, ranks([0]), Waiters::Whole("w")).unwrap_err();
    check_stopped(&refused);
}

#[test]
fn a_stop_without_a_reason_and_one_by_the_driver_itself() {
    let (mut table, now) = table(1);
    whole(&mut table, 1, "a");
    let mut silent = failure(0, Exit::Unknown);
    silent.reason = Some("its end was not seen".to_owned());
    nothing(&table.lost(now, silent, true));
    let text = error(table.tick(now + ECHO_WAIT), "a").to_string();
    assert_eq!(text, "`f` has no result: the job was stopped");

    let (mut table, now) = self::table(1);
    whole(&mut table, 1, "a");
    table.close("the group was shut down");
    nothing(&table.lost(now, stopped(0), true));
    let text = error(table.tick(now + ECHO_WAIT), "a").to_string();
    assert_eq!(text, "`f` has no result: the group was shut down");
}

/// A rank's collectives are revoked when its worker is told to stop: that call failed because of the stop.
#[test]
fn a_failure_of_a_worker_that_is_being_stopped_is_the_stop() {
    let (mut table, now) = table(3);
    let fails = |table: &mut CallTable<&'static str>, call, rank: u32| {
        let mut failure = CallFailure::new(FailureKind::Error, "no operation goes on");
        failure.stopping = true;
        let outcome = Outcome::Failed(failure);
        table.result(now, call, Rank(rank), outcome, Bytes::new())
    };
    let call = whole(&mut table, 3, "w");
    nothing(&fails(&mut table, call, 1));
    nothing(&failed(&mut table, now, call, 0, Some(1)));
    nothing(&table.lost(now, stopped(1), true));
    check_stopped(&error(table.tick(now + ECHO_WAIT), "w"));
}

#[test]
fn a_failure_before_a_stop_is_the_first_cause_and_one_without_any_end_is_told() {
    let fails = |table: &mut CallTable<&'static str>, now, call| {
        let mut failure = CallFailure::new(FailureKind::Error, "no operation goes on");
        failure.stopping = true;
        table.result(now, call, Rank(1), Outcome::Failed(failure), Bytes::new())
    };
    let (mut group, now) = table(2);
    let call = whole(&mut group, 2, "w");
    nothing(&fails(&mut group, now, call));
    let own = error(failed(&mut group, now, call, 0, None), "w");
    assert_eq!(own.rank(), Some(Rank(0)), "{own}");
    let (mut group, now) = table(2);
    let call = whole(&mut group, 2, "w");
    nothing(&fails(&mut group, now, call));
    let told = error(group.tick(now + ECHO_WAIT), "w").to_string();
    assert!(told.contains("no operation goes on"), "{told}");
}
