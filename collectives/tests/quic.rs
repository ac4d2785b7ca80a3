//! The same over QUIC, with the certificates of a real authority.

#![allow(clippy::unwrap_used)]

mod common;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{GENERATION, JOB, LONG, hello, run};
use kolo_collectives::lane::{Connecting, QuicLane, rank_of};
use kolo_collectives::{
    CollectiveError, Communicator, Connector, Lane, LaneError, LinkHello, ReduceOp,
};
use kolo_transport::identity::Role;
use kolo_transport::ids::{ClusterId, CrossRank, Generation, JobId, LocalRank, NodeId, Rank, Slot};
use kolo_transport::wire::{GenerationTable, Member};
use kolo_transport::{
    Authority, CloseCode, Endpoint, EndpointConfig, Expect, Identity, TransportRuntime,
};

#[derive(Debug)]
struct QuicConnector {
    endpoint: Endpoint,
    table: Arc<GenerationTable>,
    hello: LinkHello,
}

impl Connector for QuicConnector {
    fn connect(&self, peer: Rank) -> Connecting {
        let (endpoint, hello) = (self.endpoint.clone(), self.hello);
        let member = self.table.members[peer.index()].clone();
        Box::pin(async move {
            let address = member.address.unwrap();
            let connection = endpoint
                .connect(address, Expect::worker(hello.job, member.slot))
                .await
                .map_err(|error| LaneError::Unreachable {
                    reason: error.to_string(),
                })?;
            let lane = QuicLane::connect(&connection, &hello, peer, LONG).await?;
            let lane: Box<dyn Lane> = Box::new(lane);
            Ok(lane)
        })
    }
}

struct Group {
    members: Vec<Communicator>,
    endpoints: Vec<Endpoint>,
}

/// Slots are not ranks: rank r is in slot `world - 1 - r`.
fn slot_of(rank: u32, world: u32) -> Slot {
    Slot(world - 1 - rank)
}

fn member(rank: u32, world: u32, address: SocketAddr) -> Member {
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
    }
}

fn endpoint(authority: &Authority, runtime: &TransportRuntime, slot: Slot) -> Endpoint {
    let name = Identity::worker_name(JOB, slot);
    let credentials = authority.issue(Role::Worker, &name).unwrap();
    Endpoint::bind(runtime, credentials, EndpointConfig::default()).unwrap()
}

fn authority() -> Authority {
    Authority::create(ClusterId::random()).unwrap()
}

fn group(world: u32) -> Group {
    let (authority, runtime) = (authority(), TransportRuntime::new(2).unwrap());
    let endpoints: Vec<Endpoint> = (0..world)
        .map(|rank| endpoint(&authority, &runtime, slot_of(rank, world)))
        .collect();
    let table = Arc::new(GenerationTable {
        job: JOB,
        generation: GENERATION,
        members: endpoints
            .iter()
            .zip(0..)
            .map(|(endpoint, rank)| member(rank, world, endpoint.local_addr()))
            .collect(),
    });
    let members: Vec<Communicator> = endpoints
        .iter()
        .zip(0..)
        .map(|(endpoint, rank)| {
            let connector = QuicConnector {
                endpoint: endpoint.clone(),
                table: Arc::clone(&table),
                hello: hello(Rank(rank)),
            };
            let comm = Communicator::new(
                Rank(rank),
                world,
                GENERATION,
                JOB,
                Arc::new(connector),
                runtime.handle().clone(),
            )
            .unwrap()
            .with_timeout(LONG);
            comm.set_table(Arc::clone(&table)).unwrap();
            let (acceptor, own) = (comm.acceptor(), comm.hello());
            let (endpoint, table) = (endpoint.clone(), Arc::clone(&table));
            runtime.handle().spawn(async move {
                while let Some(connection) = endpoint.accept().await {
                    let peer = rank_of(connection.peer(), &table).unwrap();
                    let lane = QuicLane::accept(&connection, &own, peer, LONG).await;
                    // A group that is gone takes no lanes.
                    if let Ok(lane) = lane {
                        drop(acceptor.accept(peer, Box::new(lane)));
                    }
                }
            });
            comm
        })
        .collect();
    Group { members, endpoints }
}

#[test]
fn collectives_are_right_over_quic() {
    for world in [2_u32, 3, 5] {
        let group = group(world);
        run(&group.members, |comm| {
            let me = comm.rank().0;
            // The last is several segments and more than a window, both ways at once.
            for length in [0_usize, 1, 17, 1023, 40_000, 400_001] {
                let mut data: Vec<i64> = (0..length as i64).map(|i| i + i64::from(me)).collect();
                comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                let (n, ranks) = (i64::from(world), i64::from(world * (world - 1) / 2));
                assert!(
                    data.iter()
                        .zip(0..)
                        .all(|(value, i)| *value == n * i + ranks)
                );
                comm.broadcast(&mut data, Rank(world - 1)).unwrap();
                let share = vec![f64::from(me); length % 1000];
                let all = comm.all_gather(&share).unwrap();
                assert_eq!(all.len(), share.len() * world as usize);
                let gathered = comm
                    .all_gather_varcount(&vec![me as f32; me as usize])
                    .unwrap();
                assert_eq!(gathered.of(Rank(1)), [1.0]);
                comm.barrier().unwrap();
            }
        });
    }
}

#[test]
fn a_rank_that_is_done_may_go() {
    for _ in 0..5 {
        let Group { members, endpoints } = group(3);
        std::thread::scope(|scope| {
            for comm in members {
                scope.spawn(move || {
                    let mut data = vec![1.0_f32; 100_000];
                    comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    drop(comm);
                });
            }
        });
        drop(endpoints);
    }
}

#[test]
fn a_peer_that_closes_its_endpoint_in_the_middle_is_lost() {
    let group = group(3);
    run(&group.members, |comm| comm.barrier().unwrap());
    let begun = Instant::now();
    let results = std::thread::scope(|scope| {
        let survivors: Vec<_> = group.members[..2]
            .iter()
            .map(|comm| {
                scope.spawn(move || {
                    let mut data = vec![1_i32; 1_000_000];
                    let result = comm.all_reduce(&mut data, ReduceOp::Sum);
                    assert!(
                        data.iter().all(|value| *value == 1),
                        "the input is untouched"
                    );
                    result
                })
            })
            .collect();
        group.endpoints[2].close(CloseCode::Shutdown, "the test ends it");
        survivors
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect::<Vec<_>>()
    });
    for result in results {
        let error = result.unwrap_err();
        assert!(matches!(error, CollectiveError::PeerLost { .. }), "{error}");
        assert_eq!(error.culprit_rank(), Some(Rank(2)), "{error}");
    }
    assert!(begun.elapsed() < LONG / 2);
    let error = group.members[0].barrier().unwrap_err();
    assert!(matches!(error, CollectiveError::PeerLost { .. }), "{error}");
    assert!(
        error.to_string().contains("host-2"),
        "the host is named: {error}"
    );
}

/// One worker connects, the other accepts, with hellos of their own.
async fn meet(
    caller: LinkHello,
    callee: LinkHello,
) -> (Result<QuicLane, LaneError>, Result<QuicLane, LaneError>) {
    let (authority, runtime) = (authority(), TransportRuntime::new(1).unwrap());
    let one = endpoint(&authority, &runtime, Slot(0));
    let two = endpoint(&authority, &runtime, Slot(1));
    let limit = Duration::from_secs(20);
    tokio::join!(
        async {
            let expect = Expect::worker(JOB, Slot(1));
            let connection = one.connect(two.local_addr(), expect).await.unwrap();
            QuicLane::connect(&connection, &caller, callee.rank, limit).await
        },
        async {
            let connection = two.accept().await.unwrap();
            QuicLane::accept(&connection, &callee, caller.rank, limit).await
        }
    )
}

#[tokio::test]
async fn a_stale_generation_is_refused_on_both_sides() {
    let stale = LinkHello {
        generation: Generation(GENERATION.0 - 1),
        ..hello(Rank(1))
    };
    let (caller, callee) = meet(stale, hello(Rank(0))).await;
    for side in [caller, callee] {
        let error = side.unwrap_err();
        assert!(
            matches!(error, LaneError::StaleGeneration { .. }),
            "{error:?}"
        );
    }
    let (caller, callee) = meet(hello(Rank(1)), hello(Rank(0))).await;
    assert!(caller.is_ok() && callee.is_ok());
}

#[tokio::test]
async fn another_job_is_refused() {
    let foreign = LinkHello {
        job: JobId(JOB.0 + 1),
        ..hello(Rank(1))
    };
    let (caller, callee) = meet(foreign, hello(Rank(0))).await;
    for side in [caller, callee] {
        let error = side.unwrap_err();
        assert!(matches!(error, LaneError::Refused { .. }), "{error:?}");
    }
}

#[test]
fn the_rank_of_a_peer_comes_from_its_certificate() {
    let address = SocketAddr::from(([127, 0, 0, 1], 1));
    let table = GenerationTable {
        job: JOB,
        generation: GENERATION,
        members: (0..3).map(|rank| member(rank, 3, address)).collect(),
    };
    let peer = |role, name: String| Identity::new(ClusterId(1), role, name).unwrap();
    let worker = |job, slot| peer(Role::Worker, Identity::worker_name(job, Slot(slot)));
    assert_eq!(rank_of(&worker(JOB, 0), &table), Ok(Rank(2)));
    assert_eq!(rank_of(&worker(JOB, 2), &table), Ok(Rank(0)));
    for stranger in [
        worker(JOB, 3),
        worker(JobId(99), 0),
        peer(Role::Node, NodeId(1).to_string()),
    ] {
        let error = rank_of(&stranger, &table).unwrap_err();
        assert!(matches!(error, LaneError::Refused { .. }), "{error}");
    }
}
