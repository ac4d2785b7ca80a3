//! Nodes that refuse, are cut off, or are lost.

use super::*;

#[test]
fn when_the_node_of_the_first_seats_refuses_the_others_start_with_ranks_below_the_world_size() {
    let mut group = Group::new();
    group.world.node(1, 2, full);
    group.node(2, 2);
    // The bed looks at ranks and world sizes.
    let job = group.submit(1, 1, 4);
    assert_eq!(group.members(job), (1, vec![(2, 2)]));
    assert_eq!(group.ranks(job), ["2.1", "3.1"]);
}

#[test]
fn f1_a_driver_that_is_cut_off_from_a_node_gets_another_generation() {
    let mut group = Group::new();
    group.node(1, 1);
    group.node(2, 1);
    let job = group.submit(1, 1, 2);
    let told = |group: &mut Group| {
        let (generation, why) = (Generation(1), "its channel to node 1 is gone".to_owned());
        group
            .world
            .frame(job, SubmitFrame::Unreachable { generation, why });
        group.run();
    };
    told(&mut group);
    assert_eq!(group.members(job).0, 1, "a loss may explain it");
    group.pass(1);
    assert_eq!(group.members(job), (2, vec![(1, 1), (2, 1)]));
    let cause = group.table(job).cause;
    assert!(cause.contains("channel"), "{cause}");
    // Late words of a generation that is over change nothing.
    told(&mut group);
    group.pass(2);
    assert_eq!(group.members(job).0, 2);
}

#[test]
fn a_generation_that_another_one_has_followed_is_neither_sent_nor_revoked() {
    let mut group = Group::new();
    let nodes = [1, 2].map(|node| group.node(node, 1));
    // It takes long to answer the first revocation.
    let slow = group.world.node(3, 1, |request| {
        good(request).filter(|_| !matches!(request, NodeRequest::Revoke { .. }))
    });
    let job = group.submit(1, 1, 3);
    group.kill(nodes[0], job);
    group.kill(nodes[1], job);
    let open = group.world.open.pop_first().unwrap();
    let done = Reply::Answer(NodeReply::Done);
    group.world.input(Input::Replied(open, done));
    group.run();
    let of = |wanted: u64| {
        group.world.seen(slow, |request| match request {
            NodeRequest::Revoke { generation, .. } => generation.0 == wanted,
            NodeRequest::Membership(table) => table.generation.0 == wanted,
            _ => false,
        })
    };
    assert_eq!([1, 2, 3].map(of), [2, 0, 1]);
}

#[test]
fn losses_of_a_large_group_that_come_together_make_one_generation() {
    let mut group = Group::new();
    let nodes: Vec<Session> = (1..=10).map(|node| group.node(node, 100)).collect();
    let job = group.submit(1, 1, 1000);
    group.pass(2);
    for node in [3, 7] {
        group.world.disconnect(nodes[node]);
    }
    group.run();
    assert_eq!(group.members(job).0, 1);
    group.world.pass(Duration::from_millis(1));
    group.run();
    let (generation, members) = group.members(job);
    assert_eq!((generation, members.len()), (2, 8));
    let is_revocation = |request: &NodeRequest| matches!(request, NodeRequest::Revoke { .. });
    assert_eq!(group.world.seen(nodes[0], is_revocation), 1);
}

#[test]
fn g3_nothing_of_a_node_that_was_cut_off_is_accepted_later() {
    let mut group = Group::new();
    let nodes = [1, 2, 3].map(|node| group.node(node, 1));
    let job = group.submit(1, 2, 3);
    let cut = nodes[2];
    group.cut.insert(cut);
    group.pass(62);
    assert_eq!(group.world.peers[&cut].closed, Some(LinkEnd::Lost));
    assert_eq!(group.members(job), (2, vec![(1, 1), (2, 1)]));
    let old = group.live[&(cut, job)].first().copied().unwrap();
    let late = |generation| {
        vec![
            ready_again(job, old.0, old.1),
            NodeEvent::Taken {
                job,
                slot: old.0,
                incarnation: old.1,
                generation: Generation(generation),
            },
            NodeEvent::Holding {
                job,
                slot: old.0,
                incarnation: old.1,
                generation: Generation(generation),
                commit: 77,
                failed: None,
            },
        ]
    };
    let refusal = group
        .world
        .refused(Caller::Peer(cut), HeadRequest::Events(late(1)));
    assert_eq!(refusal.kind, RefusalKind::Forbidden);
    // It comes back with what it has. That must end before the job is placed there again.
    let mut stops = 0;
    // There is room for a worker more, which is no matter.
    let registration = NodeRegistration {
        jobs: vec![job],
        ..introduction(3, 2)
    };
    let back = group.world.register(registration, move |request| {
        stops += usize::from(matches!(request, NodeRequest::Stop { .. }));
        if stops == 1 && matches!(request, NodeRequest::Stop { .. }) {
            return Some(Reply::Unknown("late".to_owned()));
        }
        good(request)
    });
    group.run();
    assert_eq!(
        (group.world.stops(back, job), group.reservations(back)),
        (1, 0)
    );
    group.world.report(back, late(2));
    group.run();
    assert_eq!(group.members(job), (2, vec![(1, 1), (2, 1)]));
    group.pass(2);
    assert_eq!(
        (group.world.stops(back, job), group.reservations(back)),
        (2, 1)
    );
    assert_eq!(group.world.free_cpus(), [0, 0, 1]);
    // Nothing of the new reservation is stopped.
    group.pass(60);
    group.commit(job);
    assert_eq!(group.members(job), (3, vec![(1, 1), (2, 1), (3, 1)]));
    assert_eq!(group.world.stops(back, job), 2);
    group.world.report(back, late(3));
    assert_eq!(group.members(job).0, 3);
}
