//! Links to workers that are gone, and to workers that can't be reached for a moment.

#![allow(clippy::unwrap_used)]

mod common;

use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use common::victim::{notice, runtime, write};
use common::{Fault, GENERATION, Group, JOB, Kind, LONG, faulty, force, hello, run, sum, until};
use kolo_collectives::cause::Cause;
use kolo_collectives::lane::{Connecting, Gone, LaneChoice, MemoryLane, NetworkLanes, accept_tls};
use kolo_collectives::operation::Tag;
use kolo_collectives::schedule::Algorithm;
use kolo_collectives::{CollectiveError, Communicator, Connector, LaneError, Rank};
use kolo_transport::identity::Role;
use kolo_transport::ids::{ClusterId, Slot};
use kolo_transport::{
    Authority, Endpoint, EndpointConfig, Identity, RandomId as _, TlsListener, TransportRuntime,
};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

fn endpoint(
    authority: &Authority,
    runtime: &TransportRuntime,
    slot: u32,
) -> (Endpoint, TlsListener) {
    let name = Identity::worker_name(JOB, Slot(slot));
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

/// Neither a handshake's time limit nor one's own has to pass.
#[tokio::test]
async fn a_worker_that_is_gone_is_not_waited_for() {
    let (authority, runtime) = (authority(), TransportRuntime::new(1).unwrap());
    for choice in [LaneChoice::Quic, LaneChoice::Tls, LaneChoice::Auto] {
        let (one, _) = endpoint(&authority, &runtime, 1);
        let (other, listener) = endpoint(&authority, &runtime, 0);
        let address = other.local_addr();
        let lanes = NetworkLanes::new(one, choice);
        assert_eq!(lanes.is_gone(address).await, None, "it is there");
        drop((other, listener));
        let begun = Instant::now();
        let to = (Rank(0), Slot(0), address);
        let error = lanes.connect(&hello(Rank(1)), to, LONG).await.unwrap_err();
        assert!(matches!(error, LaneError::Unreachable { .. }), "{error}");
        assert!(
            begun.elapsed() < Duration::from_secs(4),
            "{choice}: {error}"
        );
        let reason = lanes.is_gone(address).await.unwrap();
        assert!(reason.contains(&address.to_string()), "{reason}");
    }
}

/// Somebody refuses what is sent there, and that may be a firewall.
#[tokio::test]
async fn a_worker_that_was_never_found_there_is_not_gone() {
    let (authority, runtime) = (authority(), TransportRuntime::new(1).unwrap());
    let (one, _) = endpoint(&authority, &runtime, 1);
    let (other, listener) = endpoint(&authority, &runtime, 0);
    let address = other.local_addr();
    drop((other, listener));
    while one.is_reachable(address).await || !one.is_refused(address).await {}
    let lanes = NetworkLanes::new(one, LaneChoice::Auto);
    for _ in 0..3 {
        assert_eq!(lanes.is_gone(address).await, None);
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
    let (authority, runtime) = (authority(), TransportRuntime::new(1).unwrap());
    let (one, _) = endpoint(&authority, &runtime, 1);
    let (_other, listener) = endpoint(&authority, &runtime, 0);
    let (proxy, count) = moody(listener.local_addr(), 3).await;
    let lanes = NetworkLanes::new(one, LaneChoice::Tls);
    let own = hello(Rank(1));
    let (made, accepted) = tokio::join!(
        lanes.connect(&own, (Rank(0), Slot(0), proxy), LONG),
        async {
            let link = listener.accept().await.unwrap();
            accept_tls(link, &hello(Rank(0)), Rank(1), LONG).await
        }
    );
    assert_eq!(made.unwrap().kind(), "tls");
    assert!(accepted.unwrap().is_some());
    // It was asked whether anybody is there, too.
    assert!(count.load(Ordering::SeqCst) >= 4);

    let (proxy, count) = moody(listener.local_addr(), usize::MAX).await;
    let limit = Duration::from_millis(300);
    let begun = Instant::now();
    let error = lanes
        .connect(&own, (Rank(0), Slot(0), proxy), limit)
        .await
        .unwrap_err();
    assert!(matches!(error, LaneError::Unreachable { .. }), "{error}");
    assert!(begun.elapsed() >= limit && begun.elapsed() < LONG / 2);
    assert!(count.load(Ordering::SeqCst) > 2);
}

/// Makes no links, and knows after some time that rank 1 is gone.
#[derive(Debug)]
struct Knowing {
    asked: AtomicUsize,
    /// What it was told of having had a link to that rank.
    met: Mutex<Vec<bool>>,
    after: usize,
}

impl Connector for Knowing {
    fn connect(&self, _peer: Rank) -> Connecting {
        Box::pin(std::future::pending())
    }

    fn is_gone(&self, peer: Rank, met: bool) -> Option<Gone> {
        self.met.lock().unwrap().push(met);
        let gone = peer == Rank(1) && self.asked.fetch_add(1, Ordering::SeqCst) >= self.after;
        Some(Box::pin(async move {
            gone.then(|| "it was seen to go".to_owned())
        }))
    }
}

#[test]
fn a_rank_that_is_waited_for_and_is_gone_is_lost_for_good() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let connector = Arc::new(Knowing {
        asked: AtomicUsize::new(0),
        met: Mutex::default(),
        after: 2,
    });
    let known: Arc<dyn Connector> = Arc::clone(&connector) as _;
    let comm = Communicator::new(Rank(0), 2, GENERATION, JOB, known, runtime.handle().clone())
        .unwrap()
        .with_timeout(LONG);
    let begun = Instant::now();
    let mut data = [1_u8];
    for _ in 0..2 {
        let error = comm.broadcast(&mut data, Rank(1)).unwrap_err();
        let CollectiveError::PeerLost { rank, reason } = error else {
            panic!("{error}");
        };
        assert_eq!((rank, reason.as_str()), (Rank(1), "it was seen to go"));
    }
    assert!(begun.elapsed() < LONG / 2);
    assert_eq!(connector.asked.load(Ordering::SeqCst), 3);
    assert_eq!(*connector.met.lock().unwrap(), [false; 3]);
}

/// Rank 0 of three, in its second operation. Rank 1 has given up the first one for this cause, and its link ended, as a network's.
fn after_rank_1_gave_up(cause: &Cause, is_gone: bool) -> CollectiveError {
    let runtime = runtime();
    let connector = Arc::new(Knowing {
        asked: AtomicUsize::new(0),
        met: Mutex::default(),
        after: if is_gone { 0 } else { usize::MAX },
    });
    let handle = runtime.handle().clone();
    let comm = Communicator::new(Rank(0), 3, GENERATION, JOB, connector, handle).unwrap();
    let (mine, mut theirs) = MemoryLane::pair(MemoryLane::CAPACITY);
    let lane = faulty(Box::new(mine), &Fault::cut());
    comm.acceptor().accept(Rank(1), lane).unwrap();
    comm.set_timeout(Duration::from_millis(1));
    comm.barrier().unwrap_err();
    write(&runtime, &mut theirs, &notice(Tag::default(), cause));
    let again = || comm.broadcast(&mut [0_u8], Rank(1)).unwrap_err();
    if is_gone {
        drop(theirs);
        comm.set_timeout(LONG);
        return again();
    }
    let error = again();
    drop(theirs);
    error
}

#[test]
fn who_left_because_of_a_loss_and_is_gone_is_not_the_one_that_is_lost() {
    let cause = Cause::Lost {
        rank: Rank(2),
        reason: "its link ended".to_owned(),
        for_good: false,
    };
    let error = after_rank_1_gave_up(&cause, true);
    let CollectiveError::PeerLost { rank, reason } = &error else {
        panic!("{error}");
    };
    assert_eq!(*rank, Rank(2), "{error}");
    assert!(reason.contains("rank 1 gave up operation 0"), "{error}");
}

/// Nobody is gone, and so nobody is lost.
#[test]
fn who_gave_up_because_of_a_late_rank_makes_that_late_and_not_lost() {
    let cause = Cause::Deadline {
        waited: Duration::from_millis(1),
        late: vec![Rank(2)],
        doing: Vec::new(),
    };
    let error = after_rank_1_gave_up(&cause, false);
    let CollectiveError::Deadline { late, doing, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(*late, [Rank(2)], "{error}");
    let why = "it gave up operation 0 of call 0, to which rank 2 did not come";
    assert!(
        doing
            .iter()
            .any(|other| other.rank == Rank(1) && other.doing == why),
        "{error}"
    );
}

/// Nobody is asked of after an operation that has ended.
#[test]
fn questions_end_with_the_operation() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let connector = Arc::new(Knowing {
        asked: AtomicUsize::new(0),
        met: Mutex::default(),
        after: usize::MAX,
    });
    let known: Arc<dyn Connector> = Arc::clone(&connector) as _;
    let comm = Communicator::new(Rank(0), 2, GENERATION, JOB, known, runtime.handle().clone())
        .unwrap()
        .with_timeout(Duration::from_millis(500));
    let tasks = runtime.metrics().num_alive_tasks();
    let error = comm.barrier().unwrap_err();
    assert!(matches!(error, CollectiveError::Deadline { .. }), "{error}");
    let asked = connector.asked.load(Ordering::SeqCst);
    assert!(asked > 1, "{asked}");
    // No task is left that would ask.
    until(|| runtime.metrics().num_alive_tasks() <= tasks);
}

/// Ranks of which the last goes after these two have done something. To the others its links end as if the network had cut them.
fn the_last_goes(world: u32, met: impl Fn(&Communicator) + Sync, by: u32) -> Group {
    let mut group = Group::new(Kind::Memory, world);
    let (last, cut) = (world - 1, Fault::cut());
    for rank in 0..last {
        group.set_fault(rank, &cut);
    }
    let two = [by, last].map(|rank| &group.members[rank as usize]);
    run(two, met);
    group.is_gone(last);
    drop(group.members.pop());
    group
}

/// `comm` of the last rank sends, the other one receives.
fn send_to(by: u32) -> impl Fn(&Communicator) + Sync {
    move |comm| {
        let last = Rank(comm.world_size() - 1);
        if comm.rank() == last {
            comm.send(&[5_u8], Rank(by)).unwrap();
        } else {
            assert_eq!(comm.receive::<u8>(last).unwrap(), [5]);
        }
    }
}

fn all_lose(rank: Rank, errors: Vec<CollectiveError>) {
    for error in errors {
        let CollectiveError::PeerLost { rank: lost, reason } = error else {
            panic!("{error}");
        };
        assert_eq!(lost, rank);
        assert!(reason.contains("nothing listens there"), "{reason}");
    }
}

/// Who waits for a rank that it has never met can't find out by itself whether that one is gone. But rank 1 has met rank 3, and
/// tells it, though it needs nothing of rank 3 itself.
#[test]
fn who_has_met_a_rank_that_is_gone_tells_those_that_wait_for_it() {
    let group = the_last_goes(4, send_to(1), 1);
    // Of the ring rank 2 sends to rank 3, and rank 0 receives from it.
    force(&group, Algorithm::Ring);
    for length in [9, 100_000] {
        let begun = Instant::now();
        let errors = group.run(|comm| sum(comm, length).unwrap_err());
        all_lose(Rank(3), errors);
        assert!(begun.elapsed() < LONG / 2);
    }
}

/// Rank 1 waits for what rank 2 sends, and that waits for rank 3. Of rank 3, which it has met, rank 1 needs no more than the word.
#[test]
fn who_waits_for_data_asks_for_those_too_whose_word_is_lacking() {
    let group = the_last_goes(4, send_to(1), 1);
    force(&group, Algorithm::ScatterGather);
    let begun = Instant::now();
    let errors = group.run(|comm| {
        let mut data = vec![1_u8; 100_000];
        comm.broadcast(&mut data, Rank(2)).unwrap_err()
    });
    all_lose(Rank(3), errors);
    assert!(begun.elapsed() < LONG / 2);
}

/// As [`who_has_met_a_rank_that_is_gone_tells_those_that_wait_for_it`], where it goes while they wait.
#[test]
fn a_rank_that_goes_while_others_wait_is_found_out_too() {
    let group = Group::new(Kind::Memory, 4);
    force(&group, Algorithm::Ring);
    run([&group.members[1], &group.members[3]], send_to(1));
    let begun = Instant::now();
    let errors = std::thread::scope(|scope| {
        scope.spawn(|| {
            // Ranks 0 and 2 wait for it, and have asked about it without having met it.
            until(|| [0, 2].iter().all(|rank| group.questions(*rank, 3).0 > 0));
            group.is_gone(3);
        });
        run(&group.members[..3], |comm| sum(comm, 9).unwrap_err())
    });
    all_lose(Rank(3), errors);
    assert!(begun.elapsed() < LONG / 2);
}

/// It has done its part, and what it sent is with rank 0, which does not come to read it before it knows that rank 2 is gone.
#[test]
fn a_rank_that_left_after_its_part_is_not_taken_for_lost() {
    let mut group = Group::new(Kind::Memory, 3);
    force(&group, Algorithm::Ring);
    let late = Fault::late();
    for rank in 0..3 {
        group.set_fault(rank, &late);
    }
    group.run(|comm| comm.barrier().unwrap());
    let last = group.members.pop().unwrap();
    let zero = group.members[0].clone();
    // Whether it is there was asked when the link came.
    let before = group.questions(0, 2).0;
    let mut result = Vec::new();
    let mut gathering = pin!(async { zero.all_gather_async(&[0_u8]).await });
    let mut poll = || {
        gathering
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
    };
    until(|| {
        assert!(poll().is_pending(), "rank 2 has not begun");
        group.questions(0, 2).0 > before
    });
    std::thread::scope(|scope| {
        let one = scope.spawn(|| group.members[1].all_gather(&[1_u8]));
        assert_eq!(last.all_gather(&[2_u8]), Ok(vec![0, 1, 2]));
        drop(last);
        group.is_gone(2);
        until(|| group.questions(0, 2).1 > 0);
        until(|| match poll() {
            Poll::Ready(gathered) => {
                result = gathered.unwrap();
                true
            }
            Poll::Pending => false,
        });
        assert_eq!(one.join().unwrap(), Ok(vec![0, 1, 2]));
    });
    assert_eq!(result, [0, 1, 2]);
}

/// An operation in which nobody needs it says nothing of the next one.
#[test]
fn a_rank_that_was_found_to_be_gone_is_lost_when_it_is_needed() {
    let group = Group::new(Kind::Memory, 4);
    force(&group, Algorithm::Ring);
    let late = Fault::late();
    for rank in 0..4 {
        group.set_fault(rank, &late);
    }
    group.run(|comm| comm.barrier().unwrap());
    // Rank 2 does nothing more, and its links do not end. Nor do ranks 1 and 3 come, so that rank 0, which needs only them, asks
    // about the others.
    group.is_gone(2);
    let comm = &group.members[0];
    comm.set_timeout(Duration::from_millis(2500));
    let error = comm.all_gather(&[1_u8]).unwrap_err();
    assert!(matches!(error, CollectiveError::Deadline { .. }), "{error}");
    comm.set_timeout(LONG);
    for rank in [1, 3] {
        let error = group.members[rank].all_gather(&[1_u8]).unwrap_err();
        assert!(matches!(error, CollectiveError::Deadline { .. }), "{error}");
    }
    let begun = Instant::now();
    let others = [0, 1, 3].map(|rank| &group.members[rank]);
    all_lose(
        Rank(2),
        run(others, |comm| comm.all_gather(&[1_u8]).unwrap_err()),
    );
    assert!(begun.elapsed() < LONG / 2);
}

/// A rank that has lost another one in a send may do something else then. Those that wait for the lost one elsewhere hear of it.
#[test]
fn a_loss_that_was_found_in_a_send_is_told_to_those_that_wait_elsewhere() {
    let group = Group::new(Kind::Memory, 4);
    force(&group, Algorithm::Ring);
    let late = Fault::late();
    for rank in 0..4 {
        group.set_fault(rank, &late);
    }
    // Ranks 1 and 3 have a link for sends alone, and ranks 0, 1 and 2 have links of the group of all.
    run([&group.members[1], &group.members[3]], send_to(1));
    group.set_timeout(Duration::from_millis(1));
    for rank in [2, 1, 0] {
        group.members[rank].barrier().unwrap_err();
    }
    group.set_timeout(LONG);
    group.is_gone(3);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let others = [0, 2].map(|rank| {
            let comm = &group.members[rank];
            scope.spawn(move || sum(comm, 9).unwrap_err())
        });
        let receiving = &group.members[1];
        let error = receiving.receive::<u8>(Rank(3)).unwrap_err();
        let errors = others.map(|other| other.join().unwrap());
        all_lose(Rank(3), [vec![error], errors.to_vec()].concat());
    });
    assert!(begun.elapsed() < LONG / 2);
}
