//! Daemons that die, and are told of by their wardens.

use super::elastic::Group;
use super::*;

/// A job with half of its members on each of two nodes.
fn halves() -> (Group, [Session; 2], JobId) {
    let mut group = Group::new();
    let nodes = [1, 2].map(|node| group.node(node, 1));
    let job = group.submit(1, 1, 2);
    assert_eq!(group.members(job), (1, vec![(1, 1), (2, 1)]));
    (group, nodes, job)
}

fn bury(group: &mut Group, node: u64, job: JobId, seal: Seal) {
    let node = NodeId(node);
    let obituary = Obituary { node, job, seal };
    group.world.input(Input::Obituary(obituary));
    group.run();
}

fn lose(group: &mut Group, session: Session, fence: Fence) {
    let reason = "closed".to_owned();
    group.world.input(Input::Disconnected {
        session,
        reason,
        fence,
    });
    group.run();
}

/// The first node's member goes on alone.
fn has_gone_on(group: &Group, job: JobId) -> bool {
    group.members(job) == (2, vec![(1, 1)])
}

#[test]
fn g3_an_obituary_is_the_loss_of_the_node_and_the_end_of_its_workers() {
    let (mut group, [_, dead], job) = halves();
    bury(&mut group, 2, job, seal(2));
    assert_eq!(group.world.alive, 1);
    assert_eq!(group.world.peers[&dead].closed, Some(LinkEnd::Lost));
    assert!(has_gone_on(&group, job));
    // It is sent three times, and whoever has read it may repeat it.
    for _ in 0..2 {
        bury(&mut group, 2, job, seal(2));
    }
    assert!(has_gone_on(&group, job));
}

#[test]
fn an_obituary_that_cannot_be_true_changes_nothing() {
    let (mut group, nodes, job) = halves();
    for (node, seal) in [(2, seal(1)), (2, seal(3)), (3, seal(3))] {
        bury(&mut group, node, job, seal);
    }
    assert_eq!(group.world.alive, 2);
    assert!(!has_gone_on(&group, job));
    // One of the daemon that was there before, when its successor has registered.
    let successor = NodeRegistration {
        seal: Some(seal(9)),
        ..introduction(2, 1)
    };
    group.world.register(successor, good);
    assert_eq!(group.world.peers[&nodes[1]].closed, Some(LinkEnd::Replaced));
    bury(&mut group, 2, job, seal(2));
    assert_eq!(group.world.alive, 2);
    assert!(!has_gone_on(&group, job));
    // A daemon that says none.
    let silent = NodeRegistration {
        seal: None,
        ..introduction(3, 1)
    };
    group.world.register(silent, good);
    bury(&mut group, 3, job, Seal([0; 32]));
    assert_eq!(group.world.alive, 3);
}

#[test]
fn g3_the_obituary_of_another_job_leaves_a_moment_to_the_wardens() {
    let (mut group, _, job) = halves();
    bury(&mut group, 2, JobId(77), seal(2));
    assert_eq!(group.world.alive, 1);
    group.pass(2);
    assert!(!has_gone_on(&group, job));
    group.pass(2);
    assert!(has_gone_on(&group, job));
}

#[test]
fn g3_what_the_end_of_a_connection_says_of_workers() {
    let (mut group, [_, dead], job) = halves();
    lose(&mut group, dead, Fence::Ended);
    assert!(has_gone_on(&group, job));

    // An end that says nothing, and the obituary comes late.
    let (mut group, [_, dead], job) = halves();
    lose(&mut group, dead, Fence::Lease);
    group.pass(10);
    assert!(!has_gone_on(&group, job));
    bury(&mut group, 2, job, seal(2));
    assert!(has_gone_on(&group, job));
}

#[test]
fn a_daemon_that_leaves_is_not_one_that_is_lost() {
    let (mut group, [leaves, lost], _) = halves();
    let (spare, drained) = (group.node(3, 1), group.node(4, 1));
    (group.world).request(HTTP, super::drain::drain("host4", 60));
    for (session, fence) in [
        (leaves, Fence::Left),
        (lost, Fence::Lease),
        (spare, Fence::Left),
        (drained, Fence::Lease),
    ] {
        lose(&mut group, session, fence);
    }
    let HeadReply::Cluster(cluster) = group.world.request(HTTP, HeadRequest::Cluster) else {
        panic!("no cluster");
    };
    let left: Vec<bool> = cluster.nodes.iter().map(|node| node.draining).collect();
    assert_eq!(left, [true, false, true, false]);
}

#[test]
fn g3_a_node_that_is_cut_off_has_its_lease_and_the_time_to_end_its_workers() {
    let (mut group, [_, cut], job) = halves();
    group.cut.insert(cut);
    group.pass(62);
    assert_eq!(group.world.alive, 1);
    // From the settings of this head, and not the default.
    let fence = fence::of_head(LEASE, Duration::from_secs(1));
    assert!(fence > JobConfig::default().fence);
    group.pass(fence.as_secs() - 2);
    assert!(!has_gone_on(&group, job));
    group.pass(3);
    assert!(has_gone_on(&group, job));
}
