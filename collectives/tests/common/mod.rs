//! Groups for tests, over memory lanes or Unix sockets, with lanes that fail on demand.
#![allow(dead_code)] // each test file uses its part

use std::io::IoSlice;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use kolo_collectives::lane::{Connecting, MemoryLane, UnixLane};
use kolo_collectives::{Acceptor, Communicator, Connector, Lane, LaneError, LinkHello};
use kolo_transport::ids::{Generation, JobId, Rank};
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
}

/// What a lane does wrong. Shared with the test.
#[derive(Debug, Default)]
pub(crate) struct Fault {
    /// Bytes that this end may still write before it acts; all at first.
    budget: AtomicUsize,
    armed: AtomicBool,
    /// Stop moving in place of ending.
    freeze: bool,
    /// As a network breaks: both sides live.
    cut: bool,
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

    pub(crate) fn disarm(&self) {
        self.armed.store(false, Ordering::SeqCst);
    }

    /// Acts after so many bytes more.
    pub(crate) fn arm(&self, bytes: usize) {
        self.budget.store(bytes, Ordering::SeqCst);
        self.armed.store(true, Ordering::SeqCst);
    }

    fn acts(&self) -> bool {
        self.armed.load(Ordering::SeqCst) && self.budget.load(Ordering::SeqCst) == 0
    }
}

/// A lane that ends or freezes as its fault says.
#[derive(Debug)]
struct FaultyLane {
    inner: Option<Box<dyn Lane>>,
    fault: Arc<Fault>,
    /// It was made after the fault was armed, which is for those that were there.
    immune: bool,
}

impl FaultyLane {
    fn act(&mut self) -> Option<Poll<Result<usize, LaneError>>> {
        if self.immune || !self.fault.acts() {
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
            return inner.poll_write(cx, parts);
        }
        let budget = self.fault.budget.load(Ordering::SeqCst);
        let part = parts.iter().find(|part| !part.is_empty()).expect("bytes");
        let written = inner.poll_write(cx, &[IoSlice::new(&part[..part.len().min(budget)])]);
        if let Poll::Ready(Ok(count)) = written {
            self.fault.budget.fetch_sub(count, Ordering::SeqCst);
        }
        written
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
    /// Links that were made.
    links: AtomicUsize,
}

impl Hub {
    fn wrap(&self, rank: Rank, lane: Box<dyn Lane>) -> Box<dyn Lane> {
        match &self.faults.lock().unwrap()[rank.index()] {
            Some(fault) => Box::new(FaultyLane {
                inner: Some(lane),
                fault: Arc::clone(fault),
                immune: fault.armed.load(Ordering::SeqCst),
            }),
            None => lane,
        }
    }
}

#[derive(Debug)]
struct TestConnector {
    rank: Rank,
    hub: Arc<Hub>,
}

pub(crate) fn hello(rank: Rank) -> LinkHello {
    LinkHello {
        job: JOB,
        generation: GENERATION,
        rank,
    }
}

impl Connector for TestConnector {
    fn connect(&self, peer: Rank) -> Connecting {
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
                Kind::Unix => {
                    let (mine, theirs) = UnixStream::pair().unwrap();
                    let (mine_hello, theirs_hello) = (hello(rank), hello(peer));
                    let (mine, theirs) = tokio::try_join!(
                        UnixLane::open(mine, &mine_hello, peer, LONG),
                        UnixLane::open(theirs, &theirs_hello, rank, LONG)
                    )?;
                    (Box::new(mine), Box::new(theirs))
                }
            };
            acceptor.accept(rank, hub.wrap(peer, theirs))?;
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
    _runtime: Runtime,
}

impl Group {
    pub(crate) fn new(kind: Kind, world: u32) -> Self {
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
        });
        let members: Vec<Communicator> = (0..world)
            .map(|rank| {
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
            _runtime: runtime,
        }
    }

    /// What the links of this rank, which are yet to be made, do wrong.
    pub(crate) fn set_fault(&self, rank: u32, fault: &Arc<Fault>) {
        self.hub.faults.lock().unwrap()[rank as usize] = Some(Arc::clone(fault));
    }

    pub(crate) fn links(&self) -> usize {
        self.hub.links.load(Ordering::SeqCst)
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
