use kolo_transport::wire::{CallFailure, FailureKind};

use super::*;
use crate::call::failure::CallErrorKind;
use crate::call::failure::tests::failure;
use kolo_transport::wire::Exit;

mod elastic;
mod losses;
mod model;
mod stops;

type Table = CallTable<&'static str>;

fn table(world: u32) -> (Table, Instant) {
    (
        CallTable::new((0..world).map(|rank| format!("host-{rank}")).collect()),
        Instant::now(),
    )
}

fn ranks(ranks: impl IntoIterator<Item = u32>) -> Vec<Rank> {
    ranks.into_iter().map(Rank).collect()
}

fn send<W>(
    table: &mut CallTable<W>,
    ranks: Vec<Rank>,
    waiters: Waiters<W>,
) -> Result<Registered<W>, CallError> {
    table.register(Instant::now(), "f".to_owned(), ranks, None, waiters)
}

fn whole<W>(table: &mut CallTable<W>, world: u32, waiter: W) -> CallId {
    let taken = send(table, ranks(0..world), Waiters::Whole(waiter));
    taken.unwrap_or_else(|error| panic!("{error}")).call
}

fn each(table: &mut Table, waiters: &[&'static str]) -> CallId {
    let all = ranks(0..waiters.len() as u32);
    let taken = send(table, all, Waiters::Each(waiters.to_vec()));
    taken.unwrap().call
}

fn body(rank: u32) -> Bytes {
    Bytes::from(vec![rank as u8])
}

fn returned<W>(table: &mut CallTable<W>, now: Instant, call: CallId, rank: u32) -> Effects<W> {
    table.result(now, call, Rank(rank), Outcome::Returned, body(rank))
}

fn failed<W>(
    table: &mut CallTable<W>,
    now: Instant,
    call: CallId,
    rank: u32,
    caused_by: Option<u32>,
) -> Effects<W> {
    let mut failure = CallFailure::new(FailureKind::Error, format!("rank {rank} fails"));
    failure.caused_by = caused_by.map(Rank);
    table.result(
        now,
        call,
        Rank(rank),
        Outcome::Failed(failure),
        Bytes::new(),
    )
}

/// The only completion, which is an error: its first cause.
fn error<W: PartialEq + std::fmt::Debug>(effects: Effects<W>, waiter: W) -> CallError {
    assert_eq!(effects.completions.len(), 1, "{effects:?}");
    let completion = effects.completions.into_iter().next().unwrap();
    assert_eq!(completion.waiter, waiter);
    completion.result.unwrap_err()
}

fn nothing<W: PartialEq + std::fmt::Debug>(effects: &Effects<W>) {
    assert_eq!(*effects, Effects::default());
}

#[test]
fn what_can_not_be_called_is_refused() {
    let (mut table, _) = table(2);
    let mut refused = |list: &[u32]| {
        let list = ranks(list.iter().copied());
        send(&mut table, list, Waiters::Whole("w")).unwrap_err()
    };
    assert_eq!(
        refused(&[]),
        CallError::NoRanks {
            call: "f".to_owned()
        }
    );
    assert_eq!(
        refused(&[1, 2]),
        CallError::NoSuchRank {
            rank: Rank(2),
            world_size: 2
        }
    );
    assert_eq!(table.in_flight(), 0);
}

#[test]
fn an_echo_waits_for_its_cause() {
    let (mut table, now) = table(4);
    let call = whole(&mut table, 4, "w");
    nothing(&failed(&mut table, now, call, 0, Some(3)));
    nothing(&failed(&mut table, now, call, 1, Some(3)));
    assert_eq!(table.next_wake(), Some(now + ECHO_WAIT));
    let error = error(failed(&mut table, now, call, 3, None), "w");
    let order: Vec<u32> = error.failures().map(|failure| failure.rank.0).collect();
    assert_eq!(order, [3, 0, 1]);
    assert_eq!(table.next_wake(), None);
}

#[test]
fn an_echo_of_a_loss_names_the_lost_rank() {
    // Before and after the loss is known; also of a rank that the call is not for.
    let (mut table, now) = table(3);
    let call = whole(&mut table, 2, "w");
    nothing(&failed(&mut table, now, call, 0, Some(2)));
    let text = error(table.lost(now, failure(2, Exit::Signal(9)), false), "w").to_string();
    assert!(
        text.starts_with("`f` failed on rank 2 (gpu-7): the worker (pid 412) ended with signal 9"),
        "{text}"
    );
    assert!(text.ends_with("and because of that on rank 0"), "{text}");
    let call = whole(&mut table, 2, "w");
    assert_eq!(
        error(failed(&mut table, now, call, 1, Some(2)), "w").rank(),
        Some(Rank(2))
    );
}

#[test]
fn an_echo_of_a_rank_that_is_well_or_of_itself_is_the_cause() {
    let (mut table, now) = table(2);
    let call = whole(&mut table, 2, "w");
    nothing(&returned(&mut table, now, call, 1));
    nothing(&failed(&mut table, now, call, 0, Some(1)));
    assert_eq!(
        error(table.tick(now + LEAVE_WAIT), "w").rank(),
        Some(Rank(0))
    );
    let call = whole(&mut table, 2, "w");
    assert_eq!(
        error(failed(&mut table, now, call, 0, Some(0)), "w").rank(),
        Some(Rank(0))
    );
}

#[test]
fn the_end_ends_everything_with_its_reason() {
    let (mut table, now) = table(2);
    whole(&mut table, 2, "a");
    each(&mut table, &["b", "c"]);
    let end = End {
        reason: "the group was shut down".to_owned(),
        failure: None,
    };
    let effects = table.finish(end);
    let waiters: Vec<_> = effects
        .completions
        .iter()
        .map(|completion| completion.waiter)
        .collect();
    assert_eq!(waiters, ["a", "b", "c"]);
    for completion in effects.completions {
        let text = completion.result.unwrap_err().to_string();
        assert_eq!(text, "`f` has no result: the group was shut down");
    }
    let refused = send(&mut table, ranks([0]), Waiters::Whole("w")).unwrap_err();
    assert_eq!(refused.kind(), CallErrorKind::Ended);
    nothing(&table.tick(now + ECHO_WAIT));
}

#[test]
fn a_group_that_closes_takes_nothing_new_and_ends_what_it_has() {
    let (mut table, now) = table(1);
    let call = whole(&mut table, 1, "a");
    whole(&mut table, 1, "b");
    table.close("the group was shut down");
    table.close("its executor was dropped");
    let refused = send(&mut table, ranks([0]), Waiters::Whole("w")).unwrap_err();
    assert!(
        refused.to_string().ends_with("the group was shut down"),
        "{refused}"
    );
    assert!(
        returned(&mut table, now, call, 0).completions[0]
            .result
            .is_ok()
    );
    let end = End {
        reason: "over".to_owned(),
        failure: None,
    };
    assert_eq!(error(table.finish(end), "b").kind(), CallErrorKind::Ended);
}

#[test]
fn a_deadline_names_the_late_ranks_and_cancels_there() {
    let (mut table, now) = table(3);
    let after = Duration::from_secs(1);
    let deadline = Some((now + after, after));
    let call = table
        .register(
            Instant::now(),
            "f".to_owned(),
            ranks(0..3),
            deadline,
            Waiters::Whole("w"),
        )
        .unwrap()
        .call;
    nothing(&returned(&mut table, now, call, 1));
    assert_eq!(table.next_wake(), Some(now + after));
    nothing(&table.tick(now + after / 2));
    let effects = table.tick(now + after);
    assert_eq!(effects.cancels, [(call, ranks([0, 2]))]);
    let missing = ranks([0, 2]);
    assert_eq!(
        error(effects, "w"),
        CallError::Deadline {
            call: "f".to_owned(),
            after,
            missing,
            busy: Vec::new()
        }
    );
    assert_eq!((table.in_flight(), table.next_wake()), (0, None));
}

#[test]
fn a_call_behind_one_that_still_runs_says_so() {
    let (mut table, now) = table(3);
    let at = |seconds| now + Duration::from_secs(seconds);
    let send = |table: &mut Table, sent, name: &str, deadline| {
        let taken = table.register(
            at(sent),
            name.to_owned(),
            ranks(0..3),
            deadline,
            Waiters::Whole("w"),
        );
        taken.unwrap().call
    };
    // Nobody waits for the first call any more; rank 1 is still in it.
    let first = send(&mut table, 0, "forever", None);
    table.cancel(first, None);
    nothing(&returned(&mut table, now, first, 0));
    let second = send(&mut table, 1, "next", None);
    nothing(&returned(&mut table, now, second, 0));
    nothing(&failed(&mut table, now, first, 2, None));
    let late = Some((at(13), Duration::from_secs(10)));
    let third = send(&mut table, 3, "last", late);

    assert_eq!(table.held_up(at(10)), None);
    let busy = "rank 1 (host-1) is still in `forever`, sent 11s ago";
    let line = format!("`next` waits: {busy}");
    assert_eq!(table.held_up(at(11)), Some(line));
    assert_eq!(table.held_up(at(12)), None, "once is enough");
    let error = error(table.tick(at(13)), "w").to_string();
    let text = "`last` had no result from ranks 0, 1, 2 after 10s, its deadline: \
                rank 1 (host-1) is still in `forever`, sent 13s ago, rank 2 (host-2) is still in `next`, sent 12s ago";
    assert_eq!(error, text);
    nothing(&returned(&mut table, now, first, 1));
    assert_eq!(table.busy(at(14), third, &ranks([1]))[0].call, "next");
}

#[test]
fn a_deadline_leaves_ready_results_alone_and_tells_an_echo_rather_than_the_time() {
    let (mut table, now) = table(2);
    let after = Duration::from_secs(1);
    let deadline = Some((now + after, after));
    let waiters = Waiters::Each(vec!["a", "b"]);
    let call = table
        .register(
            Instant::now(),
            "f".to_owned(),
            ranks(0..2),
            deadline,
            waiters,
        )
        .unwrap()
        .call;
    assert_eq!(
        returned(&mut table, now, call, 0).completions[0].waiter,
        "a"
    );
    let effects = table.tick(now + after);
    assert_eq!(effects.cancels, [(call, ranks([1]))]);
    assert_eq!(error(effects, "b").kind(), CallErrorKind::Deadline);
    let call = table
        .register(
            Instant::now(),
            "f".to_owned(),
            ranks(0..2),
            deadline,
            Waiters::Whole("w"),
        )
        .unwrap()
        .call;
    nothing(&failed(&mut table, now, call, 0, Some(1)));
    assert_eq!(
        error(table.tick(now + after), "w").kind(),
        CallErrorKind::Error
    );
}

#[test]
fn a_dropped_future_cancels_where_there_is_no_result() {
    let (mut table, now) = table(2);
    let call = whole(&mut table, 2, "w");
    nothing(&returned(&mut table, now, call, 0));
    let effects = table.cancel(call, None);
    assert_eq!(
        (effects.completions.len(), effects.cancels),
        (0, vec![(call, ranks([1]))])
    );
    nothing(&table.cancel(call, None));
    nothing(&returned(&mut table, now, call, 1));
    assert_eq!(table.in_flight(), 0);
}

#[test]
fn one_rank_of_several_is_cancelled_alone() {
    let (mut table, now) = table(3);
    let call = each(&mut table, &["a", "b", "c"]);
    assert_eq!(
        table.cancel(call, Some(Rank(1))).cancels,
        [(call, ranks([1]))]
    );
    nothing(&table.cancel(call, Some(Rank(1))));
    nothing(&table.cancel(call, Some(Rank(7))));
    assert_eq!(
        returned(&mut table, now, call, 0).completions[0].waiter,
        "a"
    );
    nothing(&returned(&mut table, now, call, 1));
    // Its result has come: there is nothing to cancel.
    nothing(&table.cancel(call, Some(Rank(0))));
    assert_eq!(
        table.cancel(call, Some(Rank(2))).cancels,
        [(call, ranks([2]))]
    );
    assert_eq!(table.in_flight(), 0);
}

#[test]
fn each_waiter_gets_its_own_result_and_the_first_cause_of_its_failure() {
    let (mut table, now) = table(3);
    let call = each(&mut table, &["a", "b", "c"]);
    nothing(&failed(&mut table, now, call, 0, Some(2)));
    let one = returned(&mut table, now, call, 1);
    assert_eq!(
        one.completions,
        [Completion {
            waiter: "b",
            result: Ok(vec![body(1)])
        }]
    );
    let both = failed(&mut table, now, call, 2, None).completions;
    assert_eq!(
        both.iter()
            .map(|completion| completion.waiter)
            .collect::<Vec<_>>(),
        ["a", "c"]
    );
    let failures: Vec<Vec<u32>> = both
        .into_iter()
        .map(|completion| {
            completion
                .result
                .unwrap_err()
                .failures()
                .map(|f| f.rank.0)
                .collect()
        })
        .collect();
    assert_eq!(failures, [vec![2, 0], vec![2]]);
    assert_eq!(table.in_flight(), 0);
}
