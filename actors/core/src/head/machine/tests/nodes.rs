//! Nodes that come, go, fall silent, come back, and are drained.

use kolo_wire::Exit;

use super::*;

fn beat(world: &mut World, node: Session) -> HeadReply {
    world.request(Caller::Peer(node), HeadRequest::Heartbeats)
}

#[test]
fn f1_a_node_that_falls_silent_is_lost_with_its_ranks() {
    let mut world = World::new();
    let silent = world.node(1, 1, good);
    let other = world.node(2, 1, good);
    let job = world.submit(1, 2);
    world.report(silent, vec![ready(job, 0)]);
    world.report(other, vec![ready(job, 1)]);
    assert!(world.is_healthy(job));
    for _ in 0..61 {
        assert_eq!(world.alive, 2);
        world.pass(Duration::from_secs(1));
        assert_eq!(beat(&mut world, other), HeadReply::Done);
    }
    assert_eq!(world.alive, 1);
    assert_eq!(world.peers[&silent].closed, Some(LinkEnd::Lost));
    let Some(JobEvent::RankLost { failure, .. }) = world.told[&job].last() else {
        panic!("{:?}", world.told[&job]);
    };
    assert_eq!((failure.node, failure.exit), (NodeId(1), Exit::Unknown));
    let reason = failure.reason.as_ref().unwrap();
    assert!(reason.contains("no heartbeat for 1m 1s"), "{reason}");
    let lost = |request: &_| matches!(request, NodeRequest::RankLost { .. });
    assert_eq!(world.seen(other, lost), 1);
    // Its stay is over: what it says does not count.
    for request in [HeadRequest::Heartbeats, HeadRequest::Events(Vec::new())] {
        let refusal = world.refused(Caller::Peer(silent), request);
        assert_eq!(refusal.kind, RefusalKind::Forbidden);
    }
    world.pass(LEASE * 2);
    assert_eq!(world.alive, 0);
}

#[test]
fn f1_a_lease_runs_from_when_a_beat_came_and_not_from_when_the_head_looked() {
    let mut world = World::new();
    let node = world.node(1, 1, good);
    let driver = Session(1);
    // The head had much to do: the beat has waited for 30 s, and the lease would be over.
    let came = world.now + Duration::from_secs(40);
    world.now += Duration::from_secs(70);
    world.input(Input::Heard(vec![(driver, came), (node, came)]));
    world.input(Input::Tick);
    assert_eq!(world.alive, 1);
    world.pass(Duration::from_secs(30));
    assert_eq!(world.alive, 1);
    world.pass(Duration::from_secs(1));
    assert_eq!(world.alive, 0);
    world.input(Input::Heard(vec![(node, world.now)]));
    assert_eq!(world.alive, 0);
}

#[test]
fn g2_after_a_restart_of_the_head_nodes_with_old_jobs_are_left_out_until_those_have_ended() {
    let mut world = World::new();
    let registration = NodeRegistration {
        jobs: vec![JobId(77)],
        ..introduction(1, 1)
    };
    let busy = world.register(registration, |request| {
        good(request).filter(|_| !matches!(request, NodeRequest::Stop { .. }))
    });
    let other = world.node(2, 1, good);
    let job = world.submit(1, 1);
    world.report(other, vec![ready(job, 0)]);
    assert!(world.is_healthy(job));
    assert_eq!(world.free_cpus(), [0, 0]);
    let stop = world.open.pop_first().unwrap();
    assert_eq!(stop.session, busy);
    let done = Reply::Answer(NodeReply::Done);
    world.input(Input::Replied(stop, done));
    assert_eq!(world.free_cpus(), [1, 0]);
}

#[test]
fn g2_a_node_that_comes_back_must_stop_what_it_still_has() {
    let mut world = World::new();
    let before = world.node(1, 1, good);
    let job = world.healthy(1, before);
    // It says that it also has a job of which the head never heard. The first answer to a stop is lost.
    let mut stops = 0;
    let registration = NodeRegistration {
        jobs: vec![JobId(77)],
        ..introduction(1, 1)
    };
    let after = world.register(registration, move |request| {
        stops += usize::from(matches!(request, NodeRequest::Stop { .. }));
        if stops == 1 {
            return Some(Reply::Unknown("lost".to_owned()));
        }
        good(request)
    });
    assert_eq!(world.peers[&before].closed, Some(LinkEnd::Replaced));
    let (state, refusal) = world.end(job).unwrap();
    assert_eq!(state, JobState::Failed);
    assert!(refusal.unwrap().message.contains("registered again"));
    assert_eq!(world.free_cpus(), [0], "it has not confirmed");
    world.pass(Duration::from_secs(1));
    assert_eq!(
        (world.stops(after, job), world.stops(after, JobId(77))),
        (2, 1)
    );
    assert_eq!(world.free_cpus(), [1]);
    // The end of the old connection is not the end of the new stay.
    world.disconnect(before);
    assert_eq!(beat(&mut world, after), HeadReply::Done);
}

#[test]
fn g2_a_node_that_does_not_answer_does_not_hold_up_the_others() {
    let mut world = World::new();
    let deaf = world.node(1, 1, |_| None);
    let other = world.node(2, 1, good);
    let job = world.submit(1, 2);
    // Each request has its own limit and a second more: to reserve, and to release.
    world.pass(Duration::from_millis(10_999));
    assert!(world.end(job).is_none() && world.cancelled.is_empty());
    world.pass(Duration::from_millis(11_001));
    let refusal = world.refusal(job);
    assert_eq!(refusal.kind, RefusalKind::Timeout);
    assert!(refusal.message.contains("host1"), "{refusal}");
    assert_eq!(world.cancelled.len(), 2);
    let release = |request: &_| matches!(request, NodeRequest::Release { .. });
    assert_eq!(
        (world.seen(deaf, release), world.seen(other, release)),
        (1, 1)
    );
    // Nobody knows what the deaf one holds. It is asked until its connection ends, and when it comes back.
    assert_eq!(world.free_cpus(), [0, 1]);
    assert_eq!(world.stops(deaf, job), 1);
    world.disconnect(deaf);
    world.pass(LEASE / 2);
    assert_eq!(world.stops(deaf, job), 1);
    let back = world.node(1, 1, good);
    assert_eq!(world.stops(back, job), 1);
    assert_eq!(world.free_cpus(), [1, 1]);
    assert!(world.open.is_empty(), "{:?}", world.open);
}

#[test]
fn a_report_of_a_job_that_nobody_knows_has_it_stopped() {
    let mut world = World::new();
    let node = world.node(1, 1, good);
    world.report(node, vec![ready(JobId(9), 0)]);
    assert_eq!(world.stops(node, JobId(9)), 1);
    // The last report of a job that ended is welcome.
    world.report(node, vec![NodeEvent::JobGone { job: JobId(8) }]);
    assert_eq!(world.stops(node, JobId(8)), 0);
}

#[test]
fn a_node_that_reports_jobs_without_end_is_not_asked_without_end() {
    let mut world = World::new();
    let deaf = world.node(1, 1, |_| None);
    let most = cleaning::MOST as u64;
    let jobs = |range: std::ops::Range<u64>| range.map(|job| ready(JobId(job), 0)).collect();
    world.report(deaf, jobs(0..most + 5));
    assert_eq!(world.peers[&deaf].seen.len(), cleaning::MOST);
    let complaints = |world: &World| {
        let lines = world.trace.iter();
        lines.filter(|line| line.contains("too many jobs")).count()
    };
    assert_eq!(complaints(&world), 1);
    // They are asked for again, less and less often.
    world.pass(cleaning::LIMIT + OVERTIME + Duration::from_secs(1));
    assert_eq!(world.peers[&deaf].seen.len(), 2 * cleaning::MOST);
}

#[test]
fn a_node_that_is_drained_gets_no_job_and_leaves_when_the_last_has_ended() {
    let mut world = World::new();
    let node = world.node(1, 2, good);
    let job = world.healthy(1, node);
    let ask = world.request_later(Caller::Peer(node), HeadRequest::Drain);
    assert!(world.answers.is_empty());
    let late = world.submit(2, 1);
    assert_eq!(world.refusal(late).kind, RefusalKind::Unplaceable);
    world.frame(job, SubmitFrame::Stop);
    assert_eq!(world.answers[&ask], HeadReply::Done);
    // One that has nothing can go at once; one that is gone waits for nothing.
    let idle = world.node(2, 1, good);
    assert_eq!(
        world.request(Caller::Peer(idle), HeadRequest::Drain),
        HeadReply::Done
    );
    let third = world.node(3, 1, good);
    world.healthy(3, third);
    let ask = world.request_later(Caller::Peer(third), HeadRequest::Drain);
    world.disconnect(third);
    assert_eq!(world.answers[&ask], HeadReply::Done);
}

#[test]
fn s2_each_request_is_checked_against_the_role() {
    let mut world = World::new();
    let driver = Caller::Peer(Session(1));
    let node = world.connect(Role::Node, NodeId(1), good);
    let own = || HeadRequest::Register(introduction(1, 1));
    for (caller, request, message) in [
        (driver, own(), "only a node may ask for this, and driver-"),
        (
            driver,
            HeadRequest::Drain,
            "only a node may ask for this, and driver-",
        ),
        (HTTP, own(), "only a node may ask for this"),
        (
            Caller::Peer(node),
            HeadRequest::Register(introduction(2, 1)),
            "a certificate for node-0000000000000001 can't register node-0000000000000002",
        ),
        (
            Caller::Peer(node),
            HeadRequest::Heartbeats,
            "node-0000000000000001 must register over this connection first",
        ),
        (
            Caller::Peer(node),
            HeadRequest::Jobs,
            "only a driver may ask for this",
        ),
        (
            Caller::Peer(Session(9)),
            HeadRequest::Jobs,
            "the connection has ended",
        ),
    ] {
        let refusal = world.refused(caller, request);
        assert_eq!(refusal.kind, RefusalKind::Forbidden);
        assert!(refusal.message.starts_with(message), "{refusal}");
    }
    world.request(Caller::Peer(node), own());
    let again = world.refused(Caller::Peer(node), own());
    assert!(again.message.contains("already"), "{again}");
    // A node submits nothing.
    world.input(Input::Submit {
        session: node,
        job: JobId(1),
        spec: Box::new(spec(Placement::Pack { workers: 1 })),
        dry_run: false,
    });
    assert_eq!(world.refusal(JobId(1)).kind, RefusalKind::Forbidden);
    // What it sent before its connection ended comes too late.
    world.disconnect(node);
    assert_eq!(world.alive, 0);
    assert_eq!(
        world.refused(Caller::Peer(node), own()).kind,
        RefusalKind::Forbidden
    );
}

#[test]
fn a_node_that_listens_everywhere_is_reached_where_it_comes_from() {
    let mut world = World::new();
    let mut registration = introduction(1, 1);
    registration.address = "0.0.0.0:7".parse().unwrap();
    world.register(registration, good);
    let HeadReply::Cluster(cluster) = world.request(HTTP, HeadRequest::Cluster) else {
        panic!("no cluster");
    };
    assert_eq!(cluster.nodes[0].address, "10.0.0.77:7".parse().unwrap());
}

#[test]
fn ages_count_by_the_real_clock_and_leases_by_the_other() {
    let mut world = World::new();
    let node = world.node(1, 1, good);
    let job = world.healthy(1, node);
    let now = Now {
        awake: world.start + Duration::from_secs(1),
        real: world.start + LEASE * 100,
    };
    let question = Question::Request(HTTP, Box::new(HeadRequest::Job { job }));
    let ask = AskId(999);
    let outputs = world.head.step(now, Input::Asked { ask, question });
    let [Output::Answer(_, reply)] = &outputs[..] else {
        panic!("{outputs:?}");
    };
    assert!(matches!(&**reply, HeadReply::Job(info) if info.age_ms == 6_000_000));
    assert!(
        world.head.step(now, Input::Tick).is_empty(),
        "nobody is lost"
    );
}
