use kolo_transport::ids::Rank;
use proptest::prelude::*;

use super::*;
use crate::element::DType;
use crate::operation::{OperationKind, ReduceOp};
use crate::stall::Missing;

const LIMIT: Duration = Duration::from_secs(10);
const THRESHOLD: u64 = 100;

fn sum(count: u64) -> Operation {
    Operation {
        reduce: Some(ReduceOp::Sum),
        ..Operation::new(OperationKind::AllReduce, Some(DType::F32), count)
    }
}

fn asked(operation: Operation) -> Request {
    Request {
        operation,
        limit: LIMIT,
        serial: 0,
        epoch: 0,
    }
}

fn key(name: &str) -> Key {
    (0, name.to_owned())
}

fn book(world: u32) -> (Book, Instant) {
    let stall_after = Duration::from_secs(5);
    (Book::new(world, THRESHOLD, stall_after), Instant::now())
}

fn names_of(decisions: Vec<Decision>) -> Vec<Vec<String>> {
    let names = decisions.into_iter().map(|decision| match decision {
        Decision::Run { names, .. } => names,
        other => panic!("{other:?}"),
    });
    names.collect()
}

fn left(reason: &str) -> CollectiveError {
    CollectiveError::PeerLeft {
        rank: Rank(1),
        reason: reason.to_owned(),
    }
}

/// Operations that get ready in this order, and the names that run together.
type Case<'a> = (&'a [(&'a str, Operation)], &'a [&'a [&'a str]]);

/// The first two run at once, and what gets ready meanwhile is fused with its like, up to the threshold.
#[test]
fn operations_are_fused_with_their_like() {
    let gather = |count| Operation::new(OperationKind::AllGather, Some(DType::F32), count);
    let scatter = |count, rows| Operation {
        kind: OperationKind::ReduceScatter,
        rows,
        ..sum(count)
    };
    let reduce = |reduce| Operation {
        reduce: Some(reduce),
        ..sum(1)
    };
    let several = Operation {
        rows: 2,
        ..Operation::new(OperationKind::AllGatherVarcount, Some(DType::F32), 0)
    };
    let cases: [Case<'_>; 3] = [
        (
            &[
                ("a", sum(10)),
                ("max", reduce(ReduceOp::Max)),
                ("b", sum(10)),
                ("too big", sum(10)),
                ("c", sum(5)),
                ("adasum", reduce(ReduceOp::Adasum)),
                ("adasums", reduce(ReduceOp::Adasum)),
            ],
            &[
                &["a", "b", "c"],
                &["max"],
                &["too big"],
                &["adasum"],
                &["adasums"],
            ],
        ),
        (
            // A rank gets 2 x 4 x 8 bytes of "g2".
            &[
                ("g1", gather(5)),
                ("s1", scatter(4, 2)),
                ("g2", gather(8)),
                (
                    "bytes",
                    Operation::new(OperationKind::AllGather, Some(DType::U8), 1),
                ),
                ("s2", scatter(6, 3)),
                ("g3", gather(2)),
            ],
            &[&["g1", "g3"], &["s1", "s2"], &["g2"], &["bytes"]],
        ),
        (
            &[
                ("fewer rows than ranks", scatter(6, 1)),
                ("no whole rows", scatter(6, 4)),
                ("several buffers", scatter(6, Operation::OF_SEVERAL)),
                ("several gathers", several),
                ("good", scatter(6, 3)),
            ],
            &[
                &["fewer rows than ranks"],
                &["no whole rows"],
                &["several buffers"],
                &["several gathers"],
                &["good"],
            ],
        ),
    ];
    for (operations, expected) in cases {
        let (mut book, now) = book(2);
        let mut ask = |name: &str, operation| {
            for member in 0..2 {
                book.ask(now, member, key(name), asked(operation));
            }
            names_of(book.decisions(now))
        };
        for name in ["x", "y"] {
            assert_eq!(ask(name, sum(25)), [[name]]);
        }
        for (name, operation) in operations {
            assert!(ask(name, *operation).is_empty());
        }
        let mut ran = Vec::new();
        for _ in 0..20 {
            book.ended();
            ran.extend(names_of(book.decisions(now)));
        }
        assert_eq!(ran, expected);
    }
}

proptest! {
    /// Whatever the order of the requests and of the ends: each name runs once, numbers have no gaps, and no fused operation is over
    /// the threshold.
    #[test]
    fn every_name_runs_once(
        counts in prop::collection::vec(0_u64..30, 1..20),
        order in prop::collection::vec(any::<prop::sample::Index>(), 60),
        ends in prop::collection::vec(any::<bool>(), 60),
    ) {
        let (mut book, now) = book(3);
        let mut left: Vec<(u32, usize)> = (0..3)
            .flat_map(|member| (0..counts.len()).map(move |name| (member, name)))
            .collect();
        let (mut ran, mut next) = (Vec::new(), 0);
        let mut check = |decisions: Vec<Decision>| {
            for decision in decisions {
                let Decision::Run { call: 0, number, names, followers, .. } = decision else {
                    panic!("{decision:?}");
                };
                assert_eq!((number, followers), (next, Vec::new()));
                next += 1;
                let names: Vec<usize> = names.iter().map(|name| name.parse().unwrap()).collect();
                let bytes: u64 = names.iter().map(|name| 4 * counts[*name]).sum();
                assert!(names.len() == 1 || bytes <= THRESHOLD);
                ran.extend(names);
            }
        };
        for (index, ends) in order.iter().zip(ends) {
            if !left.is_empty() {
                let (member, name) = left.swap_remove(index.index(left.len()));
                book.ask(now, member, key(&name.to_string()), asked(sum(counts[name])));
            }
            if ends {
                book.ended();
            }
            check(book.decisions(now));
        }
        for _ in 0..counts.len() {
            book.ended();
            check(book.decisions(now));
        }
        ran.sort_unstable();
        prop_assert!(ran.into_iter().eq(0..counts.len()));
        prop_assert_eq!(book.next_alarm(), None);
    }
}

#[test]
fn numbers_begin_anew_in_each_call() {
    let (mut book, now) = book(1);
    let gather = Operation::new(OperationKind::AllGatherVarcount, Some(DType::F32), 0);
    let mut numbers = Vec::new();
    for (call, name, operation) in [
        (0, "a", sum(1)),
        (0, "b", gather),
        (7, "a", sum(1)),
        (7, "b", sum(1)),
    ] {
        book.ask(now, 0, (call, name.to_owned()), asked(operation));
        for decision in book.decisions(now) {
            if let Decision::Run { call, number, .. } = decision {
                numbers.push((call, number));
            }
        }
        book.ended();
    }
    assert_eq!(numbers, [(0, 0), (0, 1), (7, 0), (7, 1)]);
}

#[test]
fn a_member_that_asks_without_end_is_seen() {
    let (mut book, now) = book(2);
    for index in 0..ASKED {
        assert!(!book.is_greedy(1));
        book.ask(now, 1, key(&index.to_string()), asked(sum(1)));
    }
    assert!(book.is_greedy(1) && !book.is_greedy(0));
    book.over(1, left("call 1 has begun"));
    assert!(!book.is_greedy(1), "what has ended does not count");
}

#[test]
fn a_late_member_is_asked_reported_and_in_the_end_named() {
    let (mut book, now) = book(3);
    book.ask(now, 0, key("a"), asked(sum(1)));
    book.ask(now, 2, key("a"), asked(sum(1)));
    let at = |millis| now + Duration::from_millis(millis);
    let query = [Decision::Query { members: vec![1] }];
    assert!(!book.wants_to_know(1));
    for asked in [100, 1000, 2000, 4000] {
        assert_eq!(book.next_alarm(), Some(at(asked)));
        assert_eq!(book.decisions(at(asked - 1)), []);
        assert_eq!(book.decisions(at(asked)), query);
    }
    assert!(book.wants_to_know(1) && !book.wants_to_know(2));
    // A member that has just said it is not asked again, but for a report.
    book.clock.does(at(4950), 1, "it sleeps".to_owned());
    assert_eq!(book.next_alarm(), Some(at(5000)));
    assert_eq!(book.decisions(at(5000)), query);
    book.clock.does(at(5100), 1, "it sleeps".to_owned());
    let [Decision::Stalled { missing, names, .. }] = &book.decisions(at(6000))[..] else {
        panic!("it is reported");
    };
    assert_eq!(missing, &[(1, "it sleeps".to_owned())]);
    assert_eq!(names, &["a"]);
    assert_eq!(book.next_alarm(), Some(at(8000)));
    assert_eq!(book.decisions(at(8000)), query);
    book.clock.does(at(8100), 1, "it reads".to_owned());
    assert_eq!(book.next_alarm(), Some(at(10_000)));
    let [Decision::Fail(failed)] = &book.decisions(at(10_000))[..] else {
        panic!("it fails");
    };
    assert_eq!(
        failed.asked,
        [true, false, true],
        "the others need not know"
    );
    let expected = CollectiveError::Deadline {
        operation: String::new(),
        waited: LIMIT,
        late: vec![Rank(1)],
        doing: vec![Missing {
            rank: Rank(1),
            doing: "it reads (as it said 1.9s ago)".to_owned(),
        }],
    };
    assert_eq!(failed.cause, expected);
    assert_eq!(book.next_alarm(), None);
}

/// The word that an operation runs may be lost with a link: the member says on the next one of what it has heard.
#[test]
fn a_member_with_a_new_link_hears_of_the_numbers_that_it_missed() {
    let (mut book, now) = book(2);
    let mut run = |call| {
        for member in 0..2 {
            book.ask(now, member, (call, "a".to_owned()), asked(sum(1)));
        }
        assert_eq!(names_of(book.decisions(now)), [["a"]]);
        book.ended();
    };
    (0..3).for_each(|_| run(4));
    for (call, next, missed) in [
        (4, 3, None),
        (4, 1, Some(1..3)),
        // It heard of none in this call.
        (2, 17, Some(0..3)),
        (0, 0, Some(0..3)),
        // No member that keeps to the protocol says these.
        (4, 9, None),
        (5, 0, Some(0..3)),
    ] {
        book.hear(now, 1, Up::Heard { call, next });
        let told = missed.map(|numbers| Decision::Missed {
            member: 1,
            call: 4,
            numbers,
        });
        assert_eq!(book.decisions(now), Vec::from_iter(told), "{call} {next}");
    }
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
            told.extend(book.decisions(at));
        }
        told.retain(|decision| !matches!(decision, Decision::Query { .. }));
        if is_reported {
            let stalled = Decision::Stalled {
                call: 0,
                names: vec!["a".to_owned(), "b".to_owned()],
                waited: LIMIT,
                missing: vec![(1, "nothing is heard from it".to_owned())],
            };
            assert_eq!(told.remove(0), stalled);
        }
        assert!(
            matches!(told[..], [Decision::Fail(_), Decision::Fail(_)]),
            "{told:?}"
        );
    }
}

/// A decision is about what was heard before it, though more comes before it is told.
#[test]
fn losses_and_the_ends_of_calls_fail_what_was_heard_before() {
    let (mut book, now) = book(2);
    let ask = |book: &mut Book, member, call, serial| {
        let request = Request {
            serial,
            ..asked(sum(1))
        };
        book.ask(now, member, (call, "a".to_owned()), request);
    };
    let failed = |call, heard: [u64; 2], asked: [bool; 2], cause: &CollectiveError| Failed {
        call,
        heard: Arc::new(heard.to_vec()),
        names: vec!["a".to_owned()],
        cause: cause.clone(),
        asked: asked.to_vec(),
    };
    let fails = |failed| [Decision::Fail(failed)];
    // A link has ended: that is for the shell to tell, later.
    let broken = left("its link ended");
    ask(&mut book, 0, 4, 4);
    let first = book.fail_all(u64::MAX, &broken);
    ask(&mut book, 1, 4, 7);
    assert_eq!(first, [failed(4, [4, 0], [true, false], &broken)]);
    // What came since stands, for what member 0 tries again.
    ask(&mut book, 0, 4, 5);
    let [Decision::Run { heard, .. }] = &book.decisions(now)[..] else {
        panic!("it runs");
    };
    assert_eq!(**heard, [5, 7]);
    let panicked = left("panic");
    ask(&mut book, 1, 4, 8);
    ask(&mut book, 1, 5, 9);
    book.over(5, panicked.clone());
    assert_eq!(
        book.decisions(now),
        fails(failed(4, [5, 9], [false, true], &panicked))
    );
    ask(&mut book, 0, 4, 10);
    assert_eq!(
        book.decisions(now),
        fails(failed(4, [10, 9], [true, false], &panicked)),
        "it stays over"
    );
    let killed = left("killed");
    book.lost(killed.clone());
    book.lost(left("a later loss"));
    assert_eq!(
        book.decisions(now),
        fails(failed(5, [10, 9], [false, true], &killed))
    );
    ask(&mut book, 0, 6, 11);
    assert_eq!(
        book.decisions(now),
        fails(failed(6, [11, 9], [true, false], &killed))
    );
}

/// Words: `ask MEMBER NAME EPOCH`, `join MEMBER NUMBER SINCE`, `failed MEMBER NUMBER` and `all MEMBER NUMBER` for the end of a join,
/// `unlinked MEMBER`, `ended`, `waits`; and `runs NAMES FOLLOWERS`, each follower as member and number of its join.
#[test]
fn members_that_have_joined_are_not_waited_for() {
    // While these two are under way, the next ones wait.
    const BUSY: &str = "ask 0 x 0; runs x 1:1; ask 0 y 0; runs y 1:1";
    for (world, what, before, after) in [
        (
            2,
            "an operation that waits runs without the member that joins",
            "ask 0 a 0; join 1 1 0; runs a 1:1",
            "",
        ),
        (
            2,
            "all had joined before operation 5: all are waited for again",
            "join 1 1 0; join 0 1 2; ask 0 c 5; waits; ask 1 c 5; runs c -",
            "",
        ),
        (
            2,
            "requests from before the join run, whichever join is heard first",
            "ask 0 a 0; join 0 1 0; join 1 1 0; runs a 1:1",
            "",
        ),
        (
            3,
            "a join of an epoch that is over counts for nothing",
            "join 1 1 0; join 1 2 5; ask 0 a 5; join 2 1 3; waits; all 2 1; join 2 2 6; runs a 1:2,2:2",
            "",
        ),
        (
            2,
            "a member whose join failed is waited for, also by what was ready",
            "join 1 1 0",
            "ask 0 a 0; waits; failed 1 1; ended; waits; ask 1 a 0; runs a -",
        ),
        (
            2,
            "the end of a join is not that of the next one",
            "ask 0 a 0; join 1 3 0; runs a 1:3; failed 1 1; ask 0 b 0; runs b 1:3",
            "",
        ),
        (
            2,
            "what was ready before all had joined runs without data of the member",
            "join 1 1 0",
            "ask 0 a 0; waits; all 1 1; ended; runs a 1:1",
        ),
        (
            2,
            "operations with data of other members are not fused",
            "ask 1 a 0; ask 1 c 0; join 1 1 0",
            "ask 0 a 0; ask 0 b 0; ask 0 c 0; ask 0 d 0; ended; runs a,c -; ended; runs b,d 1:1",
        ),
        (
            2,
            "a member says on a new link again that it has joined",
            "join 1 1 0; unlinked 1; ask 0 a 0; waits; join 1 1 0; runs a 1:1",
            "",
        ),
    ] {
        let (mut book, now) = book(world);
        let busy = if after.is_empty() { "" } else { BUSY };
        let script = [before, busy, after]
            .into_iter()
            .flat_map(|part| part.split("; "));
        for line in script.filter(|line| !line.is_empty()) {
            let words: Vec<&str> = line.split(' ').collect();
            let number = |at: usize| words[at].parse::<u64>().unwrap();
            let member = || number(1) as u32;
            match words[0] {
                "ask" => {
                    let request = Request {
                        epoch: number(3),
                        ..asked(sum(1))
                    };
                    book.ask(now, member(), key(words[2]), request);
                }
                "join" => {
                    let join = Join {
                        serial: number(2),
                        call: 0,
                        since: number(3),
                    };
                    book.join(member(), join);
                }
                end @ ("failed" | "all") => book.unjoin(member(), number(2), end == "all"),
                "unlinked" => book.unlinked(member()),
                "ended" => book.ended(),
                "waits" => assert_eq!(book.decisions(now), [], "{what}: {line}"),
                "runs" => {
                    let decisions = book.decisions(now);
                    let [
                        Decision::Run {
                            names, followers, ..
                        },
                    ] = &decisions[..]
                    else {
                        panic!("{what}: {line}: {decisions:?}");
                    };
                    let followers = followers
                        .iter()
                        .map(|(member, join)| format!("{member}:{join}"));
                    let followers = followers.collect::<Vec<_>>().join(",");
                    assert_eq!(names.join(","), words[1], "{what}: {line}");
                    assert_eq!(followers, words[2].trim_matches('-'), "{what}: {line}");
                }
                other => panic!("{other}"),
            }
        }
    }
}

#[test]
fn a_join_counts_in_its_call_alone() {
    let (mut book, now) = book(2);
    let join = |serial| Join {
        serial,
        call: 0,
        since: 0,
    };
    book.join(1, join(1));
    book.ask(now, 0, (1, "a".to_owned()), asked(sum(1)));
    assert_eq!(book.decisions(now), []);
    book.over(1, left("call 1 has begun"));
    // It comes after the end of its call.
    book.join(1, join(2));
    assert_eq!(book.joined, [None; 2]);
}
