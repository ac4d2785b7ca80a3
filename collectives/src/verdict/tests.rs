//! What ends an operation, when, and with whose name.

use proptest::prelude::*;

use super::*;
use crate::element::DType;
use crate::operation::{OperationKind, ReduceOp};

const ME: Rank = Rank(0);
const WORD: Duration = Duration::from_secs(1);
const TAG: Tag = Tag::new(4, 7);
const LIMIT: Duration = Duration::from_secs(60);

fn request() -> Operation {
    Operation {
        reduce: Some(ReduceOp::Sum),
        ..Operation::new(OperationKind::AllReduce, Some(DType::F32), 5)
    }
}

fn verdict(me: Rank, started: Instant, patience: Duration) -> Verdict {
    Verdict::new(me, (TAG, request()), started, patience)
}

fn lost(rank: u32, reason: &str) -> CollectiveError {
    CollectiveError::PeerLost {
        rank: Rank(rank),
        reason: reason.to_owned(),
    }
}

fn link_ended(rank: u32, at: Instant, is_used: bool) -> Event {
    Event::LinkEnded {
        rank: Rank(rank),
        at,
        reason: "its link ended".to_owned(),
        is_used,
    }
}

fn told(by: u32, cause: Cause) -> Event {
    Event::Told {
        by: Rank(by),
        cause,
    }
}

fn seen(waited: &[u32], world: u32) -> Vec<Seen> {
    (0..world)
        .map(|rank| Seen {
            is_waited_for: waited.contains(&rank),
            is_linked: true,
            has_come: false,
        })
        .collect()
}

/// What is heard, in order, and the error that this is at last.
#[test]
fn what_is_heard_ends_the_operation_or_not() {
    let now = Instant::now();
    let failed = |reason: &str| {
        Cause::Failure(CollectiveError::PeerFailed {
            rank: Rank(2),
            reason: reason.to_owned(),
            call: CallId(0),
        })
    };
    let no_link = |error: CollectiveError| Event::NoLink {
        rank: Rank(3),
        at: now,
        error,
    };
    let connect = || CollectiveError::Connect {
        rank: Rank(3),
        reason: "refused".to_owned(),
    };
    let own = CollectiveError::Aborted {
        reason: "no file descriptor is left".to_owned(),
    };
    let word = lost(3, "killed by signal 9");
    let made = |rank, replaces| Event::LinkMade {
        rank: Rank(rank),
        replaces,
    };
    let replaced = lost(3, "its link was replaced while it was in use");
    let barrier = Operation::new(OperationKind::Barrier, None, 0);
    let asked = "all_reduce(sum) of 5 f32".to_owned();
    let mismatch = |other_asked: &str| CollectiveError::Mismatch {
        rank: ME,
        asked: asked.clone(),
        other: Rank(1),
        other_asked: other_asked.to_owned(),
    };
    let stalled = |asked: &str| Cause::Stalled {
        asked: asked.to_owned(),
    };
    let table: Vec<(&str, Duration, Vec<Event>, Option<CollectiveError>)> = vec![
        (
            "the authority says that a rank is lost",
            WORD,
            vec![Event::Word(word.clone())],
            Some(word.clone()),
        ),
        (
            "its word comes after the end of a link",
            WORD,
            vec![link_ended(1, now, true), Event::Word(word.clone())],
            Some(word.clone()),
        ),
        (
            "a link has ended: that may be the network",
            WORD,
            vec![link_ended(3, now, true)],
            None,
        ),
        (
            "a link has ended where nobody watches the ranks",
            Duration::ZERO,
            vec![link_ended(3, now, false)],
            Some(lost(3, "its link ended")),
        ),
        (
            "no link can be made: the rank may be lost",
            WORD,
            vec![no_link(connect())],
            None,
        ),
        (
            "no link can be made where nobody watches the ranks",
            Duration::ZERO,
            vec![no_link(connect())],
            Some(connect()),
        ),
        (
            "no link can be made, by this rank's own fault",
            WORD,
            vec![no_link(own.clone())],
            Some(own),
        ),
        (
            "the link is there again",
            WORD,
            vec![link_ended(3, now, false), made(3, false)],
            None,
        ),
        (
            "the link is there again, and what it carried is lost",
            WORD,
            vec![link_ended(3, now, true), made(3, false)],
            Some(replaced.clone()),
        ),
        (
            "another link comes while one is in use",
            WORD,
            vec![made(3, true)],
            Some(replaced),
        ),
        (
            "a peer gave up because of a rank: that rank's name travels on",
            WORD,
            vec![told(1, failed("it panicked"))],
            Some(CollectiveError::PeerFailed {
                rank: Rank(2),
                call: CallId(4),
                reason: "it panicked".to_owned(),
            }),
        ),
        (
            "a peer gave up while a link is suspected",
            WORD,
            vec![link_ended(3, now, true), told(1, Cause::of(&word, Rank(1)))],
            Some(word),
        ),
        (
            "a rank went on without this operation",
            WORD,
            vec![Event::IsAhead {
                rank: Rank(2),
                tag: Tag::new(5, 0),
            }],
            Some(CollectiveError::PeerLeft {
                rank: Rank(2),
                reason:
                    "it is in operation 0 of call 5 while this rank is in operation 7 of call 4, \
                         all_reduce(sum) of 5 f32"
                        .to_owned(),
            }),
        ),
        (
            "a rank asks for another operation",
            WORD,
            vec![Event::AsksFor {
                rank: Rank(1),
                operation: barrier,
            }],
            Some(mismatch("barrier")),
        ),
        (
            "a rank waits for another operation at its deadline",
            WORD,
            vec![told(1, stalled("barrier"))],
            Some(mismatch("barrier")),
        ),
        (
            "a rank waits for the same, or has no data",
            WORD,
            vec![
                told(1, stalled(&asked)),
                told(2, stalled(&Operation::JOIN.to_string())),
                told(
                    3,
                    Cause::Missed {
                        late: vec![Rank(2)],
                    },
                ),
            ],
            None,
        ),
    ];
    for (what, patience, events, expected) in table {
        let mut verdict = verdict(ME, now, patience);
        let ended = events
            .into_iter()
            .try_for_each(|event| verdict.hear(event))
            .err();
        assert_eq!(ended, expected, "{what}");
    }
}

#[test]
fn ranks_with_other_tuning_disagree_on_how_it_is_done() {
    let mut verdict = verdict(ME, Instant::now(), WORD);
    let operation = Operation {
        algorithm: crate::schedule::Algorithm::Ring,
        ..request()
    };
    let event = Event::AsksFor {
        rank: Rank(1),
        operation,
    };
    let error = verdict.hear(event).unwrap_err().to_string();
    assert!(error.contains("by the ring algorithm"), "{error}");
}

#[test]
fn a_suspicion_ends_the_operation_when_its_time_is_over() {
    let start = Instant::now();
    let deadline = start + LIMIT;
    let late = start + Duration::from_secs(20);
    let mut verdict = verdict(ME, start, WORD);
    verdict.hear(link_ended(3, late, true)).unwrap();
    // It is one suspicion, from the first time on, whatever ends later.
    let later = late + WORD / 2;
    verdict.hear(link_ended(3, later, true)).unwrap();
    verdict.hear(link_ended(1, later, true)).unwrap();
    assert!(verdict.suspects(Rank(3)) && verdict.suspects(Rank(1)) && !verdict.suspects(Rank(2)));
    assert_eq!(verdict.next(deadline), late + WORD);
    let all = seen(&[1, 3], 4);
    assert_eq!(verdict.decide(later, deadline, &all), Ruling::Wait);
    assert_eq!(verdict.judge_suspicions(later), Ok(()));
    // What the rank had said before is told with it.
    verdict.does(Rank(3), "it sleeps".to_owned(), start);
    let error = lost(3, "its link ended; it had said: it sleeps");
    let ruling = verdict.decide(late + WORD, deadline, &all);
    assert_eq!(ruling, Ruling::End(error));
    // A link that had ended long before this operation began.
    let mut verdict = self::verdict(ME, late, WORD);
    verdict.hear(link_ended(3, start, false)).unwrap();
    assert_eq!(
        verdict.judge_suspicions(late),
        Err(lost(3, "its link ended"))
    );
}

/// A rank whose link has ended is lost and not late.
#[test]
fn a_suspicion_goes_before_the_deadline() {
    let start = Instant::now();
    let patience = LIMIT;
    let deadline = start + Duration::from_millis(100);
    let mut verdict = verdict(ME, start, patience);
    verdict.hear(link_ended(3, start, true)).unwrap();
    let mut now = deadline;
    let all = seen(&[3], 4);
    loop {
        match verdict.decide(now, deadline, &all) {
            Ruling::Wait | Ruling::CallTheRoll => now = verdict.next(deadline),
            Ruling::End(error) => {
                assert_eq!(error, lost(3, "its link ended"));
                break;
            }
        }
        assert!(now < start + LIMIT, "its time is not over");
    }
}

#[test]
fn a_deadline_says_what_late_ranks_do_instead() {
    let start = Instant::now();
    let now = start + Duration::from_millis(1500);
    let mut verdict = verdict(ME, start, WORD);
    verdict.does(Rank(2), "it sleeps".to_owned(), start);
    let error = verdict.late(now, vec![Rank(1), Rank(2)]).to_string();
    let expected = "all_reduce(sum) of 5 f32 did not end within 1.5s; late: ranks 1, 2; rank 2: it sleeps (as it \
                    said 1.5s ago)";
    assert_eq!(error, expected);
    let own = verdict.late(now, Vec::new());
    assert_eq!(own.culprit_rank(), Some(ME));
    assert!(
        own.to_string().contains("whether the ranks share memory"),
        "{own}"
    );
}

/// The deadline of a peer comes with the names of ranks that it missed; this one has heard of more.
#[test]
fn names_of_late_ranks_come_together() {
    let mut verdict = verdict(ME, Instant::now(), WORD);
    let missed = |late: &[u32]| Cause::Missed {
        late: late.iter().copied().map(Rank).collect(),
    };
    verdict.hear(told(1, missed(&[0, 3, 4]))).unwrap();
    // Of that this rank tells all, once.
    assert_eq!(verdict.take_news(), Some(missed(&[0, 3, 4])));
    assert_eq!(verdict.take_news(), None);
    verdict.hear(told(2, missed(&[3]))).unwrap();
    assert_eq!(verdict.take_news(), None);
    assert_eq!(verdict.missed(), Some(missed(&[0, 3, 4])));
    // Rank 4 has come meanwhile.
    verdict.is_here(Rank(4));
    let deadline = Cause::Failure(CollectiveError::Deadline {
        operation: String::new(),
        waited: LIMIT,
        late: vec![Rank(5)],
        doing: Vec::new(),
    });
    let error = verdict.hear(told(1, deadline)).unwrap_err();
    let CollectiveError::Deadline { late, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(late, [Rank(3), Rank(5)]);
}

/// Whom a rank names that waits for some of five, of which some have come and some have answered.
#[test]
fn who_is_late() {
    // Waited for, come, here, linked, and who is late.
    type Ranks = &'static [u32];
    let table: [(Ranks, Ranks, Ranks, Ranks, Ranks); 7] = [
        // All that are linked and have not come, if one of those that are waited for has not.
        (&[1], &[], &[], &[1, 2, 3, 4], &[1, 2, 3, 4]),
        (&[1], &[], &[3], &[1, 2], &[1, 2]),
        (&[1], &[2], &[2, 3], &[1, 2, 3, 4], &[1, 4]),
        // One that is through does not answer: others may be through, too.
        (&[1], &[2], &[], &[1, 2, 3, 4], &[1]),
        // One that has come, and stopped.
        (&[1], &[1], &[], &[1, 2, 3, 4], &[1]),
        // It waits for others itself.
        (&[1], &[], &[1], &[1, 2, 3, 4], &[]),
        (&[1, 2], &[1], &[1], &[1, 2], &[2]),
    ];
    for (waited, come, here, linked, late) in table {
        let seen: Vec<Seen> = (0..5)
            .map(|rank| Seen {
                is_waited_for: waited.contains(&rank),
                is_linked: linked.contains(&rank),
                has_come: come.contains(&rank),
            })
            .collect();
        let here = here.iter().copied().map(Rank).collect();
        let late: Vec<Rank> = late.iter().copied().map(Rank).collect();
        let at = format!("waits for {waited:?}, come {come:?}, here {here:?}, linked {linked:?}");
        assert_eq!(roll_call::who_is_late(ME, &seen, &here), late, "{at}");
    }
}

/// The ranks of a group of which some do not come. Each of the others waits for some, and all hear each other in no time.
fn play(world: u32, late: &[u32], waits: impl Fn(u32) -> Vec<u32>) -> Vec<CollectiveError> {
    let start = Instant::now();
    let present: Vec<u32> = (0..world).filter(|rank| !late.contains(rank)).collect();
    // Their clocks differ by a little.
    let deadline = |rank: u32| start + Duration::from_millis(1000 + 3 * u64::from(rank));
    let mut verdicts: Vec<Verdict> = present
        .iter()
        .map(|rank| verdict(Rank(*rank), start, WORD))
        .collect();
    let mut errors: Vec<Option<CollectiveError>> = vec![None; present.len()];
    let mut now = start;
    while errors.iter().any(Option::is_none) {
        now += Duration::from_millis(1);
        assert!(now < start + Duration::from_secs(10), "it does not end");
        for (index, me) in present.iter().copied().enumerate() {
            if errors[index].is_some() {
                continue;
            }
            let seen = seen(&waits(me), world);
            let ruling = verdicts[index].decide(now, deadline(me), &seen);
            let mut words: Vec<Cause> = verdicts[index].take_news().into_iter().collect();
            match ruling {
                Ruling::Wait => {}
                Ruling::CallTheRoll => words.push(Cause::Stalled {
                    asked: request().to_string(),
                }),
                Ruling::End(error) => {
                    words.push(Cause::of(&error, Rank(me)));
                    errors[index] = Some(error);
                }
            }
            for word in words {
                for other in (0..present.len()).filter(|other| *other != index) {
                    if errors[other].is_none()
                        && let Err(error) = verdicts[other].hear(told(me, word.clone()))
                    {
                        errors[other] = Some(error);
                    }
                }
            }
        }
    }
    errors.into_iter().flatten().collect()
}

proptest! {
    /// All that are there name all that are not, whomever they wait for themselves.
    #[test]
    fn all_name_the_same_late_ranks(
        world in 2_u32..9,
        bits in any::<u32>(),
        waits in prop::collection::vec(any::<u32>(), 9),
    ) {
        let all: Vec<u32> = (0..world).collect();
        let (mut late, mut present): (Vec<u32>, Vec<u32>) =
            all.iter().partition(|rank| bits & (1 << **rank) != 0);
        if late.is_empty() {
            late.extend(present.pop());
        }
        if present.is_empty() {
            present.extend(late.pop());
        }
        let first = present[0];
        let of = |me: u32| -> Vec<u32> {
            let mut of: Vec<u32> = all
                .iter()
                .copied()
                .filter(|rank| *rank != me && waits[me as usize] & (1 << *rank) != 0)
                .collect();
            if me == first {
                // Somebody waits for one that does not come; the others perhaps only for each other.
                of.push(late[0]);
            }
            if of.is_empty() {
                of.push(u32::from(me == 0));
            }
            of
        };
        for error in play(world, &late, of) {
            let CollectiveError::Deadline { late: named, .. } = &error else {
                panic!("{error}");
            };
            let expected: Vec<Rank> = late.iter().copied().map(Rank).collect();
            prop_assert_eq!(named, &expected, "{}", error);
        }
    }

    /// F-1: whatever is heard, the operation ends some seconds after its deadline.
    #[test]
    fn it_ends_in_time(
        heard in prop::collection::vec((0_u32..5, 1_u32..4, 0_u64..3000), 0..20),
        waited in 0_u32..8,
    ) {
        let start = Instant::now();
        let deadline = start + Duration::from_secs(2);
        let waited: Vec<u32> = (1..4).filter(|rank| waited & (1 << (rank - 1)) != 0).collect();
        let seen = seen(&waited, 4);
        let mut verdict = verdict(ME, start, WORD);
        let mut now = start;
        let mut ended = None;
        for (what, rank, pause) in heard {
            now += Duration::from_millis(pause);
            let event = match what {
                0 => link_ended(rank, now, rank == 1),
                1 => Event::LinkMade { rank: Rank(rank), replaces: false },
                2 => told(rank, Cause::Stalled { asked: request().to_string() }),
                3 => told(rank, Cause::Missed { late: vec![Rank(rank % 3 + 1), ME] }),
                _ => Event::NoLink {
                    rank: Rank(rank),
                    at: now,
                    error: CollectiveError::Connect { rank: Rank(rank), reason: String::new() },
                },
            };
            ended = verdict.hear(event).err();
            if ended.is_some() {
                break;
            }
            if let Ruling::End(error) = verdict.decide(now, deadline, &seen) {
                ended = Some(error);
                break;
            }
        }
        let last = now.max(deadline) + Duration::from_secs(5);
        while ended.is_none() {
            now = now.max(verdict.next(deadline));
            prop_assert!(now <= last);
            if let Ruling::End(error) = verdict.decide(now, deadline, &seen) {
                ended = Some(error);
            }
        }
        // It names a rank.
        prop_assert!(ended.and_then(|error| error.culprit_rank()).is_some());
    }
}
