//! `kolo-head` as a process.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use kolo_transport::frame::Limits;
use kolo_transport::wire::{HeadReply, HeadRequest};
use kolo_transport::{
    Credentials, Endpoint, EndpointConfig, Expect, JoinToken, TransportRuntime, join, tls,
};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

const BIN: &str = env!("CARGO_BIN_EXE_kolo-head");

/// A daemon that does not outlive its test.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

impl Daemon {
    fn start(state: &Path, args: &[&str]) -> Self {
        let child = Command::new(BIN)
            .arg("--state-dir")
            .arg(state)
            .args(["--listen", "127.0.0.1:0", "--format", "json"])
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self(child)
    }

    /// The line that it prints when it is ready. If it ends first, its standard error.
    fn ready(&mut self) -> Result<serde_json::Value, String> {
        let mut line = String::new();
        let stdout = self.0.stdout.take().unwrap();
        BufReader::new(stdout).read_line(&mut line).unwrap();
        if line.is_empty() {
            return Err(self.stderr());
        }
        Ok(serde_json::from_str(&line).unwrap())
    }

    fn stderr(&mut self) -> String {
        let mut text = String::new();
        let mut stderr: ChildStderr = self.0.stderr.take().unwrap();
        stderr.read_to_string(&mut text).unwrap();
        text
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.0.id()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    fn wait(&mut self) -> ExitStatus {
        self.0.wait().unwrap()
    }
}

fn address(ready: &serde_json::Value) -> SocketAddr {
    ready["address"].as_str().unwrap().parse().unwrap()
}

fn token(file: &Path) -> JoinToken {
    let mode = std::fs::metadata(file).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o600);
    std::fs::read_to_string(file).unwrap().parse().unwrap()
}

async fn cluster(runtime: &TransportRuntime, head: SocketAddr, credentials: Credentials) -> String {
    let endpoint = Endpoint::bind(runtime, credentials, EndpointConfig::towards(head)).unwrap();
    let connection = endpoint.connect(head, Expect::head()).await.unwrap();
    let reply = connection
        .request(&HeadRequest::Cluster, Duration::from_secs(20))
        .await
        .unwrap();
    match reply {
        HeadReply::Cluster(cluster) => cluster.cluster.to_string(),
        other => panic!("{other:?}"),
    }
}

/// The answer to a request with a certificate.
async fn get(http: SocketAddr, credentials: &Credentials, path: &str) -> String {
    let tls = tls::client_config(credentials, &[]).unwrap();
    let stream = TcpStream::connect(http).await.unwrap();
    let mut stream = TlsConnector::from(Arc::new(tls))
        .connect(tls::SERVER_NAME.try_into().unwrap(), stream)
        .await
        .unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: kolo\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    // The end of the connection may come without the end of TLS.
    stream.read_to_end(&mut answer).await.ok();
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn it_starts_lets_members_in_survives_a_kill_and_stops() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let (nodes, drivers) = (
        dir.path().join("node.token"),
        dir.path().join("driver.token"),
    );
    let bearer = dir.path().join("bearer");
    std::fs::write(&bearer, "a secret of many letters\n".replace(' ', "-")).unwrap();
    let args = [
        "--node-token-file",
        nodes.to_str().unwrap(),
        "--driver-token-file",
        drivers.to_str().unwrap(),
        "--http-listen",
        "127.0.0.1:0",
        "--bearer-file",
        bearer.to_str().unwrap(),
    ];
    let mut head = Daemon::start(&state, &args);
    let first = head.ready().unwrap();
    let runtime = TransportRuntime::new(1).unwrap();
    join(&runtime, address(&first), &token(&nodes))
        .await
        .unwrap();
    let driver = join(&runtime, address(&first), &token(&drivers))
        .await
        .unwrap();
    let name = first["cluster"].as_str().unwrap();
    assert_eq!(
        cluster(&runtime, address(&first), driver.clone()).await,
        name
    );
    let http: SocketAddr = first["http"].as_str().unwrap().parse().unwrap();
    let answer = get(http, &driver, "/readyz").await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let answer = get(http, &driver, "/api/v1/cluster").await;
    assert!(answer.contains(name), "{answer}");
    let answer = get(http, &driver, "/api/v1/jobs").await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let answer = get(http, &driver, "/api/v1/jobs/job-0000000000000001").await;
    assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");

    // D-1: who was let in is let in after a crash, and so is the operator.
    head.signal(Signal::KILL);
    head.wait();
    let mut head = Daemon::start(&state, &[]);
    let second = head.ready().unwrap();
    assert_eq!(second["cluster"], first["cluster"]);
    assert_eq!(cluster(&runtime, address(&second), driver).await, name);
    let admin = Credentials::load(Path::new(second["admin"].as_str().unwrap())).unwrap();
    assert_eq!(cluster(&runtime, address(&second), admin).await, name);
    join(&runtime, address(&second), &token(&nodes))
        .await
        .unwrap();

    // Only one at a time.
    let mut other = Daemon::start(&state, &[]);
    let error = other.ready().unwrap_err();
    assert!(error.contains("is in use by another head"), "{error}");
    assert_eq!(other.wait().code(), Some(1));

    head.signal(Signal::TERM);
    assert_eq!(head.wait().code(), Some(0), "{}", head.stderr());
}

#[tokio::test]
async fn a_slow_or_silent_driver_does_not_keep_it_from_stopping() {
    let dir = tempfile::tempdir().unwrap();
    let mut head = Daemon::start(dir.path(), &[]);
    let ready = head.ready().unwrap();
    let runtime = TransportRuntime::new(1).unwrap();
    let admin = Credentials::load(Path::new(ready["admin"].as_str().unwrap())).unwrap();
    let config = EndpointConfig::towards(address(&ready));
    let endpoint = Endpoint::bind(&runtime, admin, config).unwrap();
    let connection = endpoint
        .connect(address(&ready), Expect::head())
        .await
        .unwrap();
    let mut stream = connection.open(Limits::CONTROL).await.unwrap();
    stream.send.send_encoded(&[0, 0, 0]).await.unwrap();
    head.signal(Signal::INT);
    assert_eq!(head.wait().code(), Some(0), "{}", head.stderr());
}

#[test]
fn a_new_head_whose_port_is_taken_leaves_no_state_behind() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let busy_udp = udp.local_addr().unwrap().to_string();
    let busy_tcp = tcp.local_addr().unwrap().to_string();
    for (listen, http, part) in [
        (&*busy_udp, None, "UDP address"),
        ("127.0.0.1:0", Some(&*busy_tcp), "HTTP API"),
    ] {
        let output = Command::new(BIN)
            .arg("--state-dir")
            .arg(&state)
            .args(["--listen", listen])
            .args(http.iter().flat_map(|http| ["--http-listen", http]))
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(part), "{stderr}");
        assert!(!state.exists());
    }
}

#[test]
fn wrong_arguments_are_told_with_what_is_allowed() {
    let dir = tempfile::tempdir().unwrap();
    for (args, code, part) in [
        (&["--lease", "3"][..], 2, "like 250ms or 3s"),
        (&["--listen", "nowhere"], 2, "--listen"),
        (&["--log", "=====,,"], 2, "--log"),
        (&["--bearer-file", "x"], 2, "--http-listen"),
        (&["--lease", "1ms"], 2, "lease is 1ms; allowed is"),
        (
            &["--node-token-file", "/does/not/exist/token"],
            1,
            "/does/not/exist/token",
        ),
        (
            &[
                "--bearer-file",
                "/does/not/exist",
                "--http-listen",
                "127.0.0.1:0",
            ],
            1,
            "/does/not/exist",
        ),
    ] {
        // A later --listen is refused as a second one, so these have no other.
        let output = Command::new(BIN)
            .arg("--state-dir")
            .arg(dir.path())
            .args(if args.contains(&"--listen") {
                &[][..]
            } else {
                &["--listen", "127.0.0.1:0"]
            })
            .args(args)
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
        assert!(stderr.contains(part), "{args:?}: {stderr}");
    }
    let output = Command::new(BIN).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_weak_bearer_secret_is_refused_at_the_start_with_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let bearer = dir.path().join("bearer");
    for weak in ["passwordpasswordpassword", "tiny", "0123456789abcdef"] {
        std::fs::write(&bearer, weak).unwrap();
        let mut daemon = Daemon::start(
            &dir.path().join("state"),
            &[
                "--http-listen",
                "127.0.0.1:0",
                "--bearer-file",
                bearer.to_str().unwrap(),
                "--log",
                "error",
            ],
        );
        let said = daemon.ready().unwrap_err();
        assert_eq!(daemon.wait().code(), Some(1));
        assert_eq!(said.trim_end().lines().count(), 1, "{said}");
        assert!(said.contains("at least 16 characters"), "{said}");
        assert!(!said.contains(weak), "{said}");
    }
    assert!(!dir.path().join("state").exists(), "no cluster was made");
}

#[tokio::test]
async fn floods_from_outside_are_a_few_lines_in_the_log() {
    const MANY: usize = 150;
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let bearer = dir.path().join("bearer");
    std::fs::write(&bearer, "9f86d081884c7d659a2feaa0c55ad015").unwrap();
    let mut daemon = Daemon::start(
        &state,
        &[
            "--http-listen",
            "127.0.0.1:0",
            "--bearer-file",
            bearer.to_str().unwrap(),
        ],
    );
    let ready = daemon.ready().unwrap();
    let http: SocketAddr = ready["http"].as_str().unwrap().parse().unwrap();
    let credentials = Credentials::load(&state.join("admin")).unwrap();
    let config = Arc::new(tls::client_config(&credentials, &[]).unwrap());
    let exchange = async |bytes: &[u8]| {
        let stream = TcpStream::connect(http).await.unwrap();
        let name = tls::SERVER_NAME.try_into().unwrap();
        let connector = TlsConnector::from(Arc::clone(&config));
        let Ok(mut stream) = connector.connect(name, stream).await else {
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
        let mut plain = TcpStream::connect(http).await.unwrap();
        plain.write_all(b"nonsense\r\n\r\n").await.ok();
        plain.read_to_end(&mut Vec::new()).await.ok();
    }
    exchange(&guess.repeat(MANY)).await;
    let guess = String::from_utf8_lossy(guess).replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n");
    for _ in 0..5 {
        exchange(guess.as_bytes()).await;
    }
    assert!(get(http, &credentials, "/healthz").await.contains("200 OK"));
    daemon.signal(Signal::INT);
    let log = daemon.stderr();
    assert!(daemon.wait().success());
    let warnings = log
        .lines()
        .filter(|line| line.contains("WARN") || line.contains("ERROR"))
        .count();
    // Of each kind, in each ten seconds; a slow machine has some of these.
    assert!((1..MANY).contains(&warnings), "{log}");
    assert!(log.contains("a wrong bearer token was refused"), "{log}");
    assert!(
        log.contains("too many attempts with wrong secrets"),
        "{log}"
    );
}
