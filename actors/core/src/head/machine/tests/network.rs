//! Probes of network interfaces.

use kolo_wire::{
    Echo, InterfaceSelection, InterfacesQuery, NetworkChoice, NetworkReport, ProbeResult,
};

use super::*;

fn is_probe(request: &NodeRequest) -> bool {
    matches!(request, NodeRequest::Probe(_))
}

/// Two nodes on two hosts, which do not answer to probes by themselves.
fn world() -> (World, [Session; 2]) {
    let mut world = World::new();
    let nodes = [1, 2].map(|node| {
        let registration = NodeRegistration {
            network: on_own_host(node, 0),
            ..introduction(node, 1)
        };
        world.register(registration, |request| {
            good(request).filter(|_| !is_probe(request))
        })
    });
    (world, nodes)
}

fn query(no_cache: bool) -> HeadRequest {
    HeadRequest::Interfaces(InterfacesQuery {
        no_cache,
        ..InterfacesQuery::default()
    })
}

/// All that were asked have reached what they were to try.
fn answer_all(world: &mut World) {
    let all = world.open.clone();
    answer(world, all);
}

fn answer(world: &mut World, requests: impl IntoIterator<Item = RequestId>) {
    for request in requests {
        // In order of registration, behind the driver.
        let node = request.session.0 as u8 - 1;
        let reached = ProbeResult::Reached {
            rtt_us: 100,
            echo: Echo {
                seen: (IpAddr::from([10, 0, 0, node]), 7).into(),
                local: None,
                interface: Some("eth0".to_owned()),
                time_ms: 0,
            },
        };
        let reply = Reply::Answer(NodeReply::Probed(vec![reached]));
        world.open.remove(&request);
        world.input(Input::Replied(request, reply));
    }
}

fn found(world: &World, ask: AskId) -> Option<NetworkReport> {
    world.answers.get(&ask).map(|reply| match reply {
        HeadReply::Interfaces(report) => report.clone(),
        other => panic!("{other:?}"),
    })
}

fn probes(world: &World, nodes: [Session; 2]) -> [usize; 2] {
    nodes.map(|node| world.seen(node, is_probe))
}

#[test]
fn all_that_want_to_know_the_same_wait_for_the_probe_that_runs() {
    let (mut world, nodes) = world();
    let first = world.request_later(HTTP, query(false));
    let job = world.submit(1, 2);
    let second = world.request_later(HTTP, query(false));
    assert_eq!(probes(&world, nodes), [1, 1]);
    // Whoever wants a new one does not take what began before, and the next take the new one.
    let anew = world.request_later(HTTP, query(true));
    let third = world.request_later(HTTP, query(false));
    assert_eq!(probes(&world, nodes), [2, 2]);
    assert!(world.answers.is_empty());
    world.pass(Duration::from_millis(30));
    answer_all(&mut world);
    assert_eq!(probes(&world, nodes), [2, 2]);
    for ask in [first, second, anew, third] {
        let report = found(&world, ask).unwrap();
        assert_eq!(report.choice, NetworkChoice::Interface("eth0".to_owned()));
        assert_eq!((report.took_ms, report.cached), (30, false));
    }
    // The job goes on with it.
    let start = |request: &_| matches!(request, NodeRequest::Start(_));
    assert_eq!(nodes.map(|node| world.seen(node, start)), [1, 1]);
    let of_job = HeadRequest::Interfaces(InterfacesQuery {
        job: Some(job),
        ..InterfacesQuery::default()
    });
    assert!(matches!(
        world.request(HTTP, of_job),
        HeadReply::Interfaces(_)
    ));
    // It is known from now on.
    let known = world.request_later(HTTP, query(false));
    assert!(found(&world, known).unwrap().cached);
    let anew = world.request_later(HTTP, query(true));
    assert!(found(&world, anew).is_none());
    assert_eq!(probes(&world, nodes), [3, 3]);
}

#[test]
fn a_probe_ends_with_the_last_that_waits_for_it() {
    let (mut world, nodes) = world();
    let job = world.submit(1, 2);
    let ask = world.request_later(HTTP, query(false));
    world.frame(job, SubmitFrame::Stop);
    assert!(world.end(job).is_some() && world.cancelled.is_empty());
    world.input(Input::Forget(ask));
    assert_eq!(world.cancelled.len(), 2);
    assert!(world.open.is_empty());
    let next = world.request_later(HTTP, query(false));
    assert_eq!(probes(&world, nodes), [2, 2]);
    answer_all(&mut world);
    assert!(found(&world, next).is_some());
}

#[test]
fn a_probe_that_began_earlier_and_ends_later_is_not_remembered() {
    let (mut world, nodes) = world();
    let old = world.request_later(HTTP, query(false));
    let late = world.open.clone();
    let anew = world.request_later(HTTP, query(true));
    world.pass(Duration::from_millis(30));
    let new: Vec<_> = world.open.difference(&late).copied().collect();
    answer(&mut world, new);
    world.pass(Duration::from_millis(30));
    answer_all(&mut world);
    let known = world.request_later(HTTP, query(false));
    for (ask, took_ms, cached) in [(anew, 30, false), (old, 60, false), (known, 30, true)] {
        let report = found(&world, ask).unwrap();
        assert_eq!((report.took_ms, report.cached), (took_ms, cached));
    }
    assert_eq!(probes(&world, nodes), [2, 2]);
}

#[test]
fn probes_for_questions_are_bounded() {
    let (mut world, nodes) = world();
    let on = |interface: usize| {
        HeadRequest::Interfaces(InterfacesQuery {
            selection: InterfaceSelection {
                names: vec![format!("if{interface}"), "eth0".to_owned()],
                ..InterfaceSelection::default()
            },
            ..InterfacesQuery::default()
        })
    };
    let asks: Vec<_> = (0..16)
        .map(|interface| world.request_later(HTTP, on(interface)))
        .collect();
    assert_eq!(probes(&world, nodes), [16, 16]);
    let refusal = world.refused(HTTP, on(16));
    assert_eq!(refusal.kind, RefusalKind::Busy);
    // The same as another is no more, and jobs have the bound of jobs.
    let same = world.request_later(HTTP, on(15));
    world.submit(1, 2);
    assert_eq!(probes(&world, nodes), [17, 17]);
    answer_all(&mut world);
    for ask in asks.into_iter().chain([same]) {
        assert!(found(&world, ask).is_some());
    }
    world.request_later(HTTP, on(16));
    assert_eq!(probes(&world, nodes), [18, 18]);
}

#[test]
fn a_node_that_is_lost_or_silent_ends_no_probe_late() {
    for lost in [true, false] {
        let (mut world, nodes) = world();
        let ask = world.request_later(HTTP, query(false));
        if lost {
            for node in nodes {
                world.disconnect(node);
            }
        } else {
            // The ring, and then all pairs.
            world.pass(Duration::from_secs(17));
        }
        let report = found(&world, ask).unwrap();
        assert!(report.problem.is_some(), "{report:?}");
        assert!(world.open.is_empty());
    }
}

#[test]
fn what_does_not_exist_is_named() {
    let (mut world, _) = world();
    let of_nobody = HeadRequest::Interfaces(InterfacesQuery {
        nodes: vec!["nowhere".to_owned()],
        ..InterfacesQuery::default()
    });
    let refusal = world.refused(HTTP, of_nobody);
    assert_eq!(refusal.kind, RefusalKind::Invalid);
    assert!(refusal.message.contains("`nowhere`"), "{refusal}");
}
