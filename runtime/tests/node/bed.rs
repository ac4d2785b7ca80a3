//! A node between a head and a driver that are tasks of the test.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use kolo_runtime::{Node, NodeConfig, NodeResources, ProgramSource};
use kolo_transport::ids::{
    CallId, ClusterId, CrossRank, DriverId, Generation, Incarnation, JobId, LocalRank, NodeId,
    Rank, Slot,
};
use kolo_transport::wire::head::Beat;
use kolo_transport::wire::{
    CallFrame, CallOp, CallReply, GenerationTable, Handover, HeadReply, HeadRequest, Member,
    NodeEvent, NodeRegistration, NodeReply, NodeRequest, OnChange, Outcome, Program, ProgramHash,
    RankFailure, Refusal, RefusalKind, Resources, SlotStart, StartWorkers,
};
use kolo_transport::{
    Authority, CloseCode, Connection, Endpoint, EndpointConfig, Expect, Frame, Limits,
    RandomId as _, Role, Stream, TransportRuntime,
};
use tokio::sync::{Mutex, mpsc, watch};

use crate::worker;

/// Waits for what must happen soon.
pub(crate) async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(60), future)
        .await
        .expect("it did not happen in time")
}

/// What the head learned.
pub(crate) struct Head {
    pub(crate) endpoint: Endpoint,
    pub(crate) authority: Arc<Authority>,
    pub(crate) events: Mutex<mpsc::Receiver<NodeEvent>>,
    pub(crate) registrations: Mutex<mpsc::Receiver<NodeRegistration>>,
    connection: watch::Receiver<Option<Connection>>,
    /// Whether heartbeats stay without an answer.
    pub(crate) mute: Arc<AtomicBool>,
    /// So many requests to sign fail in passing, half of them without an answer.
    pub(crate) unsigned: Arc<AtomicU32>,
    /// Whether events and drains are refused, as if the node were not registered any more.
    pub(crate) forbid: Arc<AtomicBool>,
}

impl Head {
    pub(crate) fn start(
        runtime: &TransportRuntime,
        authority: Arc<Authority>,
        config: EndpointConfig,
    ) -> Self {
        Self::start_with_lease(runtime, authority, config, 60_000)
    }

    pub(crate) fn start_with_lease(
        runtime: &TransportRuntime,
        authority: Arc<Authority>,
        config: EndpointConfig,
        lease_ms: u64,
    ) -> Self {
        let mute = Arc::new(AtomicBool::new(false));
        let forbid = Arc::new(AtomicBool::new(false));
        let unsigned = Arc::new(AtomicU32::new(0));
        let credentials = authority.issue(Role::Head, "head").unwrap();
        let endpoint = Endpoint::bind(runtime, credentials, config).unwrap();
        let (event_sender, events) = mpsc::channel(1000);
        let (registration_sender, registrations) = mpsc::channel(10);
        let (connection_sender, connection) = watch::channel(None);
        let accepting = endpoint.clone();
        let signing = authority.clone();
        let muting = mute.clone();
        let forbidding = forbid.clone();
        let put_off = unsigned.clone();
        runtime.handle().spawn(async move {
            while let Some(connection) = accepting.accept().await {
                assert_eq!(connection.peer().role, Role::Node);
                let streams = Streams {
                    lease_ms,
                    mute: muting.clone(),
                    forbid: forbidding.clone(),
                    unsigned: put_off.clone(),
                    events: event_sender.clone(),
                    registrations: registration_sender.clone(),
                    authority: signing.clone(),
                    registered: connection_sender.clone(),
                };
                tokio::spawn(async move {
                    while let Ok(stream) = connection.accept(Limits::CONTROL).await {
                        tokio::spawn(streams.clone().serve(connection.clone(), stream));
                    }
                });
            }
        });
        Self {
            endpoint,
            authority,
            events: Mutex::new(events),
            registrations: Mutex::new(registrations),
            connection,
            mute,
            forbid,
            unsigned,
        }
    }

    /// Asks the node.
    pub(crate) async fn ask(&self, request: NodeRequest) -> NodeReply {
        let connection = soon(self.connection.clone().wait_for(Option::is_some))
            .await
            .unwrap()
            .clone()
            .unwrap();
        connection
            .request(&request, Duration::from_secs(60))
            .await
            .unwrap()
    }

    /// Ends the connection of the node that registered last.
    pub(crate) async fn hang_up(&self, code: CloseCode) {
        let mut connection = self.connection.clone();
        let connection = soon(connection.wait_for(Option::is_some)).await.unwrap();
        connection
            .as_ref()
            .unwrap()
            .close(code, "as the test wants it");
    }

    pub(crate) async fn event(&self) -> NodeEvent {
        soon(self.events.lock().await.recv()).await.unwrap()
    }
}

#[derive(Clone)]
struct Streams {
    events: mpsc::Sender<NodeEvent>,
    registrations: mpsc::Sender<NodeRegistration>,
    authority: Arc<Authority>,
    registered: watch::Sender<Option<Connection>>,
    lease_ms: u64,
    mute: Arc<AtomicBool>,
    forbid: Arc<AtomicBool>,
    unsigned: Arc<AtomicU32>,
}

impl Streams {
    /// How many requests to sign are still to fail, this one included.
    fn fails_to_sign(&self) -> Option<u32> {
        let fewer = |left: u32| left.checked_sub(1);
        let (set, fetch) = (Ordering::Relaxed, Ordering::Relaxed);
        self.unsigned.fetch_update(set, fetch, fewer).ok()
    }

    async fn serve(self, connection: Connection, mut stream: Stream) {
        let Ok(frame) = stream.recv.expect::<HeadRequest>().await else {
            return;
        };
        let reply = match frame.head {
            HeadRequest::Register(registration) => {
                assert_eq!(connection.peer().node(), Some(registration.node));
                self.registrations.send(registration).await.unwrap();
                self.registered.send_replace(Some(connection));
                HeadReply::Registered {
                    revoked: kolo_transport::wire::RevocationList::default(),
                    heartbeat_ms: 50,
                    lease_ms: self.lease_ms,
                }
            }
            HeadRequest::Heartbeats => {
                while let Ok(Some(beat)) = stream.recv.next::<Beat>().await {
                    if self.mute.load(Ordering::Relaxed) {
                        continue;
                    }
                    if stream.send.send(&beat.head, &[]).await.is_err() {
                        return;
                    }
                }
                return;
            }
            HeadRequest::Events(_) | HeadRequest::Drain if self.forbid.load(Ordering::Relaxed) => {
                HeadReply::Refused(Refusal::new(RefusalKind::Forbidden, "register again"))
            }
            HeadRequest::Events(events) => {
                for event in events {
                    // A test that is over does not listen.
                    if self.events.send(event).await.is_err() {
                        return;
                    }
                }
                HeadReply::Done
            }
            HeadRequest::Drain => HeadReply::Done,
            HeadRequest::SignWorker { job, slot, csr } => {
                match self.fails_to_sign() {
                    None => {}
                    Some(left) if left % 2 == 0 => return stream.send.finish(),
                    Some(_) => {
                        let busy = Refusal::new(RefusalKind::Busy, "too much to do");
                        let busy = HeadReply::Refused(busy);
                        stream.send.send(&busy, &[]).await.unwrap();
                        return stream.send.finish();
                    }
                }
                let name = format!("{job}/{slot}");
                let hour = Duration::from_secs(3600);
                let certificate = self
                    .authority
                    .sign(&csr, Role::Worker, &name, hour)
                    .unwrap();
                HeadReply::Signed {
                    certificate: certificate.to_vec(),
                    generation: Generation(1),
                }
            }
            other => panic!("a node asks {other:?}"),
        };
        // The node may have gone meanwhile.
        drop(stream.send.send(&reply, &[]).await);
        stream.send.finish();
    }
}

/// A job with this many workers in this mode, all on one node.
pub(crate) fn job_on(node: NodeId, owner: DriverId, workers: u32, mode: &str) -> StartWorkers {
    let member = |rank| Member {
        rank: Rank(rank),
        local_rank: LocalRank(rank),
        local_size: workers,
        cross_rank: CrossRank(0),
        cross_size: 1,
        slot: Slot(rank),
        node,
        hostname: "bed".to_owned(),
        address: None,
        incarnation: Incarnation::FIRST,
    };
    StartWorkers {
        job: JobId::random(),
        generation: Generation(1),
        owner,
        program: own_program().0,
        args: ["worker_process", "--exact", "--nocapture"]
            .map(str::to_owned)
            .to_vec(),
        env: BTreeMap::new(),
        user_env: BTreeMap::from([(worker::MODE.to_owned(), mode.to_owned())]),
        slots: (0..workers)
            .map(|rank| SlotStart {
                member: member(rank),
                env: BTreeMap::new(),
            })
            .collect(),
        world_size: workers,
        needs_data_plane: false,
        hello_timeout_ms: 60_000,
        grace_ms: 60_000,
        installed: None,
        next_within_ms: None,
        on_change: OnChange::InPlace,
    }
}

/// A node, its head and a driver.
pub(crate) struct Bed {
    pub(crate) runtime: TransportRuntime,
    pub(crate) head: Head,
    pub(crate) node: Node,
    pub(crate) owner: DriverId,
    pub(crate) driver: Endpoint,
    pub(crate) program: Program,
}

/// This binary, which is also the program of the workers.
pub(crate) fn own_program() -> (Program, PathBuf) {
    static HASH: std::sync::OnceLock<(ProgramHash, u64)> = std::sync::OnceLock::new();
    let path = std::env::current_exe().unwrap();
    let (hash, size) = *HASH.get_or_init(|| {
        let content = std::fs::read(&path).unwrap();
        let hash = ProgramHash(*blake3::hash(&content).as_bytes());
        (hash, content.len() as u64)
    });
    let name = "worker".to_owned();
    (Program { hash, size, name }, path)
}

pub(crate) fn driver(runtime: &TransportRuntime, authority: &Authority, id: DriverId) -> Endpoint {
    let credentials = authority.issue(Role::Driver, &id.to_string()).unwrap();
    let config = EndpointConfig {
        accept: false,
        ..EndpointConfig::default()
    };
    Endpoint::bind(runtime, credentials, config).unwrap()
}

pub(crate) fn node_config(runtime: &TransportRuntime, head: &Head) -> NodeConfig {
    let id = NodeId::random();
    let credentials = head.authority.issue(Role::Node, &id.to_string()).unwrap();
    let (program, path) = own_program();
    let mut config = NodeConfig::new(head.endpoint.local_addr(), credentials);
    config.hostname = Some("bed".to_owned());
    config.transport = Some(runtime.clone());
    config.resources = NodeResources {
        cpus: Some(4.0),
        gpus: Some(4),
        custom: BTreeMap::new(),
    };
    config.programs = ProgramSource {
        preloaded: vec![(program.hash, path)],
        ..ProgramSource::default()
    };
    config.warden_exe = Some(env!("CARGO_BIN_EXE_kolo-node").into());
    config
}

impl Bed {
    pub(crate) async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    pub(crate) async fn start_with(change: impl FnOnce(&mut NodeConfig)) -> Self {
        let runtime = TransportRuntime::new(1).unwrap();
        let authority = Arc::new(Authority::create(ClusterId::random()).unwrap());
        let head = Head::start(&runtime, authority, EndpointConfig::default());
        let mut config = node_config(&runtime, &head);
        change(&mut config);
        let node = soon(Node::start(config)).await.unwrap();
        let owner = DriverId::random();
        Self {
            driver: driver(&runtime, &head.authority, owner),
            runtime,
            head,
            node,
            owner,
            program: own_program().0,
        }
    }

    /// A job with this many workers in this mode, all here.
    pub(crate) fn job(&self, workers: u32, mode: &str) -> StartWorkers {
        job_on(self.node.id(), self.owner, workers, mode)
    }

    pub(crate) async fn reserve(&self, start: &StartWorkers) -> NodeReply {
        let reserve = NodeRequest::Reserve {
            job: start.job,
            per_worker: Resources::default(),
            workers: start.slots.len() as u32,
            lease_ms: 60_000,
            program: start.program.hash,
            installed: None,
            health_check: None,
        };
        self.head.ask(reserve).await
    }

    /// Reserves and starts; gives the process ids.
    pub(crate) async fn launch(&self, start: &StartWorkers) -> Vec<u32> {
        let reply = self.reserve(start).await;
        assert!(matches!(reply, NodeReply::Reserved { .. }), "{reply:?}");
        let reply = self.head.ask(NodeRequest::Start(start.clone())).await;
        let NodeReply::Started { pids } = reply else {
            panic!("not started: {reply:?}");
        };
        let slots: Vec<Slot> = pids.iter().map(|(slot, _)| *slot).collect();
        let asked: Vec<Slot> = start.slots.iter().map(|slot| slot.member.slot).collect();
        assert_eq!(slots, asked);
        pids.into_iter().map(|(_, pid)| pid).collect()
    }

    /// A job whose workers are ready and know it.
    pub(crate) async fn healthy(&self, workers: u32, mode: &str) -> Job<'_> {
        self.healthy_with(self.job(workers, mode)).await
    }

    pub(crate) async fn healthy_with(&self, start: StartWorkers) -> Job<'_> {
        let pids = self.launch(&start).await;
        for _ in &start.slots {
            let event = self.head.event().await;
            assert!(matches!(event, NodeEvent::WorkerReady { .. }), "{event:?}");
        }
        let table = GenerationTable {
            job: start.job,
            generation: start.generation,
            members: start.slots.iter().map(|slot| slot.member.clone()).collect(),
            cause: String::new(),
            handover: Handover::None,
        };
        let reply = self.head.ask(NodeRequest::Membership(table.into())).await;
        assert_eq!(reply, NodeReply::Done);
        Job {
            bed: self,
            id: start.job,
            pids,
        }
    }

    /// The next exit that the node reports.
    pub(crate) async fn exit(&self) -> (RankFailure, bool) {
        match self.head.event().await {
            NodeEvent::WorkerExited {
                failure, expected, ..
            } => (failure, expected),
            other => panic!("{other:?} is no exit"),
        }
    }

    /// Starts a job of one worker that does not come up; why.
    pub(crate) async fn fails(&self, start: &StartWorkers) -> RankFailure {
        self.launch(start).await;
        let (failure, expected) = self.exit().await;
        assert!(!expected);
        failure
    }

    pub(crate) async fn stop(&self, job: JobId) {
        let reason = "the test is over".to_owned();
        let reply = self
            .head
            .ask(NodeRequest::Stop {
                job,
                reason,
                interrupt: false,
            })
            .await;
        assert_eq!(reply, NodeReply::Done);
    }

    pub(crate) async fn connect(&self) -> Connection {
        connect(&self.driver, &self.node).await
    }

    /// Ends everything, and checks that the node ends in good order.
    pub(crate) async fn end(self) {
        soon(self.node.stop()).await;
        self.driver.close(CloseCode::Done, "");
        self.head.endpoint.close(CloseCode::Done, "");
    }
}

pub(crate) async fn connect(driver: &Endpoint, node: &Node) -> Connection {
    soon(driver.connect(node.address(), Expect::node(node.id())))
        .await
        .unwrap()
}

/// A job that runs.
pub(crate) struct Job<'a> {
    pub(crate) bed: &'a Bed,
    pub(crate) id: JobId,
    pub(crate) pids: Vec<u32>,
}

impl Job<'_> {
    pub(crate) async fn attach(&self) -> Calls {
        Calls::open(self.bed.connect().await, self.id).await
    }

    pub(crate) async fn stop(self) {
        self.bed.stop(self.id).await;
    }
}

/// Opens a channel of calls.
pub(crate) async fn attach(
    connection: &Connection,
    job: JobId,
    generation: u64,
) -> Result<Stream, Refusal> {
    let mut stream = connection.open(Limits::CALLS).await.unwrap();
    let generation = Generation(generation);
    let request = NodeRequest::Attach { job, generation };
    stream.send.send(&request, &[]).await.unwrap();
    match soon(stream.recv.expect::<NodeReply>()).await.unwrap().head {
        NodeReply::Attached { .. } => Ok(stream),
        NodeReply::Refused(refusal) => Err(refusal),
        other => panic!("{other:?}"),
    }
}

pub(crate) fn call_frame(call: CallId, ranks: &[u32], function: &str) -> CallFrame {
    CallFrame::Call {
        call,
        generation: Generation(1),
        ranks: ranks.iter().copied().map(Rank).collect(),
        deadline_ms: None,
        op: CallOp::Function {
            name: function.to_owned(),
        },
    }
}

/// A driver's channel of calls.
pub(crate) struct Calls {
    pub(crate) stream: Stream,
    pub(crate) next: u64,
    /// Dropping it would end the stream.
    _connection: Connection,
}

impl Calls {
    pub(crate) async fn open(connection: Connection, job: JobId) -> Self {
        Self {
            stream: attach(&connection, job, 1).await.unwrap(),
            next: 1,
            _connection: connection,
        }
    }

    /// Sends a call of a function on ranks, without waiting.
    pub(crate) async fn send(&mut self, ranks: &[u32], function: &str, body: &[u8]) -> CallId {
        let call = CallId(self.next);
        self.next += 1;
        let frame = call_frame(call, ranks, function);
        soon(self.stream.send.send(&frame, body)).await.unwrap();
        call
    }

    pub(crate) async fn cancel(&mut self, call: CallId, ranks: &[u32]) {
        let ranks = ranks.iter().copied().map(Rank).collect();
        let frame = CallFrame::Cancel { call, ranks };
        self.stream.send.send(&frame, &[]).await.unwrap();
    }

    pub(crate) async fn reply(&mut self) -> Frame<CallReply> {
        soon(self.stream.recv.expect()).await.unwrap()
    }

    /// The next reply, which must be a result.
    pub(crate) async fn result(&mut self) -> (CallId, Rank, Outcome, Bytes) {
        let frame = self.reply().await;
        match frame.head {
            // Slot and rank are the same here.
            CallReply::Result {
                call,
                slot,
                outcome,
                ..
            } => (call, Rank(slot.0), outcome, frame.body),
            CallReply::Refused {
                call,
                rank,
                failure,
            } => (call, rank, Outcome::Failed(failure), frame.body),
            CallReply::Lost { failure, .. } => panic!("no result but: {failure}"),
        }
    }

    /// The next reply, which must be a loss.
    pub(crate) async fn loss(&mut self) -> (RankFailure, bool) {
        match self.reply().await.head {
            CallReply::Lost {
                failure, stopping, ..
            } => (failure, stopping),
            other => panic!("{other:?} is no loss"),
        }
    }

    /// Calls a function on one rank and gives its result as text.
    pub(crate) async fn call(&mut self, rank: u32, function: &str) -> String {
        let call = self.send(&[rank], function, b"").await;
        let (answered, from, outcome, body) = self.result().await;
        assert_eq!((answered, from), (call, Rank(rank)));
        assert_eq!(outcome, Outcome::Returned, "{function}");
        String::from_utf8(body.to_vec()).unwrap()
    }
}

/// Whether a process is there; one that has ended and was not reaped yet is not.
pub(crate) fn is_running(pid: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return false;
    };
    let state = stat
        .rsplit(") ")
        .next()
        .and_then(|rest| rest.chars().next());
    !matches!(state, Some('Z' | 'X') | None)
}

/// Waits until a process is gone.
pub(crate) async fn gone(pid: u32) {
    soon(async {
        while is_running(pid) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}
