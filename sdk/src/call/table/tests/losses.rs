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
    let taken = send(&mut table, ranks(0..2), Waiters::Each(vec!["a", "b"])).unwrap();
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

    let (mut table, now) = self::table(2);
    whole(&mut table, 2, "w");
    nothing(&table.reported_lost(now, failure(1, Exit::Signal(9))));
    assert_eq!(table.next_wake(), Some(now + SUSPECT_WAIT));
    nothing(&table.tick(now + SUSPECT_WAIT / 2));
    assert_eq!(
        error(table.tick(now + SUSPECT_WAIT), "w").exit(),
        Some(Exit::Signal(9))
    );
    assert_eq!(table.next_wake(), None);

    // That of the rank's own node is final.
    let (mut table, now) = self::table(2);
    whole(&mut table, 2, "w");
    nothing(&table.reported_lost(now, failure(1, Exit::Unknown)));
    let error = error(table.lost(now, failure(1, Exit::Code(7)), false), "w");
    assert_eq!(error.exit(), Some(Exit::Code(7)));
}

#[test]
fn a_channel_that_ends_waits_for_the_heads_word() {
    let gone = |rank| {
        let mut gone = failure(rank, Exit::Unknown);
        gone.reason = Some("the channel is gone".to_owned());
        gone
    };
    // The head says why.
    let (mut table, now) = table(2);
    whole(&mut table, 2, "w");
    nothing(&table.unreachable(now, vec![gone(1)]));
    assert_eq!(
        error(table.reported_lost(now, failure(1, Exit::Signal(9))), "w").exit(),
        Some(Exit::Signal(9))
    );
    // The head had said so before.
    let (mut table, now) = self::table(2);
    whole(&mut table, 2, "w");
    nothing(&table.reported_lost(now, failure(1, Exit::Code(5))));
    assert_eq!(
        error(table.unreachable(now, vec![gone(1)]), "w").exit(),
        Some(Exit::Code(5))
    );
    // The head says nothing.
    let (mut table, now) = self::table(2);
    whole(&mut table, 2, "w");
    nothing(&table.unreachable(now, vec![gone(0), gone(1)]));
    nothing(&table.tick(now + ECHO_WAIT / 2));
    let text = error(table.tick(now + ECHO_WAIT), "w").to_string();
    assert!(text.contains("the channel is gone"), "{text}");
}
