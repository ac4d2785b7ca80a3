//! The rules of calls that span generations, one by one.

use kolo_transport::ids::{CrossRank, JobId, LocalRank, NodeId};
use kolo_transport::wire::{CallFailure, CallOp, Handover};

use super::*;
use crate::call::failure::CallErrorKind;
use crate::call::failure::tests::failure;

const CALL: CallId = CallId(9);

type Spans = SpanTable<&'static str>;

/// A generation whose rank `r` is this process of this slot.
pub(crate) fn table(generation: u64, processes: &[(u32, u64)]) -> Arc<GenerationTable> {
    let members = (0..)
        .zip(processes)
        .map(|(rank, (slot, incarnation))| Member {
            rank: Rank(rank),
            local_rank: LocalRank(rank),
            local_size: processes.len() as u32,
            cross_rank: CrossRank(0),
            cross_size: 1,
            slot: Slot(*slot),
            incarnation: Incarnation(*incarnation),
            node: NodeId(7),
            hostname: format!("host-{slot}"),
            address: None,
        });
    Arc::new(GenerationTable {
        job: JobId(1),
        generation: Generation(generation),
        members: members.collect(),
        cause: "a worker was lost".to_owned(),
        handover: Handover::None,
    })
}

fn process(slot: u32, incarnation: u64) -> Process {
    Process {
        slot: Slot(slot),
        incarnation: Incarnation(incarnation),
    }
}

fn request(deadline: Option<Duration>) -> Request {
    Request {
        name: "train".to_owned(),
        op: CallOp::Function {
            name: "train".to_owned(),
        },
        body: Bytes::new(),
        deadline,
    }
}

/// Slots 0, 1 and 2 have the call.
fn three() -> (Spans, Instant) {
    let now = Instant::now();
    let mut spans = Spans::new(table(1, &[(0, 1), (1, 1), (2, 1)]));
    let effects = spans.begin(now, CALL, request(None), "driver").unwrap();
    assert_eq!(effects.gives, gives(&[0, 1, 2]));
    (spans, now)
}

fn gives(ranks: &[u32]) -> Vec<(CallId, Vec<Rank>)> {
    vec![(CALL, ranks.iter().copied().map(Rank).collect())]
}

fn nothing<W: PartialEq + std::fmt::Debug>(effects: &SpanEffects<W>) {
    assert_eq!(*effects, SpanEffects::default());
}

fn returned(
    spans: &mut Spans,
    now: Instant,
    process: Process,
    generation: u64,
) -> SpanEffects<&'static str> {
    let body = Bytes::from(vec![process.slot.0 as u8, process.incarnation.0 as u8]);
    let outcome = Outcome::Returned;
    spans.result(now, (CALL, process), Generation(generation), outcome, body)
}

fn failed(
    spans: &mut Spans,
    now: Instant,
    process: Process,
    failure: CallFailure,
) -> SpanEffects<&'static str> {
    let outcome = Outcome::Failed(failure);
    spans.result(now, (CALL, process), Generation(0), outcome, Bytes::new())
}

/// A failure that names rank 1 as its cause.
fn echo() -> CallFailure {
    let mut echo = CallFailure::new(FailureKind::Error, "rank 1 has failed");
    echo.caused_by = Some(Rank(1));
    echo
}

/// The only answer.
fn answer(effects: SpanEffects<&'static str>) -> Result<Vec<Bytes>, CallError> {
    assert_eq!(effects.completions.len(), 1, "{effects:?}");
    effects.completions.into_iter().next().unwrap().result
}

fn bodies(of: &[[u8; 2]]) -> Vec<Bytes> {
    of.iter().map(|body| Bytes::from(body.to_vec())).collect()
}

#[test]
fn all_ranks_return_in_one_generation() {
    let (mut spans, now) = three();
    for slot in [2, 0] {
        nothing(&returned(&mut spans, now, process(slot, 1), 0));
    }
    // The same once more counts once.
    nothing(&returned(&mut spans, now, process(0, 1), 0));
    let all = answer(returned(&mut spans, now, process(1, 1), 0)).unwrap();
    assert_eq!(all, bodies(&[[0, 1], [1, 1], [2, 1]]));
    nothing(&returned(&mut spans, now, process(1, 1), 0));
    assert!(!spans.uses(Generation(1)));
}

#[test]
fn a_process_in_place_of_a_lost_one_gets_the_call_and_those_that_stay_keep_it() {
    let (mut spans, now) = three();
    nothing(&spans.lost(process(1, 1), &failure(1, Exit::Signal(9)), None));
    // Ranks move up, the new process is the last.
    let effects = spans.generation(table(2, &[(0, 1), (2, 1), (1, 2)]));
    assert_eq!(effects.gives, gives(&[2]));
    // The old process's late words are nobody's.
    nothing(&returned(&mut spans, now, process(1, 1), 0));
    nothing(&spans.lost(process(1, 1), &failure(1, Exit::Signal(9)), None));
    assert!(spans.uses(Generation(1)) && spans.uses(Generation(2)));
    nothing(&returned(&mut spans, now, process(2, 1), 2));
    nothing(&returned(&mut spans, now, process(1, 2), 0));
    let all = answer(returned(&mut spans, now, process(0, 1), 2)).unwrap();
    assert_eq!(all, bodies(&[[0, 1], [2, 1], [1, 2]]), "in the last ranks");
}

#[test]
fn a_call_that_is_made_between_generations_waits_for_the_next() {
    let now = Instant::now();
    let mut spans = Spans::new(table(1, &[(0, 1), (1, 1)]));
    spans.reported_lost(process(1, 1), &failure(1, Exit::Unknown));
    nothing(&spans.begin(now, CALL, request(None), "driver").unwrap());
    let effects = spans.generation(table(2, &[(0, 1)]));
    assert_eq!(effects.gives, gives(&[0]));
    let all = answer(returned(&mut spans, now, process(0, 1), 0)).unwrap();
    assert_eq!(all, bodies(&[[0, 1]]));
}

#[test]
fn after_the_first_return_nobody_gets_the_call_any_more() {
    let (mut spans, now) = three();
    nothing(&returned(&mut spans, now, process(0, 1), 0));
    // A grown group: the newcomer is not asked, and not waited for.
    nothing(&spans.generation(table(2, &[(0, 1), (1, 1), (2, 1), (3, 1)])));
    nothing(&returned(&mut spans, now, process(1, 1), 0));
    let all = answer(returned(&mut spans, now, process(2, 1), 0)).unwrap();
    assert_eq!(all, bodies(&[[0, 1], [1, 1], [2, 1]]));
}

#[test]
fn a_rank_that_is_lost_after_another_has_returned_is_named() {
    let (mut spans, now) = three();
    nothing(&returned(&mut spans, now, process(0, 1), 0));
    let effects = spans.lost(process(2, 1), &failure(2, Exit::Signal(9)), None);
    let unwanted = vec![(Generation(1), CALL, Rank(1))];
    assert_eq!(effects.cancels, unwanted, "rank 1 runs for nobody");
    let error = answer(effects).unwrap_err();
    assert_eq!(
        (error.kind(), error.rank()),
        (CallErrorKind::Lost, Some(Rank(2)))
    );
    assert_eq!(error.stderr_tail(), ["out of memory"]);
    assert!(!error.is_retryable());
}

#[test]
fn a_rank_that_is_lost_after_it_has_returned_has_returned() {
    let (mut spans, now) = three();
    nothing(&returned(&mut spans, now, process(0, 1), 0));
    nothing(&spans.lost(process(0, 1), &failure(0, Exit::Signal(9)), None));
    nothing(&spans.generation(table(2, &[(1, 1), (2, 1)])));
    nothing(&returned(&mut spans, now, process(1, 1), 0));
    assert_eq!(
        answer(returned(&mut spans, now, process(2, 1), 0)),
        Ok(bodies(&[[0, 1], [1, 1], [2, 1]]))
    );
}

#[test]
fn the_heads_word_alone_keeps_no_result_away() {
    let (mut spans, now) = three();
    nothing(&returned(&mut spans, now, process(0, 1), 0));
    spans.reported_lost(process(1, 1), &failure(1, Exit::Unknown));
    // Its result was on the way before.
    nothing(&returned(&mut spans, now, process(1, 1), 0));
    spans.reported_lost(process(2, 1), &failure(2, Exit::Code(3)));
    // The next generation says that no result will come; the head has said why.
    let error = answer(spans.generation(table(2, &[(0, 1)]))).unwrap_err();
    assert_eq!(
        (error.rank(), error.exit()),
        (Some(Rank(2)), Some(Exit::Code(3)))
    );
}

#[test]
fn survivors_that_return_before_their_generation_is_known_here_wait_for_it() {
    let (mut spans, now) = three();
    // Slot 2 is lost, and the others have gone on to generation 2 and returned: no news of either has come.
    nothing(&returned(&mut spans, now, process(0, 1), 2));
    nothing(&returned(&mut spans, now, process(1, 1), 2));
    nothing(&spans.lost(process(2, 1), &failure(2, Exit::Signal(9)), None));
    let all = answer(spans.generation(table(2, &[(0, 1), (1, 1)]))).unwrap();
    assert_eq!(all, bodies(&[[0, 1], [1, 1]]));
}

#[test]
fn a_process_that_is_ahead_of_the_driver_gets_the_call_again() {
    let (mut spans, now) = three();
    let stale = || CallFailure::new(FailureKind::Stale, "in generation 2");
    nothing(&failed(&mut spans, now, process(0, 1), stale()));
    let effects = spans.generation(table(2, &[(0, 1), (1, 1), (2, 1)]));
    assert_eq!(effects.gives, gives(&[0]));
    // Word of generation 1 that comes later still.
    let effects = failed(&mut spans, now, process(1, 1), stale());
    assert_eq!(effects.gives, gives(&[1]));
    // It has it for good now.
    nothing(&spans.generation(table(3, &[(0, 1), (1, 1), (2, 1)])));
}

#[test]
fn an_error_of_a_ranks_own_ends_the_call() {
    let (mut spans, now) = three();
    nothing(&failed(&mut spans, now, process(0, 1), echo()));
    let own = CallFailure::new(FailureKind::Panic, "index out of bounds");
    let effects = failed(&mut spans, now, process(1, 1), own);
    assert_eq!(effects.cancels, [(Generation(1), CALL, Rank(2))]);
    let error = answer(effects).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`train` failed on rank 1 (host-1): panicked: index out of bounds\nand because of that on rank 0"
    );
    assert!(!error.is_retryable());
}

#[test]
fn an_echo_whose_cause_stays_unknown_ends_the_call_in_time() {
    let (mut spans, now) = three();
    nothing(&failed(&mut spans, now, process(0, 1), echo()));
    assert_eq!(spans.next_wake(), Some(now + ECHO_WAIT));
    nothing(&spans.tick(now));
    let error = answer(spans.tick(now + ECHO_WAIT)).unwrap_err();
    assert_eq!(error.rank(), Some(Rank(0)));
}

#[test]
fn a_function_without_an_elastic_loop_is_to_be_called_again() {
    let (mut spans, now) = three();
    nothing(&spans.lost(process(1, 1), &failure(1, Exit::Signal(9)), None));
    let over = CallFailure::new(FailureKind::GenerationOver, "rank 1 is lost");
    let error = answer(failed(&mut spans, now, process(0, 1), over)).unwrap_err();
    assert!(error.is_retryable());
    let CallError::GenerationOver {
        generation, lost, ..
    } = error
    else {
        panic!("{error:?}");
    };
    assert_eq!((generation, lost), (Generation(1), vec![Rank(1)]));
}

#[test]
fn an_echo_of_a_lost_rank_is_to_be_called_again() {
    let (mut spans, now) = three();
    nothing(&spans.lost(process(1, 1), &failure(1, Exit::Signal(9)), None));
    let error = answer(failed(&mut spans, now, process(0, 1), echo())).unwrap_err();
    assert_eq!(error.kind(), CallErrorKind::GenerationOver);
    // The echo first.
    let (mut spans, now) = three();
    nothing(&failed(&mut spans, now, process(0, 1), echo()));
    nothing(&spans.lost(process(1, 1), &failure(1, Exit::Signal(9)), None));
    let error = answer(spans.tick(now + ECHO_WAIT)).unwrap_err();
    assert_eq!(error.kind(), CallErrorKind::GenerationOver);
}

#[test]
fn what_a_worker_says_that_has_left_or_ends_is_no_failure() {
    let (mut spans, now) = three();
    let left = CallFailure::new(FailureKind::Left, "not in generation 2");
    nothing(&failed(&mut spans, now, process(2, 1), left));
    let mut ending = CallFailure::new(FailureKind::Error, "the worker stops");
    ending.stopping = true;
    nothing(&failed(&mut spans, now, process(1, 1), ending));
    nothing(&spans.generation(table(2, &[(0, 1)])));
    assert_eq!(
        answer(returned(&mut spans, now, process(0, 1), 2)),
        Ok(bodies(&[[0, 1]]))
    );
}

#[test]
fn the_jobs_end_ends_the_call_with_its_reason_and_the_last_words() {
    let (mut spans, now) = three();
    let end = End {
        reason: "1 worker is left of at least 2 for 30 s".to_owned(),
        failure: Some(failure(2, Exit::Signal(9))),
    };
    let error = answer(spans.finish(end)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`train` has no result: 1 worker is left of at least 2 for 30 s"
    );
    assert_eq!(error.stderr_tail(), ["out of memory"]);
    assert_eq!(error.kind(), CallErrorKind::Ended);
    let again = spans.begin(now, CALL, request(None), "driver");
    assert_eq!(again.unwrap_err(), error);
}

#[test]
fn a_deadline_holds_over_all_generations() {
    let now = Instant::now();
    let mut spans = Spans::new(table(1, &[(0, 1), (1, 1)]));
    let after = Duration::from_secs(5);
    spans
        .begin(now, CALL, request(Some(after)), "driver")
        .unwrap();
    nothing(&returned(&mut spans, now, process(1, 1), 0));
    assert_eq!(spans.next_wake(), Some(now + after));
    let effects = spans.tick(now + after);
    assert_eq!(effects.cancels, [(Generation(1), CALL, Rank(0))]);
    let missing = vec![Rank(0)];
    let late = CallError::Deadline {
        call: "train".to_owned(),
        after,
        missing,
        busy: Vec::new(),
    };
    assert_eq!(answer(effects), Err(late));
}

#[test]
fn a_cancelled_call_is_cancelled_where_it_was_given() {
    let (mut spans, _) = three();
    spans.generation(table(2, &[(1, 1), (2, 1), (3, 1)]));
    let effects = spans.cancel(CALL);
    assert!(effects.completions.is_empty());
    assert_eq!(
        effects.cancels,
        [
            (Generation(1), CALL, Rank(1)),
            (Generation(1), CALL, Rank(2)),
            (Generation(2), CALL, Rank(2)),
        ]
    );
    nothing(&spans.cancel(CALL));
}

#[test]
fn a_channel_that_ends_takes_the_calls_that_were_given_over_it() {
    let (mut spans, now) = three();
    spans.generation(table(2, &[(0, 1), (1, 1), (2, 1), (3, 1)]));
    nothing(&returned(&mut spans, now, process(0, 1), 2));
    let gone = failure(3, Exit::Unknown);
    // An older channel of the same process: its call is not on that.
    nothing(&spans.lost(process(3, 1), &gone, Some(Generation(1))));
    let error = answer(spans.lost(process(3, 1), &gone, Some(Generation(2)))).unwrap_err();
    assert_eq!(error.rank(), Some(Rank(3)));
}
