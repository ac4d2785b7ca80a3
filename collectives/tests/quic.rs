//! The same over QUIC and over TLS on TCP, with the certificates of a real authority.

#![allow(clippy::unwrap_used)]

mod common;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::network::{NetworkConnector, member, serve, slot_of};
use common::{GENERATION, JOB, LONG, hello, run};
use kolo_collectives::lane::{
    LaneChoice, NetworkLanes, QuicLane, TlsLane, accept_quic, accept_tls, rank_of,
};
use kolo_collectives::{CollectiveError, Communicator, LaneError, LinkHello, ReduceOp};
use kolo_transport::identity::Role;
use kolo_transport::ids::{ClusterId, Generation, JobId, NodeId, Rank, Slot};
use kolo_transport::wire::{GenerationTable, Handover};
use kolo_transport::{
    Authority, CloseCode, Endpoint, EndpointConfig, Expect, Identity, RandomId as _, TlsListener,
    TransportRuntime,
};

const CHOICES: [LaneChoice; 3] = [LaneChoice::Quic, LaneChoice::Tls, LaneChoice::Auto];

struct Group {
    members: Vec<Communicator>,
    endpoints: Vec<Endpoint>,
}

fn endpoint(
    authority: &Authority,
    runtime: &TransportRuntime,
    slot: Slot,
) -> (Endpoint, TlsListener) {
    let name = Identity::worker_name(JOB, slot);
    let credentials = authority.issue(Role::Worker, &name).unwrap();
    // Somebody may have the TCP port.
    loop {
        let config = EndpointConfig::default();
        let endpoint = Endpoint::bind(runtime, credentials.clone(), config).unwrap();
        if let Ok(listener) = endpoint.listen_tls() {
            return (endpoint, listener);
        }
    }
}

fn authority() -> Authority {
    Authority::create(ClusterId::random()).unwrap()
}

fn group(world: u32, choice: LaneChoice) -> Group {
    let (authority, runtime) = (authority(), TransportRuntime::new(2).unwrap());
    let endpoints: Vec<(Endpoint, TlsListener)> = (0..world)
        .map(|rank| endpoint(&authority, &runtime, slot_of(rank, world)))
        .collect();
    let table = Arc::new(GenerationTable {
        job: JOB,
        generation: GENERATION,
        members: endpoints
            .iter()
            .zip(0..)
            .map(|((endpoint, _), rank)| member(rank, world, endpoint.local_addr()))
            .collect(),
        cause: String::new(),
        handover: Handover::None,
    });
    let members: Vec<Communicator> = endpoints
        .iter()
        .zip(0..)
        .map(|((endpoint, listener), rank)| {
            let connector = NetworkConnector {
                lanes: Arc::new(NetworkLanes::new(endpoint.clone(), choice)),
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
            serve(&runtime, (endpoint, listener), &table, &comm);
            comm
        })
        .collect();
    let endpoints = endpoints
        .into_iter()
        .map(|(endpoint, _)| endpoint)
        .collect();
    Group { members, endpoints }
}

#[test]
fn collectives_are_right_over_every_kind_of_lane() {
    for (world, choice) in [2_u32, 3, 5]
        .into_iter()
        .flat_map(|world| CHOICES.map(|choice| (world, choice)))
    {
        let group = group(world, choice);
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
    for choice in CHOICES.into_iter().cycle().take(9) {
        let Group { members, endpoints } = group(3, choice);
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

/// More is sent than links hold to a rank that comes later than any link may be silent: it is waited for.
#[test]
fn a_rank_that_comes_late_to_a_long_operation_is_not_lost() {
    std::thread::scope(|scope| {
        for choice in [LaneChoice::Quic, LaneChoice::Tls] {
            scope.spawn(move || {
                let group = group(2, choice);
                run(&group.members, |comm| {
                    comm.barrier().unwrap();
                    if comm.rank() == Rank(1) {
                        std::thread::sleep(Duration::from_millis(4500));
                    }
                    let mut data = vec![1_u8; 24 << 20];
                    let result = comm.all_reduce(&mut data, ReduceOp::Sum);
                    assert_eq!(result, Ok(()), "{choice:?}");
                    assert_eq!(data[data.len() - 1], 2);
                });
            });
        }
    });
}

#[test]
fn a_peer_that_closes_its_endpoint_in_the_middle_is_lost() {
    let group = group(3, LaneChoice::Quic);
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

type Met<L> = (Result<L, LaneError>, Result<L, LaneError>);

const LIMIT: Duration = Duration::from_secs(20);

/// One worker connects, the other accepts, with hellos of their own.
async fn meet(caller: LinkHello, callee: LinkHello) -> Met<QuicLane> {
    let (authority, runtime) = (authority(), TransportRuntime::new(1).unwrap());
    let (one, _) = endpoint(&authority, &runtime, Slot(0));
    let (two, _) = endpoint(&authority, &runtime, Slot(1));
    tokio::join!(
        async {
            let expect = Expect::worker(JOB, Slot(1));
            let connection = one.connect(two.local_addr(), expect).await.unwrap();
            QuicLane::connect(&connection, &caller, callee.rank, LIMIT).await
        },
        async {
            let connection = two.accept().await.unwrap();
            QuicLane::accept(&connection, &callee, caller.rank, LIMIT).await
        }
    )
}

/// As [`meet`], over TLS.
async fn meet_over_tls(caller: LinkHello, callee: LinkHello) -> Met<TlsLane> {
    let (authority, runtime) = (authority(), TransportRuntime::new(1).unwrap());
    let (one, _) = endpoint(&authority, &runtime, Slot(0));
    let (_two, listener) = endpoint(&authority, &runtime, Slot(1));
    tokio::join!(
        async {
            let expect = Expect::worker(JOB, Slot(1));
            let link = one
                .connect_tls(listener.local_addr(), expect)
                .await
                .unwrap();
            TlsLane::open(link, &caller, callee.rank, LIMIT).await
        },
        async {
            let link = listener.accept().await.unwrap();
            TlsLane::open(link, &callee, caller.rank, LIMIT).await
        }
    )
}

/// What both sides of a link say, over each kind of lane.
async fn said(caller: LinkHello, callee: LinkHello) -> Vec<Result<(), LaneError>> {
    let quic = meet(caller, callee).await;
    let tls = meet_over_tls(caller, callee).await;
    vec![
        quic.0.map(drop),
        quic.1.map(drop),
        tls.0.map(drop),
        tls.1.map(drop),
    ]
}

#[tokio::test]
async fn a_stale_generation_is_refused_on_both_sides() {
    let stale = LinkHello {
        generation: Generation(GENERATION.0 - 1),
        ..hello(Rank(1))
    };
    for side in said(stale, hello(Rank(0))).await {
        let error = side.unwrap_err();
        assert!(
            matches!(error, LaneError::StaleGeneration { .. }),
            "{error:?}"
        );
    }
    for side in said(hello(Rank(1)), hello(Rank(0))).await {
        assert!(side.is_ok(), "{side:?}");
    }
}

#[tokio::test]
async fn another_job_is_refused() {
    let foreign = LinkHello {
        job: JobId(JOB.0 + 1),
        ..hello(Rank(1))
    };
    for side in said(foreign, hello(Rank(0))).await {
        let error = side.unwrap_err();
        assert!(matches!(error, LaneError::Refused { .. }), "{error:?}");
    }
}

#[tokio::test]
async fn a_member_that_says_no_hello_in_time_gets_no_link() {
    let (authority, runtime) = (authority(), TransportRuntime::new(1).unwrap());
    let (one, _) = endpoint(&authority, &runtime, Slot(0));
    let (_two, listener) = endpoint(&authority, &runtime, Slot(1));
    let expect = Expect::worker(JOB, Slot(1));
    let limit = Duration::from_millis(50);
    let (silent, accepted) = tokio::join!(
        one.connect_tls(listener.local_addr(), expect.clone()),
        listener.accept()
    );
    let error = TlsLane::open(accepted.unwrap(), &hello(Rank(0)), Rank(1), limit)
        .await
        .unwrap_err();
    assert!(matches!(error, LaneError::Timeout { .. }), "{error}");
    drop(silent);

    // It ends instead.
    let (gone, accepted) = tokio::join!(
        one.connect_tls(listener.local_addr(), expect.clone()),
        listener.accept()
    );
    gone.unwrap().abort();
    let error = TlsLane::open(accepted.unwrap(), &hello(Rank(0)), Rank(1), LIMIT)
        .await
        .unwrap_err();
    assert!(matches!(error, LaneError::Ended { .. }), "{error}");

    // It says hello, and neither keeps the link nor ends it.
    let (link, accepted) = tokio::join!(
        one.connect_tls(listener.local_addr(), expect),
        listener.accept()
    );
    let (own, peer) = (hello(Rank(0)), hello(Rank(1)));
    let (lane, kept) = tokio::join!(
        TlsLane::open(link.unwrap(), &peer, Rank(0), LIMIT),
        accept_tls(accepted.unwrap(), &own, Rank(1), Duration::from_millis(500))
    );
    let _held = lane.unwrap();
    assert!(matches!(kept, Err(LaneError::Timeout { .. })), "{kept:?}");
}

#[tokio::test]
async fn what_is_found_to_be_better_is_used_again_and_one_kind_is_enough() {
    let (authority, runtime) = (authority(), TransportRuntime::new(1).unwrap());
    for has_tls in [true, false] {
        let (one, _) = endpoint(&authority, &runtime, Slot(0));
        let (two, listener) = endpoint(&authority, &runtime, Slot(1));
        let lanes = NetworkLanes::new(one, LaneChoice::Auto);
        let address = two.local_addr();
        let own = hello(Rank(0));
        let accept = {
            let two = two.clone();
            async move {
                loop {
                    let Some(connection) = two.accept().await else {
                        return;
                    };
                    tokio::spawn(async move {
                        if let Ok(Some(kept)) = accept_quic(&connection, &own, Rank(1), LIMIT).await
                        {
                            std::future::pending::<()>().await;
                            drop(kept);
                        }
                    });
                }
            }
        };
        runtime.handle().spawn(accept);
        if has_tls {
            runtime.handle().spawn(async move {
                while let Some(link) = listener.accept().await {
                    tokio::spawn(async move {
                        if let Ok(Some(kept)) = accept_tls(link, &own, Rank(1), LIMIT).await {
                            std::future::pending::<()>().await;
                            drop(kept);
                        }
                    });
                }
            });
        } else {
            drop(listener);
        }
        let target = (Rank(0), Slot(1), address);
        let first = lanes.connect(&hello(Rank(1)), target, LIMIT).await.unwrap();
        let second = lanes.connect(&hello(Rank(1)), target, LIMIT).await.unwrap();
        assert_eq!(first.kind(), second.kind());
        if !has_tls {
            assert_eq!(first.kind(), "quic");
        }
    }
}

#[test]
fn the_rank_of_a_peer_comes_from_its_certificate() {
    let address = SocketAddr::from(([127, 0, 0, 1], 1));
    let table = GenerationTable {
        job: JOB,
        generation: GENERATION,
        members: (0..3).map(|rank| member(rank, 3, address)).collect(),
        cause: String::new(),
        handover: Handover::None,
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
