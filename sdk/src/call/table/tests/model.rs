//! Everything that three ranks can do, and long random histories, against what must hold.

use proptest::prelude::*;

use super::*;

/// What a rank may do in a call.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Act {
    Return,
    Fail,
    Echo(u32),
    Die,
    Nothing,
}

/// Every way in which three ranks may answer, in every order.
#[test]
fn every_outcome_of_three_ranks_in_every_order() {
    let acts = |rank: u32| {
        let echoes = (0..3).filter(move |other| *other != rank).map(Act::Echo);
        [Act::Return, Act::Fail, Act::Die, Act::Nothing]
            .into_iter()
            .chain(echoes)
    };
    let orders = [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ];
    for (a, b, c) in
        acts(0).flat_map(|a| acts(1).flat_map(move |b| acts(2).map(move |c| (a, b, c))))
    {
        for order in orders {
            run_acts([a, b, c], order);
        }
    }
}

fn run_acts(acts: [Act; 3], order: [u32; 3]) {
    let (mut table, now) = table(3);
    let call = whole(&mut table, 3, "w");
    let mut done: Option<Result<Vec<Bytes>, CallError>> = None;
    let mut seen: Vec<u32> = Vec::new();
    let take = |effects: Effects<&str>, done: &mut Option<_>| {
        for completion in effects.completions {
            assert!(done.is_none(), "{acts:?} {order:?}: answered twice");
            *done = Some(completion.result);
        }
    };
    for rank in order {
        let effects = match acts[rank as usize] {
            Act::Return => returned(&mut table, now, call, rank),
            Act::Fail => failed(&mut table, now, call, rank, None),
            Act::Echo(of) => failed(&mut table, now, call, rank, Some(of)),
            Act::Die => table.lost(now, failure(rank, Exit::Signal(9)), false),
            Act::Nothing => continue,
        };
        seen.push(rank);
        take(effects, &mut done);
        // A failure that is no echo is never held back.
        if matches!(acts[rank as usize], Act::Fail | Act::Die) {
            assert!(
                done.is_some(),
                "{acts:?} {order:?}: a first cause was held back"
            );
        }
        if let Some(Err(error)) = &done {
            check_cause(acts, &seen, error, false);
            return;
        }
    }
    if acts == [Act::Return; 3] {
        assert_eq!(done, Some(Ok(vec![body(0), body(1), body(2)])));
        return;
    }
    assert_eq!(done, None);
    take(table.tick(now + ECHO_WAIT), &mut done);
    match done {
        Some(Err(error)) => check_cause(acts, &seen, &error, true),
        Some(Ok(_)) => panic!("{acts:?}: it did not return"),
        // Nothing has failed: it goes on.
        None => {
            assert!(seen.iter().all(|rank| acts[*rank as usize] == Act::Return));
            assert_eq!(table.next_wake(), None);
        }
    }
}

/// An echo is told as the first cause only if no report can better it, or time is up.
fn check_cause(acts: [Act; 3], seen: &[u32], error: &CallError, late: bool) {
    let first = error.rank().unwrap().0;
    assert!(seen.contains(&first));
    let mut rank = first;
    for _ in 0..4 {
        match acts[rank as usize] {
            Act::Fail | Act::Die => {
                assert_eq!(
                    rank, first,
                    "{acts:?}: an echo of a known cause is told first"
                );
                return;
            }
            Act::Return => return,
            Act::Echo(of) if seen.contains(&of) => rank = of,
            Act::Echo(_) => return assert!(late, "{acts:?}: an echo was told too early"),
            Act::Nothing => panic!("{acts:?}: a rank that did nothing is blamed"),
        }
    }
    // A circle.
}

#[derive(Debug, Clone)]
enum Event {
    Whole {
        deadline: bool,
    },
    Each {
        deadline: bool,
    },
    Return {
        call: usize,
        rank: u32,
    },
    Fail {
        call: usize,
        rank: u32,
        by: Option<u32>,
    },
    Lost {
        rank: u32,
        stopping: bool,
    },
    Reported {
        rank: u32,
    },
    Unreachable {
        rank: u32,
    },
    Cancel {
        waiter: usize,
    },
    Wait {
        millis: u64,
    },
}

const WORLD: u32 = 4;

fn event() -> impl Strategy<Value = Event> {
    let rank = 0..WORLD;
    prop_oneof![
        4 => any::<bool>().prop_map(|deadline| Event::Whole { deadline }),
        3 => any::<bool>().prop_map(|deadline| Event::Each { deadline }),
        20 => (0_usize..12, rank.clone()).prop_map(|(call, rank)| Event::Return { call, rank }),
        6 => (0_usize..12, rank.clone(), proptest::option::of(0..WORLD))
            .prop_map(|(call, rank, by)| Event::Fail { call, rank, by }),
        1 => (rank.clone(), any::<bool>()).prop_map(|(rank, stopping)| Event::Lost { rank, stopping }),
        1 => rank.clone().prop_map(|rank| Event::Reported { rank }),
        1 => rank.prop_map(|rank| Event::Unreachable { rank }),
        3 => (0_usize..20).prop_map(|waiter| Event::Cancel { waiter }),
        4 => (0_u64..1500).prop_map(|millis| Event::Wait { millis }),
    ]
}

/// Who waits: a number of its own, the call it belongs to, and which of the call's ranks it is.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Id {
    number: usize,
    rank: Option<Rank>,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Whatever happens, in whatever order: every waiter is answered exactly once or not at all after it left, no
    /// result is anybody else's, the timer never spins, and nothing is left in the end.
    #[test]
    fn every_waiter_is_answered_once(events in proptest::collection::vec(event(), 1..80)) {
        let mut table: CallTable<Id> = CallTable::new(vec![String::new(); WORLD as usize]);
        let mut now = Instant::now();
        let mut waiting: Vec<(Id, CallId)> = Vec::new();
        let mut calls: Vec<CallId> = Vec::new();
        let mut numbers = 0_usize..;
        for event in events {
            let effects = match event {
                Event::Whole { deadline } | Event::Each { deadline } => {
                    let each = matches!(event, Event::Each { .. });
                    let all = ranks(0..WORLD);
                    let ids: Vec<Id> = if each {
                        all.iter().map(|rank| Id { number: numbers.next().unwrap(), rank: Some(*rank) }).collect()
                    } else {
                        vec![Id { number: numbers.next().unwrap(), rank: None }]
                    };
                    let waiters = if each { one_each(&ids) } else { Waiters::Whole(ids[0]) };
                    let after = Duration::from_secs(1);
                    let deadline = deadline.then(|| (now + after, after));
                    match table.register(Instant::now(), "f".to_owned(), all, deadline, waiters) {
                        Ok(taken) => {
                            calls.push(taken.call);
                            waiting.extend(ids.into_iter().map(|id| (id, taken.call)));
                            Effects { completions: taken.completions, cancels: Vec::new() }
                        }
                        Err(error) => {
                            prop_assert!(!each, "only a whole call is refused: {}", error);
                            Effects::default()
                        }
                    }
                }
                Event::Return { call, rank } => match calls.get(call) {
                    Some(call) => {
                        let body = Bytes::from(format!("{call} {rank}"));
                        table.result(now, *call, Rank(rank), Outcome::Returned, body)
                    }
                    None => Effects::default(),
                },
                Event::Fail { call, rank, by } => match calls.get(call) {
                    Some(call) => failed(&mut table, now, *call, rank, by),
                    None => Effects::default(),
                },
                Event::Lost { rank, stopping } => table.lost(now, failure(rank, Exit::Signal(9)), stopping),
                Event::Reported { rank } => table.reported_lost(now, failure(rank, Exit::Unknown)),
                Event::Unreachable { rank } => table.unreachable(now, vec![failure(rank, Exit::Unknown)]),
                Event::Cancel { waiter } => match waiting.len().checked_sub(1) {
                    Some(last) => {
                        let (id, call) = waiting.swap_remove(waiter.min(last));
                        table.cancel(call, id.rank)
                    }
                    None => Effects::default(),
                },
                Event::Wait { millis } => {
                    now += Duration::from_millis(millis);
                    let effects = table.tick(now);
                    prop_assert!(table.next_wake().is_none_or(|next| next > now), "the timer spins");
                    effects
                }
            };
            for completion in effects.completions {
                let at = waiting.iter().position(|(id, _)| *id == completion.waiter);
                prop_assert!(at.is_some(), "{:?} was answered, but does not wait", completion.waiter);
                let (id, call) = waiting.swap_remove(at.unwrap());
                if let Ok(bodies) = completion.result {
                    let of = match id.rank { Some(rank) => vec![rank], None => ranks(0..WORLD) };
                    let expected: Vec<String> = of.iter().map(|rank| format!("{call} {rank}")).collect();
                    prop_assert_eq!(bodies, expected);
                }
            }
            for (call, ranks) in effects.cancels {
                prop_assert!(calls.contains(&call) && !ranks.is_empty());
            }
        }
        // All ranks go: every wait ends, after the echoes' time at the latest (F-1).
        let mut answered = Vec::new();
        for rank in 0..WORLD {
            answered.extend(table.lost(now, failure(rank, Exit::Unknown), true).completions);
        }
        answered.extend(table.tick(now + ECHO_WAIT).completions);
        answered.extend(table.tick(now + 2 * ECHO_WAIT).completions);
        let mut left: Vec<usize> = waiting.iter().map(|(id, _)| id.number).collect();
        let mut got: Vec<usize> = answered.iter().map(|completion| completion.waiter.number).collect();
        left.sort_unstable();
        got.sort_unstable();
        prop_assert_eq!(left, got);
        prop_assert_eq!(table.in_flight(), 0);
        prop_assert_eq!(table.next_wake(), None);
    }
}
