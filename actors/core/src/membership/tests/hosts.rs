//! Groups that take part in whole hosts, and what becomes of the rest of a host.

use super::*;

/// Two workers on each host, at least one host and at most two.
fn limits() -> Limits {
    Limits {
        per_host: 2,
        ..Limits::elastic(2, 4)
    }
}

fn stops(news: &[Action]) -> Vec<Process> {
    let stops = news.iter().filter_map(|action| match action {
        Action::Stop { process, .. } => Some(*process),
        _ => None,
    });
    stops.collect()
}

#[test]
fn a_host_that_cools_down_leaves_the_group_for_another_one() {
    let limits = Limits {
        cooldown: Some(s(60)..=s(60)),
        ..limits()
    };
    let mut bed = Bed::up(limits.clone(), &[2, 2, 2]);
    bed.fail(0);
    assert_eq!(stops(&bed.news()), [process(1, 1)]);
    bed.hold(1);
    assert_eq!(bed.slots(), [2, 3, 4, 5]);
    // Its room is given back as a whole.
    bed.then(exited(process(1, 1), Exit::Signal(15), ""));
    let slots = vec![Slot(0), Slot(1)];
    assert!(bed.news().contains(&Action::GiveBack { slots }));

    // Without another host it is taken again when it has cooled down.
    let mut bed = Bed::up(limits, &[2, 2]);
    bed.fail(0);
    assert_eq!(bed.slots(), [2, 3]);
    bed.pass(s(59));
    bed.done.clear();
    bed.pass(s(2));
    bed.hold(1);
    assert_eq!(bed.slots(), [2, 3, 0, 1]);
}

#[test]
fn the_last_worker_that_has_the_state_waits_for_its_host() {
    let limits = Limits {
        cooldown: Some(s(10)..=s(10)),
        ..Limits {
            per_host: 2,
            ..Limits::elastic(2, 2)
        }
    };
    let mut bed = Bed::up(limits, &[2, 2]);
    bed.commit(1, false);
    bed.fail(0);
    assert!(
        bed.membership.active().is_none(),
        "nobody else has the state"
    );
    bed.pass(s(11));
    // And the host that was to take over is not needed any more.
    assert_eq!(bed.table(), [(1, 1, 1, 1), (0, 2, 1, 2)]);
    assert_eq!(stops(&bed.news()), [process(2, 1), process(3, 1)]);
}

#[test]
fn drained_hosts_hand_over_to_others_one_after_the_other() {
    let mut bed = Bed::up(limits(), &[2, 2, 2, 2]);
    bed.commit(1, false);
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
