//! Whole workers in this process, and a node that is made by hand. It does what nodes do.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use kolo_transport::identity::{Identity, Role};
use kolo_transport::ids::{
    ClusterId, CrossRank, Generation, Incarnation, JobId, LocalRank, NodeId, Rank, Slot,
};
use kolo_transport::local::ControlSocket;
use kolo_transport::wire::worker::LOCAL_PROTOCOL;
use kolo_transport::wire::{
    CallFailure, FromWorker, GenerationTable, Handover, Kept, Member, ToWorker,
};
use kolo_transport::{Authority, TransportRuntime};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::caller::{Caller, function};
use crate::registry::Registry;
use crate::worker::{Fatal, control, serve};
use crate::{Function, codec};

pub(super) const JOB: JobId = JobId(77);
const LIMIT: Duration = Duration::from_secs(60);

/// Slots are not ranks.
const FIRST_SLOT: u32 = 10;

/// A worker's two ends at the node.
pub(super) struct Worker {
    pub(super) calls: Caller,
    pub(super) control: Arc<ControlSocket>,
    pub(super) thread: JoinHandle<Result<(), Fatal>>,
}

pub(super) fn start_worker() -> Worker {
    let (calls, theirs) = UnixStream::pair().unwrap();
    let (control, fd) = ControlSocket::pair().unwrap();
    let thread = std::thread::spawn(move || run_worker(theirs, fd));
    Worker {
        calls: Caller::new(calls),
        control: Arc::new(control),
        thread,
    }
}

/// As `work` does, without ends of the process.
fn run_worker(calls: UnixStream, control: OwnedFd) -> Result<(), Fatal> {
    let registry = Registry::get().unwrap();
    let runtime = TransportRuntime::new(1).unwrap();
    let clone = calls.try_clone().unwrap();
    let control = control::start(&runtime, control, clone, registry.digest(), |_| {});
    serve(registry, &runtime, &control, calls)
}

pub(super) async fn hear(control: &ControlSocket) -> FromWorker {
    let heard = tokio::time::timeout(LIMIT, control.recv())
        .await
        .expect("in time");
    heard.unwrap().expect("the worker lives").0
}

pub(super) async fn tell(control: &ControlSocket, message: ToWorker) {
    control.send(&message, &[]).await.unwrap();
}

/// The members of a generation: in the order of their ranks, the index of each worker.
fn members(ranks: &[usize], nodes: &[u64]) -> Vec<Member> {
    let nodes: Vec<u64> = ranks.iter().map(|index| nodes[*index]).collect();
    let on = |node: u64, nodes: &[u64]| nodes.iter().filter(|other| **other == node).count() as u32;
    let member = |(rank, index): (usize, &usize)| Member {
        rank: Rank(rank as u32),
        local_rank: LocalRank(on(nodes[rank], &nodes[..rank])),
        local_size: on(nodes[rank], &nodes),
        cross_rank: CrossRank(0),
        cross_size: 1,
        slot: Slot(*index as u32 + FIRST_SLOT),
        node: NodeId(nodes[rank]),
        hostname: format!("host{}", nodes[rank]),
        address: None,
        incarnation: Incarnation::FIRST,
    };
    ranks.iter().enumerate().map(member).collect()
}

fn index_of(member: &Member) -> usize {
    (member.slot.0 - FIRST_SLOT) as usize
}

/// The workers of a job, with their nodes.
pub(super) struct Group {
    pub(super) workers: Vec<Worker>,
    /// The members of the newest generation.
    pub(super) table: GenerationTable,
    authority: Authority,
    needs_data_plane: bool,
    next_within_ms: Option<u64>,
    /// Of each worker: its node, what it has said of generations, and where it listens.
    nodes: Vec<u64>,
    told: Vec<UnboundedReceiver<FromWorker>>,
    addresses: Vec<Option<std::net::SocketAddr>>,
    shared: Arc<Mutex<Shared>>,
}

/// What the tasks that make sockets know.
#[derive(Default)]
struct Shared {
    tables: Vec<GenerationTable>,
    controls: Vec<Arc<ControlSocket>>,
}

impl Shared {
    /// The workers behind two ranks, of which one is given by its worker: that one's rank and the other one's control socket.
    fn pair(
        &self,
        generation: Generation,
        from: usize,
        to: Rank,
    ) -> Option<(Rank, Arc<ControlSocket>)> {
        let table = self
            .tables
            .iter()
            .find(|table| table.generation == generation)?;
        let from = table.members.iter().find(|member| index_of(member) == from);
        let to = index_of(&table.members[to.index()]);
        Some((from?.rank, Arc::clone(&self.controls[to])))
    }
}

impl Group {
    /// Starts the first generation of a static job, with a worker for each entry: the number of its node.
    pub(super) async fn start(nodes: &[u64]) -> Self {
        Self::start_with(nodes, None).await
    }

    /// The same of an elastic job.
    pub(super) async fn elastic(nodes: &[u64]) -> Self {
        Self::start_with(nodes, Some(60_000)).await
    }

    pub(super) async fn start_with(nodes: &[u64], next_within_ms: Option<u64>) -> Self {
        let mut group = Self {
            workers: Vec::new(),
            table: GenerationTable {
                job: JOB,
                generation: Generation(0),
                members: Vec::new(),
                cause: String::new(),
                handover: Handover::None,
            },
            authority: Authority::create(ClusterId(5)).unwrap(),
            // The next node of an elastic job may be the second.
            needs_data_plane: next_within_ms.is_some()
                || nodes.windows(2).any(|pair| pair[0] != pair[1]),
            next_within_ms,
            nodes: nodes.to_vec(),
            told: Vec::new(),
            addresses: vec![None; nodes.len()],
            shared: Arc::default(),
        };
        let all: Vec<usize> = (0..nodes.len()).collect();
        for (index, member) in members(&all, nodes).into_iter().enumerate() {
            let size = nodes.len() as u32;
            group.addresses[index] = group.introduce(member, Generation(1), size).await;
        }
        group.form(&all);
        group
    }

    /// Starts one more worker, which is in no generation yet.
    pub(super) async fn add(&mut self, node: u64) -> usize {
        let index = self.nodes.len();
        self.nodes.push(node);
        let member = members(&[index], &self.nodes).remove(0);
        let address = self.introduce(member, Generation(0), 0).await;
        self.addresses.push(address);
        index
    }

    async fn introduce(
        &mut self,
        member: Member,
        generation: Generation,
        world_size: u32,
    ) -> Option<std::net::SocketAddr> {
        let worker = start_worker();
        let FromWorker::Hello {
            protocol,
            pid,
            registry,
        } = hear(&worker.control).await
        else {
            panic!("hello comes first");
        };
        assert_eq!(
            (protocol, pid, registry),
            (LOCAL_PROTOCOL, std::process::id(), crate::registry_digest())
        );
        let slot = member.slot;
        let welcome = ToWorker::Welcome {
            cluster: ClusterId(5),
            job: JOB,
            generation,
            member,
            world_size,
            needs_data_plane: self.needs_data_plane,
            next_within_ms: self.next_within_ms,
        };
        tell(&worker.control, welcome).await;
        if self.needs_data_plane {
            let request = hear(&worker.control).await;
            self.sign(request, slot, &worker.control).await;
        }
        let FromWorker::Ready { address } = hear(&worker.control).await else {
            panic!("it is ready");
        };
        assert_eq!(address.is_some(), self.needs_data_plane);
        let control = Arc::clone(&worker.control);
        (self.shared.lock().unwrap().controls).push(Arc::clone(&control));
        self.listen(self.workers.len(), control);
        self.workers.push(worker);
        address
    }

    async fn sign(&self, request: FromWorker, slot: Slot, control: &ControlSocket) {
        let FromWorker::Sign { csr } = request else {
            panic!("it needs a certificate");
        };
        let name = Identity::worker_name(JOB, slot);
        let hour = Duration::from_secs(3600);
        let certificate = (self.authority)
            .sign(&csr, Role::Worker, &name, hour)
            .unwrap();
        let message = ToWorker::Certificate {
            certificate: certificate.to_vec(),
            authority: self.authority.certificate().to_vec(),
        };
        tell(control, message).await;
    }

    /// Makes sockets to other workers as one asks for them.
    fn listen(&mut self, index: usize, control: Arc<ControlSocket>) {
        let (sender, told) = unbounded_channel();
        self.told.push(told);
        let shared = Arc::clone(&self.shared);
        tokio::spawn(async move {
            while let Ok(Some((message, _))) = control.recv::<FromWorker>().await {
                match message {
                    FromWorker::ConnectPeer { rank, generation } => {
                        let pair = shared.lock().unwrap().pair(generation, index, rank);
                        let (from, other) = pair.unwrap();
                        let (a, b) = UnixStream::pair().unwrap();
                        for (to, rank, end) in [(&control, rank, a), (&other, from, b)] {
                            let message = ToWorker::Peer { rank, generation };
                            to.send(&message, &[end.as_fd()]).await.unwrap();
                        }
                    }
                    FromWorker::RequestLink {
                        rank,
                        generation,
                        group,
                    } => {
                        let pair = shared.lock().unwrap().pair(generation, index, rank);
                        let (rank, other) = pair.unwrap();
                        let message = ToWorker::LinkRequested {
                            rank,
                            generation,
                            group,
                        };
                        tell(&other, message).await;
                    }
                    // The test may have ended.
                    message => drop(sender.send(message)),
                }
            }
        });
    }

    /// The next generation, of these workers in the order of their ranks. Nobody hears of it yet.
    pub(super) fn form(&mut self, ranks: &[usize]) {
        let mut members = members(ranks, &self.nodes);
        for member in &mut members {
            member.address = self.addresses[index_of(member)];
        }
        self.table.members = members;
        self.table.generation = Generation(self.table.generation.0 + 1);
        self.shared.lock().unwrap().tables.push(self.table.clone());
    }

    /// Gives the newest generation to these workers, which are called in it from now on. Those of one node hear of it before one
    /// of them gets a socket to another one.
    pub(super) async fn publish(&mut self, to: &[usize]) {
        for index in to {
            let message = ToWorker::Membership(self.table.clone().into());
            tell(&self.workers[*index].control, message).await;
        }
        for index in to {
            let generation = self.table.generation;
            assert_eq!(self.told(*index).await, FromWorker::Taken { generation });
            self.workers[*index].calls.generation = generation;
        }
    }

    /// What a worker says of generations next.
    pub(super) async fn told(&mut self, index: usize) -> FromWorker {
        let told = tokio::time::timeout(LIMIT, self.told[index].recv()).await;
        told.expect("in time").expect("the worker lives")
    }

    /// The next that a worker says is that it has this commit in a generation.
    pub(super) async fn has_commit(&mut self, index: usize, at: (Generation, u64), kept: Kept) {
        let (generation, commit) = at;
        let expected = FromWorker::Committed {
            generation,
            commit,
            kept,
        };
        assert_eq!(self.told(index).await, expected);
    }

    pub(super) fn has_told_nothing(&mut self) -> bool {
        self.told.iter_mut().all(|told| told.is_empty())
    }

    pub(super) async fn complete(&mut self) {
        let all: Vec<usize> = (0..self.workers.len()).collect();
        self.publish(&all).await;
    }

    /// Begins a function on these workers.
    pub(super) fn begin<F: Function>(&mut self, on: &[usize], _: impl FnOnce() -> F, args: &F::Args)
    where
        F::Args: Serialize,
    {
        let args = codec::encode(args).unwrap();
        for index in on {
            self.workers[*index].calls.send(function(F::NAME), &args);
        }
    }

    /// How the call of a worker ended.
    pub(super) fn end<T: DeserializeOwned>(&mut self, index: usize) -> Result<T, CallFailure> {
        let (_, result) = self.workers[index].calls.receive();
        result.map(|body| codec::decode(&body).unwrap())
    }

    /// Calls a function on all ranks at once.
    pub(super) fn call<F: Function>(
        &mut self,
        function: impl FnOnce() -> F,
        args: F::Args,
    ) -> Vec<Result<F::Output, CallFailure>>
    where
        F::Args: Serialize,
        F::Output: DeserializeOwned,
    {
        let ranks: Vec<usize> = self.table.members.iter().map(index_of).collect();
        self.begin(&ranks, function, &args);
        ranks.into_iter().map(|index| self.end(index)).collect()
    }

    pub(super) async fn stop(self) {
        for worker in &self.workers {
            let reason = "the test ends".to_owned();
            tell(&worker.control, ToWorker::Stop { reason }).await;
        }
        for worker in self.workers {
            worker.thread.join().unwrap().unwrap();
        }
    }
}
