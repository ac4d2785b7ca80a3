//! Whole changes, from the fact to the next generation.

use super::*;

#[test]
fn a_job_that_has_no_room_waits_for_the_start_timeout() {
    let mut bed = Bed::up(Limits::elastic(3, 3), &[2]);
    bed.pass(s(29));
    assert_eq!(bed.end(), None);
    bed.pass(s(1));
    let (how, why) = bed.end().unwrap();
    assert_eq!(how, End::BelowMin);
    assert!(
        why.starts_with("ready processes: 2; needed are at least 3"),
        "{why}"
    );
    assert!(why.ends_with("; no room: full"), "{why}");
}

#[test]
fn a_lost_member_is_revoked_and_the_rest_goes_on_in_one_step() {
    let mut bed = Bed::up(Limits::elastic(2, 3), &[3]);
    bed.commit(1, false);
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
    assert_eq!(lost, &[Rank(1)]);
    assert_eq!(*new, process(1, 2));
    assert_eq!(table(generation), [(0, 1, 1, 1), (2, 1, 1, 1)]);
    assert!(!generation.needs_sync());
    assert_eq!(to, &[process(0, 1), process(2, 1)]);
    bed.settle();
    assert_eq!(bed.number(), 2);
    // The replacement is ready, and joins at a commit, behind the survivors.
    bed.pass(s(1));
    assert!(
        bed.news()
            .iter()
            .any(|action| matches!(action, Action::Hold { .. }))
    );
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
    let mut bed = Bed::up(
        Limits {
            spares: 1,
            ..Limits::elastic(3, 3)
        },
        &[3, 1],
    );
    assert_eq!(bed.slots(), [0, 1, 2]);
    bed.boots = false;
    bed.fail(0);
    assert_eq!(bed.table(), [(1, 1, 1, 1), (2, 1, 1, 1), (3, 1, 2, 2)]);
    // The next process of the seat is the new spare.
    bed.ready(process(0, 2));
    bed.pass(s(60));
    assert_eq!(bed.slots(), [1, 2, 3]);
    assert_eq!(bed.membership.roster().count(State::Ready), 1);
}

#[test]
fn a_node_that_joins_is_used_at_once_by_a_job_below_its_maximum() {
    let mut bed = Bed::up(Limits::elastic(1, 4), &[2]);
    assert_eq!(bed.slots(), [0, 1]);
    bed.room.insert(2, 8);
    bed.news();
    bed.then(Fact::Offered);
    let holds = |bed: &mut Bed| {
        bed.news()
            .iter()
            .filter(|action| matches!(action, Action::Hold { .. }))
            .count()
    };
    assert_eq!(holds(&mut bed), 1);
    // The wish is repeated until they hold.
    bed.pass(s(3));
    assert_eq!(holds(&mut bed), 3);
    assert_eq!(bed.slots(), [0, 1]);
    bed.hold(5);
    assert_eq!(bed.slots(), [0, 1, 2, 3]);
    assert_eq!(bed.room[&2], 6);
    bed.pass(s(10));
    assert_eq!(holds(&mut bed), 0);
}

#[test]
fn a_drained_node_is_left_at_a_commit_and_its_processes_are_stopped_after() {
    let mut bed = Bed::up(Limits::elastic(2, 4), &[2, 2]);
    bed.news();
    bed.then(drain(1));
    assert!(matches!(
        &bed.news()[..],
        [Action::Reserve { .. }, Action::Hold { .. }]
    ));
    bed.hold(1);
    assert_eq!(bed.table(), [(2, 1, 2, 1), (3, 1, 2, 1)]);
    let news = bed.news();
    let [Action::Publish { to, .. }, Action::Active(_), stops @ ..] = &news[..] else {
        panic!("{news:?}")
    };
    // Those that leave are told that they are in no generation any more.
    assert_eq!(to.len(), 4);
    let why = "left: maintenance".to_owned();
    let stop = |slot| Action::Stop {
        process: process(slot, 1),
        why: why.clone(),
    };
    assert_eq!(stops, [stop(0), stop(1)]);
    // That they end is no failure.
    bed.then(exited(process(0, 1), Exit::Signal(15), ""));
    assert_eq!(bed.membership.budget().without_progress(), 0);
    assert_eq!(bed.number(), 2);
}

#[test]
fn a_drain_that_is_taken_back_changes_nothing() {
    let mut bed = Bed::up(Limits::elastic(4, 4), &[2, 2]);
    bed.then(drain(1));
    bed.then(undrain(1));
    bed.pass(s(60));
    assert_eq!((bed.number(), bed.slots()), (1, vec![0, 1, 2, 3]));
}

#[test]
fn all_nodes_are_drained_and_the_state_moves_on() {
    let mut bed = Bed::up(Limits::elastic(1, 3), &[2]);
    bed.commit(1, false);
    bed.room.insert(2, 3);
    bed.then(drain(1));
    bed.then(Fact::Offered);
    bed.pass(s(2));
    bed.hold(2);
    // One that leaves, which has the state, and as many new ones as there is room for.
    assert_eq!(bed.table()[0], (0, 1, 1, 1));
    assert!(
        bed.table()[1..].iter().all(|member| member.2 == 2),
        "{:?}",
        bed.table()
    );
    bed.pass(s(2));
    bed.hold(3);
    assert!(
        bed.table().iter().all(|member| member.2 == 2),
        "{:?}",
        bed.table()
    );
    assert!(bed.table().iter().any(|member| member.3 < bed.number()));
}

#[test]
fn below_the_minimum_a_job_waits_and_goes_on_with_a_new_node() {
    let mut bed = Bed::up(Limits::elastic(3, 4), &[2, 2]);
    bed.then(node_lost(2, bed.now));
    assert!(bed.membership.active().is_none());
    bed.pass(s(20));
    bed.room.insert(3, 1);
    bed.then(Fact::Offered);
    assert_eq!(bed.table(), [(0, 1, 1, 1), (1, 1, 1, 1), (2, 2, 3, 2)]);
    // And without one it ends.
    bed.then(node_lost(3, bed.now));
    bed.pass(s(30));
    let (how, why) = bed.end().unwrap();
    assert_eq!(how, End::BelowMin);
    assert!(
        why.contains("rank 2 (process 2 of slot 2 on h3) is lost: its node was lost"),
        "{why}"
    );
}

#[test]
fn a_process_that_does_not_come_is_started_again() {
    let mut bed = Bed::up(Limits::elastic(1, 2), &[1]);
    bed.boots = false;
    bed.room.insert(2, 1);
    bed.then(Fact::Offered);
    bed.news();
    bed.pass(s(30));
    let late = "late: not ready within the start timeout of 30 s".to_owned();
    let expected = [
        Action::Stop {
            process: process(1, 1),
            why: late,
        },
        Action::Start {
            process: process(1, 2),
            location: location(2),
        },
    ];
    assert_eq!(bed.news(), expected);
}

#[test]
fn a_host_that_cools_down_gets_nothing_new_and_keeps_what_it_has() {
    let limits = Limits {
        cooldown: Some(s(10)..=s(10)),
        ..Limits::elastic(2, 3)
    };
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
    assert_eq!(
        bed.news()[0],
        Action::Start {
            process: process(0, 2),
            location: location(1)
        }
    );
}

#[test]
fn a_job_that_fails_at_its_start_again_and_again_ends_fast_with_its_output() {
    let mut bed = Bed::new(Limits::elastic(2, 2), &[2]);
    bed.boots = false;
    bed.settle();
    let mut incarnation = 0;
    while bed.end().is_none() {
        incarnation += 1;
        assert!(incarnation < 9, "{:?}", bed.done);
        // Both fail together, for the same reason.
        for slot in 0..2 {
            bed.then(exited(
                process(slot, incarnation),
                Exit::Code(1),
                "ImportError: no module named torch",
            ));
        }
    }
    assert_eq!(incarnation, 4);
    let (how, why) = bed.end().unwrap();
    assert_eq!(how, End::NoProgress);
    let first = "the first: process 1 of slot 0 on h1: ended before it was ready, with exit code 1: ImportError: no module named torch";
    assert!(why.ends_with(first), "{why}");
}

#[test]
fn a_job_that_fails_before_its_first_commit_again_and_again_ends_fast() {
    let mut bed = Bed::up(Limits::elastic(2, 2), &[2]);
    for generation in 2..=4 {
        bed.fail(1);
        assert_eq!((bed.end(), bed.number()), (None, generation));
    }
    bed.fail(1);
    let why = "4 failures before the first commit, allowed are 3 (restarts_without_progress); \
               the first: process 1 of slot 1 on h1: exit code 1: boom";
    assert_eq!(bed.end(), Some((End::NoProgress, why)));

    // With commits in between it never ends.
    let mut bed = Bed::up(Limits::elastic(2, 2), &[2]);
    for commit in 1..100 {
        bed.fail(1);
        bed.commit(commit, false);
    }
    assert_eq!((bed.end(), bed.number()), (None, 100));
    assert_eq!(bed.membership.budget().resets(), 99);
}

#[test]
fn a_job_whose_members_return_succeeds() {
    let mut bed = Bed::up(Limits::elastic(1, 3), &[2]);
    bed.room.insert(2, 1);
    bed.then(exited(process(0, 1), Exit::Code(0), ""));
    bed.then(Fact::Offered);
    bed.pass(s(60));
    assert_eq!((bed.end(), bed.number()), (None, 1));
    bed.then(exited(process(1, 1), Exit::Code(0), ""));
    assert_eq!(
        bed.end(),
        Some((End::Succeeded, "all members have returned: 2"))
    );
}

#[test]
fn a_generation_that_breaks_on_its_way_is_given_up_and_another_one_is_made() {
    let mut bed = Bed::up(Limits::elastic(1, 4), &[4]);
    bed.boots = false;
    // Rank 1 does not take generation 2, and dies meanwhile.
    bed.hung.insert(process(1, 1));
    bed.fail(0);
    assert!(bed.membership.active().is_none());
    bed.news();
    bed.fail(1);
    let news = bed.news();
    let Action::Revoke {
        generation, lost, ..
    } = &news[0]
    else {
        panic!("{news:?}")
    };
    assert_eq!((generation.0, &lost[..]), (2, &[Rank(0)][..]));
    assert_eq!(bed.table(), [(2, 1, 1, 1), (3, 1, 1, 1)]);
    assert_eq!(bed.number(), 3);
    // One change, however often it was tried.
    assert_eq!(bed.membership.budget().resets(), 1);
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
    let filters = vec![Filter::WholeHosts(2)];
    let limits = Limits {
        filters,
        join_window: s(5),
        ..Limits::elastic(2, 6)
    };
    let mut bed = Bed::up(limits, &[2, 2, 2]);
    assert_eq!(bed.slots(), [0, 1, 2, 3, 4, 5]);
    bed.hung.insert(process(3, 1));
    bed.boots = false;
    bed.fail(1);
    // Generation 2 is on its way to hosts 2 and 3 alone. Then the new process on host 1 is ready.
    bed.ready(process(1, 2));
    bed.settle();
    bed.fail(3);
    // Generation 3: host 1 is whole again, and behind host 3.
    assert_eq!(
        bed.table(),
        [(4, 1, 3, 1), (5, 1, 3, 1), (0, 1, 1, 3), (1, 2, 1, 3)]
    );
}

#[test]
fn facts_that_are_over_are_ignored_and_reported() {
    let mut bed = Bed::up(Limits::elastic(1, 2), &[2]);
    bed.fail(0);
    bed.pass(s(2));
    bed.hold(1);
    let (table, budget) = (bed.table(), bed.membership.budget().clone());
    bed.done.clear();
    bed.then(failed(process(0, 1)));
    bed.then(Fact::Ready {
        process: process(0, 1),
        addresses: [].into(),
    });
    let told = bed
        .done
        .iter()
        .filter(|action| matches!(action, Action::Tell(_)))
        .count();
    assert_eq!(told, 2);
    for (number, commit) in [(1, 1), (2, 1), (9, 9)] {
        let generation = ids::Generation(number);
        bed.then(Fact::Holding {
            generation,
            commit: Some(commit),
        });
        bed.then(Fact::Committed {
            generation,
            commit,
            kept: Kept::Made,
        });
        bed.takes(number, process(0, 1));
    }
    assert_eq!(bed.news(), []);
    assert_eq!(bed.table(), table);
    let now = bed.membership.budget();
    assert_eq!(
        (now.commit(), now.resets()),
        (budget.commit(), budget.resets())
    );
}

#[test]
fn nodes_that_are_lost_together_are_one_change() {
    let mut bed = Bed::up(Limits::elastic(1, 6), &[2, 2, 2]);
    bed.boots = false;
    bed.steps([1, 3].map(|node| node_lost(node, bed.now)));
    bed.settle();
    assert_eq!((bed.number(), bed.slots()), (2, vec![2, 3]));
}

#[test]
fn a_seat_that_is_reserved_twice_is_started_once() {
    let mut bed = Bed::new(Limits::elastic(1, 1), &[1]);
    bed.boots = false;
    bed.settle();
    let slot = Slot(0);
    bed.then(Fact::Reserved {
        slot,
        location: location(1),
    });
    let starts = |action: &&Action| matches!(action, Action::Start { .. });
    assert_eq!(bed.done.iter().filter(starts).count(), 1);
}

#[test]
fn a_node_that_is_drained_no_more_stays_and_its_replacement_goes() {
    let mut bed = Bed::up(Limits::elastic(1, 2), &[1, 1, 1]);
    bed.then(drain(1));
    bed.news();
    bed.then(undrain(1));
    let replacement = process(2, 1);
    let slots = vec![replacement.slot];
    let news = bed.news();
    assert!(
        matches!(&news[..], [Action::Stop { process, .. }] if *process == replacement),
        "{news:?}"
    );
    // Its node holds the room until then.
    bed.then(exited(replacement, Exit::Signal(15), ""));
    assert_eq!(bed.news(), [Action::GiveBack { slots }]);
    bed.commit(1, false);
    assert_eq!(bed.slots(), [0, 1]);

    // A job that is short of spares keeps it.
    let limits = Limits {
        spares: 1,
        ..Limits::elastic(1, 2)
    };
    let mut bed = Bed::up(limits, &[1, 1]);
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
    bed.then(exited(process(0, 1), Exit::Code(0), ""));
    // Before the head has freed the node.
    bed.then(undrain(1));
    let slots = vec![Slot(0)];
    assert_eq!(bed.news(), [Action::GiveBack { slots }]);
}
