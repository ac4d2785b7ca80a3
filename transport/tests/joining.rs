//! Joining with a token.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod common;

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use common::{Cluster, Joins, anonymous, end_of, raw_connect, within};
use kolo_transport::endpoint::ALPN_JOIN;
use kolo_transport::frame::encode;
use kolo_transport::wire::{JoinReply, JoinRequest, RefusalKind};
use kolo_transport::{
    CloseCode, ConnectError, Endpoint, Expect, JoinError, JoinHandler, JoinToken, Role, join,
    join_any,
};

const HOUR: Duration = Duration::from_secs(3600);

fn head(cluster: &Cluster, joins: &Arc<Joins>) -> Endpoint {
    cluster.bind_with(cluster.head(), |config| {
        config.join = Some(Arc::clone(joins) as _);
    })
}

async fn try_join(cluster: &Cluster, address: SocketAddr, token: &JoinToken) -> JoinError {
    within(join(&cluster.runtime, address, token))
        .await
        .unwrap_err()
}

#[tokio::test]
async fn a_node_and_a_driver_join_and_are_members() {
    let cluster = Cluster::new();
    let joins = Joins::new(&cluster);
    let head = head(&cluster, &joins);
    for role in [Role::Node, Role::Driver] {
        let token = joins.token(role, HOUR, Some(1));
        // It travels as text.
        let token: JoinToken = token.to_string().parse().unwrap();
        let credentials = within(join(&cluster.runtime, head.local_addr(), &token))
            .await
            .unwrap();
        assert_eq!(credentials.identity().role, role);
        assert_eq!(credentials.identity().cluster, cluster.authority.cluster());
        assert_eq!(credentials.authority(), cluster.authority.certificate());
        let member = cluster.bind(credentials);
        let (accepted, connected) = within(async {
            tokio::join!(
                head.accept(),
                member.connect(head.local_addr(), Expect::head())
            )
        })
        .await;
        connected.unwrap();
        assert_eq!(accepted.unwrap().peer(), member.identity());
    }
}

#[tokio::test]
async fn bad_tokens_are_refused_with_the_reason() {
    let cluster = Cluster::new();
    let joins = Joins::new(&cluster);
    let head = head(&cluster, &joins);
    let unknown = Joins::new(&cluster).token(Role::Node, HOUR, None);
    let expired = joins.token(Role::Node, Duration::ZERO, None);
    let used_up = joins.token(Role::Node, HOUR, Some(1));
    let wrong_role: JoinToken = joins
        .token(Role::Driver, HOUR, None)
        .to_string()
        .replace(".driver.", ".node.")
        .parse()
        .unwrap();
    within(join(&cluster.runtime, head.local_addr(), &used_up))
        .await
        .unwrap();
    for (token, reason) in [
        (unknown, "not known here"),
        (expired, "has expired"),
        (used_up, "used up"),
        (wrong_role, "for a driver, not for a node"),
    ] {
        let error = try_join(&cluster, head.local_addr(), &token).await;
        let JoinError::Refused(refusal) = &error else {
            panic!("{error}");
        };
        assert_eq!(refusal.kind, RefusalKind::Token);
        assert!(error.to_string().contains(reason), "{error}");
        assert!(!error.is_retryable());
        let secret: String = token.to_string().rsplit('.').next().unwrap().to_owned();
        assert!(!format!("{error:?} {error}").contains(&secret));
    }
}

#[tokio::test]
async fn a_head_of_another_cluster_never_sees_the_secret() {
    struct Trap;
    impl JoinHandler for Trap {
        fn join(&self, _: JoinRequest, _: SocketAddr) -> JoinReply {
            panic!("it has the secret");
        }
    }
    let (cluster, other) = (Cluster::new(), Cluster::new());
    let token = Joins::new(&cluster).token(Role::Node, HOUR, None);
    let pretender = other.bind_with(other.head(), |config| config.join = Some(Arc::new(Trap)));
    let address = pretender.local_addr();
    let error = try_join(&cluster, address, &token).await;
    assert!(
        matches!(error, JoinError::Fingerprint { address: a } if a == address),
        "{error}"
    );
    assert!(!error.is_retryable());
    // Nor does a member of the right cluster that is not its head.
    let node = cluster.bind_with(cluster.node(1), |config| config.join = Some(Arc::new(Trap)));
    let error = try_join(&cluster, node.local_addr(), &token).await;
    assert!(
        matches!(&error, JoinError::NotHead { found, .. } if **found == *node.identity()),
        "{error}"
    );
}

#[tokio::test]
async fn a_listener_that_lets_nobody_join_says_so() {
    let cluster = Cluster::new();
    let token = Joins::new(&cluster).token(Role::Node, HOUR, None);
    let head = cluster.bind(cluster.head());
    let address = head.local_addr();
    let error = try_join(&cluster, address, &token).await;
    assert!(
        matches!(&error, JoinError::Connect(ConnectError::Version { .. })),
        "{error}"
    );
    // Nobody there at all.
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let error = try_join(&cluster, silent.local_addr().unwrap(), &token).await;
    assert!(
        matches!(&error, JoinError::Connect(ConnectError::TimedOut { .. })),
        "{error}"
    );
    assert!(error.is_retryable());
}

#[tokio::test]
async fn a_handler_that_panics_refuses_and_the_head_goes_on() {
    struct Panics;
    impl JoinHandler for Panics {
        fn join(&self, _: JoinRequest, _: SocketAddr) -> JoinReply {
            panic!("as intended");
        }
    }
    let cluster = Cluster::new();
    let token = Joins::new(&cluster).token(Role::Node, HOUR, None);
    let head = cluster.bind_with(cluster.head(), |config| {
        config.join = Some(Arc::new(Panics));
    });
    for _ in 0..2 {
        let error = try_join(&cluster, head.local_addr(), &token).await;
        assert!(
            matches!(&error, JoinError::Refused(refusal) if refusal.kind == RefusalKind::Internal),
            "{error}"
        );
    }
}

#[tokio::test]
async fn an_answer_for_somebody_else_is_refused_by_the_joiner() {
    struct Confused(Joins);
    impl JoinHandler for Confused {
        fn join(&self, request: JoinRequest, _: SocketAddr) -> JoinReply {
            let credentials = self
                .0
                .authority
                .issue(request.role, "driver-0000000000000001");
            let other = kolo_transport::CertificateRequest::generate().unwrap();
            let name = credentials.unwrap().identity().name.clone();
            let certificate = self
                .0
                .authority
                .sign(other.der(), request.role, &name, HOUR);
            JoinReply::Joined {
                cluster: self.0.authority.cluster(),
                name,
                certificate: certificate.unwrap().to_vec(),
            }
        }
    }
    let cluster = Cluster::new();
    let joins = Joins::new(&cluster);
    let token = joins.token(Role::Driver, HOUR, None);
    let confused = Confused(Arc::into_inner(joins).unwrap());
    let head = cluster.bind_with(cluster.head(), |config| {
        config.join = Some(Arc::new(confused));
    });
    let error = try_join(&cluster, head.local_addr(), &token).await;
    assert!(matches!(error, JoinError::Answer(_)), "{error}");
    assert!(
        error.to_string().contains("for another private key"),
        "{error}"
    );
}

/// A joiner that does as it likes.
async fn raw_joiner(cluster: &Cluster, head: &Endpoint) -> quinn::Connection {
    let config = anonymous(&cluster.authority, ALPN_JOIN);
    raw_connect(config, head.local_addr()).await.unwrap()
}

#[tokio::test]
async fn bad_join_requests_end_the_connection() {
    let cluster = Cluster::new();
    let joins = Joins::new(&cluster);
    let head = head(&cluster, &joins);
    let misplaced_secret = {
        let mut frame = bytes::BytesMut::new();
        let head = serde_json::json!({"role": "hunter2", "secret": "", "csr": ""});
        encode(&mut frame, &head, &[]).unwrap();
        frame.to_vec()
    };
    for (bytes, reason) in [
        (vec![0, 1, 0, 1, 0, 0, 0, 0], "over the limit of 65536"),
        (vec![0, 0, 0, 1, 0, 0, 0, 1], "over the limit of 0"),
        (vec![0, 0, 0, 1, 0, 0, 0, 0, 0xc1], "malformed"),
        (misplaced_secret, "malformed"),
        (vec![0, 0, 0, 9, 0, 0, 0, 0, 1], "ended after 9 bytes"),
        (vec![], "ended after 0 bytes"),
    ] {
        let connection = raw_joiner(&cluster, &head).await;
        let (mut send, _recv) = connection.open_bi().await.unwrap();
        send.write_all(&bytes).await.unwrap();
        send.finish().unwrap();
        let (code, text) = end_of(&connection).await;
        assert_eq!(code, CloseCode::Protocol);
        assert!(text.contains(reason), "{text}");
        assert!(!text.contains("hunter2"));
    }
    let token = joins.token(Role::Node, HOUR, None);
    within(join(&cluster.runtime, head.local_addr(), &token))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_joiner_that_sends_a_byte_now_and_then_is_cut_off() {
    let cluster = Cluster::new();
    let joins = Joins::new(&cluster);
    let head = cluster.bind_with(cluster.head(), |config| {
        config.join = Some(Arc::clone(&joins) as _);
        config.handshake_timeout = Duration::from_secs(3);
    });
    let slow = raw_joiner(&cluster, &head).await;
    let (mut send, _recv) = slow.open_bi().await.unwrap();
    let dribble = tokio::spawn(async move {
        let mut tick = tokio::time::interval(Duration::from_millis(50));
        for byte in [0, 0, 0xff, 0xff, 0, 0, 0, 0]
            .into_iter()
            .chain([0xa0].repeat(1000))
        {
            tick.tick().await;
            if send.write_all(&[byte]).await.is_err() {
                break;
            }
        }
    });
    // Others are served meanwhile.
    let token = joins.token(Role::Node, HOUR, None);
    within(join(&cluster.runtime, head.local_addr(), &token))
        .await
        .unwrap();
    let (code, _) = end_of(&slow).await;
    assert_eq!(code, CloseCode::Deadline);
    within(dribble).await.unwrap();
}

#[tokio::test]
async fn a_joiner_has_one_stream() {
    let cluster = Cluster::new();
    let joins = Joins::new(&cluster);
    let head = cluster.bind_with(cluster.head(), |config| {
        config.join = Some(joins);
        config.handshake_timeout = Duration::from_millis(500);
    });
    let greedy = raw_joiner(&cluster, &head).await;
    let (mut send, _recv) = greedy.open_bi().await.unwrap();
    // It announces a head of almost 64 KiB, which is in the limits, and does not send it.
    send.write_all(&[0, 0, 0xff, 0xff, 0, 0, 0, 0])
        .await
        .unwrap();
    let lost = within(async {
        tokio::select! {
            Ok(_) = greedy.open_bi() => panic!("a second stream was allowed"),
            Ok(_) = greedy.open_uni() => panic!("a stream in one direction was allowed"),
            lost = greedy.closed() => lost,
        }
    })
    .await;
    assert!(
        matches!(lost, quinn::ConnectionError::ApplicationClosed(_)),
        "{lost}"
    );
}

#[tokio::test]
async fn of_many_addresses_the_one_that_leads_to_the_head_is_found_and_the_token_used_once() {
    let cluster = Cluster::new();
    let joins = Joins::new(&cluster);
    let head = head(&cluster, &joins);
    let other = Cluster::new();
    let stranger = {
        let joins = Joins::new(&other);
        other.bind_with(other.head(), |config| config.join = Some(joins))
    };
    // One says nothing, one belongs to another cluster.
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let addresses = [
        silent.local_addr().unwrap(),
        stranger.local_addr(),
        head.local_addr(),
    ];
    let token = joins.token(Role::Node, HOUR, Some(1));
    let start = Duration::from_millis(20);
    let (address, credentials) = within(join_any(&cluster.runtime, &addresses, &token, start))
        .await
        .unwrap();
    assert_eq!(address, head.local_addr());
    assert_eq!(credentials.identity().role, Role::Node);
    // It was good for one use, and that it is used up is the head's own word, whichever address failed first.
    let error = within(join_any(&cluster.runtime, &addresses, &token, start))
        .await
        .unwrap_err();
    assert!(error.to_string().contains("used up"), "{error}");
    let error = within(join_any(&cluster.runtime, &addresses[..2], &token, start))
        .await
        .unwrap_err();
    assert!(matches!(error, JoinError::Fingerprint { address } if address == addresses[1]));
}
