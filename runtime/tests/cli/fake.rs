//! A head and nodes that speak the real protocol and say what the test wants.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kolo_transport::JoinHandler;
use kolo_transport::authority::Authority;
use kolo_transport::credentials::Credentials;
use kolo_transport::endpoint::{Endpoint, EndpointConfig};
use kolo_transport::frame::Limits;
use kolo_transport::identity::Role;
use kolo_transport::ids::{
    ClusterId, CrossRank, DriverId, Generation, Incarnation, JobId, LocalRank, NodeId, Rank, Slot,
};
use kolo_transport::runtime::TransportRuntime;
use kolo_transport::session::{Connection, FrameSender, Stream};
use kolo_transport::token::{JoinToken, TokenBook, random_secret};
use kolo_transport::wire::{
    ClusterInfo, GenerationTable, Handover, HeadReply, HeadRequest, JobEvent, JobInfo, JobSpec,
    JobState, JoinReply, JoinRequest, LogBatch, LogLine, Member, NodeDrain, NodeInfo, NodeReply,
    NodeRequest, PlacedNode, Refusal, RefusalKind, Resources, Stdio, SubmitFrame, WorkerInfo,
    WorkerState,
};
use tempfile::TempDir;
use tokio::sync::mpsc;

use crate::kolo::{Ran, command};

pub(crate) const CLUSTER: ClusterId = ClusterId(1);

/// What the head says.
#[derive(Debug)]
pub(crate) struct HeadState {
    pub(crate) cluster: ClusterInfo,
    pub(crate) jobs: Vec<JobInfo>,
    /// Nodes that were drained, by what deadline in milliseconds, or undrained.
    pub(crate) drained: Vec<(String, Option<u64>)>,
    /// Jobs that somebody wanted to stop.
    pub(crate) stopped: Vec<JobId>,
    /// Whether a stop is never answered.
    pub(crate) stop_hangs: bool,
    /// Jobs that were submitted, which never end.
    pub(crate) submitted: Vec<JobSpec>,
    /// What their drivers said.
    pub(crate) told: Vec<SubmitFrame>,
    /// Jobs are not healthy yet.
    pub(crate) starting: bool,
}

/// What a node says when it is asked for logs.
pub(crate) enum Logs {
    /// These lines, then the end.
    Kept(Vec<LogLine>),
    /// What comes over the channel, until it is closed.
    Live(mpsc::Receiver<LogLine>),
    /// No.
    Refused(Refusal),
}

pub(crate) struct Fake {
    pub(crate) runtime: TransportRuntime,
    pub(crate) authority: Arc<Authority>,
    pub(crate) head: Endpoint,
    pub(crate) state: Arc<Mutex<HeadState>>,
    tokens: Arc<Mutex<TokenBook>>,
    home: TempDir,
}

struct Join {
    authority: Arc<Authority>,
    tokens: Arc<Mutex<TokenBook>>,
}

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs()
}

impl JoinHandler for Join {
    fn join(&self, request: JoinRequest, _peer: std::net::SocketAddr) -> JoinReply {
        let redeemed = self
            .tokens
            .lock()
            .unwrap()
            .redeem(request.role, &request.secret, now());
        if let Err(error) = redeemed {
            return JoinReply::Refused(Refusal::new(RefusalKind::Token, error.to_string()));
        }
        let name = DriverId(10).to_string();
        let valid = Duration::from_secs(3600);
        let certificate = self
            .authority
            .sign(&request.csr, request.role, &name, valid)
            .unwrap();
        JoinReply::Joined {
            cluster: CLUSTER,
            name,
            certificate: certificate.to_vec(),
        }
    }
}

impl Fake {
    /// A cluster without nodes and jobs, and a user who is logged in.
    pub(crate) fn new() -> Self {
        let runtime = TransportRuntime::new(1).unwrap();
        let authority = Arc::new(Authority::create(CLUSTER).unwrap());
        let tokens = Arc::new(Mutex::new(TokenBook::new()));
        let config = EndpointConfig {
            join: Some(Arc::new(Join {
                authority: authority.clone(),
                tokens: tokens.clone(),
            })),
            ..EndpointConfig::default()
        };
        let head = Endpoint::bind(
            &runtime,
            authority.issue(Role::Head, "head").unwrap(),
            config,
        )
        .unwrap();
        let state = Arc::new(Mutex::new(HeadState {
            cluster: ClusterInfo {
                cluster: CLUSTER,
                version: "9.9.9".to_owned(),
                uptime_ms: 192_000,
                nodes: Vec::new(),
                running_jobs: 0,
                revoked: Vec::new(),
                time_ms: 0,
            },
            jobs: Vec::new(),
            stopped: Vec::new(),
            drained: Vec::new(),
            stop_hangs: false,
            submitted: Vec::new(),
            starting: false,
            told: Vec::new(),
        }));
        let fake = Self {
            runtime,
            authority,
            head,
            state,
            tokens,
            home: tempfile::tempdir().unwrap(),
        };
        fake.driver().save(&fake.credentials_dir()).unwrap();
        let (endpoint, state) = (fake.head.clone(), fake.state.clone());
        fake.serve(endpoint, move |stream| answer(stream, state.clone()));
        fake
    }

    pub(crate) fn home(&self) -> &Path {
        self.home.path()
    }

    /// Where `kolo` looks for credentials.
    pub(crate) fn credentials_dir(&self) -> PathBuf {
        self.home.path().join(".config/kolo")
    }

    pub(crate) fn driver(&self) -> Credentials {
        let name = DriverId(10).to_string();
        self.authority.issue(Role::Driver, &name).unwrap()
    }

    /// A token for one use.
    pub(crate) fn token(&self, role: Role) -> JoinToken {
        self.tokens.lock().unwrap().create(
            role,
            Duration::from_secs(60),
            Some(1),
            self.authority.fingerprint(),
            now(),
            random_secret(),
        )
    }

    /// A token in a file.
    pub(crate) fn token_file(&self, text: &str) -> String {
        let path = self.home.path().join("token");
        std::fs::write(&path, text).unwrap();
        // As `kolo token create --out` does.
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&path, private).unwrap();
        path.to_str().unwrap().to_owned()
    }

    pub(crate) fn address(&self) -> String {
        self.head.local_addr().to_string()
    }

    /// Runs `kolo` against this head.
    pub(crate) fn kolo(&self, args: &[&str]) -> Ran {
        Ran::of(&self.command(args).output().unwrap())
    }

    pub(crate) fn command(&self, args: &[&str]) -> std::process::Command {
        let mut command = command(self.home(), args);
        command.env("KOLO_HEAD", self.address());
        command
    }

    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut HeadState) -> T) -> T {
        change(&mut self.state.lock().unwrap())
    }

    /// A node that answers one request for logs.
    pub(crate) fn node(&self, id: NodeId, logs: Logs) -> FakeNode {
        let credentials = self.authority.issue(Role::Node, &id.to_string()).unwrap();
        let endpoint =
            Endpoint::bind(&self.runtime, credentials, EndpointConfig::default()).unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let logs = Arc::new(Mutex::new(Some(logs)));
        let seen = asked.clone();
        self.serve(endpoint.clone(), move |stream| {
            tell(stream, seen.clone(), logs.lock().unwrap().take())
        });
        FakeNode {
            id,
            endpoint,
            asked,
        }
    }

    fn serve<F>(
        &self,
        endpoint: Endpoint,
        handle: impl Fn(Stream) -> F + Clone + Send + Sync + 'static,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        self.runtime.handle().spawn(async move {
            while let Some(connection) = endpoint.accept().await {
                tokio::spawn(serve_connection(connection, handle.clone()));
            }
        });
    }
}

async fn serve_connection<F>(connection: Connection, handle: impl Fn(Stream) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    assert_eq!(connection.peer().role, Role::Driver);
    while let Ok(stream) = connection.accept(Limits::CONTROL).await {
        tokio::spawn(handle(stream));
    }
}

/// A job that is healthy at once, or as soon as it is not starting any more, and never ends, whatever it is told.
async fn run_for_ever(mut stream: Stream, state: Arc<Mutex<HeadState>>) {
    let job = JobId(77);
    let table = GenerationTable {
        job,
        generation: Generation(1),
        members: Vec::new(),
        cause: String::new(),
        handover: Handover::None,
    };
    let nodes = Vec::new();
    let placed = JobEvent::Placed {
        job,
        nodes: nodes.clone(),
    };
    stream.send.send(&placed, &[]).await.unwrap();
    while state.lock().unwrap().starting {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let healthy = JobEvent::Healthy { table, nodes };
    stream.send.send(&healthy, &[]).await.unwrap();
    while let Ok(Some(frame)) = stream.recv.next::<SubmitFrame>().await {
        state.lock().unwrap().told.push(frame.head);
    }
}

async fn answer(mut stream: Stream, state: Arc<Mutex<HeadState>>) {
    let request: HeadRequest = stream.recv.expect().await.unwrap().head;
    if let HeadRequest::Submit(spec) = request {
        state.lock().unwrap().submitted.push(spec);
        return run_for_ever(stream, state).await;
    }
    let unknown = || HeadReply::Refused(Refusal::new(RefusalKind::NotFound, "no such job"));
    let reply = {
        let mut state = state.lock().unwrap();
        match request {
            HeadRequest::Cluster => HeadReply::Cluster(state.cluster.clone()),
            HeadRequest::Jobs => HeadReply::Jobs(state.jobs.clone()),
            HeadRequest::Job { job } => {
                let found = state.jobs.iter().find(|info| info.job == job);
                found.cloned().map_or_else(unknown, HeadReply::Job)
            }
            HeadRequest::Stop { job } => {
                state.stopped.push(job);
                match state.jobs.iter_mut().find(|info| info.job == job) {
                    None => unknown(),
                    Some(info) => {
                        info.state = JobState::Stopped;
                        HeadReply::Done
                    }
                }
            }
            // `login` asks so whether an identity is an administrator's: none is.
            HeadRequest::DrainNode { node, deadline_ms } => {
                state.drained.push((node, Some(deadline_ms)));
                HeadReply::Draining(NodeDrain {
                    node: NodeId(30),
                    hostname: "box".to_owned(),
                    leaving: vec![JobId(20)],
                    staying: vec![JobId(21), JobId(22)],
                })
            }
            HeadRequest::UndrainNode { node } => {
                state.drained.push((node, None));
                HeadReply::Done
            }
            HeadRequest::Tokens => HeadReply::Refused(Refusal::new(
                RefusalKind::Forbidden,
                "only administrators may do this",
            )),
            other => panic!("nobody asks that: {other:?}"),
        }
    };
    let hangs = matches!(reply, HeadReply::Done) && state.lock().unwrap().stop_hangs;
    if hangs {
        // Until the client has enough.
        drop(stream.send.stopped().await);
        return;
    }
    finish(&mut stream.send, &reply).await;
}

async fn finish(send: &mut FrameSender, reply: &impl serde::Serialize) {
    // A client that has gone meanwhile is what some tests are about.
    if send.send(reply, &[]).await.is_ok() {
        send.finish();
    }
}

/// What a request for logs has asked for: ranks, tail, follow.
pub(crate) type Asked = (Vec<u32>, Option<u32>, bool);

pub(crate) struct FakeNode {
    pub(crate) id: NodeId,
    pub(crate) endpoint: Endpoint,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl FakeNode {
    pub(crate) fn placed(&self, ranks: &[u32]) -> PlacedNode {
        placed(self.id, self.endpoint.local_addr(), ranks)
    }

    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

async fn tell(mut stream: Stream, seen: Arc<Mutex<Vec<Asked>>>, logs: Option<Logs>) {
    let request: NodeRequest = stream.recv.expect().await.unwrap().head;
    let NodeRequest::Logs {
        ranks,
        tail,
        follow,
        ..
    } = request
    else {
        panic!("nobody asks that: {request:?}");
    };
    let ranks = ranks.iter().map(|rank| rank.0).collect();
    seen.lock().unwrap().push((ranks, tail, follow));
    let send = &mut stream.send;
    match logs.expect("only one request is expected") {
        Logs::Refused(refusal) => finish(send, &NodeReply::Refused(refusal)).await,
        Logs::Kept(lines) => {
            send.send(&NodeReply::Logs, &[]).await.unwrap();
            for lines in lines.chunks(2) {
                let lines = lines.to_vec();
                if send.send(&LogBatch { lines }, &[]).await.is_err() {
                    return;
                }
            }
            send.finish();
            // The stream must live until the other side has it all.
            drop(send.stopped().await);
        }
        Logs::Live(mut lines) => {
            send.send(&NodeReply::Logs, &[]).await.unwrap();
            while let Some(line) = lines.recv().await {
                if send
                    .send(&LogBatch { lines: vec![line] }, &[])
                    .await
                    .is_err()
                {
                    return;
                }
            }
            send.finish();
            drop(send.stopped().await);
        }
    }
}

pub(crate) fn line(rank: u32, seq: u64, time_ms: u64, text: &str) -> LogLine {
    LogLine {
        rank: Rank(rank),
        stream: Stdio::Stdout,
        seq,
        time_ms,
        text: text.as_bytes().to_vec(),
    }
}

pub(crate) fn placed(node: NodeId, address: std::net::SocketAddr, ranks: &[u32]) -> PlacedNode {
    PlacedNode {
        node,
        hostname: "box".to_owned(),
        address,
        ranks: ranks.iter().copied().map(Rank).collect(),
        has_program: true,
    }
}

pub(crate) fn node_info(id: NodeId, alive: bool) -> NodeInfo {
    NodeInfo {
        node: id,
        hostname: "box".to_owned(),
        address: ([10, 0, 0, 1], 4000).into(),
        alive,
        total: Resources::default(),
        available: Resources::default(),
        last_seen_ms: 4000,
        jobs: Vec::new(),
        draining: false,
    }
}

pub(crate) fn job(id: u64, state: JobState, nodes: Vec<PlacedNode>) -> JobInfo {
    let workers = nodes
        .iter()
        .enumerate()
        .flat_map(|(index, node)| node.ranks.iter().map(move |rank| (index, node, rank)))
        .map(|(index, node, rank)| WorkerInfo {
            member: Member {
                rank: *rank,
                local_rank: LocalRank(rank.0 % 2),
                local_size: node.ranks.len() as u32,
                cross_rank: CrossRank(index as u32),
                cross_size: nodes.len() as u32,
                slot: Slot(rank.0),
                node: node.node,
                hostname: node.hostname.clone(),
                address: None,
                incarnation: Incarnation::FIRST,
            },
            state: WorkerState::Ready,
            pid: 100 + rank.0,
            exit: None,
        })
        .collect();
    JobInfo {
        state,
        generation: Generation(1),
        workers,
        nodes,
        age_ms: 61_000,
        ..JobInfo::new(JobId(id), "digits", DriverId(10))
    }
}
