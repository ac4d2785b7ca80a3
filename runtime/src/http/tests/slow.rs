//! Clients that are slow, send too much or speak another protocol.

use std::time::Duration;

use actix_rt::task::JoinHandle;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::client::{Answer, PATIENCE, Site};
use super::fake::JOB;
use crate::http::{Connections, HttpLimits};

fn impatient() -> Site {
    let short = Duration::from_millis(300);
    Site::with(HttpLimits {
        handshake: short,
        head: short,
        idle: short,
    })
}

/// Has a client ask for the stop of a job, and the head wait with the answer. Done once the head has been asked.
async fn asking(site: &Site) -> (JoinHandle<Answer>, oneshot::Sender<()>) {
    let (release, held) = oneshot::channel();
    site.head.change(|known| known.held = Some(held));
    let client = site.bearer();
    let path = format!("/api/v1/jobs/{JOB}");
    let answer = actix_rt::spawn(async move { client.send("DELETE", &path, b"").await });
    while site.head.change(|known| known.held.is_some()) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    (answer, release)
}

/// Sends a byte now and then until the server ends it. Returns what it has answered.
async fn drip<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S, byte: u8) -> Vec<u8> {
    let began = Instant::now();
    let mut answer = Vec::new();
    loop {
        assert!(began.elapsed() < PATIENCE, "still open");
        let pause = Duration::from_millis(50);
        match tokio::time::timeout(pause, stream.read_buf(&mut answer)).await {
            Ok(Ok(0) | Err(_)) => return answer,
            Ok(Ok(_)) => {}
            Err(_) => {
                if stream.write_all(&[byte]).await.is_err() || stream.flush().await.is_err() {
                    return answer;
                }
            }
        }
    }
}

#[actix_rt::test]
async fn a_head_that_drips_in_is_cut_off() {
    let later = "GET /healthz HTTP/1.1\r\nHost: kolo\r\n\r\nGET /healthz?";
    for (sent, status) in [("GET /healthz", 408), (later, 200)] {
        // The clock of a server that runs is coarser than these limits.
        let site = impatient();
        let mut stream = site.stranger().connect().await.unwrap();
        stream.write_all(sent.as_bytes()).await.unwrap();
        let answer = Answer::parse(&drip(stream, b'x').await);
        assert_eq!(answer.status, status, "{sent}");
        site.http.stop().await;
    }
}

#[actix_rt::test]
async fn a_handshake_that_drips_in_is_cut_off() {
    let site = impatient();
    // The start of a TLS record that says it has 16 KiB.
    for first in [&b"\x16\x03\x01\x40\x00\x01"[..], b""] {
        let mut stream = TcpStream::connect(site.http.address()).await.unwrap();
        stream.write_all(first).await.unwrap();
        drip(stream, 0x16).await;
    }
    site.http.stop().await;
}

/// One that waits for an answer of the head has been silent for longer by then, and is not closed.
#[actix_rt::test]
async fn a_connection_serves_many_requests_and_is_closed_when_idle() {
    let site = impatient();
    let (waiting, release) = asking(&site).await;
    let mut stream = site.stranger().connect().await.unwrap();
    let request = b"GET /healthz HTTP/1.1\r\nHost: kolo\r\n\r\n";
    let mut answer = Vec::new();
    for count in 1..=3 {
        stream.write_all(request).await.unwrap();
        while String::from_utf8_lossy(&answer)
            .matches("{\"status\":\"ok\"}")
            .count()
            < count
        {
            assert_ne!(stream.read_buf(&mut answer).await.unwrap(), 0);
        }
    }
    let end = tokio::time::timeout(PATIENCE, stream.read_buf(&mut answer))
        .await
        .unwrap();
    assert!(!matches!(end, Ok(1..)), "{end:?}");
    release.send(()).unwrap();
    assert_eq!(waiting.await.unwrap().status, 200);
    site.http.stop().await;
}

#[actix_rt::test]
async fn slow_clients_do_not_keep_others_waiting() {
    let site = Site::new();
    let (mut handshakes, mut heads) = (Vec::new(), Vec::new());
    for _ in 0..20 {
        let mut stream = TcpStream::connect(site.http.address()).await.unwrap();
        stream.write_all(b"\x16\x03\x01").await.unwrap();
        handshakes.push(stream);
        let mut stream = site.stranger().connect().await.unwrap();
        stream.write_all(b"GET /hea").await.unwrap();
        heads.push(stream);
    }
    let began = Instant::now();
    assert_eq!(site.stranger().get("/healthz").await.status, 200);
    assert!(began.elapsed() < HttpLimits::default().head);
    site.http.stop().await;
}

#[actix_rt::test]
async fn a_head_that_is_too_long_is_refused() {
    let site = Site::new();
    let head = format!(
        "GET /healthz HTTP/1.1\r\nX: {}\r\n\r\n",
        "x".repeat(1 << 20)
    );
    let refused = site.stranger().exchange(head.as_bytes()).await;
    assert!(
        refused
            .as_ref()
            .is_ok_and(|answer| answer.starts_with(b"HTTP/1.1 4"))
            || refused.is_err(),
        "{refused:?}"
    );
    assert_eq!(site.stranger().get("/healthz").await.status, 200);
    site.http.stop().await;
}

#[actix_rt::test]
async fn plain_http_is_not_answered_on_this_port() {
    let site = Site::new();
    let mut stream = TcpStream::connect(site.http.address()).await.unwrap();
    stream
        .write_all(b"GET /healthz HTTP/1.1\r\nHost: kolo\r\n\r\n")
        .await
        .unwrap();
    let answer = drip(stream, b'x').await;
    assert!(
        !answer.starts_with(b"HTTP"),
        "{:?}",
        String::from_utf8_lossy(&answer)
    );
    assert_eq!(site.stranger().get("/healthz").await.status, 200);
    site.http.stop().await;
}

#[actix_rt::test]
async fn one_address_has_only_so_many_connections_and_idle_ones_make_room() {
    // Whatever ends is ended for another reason than its own silence.
    let limits = HttpLimits {
        handshake: Duration::from_secs(600),
        ..HttpLimits::default()
    };
    let site = Site::with_connections(limits, Connections::new(12, 6));
    let address = site.http.address();
    let mut ends = FuturesUnordered::new();
    for _ in 0..40 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        ends.push(async move {
            let end = stream.read(&mut [0; 64]).await;
            assert!(!matches!(end, Ok(1..)), "it has said something");
        });
    }
    for _ in 6..40 {
        tokio::time::timeout(PATIENCE, ends.next()).await.unwrap();
    }
    assert!(ends.next().now_or_never().is_none(), "six are let be");
    // Another address is not touched by that.
    let elsewhere = TcpSocket::new_v4().unwrap();
    elsewhere.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    let stream = elsewhere.connect(address).await.unwrap();
    let client = site.stranger();
    let request = client.bytes("GET", "/healthz", b"");
    let answer = client.exchange_over(stream, &request).await.unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 200 "));
    // Nor is this one for long.
    let began = Instant::now();
    while client.exchange(&request).await.is_err() {
        assert!(began.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    tokio::time::timeout(PATIENCE, ends.next()).await.unwrap();
    site.http.stop().await;
}

#[actix_rt::test]
async fn who_waits_for_an_answer_keeps_the_connection_whoever_comes() {
    let site = Site::with_connections(HttpLimits::default(), Connections::new(4, 2));
    let (waiting, release) = asking(&site).await;
    let mut crowd = Vec::new();
    for _ in 0..40 {
        crowd.extend(TcpStream::connect(site.http.address()).await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    release.send(()).unwrap();
    assert_eq!(waiting.await.unwrap().status, 200);
    site.http.stop().await;
}
