//! Jobs, and what can go wrong with them.

use std::time::Duration;

use kolo_transport::identity::Role;
use kolo_transport::ids::{JobId, Rank, Slot};
use kolo_transport::wire::{
    Exit, HeadReply, HeadRequest, JobEvent, JobState, NodeReply, NodeRequest, Placement, Refusal,
    RefusalKind, StartWorkers, SubmitFrame,
};
use kolo_transport::{CertificateRequest, CloseCode, ConnectionLost};

use super::fake::{Driver, FakeNode, config, good, pack, soon, spec};
use crate::head::{Head, HeadConfig};

/// Takes a job on these nodes to Healthy.
async fn until_healthy(
    submission: &mut super::fake::Submission,
    nodes: &[(&FakeNode, &[u32])],
) -> JobId {
    let (job, _) = submission.placed().await;
    for (node, slots) in nodes {
        for slot in *slots {
            node.ready(job, *slot).await;
        }
    }
    let healthy = submission.next().await;
    assert!(matches!(healthy, JobEvent::Healthy { .. }), "{healthy:?}");
    job
}

fn start_of(request: NodeRequest) -> StartWorkers {
    match request {
        NodeRequest::Start(start) => start,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_job_from_submit_to_end() {
    let head = Head::start(config()).await.unwrap();
    let mut one = FakeNode::new(&head, 2, |request| match request {
        NodeRequest::Reserve { .. } => Some(NodeReply::Reserved {
            has_program: false,
            free_port: 29_501,
            problem: None,
        }),
        other => good(other),
    })
    .await;
    let mut two = FakeNode::good(&head, 2).await;
    let driver = Driver::new(&head).await;
    let mut job = driver
        .submit(spec(Placement::Spread { hosts: 2, slots: 2 }))
        .await;
    let (id, nodes) = job.placed().await;
    assert_eq!(nodes, [one.id, two.id]);
    assert_eq!(driver.free_cpus().await, [0, 0]);
    // Nothing starts before the program is everywhere.
    one.sees(|request| matches!(request, NodeRequest::Reserve { .. }))
        .await;
    assert!(one.unseen().is_empty());
    job.say(SubmitFrame::ProgramReady).await;

    let start = start_of(
        one.sees(|request| matches!(request, NodeRequest::Start(_)))
            .await,
    );
    assert_eq!(start.job, id);
    assert_eq!(start.env["MASTER_PORT"], "29501");
    assert_eq!(start.slots[0].env["HOROVOD_GLOO_IFACE"], "lo");
    assert!(!start.env.contains_key("HOROVOD_GLOO_RENDEZVOUS_ADDR"));
    assert_eq!(start.slots[1].env["RANK"], "1");
    let start = start_of(
        two.sees(|request| matches!(request, NodeRequest::Start(_)))
            .await,
    );
    assert_eq!(start.slots[0].member.rank, Rank(2));

    // Workers get certificates from their own node's requests alone.
    let request = CertificateRequest::generate().unwrap();
    let sign = |slot| HeadRequest::SignWorker {
        job: id,
        slot: Slot(slot),
        csr: request.der().to_vec(),
    };
    assert_eq!(
        one.member.refused(&sign(2)).await.kind,
        RefusalKind::Forbidden
    );
    let HeadReply::Signed {
        certificate,
        generation,
    } = two.member.ask(&sign(2)).await
    else {
        panic!("not signed");
    };
    assert_eq!(generation.0, 1);
    let credentials = request
        .finish(&certificate, &head.authority().certificate())
        .unwrap();
    assert_eq!(credentials.identity().role, Role::Worker);
    assert_eq!(credentials.identity().worker(), Some((id, Slot(2))));
    let bad = HeadRequest::SignWorker {
        job: id,
        slot: Slot(2),
        csr: b"no request".to_vec(),
    };
    assert_eq!(two.member.refused(&bad).await.kind, RefusalKind::Invalid);

    for (node, slots) in [(&one, [0, 1]), (&two, [2, 3])] {
        for slot in slots {
            node.ready(id, slot).await;
        }
    }
    let JobEvent::Healthy { table, .. } = job.next().await else {
        panic!("not healthy");
    };
    for node in [&mut one, &mut two] {
        let pushed = node
            .sees(|request| matches!(request, NodeRequest::Membership(_)))
            .await;
        assert_eq!(pushed, NodeRequest::Membership(table.clone().into()));
    }
    let HeadReply::Jobs(jobs) = driver.member.ask(&HeadRequest::Jobs).await else {
        panic!("no jobs");
    };
    assert_eq!(jobs.len(), 1);
    assert_eq!(jobs[0].state, JobState::Healthy);

    // F-1: a lost worker is told to the driver and to the other node.
    two.exited(id, 3, Exit::Signal(9)).await;
    let lost = job.next().await;
    assert!(
        matches!(&lost, JobEvent::RankLost { failure, .. } if failure.rank == Rank(3)),
        "{lost:?}"
    );
    one.sees(|request| matches!(request, NodeRequest::RankLost { .. }))
        .await;

    job.say(SubmitFrame::Stop).await;
    let (state, refusal) = job.ended().await;
    assert_eq!((state, refusal), (JobState::Stopped, None));
    one.sees_stop(id).await;
    two.sees_stop(id).await;
    assert_eq!(driver.free_cpus().await, [2, 2]);
    head.stop().await;
}

#[tokio::test]
async fn g2_a_refused_reservation_releases_all_others() {
    let head = Head::start(config()).await.unwrap();
    let mut one = FakeNode::good(&head, 1).await;
    let _two = FakeNode::new(&head, 1, |request| match request {
        NodeRequest::Reserve { .. } => Some(NodeReply::Refused(Refusal::new(
            RefusalKind::Unplaceable,
            "somebody else has it",
        ))),
        other => good(other),
    })
    .await;
    let driver = Driver::new(&head).await;
    let mut job = driver.submit(pack(2)).await;
    let (state, refusal) = job.ended().await;
    assert_eq!(state, JobState::Failed);
    let refusal = refusal.unwrap();
    assert_eq!(refusal.kind, RefusalKind::Unplaceable);
    assert!(
        refusal.message.contains("somebody else has it"),
        "{refusal}"
    );
    let released = one
        .sees(|request| matches!(request, NodeRequest::Release { .. }))
        .await;
    assert!(matches!(released, NodeRequest::Release { .. }));
    assert_eq!(driver.free_cpus().await, [1, 1]);
    head.stop().await;
}

#[tokio::test]
async fn g2_a_node_that_vanishes_between_reserve_and_start() {
    let head = Head::start(config()).await.unwrap();
    let mut one = FakeNode::good(&head, 1).await;
    let two = FakeNode::new(&head, 1, |request| match request {
        NodeRequest::Reserve { .. } => Some(NodeReply::Reserved {
            has_program: false,
            free_port: 1,
            problem: None,
        }),
        other => good(other),
    })
    .await;
    let driver = Driver::new(&head).await;
    let mut job = driver.submit(pack(2)).await;
    let (id, _) = job.placed().await;
    two.member.vanish();
    let (state, refusal) = job.ended().await;
    assert_eq!(state, JobState::Failed);
    let refusal = refusal.unwrap();
    assert_eq!(refusal.kind, RefusalKind::NodeLost);
    assert!(refusal.message.contains(&two.id.to_string()), "{refusal}");
    one.sees_release(id).await;
    assert_eq!(driver.free_cpus().await, [1, 0]);
    // The others are as free as before.
    let mut again = driver.submit(pack(1)).await;
    again.placed().await;
    head.stop().await;
}

#[tokio::test]
async fn g2_a_node_that_never_answers() {
    let head = Head::start(HeadConfig {
        job: kolo_core::head::job::JobConfig {
            request_timeout: Duration::from_millis(300),
            stop_margin: Duration::from_millis(300),
            ..kolo_core::head::job::JobConfig::default()
        },
        ..config()
    })
    .await
    .unwrap();
    let mut good_node = FakeNode::good(&head, 1).await;
    let deaf = FakeNode::new(&head, 1, |_| None).await;
    let driver = Driver::new(&head).await;
    let mut job = driver.submit(pack(2)).await;
    let (state, refusal) = job.ended().await;
    assert_eq!(state, JobState::Failed);
    let refusal = refusal.unwrap();
    assert_eq!(refusal.kind, RefusalKind::Timeout);
    assert!(refusal.message.contains(&deaf.id.to_string()), "{refusal}");
    good_node
        .sees(|request| matches!(request, NodeRequest::Release { .. }))
        .await;
    // Nobody knows what the deaf one holds. The other is free.
    assert_eq!(driver.free_cpus().await, [1, 0]);
    head.stop().await;
}

#[tokio::test]
async fn f1_a_node_whose_heartbeats_end_is_lost_though_its_connection_lives() {
    let head = Head::start(HeadConfig {
        lease: Duration::from_millis(1500),
        ..config()
    })
    .await
    .unwrap();
    let one = FakeNode::good(&head, 1).await;
    let two = FakeNode::good(&head, 1).await;
    let driver = Driver::new(&head).await;
    let mut job = driver.submit(pack(2)).await;
    until_healthy(&mut job, &[(&one, &[0]), (&two, &[1])]).await;
    two.fall_silent();
    let lost = job.next().await;
    let JobEvent::RankLost { failure, .. } = lost else {
        panic!("{lost:?}");
    };
    assert_eq!((failure.rank, failure.exit), (Rank(1), Exit::Unknown));
    assert!(failure.reason.unwrap().contains("no heartbeat"));
    let lost = soon(two.member.connection.closed()).await;
    assert!(
        matches!(
            lost,
            ConnectionLost::Closed {
                code: CloseCode::LeaseExpired,
                ..
            }
        ),
        "{lost}"
    );
    head.stop().await;
}

#[tokio::test]
async fn a_job_ends_with_its_driver() {
    let head = Head::start(config()).await.unwrap();
    let mut node = FakeNode::good(&head, 4).await;
    let (gone, quiet) = (Driver::new(&head).await, Driver::new(&head).await);

    // The connection ends.
    let mut first = gone.submit(pack(1)).await;
    let job = until_healthy(&mut first, &[(&node, &[0])]).await;
    gone.member.vanish();
    node.sees_stop(job).await;

    // Only the stream ends.
    let mut second = quiet.submit(pack(1)).await;
    let job = until_healthy(&mut second, &[(&node, &[0])]).await;
    second.finish();
    node.sees_stop(job).await;
    let (state, refusal) = second.ended().await;
    assert_eq!(state, JobState::Stopped);
    assert!(refusal.unwrap().message.contains("its driver is gone"));

    // Another driver, or an operator, stops it.
    let mut third = quiet.submit(pack(1)).await;
    let job = until_healthy(&mut third, &[(&node, &[0])]).await;
    let operator = Driver::new(&head).await;
    assert_eq!(
        operator.member.ask(&HeadRequest::Stop { job }).await,
        HeadReply::Done
    );
    let (state, refusal) = third.ended().await;
    assert_eq!(state, JobState::Stopped);
    let name = operator.member.endpoint.identity().name.clone();
    assert!(refusal.unwrap().message.contains(&name));
    let HeadReply::Job(info) = operator.member.ask(&HeadRequest::Job { job }).await else {
        panic!("the job is forgotten");
    };
    assert_eq!(info.state, JobState::Stopped);
    head.stop().await;
}

#[tokio::test]
async fn two_jobs_at_once_are_disjoint_and_the_infeasible_fails_at_once() {
    let head = Head::start(config()).await.unwrap();
    let one = FakeNode::good(&head, 2).await;
    let two = FakeNode::good(&head, 2).await;
    let driver = Driver::new(&head).await;
    let mut first = driver.submit(pack(2)).await;
    let (first_id, first_nodes) = first.placed().await;
    let mut second = driver.submit(pack(2)).await;
    let (second_id, second_nodes) = second.placed().await;
    assert_eq!((first_nodes, second_nodes), (vec![one.id], vec![two.id]));

    let mut third = driver.submit(pack(4)).await;
    let (state, refusal) = third.ended().await;
    assert_eq!(state, JobState::Failed);
    let refusal = refusal.unwrap();
    assert_eq!(refusal.kind, RefusalKind::Unplaceable);
    for node in [&one, &two] {
        let part = format!(
            "host ({}) has room for 0; cpus: requested 1, available 0",
            node.id
        );
        assert!(refusal.message.contains(&part), "{refusal}");
    }

    for (id, job, node) in [(first_id, &mut first, &one), (second_id, &mut second, &two)] {
        node.ready(id, 0).await;
        node.ready(id, 1).await;
        assert!(matches!(job.next().await, JobEvent::Healthy { .. }));
    }
    // The end of one does not touch the other.
    one.exited(first_id, 0, Exit::Code(0)).await;
    one.exited(first_id, 1, Exit::Code(0)).await;
    assert_eq!(first.ended().await, (JobState::Succeeded, None));
    assert_eq!(driver.free_cpus().await, [2, 0]);
    // As drivers do whose program is through, for heads of all versions.
    second.say(SubmitFrame::Done).await;
    second.say(SubmitFrame::Stop).await;
    assert_eq!(second.ended().await, (JobState::Succeeded, None));
    head.stop().await;
}

#[tokio::test]
async fn wrong_jobs_are_refused_with_what_is_allowed() {
    let head = Head::start(config()).await.unwrap();
    let mut node = FakeNode::good(&head, 1).await;
    let driver = Driver::new(&head).await;
    let mut with_env = pack(1);
    with_env.env.insert("A=B".to_owned(), "c".to_owned());
    for (spec, part) in [
        (pack(0), "allowed are 1 to"),
        (
            spec(Placement::Spread {
                hosts: u32::MAX,
                slots: 2,
            }),
            "allowed are 1 to",
        ),
        (with_env, "its name contains `=`"),
    ] {
        let (state, refusal) = driver.submit(spec).await.ended().await;
        assert_eq!(state, JobState::Failed);
        let refusal = refusal.unwrap();
        assert_eq!(refusal.kind, RefusalKind::Invalid);
        assert!(refusal.message.contains(part), "{refusal}");
    }
    assert!(node.unseen().is_empty());
    head.stop().await;
}

#[tokio::test]
async fn a_job_that_asks_for_a_rendezvous_has_one_until_it_ends() {
    let head = Head::start(config()).await.unwrap();
    let mut node = FakeNode::good(&head, 1).await;
    let driver = Driver::new(&head).await;
    let mut with = pack(1);
    with.rendezvous = true;
    let mut job = driver.submit(with).await;
    let (id, _) = job.placed().await;
    let start = start_of(
        node.sees(|request| matches!(request, NodeRequest::Start(_)))
            .await,
    );
    let address = format!(
        "{}:{}",
        start.env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], start.env["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    );
    drop(tokio::net::TcpStream::connect(&address).await.unwrap());
    node.ready(id, 0).await;
    assert!(matches!(job.next().await, JobEvent::Healthy { .. }));
    let HeadReply::Job(info) = driver.member.ask(&HeadRequest::Job { job: id }).await else {
        panic!("no job");
    };
    assert_eq!(info.rendezvous.unwrap().to_string(), address);
    job.say(SubmitFrame::Stop).await;
    job.ended().await;
    soon(async {
        while tokio::net::TcpStream::connect(&address).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    head.stop().await;
}

#[tokio::test]
async fn a_head_that_stops_ends_its_jobs_and_says_so() {
    let head = Head::start(config()).await.unwrap();
    let mut node = FakeNode::good(&head, 1).await;
    let driver = Driver::new(&head).await;
    let mut job = driver.submit(pack(1)).await;
    let id = until_healthy(&mut job, &[(&node, &[0])]).await;
    let stopping = tokio::spawn(head.stop());
    let (state, refusal) = job.ended().await;
    assert_eq!(state, JobState::Stopped);
    assert!(refusal.unwrap().message.contains("the head is stopping"));
    node.sees_stop(id).await;
    let lost = soon(driver.member.connection.closed()).await;
    assert!(
        matches!(
            lost,
            ConnectionLost::Closed {
                code: CloseCode::Shutdown,
                ..
            }
        ),
        "{lost}"
    );
    soon(stopping).await.unwrap();
}
