//! Whole changes, from the fact to the next generation.

use super::*;

#[test]
fn a_lost_member_is_revoked_and_the_rest_goes_on_in_one_step() {
    let mut bed = Bed::up(Limits::elastic(2, 3), &[3]);
    bed.commit(1);
    bed.news();
    bed.now += ms(1);
    bed.step(failed(process(1, 1)));
    let news = bed.news();
    let [
        Action::Revoke { lost, .. },
        Action::Start { process: new, .. },
        Action::Publish { generation, to },
    ] = &news[..]
    else {
        panic!("{news:?}")
    };
    assert_eq!((&lost[..], *new), (&[Rank(1)][..], process(1, 2)));
    assert_eq!(table(generation), [(0, 1, 1, 1), (2, 1, 1, 1)]);
    assert!(!generation.needs_sync());
    assert_eq!(to, &[process(0, 1), process(2, 1)]);
    bed.settle();
    assert_eq!(bed.number(), 2);
    // The replacement is ready, and joins at a commit, behind the survivors.
    bed.pass(s(1));
    assert!(bed.news().iter().any(is_hold));
    bed.hold(2);
    assert_eq!(bed.table(), [(0, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 3)]);
    assert!(bed.active().needs_sync());
    assert_eq!(bed.membership.budget().resets(), 2);
}

/// The loss of all members is the loss of nothing, then.
#[test]
fn a_hold_between_two_calls_is_no_commit() {
    let mut bed = Bed::up(Limits::elastic(1, 2), &[2]);
    bed.fail(1);
    bed.pass(s(1));
    bed.hold(0);
    assert_eq!(bed.slots(), [0, 1]);
    assert_eq!(bed.membership.budget().commit(), None);
}

#[test]
fn a_spare_replaces_a_member_without_a_process_start() {
    let mut bed = Bed::up(with(3, 3, |it| it.spares = 1), &[3, 1]);
    assert_eq!(bed.slots(), [0, 1, 2]);
    bed.boots = false;
    bed.fail(0);
    assert_eq!(bed.table(), [(1, 1, 1, 1), (2, 1, 1, 1), (3, 1, 2, 2)]);
    // The next process of the seat is the new spare.
    bed.boot(0);
    bed.pass(s(60));
    assert_eq!(bed.slots(), [1, 2, 3]);
    assert_eq!(bed.membership.roster().count(State::Ready), 1);
}

#[test]
fn a_node_that_joins_is_used_at_once_by_a_job_below_its_maximum() {
    let mut bed = Bed::up(Limits::elastic(1, 4), &[2]);
    bed.offer(2, 8);
    assert_eq!(bed.count(is_hold), 1);
    // The wish is repeated until they hold.
    bed.pass(s(3));
    assert_eq!(bed.count(is_hold), 4);
    assert_eq!(bed.slots(), [0, 1]);
    bed.hold(5);
    assert_eq!((bed.slots(), bed.room[&2]), (vec![0, 1, 2, 3], 6));
    bed.pass(s(10));
    assert_eq!(bed.count(is_hold), 4);
}

#[test]
fn a_drained_node_is_left_at_a_commit_and_its_processes_are_stopped_after() {
    let mut bed = Bed::up(Limits::elastic(2, 4), &[2, 2]);
    bed.news();
    bed.then(drain(1));
    let news = bed.news();
    assert!(matches!(&news[..], [Action::Reserve { .. }, hold] if is_hold(hold)));
    bed.hold(1);
    assert_eq!(bed.table(), [(2, 1, 2, 1), (3, 1, 2, 1)]);
    let news = bed.news();
    let [Action::Publish { to, .. }, Action::Active(_), stops @ ..] = &news[..] else {
        panic!("{news:?}")
    };
    // Those that leave are told that they are in no generation any more.
    assert_eq!(to.len(), 4);
    let stop = |slot| stop(process(slot, 1), "left: maintenance");
    assert_eq!(stops, [stop(0), stop(1)]);
    // That they end is no failure, and no success of the job.
    bed.then(exited(process(0, 1), Exit::Signal(15), ""));
    bed.then(returned(process(1, 1)));
    assert_eq!((bed.restarts(), bed.end(), bed.number()), (0, None, 2));
}

#[test]
fn below_the_minimum_a_job_waits_and_goes_on_with_a_new_node() {
    let mut bed = Bed::up(Limits::elastic(3, 4), &[2, 2]);
    bed.then(node_lost(2, bed.now));
    assert!(bed.is_idle());
    bed.pass(s(20));
    bed.offer(3, 1);
    assert_eq!(bed.table(), [(0, 1, 1, 1), (1, 1, 1, 1), (2, 2, 3, 2)]);
    // And without one it ends.
    bed.then(node_lost(3, bed.now));
    bed.pass(s(29));
    assert_eq!(bed.end(), None);
    bed.pass(s(1));
    let (how, why) = bed.end().unwrap();
    assert_eq!(how, End::BelowMin);
    let lost = "rank 2 (process 2 of slot 2 on h3) is lost: its node was lost";
    assert!(
        why.contains(lost) && why.ends_with("; no room: full"),
        "{why}"
    );
}

#[test]
fn a_host_that_cools_down_gets_nothing_new_and_keeps_what_it_has() {
    let limits = with(2, 3, |it| it.cooldown = Some(s(10)..=s(10)));
    let mut bed = Bed::up(limits, &[2, 1]);
    bed.news();
    bed.fail(0);
    let news = bed.news();
    let Action::Reserve { slots, avoid, .. } = &news[1] else {
        panic!("{news:?}")
    };
    assert_eq!((&slots[..], &avoid[..]), (&[Slot(0)][..], &[host(1)][..]));
    assert_eq!(bed.table(), [(1, 1, 1, 1), (2, 1, 2, 1)]);
    bed.pass(s(9));
    assert_eq!(bed.news(), []);
    // When it is warm, the seat that it still holds is used.
    bed.pass(s(1));
    assert_eq!(bed.news()[0], start(process(0, 2), 1));
}

#[test]
fn a_job_that_fails_at_its_start_again_and_again_ends_fast_with_its_output() {
    let mut bed = Bed::slow(Limits::elastic(2, 2), &[2]);
    let mut incarnation = 0;
    while bed.end().is_none() {
        incarnation += 1;
        assert!(incarnation < 9, "{:?}", bed.done);
        // Both fail together, for the same reason.
        for slot in 0..2 {
            let said = "ImportError: no module named torch";
            bed.then(exited(process(slot, incarnation), Exit::Code(1), said));
        }
    }
    assert_eq!(incarnation, 4);
    let (how, why) = bed.end().unwrap();
    assert_eq!(how, End::NoProgress);
    let first = "the first: process 1 of slot 0 on h1: ended before it was ready, with exit code 1: ImportError: no module named torch";
    assert!(why.ends_with(first), "{why}");

    // With commits in between it never ends.
    let mut bed = Bed::up(Limits::elastic(2, 2), &[2]);
    for commit in 1..100 {
        bed.fail(1);
        bed.commit(commit);
    }
    assert_eq!((bed.end(), bed.number()), (None, 100));
    assert_eq!(bed.membership.budget().resets(), 99);
}

#[test]
fn a_generation_that_breaks_on_its_way_is_given_up_and_another_one_is_made() {
    let mut bed = Bed::up(Limits::elastic(1, 4), &[4]);
    bed.boots = false;
    // Rank 1 does not take generation 2, and dies meanwhile.
    bed.hung.insert(process(1, 1));
    bed.fail(0);
    assert!(bed.is_idle());
    bed.news();
    bed.fail(1);
    let news = bed.news();
    let is_second = |action: &Action| matches!(action, Action::Revoke { generation: ids::Generation(2), lost, .. } if *lost == [Rank(0)]);
    assert!(is_second(&news[0]), "{news:?}");
    assert_eq!(bed.table(), [(2, 1, 1, 1), (3, 1, 1, 1)]);
    // One change, however often it was tried.
    assert_eq!((bed.number(), bed.membership.budget().resets()), (3, 1));
}

/// E-1: all had taken generation 1 and committed, and the head has not heard of it when rank 0 dies.
#[test]
fn members_of_a_first_generation_that_was_given_up_have_the_state() {
    let mut bed = Bed::new(Limits::elastic(1, 2), &[2]);
    bed.hung.insert(process(1, 1));
    bed.settle();
    bed.fail(0);
    // Slot 0 is new, and behind slot 1, which has the state.
    bed.hung.clear();
    bed.pass(s(2));
    if bed.slots() == [1] {
        bed.hold(1);
    }
    assert_eq!(bed.slots(), [1, 0]);
}

/// E-1: generation 2 left rank 0 out, and may have committed before it was given up.
#[test]
fn a_member_that_an_attempt_left_out_is_not_first() {
    let limits = with(2, 6, |it| {
        it.filters = vec![Filter::WholeHosts(2)];
        it.join_window = s(5);
    });
    let mut bed = Bed::up(limits, &[2, 2, 2]);
    bed.hung.insert(process(3, 1));
    bed.boots = false;
    bed.fail(1);
    // Generation 2 is on its way to hosts 2 and 3 alone. Then the new process on host 1 is ready.
    bed.boot(1);
    bed.fail(3);
    // Generation 3: host 1 is whole again, and behind host 3.
    let expected = [(4, 1, 3, 1), (5, 1, 3, 1), (0, 1, 1, 3), (1, 2, 1, 3)];
    assert_eq!(bed.table(), expected);
}

#[test]
fn facts_that_are_over_are_ignored_and_reported() {
    let mut bed = Bed::up(Limits::elastic(1, 2), &[2]);
    bed.fail(0);
    bed.pass(s(2));
    bed.hold(1);
    let used = |bed: &Bed| {
        let budget = bed.membership.budget();
        (bed.table(), budget.commit(), budget.resets())
    };
    let before = used(&bed);
    bed.done.clear();
    bed.then(failed(process(0, 1)));
    bed.then(ready(process(0, 1)));
    let told = bed.count(|action| matches!(action, Action::Tell(_)));
    assert_eq!(told, 2);
    for (number, commit) in [(1, 1), (2, 1), (9, 9)] {
        let generation = ids::Generation(number);
        bed.commits(number, commit, Kept::Made);
        let commit = Some(commit);
        bed.then(Fact::Holding { generation, commit });
        bed.takes(number, process(0, 1));
    }
    assert_eq!(bed.news(), []);
    assert_eq!(used(&bed), before);
}

#[test]
fn nodes_that_are_lost_together_are_one_change() {
    let mut bed = Bed::up(Limits::elastic(1, 6), &[2, 2, 2]);
    bed.boots = false;
    bed.all([1, 3].map(|node| node_lost(node, bed.now)));
    assert_eq!((bed.number(), bed.slots()), (2, vec![2, 3]));
}

#[test]
fn a_node_that_is_drained_no_more_stays_and_its_replacement_goes() {
    let mut bed = Bed::up(Limits::elastic(1, 2), &[1, 1, 1]);
    bed.then(drain(1));
    bed.news();
    bed.then(undrain(1));
    assert_eq!((bed.stopped(), bed.news().len()), (vec![(2, 1)], 1));
    // Its node holds the room until then.
    bed.then(exited(process(2, 1), Exit::Signal(15), ""));
    assert_eq!(bed.news(), [give_back(&[2])]);
    bed.commit(1);
    assert_eq!(bed.slots(), [0, 1]);

    // A job that is short of spares keeps it.
    let mut bed = Bed::up(with(1, 2, |it| it.spares = 1), &[1, 1]);
    bed.room.insert(3, 1);
    bed.then(drain(1));
    bed.then(Fact::Offered);
    bed.news();
    bed.then(undrain(1));
    assert_eq!(bed.news(), []);
    assert_eq!(bed.membership.roster().staying(), 3);
}

#[test]
fn a_lost_seat_that_is_not_needed_any_more_gives_its_room_back() {
    let mut bed = Bed::up(Limits::elastic(1, 2), &[1, 1, 1]);
    bed.then(drain(1));
    bed.hold(1);
    assert_eq!(bed.slots(), [1, 2]);
    bed.news();
    bed.then(returned(process(0, 1)));
    // Before the head has freed the node.
    bed.then(undrain(1));
    assert_eq!(bed.news(), [give_back(&[0])]);
}
