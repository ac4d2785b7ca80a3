//! How this worker's communicator reaches the other ranks.
//!
//! To a rank on the same node: a socket pair that the node makes on request and hands to both. To a rank on
//! another node: a QUIC connection between the two workers' endpoints, on which both show the certificates of
//! their slots. Both are made at first use, by the higher rank of the two.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use kolo_collectives::lane::{Connecting, QuicLane, UnixLane, rank_of};
use kolo_collectives::{Acceptor, Connector, Lane, LaneError, LinkHello};
use kolo_transport::ids::{Rank, Slot};
use kolo_transport::local::ControlSocket;
use kolo_transport::wire::{FromWorker, GenerationTable};
use kolo_transport::{CloseCode, Connection, Endpoint, Expect};
use tokio::sync::{Semaphore, oneshot, watch};

use super::plane::Plane;

/// Links that are being accepted at once. More wait.
const MAX_ACCEPTING: usize = 64;

/// The ends that this worker has of links to other ranks.
#[derive(Debug)]
pub(crate) struct Links {
    own: LinkHello,
    control: Arc<ControlSocket>,
    table: watch::Receiver<Option<Arc<GenerationTable>>>,
    /// Of the data plane, once it listens.
    plane: OnceLock<Plane>,
    /// Sockets that were asked for, by rank.
    asked: Mutex<HashMap<Rank, oneshot::Sender<OwnedFd>>>,
    /// For every step of making a link.
    limit: Duration,
}

impl Links {
    pub(crate) fn new(
        own: LinkHello,
        control: Arc<ControlSocket>,
        table: watch::Receiver<Option<Arc<GenerationTable>>>,
        limit: Duration,
    ) -> Self {
        Self {
            own,
            control,
            table,
            plane: OnceLock::new(),
            asked: Mutex::default(),
            limit,
        }
    }

    fn asked(&self) -> std::sync::MutexGuard<'_, HashMap<Rank, oneshot::Sender<OwnedFd>>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The members, when they are known.
    async fn table(&self) -> Result<Arc<GenerationTable>, LaneError> {
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
                "rank {} did not learn the members of generation {} within {} s",
                self.own.rank,
                self.own.generation,
                self.limit.as_secs_f64()
            ),
        }
    }

    async fn connect(&self, peer: Rank) -> Result<Box<dyn Lane>, LaneError> {
        let table = self.table().await?;
        let (Some(mine), Some(theirs)) = (
            table.members.get(self.own.rank.index()),
            table.members.get(peer.index()),
        ) else {
            return Err(LaneError::Unreachable {
                reason: format!("generation {} has no rank {peer}", self.own.generation),
            });
        };
        if mine.node == theirs.node {
            return self.connect_on_node(peer).await;
        }
        let address = theirs.address.ok_or_else(|| LaneError::Unreachable {
            reason: format!("rank {peer} on {} does not listen", theirs.hostname),
        })?;
        self.connect_over_network(peer, theirs.slot, address).await
    }

    async fn connect_on_node(&self, peer: Rank) -> Result<Box<dyn Lane>, LaneError> {
        let (give, take) = oneshot::channel();
        self.asked().insert(peer, give);
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
                reason: format!("another socket to rank {peer} was asked for"),
            })
        })
        .await
        .map_err(|_| LaneError::Timeout {
            reason: format!("the node gave no socket to rank {peer}"),
        })??;
        let lane = UnixLane::open(UnixStream::from(socket), &self.own, peer, self.limit).await?;
        Ok(Box::new(lane))
    }

    async fn connect_over_network(
        &self,
        peer: Rank,
        slot: Slot,
        address: SocketAddr,
    ) -> Result<Box<dyn Lane>, LaneError> {
        let plane = self.plane.get().ok_or_else(|| LaneError::Unreachable {
            reason: format!("rank {} has no data plane to rank {peer}", self.own.rank),
        })?;
        let unreachable = |error: &dyn std::fmt::Display| LaneError::Unreachable {
            reason: error.to_string(),
        };
        let (endpoint, address) = plane
            .towards(address)
            .map_err(|error| unreachable(&format!("{address} can't be reached: {error}")))?;
        let connection = endpoint
            .connect(address, Expect::worker(self.own.job, slot))
            .await
            .map_err(|error| unreachable(&error))?;
        let lane = QuicLane::connect(&connection, &self.own, peer, self.limit).await?;
        Ok(Box::new(lane))
    }

    /// A socket came from the node: one that was asked for, or one that a higher rank asked for.
    pub(crate) fn socket(self: &Arc<Self>, peer: Rank, socket: OwnedFd, acceptor: &Acceptor) {
        if peer < self.own.rank {
            let asked = self.asked().remove(&peer);
            // Nobody waits for it any more if it is late; then it is closed, and the peer sees that.
            if asked.is_none_or(|asked| asked.send(socket).is_err()) {
                tracing::debug!(%peer, "a socket to a rank came too late");
            }
            return;
        }
        let (links, acceptor) = (Arc::clone(self), acceptor.clone());
        tokio::spawn(async move {
            let socket = UnixStream::from(socket);
            let accepted = UnixLane::open(socket, &links.own, peer, links.limit)
                .await
                .and_then(|lane| acceptor.accept(peer, Box::new(lane)));
            if let Err(error) = accepted {
                // The peer tries again, or has an error of its own to show.
                tracing::warn!(%peer, %error, "a link from a rank of this node was not accepted");
            }
        });
    }

    /// Accepts links from other nodes, until the data plane is closed.
    pub(crate) fn listen(self: &Arc<Self>, plane: Plane, acceptor: &Acceptor) {
        let endpoints: Vec<Endpoint> = plane.endpoints().cloned().collect();
        if self.plane.set(plane).is_err() {
            return;
        }
        for endpoint in endpoints {
            self.accept_at(endpoint, acceptor.clone());
        }
    }

    fn accept_at(self: &Arc<Self>, endpoint: Endpoint, acceptor: Acceptor) {
        let links = Arc::clone(self);
        tokio::spawn(async move {
            let accepting = Arc::new(Semaphore::new(MAX_ACCEPTING));
            while let Some(connection) = endpoint.accept().await {
                let Ok(permit) = Arc::clone(&accepting).acquire_owned().await else {
                    return;
                };
                let (links, acceptor) = (Arc::clone(&links), acceptor.clone());
                tokio::spawn(async move {
                    if let Err(error) = links.accept(&connection, &acceptor).await {
                        let peer = connection.peer().to_string();
                        tracing::warn!(peer, %error, "a link from another node was not accepted");
                        let code = match &error {
                            LaneError::StaleGeneration { .. } => CloseCode::StaleGeneration,
                            LaneError::Refused { .. } => CloseCode::Forbidden,
                            _ => CloseCode::Protocol,
                        };
                        connection.close(code, &error.to_string());
                    }
                    drop(permit);
                });
            }
        });
    }

    async fn accept(&self, connection: &Connection, acceptor: &Acceptor) -> Result<(), LaneError> {
        let table = self.table().await?;
        let peer = rank_of(connection.peer(), &table)?;
        let lane = QuicLane::accept(connection, &self.own, peer, self.limit).await?;
        acceptor.accept(peer, Box::new(lane))
    }

    /// Tells the peers on other nodes that this worker goes, for at most `limit`.
    pub(crate) async fn close(&self, limit: Duration) {
        if let Some(plane) = self.plane.get()
            && tokio::time::timeout(limit, plane.close("the worker ends"))
                .await
                .is_err()
        {
            tracing::debug!("a peer did not confirm that the data plane is closed");
        }
    }
}

/// The [`Connector`] of a worker's communicator.
#[derive(Debug)]
pub(crate) struct LinkConnector(pub(crate) Arc<Links>);

impl Connector for LinkConnector {
    fn connect(&self, peer: Rank) -> Connecting {
        let links = Arc::clone(&self.0);
        Box::pin(async move { links.connect(peer).await })
    }
}
