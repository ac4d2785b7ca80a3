//! Ranks that reach each other over the network.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kolo_collectives::lane::{Connecting, Door, LaneChoice, Requesting, Terms};
use kolo_collectives::{Communicator, Connector, GroupId, LinkHello};
use kolo_transport::ids::{CrossRank, Incarnation, LocalRank, NodeId, Rank, Slot};
use kolo_transport::wire::{GenerationTable, Handover, Member};
use kolo_transport::{Authority, Credentials, EndpointConfig, Identity, Role, TransportRuntime};

use super::{GENERATION, JOB, LONG};

#[derive(Debug)]
struct NetworkConnector {
    door: Door,
    table: Arc<GenerationTable>,
    hello: LinkHello,
}

impl NetworkConnector {
    fn target(&self, peer: Rank) -> (Rank, Slot, SocketAddr) {
        let member = &self.table.members[peer.index()];
        (peer, member.slot, member.address.unwrap())
    }
}

impl Connector for NetworkConnector {
    fn word_within(&self) -> Duration {
        Duration::from_secs(1)
    }

    fn connect(&self, peer: Rank) -> Connecting {
        self.connect_group(peer, GroupId::WORLD)
    }

    fn connect_group(&self, peer: Rank, group: GroupId) -> Connecting {
        let (door, hello, target) = (
            self.door.clone(),
            self.hello.of_group(group),
            self.target(peer),
        );
        Box::pin(async move { door.connect(&hello, target, LONG).await })
    }

    fn request(&self, peer: Rank, group: GroupId) -> Option<Requesting> {
        let (door, hello, target) = (
            self.door.clone(),
            self.hello.of_group(group),
            self.target(peer),
        );
        Some(Box::pin(
            async move { door.request(&hello, target, LONG).await },
        ))
    }
}

/// The credentials of the worker in a slot.
pub(crate) fn credentials(authority: &Authority, slot: Slot) -> Credentials {
    let name = Identity::worker_name(JOB, slot);
    authority.issue(Role::Worker, &name).unwrap()
}

/// A door at a port of its own.
pub(crate) fn door(
    runtime: &TransportRuntime,
    credentials: Credentials,
    config: EndpointConfig,
    choice: LaneChoice,
) -> Door {
    let doors = Door::open_all(runtime, credentials, &[config], choice);
    doors.unwrap().pop().unwrap()
}

/// The rank whose door this is, of those with these addresses. Takes what higher ranks make.
pub(crate) fn join(
    runtime: &TransportRuntime,
    door: &Door,
    rank: u32,
    addresses: &[SocketAddr],
) -> Communicator {
    let world = addresses.len() as u32;
    let table = Arc::new(GenerationTable {
        job: JOB,
        generation: GENERATION,
        members: (0..)
            .zip(addresses)
            .map(|(rank, address)| member(rank, world, *address))
            .collect(),
        cause: String::new(),
        handover: Handover::None,
    });
    let own = LinkHello::new(JOB, GENERATION, Rank(rank));
    let connector = Arc::new(NetworkConnector {
        door: door.clone(),
        table: Arc::clone(&table),
        hello: own,
    });
    let handle = runtime.handle().clone();
    let comm = Communicator::new(Rank(rank), world, GENERATION, JOB, connector, handle);
    let comm = comm.unwrap().with_timeout(LONG);
    comm.set_table(Arc::clone(&table)).unwrap();
    let (door, acceptor) = (door.clone(), comm.acceptor());
    let terms = move |peer: Identity| {
        let acceptor = acceptor.clone();
        let take = move |group, peer, lane| acceptor.accept_group(group, peer, lane);
        std::future::ready(Terms::of(&peer, &table, own, take))
    };
    runtime
        .handle()
        .spawn(async move { door.serve(LONG, terms).await });
    comm
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
