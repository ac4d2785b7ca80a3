//! `kolo-node` as a process.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_runtime::HeadConfig;
use kolo_transport::ids::{ClusterId, DriverId, JobId, NodeId, Slot};
use kolo_transport::wire::{NodeEvent, NodeReply, NodeRequest, Resources, StartWorkers};
use kolo_transport::{
    Authority, CloseCode, EndpointConfig, Expect, RandomId as _, Role, TransportRuntime,
};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::bed::{Head, driver, gone, is_running, job_on, own_program, soon};
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
    fn start(head: SocketAddr, args: &[&str]) -> Self {
        let child = Command::new(env!("CARGO_BIN_EXE_kolo-node"))
            .args(["--head", &head.to_string(), "--format", "json"])
            .args(args)
            .env_remove("KOLO_NODE_STATE_DIR")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self(child)
    }

    /// The line that it prints when it is registered; its errors if it ends instead.
    async fn ready(&mut self) -> Result<serde_json::Value, String> {
        let stdout = self.0.stdout.take().unwrap();
        let read = tokio::task::spawn_blocking(move || {
            let mut line = String::new();
            BufReader::new(stdout).read_line(&mut line).unwrap();
            line
        });
        let line = soon(read).await.unwrap();
        if line.is_empty() {
            return Err(self.errors());
        }
        Ok(serde_json::from_str(&line).unwrap())
    }

    /// What it says on standard error until its end.
    fn errors(&mut self) -> String {
        let mut text = String::new();
        let mut stderr = self.0.stderr.take().unwrap();
        stderr.read_to_string(&mut text).unwrap();
        text
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.0.id().try_into().unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    async fn end(&mut self) -> ExitStatus {
        soon(async {
            loop {
                if let Some(status) = self.0.try_wait().unwrap() {
                    return status;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
    }
}

fn text(value: &serde_json::Value, name: &str) -> String {
    value[name].as_str().unwrap().to_owned()
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[tokio::test]
async fn it_joins_with_a_token_and_keeps_its_identity() {
    let dir = TempDir::new().unwrap();
    let state = dir.path().join("state");
    let token = dir.path().join("token");
    let config = HeadConfig {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        ..HeadConfig::default()
    };
    let head = kolo_runtime::Head::start(config).await.unwrap();
    let once = head.create_token(Role::Node, Duration::from_secs(600), Some(1));
    std::fs::write(&token, format!("{once}\n")).unwrap();
    let args = ["--token-file", path(&token), "--state-dir", path(&state)];
    let more = [
        "--hostname",
        "elsewhere",
        "--cpus",
        "2.5",
        "--gpus",
        "1",
        "--resource",
        "fpga=2",
    ];
    let mut daemon = Daemon::start(head.address(), &[&args[..], &more[..]].concat());
    let ready = daemon.ready().await.unwrap();
    assert_eq!(text(&ready, "hostname"), "elsewhere");
    assert_eq!(ready["pid"], daemon.0.id());
    assert!(text(&ready, "node").parse::<NodeId>().is_ok());
    soon(head.wait_for_nodes(1, Duration::from_secs(60)))
        .await
        .unwrap();
    daemon.signal(Signal::TERM);
    assert!(daemon.end().await.success());
    // Without the token, which is used up.
    std::fs::remove_file(&token).unwrap();
    let mut again = Daemon::start(head.address(), &["--state-dir", path(&state)]);
    let second = again.ready().await.unwrap();
    assert_eq!(second["node"], ready["node"]);
    again.signal(Signal::INT);
    assert!(again.end().await.success());
    // And never with a token that is used up.
    std::fs::write(&token, once.to_string()).unwrap();
    let mut third = Daemon::start(head.address(), &["--token-file", path(&token)]);
    let error = third.ready().await.unwrap_err();
    assert!(error.contains("the head refused"), "{error}");
    assert!(!error.contains(&once.to_string()), "{error}");
    assert_eq!(third.end().await.code(), Some(1));
    soon(head.stop()).await;
}

/// A token for one use is used up by then.
#[tokio::test]
async fn a_start_that_fails_after_the_join_has_kept_the_identity() {
    let dir = TempDir::new().unwrap();
    let state = dir.path().join("state");
    let token = dir.path().join("token");
    let head = kolo_runtime::Head::start(HeadConfig::default())
        .await
        .unwrap();
    let once = head.create_token(Role::Node, Duration::from_secs(600), Some(1));
    std::fs::write(&token, format!("{once}\n")).unwrap();
    let taken = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let listen = taken.local_addr().unwrap().to_string();
    let args = ["--token-file", path(&token), "--state-dir", path(&state)];
    let mut daemon = Daemon::start(
        head.address(),
        &[&args[..], &["--listen", &listen]].concat(),
    );
    let error = daemon.ready().await.unwrap_err();
    assert!(error.contains(&listen), "{error}");
    assert_eq!(daemon.end().await.code(), Some(1));
    let mut again = Daemon::start(head.address(), &["--state-dir", path(&state)]);
    again.ready().await.unwrap();
    again.signal(Signal::INT);
    assert!(again.end().await.success());
    soon(head.stop()).await;
}

/// Two that took turns would end each other's jobs every few seconds.
#[tokio::test]
async fn a_copy_of_a_node_is_refused_and_says_what_to_do() {
    let dir = TempDir::new().unwrap();
    let state = |name: &str| dir.path().join(name);
    let config = HeadConfig {
        lease: Duration::from_secs(4),
        ..HeadConfig::default()
    };
    let head = kolo_runtime::Head::start(config).await.unwrap();
    let name = NodeId::random().to_string();
    let credentials = head.authority().issue(Role::Node, &name).unwrap();
    for copy in ["first", "second"] {
        let identity = state(copy).join("identity");
        std::fs::create_dir(state(copy)).unwrap();
        credentials.save(&identity).unwrap();
    }
    let (first, second) = (state("first"), state("second"));
    let mut original = Daemon::start(head.address(), &["--state-dir", path(&first)]);
    let ready = original.ready().await.unwrap();
    assert_eq!(text(&ready, "node"), name);
    let args = ["--state-dir", path(&second), "--join-timeout", "1s"];
    let mut copy = Daemon::start(head.address(), &args);
    let error = copy.ready().await.unwrap_err();
    assert_eq!(copy.end().await.code(), Some(1));
    for part in [
        &format!("another daemon is registered as {name}"),
        &text(&ready, "address"),
        "stop one of the two, or give this one a state folder of its own and a token",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    // The first has noticed nothing.
    original.signal(Signal::TERM);
    assert!(original.end().await.success());
    let errors = original.errors();
    assert!(!errors.contains("is lost"), "{errors}");
    // When it is gone, be it without a goodbye, the second may have its place.
    let mut original = Daemon::start(head.address(), &["--state-dir", path(&first)]);
    original.ready().await.unwrap();
    original.signal(Signal::KILL);
    original.end().await;
    let mut copy = Daemon::start(head.address(), &["--state-dir", path(&second)]);
    let ready = copy.ready().await.unwrap();
    assert_eq!(text(&ready, "node"), name);
    copy.signal(Signal::TERM);
    assert!(copy.end().await.success());
    soon(head.stop()).await;
}

#[tokio::test]
async fn a_head_that_is_not_there_is_an_error_in_time() {
    let dir = TempDir::new().unwrap();
    let authority = Authority::create(ClusterId::random()).unwrap();
    let name = NodeId::random().to_string();
    let credentials = authority.issue(Role::Node, &name).unwrap();
    credentials.save(&dir.path().join("identity")).unwrap();
    let free = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let nobody = free.local_addr().unwrap();
    let begin = Instant::now();
    let args = ["--state-dir", path(dir.path()), "--join-timeout", "200ms"];
    let mut daemon = Daemon::start(nobody, &args);
    let error = daemon.ready().await.unwrap_err();
    assert!(error.contains("did not answer in time"), "{error}");
    assert!(error.contains(&nobody.to_string()), "{error}");
    assert_eq!(daemon.end().await.code(), Some(1));
    assert!(begin.elapsed() < Duration::from_secs(20));
}

#[tokio::test]
async fn wrong_arguments_are_named() {
    let nobody = SocketAddr::from(([127, 0, 0, 1], 9));
    let cases = [
        (&["--resource", "fpga"][..], "NAME=AMOUNT", 2),
        (&["--join-timeout", "3"], "is not a duration", 2),
        (&["--listen", "here"], "--listen", 2),
        (&["--log", "a=b=c"], "--log", 2),
        (&["--cpus", "two"], "--cpus", 2),
        (&[], "--token-file", 1),
        (&["--token-file", "/no/such/file"], "/no/such/file", 1),
    ];
    for (args, expected, code) in cases {
        let mut daemon = Daemon::start(nobody, args);
        let error = daemon.ready().await.unwrap_err();
        assert!(error.contains(expected), "{args:?}: {error}");
        assert_eq!(daemon.end().await.code(), Some(code), "{args:?}");
    }
}

/// A daemon that is registered with a head of the test, and runs one worker with a grandchild.
struct Busy {
    daemon: Daemon,
    head: Head,
    job: StartWorkers,
    processes: [u32; 2],
    _runtime: TransportRuntime,
    state: TempDir,
}

impl Busy {
    /// The warden of its job.
    fn warden(&self) -> Pid {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.processes[0])).unwrap();
        let after_name = stat.rsplit(')').next().unwrap();
        let parent = after_name.split_whitespace().nth(1).unwrap();
        Pid::from_raw(parent.parse().unwrap()).unwrap()
    }
}

async fn busy() -> Busy {
    let runtime = TransportRuntime::new(1).unwrap();
    let authority = Arc::new(Authority::create(ClusterId::random()).unwrap());
    let head = Head::start(&runtime, authority, EndpointConfig::default());
    let state = TempDir::new().unwrap();
    let node = NodeId::random();
    let credentials = head.authority.issue(Role::Node, &node.to_string()).unwrap();
    credentials.save(&state.path().join("identity")).unwrap();
    let args = ["--state-dir", path(state.path())];
    let mut daemon = Daemon::start(head.endpoint.local_addr(), &args);
    let ready = daemon.ready().await.unwrap();
    let address: SocketAddr = text(&ready, "address").parse().unwrap();
    let owner = DriverId::random();
    let driver = driver(&runtime, &head.authority, owner);
    let connection = soon(driver.connect(address, Expect::node(node)))
        .await
        .unwrap();
    let (program, file) = own_program();
    let content = std::fs::read(file).unwrap();
    assert_eq!(put(&connection, &program, &content).await, NodeReply::Done);
    let job = job_on(node, owner, 1, "stubborn");
    let pids = reserve_and_start(&head, &job).await;
    assert!(matches!(head.event().await, NodeEvent::WorkerReady { .. }));
    let mut calls = crate::bed::Calls::open(connection, job.job).await;
    let grandchild = calls.call(0, "grandchild").await.parse().unwrap();
    Busy {
        daemon,
        head,
        job,
        processes: [pids[0].1, grandchild],
        _runtime: runtime,
        state,
    }
}

async fn reserve_and_start(head: &Head, start: &StartWorkers) -> Vec<(Slot, u32)> {
    let reserve = NodeRequest::Reserve {
        job: start.job,
        per_worker: Resources::default(),
        workers: 1,
        lease_ms: 60_000,
        program: start.program.hash,
        installed: None,
        health_check: None,
    };
    let reply = head.ask(reserve).await;
    let has_program = matches!(
        reply,
        NodeReply::Reserved {
            has_program: true,
            ..
        }
    );
    assert!(has_program, "{reply:?}");
    match head.ask(NodeRequest::Start(start.clone())).await {
        NodeReply::Started { pids } => pids,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn jobs_leave_no_descriptors_and_no_threads_behind() {
    let busy = busy().await;
    let pid = busy.daemon.0.id();
    let count = |what: &str| {
        std::fs::read_dir(format!("/proc/{pid}/{what}"))
            .unwrap()
            .count()
    };
    let stop = async |job| {
        let reason = String::new();
        let reply = busy
            .head
            .ask(NodeRequest::Stop {
                job,
                reason,
                interrupt: false,
            })
            .await;
        assert_eq!(reply, NodeReply::Done);
    };
    let worker = Pid::from_raw(busy.processes[0].try_into().unwrap()).unwrap();
    kill_process(worker, Signal::KILL).unwrap();
    stop(busy.job.job).await;
    let descriptors = count("fd");
    let mut start = busy.job.clone();
    start.user_env.clear();
    for round in 0..5 {
        start.job = JobId(round);
        reserve_and_start(&busy.head, &start).await;
        stop(start.job).await;
    }
    soon(async {
        while count("fd") > descriptors {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    // Main, actors, transport, and some for blocking work.
    assert!(count("task") < 32);
}

#[tokio::test]
async fn when_it_is_killed_its_workers_are_gone() {
    let mut busy = busy().await;
    assert!(busy.processes.iter().all(|pid| is_running(*pid)));
    busy.daemon.signal(Signal::KILL);
    busy.daemon.end().await;
    for pid in busy.processes {
        gone(pid).await;
    }
    busy.head.endpoint.close(CloseCode::Done, "");
}

#[tokio::test]
async fn when_a_warden_is_killed_nothing_of_its_job_is_left_and_the_node_lives_on() {
    let busy = busy().await;
    let began = Instant::now();
    kill_process(busy.warden(), Signal::KILL).unwrap();
    for pid in busy.processes {
        gone(pid).await;
    }
    let event = busy.head.event().await;
    assert!(
        matches!(&event, NodeEvent::WorkerExited { .. }),
        "{event:?}"
    );
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "{:?}",
        began.elapsed()
    );
    let reason = String::new();
    let job = busy.job.job;
    let interrupt = false;
    let stop = NodeRequest::Stop {
        job,
        reason,
        interrupt,
    };
    let reply = busy.head.ask(stop).await;
    assert_eq!(reply, NodeReply::Done);
    let mut next = busy.job.clone();
    next.job = JobId::random();
    let pids = reserve_and_start(&busy.head, &next).await;
    assert!(is_running(pids[0].1));
}

#[tokio::test]
async fn a_daemon_ends_what_the_one_before_it_has_left() {
    let mut busy = busy().await;
    let warden = busy.warden();
    // So that it can't help.
    kill_process(warden, Signal::STOP).unwrap();
    busy.daemon.signal(Signal::KILL);
    busy.daemon.end().await;
    kill_process(warden, Signal::KILL).unwrap();
    gone(busy.processes[0]).await;
    assert!(is_running(busy.processes[1]), "nobody is left to end it");
    let args = ["--state-dir", path(busy.state.path())];
    let mut daemon = Daemon::start(busy.head.endpoint.local_addr(), &args);
    daemon.ready().await.unwrap();
    assert!(!is_running(busy.processes[1]));
}

#[tokio::test]
async fn a_second_signal_ends_it_at_once_and_its_workers_too() {
    let mut busy = busy().await;
    busy.daemon.signal(Signal::TERM);
    // Its worker pays no attention and has a minute's grace.
    let stderr = busy.daemon.0.stderr.take().unwrap();
    let told = tokio::task::spawn_blocking(move || {
        let stopping = |line: &std::io::Result<String>| {
            line.as_ref()
                .is_ok_and(|line| line.contains("a second signal"))
        };
        BufReader::new(stderr).lines().any(|line| stopping(&line))
    });
    assert!(soon(told).await.unwrap());
    busy.daemon.signal(Signal::INT);
    assert_eq!(busy.daemon.end().await.code(), Some(1));
    for pid in busy.processes {
        gone(pid).await;
    }
}
