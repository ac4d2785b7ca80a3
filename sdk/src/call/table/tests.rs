use kolo_transport::wire::{CallFailure, FailureKind};

use super::*;
use crate::call::failure::CallErrorKind;
use crate::call::failure::tests::failure;
use kolo_transport::wire::Exit;

mod causes;
mod elastic;
mod losses;
mod model;

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

fn one_each<W: Copy>(waiters: &[W]) -> Waiters<W> {
    Waiters::Each(waiters.iter().copied().map(Some).collect())
}

/// With a deadline, on all ranks of a table of two.
fn send_within(
    table: &mut Table,
    now: Instant,
    after: Duration,
    waiters: Waiters<&'static str>,
) -> CallId {
    let deadline = Some((now + after, after));
    let taken = table.register(now, "f".to_owned(), ranks(0..2), deadline, waiters);
    taken.unwrap().call
}

fn whole<W>(table: &mut CallTable<W>, world: u32, waiter: W) -> CallId {
    let taken = send(table, ranks(0..world), Waiters::Whole(waiter));
    taken.unwrap_or_else(|error| panic!("{error}")).call
}

fn each(table: &mut Table, waiters: &[&'static str]) -> CallId {
    let all = ranks(0..waiters.len() as u32);
    let taken = send(table, all, one_each(waiters));
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
    let (mut table, now) = table(2);
    let after = Duration::from_secs(1);
    let call = send_within(&mut table, now, after, Waiters::Whole("w"));
    nothing(&returned(&mut table, now, call, 1));
    assert_eq!(table.next_wake(), Some(now + after));
    nothing(&table.tick(now + after / 2));
    let effects = table.tick(now + after);
    assert_eq!(effects.cancels, [(call, ranks([0]))]);
    let missing = ranks([0]);
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

    assert_eq!(table.held_up(at(4)), None);
    let busy = "rank 1 (host-1) is still in `forever`, sent 5s ago";
    let line = format!("`next` waits: {busy}");
    assert_eq!(table.held_up(at(5)), Some(line));
    assert_eq!(table.held_up(at(8)), None, "once is enough");
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
    let waiters = one_each(&["a", "b"]);
    let call = send_within(&mut table, now, after, waiters);
    assert_eq!(
        returned(&mut table, now, call, 0).completions[0].waiter,
        "a"
    );
    let effects = table.tick(now + after);
    assert_eq!(effects.cancels, [(call, ranks([1]))]);
    assert_eq!(error(effects, "b").kind(), CallErrorKind::Deadline);
    let call = send_within(&mut table, now, after, Waiters::Whole("w"));
    nothing(&failed(&mut table, now, call, 0, Some(1)));
    assert_eq!(
        error(table.tick(now + after), "w").kind(),
        CallErrorKind::Error
    );
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
