//! What uses up what.

use super::*;

fn limits() -> Limits {
    Limits {
        restarts_without_progress: 2,
        cooldown: Some(s(10)..=s(100)),
        ..Limits::elastic(1, 4)
    }
}

#[test]
fn failures_that_come_together_use_up_one_restart() {
    let start = Instant::now();
    let mut budget = Budget::new(start, 1);
    // Three processes that were there together.
    for node in 1..=3 {
        let at = start + ms(10 * node);
        budget.failed(
            at,
            &limits(),
            start,
            Some(&host(node)),
            &format!("failure {node}"),
        );
    }
    assert_eq!(budget.without_progress(), 1);
    assert_eq!(budget.cooling(start + ms(50)), [host(1)].into());
    // The process that came instead of the first one.
    let again = start + ms(60);
    budget.failed(start + s(1), &limits(), again, Some(&host(2)), "again");
    assert_eq!(budget.without_progress(), 2);
    assert_eq!(budget.cooling(start + s(1)), [host(1), host(2)].into());
}

#[test]
fn a_commit_is_progress_once() {
    let start = Instant::now();
    let mut budget = Budget::new(start, 1);
    for number in [1, 1, 0] {
        let at = start + s(1);
        budget.failed(at, &limits(), at, None, "failure");
        budget.committed(ids::Generation(1), number, false);
    }
    // The second and the third one were of an old commit.
    assert_eq!(budget.without_progress(), 2);
    assert_eq!(budget.commit(), Some(1));
    assert!(!budget.is_durable());
    // The same commit is given to the members of a later generation.
    budget.committed(ids::Generation(3), 1, false);
    assert_eq!(budget.committed_in(), ids::Generation(3));
    budget.committed(ids::Generation(1), 1, true);
    assert!(budget.is_durable());
    assert_eq!(budget.without_progress(), 2);
    budget.committed(ids::Generation(1), 2, false);
    assert_eq!(budget.without_progress(), 0);
    // The one before is still on disk.
    assert!(budget.is_durable());
}

/// All members are lost, and others go on from an older commit, which is on disk.
#[test]
fn work_that_is_done_again_is_no_progress() {
    let start = Instant::now();
    let mut budget = Budget::new(start, 1);
    budget.committed(ids::Generation(1), 3, true);
    budget.committed(ids::Generation(1), 9, false);
    for (generation, number, progress) in [(2, 5, false), (2, 9, false), (3, 10, true)] {
        let at = start + s(generation);
        budget.failed(at, &limits(), at, None, "failure");
        budget.committed(ids::Generation(generation), number, false);
        assert_eq!(budget.without_progress() == 0, progress, "commit {number}");
        // Those that have it can hand it on.
        assert_eq!(budget.commit(), Some(number));
        assert_eq!(budget.committed_in(), ids::Generation(generation));
        // Late news of a generation before.
        budget.committed(ids::Generation(1), 4, false);
        assert_eq!(budget.commit(), Some(number));
    }
}

#[test]
fn limits_of_restarts_are_exceeded_by_one_more() {
    let start = Instant::now();
    let limits = Limits {
        restarts_within: Some((2, s(10))),
        restarts_without_progress: 3,
        ..limits()
    };
    let mut budget = Budget::new(start, 1);
    let fail = |budget: &mut Budget, at: Instant| {
        budget.failed(
            at,
            &limits,
            at,
            None,
            &format!("failure after {:?}", at - start),
        );
        budget.exceeded(at, &limits)
    };
    assert_eq!(fail(&mut budget, start + s(1)), None);
    assert_eq!(fail(&mut budget, start + s(5)), None);
    let (how, why) = fail(&mut budget, start + s(9)).unwrap();
    assert_eq!(how, End::TooManyRestarts);
    assert!(
        why.starts_with("3 failures within 10 s, allowed are 2 (restarts_within)"),
        "{why}"
    );
    assert!(why.ends_with("failure after 1s"), "{why}");
    // The first one is old by now; but these are too many without a commit.
    let (how, why) = fail(&mut budget, start + s(16)).unwrap();
    assert_eq!(how, End::NoProgress);
    assert_eq!(
        why,
        "4 failures before the first commit, allowed are 3 (restarts_without_progress); the first: failure after 1s"
    );
    budget.committed(ids::Generation(1), 7, false);
    assert_eq!(budget.exceeded(start + s(20), &limits), None);
}

#[test]
fn a_host_cools_down_longer_each_time_and_not_longer_for_failures_meanwhile() {
    let start = Instant::now();
    let mut budget = Budget::new(start, 1);
    let name = host(1);
    let mut fail = |at: Instant| {
        budget.failed(at, &limits(), at, Some(&name), "failure");
        budget.next_warm(at).unwrap() - at
    };
    let first = fail(start);
    assert!((s(20)..s(30)).contains(&first), "{first:?}");
    let rest = fail(start + s(5));
    assert_eq!(rest, first.checked_sub(s(5)).unwrap());
    let second = fail(start + s(60));
    assert!((s(40)..s(50)).contains(&second), "{second:?}");
    assert!(budget.has_warmed(start + s(60), start + s(120)));
    assert!(!budget.has_warmed(start + s(120), start + s(180)));
    assert!(budget.cooling(start + s(120)).is_empty());
}

#[test]
fn resets_are_counted_when_a_generation_is_active() {
    let mut budget = Budget::new(Instant::now(), 1);
    let allow = |max| Limits {
        max_resets: Some(max),
        ..limits()
    };
    assert!(budget.has_resets(&allow(0)));
    budget.formed();
    assert_eq!(budget.resets(), 0);
    assert!(!budget.has_resets(&allow(0)) && budget.has_resets(&allow(1)));
    budget.formed();
    assert_eq!(budget.resets(), 1);
    assert!(!budget.has_resets(&allow(1)) && budget.has_resets(&allow(2)));
}
