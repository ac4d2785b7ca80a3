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
        if is_membership(request) && std::mem::take(&mut deaf) {
            return None;
        }
        good(request)
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
