//! Of the book.

use kolo_transport::ids::Rank;

use super::*;
use crate::element::DType;
use crate::operation::{OperationKind, ReduceOp};
use crate::stall::Missing;

const LIMIT: Duration = Duration::from_secs(10);

pub(super) fn sum(count: u64) -> Operation {
    Operation {
        reduce: Some(ReduceOp::Sum),
        ..Operation::new(OperationKind::AllReduce, Some(DType::F32), count)
    }
}

pub(super) fn asked(operation: Operation) -> Request {
    Request {
        operation,
        limit: LIMIT,
        serial: 0,
        epoch: 0,
    }
}

pub(super) fn key(name: &str) -> Key {
    (0, name.to_owned())
}

pub(super) fn book(world: u32) -> (Book, Instant) {
    (
        Book::new(world, 100, Duration::from_secs(5)),
        Instant::now(),
    )
}

pub(super) fn runs(verdicts: Vec<Verdict>) -> Vec<Vec<String>> {
    verdicts
        .into_iter()
        .map(|verdict| match verdict {
            Verdict::Run { names, .. } => names,
            other => panic!("{other:?}"),
        })
        .collect()
}

#[test]
fn a_name_runs_when_all_have_asked_in_whatever_order() {
    let (mut book, now) = book(2);
    book.ask(now, 0, key("a"), asked(sum(1)));
    book.ask(now, 0, key("b"), asked(sum(100)));
    book.ask(now, 1, key("b"), asked(sum(100)));
    assert_eq!(runs(book.verdicts(now)), [["b"]]);
    book.ask(now, 1, key("a"), asked(sum(1)));
    assert_eq!(runs(book.verdicts(now)), [["a"]]);
    assert_eq!(book.next_alarm(), None);
}

#[test]
fn what_is_ready_while_others_run_is_fused_up_to_the_threshold() {
    let (mut book, now) = book(1);
    let max = Operation {
        reduce: Some(ReduceOp::Max),
        ..sum(1)
    };
    for name in ["x", "y"] {
        book.ask(now, 0, key(name), asked(sum(25)));
        assert_eq!(runs(book.verdicts(now)), [[name]]);
    }
    for (name, operation) in [
        ("a", sum(10)),
        ("m", max),
        ("b", sum(10)),
        ("big", sum(10)),
        ("c", sum(5)),
    ] {
        book.ask(now, 0, key(name), asked(operation));
    }
    assert_eq!(book.verdicts(now), [], "two are under way");
    book.ended();
    assert_eq!(runs(book.verdicts(now)), [["a", "b", "c"]]);
    book.ended();
    assert_eq!(runs(book.verdicts(now)), [["m"]]);
    book.ended();
    assert_eq!(runs(book.verdicts(now)), [["big"]]);
}

#[test]
fn gathers_and_scatters_are_fused_with_their_like() {
    let (mut book, now) = book(2);
    let gather = |count| Operation::new(OperationKind::AllGather, Some(DType::F32), count);
    let scatter = |count, rows| Operation {
        kind: OperationKind::ReduceScatter,
        rows,
        ..sum(count)
    };
    let mut ask = |name: &str, operation| {
        for rank in 0..2 {
            book.ask(now, rank, key(name), asked(operation));
        }
        runs(book.verdicts(now))
    };
    assert_eq!(ask("x", sum(1)), [["x"]]);
    assert_eq!(ask("y", sum(1)), [["y"]]);
    for (name, operation) in [
        ("g1", gather(5)),
        ("s1", scatter(4, 2)),
        // A rank gets 2 x 4 x 8 bytes, and the threshold is 100.
        ("g2", gather(8)),
        (
            "of bytes",
            Operation::new(OperationKind::AllGather, Some(DType::U8), 1),
        ),
        ("s2", scatter(6, 3)),
        // Fewer rows than ranks, no whole rows, several buffers, and what can't be done.
        ("s3", scatter(6, 1)),
        ("s4", scatter(6, 4)),
        ("s5", scatter(6, Operation::OF_SEVERAL)),
        (
            "s6",
            Operation {
                reduce: Some(ReduceOp::Adasum),
                ..scatter(6, 3)
            },
        ),
        (
            "group",
            Operation {
                rows: 2,
                ..Operation::new(OperationKind::AllGatherVarcount, Some(DType::F32), 0)
            },
        ),
        ("g3", gather(2)),
    ] {
        assert!(ask(name, operation).is_empty());
    }
    let mut ran = Vec::new();
    for _ in 0..20 {
        book.ended();
        ran.extend(runs(book.verdicts(now)));
    }
    assert_eq!(
        ran,
        [
            &["g1", "g3"][..],
            &["s1", "s2"],
            &["g2"],
            &["of bytes"],
            &["s3"],
            &["s4"],
            &["s5"],
            &["s6"],
            &["group"]
        ]
    );
}

#[test]
fn operations_have_numbers_in_their_calls() {
    let (mut book, now) = book(1);
    let gather = Operation::new(OperationKind::AllGatherVarcount, Some(DType::F32), 0);
    let mut numbers = Vec::new();
    for (call, name, operation) in [
        (0, "a", sum(1)),
        (0, "b", gather),
        (0, "c", sum(1)),
        (7, "a", sum(1)),
        (7, "b", sum(1)),
    ] {
        book.ask(now, 0, (call, name.to_owned()), asked(operation));
        for verdict in book.verdicts(now) {
            if let Verdict::Run { call, number, .. } = verdict {
                numbers.push((call, number));
            }
        }
        book.ended();
    }
    assert_eq!(numbers, [(0, 0), (0, 1), (0, 2), (7, 0), (7, 1)]);
}

#[test]
fn a_rank_that_asks_without_end_is_seen() {
    let (mut book, now) = book(2);
    for index in 0..ASKED {
        assert!(!book.is_greedy(1));
        book.ask(now, 1, key(&index.to_string()), asked(sum(1)));
    }
    assert!(book.is_greedy(1));
    assert!(!book.is_greedy(0));
    book.over(
        1,
        Cause::Left {
            rank: Rank(1),
            reason: "call 1 has begun".to_owned(),
        },
    );
    assert!(!book.is_greedy(1), "what has ended does not count");
}

#[test]
fn ranks_that_disagree_are_named() {
    let (mut book, now) = book(3);
    book.ask(now, 0, key("a"), asked(sum(1)));
    book.ask(now, 1, key("a"), asked(sum(1)));
    book.ask(now, 2, key("a"), asked(sum(2)));
    let [
        Verdict::Fail {
            names,
            cause,
            asked,
            ..
        },
    ] = &book.verdicts(now)[..]
    else {
        panic!("it fails");
    };
    assert_eq!(names, &["a"]);
    assert_eq!(asked, &[true; 3]);
    assert_eq!(
        cause,
        &Cause::Mismatch {
            rank: Rank(0),
            asked: "all_reduce(sum) of 1 f32 named `a`".to_owned(),
            other: Rank(2),
            other_asked: "all_reduce(sum) of 2 f32".to_owned(),
        }
    );
}

#[test]
fn a_late_rank_is_asked_reported_and_in_the_end_named() {
    let (mut book, now) = book(3);
    book.ask(now, 0, key("a"), asked(sum(1)));
    book.ask(now, 2, key("a"), asked(sum(1)));
    let at = |millis| now + Duration::from_millis(millis);
    let query = [Verdict::Query { ranks: vec![1] }];
    assert!(!book.wants_to_know(1));
    for asked in [100, 1000, 2000, 4000] {
        assert_eq!(book.next_alarm(), Some(at(asked)));
        assert_eq!(book.verdicts(at(asked - 1)), []);
        assert_eq!(book.verdicts(at(asked)), query);
    }
    assert!(book.wants_to_know(1) && !book.wants_to_know(2));
    // Whoever has just said it is not asked again, but for a report.
    book.doing(at(4950), 1, "it sleeps".to_owned());
    assert_eq!(book.next_alarm(), Some(at(5000)));
    assert_eq!(book.verdicts(at(5000)), query);
    book.doing(at(5100), 1, "it sleeps".to_owned());
    let [Verdict::Stalled { missing, names, .. }] = &book.verdicts(at(6000))[..] else {
        panic!("it is reported");
    };
    assert_eq!(missing, &[(1, "it sleeps".to_owned())]);
    assert_eq!(names, &["a"]);
    assert_eq!(book.next_alarm(), Some(at(8000)));
    assert_eq!(book.verdicts(at(8000)), query);
    book.doing(at(8100), 1, "it reads".to_owned());
    assert_eq!(book.next_alarm(), Some(at(10_000)));
    let [Verdict::Fail { cause, asked, .. }] = &book.verdicts(at(10_000))[..] else {
        panic!("it fails");
    };
    assert_eq!(asked, &[true, false, true], "it is no news for others");
    assert_eq!(
        cause,
        &Cause::Deadline {
            waited: LIMIT,
            late: vec![Rank(1)],
            doing: vec![Missing {
                rank: Rank(1),
                doing: "it reads (as it said 1.9 s ago)".to_owned(),
            }],
        }
    );
    assert_eq!(book.next_alarm(), None);
}

#[test]
fn a_loss_fails_all_and_a_call_that_is_over_its_own() {
    let (mut book, now) = book(2);
    book.ask(now, 0, (4, "a".to_owned()), asked(sum(1)));
    book.ask(now, 0, (5, "a".to_owned()), asked(sum(1)));
    let failed = Cause::Failed {
        rank: Rank(1),
        reason: "panic".to_owned(),
    };
    book.over(5, failed.clone());
    let fail = |call, cause: &Cause| Verdict::Fail {
        call,
        heard: Arc::new(vec![0; 2]),
        names: vec!["a".to_owned()],
        cause: cause.clone(),
        asked: vec![true, false],
    };
    assert_eq!(book.verdicts(now), [fail(4, &failed)]);
    book.ask(now, 0, (4, "a".to_owned()), asked(sum(1)));
    assert_eq!(book.verdicts(now), [fail(4, &failed)], "it stays over");
    let lost = Cause::Lost {
        rank: Rank(1),
        reason: "killed".to_owned(),
        for_good: true,
    };
    book.lost(lost.clone(), true);
    assert_eq!(book.verdicts(now), [fail(5, &lost)]);
    book.ask(now, 0, (6, "a".to_owned()), asked(sum(1)));
    assert_eq!(book.verdicts(now), [fail(6, &lost)]);
}

/// A verdict is about what was heard before it, though more comes before it is told.
#[test]
fn verdicts_say_which_requests_they_are_about() {
    let (mut book, now) = book(2);
    let with = |serial| Request {
        serial,
        ..asked(sum(1))
    };
    let left = Cause::Left {
        rank: Rank(1),
        reason: "it broke".to_owned(),
    };
    book.ask(now, 0, key("a"), with(4));
    book.lost(left.clone(), false);
    book.ask(now, 1, key("a"), with(7));
    let fail = |heard: [u64; 2], asked: [bool; 2]| Verdict::Fail {
        call: 0,
        heard: Arc::new(heard.to_vec()),
        names: vec!["a".to_owned()],
        cause: left.clone(),
        asked: asked.to_vec(),
    };
    assert_eq!(book.verdicts(now), [fail([4, 0], [true, false])]);
    // What came since stands, for what rank 0 tries again.
    book.ask(now, 0, key("a"), with(5));
    let [Verdict::Run { heard, .. }] = &book.verdicts(now)[..] else {
        panic!("it runs");
    };
    assert_eq!(**heard, [5, 7]);
    // Of a call that is over, too.
    book.over(1, left.clone());
    book.ask(now, 1, key("a"), with(8));
    assert_eq!(book.verdicts(now), [fail([5, 8], [false, true])]);
}

/// As with the settings that nobody changes.
#[test]
fn what_is_reported_as_late_as_it_is_given_up_is_reported_first() {
    for (stall_after, is_reported) in [
        (LIMIT, true),
        (Duration::from_millis(9900), true),
        (LIMIT + Duration::from_millis(1), false),
    ] {
        let (mut book, now) = book(2);
        book.set_stall_after(now, stall_after);
        book.ask(now, 0, key("a"), asked(sum(1)));
        book.ask(now, 0, key("b"), asked(sum(2)));
        let mut told = Vec::new();
        while let Some(at) = book.next_alarm() {
            told.extend(book.verdicts(at));
        }
        told.retain(|verdict| !matches!(verdict, Verdict::Query { .. }));
        if is_reported {
            let Verdict::Stalled {
                names,
                waited,
                missing,
                ..
            } = told.remove(0)
            else {
                panic!("it is reported");
            };
            assert_eq!(
                (names, waited),
                (vec!["a".to_owned(), "b".to_owned()], LIMIT)
            );
            assert_eq!(missing, [(1, "nothing is heard from it".to_owned())]);
        }
        let [Verdict::Fail { .. }, Verdict::Fail { .. }] = &told[..] else {
            panic!("{told:?}");
        };
    }
}
