//! What ends a group, what that costs, and what the next one waits for.

use super::*;

#[test]
fn the_loss_of_a_host_costs_nothing_though_its_peers_fail_first() {
    let mut bed = Bed::up(limits(1, 2, 0), &[1, 1]);
    // Nothing is heard of node 2.
    bed.hung.insert(process(1, 1));
    bed.fail(0);
    assert_eq!(bed.end(), None, "a lost node may be behind it");
    bed.pass(s(1));
    bed.then(node_lost(2, bed.now));
    assert_eq!(bed.ranks(), [(0, 0, 1, 2)]);
    let cause = "2 -> 1 worker, failures so far 0 of 0: rank 1 on h2: its node was lost: cable";
    assert_eq!(bed.active().cause(), cause);
    // Together in one step.
    let mut bed = Bed::up(limits(1, 2, 0), &[1, 1]);
    bed.all([failed(process(0, 1)), node_lost(2, bed.now)]);
    assert_eq!((bed.number(), bed.restarts()), (2, 0));
    // Both nodes answer: the failure counts, and its stop is over.
    let mut bed = Bed::up(limits(1, 2, 0), &[1, 1]);
    bed.fail(0);
    assert_eq!(bed.how(), Some(End::TooManyRestarts));
}

#[test]
fn those_that_have_done_their_work_on_a_node_that_leaves_have_done_it() {
    let mut bed = Bed::up(limits(2, 2, 0), &[1, 1]);
    bed.then(drain(2));
    assert_eq!(bed.number(), 1, "there is no other node");
    bed.done_by(&[1, 0]);
    assert_eq!(bed.how(), Some(End::Succeeded));

    // One that had returned is started with the others, and not on that node.
    let mut bed = Bed::up(limits(1, 2, 1), &[1, 1]);
    bed.done_by(&[1]);
    bed.then(drain(2));
    assert_eq!((bed.number(), bed.stopped()), (1, vec![]));
    bed.fail(0);
    assert_eq!(bed.ranks(), [(0, 0, 1, 2)]);
}

#[test]
fn groups_that_live_short_are_started_anew_after_pauses_that_grow() {
    let mut bed = Bed::up(limits(1, 1, 20), &[1]);
    let last = |bed: &Bed| bed.membership.active().map_or(0, |last| last.number().0);
    let fail = |bed: &mut Bed| {
        let number = last(bed);
        bed.then(failed(process(0, number)));
        let start = bed.now;
        while last(bed) <= number {
            bed.pass(ms(100));
        }
        (bed.now - start).as_millis() / 1000
    };
    let pauses: Vec<u128> = (0..8).map(|_| fail(&mut bed)).collect();
    assert_eq!(pauses, [0, 1, 2, 4, 5, 5, 5, 5]);
    bed.pass(s(10));
    assert_eq!(fail(&mut bed), 0, "this one has lived long");
    assert_eq!([fail(&mut bed), fail(&mut bed)], [0, 1]);
    // A node that joins has no part in that.
    let mut bed = Bed::up(limits(1, 3, 3), &[1]);
    for node in [2, 3] {
        bed.offer(node, 1);
        bed.pass(ms(10));
        assert_eq!(bed.number(), node);
    }
}

#[test]
fn room_for_too_few_is_given_back_if_another_job_waits() {
    let mut bed = Bed::up(limits(3, 4, 0), &[2]);
    assert_eq!(bed.membership.shortage(), Some(2));
    bed.then(Fact::Contended);
    assert!(bed.done.contains(&give_back(&[0, 1])));
    assert_eq!(bed.membership.shortage(), Some(0));
    // It takes nothing before room is offered.
    bed.room.insert(1, 4);
    bed.pass(s(5));
    assert!(bed.is_idle());
    bed.then(Fact::Offered);
    assert_eq!(bed.active().members().len(), 4);
    // A group that runs keeps what it has.
    bed.then(Fact::Contended);
    assert_eq!(bed.number(), 1);
}

#[test]
fn g3_an_end_that_was_not_seen_is_no_end() {
    let mut bed = Bed::up(limits(1, 3, 3), &[1, 1]);
    bed.hung.insert(process(1, 1));
    bed.fail(0);
    let why = "its end was not seen".to_owned();
    let process = process(1, 1);
    bed.then(Fact::Unseen { process, why });
    bed.then(drain(2));
    bed.join(3, 1);
    assert!(bed.is_idle());
    assert_eq!(bed.restarts(), 1);
    // The node says that nothing is left, or has had time enough.
    bed.room.clear();
    bed.then(node_lost(2, bed.now + s(10)));
    assert!(bed.is_idle());
    bed.pass(s(11));
    assert_eq!(bed.nodes(), [1, 3]);
}
