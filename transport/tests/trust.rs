//! Who is let in and who is not, on both sides.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod common;

use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use common::{Cluster, Joins, anonymous, end_of, raw_connect, within};
use kolo_transport::endpoint::{ALPN, Whose};
use kolo_transport::frame::{InvalidFrame, encode};
use kolo_transport::identity::HEAD_NAME;
use kolo_transport::ids::{DriverId, JobId, NodeId, Slot};
use kolo_transport::wire::{HeadReply, HeadRequest};
use kolo_transport::{
    CertificateRequest, CloseCode, ConnectError, Connection, Endpoint, Expect, FrameError,
    Identity, Limits, Role, join, tls,
};

/// Connects to `server` while it accepts; gives what the client sees. The server must see nobody.
async fn refused(client: &Endpoint, server: &Endpoint, expect: Expect) -> ConnectError {
    within(async {
        tokio::select! {
            accepted = server.accept() => panic!("{accepted:?} was let in"),
            connected = client.connect(server.local_addr(), expect) => connected.unwrap_err(),
        }
    })
    .await
}

/// `server` still takes a good member.
async fn still_serves(cluster: &Cluster, server: &Endpoint) {
    let member = cluster.bind(cluster.driver(99));
    let (accepted, connected) = within(async {
        tokio::join!(
            server.accept(),
            member.connect(
                server.local_addr(),
                Expect {
                    role: server.identity().role,
                    name: None
                }
            )
        )
    })
    .await;
    connected.unwrap();
    assert_eq!(accepted.unwrap().peer(), member.identity());
}

#[tokio::test]
async fn members_of_another_cluster_are_refused_by_both_sides() {
    let (here, there) = (Cluster::new(), Cluster::new());
    let head = here.bind(here.head());
    let stranger = there.bind(there.driver(1));
    let error = refused(&stranger, &head, Expect::head()).await;
    assert!(
        matches!(&error, ConnectError::Certificate { reason, .. } if reason.contains("UnknownIssuer")),
        "{error}"
    );
    assert!(!error.is_retryable());
    assert!(error.to_string().contains(&head.local_addr().to_string()));
    assert!(error.to_string().contains("log in again"), "{error}");

    // A client that does not care who it talks to is refused by the server.
    let mut careless = tls::client_config(there.driver(1), &[ALPN]).unwrap();
    let trusting = anonymous(&here.authority, ALPN);
    careless = rustls::ClientConfig::builder_with_provider(tls::provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates({
            let mut roots = rustls::RootCertStore::empty();
            roots.add(here.authority.certificate()).unwrap();
            roots
        })
        .with_client_cert_resolver(careless.client_auth_cert_resolver);
    careless.alpn_protocols = trusting.alpn_protocols.clone();
    let connection = raw_connect(careless, head.local_addr()).await.unwrap();
    let lost = within(connection.closed()).await;
    assert!(
        matches!(&lost, quinn::ConnectionError::ConnectionClosed(close) if u64::from(close.error_code) >= 0x100),
        "{lost}"
    );
    still_serves(&here, &head).await;
}

/// How connecting fails, as soon as it does.
async fn ends(client: &Endpoint, server: &Endpoint) -> ConnectError {
    within(async {
        loop {
            match client.connect(server.local_addr(), Expect::head()).await {
                Ok(_) => tokio::time::sleep(Duration::from_millis(100)).await,
                Err(error) => break error,
            }
        }
    })
    .await
}

#[tokio::test]
async fn a_certificate_that_has_expired_is_an_error_of_connect() {
    let cluster = Cluster::new();
    let head = cluster.bind(cluster.head());
    let (name, seconds) = (DriverId(1).to_string(), Duration::from_secs(3));
    let driver = cluster.authority.issue_for(Role::Driver, &name, seconds);
    let driver = cluster.bind(driver.unwrap());
    let error = ends(&driver, &head).await;
    let whose = |error: &ConnectError| match error {
        ConnectError::Date { dated, whose, .. } if !dated.is_early() => *whose,
        other => panic!("{other}"),
    };
    assert_eq!(whose(&error), Whose::Own, "{error}");
    assert!(!error.is_retryable());

    // The other way round: only who looks at clocks does not mind.
    let second = Duration::from_secs(1);
    let head = cluster.authority.issue_for(Role::Head, HEAD_NAME, second);
    let head = cluster.bind(head.unwrap());
    let driver = cluster.bind(cluster.driver(2));
    let error = ends(&driver, &head).await;
    assert_eq!(whose(&error), Whose::Theirs, "{error}");
    let looks = cluster.bind_with(cluster.driver(3), |config| config.dates_count = false);
    let connected = looks.connect(head.local_addr(), Expect::head());
    assert_eq!(within(connected).await.unwrap().peer(), head.identity());
    // Of another cluster it takes nobody all the same.
    let other = Cluster::new();
    let stranger = other.bind(other.head());
    let error = refused(&looks, &stranger, Expect::head()).await;
    assert!(
        matches!(&error, ConnectError::Certificate { .. }),
        "{error}"
    );
}

#[tokio::test]
async fn a_member_that_is_not_the_one_looked_for_is_refused_by_the_client() {
    let cluster = Cluster::new();
    let node = cluster.bind(cluster.node(7));
    let driver = cluster.bind(cluster.driver(1));
    for expect in [
        Expect::head(),
        Expect::node(NodeId(8)),
        Expect::worker(JobId(7), Slot(0)),
    ] {
        let error = within(driver.connect(node.local_addr(), expect.clone()))
            .await
            .unwrap_err();
        let ConnectError::WrongPeer { found, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(**found, *node.identity());
        assert!(error.to_string().contains(&expect.to_string()), "{error}");
        assert!(!error.is_retryable());
    }
    for expect in [
        Expect::node(NodeId(7)),
        Expect {
            role: Role::Node,
            name: None,
        },
    ] {
        within(driver.connect(node.local_addr(), expect))
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn a_worker_is_known_by_its_job_and_slot() {
    let cluster = Cluster::new();
    let name = Identity::worker_name(JobId(3), Slot(1));
    let worker = cluster.bind(cluster.authority.issue(Role::Worker, &name).unwrap());
    // As a worker gets it: the key is its own, the head signs.
    let request = CertificateRequest::generate().unwrap();
    let name = Identity::worker_name(JobId(3), Slot(2));
    let certificate = cluster
        .authority
        .sign(request.der(), Role::Worker, &name, Duration::from_secs(60))
        .unwrap();
    let credentials = request
        .finish(&certificate, &cluster.authority.certificate())
        .unwrap();
    let other = cluster.bind(credentials);
    let (accepted, connected) = within(async {
        tokio::join!(
            worker.accept(),
            other.connect(worker.local_addr(), Expect::worker(JobId(3), Slot(1)))
        )
    })
    .await;
    connected.unwrap();
    assert_eq!(accepted.unwrap().peer().worker(), Some((JobId(3), Slot(2))));
}

#[tokio::test]
async fn no_certificate_no_entry() {
    let cluster = Cluster::new();
    for joins in [false, true] {
        let head = cluster.bind_with(cluster.head(), |config| {
            config.join = joins.then(|| Joins::new(&cluster) as _);
        });
        let config = anonymous(&cluster.authority, ALPN);
        // The client's side of the handshake ends first: what counts is what comes after it.
        let connection = raw_connect(config, head.local_addr()).await.unwrap();
        let mut stream = connection.open_bi().await;
        if let Ok((send, _)) = &mut stream {
            let mut frame = bytes::BytesMut::new();
            encode(&mut frame, &HeadRequest::Jobs, &[]).unwrap();
            drop(send.write_all(&frame).await);
        }
        match within(connection.closed()).await {
            quinn::ConnectionError::ApplicationClosed(close) if joins => {
                assert_eq!(
                    CloseCode::from_number(close.error_code.into_inner()),
                    CloseCode::Unauthenticated
                );
                let reason = String::from_utf8_lossy(&close.reason);
                assert!(reason.contains("no certificate"), "{reason}");
            }
            // TLS alert 116: certificate required.
            quinn::ConnectionError::ConnectionClosed(close) if !joins => {
                assert_eq!(u64::from(close.error_code), 0x100 + 116);
            }
            other => panic!("{other}"),
        }
        still_serves(&cluster, &head).await;
    }
}

#[tokio::test]
async fn another_version_of_the_protocol_is_refused_with_a_clear_error() {
    let cluster = Cluster::new();
    let head = cluster.bind(cluster.head());
    // An old client at a new server.
    let old = tls::client_config(cluster.driver(1), &[b"kolo/0"]).unwrap();
    let error = raw_connect(old, head.local_addr()).await.unwrap_err();
    assert!(error.to_string().contains("error 120"), "{error}");
    // A new client at an old server.
    let tls = tls::server_config(cluster.head(), tls::ClientAuth::Required, &[b"kolo/0"]).unwrap();
    let tls = quinn::crypto::rustls::QuicServerConfig::try_from(tls).unwrap();
    let old = quinn::Endpoint::server(
        quinn::ServerConfig::with_crypto(std::sync::Arc::new(tls)),
        "127.0.0.1:0".parse().unwrap(),
    )
    .unwrap();
    let address = old.local_addr().unwrap();
    let serving = tokio::spawn(async move {
        let incoming = old.accept().await.unwrap();
        incoming.await.unwrap_err()
    });
    let driver = cluster.bind(cluster.driver(2));
    let error = within(driver.connect(address, Expect::head()))
        .await
        .unwrap_err();
    assert_eq!(error, ConnectError::Version { address });
    assert!(
        error.to_string().contains("use the same version of kolo"),
        "{error}"
    );
    within(serving).await.unwrap();
    still_serves(&cluster, &head).await;
}

#[tokio::test]
async fn a_head_that_is_not_there_is_an_error_in_bounded_time() {
    let cluster = Cluster::new();
    let driver = cluster.bind_with(cluster.driver(1), |config| {
        config.handshake_timeout = Duration::from_millis(300);
    });
    // A port that nobody else can get meanwhile, and that does not speak QUIC.
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap();
    let error = within(driver.connect(address, Expect::head()))
        .await
        .unwrap_err();
    assert_eq!(error, ConnectError::TimedOut { address });
    assert!(error.is_retryable());
    let nowhere: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let error = within(driver.connect(nowhere, Expect::head()))
        .await
        .unwrap_err();
    assert!(matches!(error, ConnectError::Address { .. }), "{error}");
}

#[tokio::test]
async fn garbage_on_the_port_disturbs_nobody() {
    let cluster = Cluster::new();
    let head = cluster.bind(cluster.head());
    let noise = UdpSocket::bind("127.0.0.1:0").unwrap();
    for length in 0..1200_usize {
        let packet: Vec<u8> = (0..length).map(|i| (i * 31 + length) as u8).collect();
        noise.send_to(&packet, head.local_addr()).unwrap();
    }
    still_serves(&cluster, &head).await;
}

const LONG: Duration = Duration::from_secs(20);

/// A member's stream with these bytes on it, as the server's frame reader sees it.
async fn sent_as_frame(bytes: &[u8], finish: bool, limit: Duration) -> (Connection, FrameError) {
    let cluster = Cluster::new();
    let head = cluster.bind(cluster.head());
    let client = tls::client_config(cluster.driver(1), &[ALPN]).unwrap();
    let connection = raw_connect(client, head.local_addr()).await.unwrap();
    let server = within(head.accept()).await.unwrap();
    let (mut send, _recv) = within(connection.open_bi()).await.unwrap();
    send.write_all(bytes).await.unwrap();
    if finish {
        send.finish().unwrap();
    }
    let mut stream = within(server.accept(Limits::CONTROL)).await.unwrap();
    let error = within(stream.recv.expect_within::<HeadRequest>(limit))
        .await
        .unwrap_err();
    // One bad stream ends nothing but itself.
    let (mut send, mut recv) = within(connection.open_bi()).await.unwrap();
    let mut frame = bytes::BytesMut::new();
    encode(&mut frame, &HeadRequest::Jobs, &[]).unwrap();
    send.write_all(&frame).await.unwrap();
    let mut good = within(server.accept(Limits::CONTROL)).await.unwrap();
    within(good.recv.expect::<HeadRequest>()).await.unwrap();
    good.send.send(&HeadReply::Done, &[]).await.unwrap();
    good.send.finish();
    assert!(!within(recv.read_to_end(1000)).await.unwrap().is_empty());
    (server, error)
}

#[tokio::test]
async fn bad_frames_are_told_apart_and_the_connection_lives() {
    // Over the cap: refused by its length alone.
    let (_, error) = sent_as_frame(&[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0], false, LONG).await;
    assert!(
        matches!(
            error,
            FrameError::Invalid(InvalidFrame::TooLong {
                part: "head",
                limit: 4_194_304,
                ..
            })
        ),
        "{error}"
    );
    // A body where none may be.
    let (_, error) = sent_as_frame(&[0, 0, 0, 1, 0, 0, 0, 1, 0xc0, 0], false, LONG).await;
    assert!(
        matches!(
            error,
            FrameError::Invalid(InvalidFrame::TooLong { part: "body", .. })
        ),
        "{error}"
    );
    // Truncated.
    let (_, error) = sent_as_frame(&[0, 0, 0, 9, 0, 0, 0, 0, 0xa4], true, LONG).await;
    assert_eq!(error, FrameError::Truncated { got: 9 });
    // Not MessagePack.
    let (_, error) = sent_as_frame(&[0, 0, 0, 1, 0, 0, 0, 0, 0xc1], true, LONG).await;
    assert!(
        matches!(error, FrameError::Invalid(InvalidFrame::Malformed { .. })),
        "{error}"
    );
    // An unknown message.
    let mut unknown = bytes::BytesMut::new();
    encode(&mut unknown, &"Abdicate", &[]).unwrap();
    let (_, error) = sent_as_frame(&unknown, true, LONG).await;
    let text = error.to_string();
    assert!(
        text.contains("Abdicate") && text.contains("HeadRequest"),
        "{text}"
    );
    // A frame that does not come to its end.
    let (_, error) = sent_as_frame(
        &[0, 0, 0, 9, 0, 0, 0, 0, 0xa4],
        false,
        Duration::from_millis(300),
    )
    .await;
    assert!(matches!(error, FrameError::TimedOut { .. }), "{error}");
}

#[tokio::test]
async fn a_listener_that_is_full_refuses_and_recovers() {
    let cluster = Cluster::new();
    let joins = Joins::new(&cluster);
    let head = cluster.bind_with(cluster.head(), |config| {
        config.join = Some(joins);
        config.max_handshakes = 1;
        config.handshake_timeout = Duration::from_secs(3);
        config.handshake_patience = Duration::from_secs(3);
    });
    // A joiner that says nothing takes the only place until its deadline.
    let config = anonymous(&cluster.authority, b"kolo-join/1");
    let silent = raw_connect(config, head.local_addr()).await.unwrap();
    let driver = cluster.bind(cluster.driver(1));
    let error = within(driver.connect(head.local_addr(), Expect::head()))
        .await
        .unwrap_err();
    assert_eq!(
        error,
        ConnectError::Busy {
            address: head.local_addr()
        }
    );
    assert!(error.is_retryable());
    assert_eq!(end_of(&silent).await.0, CloseCode::Deadline);
    still_serves(&cluster, &head).await;
}

#[tokio::test]
async fn a_flood_from_one_address_leaves_room_for_others() {
    let cluster = Cluster::new();
    let joins = Joins::new(&cluster);
    let head = cluster.bind_with(cluster.head(), |config| {
        config.join = Some(joins);
        config.max_handshakes_per_address = 3;
        config.handshake_timeout = Duration::from_secs(20);
        config.handshake_patience = Duration::from_secs(20);
    });
    // Joiners that say nothing, until their address has no place left.
    let mut flood = Vec::new();
    let refused = within(async {
        loop {
            let config = anonymous(&cluster.authority, b"kolo-join/1");
            match raw_connect(config, head.local_addr()).await {
                Ok(silent) => flood.push(silent),
                Err(error) => return error,
            }
        }
    })
    .await;
    assert_eq!(flood.len(), 3, "{refused}");
    let driver = cluster.bind(cluster.driver(1));
    let error = within(driver.connect(head.local_addr(), Expect::head()))
        .await
        .unwrap_err();
    let address = head.local_addr();
    assert_eq!(error, ConnectError::Busy { address });
    // All of 127.0.0.0/8 is this host.
    let elsewhere = cluster.bind_with(cluster.driver(2), |config| {
        config.listen = "127.0.0.2:0".parse().unwrap();
    });
    let (connected, accepted) =
        within(async { tokio::join!(elsewhere.connect(address, Expect::head()), head.accept()) })
            .await;
    assert_eq!(connected.unwrap().peer().role, Role::Head);
    assert_eq!(
        accepted.unwrap().remote_addr().ip(),
        elsewhere.local_addr().ip()
    );
    // And for itself, when one of them ends.
    flood.pop().unwrap().close(0_u32.into(), b"");
    within(async {
        while driver.connect(address, Expect::head()).await.is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// The first packet of a handshake that nobody goes on with.
async fn first_packet(cluster: &Cluster) -> Vec<u8> {
    let nowhere = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = nowhere.local_addr().unwrap();
    let config = anonymous(&cluster.authority, b"kolo-join/1");
    let connecting = tokio::spawn(raw_connect(config, address));
    let packet = tokio::task::spawn_blocking(move || {
        let mut packet = vec![0; 4096];
        let length = nowhere.recv(&mut packet).unwrap();
        packet.truncate(length);
        packet
    });
    let packet = within(packet).await.unwrap();
    connecting.abort();
    packet
}

#[tokio::test]
async fn stalled_handshakes_make_room_for_members_at_their_address() {
    let cluster = Cluster::new();
    let joins = Joins::new(&cluster);
    let token = joins.token(Role::Driver, Duration::from_secs(600), None);
    let head = cluster.bind_with(cluster.head(), |config| {
        config.join = Some(joins);
        config.max_handshakes_per_address = 8;
        config.handshake_timeout = Duration::from_secs(3600);
        config.handshake_patience = Duration::from_millis(200);
    });
    let address = head.local_addr();
    // Some stall in the handshake, as many as may before addresses are checked, others as joiners that ask for nothing.
    let mut sockets = Vec::new();
    for _ in 0..20 {
        let packet = first_packet(&cluster).await;
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.send_to(&packet, address).unwrap();
        sockets.push(socket);
    }
    let mut silent = Vec::new();
    for _ in 0..20 {
        let config = anonymous(&cluster.authority, b"kolo-join/1");
        silent.extend(raw_connect(config, address).await);
    }
    let driver = cluster.bind(cluster.driver(1));
    within(async {
        while let Err(error) = driver.connect(address, Expect::head()).await {
            assert!(error.is_retryable(), "{error}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    // And a joiner with a good token.
    within(async {
        while let Err(error) = join(driver.runtime(), address, &token).await {
            assert!(error.is_retryable(), "{error}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn slow_handshakes_hold_up_nobody_and_addresses_are_checked_when_there_are_many() {
    let cluster = Cluster::new();
    let joins = Joins::new(&cluster);
    let head = cluster.bind_with(cluster.head(), |config| {
        config.join = Some(joins);
        config.max_handshakes = 4;
        config.handshake_timeout = Duration::from_secs(20);
    });
    let mut slow = Vec::new();
    for _ in 0..3 {
        let config = anonymous(&cluster.authority, b"kolo-join/1");
        slow.push(raw_connect(config, head.local_addr()).await.unwrap());
    }
    still_serves(&cluster, &head).await;
    assert!(
        slow.iter()
            .all(|connection| connection.close_reason().is_none())
    );
}
