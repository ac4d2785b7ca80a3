//! Groups that take part in whole hosts, and what becomes of the rest of a host.

use super::*;

/// Two workers on each host, at least one host and at most `max` workers.
fn limits(max: u32, cooldown: Option<Duration>) -> Limits {
    with(2, max, |it| {
        it.per_host = 2;
        it.cooldown = cooldown.map(|time| time..=time);
    })
}

#[test]
fn a_host_that_cools_down_leaves_the_group_for_another_one() {
    let limits = limits(4, Some(s(60)));
    let mut bed = Bed::up(limits.clone(), &[2, 2, 2]);
    bed.fail(0);
    assert_eq!(bed.stopped(), [(1, 1)]);
    bed.hold(1);
    assert_eq!(bed.slots(), [2, 3, 4, 5]);
    // Its room is given back as a whole.
    bed.then(exited(process(1, 1), Exit::Signal(15), ""));
    assert!(bed.done.contains(&give_back(&[0, 1])));

    // Without another host it is taken again when it has cooled down.
    let mut bed = Bed::up(limits, &[2, 2]);
    bed.fail(0);
    assert_eq!(bed.slots(), [2, 3]);
    bed.pass(s(61));
    bed.hold(1);
    assert_eq!(bed.slots(), [2, 3, 0, 1]);
}

#[test]
fn the_last_worker_that_has_the_state_waits_for_its_host() {
    let mut bed = Bed::up(limits(2, Some(s(10))), &[2, 2]);
    bed.commit(1);
    bed.fail(0);
    assert!(bed.is_idle(), "nobody else has the state");
    bed.pass(s(11));
    // And the host that was to take over is not needed any more.
    assert_eq!(bed.table(), [(1, 1, 1, 1), (0, 2, 1, 2)]);
    assert_eq!(bed.stopped(), [(2, 1), (3, 1)]);
}

#[test]
fn drained_hosts_hand_over_to_others_one_after_the_other() {
    let mut bed = Bed::up(limits(4, None), &[2, 2, 2, 2]);
    bed.commit(1);
    for node in [1, 2] {
        bed.then(drain(node));
    }
    bed.hold(2);
    // One of those that have the state must stay.
    assert_eq!(bed.slots(), [0, 1, 4, 5]);
    bed.hold(3);
    assert_eq!(bed.slots(), [4, 5, 6, 7]);
    assert_eq!(bed.membership.roster().staying(), 4);
}
