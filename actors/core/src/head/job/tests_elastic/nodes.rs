//! Nodes of an elastic job join, leave, and are lost.

use super::*;

#[test]
fn when_the_node_of_the_first_seats_refuses_the_others_start_with_ranks_below_the_world_size() {
    let mut bed = Bed::submit(1, 4, &[2, 2], |_| ());
    for event in &mut bed.queue {
        if let Event::Replied { node, reply } = event
            && *node == NodeId(1)
        {
            *reply = Reply::Refused(Refusal::new(RefusalKind::Unplaceable, "it is full"));
        }
    }
    // The bed looks at ranks, world sizes, and environments.
    bed.run();
    let log = bed.take_log();
    assert!(log.contains(&"2:start 2.1 3.1".to_owned()), "{log:?}");
}

#[test]
fn more_seats_on_a_node_of_the_job_are_started_there_once() {
    let mut bed = Bed::active(1, 3, &[1]);
    bed.step(Event::Offered);
    assert_eq!(bed.take_log(), ["place 1 2 []"]);
    bed.place(1, &[1, 2]);
    assert_eq!(bed.take_log(), ["1:start 1.1 2.1"]);
    bed.ready(1, 1, 1);
    bed.ready(1, 2, 1);
    assert_eq!(bed.take_log(), ["1:hold 1"]);
}

fn lose_the_first_of_two(fence: Fence) -> Bed {
    let mut bed = Bed::active(1, 2, &[1, 1]);
    bed.commit(1, false);
    bed.step(Event::NodeLost {
        node: NodeId(1),
        reason: "silent".to_owned(),
        fence,
    });
    bed
}

fn fence_the_first(bed: &mut Bed) {
    bed.step(Event::Fenced {
        node: NodeId(1),
        reason: "its daemon has died".to_owned(),
    });
}

#[test]
fn g3_what_is_known_of_the_lost_workers_ends_the_wait_for_them() {
    let bed = lose_the_first_of_two(Fence::Ended);
    assert_eq!(bed.members(), ["1.1"]);

    let mut bed = lose_the_first_of_two(Fence::Wardens);
    assert_eq!(bed.generation(), 1);
    bed.wait(fence::of_death());
    assert_eq!(bed.members(), ["1.1"]);

    // The obituary comes before the end of either time.
    for fence in [Fence::Wardens, Fence::Lease] {
        let mut bed = lose_the_first_of_two(fence);
        assert_eq!(bed.generation(), 1);
        fence_the_first(&mut bed);
        assert_eq!(
            (bed.generation(), bed.members()),
            (2, vec!["1.1".to_owned()])
        );
        // Again, because it is sent more than once.
        fence_the_first(&mut bed);
        assert_eq!(bed.generation(), 2);
    }
}

#[test]
fn f1_a_driver_that_is_cut_off_from_a_node_gets_another_generation() {
    let mut bed = Bed::active(1, 2, &[1, 1]);
    let told = |generation| {
        Event::Driver(SubmitFrame::Unreachable {
            generation: Generation(generation),
            why: "its driver's channel to node 1 is gone".to_owned(),
        })
    };
    // A loss may explain it.
    bed.step(told(1));
    assert_eq!(bed.generation(), 1);
    bed.wait(Duration::from_secs(1));
    bed.run();
    assert_eq!((bed.generation(), bed.members().len()), (2, 2));
    assert!(
        bed.table().cause.contains("channel"),
        "{}",
        bed.table().cause
    );
    // Late words of a generation that is over change nothing.
    bed.step(told(1));
    bed.wait(Duration::from_secs(2));
    assert_eq!(bed.generation(), 2);
}

#[test]
fn a_generation_that_another_one_has_followed_is_neither_sent_nor_revoked() {
    let mut bed = Bed::active(1, 3, &[1, 1, 1]);
    // Something is on its way there, and takes long.
    let slow = NodeId(3);
    bed.delivering.insert(slow);
    bed.exits(1, 0, 1, Exit::Signal(9));
    bed.exits(2, 1, 1, Exit::Signal(9));
    bed.take_log();
    bed.delivering.remove(&slow);
    bed.deliver(slow);
    bed.run();
    let mut log = bed.take_log();
    log.retain(|line| line.starts_with("3:"));
    assert_eq!(log, ["3:revoke 1 0", "3:generation 3"]);
}

#[test]
fn losses_of_a_large_group_that_come_together_make_one_generation() {
    let mut bed = Bed::active(1, 1000, &[100; 10]);
    for node in [3, 7] {
        bed.step(Event::NodeLost {
            node: NodeId(node),
            reason: "the switch is gone".to_owned(),
            fence: Fence::Lease,
        });
    }
    assert_eq!(bed.generation(), 1);
    bed.wait(Duration::from_millis(1));
    assert_eq!((bed.generation(), bed.members().len()), (2, 800));
    let is_revocation = |line: &&String| line.starts_with("1:revoke");
    assert_eq!(bed.log.iter().filter(is_revocation).count(), 1);
}
