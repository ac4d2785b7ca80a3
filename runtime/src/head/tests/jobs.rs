//! Jobs, and what can go wrong with them.

use std::time::Duration;

use kolo_transport::identity::Role;
use kolo_transport::ids::{JobId, Rank, Slot};
use kolo_transport::wire::{
    Exit, HeadReply, HeadRequest, JobEvent, JobState, NodeReply, NodeRequest, Placement,
    RefusalKind, StartWorkers, SubmitFrame,
};
use kolo_transport::{CertificateRequest, CloseCode, ConnectionLost};

use super::fake::{Driver, FakeNode, config, good, pack, soon, spec};
use crate::head::Head;

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
    let health = head.health();
    assert!(health.is_good(Duration::from_secs(20)).await);
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
    assert!(!health.is_good(Duration::from_secs(20)).await);
}
