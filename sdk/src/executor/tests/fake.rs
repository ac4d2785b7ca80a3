//! A head and nodes that say what a test tells them to say.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use kolo_transport::CloseCode;
use kolo_transport::endpoint::{Endpoint, EndpointConfig};
use kolo_transport::frame::Limits;
use kolo_transport::identity::{HEAD_NAME, Role};
use kolo_transport::ids::{
    CallId, ClusterId, CrossRank, DriverId, Generation, Incarnation, JobId, LocalRank, NodeId,
    Rank, Slot,
};
use kolo_transport::runtime::TransportRuntime;
use kolo_transport::session::{FrameReceiver, FrameSender, Stream};
use kolo_transport::wire::{
    CallFailure, CallFrame, CallOp, CallReply, Exit, Followers, GenerationTable, Handover,
    HeadReply, HeadRequest, JobEvent, JobInfo, JobSpec, JobState, Member, NodeReply, NodeRequest,
    Outcome, PlacedNode, RankFailure, Refusal, SubmitFrame, WorkerInfo, WorkerState,
};
use kolo_transport::{Authority, RandomId as _};
use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinHandle;

use crate::Cluster;
use crate::call::{Call, Object, One, Scope};
use crate::codec;
use crate::error::StartError;
use crate::executable::Executable;
use crate::executor::{Executor, ExecutorBuilder, Output};
use crate::function::Function;

/// Fails the test if `future` takes half a minute.
pub(super) async fn soon<T>(future: impl IntoFuture<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(30), future)
        .await
        .expect("it hangs")
}

/// Gives a task time to go wrong, and fails if it has ended.
pub(super) async fn settle<T: std::fmt::Debug>(task: &mut JoinHandle<T>) {
    let early = tokio::time::timeout(Duration::from_millis(30), task).await;
    assert!(early.is_err(), "it ended too early: {early:?}");
}

pub(super) struct Add;

impl Function for Add {
    type Args = (u32,);
    type Output = u32;
    const NAME: &'static str = "add";
}

pub(super) fn add() -> Add {
    Add
}

pub(super) struct Counter;

impl Executable for Counter {
    type Args = (u32,);
    type Handle<S: Scope> = CounterHandle<S>;
    const NAME: &'static str = "tests::Counter";
}

pub(super) struct CounterHandle<S>(Object<S>);

impl<S> From<Object<S>> for CounterHandle<S> {
    fn from(object: Object<S>) -> Self {
        Self(object)
    }
}

impl<S: Scope> CounterHandle<S> {
    pub(super) fn add(&self, count: u32) -> Call<S, u32> {
        self.0.call("add", codec::encode(&(count,)))
    }

    pub(super) fn on(&self, rank: Rank) -> CounterHandle<One> {
        self.0.with_scope(One(rank)).into()
    }
}

/// The head of a frame with a piece of a program. It has no fields.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Piece {}

pub(super) struct Fake {
    pub(super) cluster: Cluster,
    pub(super) nodes: Vec<FakeNode>,
    head: Endpoint,
    pub(super) jobs: Mutex<mpsc::Receiver<(JobSpec, Stream)>>,
    questions: Mutex<mpsc::Receiver<(HeadRequest, Stream)>>,
    _runtime: TransportRuntime,
}

pub(super) struct FakeNode {
    id: NodeId,
    endpoint: Endpoint,
    requests: Mutex<mpsc::Receiver<(NodeRequest, Stream)>>,
    /// One for each generation.
    channels: Mutex<BTreeMap<Generation, (FrameSender, FrameReceiver)>>,
    ranks: std::sync::Mutex<Vec<Rank>>,
}

/// Every stream that anybody opens to `endpoint`, with its first frame.
fn requests<T: serde::de::DeserializeOwned + Send + 'static>(
    runtime: &TransportRuntime,
    endpoint: Endpoint,
) -> mpsc::Receiver<(T, Stream)> {
    let (sender, receiver) = mpsc::channel(64);
    runtime.handle().spawn(async move {
        while let Some(connection) = endpoint.accept().await {
            let sender = sender.clone();
            tokio::spawn(async move {
                while let Ok(mut stream) = connection.accept(Limits::CALLS).await {
                    let first = stream.recv.expect::<T>().await.unwrap().head;
                    if sender.send((first, stream)).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    receiver
}

impl Fake {
    pub(super) async fn new(nodes: u32) -> Self {
        let runtime = TransportRuntime::new(1).unwrap();
        let authority = Authority::create(ClusterId::random()).unwrap();
        let bind = |role, name: &str| {
            let credentials = authority.issue(role, name).unwrap();
            Endpoint::bind(&runtime, credentials, EndpointConfig::default()).unwrap()
        };
        let head = bind(Role::Head, HEAD_NAME);
        let mut heard = requests::<HeadRequest>(&runtime, head.clone());
        let (submits, jobs) = mpsc::channel(8);
        let (asks, questions) = mpsc::channel(8);
        runtime.handle().spawn(async move {
            while let Some((request, stream)) = heard.recv().await {
                let taken = match request {
                    HeadRequest::Submit(spec) => submits.send((spec, stream)).await.is_ok(),
                    other => asks.send((other, stream)).await.is_ok(),
                };
                if !taken {
                    return;
                }
            }
        });
        let node = |_| {
            let id = NodeId::random();
            let endpoint = bind(Role::Node, &id.to_string());
            FakeNode {
                id,
                requests: Mutex::new(requests(&runtime, endpoint.clone())),
                endpoint,
                channels: Mutex::default(),
                ranks: std::sync::Mutex::default(),
            }
        };
        let nodes = (0..nodes).map(node).collect();
        let driver = authority
            .issue(Role::Driver, &DriverId::random().to_string())
            .unwrap();
        // As a driver's `main` begins.
        crate::worker::run_if_worker();
        let cluster = Cluster::connect(head.local_addr(), driver).await.unwrap();
        Self {
            cluster,
            nodes,
            head,
            jobs: Mutex::new(jobs),
            questions: Mutex::new(questions),
            _runtime: runtime,
        }
    }

    /// A running group of `slots` ranks on each of `nodes` nodes.
    pub(super) async fn group(nodes: u32, slots: u32) -> (Executor, FakeJob, Self) {
        let fake = Self::new(nodes).await;
        let (executor, job) = fake
            .run(Executor::builder().hosts(nodes).slots(slots))
            .await;
        (executor, job, fake)
    }

    pub(super) fn start(
        &self,
        builder: ExecutorBuilder,
    ) -> JoinHandle<Result<Executor, StartError>> {
        let cluster = self.cluster.clone();
        tokio::spawn(async move { builder.start(&cluster).await })
    }

    /// A running elastic group of `builder`, with the first process of slot `n` on the node `at[n]`.
    pub(super) async fn elastic(
        &self,
        builder: ExecutorBuilder,
        at: &[usize],
    ) -> (Executor, FakeJob) {
        let starting = self.start(builder.output(Output::Silent));
        let mut job = self.submitted().await;
        assert!(job.spec.elastic.is_some());
        let processes: Vec<_> = (0..).zip(at).map(|(slot, node)| (slot, 1, *node)).collect();
        job.places(self, at, true).await;
        assert_eq!(soon(job.frame()).await, Some(SubmitFrame::ProgramReady));
        job.generation(self, 1, "the job has started", &processes)
            .await;
        self.attach(&processes, Generation(1)).await;
        (soon(starting).await.unwrap().unwrap(), job)
    }

    /// Takes the driver's channels to the nodes of these processes.
    pub(super) async fn attach(&self, processes: &[(u32, u64, usize)], generation: Generation) {
        let nodes: BTreeSet<usize> = processes.iter().map(|(_, _, node)| *node).collect();
        for node in nodes {
            self.nodes[node].attach(generation).await;
        }
    }

    /// Starts a group, and says all that has to be said for it.
    pub(super) async fn run(&self, builder: ExecutorBuilder) -> (Executor, FakeJob) {
        let silent = !format!("{builder:?}").contains("Callback");
        let builder = if silent {
            builder.output(Output::Silent)
        } else {
            builder
        };
        let starting = self.start(builder);
        let mut job = self.submitted().await;
        job.placed(self, &vec![true; self.nodes.len()]).await;
        assert_eq!(soon(job.frame()).await, Some(SubmitFrame::ProgramReady));
        job.healthy(self).await;
        for node in &self.nodes {
            node.attach(Generation(1)).await;
        }
        (soon(starting).await.unwrap().unwrap(), job)
    }

    pub(super) async fn submitted(&self) -> FakeJob {
        let mut jobs = self.jobs.lock().await;
        let (spec, stream) = soon(jobs.recv()).await.expect("the head is gone");
        let job = JobId::random();
        FakeJob {
            job,
            spec,
            stream,
            nodes: Vec::new(),
            table: GenerationTable {
                job,
                generation: Generation(0),
                members: Vec::new(),
                cause: String::new(),
                handover: Handover::None,
            },
        }
    }

    pub(super) async fn answer_job(&self, reply: HeadReply) {
        let mut questions = self.questions.lock().await;
        let (question, mut stream) = soon(questions.recv()).await.expect("the head is gone");
        assert!(matches!(question, HeadRequest::Job { .. }), "{question:?}");
        stream.send.send(&reply, &[]).await.unwrap();
    }

    pub(super) fn kill_head(&self) {
        self.head.close(CloseCode::Shutdown, "killed by the test");
    }
}

pub(super) struct FakeJob {
    pub(super) job: JobId,
    pub(super) spec: JobSpec,
    stream: Stream,
    nodes: Vec<PlacedNode>,
    /// The newest generation.
    table: GenerationTable,
}

impl FakeJob {
    pub(super) async fn send(&mut self, event: &JobEvent) {
        self.stream.send.send(event, &[]).await.unwrap();
    }

    pub(super) async fn ended(
        &mut self,
        state: JobState,
        refusal: Option<Refusal>,
        failure: Option<RankFailure>,
    ) {
        self.send(&JobEvent::Ended {
            state,
            refusal,
            failure,
            stopped: None,
            followers: Followers::default(),
        })
        .await;
        self.stream.send.finish();
    }

    /// The driver's next word; `None` when its stream ends in whatever way.
    pub(super) async fn frame(&mut self) -> Option<SubmitFrame> {
        self.stream
            .recv
            .next::<SubmitFrame>()
            .await
            .ok()
            .flatten()
            .map(|frame| frame.head)
    }

    /// Nodes join the job, each with or without the program.
    pub(super) fn place(
        &mut self,
        fake: &Fake,
        nodes: impl IntoIterator<Item = (usize, bool)>,
    ) -> Vec<PlacedNode> {
        let nodes = nodes.into_iter().map(|(index, has_program)| PlacedNode {
            node: fake.nodes[index].id,
            hostname: format!("host-{index}"),
            address: fake.nodes[index].endpoint.local_addr(),
            ranks: Vec::new(),
            has_program,
        });
        let nodes: Vec<_> = nodes.collect();
        self.nodes.extend(nodes.iter().cloned());
        nodes
    }

    /// The first nodes, and the driver hears of them.
    pub(super) async fn placed(&mut self, fake: &Fake, has_program: &[bool]) {
        let nodes = self.place(fake, has_program.iter().copied().enumerate());
        let job = self.job;
        self.send(&JobEvent::Placed { job, nodes }).await;
    }

    /// These nodes, and the driver hears of them.
    pub(super) async fn places(&mut self, fake: &Fake, nodes: &[usize], has_program: bool) {
        let nodes: BTreeSet<usize> = nodes.iter().copied().collect();
        let nodes = self.place(fake, nodes.into_iter().map(|index| (index, has_program)));
        let job = self.job;
        self.send(&JobEvent::Placed { job, nodes }).await;
    }

    /// A generation whose rank `r` is this process of a slot, on this node.
    fn form(&mut self, fake: &Fake, number: u64, cause: &str, processes: &[(u32, u64, usize)]) {
        for node in &fake.nodes {
            node.ranks.lock().unwrap().clear();
        }
        let member = |(rank, &(slot, incarnation, index)): (u32, &(u32, u64, usize))| {
            fake.nodes[index].ranks.lock().unwrap().push(Rank(rank));
            Member {
                rank: Rank(rank),
                local_rank: LocalRank(0),
                local_size: 1,
                cross_rank: CrossRank(0),
                cross_size: 1,
                slot: Slot(slot),
                incarnation: Incarnation(incarnation),
                node: fake.nodes[index].id,
                hostname: format!("host-{index}"),
                address: None,
            }
        };
        self.table = GenerationTable {
            job: self.job,
            generation: Generation(number),
            members: (0..).zip(processes).map(member).collect(),
            cause: cause.to_owned(),
            handover: Handover::Sync,
        };
    }

    pub(super) async fn generation(
        &mut self,
        fake: &Fake,
        number: u64,
        cause: &str,
        processes: &[(u32, u64, usize)],
    ) {
        self.form(fake, number, cause, processes);
        let (table, nodes) = (self.table.clone(), self.nodes.clone());
        let fall = None;
        self.send(&JobEvent::Generation { table, nodes, fall })
            .await;
    }

    /// The only generation, with as many ranks on each node.
    pub(super) async fn healthy(&mut self, fake: &Fake) {
        let workers = self.spec.placement.workers().unwrap();
        let each = workers / fake.nodes.len() as u32;
        let processes = (0..workers).map(|rank| (rank, 1, (rank / each) as usize));
        self.form(fake, 1, "", &processes.collect::<Vec<_>>());
        let (table, nodes) = (self.table.clone(), self.nodes.clone());
        self.send(&JobEvent::Healthy { table, nodes }).await;
    }

    /// The node of a rank; made up before there is one.
    pub(super) fn node_of(&self, rank: Rank) -> NodeId {
        let member = self.table.members.get(rank.index());
        member.map_or(NodeId(0), |member| member.node)
    }

    pub(super) fn info(&self, exits: &[Option<Exit>]) -> JobInfo {
        let members = self.table.members.iter().cloned();
        let workers = members.zip(exits).map(|(member, exit)| WorkerInfo {
            member,
            state: WorkerState::Exited,
            pid: 7,
            exit: *exit,
        });
        JobInfo {
            state: JobState::Stopped,
            generation: Generation(1),
            workers: workers.collect(),
            nodes: self.nodes.clone(),
            ..JobInfo::new(self.job, "", DriverId(1))
        }
    }
}

impl FakeNode {
    /// The next stream that the driver opens.
    pub(super) async fn request(&self) -> (NodeRequest, Stream) {
        self.requests
            .lock()
            .await
            .recv()
            .await
            .expect("the node is gone")
    }

    /// Takes the driver's channel for calls.
    pub(super) async fn attach(&self, expected: Generation) {
        let (request, mut stream) = soon(self.request()).await;
        assert!(
            matches!(request, NodeRequest::Attach { generation, .. } if generation == expected),
            "{request:?}"
        );
        let ranks = self.ranks.lock().unwrap().clone();
        stream
            .send
            .send(&NodeReply::Attached { ranks }, &[])
            .await
            .unwrap();
        let mut channels = self.channels.lock().await;
        channels.insert(expected, (stream.send, stream.recv));
    }

    /// The next frame of the newest channel.
    pub(super) async fn frame(&self) -> (CallFrame, Bytes) {
        let mut channels = self.channels.lock().await;
        let (_, (_, recv)) = channels.iter_mut().next_back().expect("attached");
        let frame = recv.expect::<CallFrame>().await.unwrap();
        (frame.head, frame.body)
    }

    /// Waits until the driver ends its channel of a generation.
    pub(super) async fn hung_up(&self, generation: Generation) {
        let mut channels = self.channels.lock().await;
        let (_, mut recv) = channels.remove(&generation).expect("attached");
        while let Ok(Some(_)) = soon(recv.next::<CallFrame>()).await {}
    }

    /// The next call of the newest channel; cancellations are skipped.
    pub(super) async fn call(&self) -> (CallId, Vec<Rank>, CallOp, Bytes) {
        loop {
            if let (
                CallFrame::Call {
                    call,
                    generation,
                    ranks,
                    op,
                    ..
                },
                body,
            ) = soon(self.frame()).await
            {
                let newest = self.channels.lock().await.keys().next_back().copied();
                assert_eq!(Some(generation), newest);
                return (call, ranks, op, body);
            }
        }
    }

    pub(super) async fn reply(&self, reply: &CallReply, body: &[u8]) {
        let newest = self.channels.lock().await.keys().next_back().copied();
        self.reply_in(newest.expect("attached"), reply, body).await;
    }

    pub(super) async fn reply_in(&self, generation: Generation, reply: &CallReply, body: &[u8]) {
        let mut channels = self.channels.lock().await;
        let (send, _) = channels.get_mut(&generation).expect("attached");
        send.send(reply, body).await.unwrap();
    }

    pub(super) async fn returns(&self, call: CallId, rank: Rank, value: &impl Serialize) {
        let reply = CallReply::Result {
            call,
            slot: Slot(rank.0),
            generation: Generation(0),
            outcome: Outcome::Returned,
        };
        self.reply(&reply, &codec::encode(value).unwrap()).await;
    }

    /// A worker answers over the channel of a generation; it is in the generation `now`.
    pub(super) async fn answers(
        &self,
        over: Generation,
        call: CallId,
        (slot, now): (u32, Generation),
        value: &impl Serialize,
    ) {
        let reply = CallReply::Result {
            call,
            slot: Slot(slot),
            generation: if now == over { Generation(0) } else { now },
            outcome: Outcome::Returned,
        };
        self.reply_in(over, &reply, &codec::encode(value).unwrap())
            .await;
    }

    pub(super) async fn fails(&self, call: CallId, rank: Rank, failure: CallFailure) {
        let reply = CallReply::Result {
            call,
            slot: Slot(rank.0),
            generation: Generation(0),
            outcome: Outcome::Failed(failure),
        };
        self.reply(&reply, &[]).await;
    }
}
