//! `kolo-node` as a process.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use kolo_transport::ids::{ClusterId, DriverId, NodeId};
use kolo_transport::wire::{NodeEvent, NodeReply, NodeRequest, Resources};
use kolo_transport::{Authority, EndpointConfig, Expect, RandomId as _, Role, TransportRuntime};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::bed::{Calls, Head, driver, gone, is_running, job_on, own_program, soon};
use crate::programs::put;

/// A daemon that does not outlive its test.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

impl Daemon {
    /// Starts it with this state folder, which has its identity. Where drivers reach it.
    async fn start(head: SocketAddr, state: &Path) -> (Self, SocketAddr) {
        let mut child = Command::new(env!("CARGO_BIN_EXE_kolo-node"))
            .args(["--head", &head.to_string(), "--format", "json"])
            .arg("--state-dir")
            .arg(state)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = child.stdout.take().unwrap();
        let daemon = Self(child);
        let read = tokio::task::spawn_blocking(move || {
            let mut line = String::new();
            BufReader::new(stdout).read_line(&mut line).unwrap();
            line
        });
        let line = soon(read).await.unwrap();
        let ready: serde_json::Value = serde_json::from_str(&line).unwrap();
        let address = ready["address"].as_str().unwrap().parse().unwrap();
        (daemon, address)
    }
}

fn warden_of(pid: u32) -> Pid {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let after_name = stat.rsplit(')').next().unwrap();
    let parent = after_name.split_whitespace().nth(1).unwrap();
    Pid::from_raw(parent.parse().unwrap()).unwrap()
}

#[tokio::test]
async fn a_daemon_ends_what_the_one_before_it_has_left() {
    let runtime = TransportRuntime::new(1).unwrap();
    let authority = Arc::new(Authority::create(ClusterId::random()).unwrap());
    let head = Head::start(&runtime, authority, EndpointConfig::default());
    let state = TempDir::new().unwrap();
    let node = NodeId::random();
    let credentials = head.authority.issue(Role::Node, &node.to_string()).unwrap();
    credentials.save(&state.path().join("identity")).unwrap();
    let (mut daemon, address) = Daemon::start(head.endpoint.local_addr(), state.path()).await;
    let owner = DriverId::random();
    let driver = driver(&runtime, &head.authority, owner);
    let connection = soon(driver.connect(address, Expect::node(node)))
        .await
        .unwrap();
    let (program, file) = own_program();
    let content = std::fs::read(file).unwrap();
    assert_eq!(put(&connection, &program, &content).await, NodeReply::Done);
    let job = job_on(node, owner, 1, "stubborn");
    let reserve = NodeRequest::Reserve {
        job: job.job,
        per_worker: Resources::default(),
        workers: 1,
        lease_ms: 60_000,
        program: job.program.hash,
        installed: None,
        health_check: None,
    };
    let reply = head.ask(reserve).await;
    assert!(matches!(reply, NodeReply::Reserved { .. }), "{reply:?}");
    let id = job.job;
    let NodeReply::Started { pids } = head.ask(NodeRequest::Start(job)).await else {
        panic!("not started");
    };
    let worker = pids[0].1;
    assert!(matches!(head.event().await, NodeEvent::WorkerReady { .. }));
    let mut calls = Calls::open(connection, id).await;
    let grandchild = calls.call(0, "grandchild").await.parse().unwrap();
    let warden = warden_of(worker);
    // So that it can't help.
    kill_process(warden, Signal::STOP).unwrap();
    daemon.0.kill().unwrap();
    daemon.0.wait().unwrap();
    kill_process(warden, Signal::KILL).unwrap();
    gone(worker).await;
    assert!(is_running(grandchild), "nobody is left to end it");
    let _next = Daemon::start(head.endpoint.local_addr(), state.path()).await;
    assert!(!is_running(grandchild));
}
