//! Workers that are lost, by the word of their node, of the head, or of nobody.

use super::*;

#[test]
fn a_loss_ends_every_wait_on_the_rank_and_refuses_later_calls() {
    let (mut table, now) = table(2);
    whole(&mut table, 2, "both");
    let one = send(&mut table, ranks([0]), Waiters::Whole("well"))
        .unwrap()
        .call;
    let error = error(table.lost(now, failure(1, Exit::Code(3)), false), "both");
    assert_eq!(
        (error.kind(), error.exit()),
        (CallErrorKind::Lost, Some(Exit::Code(3)))
    );
    nothing(&table.lost(now, failure(1, Exit::Code(3)), false));
    assert_eq!(
        returned(&mut table, now, one, 0).completions[0].waiter,
        "well"
    );
    let refused = send(&mut table, ranks(0..2), Waiters::Whole("w")).unwrap_err();
    assert_eq!(refused.rank(), Some(Rank(1)));
    assert_eq!(table.up(ranks(0..3)), ranks([0]));
    // With a waiter for each rank only the lost one's fails.
    let taken = send(&mut table, ranks(0..2), one_each(&["a", "b"])).unwrap();
    assert_eq!(taken.send_to, ranks([0]));
    assert_eq!(taken.completions.len(), 1);
    assert_eq!(taken.completions[0].waiter, "b");
    assert_eq!(
        returned(&mut table, now, taken.call, 0).completions[0].waiter,
        "a"
    );
    assert_eq!(table.in_flight(), 0);
}

#[test]
fn the_heads_word_does_not_overtake_results() {
    let (mut table, now) = table(2);
    let call = whole(&mut table, 2, "w");
    nothing(&table.reported_lost(now, failure(1, Exit::Code(0))));
    // New calls are refused, but what the node had sent still counts.
    assert!(send(&mut table, ranks([1]), Waiters::Whole("x")).is_err());
    nothing(&returned(&mut table, now, call, 1));
    assert_eq!(
        returned(&mut table, now, call, 0).completions[0].waiter,
        "w"
    );
}
