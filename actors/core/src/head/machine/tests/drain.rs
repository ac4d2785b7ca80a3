//! Nodes that are drained by an operator, or by their daemons.

use kolo_wire::NodeDrain;

use super::elastic::Group;
use super::*;

pub(super) fn drain(node: &str, seconds: u64) -> HeadRequest {
    HeadRequest::DrainNode {
        node: node.to_owned(),
        deadline_ms: seconds * 1000,
    }
}

pub(super) fn undrain(node: &str) -> HeadRequest {
    HeadRequest::UndrainNode {
        node: node.to_owned(),
    }
}

impl Group {
    fn drain(&mut self, node: &str, seconds: u64) -> NodeDrain {
        let reply = self.world.request(HTTP, drain(node, seconds));
        self.run();
        match reply {
            HeadReply::Draining(drain) => drain,
            other => panic!("{other:?}"),
        }
    }

    fn draining(&mut self) -> Vec<bool> {
        let HeadReply::Cluster(cluster) = self.world.request(HTTP, HeadRequest::Cluster) else {
            panic!("no cluster");
        };
        cluster.nodes.iter().map(|node| node.draining).collect()
    }
}

#[test]
fn elastic_jobs_leave_a_node_that_is_drained_and_others_stay() {
    let mut group = Group::new();
    let first = group.node(1, 2);
    let fixed = group.world.healthy(1, first);
    group.node(2, 1);
    let job = group.submit(2, 1, 2);
    assert_eq!(group.members(job), (1, vec![(1, 1), (2, 1)]));
    let drain = group.drain("host1", 60);
    assert_eq!((drain.node, drain.hostname.as_str()), (NodeId(1), "host1"));
    assert_eq!((drain.leaving, drain.staying), (vec![job], vec![fixed]));
    assert_eq!(group.draining(), [true, false]);
    // At the next commit, so that no work is lost.
    assert!(group.is_live(first, job));
    group.commit(job);
    assert_eq!(group.members(job), (2, vec![(2, 1)]));
    assert_eq!(group.world.stops(first, job), 1);
    assert!(group.world.is_healthy(fixed) && group.world.end(fixed).is_none());
    // The room is there, and nobody gets it.
    assert_eq!(group.world.free_cpus(), [1, 0]);
    let late = group.world.submit(3, 1);
    let refusal = group.world.refusal(late);
    assert_eq!(refusal.kind, RefusalKind::Unplaceable);
    let says = "drained, so left out: host1; kolo node undrain NODE";
    assert!(refusal.message.ends_with(says), "{}", refusal.message);
    group.pass(120);
    assert_eq!(group.reservations(first), 2);
    // Again, by its id.
    let reply = group.world.request(HTTP, undrain(&NodeId(1).to_string()));
    assert_eq!(reply, HeadReply::Done);
    group.run();
    group.commit(job);
    assert_eq!(group.members(job), (3, vec![(1, 1), (2, 1)]));
    assert_eq!(group.draining(), [false, false]);
}

#[test]
fn members_that_can_not_be_spared_stay_until_the_deadline() {
    let mut group = Group::new();
    let first = group.node(1, 1);
    group.node(2, 1);
    let job = group.submit(1, 2, 2);
    group.drain("host1", 60);
    group.pass(59);
    assert_eq!(group.members(job), (1, vec![(1, 1), (2, 1)]));
    assert!(group.is_live(first, job));
    group.pass(2);
    assert!(!group.is_live(first, job));
    assert_eq!(group.world.free_cpus(), [1, 0]);
    // Another node in time saves the job.
    group.node(3, 1);
    assert_eq!(group.members(job), (2, vec![(2, 1), (3, 1)]));
}

#[test]
fn a_node_that_is_drained_is_so_in_its_next_stay() {
    let mut group = Group::new();
    let before = group.node(1, 1);
    group.drain("host1", 60);
    group.world.disconnect(before);
    let after = group.node(1, 1);
    assert_eq!(group.draining(), [true]);
    let job = group.submit(1, 1, 1);
    assert_eq!(group.reservations(after), 0);
    group.world.request(HTTP, undrain("host1"));
    group.run();
    assert_eq!(group.members(job), (1, vec![(1, 1)]));
}

#[test]
fn elastic_jobs_leave_a_node_whose_daemon_stops() {
    let mut group = Group::new();
    let first = group.node(1, 1);
    group.node(2, 1);
    let job = group.submit(1, 1, 2);
    let ask = group
        .world
        .request_later(Caller::Peer(first), HeadRequest::Drain);
    group.run();
    assert!(group.world.answers.is_empty());
    let refusal = group.world.refused(HTTP, undrain("host1"));
    assert!(refusal.message.contains("is stopping"), "{refusal}");
    group.commit(job);
    assert_eq!(group.members(job), (2, vec![(2, 1)]));
    assert_eq!(group.world.answers[&ask], HeadReply::Done);
}

#[test]
fn a_node_that_ends_its_jobs_and_leaves_gets_no_more() {
    let mut world = World::new();
    let leaving = world.node(1, 2, good);
    let job = world.healthy(1, leaving);
    let reason = "the node is stopping".to_owned();
    // Its workers have a grace, in which the node is there.
    world.report(leaving, vec![NodeEvent::JobLeft { job, reason }]);
    let late = world.submit(2, 1);
    assert_eq!(world.refusal(late).kind, RefusalKind::Unplaceable);
    assert_eq!(world.alive, 1);
    let other = world.node(2, 1, good);
    world.healthy(3, other);
}

#[test]
fn a_drain_names_one_node() {
    let mut group = Group::new();
    group.node(1, 1);
    for (node, seconds, kind) in [
        ("nowhere", 1, RefusalKind::NotFound),
        ("host1", 86_401, RefusalKind::Invalid),
    ] {
        assert_eq!(group.world.refused(HTTP, drain(node, seconds)).kind, kind);
    }
    let twin = NodeRegistration {
        hostname: "host1".to_owned(),
        ..introduction(2, 1)
    };
    let twin = group.world.register(twin, good);
    let refusal = group.world.refused(HTTP, drain("host1", 1));
    let ids = "node-0000000000000001, node-0000000000000002";
    assert!(refusal.message.ends_with(ids), "{refusal}");
    // S-2: a node drains nobody.
    for request in [drain("host1", 1), undrain("host1")] {
        let refusal = group.world.refused(Caller::Peer(twin), request);
        assert_eq!(refusal.kind, RefusalKind::Forbidden);
    }
    assert_eq!(group.draining(), [false, false]);
    // One that is lost is not meant.
    group.world.disconnect(twin);
    assert_eq!(group.drain("host1", 60).node, NodeId(1));
}

#[test]
fn a_job_that_left_before_it_had_begun_on_a_node_may_come_back() {
    let mut group = Group::new();
    group.node(1, 1);
    let job = group.submit(1, 1, 2);
    // It is drained before it has answered the reservation, which it refuses.
    let slow = group.world.node(2, 1, |request| {
        good(request).filter(|_| !matches!(request, NodeRequest::Reserve { .. }))
    });
    let drain = group.drain("host2", 60);
    assert_eq!(drain.leaving, [job]);
    let request = *group.world.open.first().unwrap();
    let refusal = Refusal::new(RefusalKind::Stopped, "it is stopping");
    group
        .world
        .input(Input::Replied(request, Reply::Refused(refusal)));
    group.world.disconnect(slow);
    group.node(2, 1);
    group.world.request(HTTP, undrain("host2"));
    group.run();
    group.commit(job);
    assert_eq!(group.members(job), (2, vec![(1, 1), (2, 1)]));
}
