//! Ranks that are gone, as the connector says.

#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::victim::{notice, runtime, write};
use common::{Fault, GENERATION, Group, JOB, Kind, LONG, faulty, force, run, sum, until};
use kolo_collectives::cause::Cause;
use kolo_collectives::lane::{Connecting, Gone, MemoryLane};
use kolo_collectives::operation::Tag;
use kolo_collectives::schedule::Algorithm;
use kolo_collectives::{CollectiveError, Communicator, Connector, Rank};

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
