//! Groups for tests, over memory lanes or Unix sockets, with lanes that fail on demand.
#![allow(dead_code, unused_macros, clippy::float_cmp)] // each test file uses its part

pub(crate) mod network;
pub(crate) mod value;
pub(crate) mod victim;

use std::io::IoSlice;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use kolo_collectives::lane::{
    Connecting, Door, LaneChoice, MemoryLane, OneHost, Requesting, UnixLane,
};
use kolo_collectives::schedule::{Algorithm, Tuning};
use kolo_collectives::{
    Acceptor, CollectiveError, Communicator, Connector, GroupId, Lane, LaneError, LinkHello,
    ReduceOp,
};
use kolo_transport::ids::{ClusterId, Generation, JobId, Rank, Slot};
use kolo_transport::{Authority, EndpointConfig, RandomId as _, TransportRuntime};
use tokio::runtime::{Builder, Runtime};

pub(crate) const JOB: JobId = JobId(7);
pub(crate) const GENERATION: Generation = Generation(3);
/// Longer than anything takes; a hang still ends.
pub(crate) const LONG: Duration = Duration::from_secs(40);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Memory,
    /// Memory lanes that hold so many bytes.
    Narrow(usize),
    Unix,
    /// Rings in shared memory, beside Unix sockets.
    Ring,
    /// As [`Kind::Ring`], and the ranks share memory.
    Shared,
    /// TLS over TCP, with the certificates of a real authority.
    Tls,
    /// QUIC, with the same certificates.
    Quic,
    /// As [`Kind::Shared`], but this rank says that they don't.
    Unshared(u32),
    /// As [`Kind::Shared`], but this rank never gets to know.
    Undecided(u32),
}

/// What a lane does wrong. Shared with the test.
#[derive(Debug, Default)]
pub(crate) struct Fault {
    /// Bytes that this end may still write before it acts; all at first.
    budget: Mutex<usize>,
    armed: AtomicBool,
    written: AtomicUsize,
    /// Stop moving in place of ending.
    freeze: bool,
    /// As a network breaks: both sides live.
    cut: bool,
    /// Each lane that is made after it was armed is cut, too, when this end has written so many bytes.
    each: Option<usize>,
}

impl Fault {
    pub(crate) fn kill() -> Arc<Self> {
        Arc::new(Self::default())
    }

    pub(crate) fn freeze() -> Arc<Self> {
        Arc::new(Self {
            freeze: true,
            ..Self::default()
        })
    }

    pub(crate) fn cut() -> Arc<Self> {
        Arc::new(Self {
            cut: true,
            ..Self::default()
        })
    }

    /// As [`Fault::cut`], and every new lane is cut, too, when an end has written so many bytes.
    pub(crate) fn cut_each_after(bytes: usize) -> Arc<Self> {
        Arc::new(Self {
            cut: true,
            each: Some(bytes),
            ..Self::default()
        })
    }

    /// How many bytes were written to lanes that have it.
    pub(crate) fn written(&self) -> usize {
        self.written.load(Ordering::SeqCst)
    }

    pub(crate) fn disarm(&self) {
        self.armed.store(false, Ordering::SeqCst);
    }

    /// Acts after so many bytes more.
    pub(crate) fn arm(&self, bytes: usize) {
        *self.budget.lock().unwrap() = bytes;
        self.armed.store(true, Ordering::SeqCst);
    }

    fn acts(&self) -> bool {
        self.armed.load(Ordering::SeqCst) && *self.budget.lock().unwrap() == 0
    }
}

/// A lane that ends or freezes as its fault says.
#[derive(Debug)]
struct FaultyLane {
    inner: Option<Box<dyn Lane>>,
    fault: Arc<Fault>,
    /// It was made after the fault was armed, which is for those that were there, unless the rank stands still.
    immune: bool,
    written: usize,
}

impl FaultyLane {
    fn act(&mut self) -> Option<Poll<Result<usize, LaneError>>> {
        let acts = match self.fault.each {
            Some(most) if self.immune => self.written >= most,
            _ => !self.immune && self.fault.acts(),
        };
        if !acts {
            return None;
        }
        if self.fault.freeze {
            return Some(Poll::Pending);
        }
        self.inner = None;
        Some(Poll::Ready(Err(LaneError::Ended {
            reason: "killed by the test".to_owned(),
        })))
    }
}

impl Lane for FaultyLane {
    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize, LaneError>> {
        if let Some(acted) = self.act() {
            return acted;
        }
        let Some(inner) = &mut self.inner else {
            return Poll::Ready(Err(LaneError::Ended {
                reason: "cut by the test".to_owned(),
            }));
        };
        if self.immune || !self.fault.armed.load(Ordering::SeqCst) {
            let written = inner.poll_write(cx, parts);
            if let Poll::Ready(Ok(count)) = written {
                self.written += count;
                self.fault.written.fetch_add(count, Ordering::SeqCst);
            }
            return written;
        }
        // Others write at the same time.
        let fault = Arc::clone(&self.fault);
        let mut budget = fault.budget.lock().unwrap();
        if *budget == 0 {
            drop(budget);
            return self.poll_write(cx, parts);
        }
        let part = parts.iter().find(|part| !part.is_empty()).expect("bytes");
        let written = inner.poll_write(cx, &[IoSlice::new(&part[..part.len().min(*budget)])]);
        if let Poll::Ready(Ok(count)) = written {
            *budget -= count;
            self.fault.written.fetch_add(count, Ordering::SeqCst);
        }
        written
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), LaneError>> {
        match &mut self.inner {
            Some(inner) => inner.poll_flush(cx),
            None => Poll::Ready(Ok(())),
        }
    }

    fn is_unsent(&self) -> bool {
        self.inner.as_ref().is_some_and(|inner| inner.is_unsent())
    }

    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        into: &mut [u8],
    ) -> Poll<Result<usize, LaneError>> {
        if let Some(acted) = self.act() {
            return acted;
        }
        let Some(inner) = &mut self.inner else {
            return Poll::Ready(Ok(0));
        };
        inner.poll_read(cx, into)
    }

    fn kind(&self) -> &'static str {
        "faulty"
    }

    fn end_is_final(&self) -> bool {
        !self.fault.cut
    }
}

#[derive(Debug)]
struct Hub {
    kind: Kind,
    acceptors: Mutex<Vec<Acceptor>>,
    /// For every rank, what its ends of links do wrong.
    faults: Mutex<Vec<Option<Arc<Fault>>>>,
    /// Links that were made, and how often one was asked for.
    links: AtomicUsize,
    requests: AtomicUsize,
    /// How long the word of an authority may take.
    word_within: Mutex<Duration>,
    /// For [`Kind::Tls`] and [`Kind::Quic`], by rank. One link at a time is accepted.
    hosts: Vec<(Door, tokio::sync::Mutex<()>)>,
}

fn hosts(world: u32, choice: LaneChoice) -> Vec<(Door, tokio::sync::Mutex<()>)> {
    let authority = Authority::create(ClusterId::random()).unwrap();
    let runtime = TransportRuntime::new(1).unwrap();
    let host = |rank| {
        let credentials = network::credentials(&authority, Slot(rank));
        network::door(&runtime, credentials, EndpointConfig::default(), choice)
    };
    (0..world)
        .map(|rank| (host(rank), tokio::sync::Mutex::default()))
        .collect()
}

impl Hub {
    fn wrap(&self, rank: Rank, lane: Box<dyn Lane>) -> Box<dyn Lane> {
        match &self.faults.lock().unwrap()[rank.index()] {
            Some(fault) => Box::new(FaultyLane {
                inner: Some(lane),
                fault: Arc::clone(fault),
                // A rank that stands still does so on all links.
                immune: !fault.freeze && fault.armed.load(Ordering::SeqCst),
                written: 0,
            }),
            None => lane,
        }
    }

    /// Both ends of a link over the loopback, `rank`'s first.
    async fn link(
        &self,
        rank: Rank,
        peer: Rank,
        group: GroupId,
    ) -> Result<(Box<dyn Lane>, Box<dyn Lane>), LaneError> {
        let (own, _) = &self.hosts[rank.index()];
        let (theirs, accepting) = &self.hosts[peer.index()];
        // Nobody else accepts before this link is there.
        let _alone = accepting.lock().await;
        let target = (peer, Slot(peer.0), theirs.address());
        let (mine_hello, theirs_hello) = (hello(rank).of_group(group), hello(peer));
        let (mine, (theirs, of)) =
            tokio::try_join!(own.connect(&mine_hello, target, LONG), async {
                let incoming = theirs.accept().await.unwrap();
                incoming.open(&theirs_hello, rank, LONG).await
            })?;
        assert_eq!(of, group);
        Ok((mine, theirs))
    }
}

#[derive(Debug)]
struct TestConnector {
    rank: Rank,
    hub: Arc<Hub>,
}

pub(crate) fn hello(rank: Rank) -> LinkHello {
    LinkHello::new(JOB, GENERATION, rank)
}

impl Connector for TestConnector {
    fn word_within(&self) -> Duration {
        *self.hub.word_within.lock().unwrap()
    }

    fn is_one_host(&self, _ranks: &[Rank]) -> Option<OneHost> {
        let shares = match self.hub.kind {
            Kind::Unshared(rank) => rank != self.rank.0,
            Kind::Undecided(rank) if rank == self.rank.0 => {
                return Some(Box::pin(std::future::pending()));
            }
            Kind::Shared | Kind::Undecided(_) => true,
            _ => return None,
        };
        Some(Box::pin(async move { shares }))
    }

    fn request(&self, peer: Rank, group: GroupId) -> Option<Requesting> {
        assert!(peer > self.rank, "lower ranks ask for links");
        self.hub.requests.fetch_add(1, Ordering::SeqCst);
        let (rank, acceptor) = (
            self.rank,
            self.hub.acceptors.lock().unwrap()[peer.index()].clone(),
        );
        Some(Box::pin(async move { acceptor.requested(group, rank) }))
    }

    fn connect(&self, peer: Rank) -> Connecting {
        self.connect_group(peer, GroupId::WORLD)
    }

    fn connect_group(&self, peer: Rank, group: GroupId) -> Connecting {
        assert!(peer < self.rank, "only higher ranks make links");
        let (rank, hub) = (self.rank, Arc::clone(&self.hub));
        Box::pin(async move {
            hub.links.fetch_add(1, Ordering::SeqCst);
            let acceptor = hub.acceptors.lock().unwrap()[peer.index()].clone();
            let (mine, theirs): (Box<dyn Lane>, Box<dyn Lane>) = match hub.kind {
                Kind::Memory | Kind::Narrow(_) => {
                    let capacity = match hub.kind {
                        Kind::Narrow(capacity) => capacity,
                        _ => MemoryLane::CAPACITY,
                    };
                    let (mine, theirs) = MemoryLane::pair(capacity);
                    (Box::new(mine), Box::new(theirs))
                }
                Kind::Tls | Kind::Quic => hub.link(rank, peer, group).await?,
                Kind::Unix | Kind::Ring | Kind::Shared | Kind::Unshared(_) | Kind::Undecided(_) => {
                    let (mine, theirs) = UnixStream::pair().unwrap();
                    let (mine_hello, theirs_hello) = (hello(rank).of_group(group), hello(peer));
                    let open = |socket| {
                        let lane = UnixLane::from_std(socket).unwrap();
                        match hub.kind {
                            Kind::Unix => lane.without_rings(),
                            _ => lane,
                        }
                    };
                    let (mine, theirs) = tokio::try_join!(
                        open(mine).greeted(&mine_hello, peer, LONG),
                        open(theirs).greeted(&theirs_hello, rank, LONG)
                    )?;
                    assert_eq!(theirs.group(), group);
                    assert_eq!(theirs.kind() == "shm-ring", hub.kind != Kind::Unix);
                    (Box::new(mine), Box::new(theirs))
                }
            };
            acceptor.accept_group(group, rank, hub.wrap(peer, theirs))?;
            Ok(hub.wrap(rank, mine))
        })
    }
}

/// A group with the runtime that it runs on.
#[derive(Debug)]
pub(crate) struct Group {
    // Fields drop in order: members before the runtime.
    pub(crate) members: Vec<Communicator>,
    hub: Arc<Hub>,
    pub(crate) runtime: Runtime,
}

impl Group {
    pub(crate) fn new(kind: Kind, world: u32) -> Self {
        Self::one_by_one(kind, world, Duration::ZERO)
    }

    /// Makes a rank's communicator so long after the one before.
    pub(crate) fn one_by_one(kind: Kind, world: u32, pause: Duration) -> Self {
        // The whole suite over other lanes, as far as they pass descriptors.
        let others = [
            ("KOLO_TEST_SHARED", Kind::Shared),
            ("KOLO_TEST_RING", Kind::Ring),
            ("KOLO_TEST_TLS", Kind::Tls),
        ];
        let other = others
            .into_iter()
            .find(|(variable, _)| std::env::var_os(variable).is_some());
        let kind = match (kind, other) {
            (Kind::Memory | Kind::Unix, Some((_, other))) => other,
            (kind, _) => kind,
        };
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let hub = Arc::new(Hub {
            kind,
            acceptors: Mutex::new(Vec::new()),
            faults: Mutex::new(vec![None; world as usize]),
            links: AtomicUsize::new(0),
            requests: AtomicUsize::new(0),
            word_within: Mutex::default(),
            hosts: match kind {
                Kind::Tls => hosts(world, LaneChoice::Tls),
                Kind::Quic => hosts(world, LaneChoice::Quic),
                _ => Vec::new(),
            },
        });
        let members: Vec<Communicator> = (0..world)
            .map(|rank| {
                if rank > 0 {
                    std::thread::sleep(pause);
                }
                let connector = TestConnector {
                    rank: Rank(rank),
                    hub: Arc::clone(&hub),
                };
                Communicator::new(
                    Rank(rank),
                    world,
                    GENERATION,
                    JOB,
                    Arc::new(connector),
                    runtime.handle().clone(),
                )
                .unwrap()
                .with_timeout(LONG)
            })
            .collect();
        *hub.acceptors.lock().unwrap() = members.iter().map(Communicator::acceptor).collect();
        Self {
            members,
            hub,
            runtime,
        }
    }

    /// What the links of this rank, which are yet to be made, do wrong.
    pub(crate) fn set_fault(&self, rank: u32, fault: &Arc<Fault>) {
        self.hub.faults.lock().unwrap()[rank as usize] = Some(Arc::clone(fault));
    }

    /// Somebody watches the ranks, and says within this time why one has ended.
    pub(crate) fn set_word_within(&self, limit: Duration) {
        *self.hub.word_within.lock().unwrap() = limit;
    }

    pub(crate) fn links(&self) -> usize {
        self.hub.links.load(Ordering::SeqCst)
    }

    pub(crate) fn requests(&self) -> usize {
        self.hub.requests.load(Ordering::SeqCst)
    }

    pub(crate) fn set_timeout(&self, timeout: Duration) {
        for member in &self.members {
            member.set_timeout(timeout);
        }
    }

    /// Runs one closure for each rank, on threads of their own; the results in rank order.
    pub(crate) fn run<R: Send>(&self, body: impl Fn(&Communicator) -> R + Sync) -> Vec<R> {
        run(&self.members, body)
    }
}

/// What a rank does.
pub(crate) type Body = fn(&Communicator) -> Result<(), CollectiveError>;

pub(crate) fn done<T>(result: Result<T, CollectiveError>) -> Result<(), CollectiveError> {
    result.map(drop)
}

/// A table of what ranks do, each with a word about it.
macro_rules! bodies {
    ($comm:ident: $($body:expr => $word:expr;)*) => {[$({
        let body: $crate::common::Body = |$comm| $crate::common::done($body);
        (body, $word)
    }),*]};
}
#[allow(unused_imports)] // each test file uses its part
pub(crate) use bodies;

/// Waits for something that is sure to come.
pub(crate) fn until(mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < LONG, "it does not come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// For tests that wait for most of their time: each of these on a thread of its own.
pub(crate) fn at_once<T: Send>(all: impl IntoIterator<Item = T>, check: impl Fn(T) + Sync) {
    std::thread::scope(|scope| {
        for one in all {
            let check = &check;
            scope.spawn(move || check(one));
        }
    });
}

/// As [`Group::run`], for some of the ranks.
pub(crate) fn run<'a, R: Send>(
    members: impl IntoIterator<Item = &'a Communicator>,
    body: impl Fn(&Communicator) -> R + Sync,
) -> Vec<R> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = members
            .into_iter()
            .map(|comm| scope.spawn(move || body(comm)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("the rank's closure does not panic"))
            .collect()
    })
}

/// Every other rank's result.
pub(crate) fn others<R>(results: Vec<R>, rank: u32) -> Vec<R> {
    results
        .into_iter()
        .enumerate()
        .filter(|(index, _)| *index != rank as usize)
        .map(|(_, result)| result)
        .collect()
}

pub(crate) fn force(group: &Group, algorithm: Algorithm) {
    for comm in &group.members {
        comm.set_tuning(Tuning {
            force: Some(algorithm),
            // So that what is long here is pipelined.
            segment: Some(16),
            ..Tuning::default()
        });
    }
}

pub(crate) fn sum(comm: &Communicator, length: usize) -> Result<(), CollectiveError> {
    let input: Vec<f64> = (0..length).map(|index| index as f64).collect();
    let mut data = input.clone();
    let result = comm.all_reduce(&mut data, ReduceOp::Sum);
    match &result {
        Ok(()) => {
            let world = f64::from(comm.world_size());
            assert!(data.iter().zip(&input).all(|(a, b)| *a == world * b));
        }
        // F-2
        Err(_) => assert_eq!(data, input, "a failed operation leaves the input as it was"),
    }
    result
}
