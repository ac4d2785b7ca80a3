//! Links between hosts, over TLS and over QUIC, with the certificates of a real authority.

#![allow(clippy::unwrap_used)]

mod common;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::network::{credentials, door, join, member, slot_of};
use common::{GENERATION, JOB, LONG, hello, run};
use kolo_collectives::lane::{Door, LaneChoice, Terms};
use kolo_collectives::{CollectiveError, Communicator, LaneError, LinkHello, ReduceOp};
use kolo_transport::endpoint::BindError;
use kolo_transport::ids::{ClusterId, Generation, JobId, Rank, Slot};
use kolo_transport::wire::{GenerationTable, Handover};
use kolo_transport::{
    Authority, CloseCode, EndpointConfig, Expect, Identity, RandomId as _, TransportRuntime,
};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

const CHOICES: [LaneChoice; 2] = [LaneChoice::Tls, LaneChoice::Quic];

struct Hosts {
    authority: Authority,
    runtime: TransportRuntime,
}

impl Hosts {
    fn new() -> Self {
        Self {
            authority: Authority::create(ClusterId::random()).unwrap(),
            runtime: TransportRuntime::new(2).unwrap(),
        }
    }

    fn door(&self, slot: u32, choice: LaneChoice) -> Door {
        let config = EndpointConfig {
            idle_timeout: Duration::from_millis(900),
            keep_alive: Duration::from_millis(200),
            ..EndpointConfig::default()
        };
        let credentials = credentials(&self.authority, Slot(slot));
        door(&self.runtime, credentials, config, choice)
    }

    fn group(&self, world: u32, choice: LaneChoice) -> (Vec<Communicator>, Vec<Door>) {
        let doors: Vec<Door> = (0..world)
            .map(|rank| self.door(slot_of(rank, world).0, choice))
            .collect();
        let addresses: Vec<SocketAddr> = doors.iter().map(Door::address).collect();
        let members = (0..).zip(&doors);
        let members = members.map(|(rank, door)| join(&self.runtime, door, rank, &addresses));
        (members.collect(), doors)
    }
}

#[test]
fn ranks_work_together_and_one_that_is_done_may_go() {
    for choice in CHOICES {
        let hosts = Hosts::new();
        let (members, _doors) = hosts.group(3, choice);
        std::thread::scope(|scope| {
            for comm in members {
                scope.spawn(move || {
                    // The last is several segments and more than a window, both ways at once.
                    for length in [0_usize, 17, 40_000, 400_001] {
                        let me = i64::from(comm.rank().0);
                        let mut data: Vec<i64> = (0..length as i64).map(|i| i + me).collect();
                        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                        assert!((0..).zip(&data).all(|(i, value)| *value == 3 * i + 3));
                    }
                    let record = comm.records().pop().unwrap();
                    assert_eq!(record.lanes.to_string(), choice.to_string());
                });
            }
        });
    }
}

/// More is sent than links hold to a rank that comes later than any link may be silent: it is waited for.
#[test]
fn a_rank_that_comes_late_to_a_long_operation_is_not_lost() {
    std::thread::scope(|scope| {
        for choice in CHOICES {
            scope.spawn(move || {
                let hosts = Hosts::new();
                let (members, _doors) = hosts.group(2, choice);
                run(&members, |comm| {
                    comm.barrier().unwrap();
                    if comm.rank() == Rank(1) {
                        std::thread::sleep(Duration::from_millis(1800));
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
fn a_peer_that_closes_its_door_in_the_middle_is_lost() {
    let hosts = Hosts::new();
    let (members, doors) = hosts.group(3, LaneChoice::Quic);
    run(&members, |comm| comm.barrier().unwrap());
    let results = std::thread::scope(|scope| {
        let survivors = [0, 1].map(|rank: usize| {
            let comm = &members[rank];
            scope.spawn(move || comm.all_reduce(&mut vec![1_i32; 1_000_000], ReduceOp::Sum))
        });
        doors[2].close(CloseCode::Shutdown, "the test ends it");
        survivors.map(|thread| thread.join().unwrap())
    });
    for result in results {
        let error = result.unwrap_err();
        assert!(matches!(error, CollectiveError::PeerLost { .. }), "{error}");
        assert_eq!(error.culprit_rank(), Some(Rank(2)), "{error}");
        assert!(error.to_string().contains("host-2"), "{error}");
    }
}

/// What both sides have of a link that the worker in slot 1 makes, which is rank 1 by its hello, to rank 0. `members` are in the
/// table of rank 0.
async fn meet(choice: LaneChoice, caller: LinkHello, members: u32) -> [Result<(), LaneError>; 2] {
    let hosts = Hosts::new();
    let (zero, one) = (hosts.door(0, choice), hosts.door(1, choice));
    let table = Arc::new(GenerationTable {
        job: JOB,
        generation: GENERATION,
        members: (0..members)
            .map(|rank| {
                let mut member = member(rank, members, zero.address());
                member.slot = Slot(rank);
                member
            })
            .collect(),
        cause: String::new(),
        handover: Handover::None,
    });
    let address = zero.address();
    let (took, mut taken) = mpsc::unbounded_channel();
    let terms = move |peer: Identity| {
        let took = took.clone();
        let take = move |_, peer, lane| {
            assert_eq!(peer, Rank(1));
            took.send(lane).unwrap();
            Ok(())
        };
        std::future::ready(Terms::of(&peer, &table, hello(Rank(0)), take))
    };
    let serving = {
        let zero = zero.clone();
        hosts
            .runtime
            .handle()
            .spawn(async move { zero.serve(LONG, terms).await })
    };
    let limit = Duration::from_millis(100);
    let made = one
        .connect(&caller, (Rank(0), Slot(0), address), limit)
        .await;
    let taken = async {
        // If there is a link on one side, the other has it in a moment.
        let early = match made {
            Ok(_) => taken.recv().await,
            Err(_) => None,
        };
        zero.close(CloseCode::Done, "the test ends");
        serving.await.unwrap();
        early.or(taken.recv().await)
    };
    let had = taken.await.map(drop).ok_or_else(|| LaneError::Refused {
        reason: "nothing was handed in".to_owned(),
    });
    [made.map(drop), had]
}

#[tokio::test]
async fn only_a_member_of_the_generation_gets_a_link() {
    let stale = LinkHello {
        generation: Generation(GENERATION.0 - 1),
        ..hello(Rank(1))
    };
    let foreign = LinkHello {
        job: JobId(JOB.0 + 1),
        ..hello(Rank(1))
    };
    for choice in CHOICES {
        let good = meet(choice, hello(Rank(1)), 2).await;
        assert_eq!(good, [Ok(()), Ok(())], "{choice}");
        for (caller, members, is_stale) in [
            (stale, 2, true),
            (foreign, 2, false),
            // Another rank than the certificate says.
            (hello(Rank(2)), 2, false),
            // No member, and of which generation is said all the same.
            (hello(Rank(1)), 1, false),
            (stale, 1, true),
        ] {
            let [made, taken] = meet(choice, caller, members).await;
            let error = made.unwrap_err();
            let is_right = match &error {
                LaneError::StaleGeneration { .. } => is_stale,
                LaneError::Refused { .. } => !is_stale,
                _ => false,
            };
            assert!(is_right, "{choice}: {error}");
            assert!(taken.is_err());
        }
    }
}

#[tokio::test]
async fn a_member_that_says_no_hello_in_time_gets_no_link() {
    let hosts = Hosts::new();
    for choice in CHOICES {
        let (zero, one) = (hosts.door(0, choice), hosts.door(1, choice));
        let (address, expect) = (zero.address(), Expect::worker(JOB, Slot(0)));
        let silent = async {
            let endpoint = one.endpoint();
            match choice {
                LaneChoice::Tls => Box::new(endpoint.connect_tls(address, expect).await),
                LaneChoice::Quic => {
                    Box::new(endpoint.connect(address, expect).await) as Box<dyn std::any::Any>
                }
            }
        };
        let (incoming, _silent) = tokio::join!(zero.accept(), silent);
        let (own, limit) = (hello(Rank(0)), Duration::from_millis(50));
        let opened = incoming.unwrap().open(&own, Rank(1), limit).await;
        let error = opened.unwrap_err();
        assert!(
            matches!(error, LaneError::Timeout { .. }),
            "{choice}: {error}"
        );
    }
}

/// Passes connections on, but for the first ones, which it ends at once.
async fn moody(to: SocketAddr, refused: usize) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, count) = (
        listener.local_addr().unwrap(),
        Arc::new(AtomicUsize::new(0)),
    );
    let counted = Arc::clone(&count);
    tokio::spawn(async move {
        while let Ok((mut from, _)) = listener.accept().await {
            if counted.fetch_add(1, Ordering::SeqCst) >= refused {
                tokio::spawn(async move {
                    let mut to = TcpStream::connect(to).await.unwrap();
                    // It ends as the two sides want.
                    drop(copy_bidirectional(&mut from, &mut to).await);
                });
            }
        }
    });
    (address, count)
}

#[tokio::test]
async fn a_link_that_fails_for_a_moment_is_tried_again_until_the_limit() {
    let hosts = Hosts::new();
    let (zero, one) = (
        hosts.door(0, LaneChoice::Tls),
        hosts.door(1, LaneChoice::Tls),
    );
    let (proxy, count) = moody(zero.address(), 3).await;
    let own = hello(Rank(1));
    let (made, taken) = tokio::join!(one.connect(&own, (Rank(0), Slot(0), proxy), LONG), async {
        let incoming = zero.accept().await.unwrap();
        incoming.open(&hello(Rank(0)), Rank(1), LONG).await
    });
    assert_eq!(made.unwrap().kind(), "tls");
    assert!(taken.is_ok());
    assert_eq!(count.load(Ordering::SeqCst), 4);

    let (proxy, count) = moody(zero.address(), usize::MAX).await;
    let limit = Duration::from_millis(300);
    let begun = Instant::now();
    let to = (Rank(0), Slot(0), proxy);
    let error = one.connect(&own, to, limit).await.unwrap_err();
    assert!(matches!(error, LaneError::Unreachable { .. }), "{error}");
    assert!(begun.elapsed() >= limit);
    assert!(count.load(Ordering::SeqCst) > 2);

    // Nobody listens there any more, and that is not waited for.
    let to = (Rank(0), Slot(0), zero.address());
    drop(zero);
    let error = one.connect(&own, to, LONG).await.unwrap_err();
    assert!(matches!(error, LaneError::Unreachable { .. }), "{error}");
    assert!(begun.elapsed() < LONG / 2);
}

#[test]
fn doors_of_several_addresses_have_one_port() {
    let hosts = Hosts::new();
    let at = |listen: SocketAddr| EndpointConfig {
        listen,
        ..EndpointConfig::default()
    };
    let open = |settings: &[EndpointConfig], choice| {
        let credentials = credentials(&hosts.authority, Slot(0));
        Door::open_all(&hosts.runtime, credentials, settings, choice)
    };
    for choice in CHOICES {
        let both = [[127, 0, 0, 1], [127, 0, 0, 2]].map(|ip| at((ip, 0).into()));
        let doors = open(&both, choice).unwrap();
        let addresses: Vec<SocketAddr> = doors.iter().map(Door::address).collect();
        assert_eq!(addresses[0].port(), addresses[1].port());
        assert_eq!(addresses[1].ip(), both[1].listen.ip());
        // A port that was asked for is used or refused.
        let error = open(&[at(addresses[0])], choice).unwrap_err();
        assert!(matches!(error, BindError::Socket { .. }), "{error}");
    }
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = at(taken.local_addr().unwrap());
    let _free = open(std::slice::from_ref(&taken), LaneChoice::Quic).unwrap();
}
