//! One of kolo's ranks: a process of its own.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use kolo::collectives::lane::{Connecting, Door, OneHost, Terms, UnixLane};
use kolo::collectives::{
    Communicator, Connector, GroupId, Lane, LaneError, Layout, LinkHello, ReduceOp, SharedBuffer,
};
use kolo_transport::ids::{
    CrossRank, Generation, Incarnation, JobId, LocalRank, NodeId, Rank, Slot,
};
use kolo_transport::wire::{GenerationTable, Handover, Member};
use kolo_transport::{CertificateRequest, CloseCode, EndpointConfig, Identity, TransportRuntime};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::launch::enter_host;
use super::pattern::Part;
use super::wire::{Answer, How, Lane as Way, Operation, Run};
use crate::raw::child::parent;

/// Role of a rank.
pub(crate) const RANK: &str = "rank";
/// Socket pairs that one rank can get.
pub(crate) const MOST_SOCKETS: usize = 66;
/// For an operation, and for a link to be made.
const LIMIT: Duration = Duration::from_secs(60);
/// Links of ranks that never talk to each other wait this long for each other.
const FOREVER: Duration = Duration::from_secs(24 * 3600);
const GENERATION: Generation = Generation(1);

/// The first line to a rank: its part.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Setup {
    pub(crate) rank: u32,
    pub(crate) host_of: Vec<u32>,
    pub(crate) operation: Operation,
    pub(crate) lane: Way,
    /// Reduce memory of [`Communicator::buffer`].
    pub(crate) shared: bool,
    /// A process whose network to enter.
    pub(crate) host: Option<u32>,
    /// Where to listen.
    pub(crate) listen: IpAddr,
    /// Of the network between hosts, if there is one.
    pub(crate) mtu: Option<u16>,
    pub(crate) job: u64,
    /// The ranks to which sockets came, in their order.
    pub(crate) sockets: Vec<u32>,
}

/// What a rank asks for: a certificate for its key.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Request {
    pub(crate) key: Vec<u8>,
}

/// What it gets.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Admission {
    pub(crate) certificate: Vec<u8>,
    pub(crate) authority: Vec<u8>,
}

/// The role itself.
pub(crate) fn rank() -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let bench = parent()?;
    let mut out = bench.try_clone()?;
    if let Err(error) = serve(&bench) {
        let text = format!("{error:#}").replace('\n', " ");
        // The bench may be gone.
        drop(writeln!(out, "error {text}"));
    }
    Ok(())
}

fn serve(bench: &UnixStream) -> anyhow::Result<()> {
    let sockets = receive_sockets(bench)?;
    let mut out = bench.try_clone()?;
    let mut lines = BufReader::new(bench.try_clone()?).lines();
    let mut next = || lines.next().transpose();
    let setup: Setup = serde_json::from_str(&next()?.context("no part")?)?;
    if let Some(host) = setup.host {
        // Before there are other threads, which then are there too.
        enter_host(host)?;
    }
    let request = CertificateRequest::generate()?;
    let key = request.der().to_vec();
    writeln!(out, "{}", serde_json::to_string(&Request { key })?)?;
    let admission: Admission = serde_json::from_str(&next()?.context("no certificate")?)?;
    let credentials = request.finish(&admission.certificate, &admission.authority)?;
    let runtime = TransportRuntime::new(1)?;
    let mut config = EndpointConfig {
        listen: SocketAddr::new(setup.listen, 0),
        ..EndpointConfig::default()
    };
    if let Some(mtu) = setup.mtu {
        config.mtu_upper_bound = mtu - 48;
    }
    let doors = Door::open_all(&runtime, credentials, &[config], setup.lane.choice())?;
    let door = doors.into_iter().next().context("a door")?;
    writeln!(out, "{}", serde_json::to_string(&door.address())?)?;
    let addresses: Vec<SocketAddr> = serde_json::from_str(&next()?.context("no addresses")?)?;

    let sockets = setup.sockets.clone().into_iter().zip(sockets);
    let comm = communicator(&setup, &addresses, &runtime, door.clone(), sockets)?;
    let mut work = Work { comm, setup };
    writeln!(out, "ready {} 1", work.setup.rank)?;
    while let Some(line) = next()? {
        work.series(&line.parse()?)?.send(&mut out)?;
    }
    drop(work);
    door.close(CloseCode::Shutdown, "the run is over");
    Ok(())
}

/// The byte and the descriptors with which everything begins.
fn receive_sockets(bench: &UnixStream) -> anyhow::Result<Vec<UnixStream>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_SOCKETS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let received = recvmsg(
        bench,
        &mut [IoSliceMut::new(&mut byte)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    anyhow::ensure!(received.bytes == 1, "the bench ended");
    let sockets: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        })
        .flatten()
        .collect();
    Ok(sockets.into_iter().map(UnixStream::from).collect())
}

fn communicator(
    setup: &Setup,
    addresses: &[SocketAddr],
    runtime: &TransportRuntime,
    door: Door,
    sockets: impl Iterator<Item = (u32, UnixStream)>,
) -> anyhow::Result<Communicator> {
    let (rank, job) = (Rank(setup.rank), JobId(setup.job));
    let table = Arc::new(GenerationTable {
        job,
        generation: GENERATION,
        members: members(&setup.host_of, addresses),
        cause: String::new(),
        handover: Handover::None,
    });
    let links = Arc::new(Links {
        hello: LinkHello::new(job, GENERATION, rank),
        door: door.clone(),
        way: setup.lane,
        table: Arc::clone(&table),
        sockets: Mutex::new(HashMap::new()),
    });
    let world = setup.host_of.len() as u32;
    let handle = runtime.handle().clone();
    let connector = Arc::new(LinkConnector(Arc::clone(&links)));
    let comm =
        Communicator::new(rank, world, GENERATION, job, connector, handle)?.with_timeout(LIMIT);
    comm.set_table(table)?;
    comm.set_layout(Layout::of_hosts(&setup.host_of))?;
    let acceptor = comm.acceptor();
    for (peer, socket) in sockets {
        if peer < setup.rank {
            links.sockets().entry(peer).or_default().push(socket);
        } else {
            let (links, acceptor) = (Arc::clone(&links), acceptor.clone());
            let peer = Rank(peer);
            runtime.handle().spawn(async move {
                let lane = links.inside(socket, &links.hello, peer, FOREVER).await;
                report(
                    lane.and_then(|lane| acceptor.accept_group(lane.group(), peer, Box::new(lane))),
                );
            });
        }
    }
    let terms = move |peer: Identity| {
        let acceptor = acceptor.clone();
        let take = move |group, peer, lane| acceptor.accept_group(group, peer, lane);
        std::future::ready(Terms::of(&peer, &links.table, links.hello, take))
    };
    runtime
        .handle()
        .spawn(async move { door.serve(LIMIT, terms).await });
    Ok(comm)
}

/// The table of a job whose rank r is in slot r.
fn members(host_of: &[u32], addresses: &[SocketAddr]) -> Vec<Member> {
    let on = |host: u32| host_of.iter().filter(move |other| **other == host);
    let hosts = host_of.iter().max().map_or(0, |last| last + 1);
    (0_u32..)
        .zip(host_of.iter().zip(addresses))
        .map(|(rank, (host, address))| Member {
            rank: Rank(rank),
            local_rank: LocalRank(
                rank - host_of.iter().position(|h| h == host).unwrap_or(0) as u32,
            ),
            local_size: on(*host).count() as u32,
            cross_rank: CrossRank(*host),
            cross_size: hosts,
            slot: Slot(rank),
            node: NodeId(u64::from(*host)),
            hostname: format!("host-{host}"),
            address: Some(*address),
            incarnation: Incarnation::FIRST,
        })
        .collect()
}

/// A link that can't be made shows in the operation, too; this says more.
fn report(made: Result<(), LaneError>) {
    if let Err(error) = made {
        eprintln!("a link was not made: {error}");
    }
}

#[derive(Debug)]
struct Links {
    hello: LinkHello,
    door: Door,
    way: Way,
    table: Arc<GenerationTable>,
    /// To lower ranks of this host, until they are used.
    sockets: Mutex<HashMap<u32, Vec<UnixStream>>>,
}

impl Links {
    fn sockets(&self) -> std::sync::MutexGuard<'_, HashMap<u32, Vec<UnixStream>>> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A link inside this host.
    async fn inside(
        &self,
        socket: UnixStream,
        hello: &LinkHello,
        peer: Rank,
        limit: Duration,
    ) -> Result<UnixLane, LaneError> {
        let lane = UnixLane::from_std(socket).map_err(|error| LaneError::Unreachable {
            reason: error.to_string(),
        })?;
        lane.greeted(hello, peer, limit).await
    }

    async fn connect(&self, peer: Rank, group: GroupId) -> Result<Box<dyn Lane>, LaneError> {
        let hello = self.hello.of_group(group);
        let socket = self.sockets().get_mut(&peer.0).and_then(Vec::pop);
        if let Some(socket) = socket {
            let lane = self.inside(socket, &hello, peer, LIMIT).await?;
            return Ok(Box::new(lane));
        }
        let member = &self.table.members[peer.index()];
        let unreachable = |reason: String| LaneError::Unreachable { reason };
        let address = member
            .address
            .ok_or_else(|| unreachable(format!("rank {peer} does not listen")))?;
        let to = (peer, member.slot, address);
        self.door.connect(&hello, to, LIMIT).await
    }
}

#[derive(Debug)]
struct LinkConnector(Arc<Links>);

impl Connector for LinkConnector {
    fn connect(&self, peer: Rank) -> Connecting {
        self.connect_group(peer, GroupId::WORLD)
    }

    fn connect_group(&self, peer: Rank, group: GroupId) -> Connecting {
        let links = Arc::clone(&self.0);
        Box::pin(async move { links.connect(peer, group).await })
    }

    fn is_one_host(&self, ranks: &[Rank]) -> Option<OneHost> {
        let node = |rank: &Rank| {
            self.0
                .table
                .members
                .get(rank.index())
                .map(|member| member.node)
        };
        let here = node(&self.0.hello.rank);
        let yes = self.0.way == Way::Auto && ranks.iter().all(|rank| node(rank) == here);
        Some(Box::pin(std::future::ready(yes)))
    }
}

/// The values that this rank gives.
#[derive(Debug)]
enum Memory {
    Own(Vec<f32>),
    Shared(SharedBuffer<f32>),
}

impl Memory {
    fn values(&mut self) -> &mut [f32] {
        match self {
            Self::Own(values) => values,
            Self::Shared(buffer) => buffer,
        }
    }
}

/// The operations of this rank.
#[derive(Debug)]
struct Work {
    comm: Communicator,
    setup: Setup,
}

impl Work {
    fn series(&mut self, run: &Run) -> anyhow::Result<Answer> {
        let part = Part {
            operation: self.setup.operation,
            rank: self.comm.rank().index(),
            ranks: self.comm.world_size() as usize,
            share: usize::try_from(run.share)?,
        };
        let mut give = if self.setup.shared {
            let buffer = self.comm.buffer(part.given())?;
            anyhow::ensure!(buffer.is_shared(), "the ranks of this host share no memory");
            Memory::Shared(buffer)
        } else {
            Memory::Own(vec![0.0; part.given()])
        };
        let mut get = vec![0.0_f32; part.gotten()];
        let mut answer = Answer {
            stamps: Vec::with_capacity(run.timed as usize),
            wrong: 0,
            how: None,
        };
        for i in 0..run.warm + run.timed {
            let round = run.seed + i;
            part.prepare(give.values(), round);
            if run.barrier {
                self.comm.barrier()?;
            }
            let begun = clock();
            self.perform(&part, &mut give, &mut get, round)?;
            let ended = clock();
            if i >= run.warm {
                answer.stamps.push((begun, ended));
            }
            let result = if get.is_empty() {
                &*give.values()
            } else {
                &get
            };
            answer.wrong += part.check(result, round);
        }
        answer.how = self.how();
        Ok(answer)
    }

    /// How the last operation was done.
    fn how(&self) -> Option<How> {
        let last = self.comm.records().pop();
        let record = last.filter(|_| self.comm.world_size() > 1)?;
        Some(How {
            lanes: record.lanes.to_string(),
            algorithm: record.operation.algorithm.to_string(),
        })
    }

    /// Does the operation once.
    fn perform(
        &self,
        part: &Part,
        give: &mut Memory,
        get: &mut [f32],
        round: u32,
    ) -> anyhow::Result<()> {
        let comm = &self.comm;
        let root = Rank(part.root(round) as u32);
        let give = match give {
            Memory::Own(values) => values,
            Memory::Shared(buffer) => return Ok(comm.all_reduce_buffer(buffer, ReduceOp::Sum)?),
        };
        match part.operation {
            Operation::AllReduce => comm.all_reduce(give, ReduceOp::Sum)?,
            Operation::AllGather => comm.all_gather_into(give, get)?,
            Operation::Broadcast => comm.broadcast(give, root)?,
            Operation::Reduce => comm.reduce(give, ReduceOp::Sum, root)?,
            Operation::Gather => comm.gather_into(give, get, root)?,
            Operation::Scatter => comm.scatter_into(give, get, root)?,
            Operation::ReduceScatter => {
                comm.reduce_scatter_into(give, part.ranks, get, ReduceOp::Sum)?;
            }
            Operation::AllToAll => comm.all_to_all_into(give, get)?,
            Operation::SendReceive => {
                let partner = Rank(part.partner() as u32);
                if comm.rank() < partner {
                    comm.send(give, partner)?;
                    comm.receive_into(get, partner)?;
                } else {
                    comm.receive_into(get, partner)?;
                    comm.send(give, partner)?;
                }
            }
            Operation::Barrier => comm.barrier()?,
        }
        Ok(())
    }
}

/// Nanoseconds of the clock that all processes of a host share.
fn clock() -> i64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}
