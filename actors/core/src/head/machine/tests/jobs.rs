//! Jobs from their submission to their end.

use kolo_wire::Exit;
use kolo_wire::ids::Slot;

use super::*;

#[test]
fn two_jobs_run_at_once_on_disjoint_resources() {
    let mut world = World::new();
    let first = world.node(1, 2, good);
    let second = world.node(2, 2, good);
    let (one, two) = (world.submit(11, 2), world.submit(12, 2));
    assert_eq!(world.free_cpus(), [0, 0]);

    // What can't be placed fails at once and says what is missing where.
    let third = world.submit(13, 2);
    let refusal = world.refusal(third);
    assert_eq!(refusal.kind, RefusalKind::Unplaceable);
    let missing = "host1 (node-0000000000000001) has room for 0; cpus free: 0";
    assert!(refusal.message.contains(missing), "{refusal}");
    let remedy = "it fits when other jobs have ended: wait for that (`kolo run` does with --wait DURATION), or ask for less";
    assert!(refusal.message.ends_with(remedy), "{refusal}");

    for (job, node) in [(one, first), (two, second)] {
        world.report(node, vec![ready(job, 0), ready(job, 1)]);
        assert!(world.is_healthy(job));
        // S-2: a node signs for its own slots only.
        for asker in [first, second] {
            let request = HeadRequest::SignWorker {
                job,
                slot: Slot(0),
                csr: Vec::new(),
            };
            let reply = world.request(Caller::Peer(asker), request);
            assert_eq!(matches!(reply, HeadReply::Signed { .. }), asker == node);
        }
    }
    let HeadReply::Jobs(jobs) = world.request(HTTP, HeadRequest::Jobs) else {
        panic!("no jobs");
    };
    let ids: Vec<_> = jobs.iter().map(|info| info.job).collect();
    assert_eq!(ids, [two, one]);

    world.frame(one, SubmitFrame::Stop);
    assert_eq!(world.end(one).unwrap().0, JobState::Stopped);
    // Whoever is told of the end can have the resources.
    assert_eq!(world.free_cpus(), [2, 0]);
    assert_eq!(world.stops(first, one), 1);
}

#[test]
fn a_list_has_the_workers_of_the_newest_jobs_and_names_all() {
    const WORKERS: u32 = 5000;
    let mut world = World::new();
    for node in 1..12 {
        world.node(node, 1000, good);
    }
    let [oldest, ended] = [1, 2].map(|job| world.submit(job, WORKERS));
    world.frame(ended, SubmitFrame::Stop);
    assert!(world.end(ended).is_some());
    let newest = world.submit(3, 1);
    let HeadReply::Jobs(jobs) = world.request(HTTP, HeadRequest::Jobs) else {
        panic!("no jobs");
    };
    let listed: Vec<_> = jobs
        .iter()
        .map(|job| (job.job, job.state, job.workers.len(), job.nodes.len()))
        .collect();
    let expected = [
        (newest, JobState::Starting, 1, 1),
        (ended, JobState::Stopped, WORKERS as usize, 5),
        (oldest, JobState::Starting, 0, 0),
    ];
    assert_eq!(listed, expected);
}

#[test]
fn a_stop_is_answered_when_the_job_has_ended() {
    let mut world = World::new();
    let mut stopped = false;
    let node = world.node(1, 1, move |request| match request {
        NodeRequest::Stop { .. } if !std::mem::replace(&mut stopped, true) => None,
        other => good(other),
    });
    let job = world.healthy(1, node);
    let stops = [world.stop_later(job), world.stop_later(job)];
    assert!(world.answers.is_empty() && world.end(job).is_none());
    world.trace.clear();
    world.report(node, vec![NodeEvent::JobGone { job }]);
    let position = |world: &World, text: &str| {
        let trace = &mut world.trace.iter();
        trace.position(|line| line.contains(text)).unwrap()
    };
    assert!(position(&world, "Ended") < position(&world, "Answer"));
    for ask in stops {
        assert_eq!(world.answers[&ask], HeadReply::Done);
    }
    let (state, refusal) = world.end(job).unwrap();
    assert_eq!(state, JobState::Stopped);
    let reason = "the job was stopped: it was asked for over HTTP";
    assert_eq!(refusal.unwrap().message, reason);
    // A job that has ended is remembered, and stopped already. What nobody knows is not.
    assert_eq!(
        world.request(HTTP, HeadRequest::Stop { job }),
        HeadReply::Done
    );
    let info = world.request(HTTP, HeadRequest::Job { job });
    assert!(matches!(info, HeadReply::Job(info) if info.state == JobState::Stopped));
    let job = JobId(4);
    for request in [HeadRequest::Stop { job }, HeadRequest::Job { job }] {
        assert_eq!(world.refused(HTTP, request).kind, RefusalKind::NotFound);
    }
}

#[test]
fn a_shutdown_stops_all_jobs_and_takes_no_more() {
    let mut world = World::new();
    let node = world.node(1, 2, good);
    let job = world.healthy(1, node);
    let reason = "the head is stopping".to_owned();
    let ask = world.ask_later(Question::Shutdown { reason });
    assert_eq!(world.answers[&ask], HeadReply::Done);
    let (state, refusal) = world.end(job).unwrap();
    assert_eq!(state, JobState::Stopped);
    assert!(refusal.unwrap().message.contains("the head is stopping"));
    assert_eq!(world.stops(node, job), 1);
    let late = world.submit(2, 1);
    assert_eq!(world.refusal(late).kind, RefusalKind::Stopped);
}

#[test]
fn a_drain_of_the_head_waits_for_the_jobs_that_run() {
    let mut world = World::new();
    let node = world.node(1, 2, good);
    let job = world.healthy(1, node);
    let drain = |reason: &str| Question::Drain {
        reason: reason.to_owned(),
    };
    let (ask, forgotten) = (
        world.ask_later(drain("it is")),
        world.ask_later(drain("time")),
    );
    assert!(world.answers.is_empty());
    let late = world.submit(2, 1);
    assert_eq!(world.refusal(late).message, "time");
    world.input(Input::Forget(forgotten));
    world.report(node, vec![exited(job, 0, Exit::Code(0))]);
    assert_eq!(world.end(job).unwrap().0, JobState::Succeeded);
    assert_eq!(world.answers.keys().collect::<Vec<_>>(), [&ask]);
}

#[test]
fn a_job_with_wrong_values_is_refused_before_anything_is_asked() {
    let mut world = World::new();
    let node = world.node(1, 2, good);
    let spread = Placement::Spread {
        hosts: u32::MAX,
        slots: u32::MAX,
    };
    for (job, placement) in [(1, Placement::Pack { workers: 0 }), (2, spread)] {
        let job = world.submit_as(job, |spec| spec.placement = placement);
        assert_eq!(world.refusal(job).kind, RefusalKind::Invalid);
    }
    assert!(world.peers[&node].seen.is_empty());
}

#[test]
fn an_id_names_one_job() {
    let mut world = World::new();
    let node = world.node(1, 2, good);
    let job = world.healthy(1, node);
    world.submit(1, 1);
    assert_eq!(world.refusal(job).kind, RefusalKind::Internal);
    assert_eq!(world.free_cpus(), [1]);
}

#[test]
fn reports_that_come_together_keep_their_order() {
    let mut world = World::new();
    let node = world.node(1, 40, good);
    let job = world.submit(1, 40);
    world.report(node, (0..40).map(|slot| ready(job, slot)).collect());
    assert!(world.is_healthy(job));
    let order: Vec<u32> = (1..40).rev().collect();
    let exits = order.iter().map(|slot| exited(job, *slot, Exit::Code(3)));
    world.report(node, exits.collect());
    let lost: Vec<u32> = world.told[&job]
        .iter()
        .filter_map(|event| match event {
            JobEvent::RankLost { failure, .. } => Some(failure.rank.0),
            _ => None,
        })
        .collect();
    assert_eq!(lost, order);
}
