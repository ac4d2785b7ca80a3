//! Nodes of an elastic job join, leave, and are lost.

use super::*;

#[test]
fn a_node_that_is_offered_lets_the_job_grow() {
    let mut bed = Bed::active(1, 3, &[2]);
    bed.step(Event::Offered);
    assert_eq!(bed.take_log(), ["place 2 []"]);
    bed.place(2, &[2]);
    // It was a job of one node.
    assert_eq!(bed.take_log(), ["2:reserve 1", "2:start 2.1"]);
    assert!(matches!(
        &bed.told[..],
        [.., JobEvent::Placed { nodes, .. }] if nodes.len() == 1 && nodes[0].node == NodeId(2)
    ));
    bed.ready(2, 2, 1);
    assert_eq!(bed.take_log(), ["1:hold 1"]);
    bed.commit(1, true);
    assert_eq!(
        bed.take_log(),
        ["1:generation 2", "2:generation 2", "tell:generation 2"]
    );
    assert_eq!(bed.members(), ["0.1", "1.1", "2.1"]);
}

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

#[test]
fn a_seat_without_room_is_asked_for_again_when_room_is_offered() {
    let mut bed = Bed::active(1, 3, &[2]);
    bed.step(Event::Offered);
    bed.take_log();
    bed.step(no_room(&[Slot(2)]));
    bed.wait(Duration::from_secs(60));
    assert_eq!(bed.take_log(), Vec::<String>::new());
    bed.step(Event::Offered);
    assert_eq!(bed.take_log(), ["place 2 []"]);
}

#[test]
fn a_node_that_leaves_hands_its_work_over_and_is_freed() {
    for by_operator in [true, false] {
        let mut bed = Bed::active(1, 4, &[2, 2]);
        let reason = "maintenance".to_owned();
        if by_operator {
            let node = NodeId(1);
            bed.step(Event::Drain { node, reason });
        } else {
            bed.report(1, NodeEvent::JobLeft { job: JOB, reason });
        }
        assert_eq!(bed.take_log(), ["place 4 5 []", "1:hold 1", "2:hold 1"]);
        bed.step(no_room(&[Slot(4), Slot(5)]));
        bed.commit(1, true);
        assert_eq!(bed.members(), ["2.1", "3.1"]);
        assert_eq!(
            bed.take_log(),
            [
                "1:generation 2",
                "2:generation 2",
                "tell:generation 2",
                "1:stop",
                "1:free",
            ]
        );
        assert_eq!(bed.table().handover, Handover::None);
        assert_eq!(bed.job.info(Duration::ZERO).nodes.len(), 1);
    }
}

#[test]
fn f1_a_lost_node_is_the_loss_of_its_processes_and_others_go_on() {
    let mut bed = Bed::active(1, 6, &[2, 2, 2]);
    bed.commit(1, false);
    bed.step(Event::NodeLost {
        node: NodeId(1),
        reason: "no heartbeat for 3 s".to_owned(),
        fence: Fence::Lease,
    });
    let log = bed.take_log();
    assert_eq!(log[..2], ["tell:lost 0", "tell:lost 1"]);
    assert!(log.contains(&"2:revoke 1 0 1".to_owned()), "{log:?}");
    assert_eq!(bed.members(), ["2.1", "3.1", "4.1", "5.1"]);
    assert!(
        bed.table().cause.contains("no heartbeat"),
        "{}",
        bed.table().cause
    );
    // The node comes back, and gets seats anew.
    assert!(log.contains(&"place 0 1 []".to_owned()), "{log:?}");
    bed.place(1, &[0, 1]);
    assert_eq!(bed.take_log(), ["1:reserve 2", "1:start 0.2 1.2"]);
}

#[test]
fn g3_while_half_of_the_members_may_run_unseen_no_other_group_is_formed() {
    let mut bed = Bed::active(1, 2, &[1, 1]);
    bed.commit(1, false);
    bed.step(Event::NodeLost {
        node: NodeId(1),
        reason: "silent".to_owned(),
        fence: Fence::Lease,
    });
    assert_eq!(bed.generation(), 1);
    assert_eq!(bed.job.info(Duration::ZERO).state, JobState::Recovering);
    bed.wait(JobConfig::default().fence);
    assert_eq!(bed.members(), ["1.1"]);
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
fn a_node_that_refuses_to_reserve_is_no_end() {
    let mut bed = Bed::submit(1, 4, &[2, 2], |_| ());
    let reply = Reply::Refused(Refusal::new(RefusalKind::Unplaceable, "no cpus"));
    for event in &mut bed.queue {
        if let Event::Replied {
            node: NodeId(2),
            reply: answer,
        } = event
        {
            *answer = reply.clone();
        }
    }
    bed.run();
    bed.all_ready();
    assert!(bed.log.contains(&"2:free".to_owned()), "{:?}", bed.log);
    assert_eq!(bed.members(), ["0.1", "1.1"]);
}

#[test]
fn a_process_that_is_not_started_is_a_failure() {
    let mut bed = Bed::active(1, 2, &[2]);
    bed.commit(1, false);
    bed.exits(1, 1, 1, Exit::Code(1));
    assert_eq!(bed.started.last().unwrap().2, Incarnation(2));
    // It does not come, and the next one neither.
    for incarnation in [3, 4] {
        bed.wait(Duration::from_secs(31));
        assert_eq!(bed.started.last().unwrap().2, Incarnation(incarnation));
        let ended = format!("1:end 1.{}", incarnation - 1);
        assert!(bed.log.contains(&ended), "{:?}", bed.log);
        bed.exits(1, 1, incarnation - 1, Exit::Signal(15));
    }
    bed.wait(Duration::from_secs(31));
    let (state, refusal, _) = bed.ended();
    assert_eq!(state, JobState::Failed);
    let message = refusal.unwrap().message;
    assert!(message.contains("restarts_without_progress"), "{message}");
}

#[test]
fn a_replacement_that_is_not_needed_any_more_goes_and_gives_its_room_back() {
    let mut bed = Bed::active(1, 2, &[1, 1]);
    let (node, reason) = (NodeId(1), "maintenance".to_owned());
    bed.step(Event::Drain { node, reason });
    bed.take_log();
    bed.place(3, &[2]);
    bed.ready(3, 2, 1);
    assert_eq!(bed.take_log(), ["3:reserve 1", "3:start 2.1"]);
    bed.step(Event::Undrain { node });
    assert_eq!(bed.take_log(), ["3:end 2.1"]);
    bed.exits(3, 2, 1, Exit::Signal(15));
    assert_eq!(bed.take_log(), ["3:back 1", "3:stop", "3:free"]);
    bed.commit(1, true);
    assert_eq!(bed.members(), ["0.1", "1.1"]);
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
