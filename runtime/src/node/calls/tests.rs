//! Channels over the generations of an elastic job.

use std::collections::BTreeMap;
use std::time::Duration;

use kolo_actors::node::ControlReceiver;
use kolo_transport::endpoint::{Endpoint, EndpointConfig, Expect};
use kolo_transport::frame::{FrameReader, Limits, encode};
use kolo_transport::identity::Role;
use kolo_transport::ids::{
    CallId, ClusterId, CrossRank, Incarnation, LocalRank, NodeId, Rank, Slot,
};
use kolo_transport::wire::{
    CallFrame, CallOp, CallReply, Exit, Handover, Member, NodeRequest, OnChange, Outcome, Program,
    ProgramHash, RankFailure, ToWorker, WorkerCall, WorkerResult,
};
use kolo_transport::{Authority, RandomId as _, TransportRuntime};
use tokio::io::AsyncWriteExt as _;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use super::*;

const JOB: JobId = JobId(7);
const DRIVER: DriverId = DriverId(1);

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(30), future)
        .await
        .expect("it hangs")
}

fn process(slot: u32, incarnation: u64) -> Process {
    Process {
        slot: Slot(slot),
        incarnation: Incarnation(incarnation),
    }
}

/// A node's plane of calls with an elastic job, and a connection of its driver.
struct Plane {
    calls: Arc<Calls>,
    driver: Connection,
    _endpoints: [Endpoint; 2],
    _runtime: TransportRuntime,
}

/// A worker's ends of its sockets.
struct Worker {
    read: FrameReader<OwnedReadHalf>,
    write: OwnedWriteHalf,
    control: ControlReceiver,
}

impl Plane {
    async fn new() -> Self {
        let runtime = TransportRuntime::new(1).unwrap();
        let authority = Authority::create(ClusterId::random()).unwrap();
        let bind = |role, name: &str| {
            let credentials = authority.issue(role, name).unwrap();
            Endpoint::bind(&runtime, credentials, EndpointConfig::default()).unwrap()
        };
        let id = NodeId(3);
        let node = bind(Role::Node, &id.to_string());
        let driver = bind(Role::Driver, &DRIVER.to_string());
        let calls = Calls::new(runtime.handle().clone());
        calls.open(&StartWorkers {
            job: JOB,
            generation: Generation(0),
            owner: DRIVER,
            program: Program {
                hash: ProgramHash([0; 32]),
                size: 0,
                name: "train".to_owned(),
            },
            args: Vec::new(),
            env: BTreeMap::new(),
            user_env: BTreeMap::new(),
            slots: Vec::new(),
            world_size: 0,
            needs_data_plane: true,
            hello_timeout_ms: 0,
            grace_ms: 0,
            installed: None,
            next_within_ms: Some(1_000),
            on_change: OnChange::InPlace,
        });
        let (plane, listening) = (calls.clone(), node.clone());
        runtime.handle().spawn(async move {
            let connection = listening.accept().await.unwrap();
            while let Ok(mut stream) = connection.accept(Limits::CALLS).await {
                let (plane, connection) = (plane.clone(), connection.clone());
                tokio::spawn(async move {
                    let first = stream.recv.expect::<NodeRequest>().await.unwrap().head;
                    let NodeRequest::Attach { job, generation } = first else {
                        panic!("{first:?}");
                    };
                    let attach = Attach {
                        driver: DRIVER,
                        job,
                        generation,
                    };
                    drop(plane.attach(stream, &connection, attach).await);
                });
            }
        });
        let connection = driver.connect(node.local_addr(), Expect::node(id)).await;
        Self {
            calls,
            driver: connection.unwrap(),
            _endpoints: [node, driver],
            _runtime: runtime,
        }
    }

    /// A process starts.
    fn spawn(&self, process: Process) -> Worker {
        let (node, worker) = StdUnixStream::pair().unwrap();
        let (sender, control) = ControlSender::channel();
        let end = self.calls.link(JOB, process, node, sender).unwrap();
        drop(end);
        worker.set_nonblocking(true).unwrap();
        let (read, write) = tokio::net::UnixStream::from_std(worker)
            .unwrap()
            .into_split();
        Worker {
            read: FrameReader::new(read, Limits::CALLS),
            write,
            control,
        }
    }

    /// A generation is complete whose rank `r` is this process.
    fn complete(&self, generation: u64, processes: &[Process]) {
        let members = (0..).zip(processes).map(|(rank, process)| Member {
            rank: Rank(rank),
            local_rank: LocalRank(rank),
            local_size: processes.len() as u32,
            cross_rank: CrossRank(0),
            cross_size: 1,
            slot: process.slot,
            incarnation: process.incarnation,
            node: NodeId(3),
            hostname: "here".to_owned(),
            address: None,
        });
        self.calls.complete(&GenerationTable {
            job: JOB,
            generation: Generation(generation),
            members: members.collect(),
            cause: "a worker was lost".to_owned(),
            handover: Handover::Sync,
        });
    }

    fn lose(&self, process: Process) {
        self.calls.lost(&LostWorker {
            job: JOB,
            slot: process.slot,
            incarnation: process.incarnation,
            failure: RankFailure {
                rank: Rank(9),
                node: NodeId(3),
                hostname: "here".to_owned(),
                pid: 4711,
                exit: Exit::Signal(9),
                reason: None,
                stderr_tail: Vec::new(),
                account: None,
            },
            stopping: false,
        });
    }

    async fn attach(&self, generation: u64) -> (NodeReply, Driver) {
        let mut stream = self.driver.open(Limits::CALLS).await.unwrap();
        let generation = Generation(generation);
        let request = NodeRequest::Attach {
            job: JOB,
            generation,
        };
        stream.send.send(&request, &[]).await.unwrap();
        let reply = soon(stream.recv.expect()).await.unwrap().head;
        (reply, Driver { stream, generation })
    }
}

/// A driver's channel for one generation.
struct Driver {
    stream: Stream,
    generation: Generation,
}

impl Driver {
    async fn call(&mut self, call: u64, rank: u32) {
        let frame = CallFrame::Call {
            call: CallId(call),
            generation: self.generation,
            ranks: vec![Rank(rank)],
            deadline_ms: None,
            op: CallOp::Function {
                name: "train".to_owned(),
            },
        };
        self.stream.send.send(&frame, b"args").await.unwrap();
    }

    async fn reply(&mut self) -> CallReply {
        soon(self.stream.recv.expect()).await.unwrap().head
    }
}

impl Worker {
    async fn call(&mut self) -> (CallId, Generation) {
        let frame = soon(self.read.next::<WorkerCall>()).await.unwrap();
        let head = frame.expect("the node has closed the socket").head;
        (head.call, head.generation)
    }

    async fn returns(&mut self, call: u64, generation: u64) {
        let result = WorkerResult {
            call: CallId(call),
            generation: Generation(generation),
            outcome: Outcome::Returned,
        };
        let mut out = bytes::BytesMut::new();
        encode(&mut out, &result, b"").unwrap();
        self.write.write_all(&out).await.unwrap();
    }
}

fn result(call: u64, slot: u32, generation: u64) -> CallReply {
    CallReply::Result {
        call: CallId(call),
        slot: Slot(slot),
        generation: Generation(generation),
        outcome: Outcome::Returned,
    }
}

fn attached(reply: &NodeReply) -> Vec<u32> {
    match reply {
        NodeReply::Attached { ranks } => ranks.iter().map(|rank| rank.0).collect(),
        other => panic!("{other:?}"),
    }
}

fn is_loss(reply: &CallReply, of: Process) -> bool {
    matches!(
        reply,
        CallReply::Lost { slot, incarnation, .. }
            if (*slot, *incarnation) == (of.slot, of.incarnation)
    )
}

#[tokio::test]
async fn a_channel_never_reaches_a_later_process_of_a_slot() {
    let plane = Plane::new().await;
    let (mut stays, mut goes) = (plane.spawn(process(4, 1)), plane.spawn(process(5, 1)));
    plane.complete(1, &[process(4, 1), process(5, 1)]);
    let (reply, mut first) = plane.attach(1).await;
    assert_eq!(attached(&reply), [0, 1]);
    first.call(1, 0).await;
    first.call(2, 1).await;
    assert_eq!(stays.call().await, (CallId(1), Generation(1)));
    assert_eq!(goes.call().await.0, CallId(2));
    goes.returns(2, 0).await;
    assert_eq!(first.reply().await, result(2, 5, 0), "by slot, not by rank");

    plane.lose(process(5, 1));
    assert!(is_loss(&first.reply().await, process(5, 1)));
    let mut comes = plane.spawn(process(5, 2));
    plane.complete(2, &[process(5, 2), process(4, 1)]);
    let (refused, _) = plane.attach(1).await;
    assert!(
        matches!(&refused, NodeReply::Refused(refusal) if refusal.kind == RefusalKind::Stale),
        "{refused:?}"
    );
    let (reply, mut second) = plane.attach(2).await;
    assert_eq!(attached(&reply), [0, 1]);
    // Rank 1 of generation 1 stays lost, although its slot has a process again, and rank 1 another.
    first.call(3, 1).await;
    assert!(is_loss(&first.reply().await, process(5, 1)));
    second.call(4, 0).await;
    assert_eq!(comes.call().await, (CallId(4), Generation(2)));
    comes.returns(4, 0).await;
    assert_eq!(second.reply().await, result(4, 5, 0));
    // The call of the process that stays ends where it came from, in the generation that it has come to.
    stays.returns(1, 2).await;
    assert_eq!(first.reply().await, result(1, 4, 2));
}

#[tokio::test]
async fn losses_are_told_to_channels_with_that_process_alone_and_then_forgotten() {
    let plane = Plane::new().await;
    let (mut member, _spare) = (plane.spawn(process(0, 1)), plane.spawn(process(1, 1)));
    plane.complete(1, &[process(0, 1)]);
    let (reply, mut driver) = plane.attach(1).await;
    assert_eq!(attached(&reply), [0]);
    plane.lose(process(1, 1));
    driver.call(1, 0).await;
    member.call().await;
    member.returns(1, 0).await;
    assert_eq!(driver.reply().await, result(1, 0, 0), "and no loss before");
    let job = plane.calls.job(JOB).unwrap();
    assert_eq!(job.losses(), []);
    // A channel that is opened between a loss and the next generation learns of it.
    plane.lose(process(0, 1));
    assert!(is_loss(&driver.reply().await, process(0, 1)));
    let (_, mut late) = plane.attach(1).await;
    assert!(is_loss(&late.reply().await, process(0, 1)));
    drop((driver, late));
    plane.complete(2, &[]);
    soon(async {
        // The node hears of the ends of channels by and by.
        while !job.losses().is_empty() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_channel_that_ends_cancels_its_own_calls() {
    let plane = Plane::new().await;
    let mut worker = plane.spawn(process(0, 1));
    plane.complete(1, &[process(0, 1)]);
    let (_, mut first) = plane.attach(1).await;
    first.call(1, 0).await;
    worker.call().await;
    plane.complete(2, &[process(0, 1)]);
    let (_, mut second) = plane.attach(2).await;
    second.call(2, 0).await;
    worker.call().await;
    drop(first);
    let (cancelled, _) = soon(worker.control.recv()).await.unwrap();
    assert_eq!(cancelled, ToWorker::Cancel { call: CallId(1) });
    worker.returns(1, 0).await;
    worker.returns(2, 0).await;
    assert_eq!(second.reply().await, result(2, 0, 0));
}
