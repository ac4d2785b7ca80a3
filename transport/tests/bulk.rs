//! TLS over TCP: who is let in, what a link carries, and how it ends.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod common;

use std::future::poll_fn;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Cluster, within};
use kolo_transport::ids::{JobId, Slot};
use kolo_transport::{
    BindError, ConnectError, Credentials, Endpoint, EndpointConfig, Expect, Identity, LinkLost,
    Role, TlsLink, TlsListener, tls,
};

const JOB: JobId = JobId(7);

fn worker(cluster: &Cluster, slot: u32) -> Credentials {
    let name = Identity::worker_name(JOB, Slot(slot));
    cluster.authority.issue(Role::Worker, &name).unwrap()
}

fn server(cluster: &Cluster) -> (Endpoint, TlsListener) {
    server_with(cluster, |_| {})
}

fn server_with(cluster: &Cluster, set: impl Fn(&mut EndpointConfig)) -> (Endpoint, TlsListener) {
    // Another test's client may have the TCP port.
    loop {
        let endpoint = cluster.bind_with(worker(cluster, 0), &set);
        match endpoint.listen_tls() {
            Ok(listener) => {
                assert_eq!(listener.local_addr(), endpoint.local_addr());
                return (endpoint, listener);
            }
            Err(BindError::Listen { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Both ends of a link: the server's and the client's.
async fn pair(cluster: &Cluster, listener: &TlsListener) -> (TlsLink, TlsLink) {
    let client = cluster.bind(worker(cluster, 1));
    let (accepted, connected) = within(async {
        tokio::join!(
            listener.accept(),
            client.connect_tls(listener.local_addr(), Expect::worker(JOB, Slot(0)))
        )
    })
    .await;
    (accepted.unwrap(), connected.unwrap())
}

async fn write(link: &mut TlsLink, bytes: &[u8]) -> Result<(), LinkLost> {
    let mut rest = bytes;
    while !rest.is_empty() {
        // In two parts, which need not fit records.
        let (one, two) = rest.split_at(rest.len() / 3);
        let parts = [IoSlice::new(one), IoSlice::new(two)];
        let count = poll_fn(|cx| link.poll_write(cx, &parts)).await?;
        rest = &rest[count..];
    }
    poll_fn(|cx| link.poll_flush(cx)).await
}

/// Reads until the end.
async fn read_all(link: &mut TlsLink) -> Result<Vec<u8>, LinkLost> {
    let mut all = Vec::new();
    let mut piece = vec![0; 100_003];
    loop {
        match within(poll_fn(|cx| link.poll_read(cx, &mut piece))).await? {
            0 => return Ok(all),
            count => all.extend_from_slice(&piece[..count]),
        }
    }
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|i| (i * 31 % 251) as u8).collect()
}

async fn still_serves(cluster: &Cluster, listener: &TlsListener) {
    let (mut one, mut two) = pair(cluster, listener).await;
    write(&mut two, b"still here").await.unwrap();
    drop(two);
    assert_eq!(read_all(&mut one).await.unwrap(), b"still here");
}

#[tokio::test]
async fn much_crosses_both_ways_and_a_link_that_is_dropped_loses_nothing() {
    let cluster = Cluster::new();
    let (endpoint, listener) = server(&cluster);
    for length in [0, 1, 16_384, 16_385, 300_000, 5_000_000] {
        let (server, client) = pair(&cluster, &listener).await;
        assert_eq!(server.peer(), worker(&cluster, 1).identity());
        assert_eq!(client.peer(), endpoint.identity());
        let bytes = pattern(length);
        let each = |mut link: TlsLink| {
            let bytes = bytes.clone();
            async move {
                let mut got = Vec::new();
                let mut piece = vec![0; 70_000];
                let mut sent = 0;
                poll_fn(|cx| {
                    loop {
                        let mut moved = false;
                        if sent < bytes.len()
                            && let std::task::Poll::Ready(count) =
                                link.poll_write(cx, &[IoSlice::new(&bytes[sent..])])
                        {
                            sent += count.unwrap();
                            moved = true;
                        }
                        if got.len() < bytes.len()
                            && let std::task::Poll::Ready(count) = link.poll_read(cx, &mut piece)
                        {
                            got.extend_from_slice(&piece[..count.unwrap()]);
                            moved = true;
                        }
                        if sent == bytes.len() && got.len() == bytes.len() {
                            // What is not flushed goes out when the link is dropped.
                            return std::task::Poll::Ready(());
                        }
                        if !moved {
                            if let std::task::Poll::Ready(done) = link.poll_flush(cx) {
                                done.unwrap();
                            }
                            return std::task::Poll::Pending;
                        }
                    }
                })
                .await;
                got
            }
        };
        let (one, two) = within(async { tokio::join!(each(server), each(client)) }).await;
        assert!(one == bytes && two == bytes, "{length} bytes");
    }
}

#[tokio::test]
async fn an_end_in_order_is_told_from_a_loss() {
    let cluster = Cluster::new();
    let (_endpoint, listener) = server(&cluster);

    // In order, with something unread on the side that ends it.
    let (mut server, mut client) = pair(&cluster, &listener).await;
    write(&mut server, &pattern(10_000)).await.unwrap();
    write(&mut client, &pattern(50_000)).await.unwrap();
    drop(client);
    assert_eq!(read_all(&mut server).await.unwrap(), pattern(50_000));
    assert!(server.ended_by_peer());

    // Without a word, as when a process is killed.
    let (mut server, mut client) = pair(&cluster, &listener).await;
    write(&mut client, b"and then").await.unwrap();
    client.abort();
    let error = read_all(&mut server).await.unwrap_err();
    assert!(matches!(error, LinkLost::Broken { .. }), "{error}");
    assert!(!server.ended_by_peer());

    // By a reset: something was not read.
    let (mut server, client) = pair(&cluster, &listener).await;
    write(&mut server, &pattern(10_000)).await.unwrap();
    client.abort();
    let error = read_all(&mut server).await.unwrap_err();
    assert!(matches!(error, LinkLost::Broken { .. }), "{error}");
    let error = within(async {
        loop {
            if let Err(error) = write(&mut server, &pattern(100_000)).await {
                return error;
            }
        }
    })
    .await;
    assert!(matches!(error, LinkLost::Broken { .. }), "{error}");
}

#[tokio::test]
async fn only_members_of_the_cluster_are_connected_and_only_the_one_that_is_expected() {
    let (cluster, other) = (Cluster::new(), Cluster::new());
    let (_endpoint, listener) = server(&cluster);
    let address = listener.local_addr();
    let expect = Expect::worker(JOB, Slot(0));

    let stranger = other.bind(worker(&other, 1));
    let error = within(stranger.connect_tls(address, expect.clone()))
        .await
        .unwrap_err();
    assert!(matches!(error, ConnectError::Certificate { .. }), "{error}");

    let member = cluster.bind(worker(&cluster, 1));
    for expect in [
        Expect::worker(JOB, Slot(2)),
        Expect::worker(JobId(8), Slot(0)),
        Expect::head(),
    ] {
        let error = within(member.connect_tls(address, expect))
            .await
            .unwrap_err();
        assert!(matches!(error, ConnectError::WrongPeer { .. }), "{error}");
    }

    // Role and name of a client are for whoever accepts it to check; they are those of its certificate.
    let node = cluster.bind(cluster.node(3));
    let (accepted, connected) =
        within(async { tokio::join!(listener.accept(), node.connect_tls(address, expect)) }).await;
    connected.unwrap();
    // Those that were not the expected peer's are there too, and end.
    let mut accepted = accepted.unwrap();
    while accepted.peer().role != Role::Node {
        assert!(read_all(&mut accepted).await.is_err());
        accepted = within(listener.accept()).await.unwrap();
    }
    assert_eq!(accepted.peer(), node.identity());

    let nobody = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let error = within(member.connect_tls(nobody, Expect::head()))
        .await
        .unwrap_err();
    assert!(matches!(error, ConnectError::Address { .. }), "{error}");
}

/// Speaks TLS to the listener with these certificates, and gives what the listener says at the end.
fn raw_client(address: SocketAddr, config: rustls::ClientConfig) -> String {
    let name = rustls_pki_types::ServerName::try_from(tls::SERVER_NAME).unwrap();
    let mut connection = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut socket = TcpStream::connect(address).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let mut stream = rustls::Stream::new(&mut connection, &mut socket);
    match stream.read(&mut [0; 1]) {
        Ok(count) => format!("{count} bytes"),
        Err(error) => error.to_string(),
    }
}

#[tokio::test]
async fn clients_without_a_certificate_of_the_cluster_or_with_another_protocol_are_refused() {
    let (cluster, other) = (Cluster::new(), Cluster::new());
    let (_endpoint, listener) = server(&cluster);
    let address = listener.local_addr();
    let ours = worker(&cluster, 1);
    let alpn: &[&[u8]] = &[kolo_transport::bulk::ALPN_BULK];

    let roots = || {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(ours.authority()).unwrap();
        rustls::ClientConfig::builder_with_provider(tls::provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots)
    };
    let mut anonymous = roots().with_no_client_auth();
    anonymous.alpn_protocols = vec![alpn[0].to_vec()];
    let theirs = worker(&other, 1);
    let mut foreign = roots()
        .with_client_auth_cert(theirs.chain(), theirs.private_key())
        .unwrap();
    foreign.alpn_protocols = vec![alpn[0].to_vec()];
    let version = tls::client_config(&ours, &[b"kolo-bulk/9"]).unwrap();
    let silent = tls::client_config(&ours, &[]).unwrap();
    for (config, expected) in [
        (anonymous, "CertificateRequired"),
        (foreign, "DecryptError UnknownCA BadCertificate"),
        (version, "NoApplicationProtocol"),
        (silent, "eof close"),
    ] {
        let said = tokio::task::spawn_blocking(move || raw_client(address, config))
            .await
            .unwrap();
        assert!(
            expected.split(' ').any(|word| said.contains(word)),
            "{said}; expected was one of: {expected}"
        );
    }
    tokio::select! {
        accepted = listener.accept() => panic!("{accepted:?} was let in"),
        () = tokio::time::sleep(Duration::from_millis(50)) => {}
    }
    still_serves(&cluster, &listener).await;
}

#[tokio::test]
async fn slow_and_silent_clients_and_those_that_speak_something_else_are_cut_off() {
    let cluster = Cluster::new();
    let (_endpoint, listener) = server_with(&cluster, |config| {
        config.handshake_timeout = Duration::from_millis(700);
    });
    let address = listener.local_addr();
    let begun = Instant::now();
    let connect = || {
        let socket = TcpStream::connect(address).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        socket
    };
    let silent: Vec<TcpStream> = (0..20).map(|_| connect()).collect();
    let half_closed = connect();
    half_closed.shutdown(Shutdown::Write).unwrap();
    let mut http = connect();
    http.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut long = connect();
    long.write_all(&[22, 3, 1, 0xff, 0xff]).unwrap();
    // A record that never ends, a byte at a time.
    let mut slow = connect();
    let drips = std::thread::spawn(move || {
        let mut record = vec![22, 3, 1, 1, 0];
        record.resize(5 + 256, 0);
        for byte in record {
            if slow.write_all(&[byte]).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("it was not cut off");
    });

    // Others come in at once.
    still_serves(&cluster, &listener).await;
    assert!(begun.elapsed() < Duration::from_secs(20));
    let ends = tokio::task::spawn_blocking(move || {
        for mut socket in silent.into_iter().chain([half_closed, http, long]) {
            let mut rest = Vec::new();
            // An alert at most, then the end, with or without a reset.
            drop(socket.read_to_end(&mut rest));
            assert!(rest.len() < 100, "{rest:?}");
        }
        drips.join().unwrap();
    });
    within(ends).await.unwrap();
    still_serves(&cluster, &listener).await;
}

/// Connects as often as it takes.
async fn gets_in(cluster: &Cluster, listener: &TlsListener) {
    let client = cluster.bind(worker(cluster, 1));
    let expect = || Expect::worker(JOB, Slot(0));
    let connected = async {
        while (client.connect_tls(listener.local_addr(), expect()).await).is_err() {
            tokio::task::yield_now().await;
        }
    };
    within(connected).await;
    within(listener.accept()).await.unwrap();
}

#[tokio::test]
async fn one_address_has_only_so_many_handshakes_and_gets_them_back() {
    let cluster = Cluster::new();
    let (_endpoint, listener) = server_with(&cluster, |config| {
        config.handshake_timeout = Duration::from_secs(3600);
        config.handshake_patience = Duration::from_secs(3600);
        config.max_handshakes_per_address = 4;
    });
    let address = listener.local_addr();
    let mut sockets: Vec<TcpStream> = (0..12)
        .map(|_| TcpStream::connect(address).unwrap())
        .collect();
    // The first four wait for a deadline that does not come; the others are closed at once.
    let refused = sockets.split_off(4);
    let closed = tokio::task::spawn_blocking(move || {
        for mut socket in refused {
            let limit = Duration::from_secs(30);
            socket.set_read_timeout(Some(limit)).unwrap();
            match socket.read(&mut [0; 1]) {
                Ok(0) => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
                other => panic!("{other:?}"),
            }
        }
    });
    within(closed).await.unwrap();
    drop(sockets);
    gets_in(&cluster, &listener).await;
}

#[tokio::test]
async fn clients_that_say_nothing_make_room_for_members() {
    let cluster = Cluster::new();
    let (_endpoint, listener) = server_with(&cluster, |config| {
        config.handshake_timeout = Duration::from_secs(3600);
        config.handshake_patience = Duration::from_millis(100);
        config.max_handshakes_per_address = 8;
    });
    let address = listener.local_addr();
    // As many as may be, and more: whoever is refused is closed.
    let silent: Vec<TcpStream> = (0..20)
        .map(|_| TcpStream::connect(address).unwrap())
        .collect();
    gets_in(&cluster, &listener).await;
    drop(silent);
}

/// Both ends of a link, with somebody in between who changes what the client sends. Messages of the handshake, which are
/// shorter, pass as they are.
async fn spoilt(
    cluster: &Cluster,
    listener: &TlsListener,
    spoil: fn(&mut Vec<u8>),
) -> (TlsLink, TlsLink) {
    let target = listener.local_addr();
    let between = TcpListener::bind("127.0.0.1:0").unwrap();
    let through = between.local_addr().unwrap();
    std::thread::spawn(move || {
        let (mut client, _) = between.accept().unwrap();
        let mut server = TcpStream::connect(target).unwrap();
        let (mut back_from, mut back_to) =
            (server.try_clone().unwrap(), client.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut back_from, &mut back_to));
        let mut bytes = vec![0; 100_000];
        // Until the client ends: what the server says of what came is not for an end.
        while let Ok(count @ 1..) = client.read(&mut bytes) {
            let mut piece = bytes[..count].to_vec();
            if count > 8000 {
                spoil(&mut piece);
            }
            if server.write_all(&piece).is_err() {
                return;
            }
        }
    });
    let client = cluster.bind(worker(cluster, 1));
    let (accepted, connected) = within(async {
        tokio::join!(
            listener.accept(),
            client.connect_tls(through, Expect::worker(JOB, Slot(0)))
        )
    })
    .await;
    (accepted.unwrap(), connected.unwrap())
}

#[tokio::test]
async fn what_is_changed_on_the_way_is_noticed() {
    let cluster = Cluster::new();
    let (_endpoint, listener) = server(&cluster);
    let spoil = |piece: &mut Vec<u8>| {
        let middle = piece.len() / 2;
        piece[middle] ^= 1;
    };
    let (mut server, mut client) = spoilt(&cluster, &listener, spoil).await;
    write(&mut client, &pattern(40_000)).await.unwrap();
    let error = read_all(&mut server).await.unwrap_err();
    assert!(matches!(error, LinkLost::Tampered { .. }), "{error}");
}

#[tokio::test]
async fn a_record_that_is_too_long_behind_a_good_one_ends_the_link() {
    let cluster = Cluster::new();
    let (_endpoint, listener) = server(&cluster);
    let spoil = |piece: &mut Vec<u8>| piece.extend([23, 3, 3, 0xff, 0xff]);
    let (mut server, mut client) = spoilt(&cluster, &listener, spoil).await;
    write(&mut client, &pattern(9000)).await.unwrap();
    let mut read = Vec::new();
    let mut piece = vec![0; 100_003];
    let error = loop {
        match within(poll_fn(|cx| server.poll_read(cx, &mut piece))).await {
            Ok(count) => read.extend_from_slice(&piece[..count]),
            Err(error) => break error,
        }
    };
    assert_eq!(read, pattern(9000));
    assert!(matches!(error, LinkLost::Tampered { .. }), "{error}");
    // It stays so, however often it is asked.
    let again = poll_fn(|cx| server.poll_read(cx, &mut piece)).await;
    assert_eq!(again, Err(error));
}

#[tokio::test]
async fn a_listener_that_is_closed_lets_nobody_in() {
    let cluster = Cluster::new();
    let (_endpoint, listener) = server(&cluster);
    let (mut server, mut client) = pair(&cluster, &listener).await;
    listener.close();
    assert!(within(listener.accept()).await.is_none());
    // What there is lives on.
    write(&mut client, b"after").await.unwrap();
    drop(client);
    assert_eq!(read_all(&mut server).await.unwrap(), b"after");
}

/// It is not tried again and again, as a peer that is not there yet.
#[tokio::test]
async fn a_congestion_control_that_there_is_not_is_refused_for_good() {
    let cluster = Cluster::new();
    let (_endpoint, listener) = server(&cluster);
    let client = cluster.bind_with(worker(&cluster, 1), |config| {
        config.tcp_congestion = Some("none-such".to_owned());
    });
    let expect = Expect::worker(JOB, Slot(0));
    let error = within(client.connect_tls(listener.local_addr(), expect))
        .await
        .unwrap_err();
    assert!(!error.is_retryable(), "{error}");
    assert!(error.to_string().contains("none-such"), "{error}");
}
