//! Jobs that wait for room are told of changes, and not again and again.

use kolo_wire::{ProbeFailure, ProbeResult};

use super::elastic::Group;
use super::*;

#[test]
fn a_node_that_refuses_a_job_is_not_asked_again_before_something_changes_there() {
    let mut group = Group::new();
    group.node(1, 1);
    let job = group.submit(1, 1, 2);
    let refuses = group.world.node(2, 1, full);
    group.pass(60);
    assert_eq!(group.reservations(refuses), 1);
    assert_eq!(group.world.free_cpus(), [0, 1]);
    // Another node is a change, and not of that one, which would come first.
    group.node(3, 1);
    assert_eq!(group.reservations(refuses), 1);
    group.commit(job);
    assert_eq!(group.members(job), (2, vec![(1, 1), (3, 1)]));
    let after = group.submit(2, 1, 1);
    assert_eq!(group.reservations(refuses), 2);
    group.node(2, 2);
    assert_eq!(group.members(after), (1, vec![(2, 1)]));
}

#[test]
fn a_node_that_was_slow_once_is_asked_again() {
    let mut group = Group::new();
    group.node(1, 1);
    let job = group.submit(1, 1, 2);
    let mut is_slow = true;
    let slow = group.world.node(2, 1, move |request| {
        let is_lost = is_slow && matches!(request, NodeRequest::Reserve { .. });
        is_slow &= !is_lost;
        good(request).filter(|_| !is_lost)
    });
    group.run();
    assert_eq!(group.reservations(slow), 1);
    group.pass(60);
    assert_eq!(group.reservations(slow), 2);
    group.commit(job);
    assert_eq!(group.members(job), (2, vec![(1, 1), (2, 1)]));
}

#[test]
fn what_another_job_frees_is_offered_to_those_that_wait_the_oldest_first() {
    let mut group = Group::new();
    let node = group.node(1, 2);
    let fixed = group.world.healthy(9, node);
    let wait = |spec: &mut JobSpec| spec.start_timeout_ms = 600_000;
    let first = group.submit_as(7, 1, 2, wait);
    let second = group.submit_as(3, 1, 1, wait);
    assert_eq!(group.members(first), (1, vec![(1, 1)]));
    group.world.frame(fixed, SubmitFrame::Stop);
    group.run();
    group.commit(first);
    assert_eq!(group.members(first), (2, vec![(1, 2)]));
    group.world.frame(first, SubmitFrame::Done);
    group.run();
    assert_eq!(group.members(second), (1, vec![(1, 1)]));
    assert_eq!(group.world.free_cpus(), [1]);
}

#[test]
fn the_sites_of_a_new_job_are_for_its_spares_too() {
    let mut group = Group::new();
    let nodes = [1, 2, 3, 4].map(|node| group.node(node, 1));
    let job = group.submit_as(1, 1, 2, |spec| {
        spec.elastic.as_mut().unwrap().spares = 1;
    });
    assert_eq!(nodes.map(|node| group.reservations(node)), [1, 1, 1, 0]);
    assert_eq!(group.world.free_cpus(), [0, 0, 0, 1]);
    assert_eq!(group.members(job), (1, vec![(1, 1), (2, 1)]));
    group.world.frame(job, SubmitFrame::Done);
    group.run();
    assert_eq!(group.world.free_cpus(), [1, 1, 1, 1]);
}

/// A node on a host of its own with one network interface, which answers to no probe by itself.
fn apart(group: &mut Group, node: u64) -> Session {
    let registration = NodeRegistration {
        network: on_own_host(node, 0),
        ..introduction(node, 1)
    };
    let session = group.world.register(registration, |request| {
        good(request).filter(|_| !matches!(request, NodeRequest::Probe(_)))
    });
    group.run();
    session
}

/// All probes that are under way end, for those that reach their targets and those that don't.
fn answer_probes(group: &mut Group, reaches: bool) {
    let open = std::mem::take(&mut group.world.open);
    assert!(!open.is_empty());
    for request in open {
        let seen = &group.world.peers[&request.session].seen;
        let targets = seen.iter().rev().find_map(|request| match request {
            NodeRequest::Probe(probe) => Some(probe.targets.clone()),
            _ => None,
        });
        let node = group
            .world
            .peers
            .keys()
            .position(|peer| *peer == request.session);
        let results = targets.unwrap().into_iter().map(|_| {
            if reaches {
                ProbeResult::Reached {
                    rtt_us: 100,
                    echo: kolo_wire::Echo {
                        seen: (IpAddr::from([10, 0, 0, node.unwrap() as u8]), 7).into(),
                        local: None,
                        interface: Some("eth0".to_owned()),
                        time_ms: 0,
                    },
                }
            } else {
                ProbeResult::Failed {
                    kind: ProbeFailure::Silent,
                    reason: "nothing came back".to_owned(),
                }
            }
        });
        let reply = Reply::Answer(NodeReply::Probed(results.collect()));
        group.world.input(Input::Replied(request, reply));
    }
    group.run();
}

#[test]
fn a_job_grows_onto_nodes_that_must_be_probed() {
    let mut group = Group::new();
    apart(&mut group, 1);
    let job = group.submit(1, 1, 3);
    assert_eq!(group.members(job), (1, vec![(1, 1)]));
    let second = apart(&mut group, 2);
    assert_eq!(group.reservations(second), 1);
    assert!(!group.is_live(second, job), "nobody knows what connects it");
    // One more comes meanwhile: all are probed together, and the probe before does not count.
    let third = apart(&mut group, 3);
    assert!(!group.world.cancelled.is_empty());
    assert!(!group.is_live(second, job) && !group.is_live(third, job));
    while !group.world.open.is_empty() {
        answer_probes(&mut group, true);
    }
    assert!(group.is_live(second, job) && group.is_live(third, job));
    group.commit(job);
    assert_eq!(group.members(job), (2, vec![(1, 1), (2, 1), (3, 1)]));
}

#[test]
fn a_node_that_nothing_connects_is_left_and_not_probed_without_end() {
    let mut group = Group::new();
    apart(&mut group, 1);
    let job = group.submit(1, 1, 2);
    let second = apart(&mut group, 2);
    while !group.world.open.is_empty() {
        answer_probes(&mut group, false);
    }
    group.pass(60);
    assert_eq!(group.reservations(second), 1);
    assert_eq!(group.world.free_cpus(), [0, 1]);
    assert_eq!(group.members(job), (1, vec![(1, 1)]));
    // With another network it is tried again.
    let request = HeadRequest::Network(on_own_host(2, 1).unwrap());
    group.world.request(Caller::Peer(second), request);
    group.run();
    assert_eq!(group.reservations(second), 2);
}
