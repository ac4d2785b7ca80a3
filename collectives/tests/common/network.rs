//! Ranks that reach each other over the network.

use std::net::SocketAddr;
use std::sync::Arc;

use kolo_collectives::lane::{
    Connecting, Gone, NetworkLanes, Requesting, accept_quic, accept_tls, rank_of,
};
use kolo_collectives::{Communicator, Connector, GroupId, LinkHello};
use kolo_transport::ids::{CrossRank, Incarnation, LocalRank, NodeId, Rank, Slot};
use kolo_transport::wire::{GenerationTable, Member};
use kolo_transport::{Endpoint, TlsListener, TransportRuntime};

use super::LONG;

#[derive(Debug)]
pub(crate) struct NetworkConnector {
    pub(crate) lanes: Arc<NetworkLanes>,
    pub(crate) table: Arc<GenerationTable>,
    pub(crate) hello: LinkHello,
}

impl Connector for NetworkConnector {
    fn connect(&self, peer: Rank) -> Connecting {
        self.connect_group(peer, GroupId::WORLD)
    }

    fn connect_group(&self, peer: Rank, group: GroupId) -> Connecting {
        let (lanes, hello) = (Arc::clone(&self.lanes), self.hello.of_group(group));
        let member = self.table.members[peer.index()].clone();
        Box::pin(async move {
            let target = (peer, member.slot, member.address.unwrap());
            lanes.connect(&hello, target, LONG).await
        })
    }

    fn request(&self, peer: Rank, group: GroupId) -> Option<Requesting> {
        let (lanes, hello) = (Arc::clone(&self.lanes), self.hello.of_group(group));
        let member = self.table.members[peer.index()].clone();
        Some(Box::pin(async move {
            let target = (peer, member.slot, member.address.unwrap());
            lanes.request(&hello, target, LONG).await
        }))
    }

    fn is_gone(&self, peer: Rank, _met: bool) -> Option<Gone> {
        let lanes = Arc::clone(&self.lanes);
        let address = self.table.members[peer.index()].address?;
        Some(Box::pin(async move { lanes.is_gone(address).await }))
    }
}

/// Slots are not ranks: rank r is in slot `world - 1 - r`.
pub(crate) fn slot_of(rank: u32, world: u32) -> Slot {
    Slot(world - 1 - rank)
}

pub(crate) fn member(rank: u32, world: u32, address: SocketAddr) -> Member {
    Member {
        rank: Rank(rank),
        local_rank: LocalRank(0),
        local_size: 1,
        cross_rank: CrossRank(rank),
        cross_size: world,
        slot: slot_of(rank, world),
        node: NodeId(u64::from(rank)),
        hostname: format!("host-{rank}"),
        address: Some(address),
        incarnation: Incarnation::FIRST,
    }
}

/// Takes what higher ranks make.
pub(crate) fn serve(
    runtime: &TransportRuntime,
    (endpoint, listener): (&Endpoint, &TlsListener),
    table: &Arc<GenerationTable>,
    comm: &Communicator,
) {
    let own = comm.hello();
    let (acceptor, endpoint, table_too) = (comm.acceptor(), endpoint.clone(), Arc::clone(table));
    runtime.handle().spawn(async move {
        while let Some(connection) = endpoint.accept().await {
            let (acceptor, table) = (acceptor.clone(), Arc::clone(&table_too));
            tokio::spawn(async move {
                let peer = rank_of(connection.peer(), &table).unwrap();
                // A group that is gone takes no lanes.
                if let Ok(Some((lane, group))) = accept_quic(&connection, &own, peer, LONG).await {
                    drop(acceptor.accept_group(group, peer, lane));
                }
            });
        }
    });
    let (acceptor, listener, table) = (comm.acceptor(), listener.clone(), Arc::clone(table));
    runtime.handle().spawn(async move {
        while let Some(link) = listener.accept().await {
            let (acceptor, table) = (acceptor.clone(), Arc::clone(&table));
            tokio::spawn(async move {
                let peer = rank_of(link.peer(), &table).unwrap();
                if let Ok(Some((lane, group))) = accept_tls(link, &own, peer, LONG).await {
                    drop(acceptor.accept_group(group, peer, lane));
                }
            });
        }
    });
}
