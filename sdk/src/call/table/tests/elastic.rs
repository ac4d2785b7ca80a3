//! One generation of an elastic group.

use super::*;

const SECOND: Generation = Generation(2);

fn elastic(world: u32) -> (Table, Instant) {
    let (table, now) = table(world);
    (table.elastic(SECOND), now)
}

fn over(table: &mut Table, error: CallError) -> (Generation, Vec<Rank>, String) {
    match table.explain(error) {
        CallError::GenerationOver {
            generation,
            lost,
            cause,
            ..
        } => (generation, lost, cause),
        other => panic!("{other:?}"),
    }
}

#[test]
fn numbers_of_calls_are_unique_across_generations() {
    let (mut first, _) = table(1);
    assert_eq!(first.next_id(), CallId(1));
    let (mut second, _) = elastic(1);
    assert_eq!(second.next_id(), CallId((1 << 40) + 1));
    let first = second.elastic(Generation(1)).next_id();
    assert_eq!(first, CallId(1), "as in a group that never changes");
}

#[test]
fn a_loss_ends_the_generation_and_not_what_runs_elsewhere() {
    let (mut table, now) = elastic(2);
    let call = each(&mut table, &["a", "b"]);
    let effects = table.lost(now, failure(1, Exit::Signal(9)), false);
    let error = error(effects, "b");
    let (generation, lost, cause) = over(&mut table, error);
    assert_eq!((generation, lost), (SECOND, ranks([1])));
    assert!(
        cause.contains("SIGKILL") && cause.contains("out of memory"),
        "{cause}"
    );
    let refused = send(&mut table, ranks([0]), Waiters::Whole("c"));
    assert_eq!(refused.unwrap_err().kind(), CallErrorKind::GenerationOver);
    let effects = returned(&mut table, now, call, 0);
    assert_eq!(effects.completions[0].result, Ok(vec![body(0)]));
    assert_eq!(table.in_flight(), 0);
}

#[test]
fn a_failure_that_comes_from_a_change_waits_for_no_first_cause() {
    let (mut table, now) = elastic(2);
    let call = whole(&mut table, 2, "a");
    let mut failure = CallFailure::new(FailureKind::GenerationOver, "rank 1 is lost");
    failure.caused_by = Some(Rank(1));
    let failed = Outcome::Failed(failure);
    let effects = table.result(now, call, Rank(0), failed, Bytes::new());
    let error = error(effects, "a");
    assert!(!table.is_over());
    assert_eq!(over(&mut table, error).1, []);
    assert!(table.is_over(), "from now on");
}

#[test]
fn errors_of_user_code_and_stops_stay_what_they_are() {
    let (mut table, now) = elastic(2);
    let call = whole(&mut table, 2, "a");
    let own = error(failed(&mut table, now, call, 0, None), "a");
    assert_eq!(table.explain(own.clone()), own);
    let mut stopped = failure(1, Exit::Code(0));
    stopped.reason = Some("the job was stopped: by hand".to_owned());
    nothing(&table.lost(now, stopped, true));
    assert!(!table.is_over());
    let refused = send(&mut table, ranks([1]), Waiters::Whole("c"));
    assert_eq!(
        refused.unwrap_err().to_string(),
        "`f` has no result: the job was stopped: by hand"
    );
}

#[test]
fn a_generation_that_others_follow_takes_nothing_new() {
    let (mut table, now) = elastic(1);
    let call = whole(&mut table, 1, "a");
    table.supersede("generation 3 has begun: a node has joined");
    let refused = send(&mut table, ranks([0]), Waiters::Whole("b"));
    assert_eq!(
        refused.unwrap_err().to_string(),
        "`f` has no result from generation 2, which is over: generation 3 has begun: a node has joined"
    );
    let stale = CallFailure::new(FailureKind::Stale, "in generation 3");
    let failed = Outcome::Failed(stale);
    let effects = table.result(now, call, Rank(0), failed, Bytes::new());
    let error = error(effects, "a");
    assert_eq!(over(&mut table, error).0, SECOND);
}
