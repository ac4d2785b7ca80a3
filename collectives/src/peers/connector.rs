//! How a communicator reaches its peers, and what it needs to be reached.

use std::os::unix::net::UnixListener as StdUnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kolo_transport::ids::Rank;
use kolo_transport::wire::{GenerationTable, Member};
use tokio::net::UnixListener;
use tokio::sync::watch;

use super::driver::{Driver, Leaving};
use super::socket::{self, SocketFile, Spares};
use super::{PeersError, STEP, Settings};
use crate::communicator::Communicator;
use crate::group::GroupId;
use crate::lane::{
    Connecting, Connector, Door, Gone, Lane, LaneError, LinkHello, OneHost, Requesting, Terms,
};

/// Between two attempts to reach a peer on another host.
const PAUSE: Duration = Duration::from_millis(20);

/// What a rank sent before it went is read in this time.
const GRACE: Duration = Duration::from_millis(500);

/// Where the ranks of this host have their sockets.
#[derive(Debug, Clone)]
pub(super) enum Paths {
    Folder(PathBuf),
    Table(Vec<PathBuf>),
}

impl Paths {
    fn of(&self, rank: Rank) -> Option<PathBuf> {
        match self {
            Self::Folder(folder) => Some(folder.join(format!("{rank}.sock"))),
            Self::Table(paths) => paths.get(rank.index()).cloned(),
        }
    }

    /// The same wherever this process goes later.
    fn absolute(self) -> Self {
        // Without a working directory it is as it is.
        let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
        match self {
            Self::Folder(folder) => Self::Folder(absolute(folder)),
            Self::Table(paths) => Self::Table(paths.into_iter().map(absolute).collect()),
        }
    }
}

/// What a rank knows of the others.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) own: LinkHello,
    pub(super) world: u32,
    pub(super) paths: Option<Paths>,
    /// Of ranks on several hosts.
    pub(super) far: Option<Far>,
    /// For links inside the host; none if there are no such.
    pub(super) spares: Arc<Spares>,
}

#[derive(Debug)]
pub(super) struct Far {
    pub(super) table: Arc<GenerationTable>,
    pub(super) door: Door,
}

impl Known {
    /// Whether a rank is on this host and has a socket here.
    fn path_to(&self, peer: Rank) -> Option<PathBuf> {
        let near = match &self.far {
            Some(far) => {
                let host = |rank: Rank| far.table.members.get(rank.index()).map(|m| &m.hostname);
                host(peer) == host(self.own.rank)
            }
            None => true,
        };
        self.paths.as_ref().filter(|_| near)?.of(peer)
    }

    /// Whether other ranks may have links to this one over Unix sockets.
    fn has_near(&self) -> bool {
        (0..self.world)
            .map(Rank)
            .any(|peer| peer != self.own.rank && self.path_to(peer).is_some())
    }

    async fn connect(
        &self,
        peer: Rank,
        group: GroupId,
        wait: Duration,
    ) -> Result<Box<dyn Lane>, LaneError> {
        let hello = self.own.of_group(group);
        if let Some(path) = self.path_to(peer) {
            return socket::connect(&path, &hello, peer, wait, &self.spares).await;
        }
        match &self.far {
            Some(far) => far.connect(&hello, peer, wait).await,
            None => Err(LaneError::Unreachable {
                reason: format!("rank {peer} has no socket"),
            }),
        }
    }

    /// Asks a rank for its link.
    async fn request(&self, peer: Rank, group: GroupId) -> Result<(), LaneError> {
        let hello = self.own.of_group(group);
        if self.path_to(peer).is_some() {
            // Once, and without waiting: the link itself is of no use.
            return self.connect(peer, group, Duration::ZERO).await.map(drop);
        }
        let member = (self.far.as_ref())
            .and_then(|far| Some((far, far.table.members.get(peer.index())?)))
            .and_then(|(far, member)| Some((far, member.slot, member.address?)));
        let Some((far, slot, address)) = member else {
            return Err(LaneError::Unreachable {
                reason: format!("the table has no rank {peer}"),
            });
        };
        let lanes = far.door.lanes();
        lanes.request(&hello, (peer, slot, address), STEP).await
    }

    /// Why a rank that was there is not any more.
    async fn why_gone(&self, peer: Rank) -> Option<String> {
        if let Some(path) = self.path_to(peer) {
            return socket::why_gone(&path).await;
        }
        let far = self.far.as_ref()?;
        let address = far.table.members.get(peer.index())?.address?;
        far.door.lanes().is_gone(address).await
    }
}

impl Far {
    async fn connect(
        &self,
        own: &LinkHello,
        peer: Rank,
        wait: Duration,
    ) -> Result<Box<dyn Lane>, LaneError> {
        let Some(Member {
            slot,
            address: Some(address),
            hostname,
            ..
        }) = self.table.members.get(peer.index())
        else {
            return Err(LaneError::Unreachable {
                reason: format!("the table has no rank {peer}"),
            });
        };
        let begun = Instant::now();
        loop {
            let attempt = self
                .door
                .lanes()
                .connect(own, (peer, *slot, *address), STEP);
            let why = match attempt.await {
                Err(error) if error.is_behind(own) => error,
                // What is there is not the peer that is looked for, or does not want this one.
                Err(
                    error @ (LaneError::Refused { .. }
                    | LaneError::StaleGeneration { .. }
                    | LaneError::Protocol { .. }),
                ) => return Err(error),
                Err(error) => error,
                Ok(lane) => return Ok(lane),
            };
            if begun.elapsed() >= wait {
                return Err(LaneError::Timeout {
                    reason: format!(
                        "rank {peer} on {hostname} was not reached at {address} for {} s ({why}); was it started, and \
                         do firewalls let UDP or TCP pass?",
                        wait.as_secs_f64()
                    ),
                });
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// The connector, which goes with its communicator. Fields drop in order.
#[derive(Debug)]
struct Seat {
    known: Arc<Known>,
    wait: Duration,
    /// First, while somebody listens at it still: so no successor can have replaced it.
    _file: Option<SocketFile>,
    /// Ends all tasks.
    _open: watch::Sender<()>,
    closed: watch::Receiver<()>,
    _driver: Driver,
}

impl Connector for Seat {
    fn connect(&self, peer: Rank) -> Connecting {
        self.connect_group(peer, GroupId::WORLD)
    }

    fn connect_group(&self, peer: Rank, group: GroupId) -> Connecting {
        let (known, wait, closed) = (Arc::clone(&self.known), self.wait, self.closed.clone());
        Box::pin(async move {
            let connecting = known.connect(peer, group, wait);
            until_closed(closed, connecting).await.unwrap_or_else(|| {
                Err(LaneError::Unreachable {
                    reason: "this rank's communicator is gone".to_owned(),
                })
            })
        })
    }

    fn request(&self, peer: Rank, group: GroupId) -> Option<Requesting> {
        let (known, closed) = (Arc::clone(&self.known), self.closed.clone());
        Some(Box::pin(async move {
            let requesting = known.request(peer, group);
            until_closed(closed, requesting).await.unwrap_or(Ok(()))
        }))
    }

    fn is_gone(&self, peer: Rank, met: bool) -> Option<Gone> {
        // One that was never heard of may still begin.
        if !met {
            return None;
        }
        let (known, closed) = (Arc::clone(&self.known), self.closed.clone());
        Some(Box::pin(async move {
            let asking = async {
                let why = known.why_gone(peer).await?;
                // It may have ended in order, and what it sent is about to be read.
                tokio::time::sleep(GRACE).await;
                Some(why)
            };
            until_closed(closed, asking).await.flatten()
        }))
    }

    fn is_one_host(&self, ranks: &[Rank]) -> Option<OneHost> {
        let one = ranks.iter().all(|rank| self.known.path_to(*rank).is_some());
        one.then(|| Box::pin(std::future::ready(true)) as OneHost)
    }
}

/// `None` if the communicator goes first.
async fn until_closed<F: Future>(mut closed: watch::Receiver<()>, future: F) -> Option<F::Output> {
    tokio::select! {
        output = future => Some(output),
        // Nothing is ever sent.
        _ = closed.changed() => None,
    }
}

/// Takes a rank's place: it can be reached from now on.
pub(super) fn sit(
    mut known: Known,
    settings: &Settings,
    started: (Driver, Leaving),
) -> Result<Communicator, PeersError> {
    let (own, world) = (known.own, known.world);
    known.paths = known.paths.map(Paths::absolute);
    let (file, listener) = match known.path_to(own.rank).filter(|_| known.has_near()) {
        Some(path) => {
            let (listener, file) = socket::listen(&path, own.rank, settings.wait)?;
            known.spares.fill();
            (
                Some(file),
                Some(tokio_listener(listener, &started.0, own.rank)?),
            )
        }
        None => (None, None),
    };
    // From here on the driver goes with the connector, and so before whoever waits for it.
    let (driver, leaving) = started;
    let (known, handle) = (Arc::new(known), driver.handle().clone());
    let (open, closed) = watch::channel(());
    let seat = Seat {
        known: Arc::clone(&known),
        wait: settings.wait,
        _file: file,
        _open: open,
        closed: closed.clone(),
        _driver: driver,
    };
    let mut comm = Communicator::new(
        own.rank,
        world,
        own.generation,
        own.job,
        Arc::new(seat),
        handle.clone(),
    )?;
    comm.leaving = Some(Arc::new(leaving));
    if let Some(listener) = listener {
        let serving = socket::serve(listener, own, comm.acceptor(), Arc::clone(&known.spares));
        handle.spawn(until_closed(closed.clone(), serving));
    }
    if let Some(far) = &known.far {
        comm.set_table(Arc::clone(&far.table))?;
        let (door, table) = (far.door.clone(), Arc::clone(&far.table));
        let acceptor = comm.acceptor();
        let serving = async move {
            let terms =
                move |peer| std::future::ready(Terms::of(&peer, &table, (own, acceptor.clone())));
            Box::pin(door.serve(STEP, terms)).await;
        };
        handle.spawn(until_closed(closed, serving));
    }
    Ok(comm)
}

fn tokio_listener(
    listener: StdUnixListener,
    driver: &Driver,
    rank: Rank,
) -> Result<UnixListener, PeersError> {
    let _entered = driver.handle().enter();
    UnixListener::from_std(listener).map_err(|error| PeersError::Runtime { rank, error })
}
