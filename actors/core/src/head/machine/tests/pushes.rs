//! What is pushed to nodes.

use super::*;

fn is_membership(request: &NodeRequest) -> bool {
    matches!(request, NodeRequest::Membership(_))
}

/// A node that does not take so many pushes.
fn stubborn(mut failures: usize) -> impl FnMut(&NodeRequest) -> Option<Reply> {
    move |request| {
        if is_membership(request) && failures > 0 {
            failures -= 1;
            return Some(Reply::Unknown("lost".to_owned()));
        }
        good(request)
    }
}

#[test]
fn a_push_is_tried_until_it_is_taken_and_less_and_less_often() {
    let mut world = World::new();
    let node = world.node(1, 1, stubborn(4));
    let job = world.healthy(1, node);
    for (tried, pause) in (1..).zip([250, 500, 1000, 2000]) {
        assert_eq!(world.seen(node, is_membership), tried);
        world.pass(Duration::from_millis(pause - 1));
        assert_eq!(world.seen(node, is_membership), tried);
        assert!(!world.is_healthy(job));
        world.pass(Duration::from_millis(1));
    }
    assert!(world.is_healthy(job));
    assert_eq!(world.seen(node, is_membership), 5);
}

#[test]
fn a_push_without_an_answer_is_tried_again() {
    let mut world = World::new();
    let mut deaf = true;
    let node = world.node(1, 1, move |request| {
        good(request).filter(|_| !(is_membership(request) && std::mem::take(&mut deaf)))
    });
    let job = world.healthy(1, node);
    world.pass(Duration::from_millis(6249));
    assert_eq!(world.seen(node, is_membership), 1);
    assert_eq!(world.cancelled.len(), 1);
    world.pass(Duration::from_millis(1));
    assert!(world.is_healthy(job));
}

#[test]
fn a_request_takes_the_place_of_pushes() {
    let mut world = World::new();
    let (pausing, deaf) = (
        world.node(1, 1, stubborn(usize::MAX)),
        world.node(2, 1, |request| {
            good(request).filter(|_| !is_membership(request))
        }),
    );
    let job = world.submit(1, 2);
    world.report(pausing, vec![ready(job, 0)]);
    world.report(deaf, vec![ready(job, 1)]);
    assert_eq!(world.open.len(), 1);
    world.frame(job, SubmitFrame::Stop);
    assert_eq!(world.end(job).unwrap().0, JobState::Stopped);
    assert!(world.open.is_empty() && world.cancelled.len() == 1);
    world.pass(Duration::from_secs(30));
    let tried = [pausing, deaf].map(|node| world.seen(node, is_membership));
    assert_eq!(tried, [1, 1]);
}

#[test]
fn a_lost_node_gets_no_more_pushes_and_a_late_reply_counts_for_nothing() {
    let mut world = World::new();
    let node = world.node(1, 1, |request| {
        good(request).filter(|_| !is_membership(request))
    });
    let job = world.healthy(1, node);
    let request = *world.open.first().unwrap();
    world.disconnect(node);
    assert_eq!(world.end(job).unwrap().0, JobState::Failed);
    assert_eq!(world.cancelled, [request]);
    let reply = Reply::Answer(NodeReply::Done);
    world.input(Input::Replied(request, reply));
    world.pass(Duration::from_secs(30));
    assert!(!world.is_healthy(job));
    assert_eq!(world.seen(node, is_membership), 1);
}

/// Each table is as long as the job is large.
#[test]
fn the_table_of_a_large_job_is_under_way_to_few_nodes_at_once() {
    let mut world = World::new();
    let nodes: Vec<Session> = (1..=70)
        .map(|node| {
            world.node(node, 1, |request| {
                good(request).filter(|_| !is_membership(request))
            })
        })
        .collect();
    let job = world.submit(1, 70);
    for (slot, node) in (0..).zip(&nodes) {
        world.report(*node, vec![ready(job, slot)]);
    }
    let told = |world: &World| {
        let is_told = |node: &&Session| world.seen(**node, is_membership) > 0;
        nodes.iter().filter(is_told).count()
    };
    assert_eq!(told(&world), 64);
    let reply = |world: &mut World, reply: Reply| {
        let request = world.open.pop_first().unwrap();
        world.input(Input::Replied(request, reply));
    };
    reply(&mut world, Reply::Answer(NodeReply::Done));
    assert_eq!(told(&world), 65);
    // One that does not take it keeps nobody waiting.
    reply(&mut world, Reply::Unknown("lost".to_owned()));
    assert_eq!(told(&world), 66);
    while !world.open.is_empty() {
        reply(&mut world, Reply::Answer(NodeReply::Done));
    }
    assert_eq!(told(&world), 70);
    assert!(!world.is_healthy(job));
    world.pass(Duration::from_millis(250));
    reply(&mut world, Reply::Answer(NodeReply::Done));
    assert!(world.is_healthy(job));
}
