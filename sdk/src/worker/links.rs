//! How this worker's communicator reaches the other ranks.
//!
//! To a rank on the same node: a socket pair that the node makes on request and hands to both. To a rank on
//! another node: a connection between the two workers' [doors](Door), on which both show the certificates of
//! their slots. All are made at first use, by the higher rank of the two.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use kolo_collectives::lane::{Connecting, Door, OneHost, Requesting, UnixLane};
use kolo_collectives::{Acceptor, Connector, GroupId, Lane, LaneError, LinkHello};
use kolo_transport::ids::Rank;
use kolo_transport::local::ControlSocket;
use kolo_transport::wire::span::Span;
use kolo_transport::wire::{FromWorker, GenerationTable, Member};
use tokio::sync::{oneshot, watch};

use super::plane::Plane;
use crate::options::RINGS;

/// The node that had a process says within this time after the end of its links why it ended.
const WORD: Duration = Duration::from_secs(1);

/// The ends that this worker has of links to other ranks, in one generation.
#[derive(Debug)]
pub(crate) struct Links {
    own: LinkHello,
    control: Arc<ControlSocket>,
    table: watch::Receiver<Option<Arc<GenerationTable>>>,
    /// Of the data plane, once it listens. It outlives the generation.
    plane: Arc<OnceLock<Plane>>,
    /// Sockets that were asked for, by rank: any of them does for any group.
    asked: Mutex<HashMap<Rank, VecDeque<oneshot::Sender<OwnedFd>>>>,
    /// For every step of making a link.
    limit: Duration,
    /// Links inside the node have rings in shared memory.
    rings: bool,
}

impl Links {
    pub(crate) fn new(
        own: LinkHello,
        (control, plane): (Arc<ControlSocket>, Arc<OnceLock<Plane>>),
        table: watch::Receiver<Option<Arc<GenerationTable>>>,
        limit: Duration,
    ) -> Self {
        Self {
            own,
            control,
            table,
            plane,
            asked: Mutex::default(),
            limit,
            rings: !std::env::var(RINGS).is_ok_and(|value| value == "off"),
        }
    }

    pub(crate) fn own(&self) -> LinkHello {
        self.own
    }

    fn asked(
        &self,
    ) -> std::sync::MutexGuard<'_, HashMap<Rank, VecDeque<oneshot::Sender<OwnedFd>>>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The members, when they are known.
    pub(crate) async fn table(&self) -> Result<Arc<GenerationTable>, LaneError> {
        let mut table = self.table.clone();
        let known = tokio::time::timeout(self.limit, table.wait_for(Option::is_some)).await;
        match known {
            Ok(Ok(table)) => table.clone().ok_or_else(|| self.no_table()),
            Ok(Err(_)) | Err(_) => Err(self.no_table()),
        }
    }

    fn no_table(&self) -> LaneError {
        LaneError::Timeout {
            reason: format!(
                "rank {} did not learn the members of generation {} within {}",
                self.own.rank,
                self.own.generation,
                Span(self.limit)
            ),
        }
    }

    async fn connect(&self, peer: Rank, group: GroupId) -> Result<Box<dyn Lane>, LaneError> {
        let hello = self.own.of_group(group);
        let table = self.table().await?;
        let (mine, theirs) = self.both(&table, peer)?;
        if mine.node == theirs.node {
            return self.connect_on_node(peer, &hello).await;
        }
        let address = address_of(theirs)?;
        let (door, address) = self.towards(peer, address)?;
        door.connect(&hello, (peer, theirs.slot, address), self.limit)
            .await
    }

    /// This rank and a peer.
    fn both<'a>(
        &self,
        table: &'a GenerationTable,
        peer: Rank,
    ) -> Result<(&'a Member, &'a Member), LaneError> {
        let member = |rank: Rank| table.members.get(rank.index());
        (member(self.own.rank).zip(member(peer))).ok_or_else(|| LaneError::Unreachable {
            reason: format!("generation {} has no rank {peer}", self.own.generation),
        })
    }

    /// Whether all these ranks are on this node. All of them know the same table; without one no link is made either.
    async fn are_on_this_node(&self, ranks: &[Rank]) -> bool {
        let Ok(table) = self.table().await else {
            return false;
        };
        let node = |rank: &Rank| table.members.get(rank.index()).map(|member| &member.node);
        let here = node(&self.own.rank);
        here.is_some() && ranks.iter().all(|rank| node(rank) == here)
    }

    async fn connect_on_node(
        &self,
        peer: Rank,
        hello: &LinkHello,
    ) -> Result<Box<dyn Lane>, LaneError> {
        let (give, take) = oneshot::channel();
        {
            let mut asked = self.asked();
            let waiting = asked.entry(peer).or_default();
            // Those that were given up are not to have the sockets of others.
            waiting.retain(|waiting| !waiting.is_closed());
            waiting.push_back(give);
        }
        let request = FromWorker::ConnectPeer {
            rank: peer,
            generation: self.own.generation,
        };
        let socket = tokio::time::timeout(self.limit, async {
            self.control
                .send(&request, &[])
                .await
                .map_err(|error| LaneError::Unreachable {
                    reason: format!("the node can't be asked for a socket to rank {peer}: {error}"),
                })?;
            take.await.map_err(|_| LaneError::Unreachable {
                reason: format!("the socket to rank {peer} was lost"),
            })
        })
        .await
        .map_err(|_| LaneError::Timeout {
            reason: format!("the node gave no socket to rank {peer}"),
        })??;
        Ok(Box::new(self.inside(socket, hello, peer).await?))
    }

    /// A link inside the node, over one of its sockets.
    async fn inside(
        &self,
        socket: OwnedFd,
        hello: &LinkHello,
        peer: Rank,
    ) -> Result<UnixLane, LaneError> {
        let lane = UnixLane::from_std(UnixStream::from(socket)).map_err(|error| {
            LaneError::Unreachable {
                reason: format!("the socket to rank {peer} can't be used: {error}"),
            }
        })?;
        let lane = if self.rings {
            lane
        } else {
            lane.without_rings()
        };
        lane.greeted(hello, peer, self.limit).await
    }

    /// The way to a rank of another node.
    fn towards(&self, peer: Rank, address: SocketAddr) -> Result<(&Door, SocketAddr), LaneError> {
        let unreachable = |reason| LaneError::Unreachable { reason };
        let plane = self.plane.get().ok_or_else(|| {
            unreachable(format!(
                "rank {} has no data plane to rank {peer}",
                self.own.rank
            ))
        })?;
        plane
            .towards(address)
            .map_err(|error| unreachable(format!("{address} can't be reached: {error}")))
    }

    /// Asks a higher rank for its link to this one.
    async fn request(&self, peer: Rank, group: GroupId) -> Result<(), LaneError> {
        let table = self.table().await?;
        let (mine, theirs) = self.both(&table, peer)?;
        if mine.node == theirs.node {
            let request = FromWorker::RequestLink {
                rank: peer,
                generation: self.own.generation,
                group: group.0,
            };
            return self.control.send(&request, &[]).await.map_err(|error| {
                LaneError::Unreachable {
                    reason: format!("the node can't be asked for a link of rank {peer}: {error}"),
                }
            });
        }
        let (door, address) = self.towards(peer, address_of(theirs)?)?;
        let hello = self.own.of_group(group);
        door.request(&hello, (peer, theirs.slot, address), self.limit)
            .await
    }

    /// A socket came from the node: one that was asked for, or one that a higher rank asked for.
    pub(crate) fn socket(self: &Arc<Self>, peer: Rank, socket: OwnedFd, acceptor: &Acceptor) {
        if peer < self.own.rank {
            let mut asked = self.asked();
            let mut socket = Some(socket);
            while let Some(given) = socket.take()
                && let Some(waiting) = asked.get_mut(&peer).and_then(VecDeque::pop_front)
            {
                // One that was given up leaves it to the next.
                socket = waiting.send(given).err();
            }
            if asked.get(&peer).is_none_or(VecDeque::is_empty) {
                asked.remove(&peer);
            }
            return;
        }
        let (links, acceptor) = (Arc::clone(self), acceptor.clone());
        tokio::spawn(async move {
            let accepted = links
                .inside(socket, &links.own, peer)
                .await
                .and_then(|lane| acceptor.accept_group(lane.group(), peer, Box::new(lane)));
            if let Err(error) = accepted {
                // The peer tries again, or has an error of its own to show.
                tracing::warn!(%peer, %error, "a link from a rank of this node was not accepted");
            }
        });
    }
}

fn address_of(member: &Member) -> Result<SocketAddr, LaneError> {
    member.address.ok_or_else(|| LaneError::Unreachable {
        reason: format!(
            "rank {} on {} does not listen",
            member.rank, member.hostname
        ),
    })
}

/// The [`Connector`] of a worker's communicator.
#[derive(Debug)]
pub(crate) struct LinkConnector(pub(crate) Arc<Links>);

impl Connector for LinkConnector {
    fn connect(&self, peer: Rank) -> Connecting {
        self.connect_group(peer, GroupId::WORLD)
    }

    fn connect_group(&self, peer: Rank, group: GroupId) -> Connecting {
        let links = Arc::clone(&self.0);
        Box::pin(async move { links.connect(peer, group).await })
    }

    fn request(&self, peer: Rank, group: GroupId) -> Option<Requesting> {
        let links = Arc::clone(&self.0);
        Some(Box::pin(async move { links.request(peer, group).await }))
    }

    fn word_within(&self) -> Duration {
        WORD
    }

    fn is_one_host(&self, ranks: &[Rank]) -> Option<OneHost> {
        let (links, ranks) = (Arc::clone(&self.0), ranks.to_vec());
        Some(Box::pin(
            async move { links.are_on_this_node(&ranks).await },
        ))
    }
}
