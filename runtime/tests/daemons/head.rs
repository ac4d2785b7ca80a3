//! `kolo-head` alone: what it serves, how it ends, and what it does not start with.

use std::path::Path;

use kolo_transport::{Credentials, Expect, Limits, TransportRuntime};
use rustix::process::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::process::{Daemon, HEAD, Site, command};
use crate::trust::{connect, get, try_https};

#[tokio::test]
async fn it_serves_members_over_https_survives_a_kill_and_has_no_second_beside_it() {
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("driver.token");
    let args = ["--driver-token-file", token.to_str().unwrap()];
    let mut site = Site::new(&args);
    let me = site.login("me", &token);
    let cluster = site.json(&["status"])["cluster"].clone();
    let credentials = Credentials::load(&me).unwrap();
    for (path, status) in [
        ("/readyz", 200),
        ("/api/v1/cluster", 200),
        ("/api/v1/jobs", 200),
        ("/api/v1/jobs/job-0000000000000001", 404),
    ] {
        let mut stream = try_https(&credentials, site.http).await.unwrap();
        let answer = get(&mut stream, path).await;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{answer}"
        );
    }
    // D-1: who was let in is let in after a crash, and so is the operator.
    site.restart_head();
    assert_eq!(site.json(&["status"])["cluster"], cluster);
    assert!(site.kolo(&me, &["status"]).status.success());
    let mut other = head(&site.path("head"), &[]);
    assert_eq!(other.end().code(), Some(1));
    other.says("is in use by another head");
    site.head.signal(Signal::TERM);
    assert_eq!(site.head.end().code(), Some(0));
}

/// A head with this state folder.
fn head(state: &Path, args: &[&str]) -> Daemon {
    let mut head = command(HEAD);
    head.arg("--state-dir").arg(state);
    if !args.contains(&"--listen") {
        head.args(["--listen", "127.0.0.1:0"]);
    }
    head.args(args);
    Daemon::spawn(head)
}

#[tokio::test]
async fn a_slow_or_silent_driver_does_not_keep_it_from_stopping() {
    let mut site = Site::new(&[]);
    let runtime = TransportRuntime::new(1).unwrap();
    let driver = connect(&runtime, &site.admin(), site.address, Expect::head()).await;
    let mut stream = driver.unwrap().1.open(Limits::CONTROL).await.unwrap();
    stream.send.send_encoded(&[0, 0, 0]).await.unwrap();
    site.head.signal(Signal::INT);
    assert_eq!(site.head.end().code(), Some(0));
}

#[test]
fn a_new_head_that_can_not_start_says_why_and_leaves_no_state_behind() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let busy_udp = udp.local_addr().unwrap().to_string();
    let busy_tcp = tcp.local_addr().unwrap().to_string();
    let bearer = dir.path().join("bearer");
    std::fs::write(&bearer, "passwordpasswordpassword").unwrap();
    let bearer = bearer.to_str().unwrap();
    let http = ["--http-listen", "127.0.0.1:0", "--bearer-file"];
    for (args, part) in [
        (&["--listen", &busy_udp][..], "UDP address"),
        (&["--http-listen", &busy_tcp], "HTTP API"),
        (&[&http[..], &[bearer]].concat(), "at least 16 characters"),
        (
            &[&http[..], &["/does/not/exist"]].concat(),
            "/does/not/exist",
        ),
    ] {
        let mut head = head(&state, &[args, &["--log", "error"]].concat());
        assert_eq!(head.end().code(), Some(1), "{args:?}");
        let said = head.printed.text();
        assert!(said.contains(part), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(!said.contains("password"), "{said}");
        assert!(!state.exists());
    }
}

#[tokio::test]
async fn floods_from_outside_are_a_few_lines_in_the_log() {
    const MANY: usize = 150;
    let dir = tempfile::tempdir().unwrap();
    let bearer = dir.path().join("bearer");
    std::fs::write(&bearer, "9f86d081884c7d659a2feaa0c55ad015").unwrap();
    let mut site = Site::new(&["--bearer-file", bearer.to_str().unwrap()]);
    let credentials = Credentials::load(&site.admin()).unwrap();
    let exchange = async |bytes: &[u8]| {
        let Ok(mut stream) = try_https(&credentials, site.http).await else {
            return;
        };
        stream.write_all(bytes).await.ok();
        stream.flush().await.ok();
        stream.read_to_end(&mut Vec::new()).await.ok();
    };
    let guess = b"GET /api/v1/jobs HTTP/1.1\r\nHost: kolo\r\nAuthorization: Bearer wrong\r\n\r\n";
    for _ in 0..MANY {
        exchange(b"\x00\xff nonsense\r\n\r\n").await;
        // Not even TLS.
        let mut plain = TcpStream::connect(site.http).await.unwrap();
        plain.write_all(b"nonsense\r\n\r\n").await.ok();
        plain.read_to_end(&mut Vec::new()).await.ok();
    }
    exchange(&guess.repeat(MANY)).await;
    let guess = String::from_utf8_lossy(guess).replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n");
    for _ in 0..5 {
        exchange(guess.as_bytes()).await;
    }
    let mut stream = try_https(&credentials, site.http).await.unwrap();
    assert!(get(&mut stream, "/healthz").await.contains("200 OK"));
    site.head.signal(Signal::INT);
    assert!(site.head.end().success());
    let log = &site.head.printed;
    let warnings = log.count("WARN") + log.count("ERROR");
    // Of each kind, in each ten seconds; a slow machine has some of these.
    assert!((1..MANY).contains(&warnings), "{}", log.text());
    for part in [
        "a wrong bearer token was refused",
        "too many attempts with wrong secrets",
    ] {
        assert!(log.count(part) > 0, "{}", log.text());
    }
}
