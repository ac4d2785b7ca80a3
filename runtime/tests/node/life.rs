//! The node itself: its way to the head and who may talk to it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kolo_runtime::{Node, NodeConfig, NodeError};
use kolo_transport::ids::{ClusterId, DriverId, NodeId, Slot};
use kolo_transport::token::random_secret;
use kolo_transport::wire::{HeadRequest, NodeEvent, NodeReply, NodeRequest, Probe, RefusalKind};
use kolo_transport::{
    Authority, CloseCode, ConnectError, ConnectionLost, Endpoint, EndpointConfig, Expect, Identity,
    Limits, RandomId as _, Role, TokenBook, TransportRuntime,
};

use crate::bed::{Bed, Head, is_running, node_config, soon};

#[tokio::test]
async fn workers_live_on_while_the_head_is_away_and_it_learns_everything_after() {
    let bed = Bed::start().await;
    let job = bed.healthy(3, "").await;
    let mut calls = job.attach().await;
    let first = soon(bed.head.registrations.lock().await.recv())
        .await
        .unwrap();
    let (id, pid) = (job.id, job.pids[0]);
    drop(job);
    let Bed {
        runtime,
        head: old,
        node,
        driver: _driver,
        ..
    } = bed;
    // The head dies.
    let address = old.endpoint.local_addr();
    let authority = old.authority.clone();
    old.endpoint.close(CloseCode::Internal, "");
    drop(old);
    // Meanwhile calls go on, and workers end.
    assert_eq!(calls.call(0, "rank").await, "0");
    calls.send(&[1], "die", b"").await;
    assert_eq!(calls.loss().await.0.rank.0, 1);
    calls.send(&[2], "exit:4", b"").await;
    assert_eq!(calls.loss().await.0.rank.0, 2);
    // A new head at the same address, as soon as the old one has let go of it.
    let config = EndpointConfig {
        listen: address,
        ..EndpointConfig::default()
    };
    soon(async {
        while std::net::UdpSocket::bind(address).is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    let head = Head::start(&runtime, authority, config);
    let again = soon(head.registrations.lock().await.recv()).await.unwrap();
    assert_eq!(again.node, first.node);
    assert_eq!(again.jobs, [id]);
    for rank in [1, 2] {
        let event = head.event().await;
        assert!(
            matches!(&event, NodeEvent::WorkerExited { failure, .. } if failure.rank.0 == rank),
            "{event:?}"
        );
    }
    assert!(is_running(pid));
    let reason = "nobody knows it".to_owned();
    let reply = head
        .ask(NodeRequest::Stop {
            job: id,
            reason,
            interrupt: false,
        })
        .await;
    assert_eq!(reply, NodeReply::Done);
    assert!(!is_running(pid));
    assert_eq!(node.id(), first.node);
    soon(node.stop()).await;
}

#[tokio::test]
async fn a_head_that_leaves_heartbeats_unanswered_is_left_and_found_again() {
    let runtime = TransportRuntime::new(1).unwrap();
    let authority = Arc::new(Authority::create(ClusterId::random()).unwrap());
    let config = EndpointConfig::default();
    let head = Head::start_with_lease(&runtime, authority, config, 300);
    let node = soon(Node::start(node_config(&runtime, &head)))
        .await
        .unwrap();
    head.mute.store(true, Ordering::Relaxed);
    // QUIC itself is well, so that only the heartbeats can tell.
    for _ in 0..2 {
        let registration = soon(head.registrations.lock().await.recv()).await;
        assert_eq!(registration.unwrap().node, node.id());
    }
    soon(node.stop()).await;
}

/// The head's session with it is over, but the connection is not yet.
#[tokio::test]
async fn what_the_head_takes_in_no_session_any_more_it_is_told_in_the_next() {
    let bed = Bed::start().await;
    let job = bed.healthy(1, "").await;
    soon(bed.head.registrations.lock().await.recv())
        .await
        .unwrap();
    bed.head.forbid.store(true, Ordering::Relaxed);
    let mut calls = job.attach().await;
    calls.send(&[0], "exit:4", b"").await;
    soon(bed.head.registrations.lock().await.recv())
        .await
        .unwrap();
    bed.head.forbid.store(false, Ordering::Relaxed);
    let (failure, expected) = bed.exit().await;
    assert_eq!((failure.rank.0, expected), (0, false));
    job.stop().await;
    bed.end().await;
}

#[tokio::test]
async fn a_node_whose_place_another_has_taken_does_not_fight_for_it() {
    let runtime = TransportRuntime::new(1).unwrap();
    let authority = Arc::new(Authority::create(ClusterId::random()).unwrap());
    let head = Head::start(&runtime, authority, EndpointConfig::default());
    let node = soon(Node::start(node_config(&runtime, &head)))
        .await
        .unwrap();
    soon(head.registrations.lock().await.recv()).await.unwrap();
    let start = Instant::now();
    head.hang_up(CloseCode::Duplicate).await;
    soon(head.registrations.lock().await.recv()).await.unwrap();
    let pause = start.elapsed();
    assert!(pause >= Duration::from_secs(2), "again after {pause:?}");
    soon(node.stop()).await;
}

#[tokio::test]
async fn nobody_but_the_head_commands_and_other_nodes_may_only_see_whether_they_get_through() {
    let bed = Bed::start().await;
    let connection = bed.connect().await;
    let request = NodeRequest::Stop {
        job: kolo_transport::ids::JobId(1),
        reason: String::new(),
        interrupt: false,
    };
    let limit = Duration::from_secs(60);
    let reply = connection.request(&request, limit).await.unwrap();
    let NodeReply::Refused(refusal) = reply else {
        panic!("{reply:?}");
    };
    assert_eq!(refusal.kind, RefusalKind::Forbidden);
    // The head has no say over a connection that a driver opened, and no calls.
    let reply = bed
        .head
        .ask(NodeRequest::HasProgram {
            hash: bed.program.hash,
        })
        .await;
    assert!(
        matches!(&reply, NodeReply::Refused(refusal) if refusal.kind == RefusalKind::Forbidden),
        "{reply:?}"
    );
    let as_role = |role, name: String| {
        let credentials = bed.head.authority.issue(role, &name).unwrap();
        Endpoint::bind(&bed.runtime, credentials, EndpointConfig::default()).unwrap()
    };
    // Another node learns how it is seen, and no more.
    let other = as_role(Role::Node, NodeId::random().to_string());
    let expect = Expect::node(bed.node.id());
    let connection = other
        .connect(bed.node.address(), expect.clone())
        .await
        .unwrap();
    let reply = connection.request(&NodeRequest::Echo, limit).await.unwrap();
    let NodeReply::Echo(echo) = reply else {
        panic!("{reply:?}");
    };
    assert_eq!(echo.seen, other.local_addr());
    assert_eq!(echo.local, Some(bed.node.address().ip()));
    assert_eq!(echo.interface.as_deref(), Some("lo"));
    let probe = NodeRequest::Probe(Probe {
        targets: Vec::new(),
        limit_ms: 1,
    });
    let hash = bed.program.hash;
    for request in [request, probe, NodeRequest::HasProgram { hash }] {
        let reply: NodeReply = connection.request(&request, limit).await.unwrap();
        assert!(
            matches!(&reply, NodeReply::Refused(refusal) if refusal.kind == RefusalKind::Forbidden),
            "{request:?}: {reply:?}"
        );
    }
    // Workers are sent away.
    let name = Identity::worker_name(kolo_transport::ids::JobId(1), Slot(0));
    let worker = as_role(Role::Worker, name);
    let lost = match worker.connect(bed.node.address(), expect).await {
        Ok(connection) => soon(connection.closed()).await,
        Err(ConnectError::Lost { lost, .. }) => lost,
        Err(error) => panic!("{error}"),
    };
    assert!(
        matches!(
            lost,
            ConnectionLost::Closed {
                code: CloseCode::Forbidden,
                ..
            }
        ),
        "{lost}"
    );
    bed.end().await;
}

#[tokio::test]
async fn what_is_no_request_is_refused() {
    let bed = Bed::start().await;
    let connection = bed.connect().await;
    let limit = Duration::from_secs(60);
    let reply: NodeReply = connection
        .request(&HeadRequest::Cluster, limit)
        .await
        .unwrap();
    assert!(
        matches!(&reply, NodeReply::Refused(refusal) if refusal.kind == RefusalKind::UnknownRequest),
        "{reply:?}"
    );
    // A frame over the limit is not read.
    let mut stream = connection.open(Limits::CONTROL).await.unwrap();
    stream.send.send_encoded(&[0xff; 8]).await.unwrap();
    let end = soon(stream.recv.expect::<NodeReply>()).await;
    assert!(end.is_err());
    // And the connection is as good as before.
    let hash = bed.program.hash;
    let reply: NodeReply = connection
        .request(&NodeRequest::HasProgram { hash }, limit)
        .await
        .unwrap();
    assert_eq!(reply, NodeReply::HasProgram(true));
    bed.end().await;
}

fn lonely(runtime: &TransportRuntime) -> Head {
    let authority = Arc::new(Authority::create(ClusterId::random()).unwrap());
    Head::start(runtime, authority, EndpointConfig::default())
}

#[tokio::test]
async fn a_head_that_is_not_there_is_an_error_in_bounded_time() {
    let runtime = TransportRuntime::new(1).unwrap();
    let head = lonely(&runtime);
    let mut config = node_config(&runtime, &head);
    // A port that nobody has.
    let free = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    config.head = free.local_addr().unwrap();
    drop(free);
    config.join_timeout = Duration::from_millis(300);
    let begin = Instant::now();
    let error = soon(Node::start(config)).await.unwrap_err();
    assert!(matches!(error, NodeError::Connect(_)), "{error}");
    assert!(error.is_retryable());
    assert!(
        error.to_string().contains("the head could not be reached"),
        "{error}"
    );
    // The time of one attempt on top.
    assert!(begin.elapsed() < Duration::from_secs(10));
}

#[tokio::test]
async fn wrong_credentials_and_settings_are_errors() {
    let runtime = TransportRuntime::new(1).unwrap();
    let head = lonely(&runtime);
    let start = async |change: &dyn Fn(&mut NodeConfig)| {
        let mut config = node_config(&runtime, &head);
        config.join_timeout = Duration::from_secs(20);
        change(&mut config);
        soon(Node::start(config)).await.unwrap_err()
    };
    let name = DriverId::random().to_string();
    let of_a_driver = head.authority.issue(Role::Driver, &name).unwrap();
    let error = start(&|config| config.credentials = of_a_driver.clone().into()).await;
    assert!(
        matches!(error, NodeError::Identity(Role::Driver)),
        "{error}"
    );

    // A token of that kind is not used up: the head, which takes no joiners, is not asked.
    let (day, fingerprint) = (Duration::from_secs(86_400), head.authority.fingerprint());
    let token = TokenBook::new().create(Role::Driver, day, None, fingerprint, 0, random_secret());
    let error = start(&|config| config.credentials = token.clone().into()).await;
    assert!(
        matches!(error, NodeError::Identity(Role::Driver)),
        "{error}"
    );

    let other = Authority::create(ClusterId::random()).unwrap();
    let name = NodeId::random().to_string();
    let foreign = other.issue(Role::Node, &name).unwrap();
    let error = start(&|config| config.credentials = foreign.clone().into()).await;
    assert!(matches!(error, NodeError::Connect(_)), "{error}");
    assert!(!error.is_retryable(), "{error}");

    let error = start(&|config| config.resources.cpus = Some(f64::NAN)).await;
    assert!(error.to_string().contains("cpus is NaN"), "{error}");

    let error = start(&|config| config.programs.cache = Some("/proc/programs".into())).await;
    assert!(matches!(error, NodeError::Programs(_)), "{error}");

    let error = start(&|config| config.listen = "192.0.2.1:1".parse().unwrap()).await;
    assert!(matches!(error, NodeError::Bind(_)), "{error}");
}

#[tokio::test]
async fn a_start_that_is_given_up_leaves_nothing() {
    let runtime = TransportRuntime::new(1).unwrap();
    let head = lonely(&runtime);
    let free = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let listen = free.local_addr().unwrap();
    drop(free);
    for patience in [0, 1, 2, 5, 10, 20] {
        let mut config = node_config(&runtime, &head);
        config.listen = listen;
        let start = Node::start(config);
        drop(tokio::time::timeout(Duration::from_millis(patience), start).await);
    }
    // The address is free again as soon as the connections that were begun are closed.
    let node = soon(async {
        loop {
            let mut config = node_config(&runtime, &head);
            config.listen = listen;
            match Node::start(config).await {
                Ok(node) => return node,
                Err(NodeError::Bind(_)) => tokio::time::sleep(Duration::from_millis(10)).await,
                Err(error) => panic!("{error}"),
            }
        }
    })
    .await;
    assert_eq!(node.address(), listen);
    soon(node.stop()).await;
}
