//! Links that break, and links that others ask for.

use super::*;

/// A network may break while both sides live. Between operations that costs nothing; in the middle of one it
/// costs that one.
#[test]
fn links_that_broke_are_made_again() {
    for (world, after) in [(2, 0), (2, 50_000), (5, 0), (5, 50_000)] {
        let group = Group::new(Kind::Memory, world);
        let fault = Fault::cut();
        for rank in 0..world {
            group.set_fault(rank, &fault);
        }
        group.run(|comm| sum(comm, 10).unwrap());
        let links = group.links();
        // All links that are there end when so many bytes more have gone over them together.
        fault.arm(after);
        let begun = Instant::now();
        for result in group.run(|comm| sum(comm, 100_000)) {
            if after == 0 {
                assert_eq!(result, Ok(()));
            } else {
                let error = result.unwrap_err();
                assert!(matches!(error, CollectiveError::PeerLost { .. }), "{error}");
            }
        }
        // Where one side only has noticed, the other does in the next operation.
        let mut attempts = 0;
        while group.run(|comm| sum(comm, 1000)).iter().any(Result::is_err) {
            attempts += 1;
            assert!(attempts < 4, "the group does not find together again");
        }
        assert!(begun.elapsed() < LONG / 2);
        assert!(group.links() > links);
    }
}

/// Nobody watches these ranks, and a network may break while both sides live. So links are made or asked for again at once, and
/// a rank that makes none and can't be asked is gone.
#[test]
fn a_rank_that_ended_between_operations_is_named_at_once_though_its_links_may_come_back() {
    for kind in [Kind::Memory, Kind::Tls] {
        for gone in [0, 2] {
            let mut group = Group::new(kind, 3);
            let fault = Fault::cut();
            for rank in 0..3 {
                group.set_fault(rank, &fault);
            }
            // All have a link to each other.
            group.run(|comm| comm.all_to_all(&[1_u8; 3]).map(drop).unwrap());
            drop(group.members.remove(gone as usize));
            let begun = Instant::now();
            for _ in 0..2 {
                for result in group.run(|comm| sum(comm, 1000)) {
                    let error = result.unwrap_err();
                    let culprit = error.culprit_rank();
                    assert_eq!(culprit, Some(Rank(gone)), "{kind:?}: {error}");
                }
            }
            assert!(begun.elapsed() < LONG / 2, "{kind:?}: by the deadline");
        }
    }
}

/// The end of a link may be seen by one side first. The other one, which does nothing, makes a new link when it is asked.
#[test]
fn a_link_is_made_again_for_a_rank_that_asks_before_the_end_of_the_old_one_is_seen() {
    let group = Group::new(Kind::Memory, 2);
    let fault = Fault::cut();
    for rank in 0..2 {
        group.set_fault(rank, &fault);
    }
    group.run(|comm| comm.barrier().unwrap());
    let links = group.links();
    fault.arm(0);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| group.members[0].barrier());
        until(|| group.links() > links);
        assert_eq!(group.members[1].barrier(), Ok(()));
        assert_eq!(waits.join().unwrap(), Ok(()));
    });
}

/// A word that was given on a link that breaks is given again on the next one.
#[test]
fn what_was_said_on_links_that_broke_is_said_again() {
    type Body = fn(&Communicator, &mut [f32]) -> Result<(), CollectiveError>;
    let moves: [Body; 3] = [
        |comm, data| match comm.rank() {
            Rank(0) => comm.send(data, Rank(1)),
            _ => comm.receive_into(data, Rank(0)),
        },
        |comm, data| comm.broadcast(data, Rank(0)),
        |comm, data| comm.reduce(data, ReduceOp::Sum, Rank(0)),
    ];
    for moves in moves {
        for (length, after) in [10, 2000, 100_000]
            .into_iter()
            .flat_map(|length| [0, 1, 97, 1100, 1200, 1300].map(|after| (length, after)))
        {
            let group = Group::new(Kind::Memory, 2);
            let fault = Fault::cut();
            for rank in 0..2 {
                group.set_fault(rank, &fault);
            }
            group.run(|comm| moves(comm, &mut vec![1.0; length]).unwrap());
            fault.arm(after);
            let begun = Instant::now();
            for result in group.run(|comm| moves(comm, &mut vec![1.0; length])) {
                // What went on a link before it broke may be lost, and is missed at once.
                let is_late = matches!(result, Err(CollectiveError::Deadline { .. }));
                assert!(!is_late, "{length}, {after}: {result:?}");
            }
            assert!(begun.elapsed() < LONG / 2);
        }
    }
}

/// Makes links to rank 0, but for the first, which fails when it is told to.
#[derive(Debug)]
struct FailsOnce {
    zero: Acceptor,
    first: Mutex<Option<oneshot::Receiver<()>>>,
}

impl Connector for FailsOnce {
    fn connect(&self, peer: Rank) -> Connecting {
        let (first, zero) = (self.first.lock().unwrap().take(), self.zero.clone());
        Box::pin(async move {
            if let Some(first) = first {
                first.await.unwrap();
                let reason = format!("rank {peer} is too far away");
                return Err(LaneError::Unreachable { reason });
            }
            let (mine, theirs) = MemoryLane::pair(MemoryLane::CAPACITY);
            zero.accept(Rank(1), Box::new(theirs))?;
            let mine: Box<dyn Lane> = Box::new(mine);
            Ok(mine)
        })
    }
}

/// The time of an attempt that was begun because a peer has asked for the link is not that of an operation.
#[test]
fn an_operation_tries_itself_to_make_a_link_that_could_not_be_made_before() {
    let runtime = runtime();
    let zero = lonely(&runtime, 0);
    let (fail, first) = oneshot::channel();
    let connector = Arc::new(FailsOnce {
        zero: zero.acceptor(),
        first: Mutex::new(Some(first)),
    });
    let handle = runtime.handle().clone();
    let one = Communicator::new(Rank(1), 2, GENERATION, JOB, connector, handle).unwrap();
    one.acceptor().requested(GroupId::WORLD, Rank(0)).unwrap();
    std::thread::scope(|scope| {
        let both = [&zero, &one].map(|comm| scope.spawn(|| comm.barrier()));
        until(|| one.next_tag().operation == 1);
        fail.send(()).unwrap();
        for barrier in both {
            assert_eq!(barrier.join().unwrap(), Ok(()));
        }
    });
}

#[test]
fn requests_for_links_that_make_no_sense_are_refused() {
    let group = Group::new(Kind::Memory, 3);
    let acceptor = group.members[1].acceptor();
    for rank in [1, 2, 3] {
        let error = acceptor.requested(GroupId::WORLD, Rank(rank)).unwrap_err();
        assert!(matches!(error, LaneError::Refused { .. }), "{error}");
    }
    // Whoever asks in a group that this rank has not made gets a link, to hear what it does, and only one.
    let strange = GroupId(77);
    for _ in 0..3 {
        acceptor.requested(strange, Rank(0)).unwrap();
        until(|| group.links() > 0);
    }
    assert_eq!(group.links(), 1);
    // As it comes from other hosts.
    let (lane, _) = MemoryLane::pair(MemoryLane::CAPACITY);
    acceptor
        .accept_group(strange, Rank(0), Box::new(lane))
        .unwrap();
}

/// Rank 0 of three, and the other ends of its links.
fn first_of_three(runtime: &Runtime) -> (Communicator, [MemoryLane; 2]) {
    let (connector, handle) = (Arc::new(NoConnector), runtime.handle().clone());
    let comm = Communicator::new(Rank(0), 3, GENERATION, JOB, connector, handle).unwrap();
    let links = [1, 2].map(|rank| {
        let (mine, theirs) = MemoryLane::pair(MemoryLane::CAPACITY);
        let acceptor = comm.acceptor();
        acceptor.accept(Rank(rank), Box::new(mine)).unwrap();
        theirs
    });
    (comm.with_timeout(LONG), links)
}

fn is_lost(error: &CollectiveError) -> bool {
    matches!(error, CollectiveError::PeerLost { rank: Rank(2), .. })
}

/// A rank may find a loss in an operation that a peer has left behind: the peer hears that nothing more of the call works.
#[test]
fn a_rank_that_finds_a_loss_tells_peers_that_are_ahead() {
    let runtime = runtime();
    let (comm, [mut one, two]) = first_of_three(&runtime);
    drop(two);
    assert!(is_lost(&comm.barrier().unwrap_err()));
    // What was said is read to its end.
    drop(comm);
    let cause = loop {
        let (header, text) = read_frame(&runtime, &mut one);
        if let Header::AbortCall { call: 0, .. } = header {
            break Cause::parse(&text);
        }
    };
    assert!(
        matches!(&cause, Some(Cause::Failure(error)) if is_lost(error)),
        "{cause:?}"
    );
}

/// What a peer says so of a call ends whichever operation of the call this rank is in, and those to come.
#[test]
fn a_rank_that_is_ahead_ends_with_the_loss_that_a_peer_has_found() {
    let runtime = runtime();
    let (comm, [mut one, _two]) = first_of_three(&runtime);
    let cause = Cause::Failure(CollectiveError::PeerLost {
        rank: Rank(2),
        reason: "its link ended".to_owned(),
    });
    let text = cause.encode();
    let header = Header::AbortCall {
        generation: GENERATION,
        call: 0,
        length: text.len() as u32,
    };
    write(&runtime, &mut one, &frame(header, &text));
    for _ in 0..2 {
        let error = comm.barrier().unwrap_err();
        assert!(is_lost(&error), "{error}");
    }
}

/// The end of a network's link says nothing of the peer, but that nobody is there any more who could make another one does. Then no
/// operation waits for the peer again, whether the link was in use or not.
#[test]
fn a_rank_that_is_gone_is_lost_though_its_links_may_come_back() {
    for is_used in [false, true] {
        let mut group = Group::new(Kind::Memory, 3);
        group.set_word_within(LONG / 100);
        let faults = [0, 1].map(|rank| {
            let fault = Fault::cut();
            group.set_fault(rank, &fault);
            fault
        });
        force(&group, Algorithm::Halving);
        group.run(|comm| comm.all_to_all(&[1_u8; 3]).map(drop).unwrap());
        let two = group.members.remove(2);
        let begun = faults[1].written();
        std::thread::scope(|scope| {
            let sums: Vec<_> = (group.members.iter())
                .map(|comm| scope.spawn(|| (is_used).then(|| sum(comm, 1 << 20))))
                .collect();
            until(|| !is_used || faults[1].written() > begun + (1 << 12));
            drop(two);
            for error in sums.into_iter().filter_map(|one| one.join().unwrap()) {
                assert!(is_lost(&error.unwrap_err()), "{is_used}");
            }
        });
        group.run(|comm| comm.barrier().unwrap_err());
        let attempts = (group.requests(), group.links());
        for error in group.run(|comm| comm.barrier().unwrap_err()) {
            assert!(is_lost(&error), "{is_used}: {error}");
        }
        assert_eq!((group.requests(), group.links()), attempts, "{is_used}");
    }
}
