//! Faults that Horovod's elastic jobs are known for, by the number of their report where there is one.

use super::*;

/// Horovod's notifications have a time in whole seconds, and the second one of a second is dropped.
#[test]
fn two_host_changes_in_one_second_are_both_taken() {
    let mut bed = Bed::up(Limits::elastic(1, 6), &[2, 2, 0]);
    // At the very same time.
    bed.room.insert(3, 2);
    bed.step(drain(1));
    bed.step(Fact::Offered);
    bed.settle();
    bed.hold(1);
    assert_eq!(
        bed.table(),
        [(2, 1, 2, 1), (3, 1, 2, 1), (4, 1, 3, 2), (5, 1, 3, 2)]
    );
}

/// #3494: after a removal alone old workers skip the synchronisation. If new ones join meanwhile, these wait in it for ever.
#[test]
fn horovod_3494_all_members_read_in_the_generation_if_they_synchronise() {
    let mut bed = Bed::up(Limits::elastic(4, 4), &[2, 2]);
    // A graceful removal below the minimum: the host is needed, and goes on until there is another one.
    bed.then(drain(1));
    assert_eq!(bed.number(), 1);
    for slot in 0..2 {
        bed.then(exited(process(slot, 1), Exit::Signal(15), ""));
    }
    assert!(bed.membership.active().is_none());
    bed.room.insert(3, 2);
    bed.then(Fact::Offered);
    assert_eq!(bed.slots(), [2, 3, 0, 1]);
    assert!(bed.active().needs_sync());
    // With survivors alone nobody does.
    let mut bed = Bed::up(Limits::elastic(2, 4), &[2, 2]);
    bed.then(drain(1));
    bed.hold(1);
    assert_eq!(bed.slots(), [2, 3]);
    assert!(!bed.active().needs_sync());
}

/// #3399, #3143: after a graceful removal the sampler kept rank and size of before, and samples were repeated or lost.
#[test]
fn horovod_3399_each_survivor_of_a_removal_gets_its_new_rank_and_size() {
    let mut bed = Bed::up(Limits::elastic(1, 4), &[2, 2]);
    bed.then(drain(1));
    bed.news();
    bed.hold(1);
    let news = bed.news();
    let Action::Publish { generation, to } = &news[0] else {
        panic!("{news:?}")
    };
    assert_eq!(generation.number().0, 2);
    for slot in [2, 3] {
        let member = generation.member(process(slot, 1)).unwrap();
        assert_eq!(member.rank, Rank(slot - 2));
        assert!(to.contains(&member.process));
    }
    assert_eq!(generation.members().len(), 2);
}

/// The barrier of Horovod's driver has no timeout: a worker that neither exits nor comes blocks all others for ever.
#[test]
fn a_hung_worker_does_not_block_the_barrier() {
    let mut bed = Bed::up(Limits::elastic(2, 4), &[2, 2]);
    bed.boots = false;
    bed.hung.insert(process(2, 1));
    bed.fail(0);
    assert!(bed.membership.active().is_none());
    bed.pass(s(10));
    assert_eq!(bed.slots(), [1, 3]);
    let why = "late: did not take generation 2 within 10 s".to_owned();
    assert!(bed.news().contains(&Action::Stop {
        process: process(2, 1),
        why
    }));
}

/// A repeated request of one worker completed a barrier of two parties alone.
#[test]
fn a_retry_is_not_counted_twice() {
    let mut bed = Bed::new(Limits::elastic(2, 2), &[2]);
    bed.boots = false;
    bed.hung = [process(0, 1), process(1, 1)].into();
    bed.settle();
    for _ in 0..3 {
        bed.ready(process(0, 1));
        bed.settle();
    }
    assert_eq!(bed.membership.roster().count(State::Ready), 1);
    bed.ready(process(1, 1));
    bed.settle();
    for _ in 0..3 {
        bed.takes(1, process(0, 1));
    }
    assert!(bed.membership.active().is_none());
    bed.takes(1, process(1, 1));
    assert_eq!(bed.number(), 1);
    assert_eq!(bed.membership.budget().resets(), 0);
}

/// A new worker that came too late for a barrier aborted, and its host was condemned.
#[test]
fn a_healthy_host_is_not_condemned_for_a_late_rank() {
    let limits = Limits {
        cooldown: Some(s(100)..=s(100)),
        ..Limits::elastic(1, 3)
    };
    let mut bed = Bed::up(limits, &[1, 2]);
    bed.boots = false;
    bed.hung.insert(process(1, 1));
    bed.fail(0);
    bed.pass(s(10));
    assert_eq!(bed.slots(), [2]);
    assert_eq!(bed.membership.budget().cooling(bed.now), [host(1)].into());
    assert!(bed.done.contains(&Action::Start {
        process: process(1, 2),
        location: location(2)
    }));
    // It does not come either. That is no proof against its host, on which it is tried again.
    bed.pass(s(30));
    assert_eq!(bed.membership.budget().cooling(bed.now), [host(1)].into());
    assert!(bed.done.contains(&Action::Start {
        process: process(1, 3),
        location: location(2)
    }));
}

/// One failed worker condemned its whole host, and killed the other workers there.
#[test]
fn a_failed_worker_does_not_condemn_the_others_of_its_host() {
    let limits = Limits {
        cooldown: Some(s(100)..=s(100)),
        ..Limits::elastic(1, 4)
    };
    let mut bed = Bed::up(limits, &[4]);
    bed.fail(2);
    assert_eq!(bed.slots(), [0, 1, 3]);
    assert!(
        !bed.done
            .iter()
            .any(|action| matches!(action, Action::Stop { .. }))
    );
}

/// #3264: all workers abort when one host dies. What fails because of the first loss uses up nothing more.
#[test]
fn horovod_3264_failures_that_follow_a_loss_are_not_counted() {
    let limits = Limits {
        cooldown: Some(s(100)..=s(100)),
        ..Limits::elastic(1, 4)
    };
    let mut bed = Bed::up(limits, &[1, 1, 1, 1]);
    bed.boots = false;
    bed.commit(1, true);
    bed.step(failed(process(0, 1)));
    for slot in 1..4 {
        bed.now += ms(20);
        bed.step(exited(
            process(slot, 1),
            Exit::Signal(6),
            "terminate called",
        ));
    }
    assert_eq!(bed.membership.budget().without_progress(), 1);
    assert_eq!(bed.membership.budget().cooling(bed.now), [host(1)].into());
    assert_eq!(bed.end(), None);
}

/// #3014: the driver deadlocked when a worker that was ready failed during the barrier's action.
#[test]
fn horovod_3014_a_worker_that_fails_after_it_was_ready_is_left_out() {
    let mut bed = Bed::up(Limits::elastic(1, 3), &[3]);
    bed.boots = false;
    bed.hung.insert(process(2, 1));
    bed.fail(0);
    // Rank 0 of the next generation has taken it, and dies before the last one has.
    bed.fail(1);
    bed.hung.clear();
    bed.pass(s(1));
    assert_eq!(bed.slots(), [2]);
}

/// #2483, #1926: a host was punished for ever.
#[test]
fn horovod_2483_a_host_comes_back_after_its_cool_down() {
    let limits = Limits {
        cooldown: Some(s(10)..=s(40)),
        ..Limits::elastic(1, 2)
    };
    let mut bed = Bed::up(limits, &[1, 1]);
    bed.fail(1);
    assert_eq!(bed.slots(), [0]);
    bed.pass(s(31));
    bed.hold(1);
    assert_eq!(bed.table(), [(0, 1, 1, 1), (1, 2, 2, 3)]);
}

/// #3852: a worker that was taken away counted as one that has succeeded, and the job was stopped.
#[test]
fn horovod_3852_a_worker_that_is_taken_away_has_not_succeeded() {
    let mut bed = Bed::up(Limits::elastic(1, 2), &[1, 1]);
    bed.then(drain(2));
    bed.then(exited(process(1, 1), Exit::Code(0), ""));
    assert_eq!(bed.end(), None);
    assert_eq!(bed.slots(), [0]);
}

/// #3197: "No hosts from previous set remaining, unable to broadcast state" although workers had been added in time.
#[test]
fn horovod_3197_a_worker_that_was_added_in_time_has_the_state() {
    let mut bed = Bed::up(Limits::elastic(1, 2), &[1]);
    bed.room.insert(2, 1);
    bed.then(Fact::Offered);
    bed.hold(1);
    assert_eq!(bed.slots(), [0, 1]);
    bed.boots = false;
    // Dies the first one before it has handed the state on, it is gone.
    let mut other = bed.clone();
    other.fail(0);
    assert_eq!(other.end().unwrap().0, End::NoSurvivor);
    bed.commit(1, false);
    bed.fail(0);
    assert_eq!(bed.table(), [(1, 1, 2, 2)]);
    bed.fail(1);
    assert_eq!(bed.end().unwrap().0, End::NoSurvivor);
}

/// #2826: an elastic job on one node waited for a second one.
#[test]
fn horovod_2826_a_job_starts_on_one_node() {
    assert_eq!(Bed::up(Limits::elastic(2, 8), &[2]).slots(), [0, 1]);
}

/// A host that is cut off is noticed by nobody before a timeout of TCP. Here the head's word is enough.
#[test]
fn a_silent_host_is_left_in_the_step_in_which_it_is_lost() {
    let mut bed = Bed::up(Limits::elastic(1, 5), &[3, 2]);
    bed.news();
    bed.step(node_lost(2, bed.now + s(1)));
    let news = bed.news();
    let [
        Action::Revoke { lost, cause, .. },
        ..,
        Action::Publish { generation, .. },
    ] = &news[..]
    else {
        panic!("{news:?}")
    };
    assert_eq!(lost, &[Rank(3), Rank(4)]);
    assert_eq!(
        cause,
        "rank 3 is lost: process 1 of slot 3 on h2: its node was lost: cable"
    );
    assert_eq!(generation.members().len(), 3);
}

fn broken(bed: &Bed, culprit: u32) -> Fact {
    Fact::Broken {
        generation: bed.active().number(),
        culprit: Some(Rank(culprit)),
        why: format!("rank {culprit} is late"),
    }
}

/// A hung worker blocks the barrier of all others for ever. Here its next generation is made without it.
#[test]
fn a_member_that_stands_still_is_given_up_and_replaced() {
    let limits = Limits::elastic(2, 3);
    let ack_timeout = limits.ack_timeout;
    let mut bed = Bed::up(limits, &[4]);
    bed.hung.insert(process(1, 1));
    bed.then(broken(&bed, 1));
    assert_eq!(bed.number(), 1, "its end may be on its way");
    bed.pass(s(1));
    assert!(bed.membership.active().is_none());
    bed.pass(ack_timeout);
    let why = |action: &Action| matches!(action, Action::Stop { process: gone, .. } if *gone == process(1, 1));
    assert!(bed.done.iter().any(why), "{:?}", bed.done);
    let active = bed.active();
    let members = active.members();
    assert!(members.iter().all(|member| member.process != process(1, 1)));
    assert_eq!(members[0].process, process(0, 1));
}

/// All members fail in the same place, without a loss: so they would for ever.
#[test]
fn members_that_can_not_go_on_again_and_again_end_their_job() {
    let mut bed = Bed::up(Limits::elastic(2, 3), &[4]);
    let mut generations = 0;
    while bed.membership.active().is_some() {
        bed.then(broken(&bed, 1));
        bed.hold(1);
        generations += 1;
        assert!(generations < 10);
    }
    assert_eq!(generations, 4);
    let ends = |action: &&Action| {
        matches!(
            action,
            Action::End {
                how: End::NoProgress,
                ..
            }
        )
    };
    let end = bed.done.iter().find(ends);
    assert!(end.is_some(), "{:?}", bed.done);
    // A commit in between is progress.
    let mut bed = Bed::up(Limits::elastic(2, 3), &[4]);
    for number in 1..10 {
        bed.commit(number, false);
        bed.then(broken(&bed, 1));
        bed.hold(number);
        let why = "nobody is lost, but they could not go on: rank 1 is late";
        let active = bed.active();
        let cause = active.cause();
        assert!(cause.ends_with(why), "{cause}");
    }
    assert!(bed.membership.active().is_some());
}

/// The same of a worker whose control thread still takes generations: its second one that breaks is its last.
#[test]
fn a_member_that_is_blamed_twice_in_a_row_is_given_up() {
    let mut bed = Bed::up(Limits::elastic(2, 3), &[4]);
    for generation in 1..3 {
        assert_eq!(bed.number(), generation);
        bed.then(broken(&bed, 1));
        bed.pass(s(1));
    }
    let is_it = |member: &Member| member.process == process(1, 1);
    assert!(!bed.active().members().iter().any(is_it));
    // One that is blamed after a commit has worked since.
    let mut bed = Bed::up(Limits::elastic(2, 3), &[4]);
    for generation in 1..4 {
        assert_eq!(bed.number(), generation);
        bed.commit(generation, false);
        bed.then(broken(&bed, 1));
        bed.pass(s(1));
    }
    assert!(bed.active().members().iter().any(is_it));
}

#[test]
fn a_doubt_is_forgotten_when_the_loss_behind_it_is_known() {
    let mut bed = Bed::up(Limits::elastic(2, 3), &[4]);
    bed.then(broken(&bed, 1));
    bed.fail(1);
    let number = bed.number();
    assert!(number > 1);
    bed.pass(s(5));
    assert!(bed.membership.active().is_some());
    let revokes = |action: &&Action| matches!(action, Action::Revoke { .. });
    assert_eq!(bed.done.iter().filter(revokes).count(), 1);
}

#[test]
fn a_job_that_loses_all_its_members_before_the_first_commit_begins_anew() {
    let mut bed = Bed::up(Limits::elastic(2, 2), &[1, 1]);
    for lost in 1..=3 {
        let both = [0, 1].map(|slot| failed(process(slot, lost)));
        bed.now += ms(1);
        bed.steps(both);
        bed.settle();
        assert_eq!(bed.number(), lost + 1);
        let active = bed.active();
        assert!(active.needs_sync() && !active.needs_restore());
        // They have the state that rank 0 began with, and nothing more.
        let (generation, kept) = (active.number(), Kept::Received);
        bed.then(Fact::Committed {
            generation,
            commit: 1,
            kept,
        });
    }
    // News of a commit of former members change nothing.
    let (generation, commit) = (ids::Generation(1), 5);
    bed.then(Fact::Committed {
        generation,
        commit,
        kept: Kept::Made,
    });
    assert_eq!(bed.membership.budget().commit(), None);
    // A job that fails again and again ends.
    let mut other = bed.clone();
    other.steps([0, 1].map(|slot| failed(process(slot, 4))));
    assert_eq!(other.end().unwrap().0, End::NoProgress);
    // And after a commit there is something to lose.
    bed.commit(1, false);
    bed.steps([0, 1].map(|slot| failed(process(slot, 4))));
    assert_eq!(bed.end().unwrap().0, End::NoSurvivor);
}
