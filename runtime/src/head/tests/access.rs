//! Who gets in, and who may ask what.

use std::time::Duration;

use kolo_transport::frame::Limits;
use kolo_transport::identity::{Identity, Role};
use kolo_transport::ids::{JobId, NodeId, Slot};
use kolo_transport::wire::{
    HeadReply, HeadRequest, InterfacesQuery, JobState, NodeEvent, NodeNetwork, RefusalKind,
    Shortage,
};
use kolo_transport::{CloseCode, FrameError, JoinError, JoinToken, RandomId as _, join};
use serde::Serialize;

use super::fake::{Driver, Member, config, introduction, pack, soon, submit};
use crate::head::{Head, HeadConfig, HeadError};

const HOUR: Duration = Duration::from_secs(3600);

async fn refused(head: &Head, token: &JoinToken) -> (RefusalKind, String) {
    match join(head.runtime(), head.address(), token).await {
        Err(JoinError::Refused(refusal)) => (refusal.kind, refusal.message),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn nodes_and_drivers_join_with_tokens() {
    let head = Head::start(config()).await.unwrap();
    let node_token = head.create_token(Role::Node, HOUR, Some(1));
    let credentials = join(head.runtime(), head.address(), &node_token)
        .await
        .unwrap();
    assert_eq!(credentials.identity().role, Role::Node);
    assert_eq!(credentials.identity().cluster, head.cluster());
    let node = Member::with(&head, credentials).await;
    let id = node.endpoint.identity().node().unwrap();
    let register = HeadRequest::Register(introduction(id, 1));
    assert!(matches!(
        node.ask(&register).await,
        HeadReply::Registered { .. }
    ));

    let driver_token = head.create_token(Role::Driver, HOUR, None);
    for _ in 0..2 {
        let credentials = join(head.runtime(), head.address(), &driver_token)
            .await
            .unwrap();
        let driver = Member::with(&head, credentials).await;
        assert!(matches!(
            driver.ask(&HeadRequest::Cluster).await,
            HeadReply::Cluster(cluster) if cluster.cluster == head.cluster()
        ));
    }

    let (kind, message) = refused(&head, &node_token).await;
    assert_eq!(kind, RefusalKind::Token);
    assert!(message.contains("used up"), "{message}");
    let expired = head.create_token(Role::Node, Duration::ZERO, None);
    let (kind, message) = refused(&head, &expired).await;
    assert_eq!(kind, RefusalKind::Token);
    assert!(message.contains("expired"), "{message}");
    // The secret of a driver's token does not make a node.
    let text = driver_token.to_string().replace(".driver.", ".node.");
    let (kind, message) = refused(&head, &text.parse().unwrap()).await;
    assert_eq!(kind, RefusalKind::Token);
    assert!(message.contains("not for a node"), "{message}");
    // An unknown one. The message does not repeat it.
    let mut text = node_token.to_string();
    let last = if text.ends_with('0') { "1" } else { "0" };
    text.replace_range(text.len() - 1.., last);
    let (kind, message) = refused(&head, &text.parse().unwrap()).await;
    assert_eq!(kind, RefusalKind::Token);
    assert!(
        !message.contains(text.rsplit('.').next().unwrap()),
        "{message}"
    );
    head.stop().await;
}

#[tokio::test]
async fn s2_every_request_is_checked_against_the_role() {
    let head = Head::start(config()).await.unwrap();
    let id = NodeId::random();
    let job = JobId::random();
    let network = NodeNetwork {
        listen: "127.0.0.1:1".parse().unwrap(),
        host: "here".to_owned(),
        interfaces: Vec::new(),
    };
    let for_nodes = [
        HeadRequest::Register(introduction(id, 1)),
        HeadRequest::Heartbeats,
        HeadRequest::Events(vec![NodeEvent::JobGone { job }]),
        HeadRequest::SignWorker {
            job,
            slot: Slot(0),
            csr: Vec::new(),
        },
        HeadRequest::Network(network.clone()),
        HeadRequest::Metrics(Vec::new()),
    ];
    let for_drivers = [
        HeadRequest::Interfaces(InterfacesQuery::default()),
        HeadRequest::Cluster,
        HeadRequest::Jobs,
        HeadRequest::Job { job },
        HeadRequest::Stop { job },
    ];
    let node = Member::new(&head, Role::Node, &id.to_string()).await;
    let driver = Driver::new(&head).await;
    let worker = Member::new(&head, Role::Worker, &Identity::worker_name(job, Slot(0))).await;

    for request in &for_nodes {
        for asker in [&driver.member, &worker] {
            let refusal = asker.refused(request).await;
            assert_eq!(refusal.kind, RefusalKind::Forbidden, "{request:?}");
            assert!(refusal.message.starts_with("only a node may"), "{refusal}");
        }
    }
    for request in &for_drivers {
        for asker in [&node, &worker] {
            let refusal = asker.refused(request).await;
            assert_eq!(refusal.kind, RefusalKind::Forbidden, "{request:?}");
            assert!(
                refusal.message.starts_with("only a driver may"),
                "{refusal}"
            );
        }
    }
    for asker in [&node, &worker] {
        let (state, refusal) = submit(asker, pack(1)).await.ended().await;
        assert_eq!(state, JobState::Failed);
        assert_eq!(refusal.unwrap().kind, RefusalKind::Forbidden);
    }

    // A node speaks for itself alone, and only once it has registered.
    for request in &for_nodes[1..] {
        let refusal = node.refused(request).await;
        assert_eq!(refusal.kind, RefusalKind::Forbidden);
        assert!(refusal.message.contains("must register"), "{refusal}");
    }
    let other = HeadRequest::Register(introduction(NodeId::random(), 1));
    assert_eq!(node.refused(&other).await.kind, RefusalKind::Forbidden);
    assert!(matches!(
        node.ask(&for_nodes[0]).await,
        HeadReply::Registered { .. }
    ));
    assert_eq!(node.refused(&for_nodes[0]).await.kind, RefusalKind::Invalid);
    // Its interfaces may change, and must be plausible.
    assert_eq!(node.ask(&for_nodes[4]).await, HeadReply::Done);
    let mut wrong = network;
    wrong.host = String::new();
    let wrong = HeadRequest::Network(wrong);
    assert_eq!(node.refused(&wrong).await.kind, RefusalKind::Invalid);
    // It may not have certificates made for what it does not run.
    assert_eq!(
        node.refused(&for_nodes[3]).await.kind,
        RefusalKind::NotFound
    );
    // For drivers what is not there is told as that.
    for request in &for_drivers[3..] {
        let refusal = driver.member.refused(request).await;
        assert_eq!(refusal.kind, RefusalKind::NotFound);
    }
    head.stop().await;
}

/// A request of a later version.
#[derive(Serialize)]
enum Later {
    Dance { tempo: u32 },
}

#[tokio::test]
async fn requests_that_can_not_be_read_are_refused_and_harm_nobody() {
    let head = Head::start(HeadConfig {
        read_timeout: Duration::from_millis(300),
        ..config()
    })
    .await
    .unwrap();
    let driver = Driver::new(&head).await;
    let connection = &driver.member.connection;

    let later = Later::Dance { tempo: 120 };
    let reply: HeadReply = connection.request(&later, HOUR).await.unwrap();
    assert!(
        matches!(&reply, HeadReply::Refused(refusal) if refusal.kind == RefusalKind::UnknownRequest),
        "{reply:?}"
    );
    // A message of another kind, and no MessagePack at all.
    let wrong = Shortage {
        resource: String::new(),
        requested: kolo_transport::wire::Milli(0),
        available: kolo_transport::wire::Milli(0),
    };
    let reply: HeadReply = connection.request(&wrong, HOUR).await.unwrap();
    assert!(matches!(reply, HeadReply::Refused(_)));
    let mut stream = connection.open(Limits::CONTROL).await.unwrap();
    stream
        .send
        .send_encoded(&[0, 0, 0, 2, 0, 0, 0, 0, 0xc1, 0xc1])
        .await
        .unwrap();
    let reply = soon(stream.recv.expect::<HeadReply>()).await.unwrap().head;
    assert!(
        matches!(&reply, HeadReply::Refused(refusal) if refusal.kind == RefusalKind::UnknownRequest),
        "{reply:?}"
    );

    // Over the cap: refused by the prefix alone.
    let mut stream = connection.open(Limits::CONTROL).await.unwrap();
    stream
        .send
        .send_encoded(&[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0])
        .await
        .unwrap();
    let reply = soon(stream.recv.expect::<HeadReply>()).await.unwrap().head;
    assert!(
        matches!(&reply, HeadReply::Refused(refusal) if refusal.kind == RefusalKind::TooLarge),
        "{reply:?}"
    );

    // Cut off, and slow: the stream is reset in time.
    let mut slow = connection.open(Limits::CONTROL).await.unwrap();
    slow.send.send_encoded(&[0, 0]).await.unwrap();
    let error = soon(slow.recv.expect::<HeadReply>()).await.unwrap_err();
    assert_eq!(error, FrameError::Reset(CloseCode::Deadline));

    // Everybody else goes on, on the same connection too.
    assert!(matches!(
        driver.member.ask(&HeadRequest::Cluster).await,
        HeadReply::Cluster(_)
    ));
    head.stop().await;
}

#[tokio::test]
async fn wrong_settings_are_refused() {
    for (field, wrong) in [
        (
            "lease",
            HeadConfig {
                lease: Duration::ZERO,
                ..config()
            },
        ),
        (
            "heartbeat",
            HeadConfig {
                heartbeat: HOUR,
                ..config()
            },
        ),
    ] {
        let error = Head::start(wrong).await.unwrap_err().to_string();
        assert!(
            error.starts_with(field) && error.contains("allowed is"),
            "{error}"
        );
    }
    let head = Head::start(config()).await.unwrap();
    let taken = HeadConfig {
        listen: head.address(),
        ..config()
    };
    let error = Head::start(taken).await.unwrap_err();
    assert!(matches!(error, HeadError::Bind(_)), "{error}");
    head.stop().await;
}
