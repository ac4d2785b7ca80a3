//! Ranks on several hosts.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kolo_transport::ids::{
    CrossRank, Generation, Incarnation, JobId, LocalRank, NodeId, Rank, Slot,
};
use kolo_transport::wire::{GenerationTable, Handover, Member};
use kolo_transport::{EndpointConfig, LiveCredentials, TransportRuntime};
use tokio::runtime::Handle;

use super::connector::{Far, Known, Paths, sit};
use super::driver::{Driver, Leaving};
use super::{PeersError, Settings};
use crate::communicator::Communicator;
use crate::lane::{Door, LaneChoice, LinkHello};
use crate::schedule::Layout;

/// Where a rank is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Peer {
    /// Its host, by any name. Ranks with the same name are on one host: algorithms go by that, and errors name it.
    pub host: String,
    /// Where it listens, for UDP and TCP.
    pub address: SocketAddr,
}

impl Peer {
    /// A rank on a host.
    #[must_use]
    pub fn new(host: impl Into<String>, address: SocketAddr) -> Self {
        Self {
            host: host.into(),
            address,
        }
    }
}

/// The ranks are on several hosts. Links between them have mutual TLS, over QUIC or TCP, whichever
/// [is found](LaneChoice) to be better.
///
/// Which rank it is, and of which job, this rank's credentials say: see [`issue`](super::issue).
#[derive(Debug, Clone)]
#[must_use = "nothing is done before `join`"]
pub struct Network {
    credentials: LiveCredentials,
    folder: Option<PathBuf>,
    lane: LaneChoice,
    endpoint: EndpointConfig,
    settings: Settings,
}

/// A rank that listens and does not know the others yet.
#[derive(Debug)]
#[must_use = "it listens until it is dropped"]
pub struct Listening {
    network: Network,
    job: JobId,
    rank: Rank,
    door: Door,
    driver: (Driver, Leaving),
}

impl Network {
    /// The rank that has these credentials. Of [`LiveCredentials`] it shows the newest on every new link.
    pub fn new(credentials: impl Into<LiveCredentials>) -> Self {
        Self {
            credentials: credentials.into(),
            folder: None,
            lane: LaneChoice::default(),
            endpoint: EndpointConfig::default(),
            settings: Settings::default(),
        }
    }

    /// Ranks of one host meet in this folder of theirs, as [`Local`](super::Local) ranks do, and share memory if they are alone in
    /// a communicator. All ranks give one, or none. It may have the same path on all hosts. Default: none; they are linked as
    /// ranks of different hosts are.
    pub fn folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.folder = Some(folder.into());
        self
    }

    /// Which kind of links this rank makes to other hosts. Default: the one that is found to be better.
    pub fn lane(mut self, choice: LaneChoice) -> Self {
        self.lane = choice;
        self
    }

    /// Further settings, such as [`EndpointConfig::mtu_upper_bound`] for jumbo frames. Its address does not count.
    pub fn endpoint(mut self, settings: EndpointConfig) -> Self {
        self.endpoint = settings;
        self
    }

    /// As [`Local::generation`](super::Local::generation).
    pub fn generation(mut self, generation: Generation) -> Self {
        self.settings.generation = generation;
        self
    }

    /// As [`Local::wait`](super::Local::wait).
    pub fn wait(mut self, wait: Duration) -> Self {
        self.settings.wait = wait;
        self
    }

    /// As [`Local::runtime`](super::Local::runtime).
    pub fn runtime(mut self, handle: Handle) -> Self {
        self.settings.runtime = Some(handle);
        self
    }

    /// Takes this rank's place in a table of all ranks, in rank order, the same on all. It listens at its own address in the
    /// table. Returns at once, as [`Local::join`](super::Local::join).
    ///
    /// # Errors
    ///
    /// [`PeersError`].
    pub fn join(self, table: &[Peer]) -> Result<Communicator, PeersError> {
        let (_, rank) = self.identity()?;
        super::check(rank, table.len())?;
        self.listen(table[rank.index()].address)?.join(table)
    }

    /// Listens at an address of this host. With port 0 the system chooses one that is free: tell the others
    /// [which](Listening::address).
    ///
    /// # Errors
    ///
    /// [`PeersError`].
    pub fn listen(mut self, address: SocketAddr) -> Result<Listening, PeersError> {
        let (job, rank) = self.identity()?;
        let driver = Driver::start(self.settings.runtime.clone())
            .map_err(|error| PeersError::Runtime { rank, error })?;
        let runtime = TransportRuntime::from_handle(driver.0.handle().clone());
        self.endpoint.listen = address;
        let settings = std::slice::from_ref(&self.endpoint);
        let mut doors = Door::open_all(&runtime, &self.credentials, settings, self.lane)
            .map_err(|error| PeersError::Listen { rank, error })?;
        let door = doors.pop().expect("one for each of the settings");
        Ok(Listening {
            network: self,
            job,
            rank,
            door,
            driver,
        })
    }

    /// Which rank of which job this is.
    fn identity(&self) -> Result<(JobId, Rank), PeersError> {
        let identity = self.credentials.identity();
        match identity.worker() {
            Some((job, slot)) => Ok((job, Rank(slot.0))),
            None => Err(PeersError::Invalid {
                reason: format!(
                    "these are credentials of {identity}, which is no rank of a job; `peers::issue` makes some"
                ),
            }),
        }
    }
}

impl Listening {
    /// Where this rank listens. If that is all addresses of the host, the others must be told one of them, with
    /// this port.
    pub fn address(&self) -> SocketAddr {
        self.door.address()
    }

    /// This rank, as its credentials say.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// As [`Network::join`]. This rank goes on to listen where it does, whatever the table has for it.
    ///
    /// # Errors
    ///
    /// [`PeersError`].
    pub fn join(self, table: &[Peer]) -> Result<Communicator, PeersError> {
        let Self {
            network: Network {
                folder, settings, ..
            },
            job,
            rank,
            door,
            driver,
        } = self;
        super::check(rank, table.len())?;
        let layout = Layout::of_hosts(&table.iter().map(|peer| &peer.host).collect::<Vec<_>>());
        let table = generation_table((job, settings.generation), table, &layout);
        let known = Known {
            own: LinkHello::new(job, settings.generation, rank).of_world(layout.world()),
            world: layout.world(),
            paths: folder.map(Paths::Folder),
            far: Some(Far {
                table: Arc::new(table),
                door,
            }),
            spares: Arc::default(),
        };
        let comm = sit(known, &settings, driver)?;
        comm.set_layout(layout)?;
        Ok(comm)
    }
}

/// The members as links and errors know them. Rank r is in slot r.
fn generation_table(
    (job, generation): (JobId, Generation),
    table: &[Peer],
    layout: &Layout,
) -> GenerationTable {
    let hosts = |local: u32| {
        let slots = (0..layout.hosts()).map(|host| layout.ranks_on(host).len() as u32);
        slots.enumerate().filter(move |(_, slots)| *slots > local)
    };
    let member = |(rank, peer): (u32, &Peer)| {
        let (host, local) = (layout.host_of(rank), layout.local_of(rank));
        let cross = hosts(local).position(|(other, _)| other == host as usize);
        Member {
            rank: Rank(rank),
            local_rank: LocalRank(local),
            local_size: layout.ranks_on(host).len() as u32,
            cross_rank: CrossRank(cross.unwrap_or(0) as u32),
            cross_size: hosts(local).count() as u32,
            slot: Slot(rank),
            node: NodeId(u64::from(host)),
            hostname: peer.host.clone(),
            address: Some(peer.address),
            incarnation: Incarnation::FIRST,
        }
    };
    GenerationTable {
        job,
        generation,
        members: (0..).zip(table).map(member).collect(),
        cause: String::new(),
        handover: Handover::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_tells_where_everybody_is() {
        let peer = |host, port| Peer::new(host, SocketAddr::from(([10, 0, 0, 1], port)));
        let peers = [peer("a", 1), peer("b", 2), peer("a", 3)];
        let layout = Layout::of_hosts(&["a", "b", "a"]);
        let table = generation_table((JobId(5), Generation(2)), &peers, &layout);
        assert_eq!((table.job, table.generation), (JobId(5), Generation(2)));
        let places: Vec<_> = table
            .members
            .iter()
            .map(|m| {
                (
                    m.slot.0,
                    m.local_rank.0,
                    m.local_size,
                    m.cross_rank.0,
                    m.cross_size,
                )
            })
            .collect();
        assert_eq!(places, [(0, 0, 2, 0, 2), (1, 0, 1, 1, 2), (2, 1, 2, 0, 1)]);
        assert_eq!(table.members[2].address, Some(peers[2].address));
        assert_eq!(table.members[1].hostname, "b");
    }
}
