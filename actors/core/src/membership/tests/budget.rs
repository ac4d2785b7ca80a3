//! What uses up what.

use super::*;

fn limits() -> Limits {
    with(1, 4, |it| {
        it.restarts_without_progress = 2;
        it.cooldown = Some(s(10)..=s(100));
    })
}

/// A process that was there since then has failed on a host.
fn fail(budget: &mut Budget, at: Instant, since: Instant, node: u64, why: &str) {
    budget.failed(at, &limits(), since, Some(&host(node)), why);
}

#[test]
fn failures_that_come_together_use_up_one_restart() {
    let start = Instant::now();
    let mut budget = Budget::new(start, 1);
    // Three processes that were there together.
    for node in 1..=3 {
        fail(&mut budget, start + ms(10 * node), start, node, "failure");
    }
    assert_eq!(budget.without_progress(), 1);
    assert_eq!(budget.cooling(start + ms(50)), [host(1)].into());
    // The process that came instead of the first one.
    fail(&mut budget, start + s(1), start + ms(60), 2, "again");
    assert_eq!(budget.without_progress(), 2);
    assert_eq!(budget.cooling(start + s(1)), [host(1), host(2)].into());
}

#[test]
fn a_generation_in_which_members_commit_is_progress() {
    let start = Instant::now();
    let mut budget = Budget::new(start, 1);
    let mut at = start;
    let mut fail_and = |generation: u64, number, kept| {
        at += s(1);
        fail(&mut budget, at, at, 1, "failure");
        budget.committed(ids::Generation(generation), number, kept);
        (budget.without_progress(), budget.commit().unwrap())
    };
    assert_eq!(fail_and(1, 1000, Kept::Made), (0, 1000));
    // The same commit is given to the members of later generations.
    assert_eq!(fail_and(2, 1001, Kept::Received), (1, 1001));
    assert_eq!(fail_and(3, 1002, Kept::Received), (2, 1002));
    assert_eq!(fail_and(3, 1003, Kept::Made), (0, 1003));
    // Late news.
    assert_eq!(fail_and(2, 1002, Kept::Made), (1, 1003));
    assert_eq!(fail_and(3, 1003, Kept::Durable), (2, 1003));
    // Another state of the program counts from 1.
    assert_eq!(fail_and(4, 1, Kept::Made), (0, 1));
    assert_eq!(budget.committed_in(), ids::Generation(4));
    // The commit that came to disk is still there.
    assert!(budget.is_durable());
}

/// All members are lost, and others go on from an older commit, which is on disk.
#[test]
fn work_that_is_done_again_is_no_progress() {
    let start = Instant::now();
    let mut budget = Budget::new(start, 1);
    budget.committed(ids::Generation(1), 3, Kept::Durable);
    budget.committed(ids::Generation(1), 9, Kept::Made);
    for (generation, number, progress) in [
        (2, 5, false),
        (3, 9, false),
        (4, 10, true),
        (5, 10, false),
        (6, 11, true),
    ] {
        let at = start + s(generation);
        budget.formed(true);
        fail(&mut budget, at, at, 1, "failure");
        budget.committed(ids::Generation(generation), number, Kept::Made);
        assert_eq!(budget.without_progress() == 0, progress, "commit {number}");
        // Those that have it can hand it on.
        assert_eq!(budget.commit(), Some(number));
        assert_eq!(budget.committed_in(), ids::Generation(generation));
        // Late news of a generation before.
        budget.committed(ids::Generation(1), 4, Kept::Made);
        assert_eq!(budget.commit(), Some(number));
    }
}

#[test]
fn limits_of_restarts_are_exceeded_by_one_more() {
    let start = Instant::now();
    let mut limits = limits();
    limits.restarts_within = Some((2, s(10)));
    limits.restarts_without_progress = 3;
    let mut budget = Budget::new(start, 1);
    let fail = |budget: &mut Budget, at: u64| {
        let (why, at) = (format!("failure after {at} s"), start + s(at));
        budget.failed(at, &limits, at, None, &why);
        budget.exceeded(at, &limits)
    };
    assert_eq!(fail(&mut budget, 1), None);
    assert_eq!(fail(&mut budget, 5), None);
    let why = "3 failures within 10s, allowed are 2 (restarts_within); the first since the last commit: failure after 1 s";
    let exceeded = |how, why: &str| Some((how, why.to_owned()));
    assert_eq!(fail(&mut budget, 9), exceeded(End::TooManyRestarts, why));
    // The first one is old by now; but these are too many without a commit.
    let why = "4 failures before the first commit, allowed are 3 (restarts_without_progress); the first: failure after 1 s";
    assert_eq!(fail(&mut budget, 16), exceeded(End::NoProgress, why));
    budget.committed(ids::Generation(1), 7, Kept::Made);
    assert_eq!(budget.exceeded(start + s(20), &limits), None);
}

#[test]
fn a_host_cools_down_longer_each_time_and_not_longer_for_failures_meanwhile() {
    let start = Instant::now();
    let mut budget = Budget::new(start, 1);
    let mut fail = |at: Instant| {
        fail(&mut budget, at, at, 1, "failure");
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
