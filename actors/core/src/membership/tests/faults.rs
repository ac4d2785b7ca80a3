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
    let expected = [(2, 1, 2, 1), (3, 1, 2, 1), (4, 1, 3, 2), (5, 1, 3, 2)];
    assert_eq!(bed.table(), expected);
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
    assert!(bed.is_idle());
    bed.offer(3, 2);
    assert_eq!(bed.slots(), [2, 3, 0, 1]);
    assert!(bed.active().needs_sync());
    // With survivors alone nobody does.
    let mut bed = Bed::up(Limits::elastic(2, 4), &[2, 2]);
    bed.then(drain(1));
    bed.hold(1);
    assert_eq!(bed.slots(), [2, 3]);
    assert!(!bed.active().needs_sync());
}

/// The barrier of Horovod's driver has no timeout: a worker that neither exits nor comes blocks all others for ever.
#[test]
fn a_hung_worker_does_not_block_the_barrier() {
    let mut bed = Bed::up(Limits::elastic(2, 4), &[2, 2]);
    bed.boots = false;
    bed.hung.insert(process(2, 1));
    bed.fail(0);
    assert!(bed.is_idle());
    bed.pass(s(10));
    assert_eq!(bed.slots(), [1, 3]);
    let why = "late: did not take generation 2 within 10s";
    assert!(bed.done.contains(&stop(process(2, 1), why)));
}

/// A new worker that came too late for a barrier aborted, and its host was condemned.
#[test]
fn a_healthy_host_is_not_condemned_for_a_late_rank() {
    let limits = with(1, 3, |it| it.cooldown = Some(s(100)..=s(100)));
    let mut bed = Bed::up(limits, &[1, 2]);
    bed.boots = false;
    bed.hung.insert(process(1, 1));
    bed.fail(0);
    bed.pass(s(10));
    assert_eq!(bed.slots(), [2]);
    assert_eq!(bed.membership.budget().cooling(bed.now), [host(1)].into());
    assert!(bed.done.contains(&start(process(1, 2), 2)));
    // It does not come either. That is no proof against its host, on which it is tried again.
    bed.pass(s(30));
    assert_eq!(bed.membership.budget().cooling(bed.now), [host(1)].into());
    let why = "late: not ready within the start timeout of 30s";
    assert!(bed.done.contains(&stop(process(1, 2), why)));
    assert!(bed.done.contains(&start(process(1, 3), 2)));
}

/// #3197: "No hosts from previous set remaining, unable to broadcast state" although workers had been added in time.
#[test]
fn horovod_3197_a_worker_that_was_added_in_time_has_the_state() {
    let mut bed = Bed::up(Limits::elastic(1, 2), &[1]);
    bed.offer(2, 1);
    bed.hold(1);
    assert_eq!(bed.slots(), [0, 1]);
    bed.boots = false;
    // Dies the first one before it has handed the state on, it is gone.
    let mut other = bed.clone();
    other.fail(0);
    assert_eq!(other.how(), Some(End::NoSurvivor));
    bed.commit(1);
    bed.fail(0);
    assert_eq!(bed.table(), [(1, 1, 2, 2)]);
    bed.fail(1);
    assert_eq!(bed.how(), Some(End::NoSurvivor));
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
    let why = "rank 3 is lost: process 1 of slot 3 on h2: its node was lost: cable";
    assert_eq!(cause, why);
    assert_eq!(generation.members().len(), 3);
}

impl Bed {
    pub(super) fn breaks(&mut self, culprit: Option<u32>, why: &str) {
        let generation = self.active().number();
        let (culprit, why) = (culprit.map(Rank), why.to_owned());
        self.then(Fact::Broken {
            generation,
            culprit,
            why,
        });
    }

    fn late(&mut self) {
        self.breaks(Some(1), "rank 1 is late");
    }

    fn has(&self, process: Process) -> bool {
        self.active().member(process).is_some()
    }
}

/// A hung worker blocks the barrier of all others for ever. Here its next generation is made without it.
#[test]
fn a_member_that_stands_still_is_given_up_and_replaced() {
    let mut bed = Bed::up(Limits::elastic(2, 3), &[4]);
    bed.hung.insert(process(1, 1));
    bed.late();
    assert_eq!(bed.number(), 1, "its end may be on its way");
    bed.pass(s(1));
    assert!(bed.is_idle());
    bed.pass(bed.limits.ack_timeout);
    assert!(bed.stopped().contains(&(1, 1)));
    assert!(!bed.has(process(1, 1)));
    assert_eq!(bed.members()[0], (0, 1));
}

/// All members fail in the same place, without a loss: so they would for ever.
#[test]
fn members_that_can_not_go_on_again_and_again_end_their_job() {
    let mut bed = Bed::up(Limits::elastic(2, 3), &[4]);
    let mut generations = 0;
    while !bed.is_idle() {
        bed.late();
        bed.hold(1);
        generations += 1;
        assert!(generations < 10);
    }
    assert_eq!(generations, 4);
    assert_eq!(bed.how(), Some(End::NoProgress), "{:?}", bed.done);
    // A commit in between is progress.
    let mut bed = Bed::up(Limits::elastic(2, 3), &[4]);
    for number in 1..10 {
        bed.commit(number);
        bed.late();
        bed.hold(number);
        let why = "nobody is lost, but they could not go on: rank 1 is late";
        let active = bed.active();
        let cause = active.cause();
        assert!(cause.ends_with(why), "{cause}");
    }
    assert!(!bed.is_idle());
}

/// The same of a worker whose control thread still takes generations: its second one that breaks is its last.
#[test]
fn a_member_that_is_blamed_twice_in_a_row_is_given_up() {
    for commits in [false, true] {
        let mut bed = Bed::up(Limits::elastic(2, 3), &[4]);
        for generation in 1..3 {
            assert_eq!(bed.number(), generation);
            if commits {
                bed.commit(generation);
            }
            bed.late();
            bed.pass(s(1));
        }
        // One that is blamed after a commit has worked since.
        assert_eq!(bed.has(process(1, 1)), commits);
    }
}

#[test]
fn a_doubt_is_forgotten_when_the_loss_behind_it_is_known() {
    let mut bed = Bed::up(Limits::elastic(2, 3), &[4]);
    bed.late();
    bed.fail(1);
    assert!(bed.number() > 1);
    bed.pass(s(5));
    assert!(!bed.is_idle());
    let revokes = |action: &Action| matches!(action, Action::Revoke { .. });
    assert_eq!(bed.count(revokes), 1);
}

#[test]
fn a_job_that_loses_all_its_members_before_the_first_commit_begins_anew() {
    let mut bed = Bed::up(Limits::elastic(2, 2), &[1, 1]);
    let both = |incarnation| [0, 1].map(|slot| failed(process(slot, incarnation)));
    for lost in 1..=3 {
        bed.all(both(lost));
        assert_eq!(bed.number(), lost + 1);
        let active = bed.active();
        assert!(active.needs_sync() && !active.needs_restore());
        // They have the state that rank 0 began with, and nothing more.
        bed.commits(lost + 1, 1, Kept::Received);
    }
    // News of a commit of former members change nothing.
    bed.commits(1, 5, Kept::Made);
    assert_eq!(bed.membership.budget().commit(), None);
    // A job that fails again and again ends.
    let mut other = bed.clone();
    other.all(both(4));
    assert_eq!(other.how(), Some(End::NoProgress));
    // And after a commit there is something to lose.
    bed.commit(1);
    bed.all(both(4));
    assert_eq!(bed.how(), Some(End::NoSurvivor));
}
