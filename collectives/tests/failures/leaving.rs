//! Ranks that leave because of another one, what they say last, and who is waited for.

use super::*;

/// A rank that is an operation ahead names who was lost, and not who gave up because of that and left.
#[test]
fn who_left_because_of_a_loss_is_not_the_one_that_is_lost() {
    one_leaves_because_two_is_lost(|_| ());
}

/// The same if it is a call ahead.
#[test]
fn who_left_a_call_because_of_a_loss_is_not_the_one_that_is_lost() {
    one_leaves_because_two_is_lost(|comm| comm.begin_call(CallId(1)));
}

/// Rank 0 makes no links. With the other ends of those to all others, in each of which there is room for so many bytes.
pub(super) fn linked<const PEERS: usize>(
    runtime: &Runtime,
    room: usize,
) -> (Communicator, [MemoryLane; PEERS]) {
    let (world, handle) = (PEERS as u32 + 1, runtime.handle().clone());
    let connector = Arc::new(NoConnector);
    let comm = Communicator::new(Rank(0), world, GENERATION, JOB, connector, handle).unwrap();
    comm.set_timeout(LONG);
    let ends = std::array::from_fn(|index| {
        let (mine, theirs) = MemoryLane::pair(room);
        let peer = Rank(index as u32 + 1);
        comm.acceptor().accept(peer, Box::new(mine)).unwrap();
        theirs
    });
    (comm, ends)
}

/// Room for all that is said.
pub(super) const ROOM: usize = 1 << 20;

/// Less than a frame of long data.
const LITTLE: usize = 4096;

fn link_broke(rank: u32) -> Cause {
    Cause::Lost {
        rank: Rank(rank),
        reason: "its link broke".to_owned(),
        for_good: false,
    }
}

fn failed(rank: u32, reason: &str) -> Cause {
    Cause::Failed {
        rank: Rank(rank),
        reason: reason.to_owned(),
    }
}

/// What comes in the second step of a barrier that is operation 1.
fn of_barrier() -> Header {
    Header::Data(Data {
        operation: Operation {
            algorithm: Algorithm::Dissemination,
            ..Operation::new(OperationKind::Barrier, None, 0)
        },
        step: 1,
        ..of_broadcast()
    })
}

fn one_leaves_because_two_is_lost(goes_on: impl Fn(&Communicator)) {
    let runtime = runtime();
    let (comm, [mut one, _two]) = linked(&runtime, ROOM);
    comm.set_timeout(Duration::from_millis(1));
    comm.barrier().unwrap_err();
    goes_on(&comm);
    comm.set_timeout(LONG);
    write(&runtime, &mut one, &notice(Tag::default(), &link_broke(2)));
    drop(one);
    let error = comm.barrier().unwrap_err();
    assert_eq!(error.culprit_rank(), Some(Rank(2)), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("its link broke (rank 1 gave up operation 0 of call 0 because of it"),
        "{text}"
    );
}

/// Makes one link to each of the ranks below, which a network may break.
#[derive(Debug)]
struct MadeOnce(Mutex<HashMap<u32, Box<dyn Lane>>>);

impl Connector for MadeOnce {
    fn connect(&self, peer: Rank) -> Connecting {
        let lane = self.0.lock().unwrap().remove(&peer.0);
        Box::pin(async move {
            lane.ok_or_else(|| LaneError::Unreachable {
                reason: format!("nothing listens where rank {peer} was"),
            })
        })
    }
}

/// Rank 2 of three, to whose first operation the others did not come, and the other ends of its links, which can't be made again.
fn after_a_deadline(
    runtime: &Runtime,
    wrap: impl Fn(MemoryLane) -> Box<dyn Lane>,
) -> (Communicator, Vec<MemoryLane>) {
    let (mine, ends): (Vec<_>, Vec<_>) = [0, 1]
        .map(|_| MemoryLane::pair(1 << 20))
        .into_iter()
        .unzip();
    let lanes = (0..).zip(mine.into_iter().map(wrap)).collect();
    let connector = Arc::new(MadeOnce(Mutex::new(lanes)));
    let handle = runtime.handle().clone();
    let comm = Communicator::new(Rank(2), 3, GENERATION, JOB, connector, handle).unwrap();
    comm.set_timeout(Duration::from_millis(100));
    comm.barrier().unwrap_err();
    comm.set_timeout(LONG);
    (comm, ends)
}

/// It said why it goes on a link that has ended since, and that can't be made again.
#[test]
fn who_left_because_of_a_loss_and_can_not_be_reached_is_not_the_one_that_is_lost() {
    let runtime = runtime();
    let fault = Fault::cut();
    let (comm, mut ends) = after_a_deadline(&runtime, |lane| faulty(Box::new(lane), &fault));
    let cause = link_broke(0);
    let mut one = ends.remove(1);
    write(&runtime, &mut one, &notice(Tag::default(), &cause));
    drop(one);
    let error = comm.broadcast(&mut [0_u8], Rank(1)).unwrap_err();
    assert_eq!(error.culprit_rank(), Some(Rank(0)), "{error}");
    assert!(error.to_string().contains("rank 1 gave up"), "{error}");
}

/// Rank 1 gave up operation 0 because its link to rank 0 broke. Both have come to operation 1, where rank 1 dies.
#[test]
fn who_has_come_is_not_the_one_that_is_lost() {
    let runtime = runtime();
    let (comm, mut ends) = after_a_deadline(&runtime, |lane| Box::new(lane));
    let cause = link_broke(0);
    let ask = Header::Ask(of_broadcast());
    let mut one = ends.remove(1);
    write(&runtime, &mut one, &notice(Tag::default(), &cause));
    write(&runtime, &mut one, &ask.encode());
    write(&runtime, &mut ends[0], &ask.encode());
    drop(one);
    let error = comm.broadcast(&mut [0_u8], Rank(1)).unwrap_err();
    assert_eq!(error.culprit_rank(), Some(Rank(1)), "{error}");
}

/// What a rank says first in a broadcast from rank 1, which is operation 1.
fn of_broadcast() -> Data {
    Data {
        generation: GENERATION,
        tag: Tag::new(0, 1),
        operation: Operation {
            root: Some(1),
            ..Operation::new(OperationKind::Broadcast, Some(DType::U8), 1)
        },
        step: 0,
        offset: 0,
        length: 0,
    }
}

/// Rank 0 has come to operation 1 and is killed. What it had sent to rank 1 before is lost, which gives up operation 0 because of
/// that, and leaves.
#[test]
fn who_had_come_before_it_was_killed_is_the_one_that_is_lost() {
    let runtime = runtime();
    let broadcast = Operation {
        algorithm: Algorithm::Binomial,
        ..of_broadcast().operation
    };
    // All that is needed of it, and not.
    let words = [
        Header::Consent(Data {
            operation: broadcast,
            step: 1,
            ..of_broadcast()
        }),
        Header::Ask(of_broadcast()),
    ];
    for (said, ends_first) in words.into_iter().zip([true, false]) {
        let (comm, mut ends) = after_a_deadline(&runtime, |lane| Box::new(lane));
        let (mut one, mut zero) = (ends.remove(1), ends.remove(0));
        write(&runtime, &mut zero, &said.encode());
        let cause = link_broke(0);
        write(&runtime, &mut one, &notice(Tag::default(), &cause));
        let mut data = [0_u8];
        let mut waits = Box::pin(comm.broadcast_async(&mut data, Rank(1)));
        let mut cx = Context::from_waker(Waker::noop());
        let (first, then) = if ends_first { (zero, one) } else { (one, zero) };
        // This rank has given its word, then.
        for ends in [None, Some(first)] {
            drop(ends);
            let polled = waits.as_mut().poll(&mut cx);
            assert!(polled.is_pending(), "{said:?}: {polled:?}");
        }
        drop(then);
        let error = runtime.block_on(waits).unwrap_err();
        assert_eq!(error.culprit_rank(), Some(Rank(0)), "{said:?}: {error}");
    }
}

/// Rank 0 has sent what this rank wants later, and is killed: its end stands behind that. Rank 1 lost it in operation 0, and leaves.
#[test]
fn who_was_ahead_when_it_was_killed_is_the_one_that_is_lost() {
    let runtime = runtime();
    for ends_first in [true, false] {
        let (comm, mut ends) = after_a_deadline(&runtime, |lane| Box::new(lane));
        let (mut one, mut zero) = (ends.remove(1), ends.remove(0));
        // In the first step this rank waits for rank 1.
        write(&runtime, &mut zero, &of_barrier().encode());
        let cause = link_broke(0);
        write(&runtime, &mut one, &notice(Tag::default(), &cause));
        let mut waits = Box::pin(comm.barrier_async());
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(Arc::clone(&wakes));
        let mut cx = Context::from_waker(&waker);
        let (first, then) = if ends_first { (zero, one) } else { (one, zero) };
        for ends in [None, Some(first)] {
            drop(ends);
            let polled = waits.as_mut().poll(&mut cx);
            assert!(polled.is_pending(), "{polled:?}");
        }
        wakes.0.store(0, Ordering::SeqCst);
        drop(then);
        // It is not looked at only because nothing else comes for a while.
        assert!(wakes.0.load(Ordering::SeqCst) > 0);
        let polled = waits.as_mut().poll(&mut cx);
        let Poll::Ready(Err(error)) = polled else {
            panic!("all ends are there: {polled:?}");
        };
        assert_eq!(error.culprit_rank(), Some(Rank(0)), "{error}");
    }
}

/// Rank 3, for which this one waits, has lost rank 2, and that one rank 1, which is gone, too, or seems to be there. If rank 2 said that in
/// an earlier operation than rank 3, it was not because of it that rank 3 lost it.
#[test]
fn who_left_because_of_one_that_left_is_not_the_one_that_is_lost() {
    let runtime = runtime();
    for (order, lost_in, lost) in [
        (&[3, 2, 1][..], 0, 1),
        (&[3, 1, 2], 0, 1),
        (&[1, 2, 3], 0, 1),
        (&[2, 3, 1], 0, 1),
        (&[2, 3], 0, 1),
        (&[3, 2], 0, 1),
        (&[3, 2], 1, 2),
    ] {
        let (comm, ends) = linked::<3>(&runtime, ROOM);
        let mut ends = ends.map(Some);
        comm.set_timeout(Duration::from_millis(1));
        for _ in 0..2 {
            comm.barrier().unwrap_err();
        }
        comm.set_timeout(LONG);
        for (rank, culprit, operation) in [(2, 1, 0), (3, 2, lost_in)] {
            let words = notice(Tag::new(0, operation), &link_broke(culprit));
            write(&runtime, ends[rank - 1].as_mut().unwrap(), &words);
        }
        let mut waits = Box::pin(comm.barrier_async());
        let mut cx = Context::from_waker(Waker::noop());
        let mut polled = waits.as_mut().poll(&mut cx);
        for &rank in order {
            // Before, if no more ends count.
            if polled.is_pending() {
                ends[rank - 1] = None;
                polled = waits.as_mut().poll(&mut cx);
            }
        }
        let error = match polled {
            Poll::Ready(result) => result,
            // Its end may still be seen.
            Poll::Pending => runtime.block_on(waits),
        };
        let error = error.unwrap_err();
        assert_eq!(error.culprit_rank(), Some(Rank(lost)), "{order:?}: {error}");
    }
}

/// A peer that reads nothing has said that it has lost the same rank: this one ends at once, and does not wait until it reads.
#[test]
fn who_knows_of_the_loss_is_not_waited_for() {
    let runtime = runtime();
    // The peer's words are read before the end of the lost rank's link, and behind it.
    for lost in [2, 1] {
        let (comm, mut ends) = linked::<2>(&runtime, LITTLE);
        if lost == 1 {
            ends.reverse();
        }
        let [mut stuck, ends] = ends;
        comm.set_tuning(Tuning {
            force: Some(Algorithm::Binomial),
            ..Tuning::default()
        });
        let mut data = vec![1_i32; 100_000];
        let mut waits = Box::pin(comm.broadcast_async(&mut data, Rank(0)));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(waits.as_mut().poll(&mut cx).is_pending());
        let why = notice(Tag::default(), &link_broke(lost));
        write(&runtime, &mut stuck, &why);
        drop(ends);
        let polled = waits.as_mut().poll(&mut cx);
        let lost = Rank(lost);
        assert!(
            matches!(&polled, Poll::Ready(Err(CollectiveError::PeerLost { rank, .. })) if *rank == lost),
            "{polled:?}"
        );
    }
}

/// Nobody is lost, and the peers read nothing: both have given up, too. One of them the operation after that, which hears of it.
#[test]
fn who_has_given_up_is_not_waited_for_and_is_heard_in_the_next_operation() {
    let runtime = runtime();
    let (comm, [mut one, mut two]) = linked(&runtime, LITTLE);
    comm.set_tuning(Tuning {
        force: Some(Algorithm::Binomial),
        ..Tuning::default()
    });
    let mut data = vec![1_i32; 100_000];
    let mut waits = Box::pin(comm.broadcast_async(&mut data, Rank(0)));
    let mut cx = Context::from_waker(Waker::noop());
    assert!(waits.as_mut().poll(&mut cx).is_pending());
    // In the first step this rank waits for rank 2.
    write(&runtime, &mut one, &of_barrier().encode());
    let later = notice(Tag::new(0, 1), &failed(1, "later"));
    write(&runtime, &mut one, &later);
    let now = notice(Tag::default(), &failed(2, "now"));
    write(&runtime, &mut two, &now);
    let polled = waits.as_mut().poll(&mut cx);
    let Poll::Ready(Err(error)) = polled else {
        panic!("all have given up: {polled:?}");
    };
    assert_eq!(error.culprit_rank(), Some(Rank(1)), "{error}");
    drop(waits);
    let error = comm.barrier().unwrap_err().to_string();
    assert!(error.contains("later"), "{error}");
}

/// Rank 1 is ahead and has given up there. This rank, which waits for others and hears nothing for a while, sees that in an operation for
/// which it says nothing.
#[test]
fn what_was_seen_before_its_time_is_seen_again() {
    let runtime = runtime();
    let (comm, [mut one, _two, _three]) = linked(&runtime, ROOM);
    // Nothing is due from rank 1 in a barrier of four.
    write(&runtime, &mut one, &of_barrier().encode());
    let later = notice(Tag::new(0, 1), &failed(1, "later"));
    write(&runtime, &mut one, &later);
    comm.set_timeout(Duration::from_millis(300));
    let error = comm.barrier().unwrap_err();
    assert!(matches!(error, CollectiveError::Deadline { .. }), "{error}");
    comm.set_timeout(LONG);
    let error = comm.barrier().unwrap_err();
    assert!(error.to_string().contains("later"), "{error}");
}

/// Of a peer that reads nothing only that is taken for its end which says that it has given up as much as this rank.
#[test]
fn who_has_given_up_less_or_nothing_is_waited_for() {
    let runtime = runtime();
    // Of such a length that it could be values.
    let failed = |rank| failed(rank, "it has had enough!");
    let of_operation = |rank| notice(Tag::default(), &failed(rank));
    let of_call = |rank| {
        let text = failed(rank).encode();
        let header = Header::AbortCall {
            generation: GENERATION,
            call: 0,
            length: text.len() as u32,
        };
        frame(header, &text)
    };
    let mut data = vec![1_i32; 100_000];
    let values = failed(2).encode();
    assert_eq!(values.len() % 4, 0);
    let header = Header::Data(Data {
        tag: Tag::default(),
        operation: Operation {
            root: Some(0),
            algorithm: Algorithm::Binomial,
            ..Operation::new(
                OperationKind::Broadcast,
                Some(DType::I32),
                data.len() as u64,
            )
        },
        length: values.len() as u32,
        ..of_broadcast()
    });
    for (of_one, of_two, is_over) in [
        (of_operation(1), of_operation(2), true),
        (of_operation(1), frame(header, &values), false),
        (of_call(1), of_operation(2), false),
        (of_call(1), of_call(2), true),
    ] {
        let (comm, [mut one, mut two]) = linked(&runtime, LITTLE);
        comm.set_tuning(Tuning {
            force: Some(Algorithm::Binomial),
            ..Tuning::default()
        });
        let mut waits = Box::pin(comm.broadcast_async(&mut data, Rank(0)));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(waits.as_mut().poll(&mut cx).is_pending());
        write(&runtime, &mut two, &of_two);
        write(&runtime, &mut one, &of_one);
        let polled = waits.as_mut().poll(&mut cx);
        assert_eq!(
            polled.is_ready(),
            is_over,
            "{of_one:?}, {of_two:?}: {polled:?}"
        );
        let error = runtime.block_on(async {
            match polled {
                Poll::Ready(result) => result,
                Poll::Pending => waits.await,
            }
        });
        let error = error.unwrap_err();
        assert!(
            matches!(error, CollectiveError::PeerFailed { rank: Rank(1), .. }),
            "{error}"
        );
    }
}

/// A rank that waits elsewhere, and one that has come meanwhile.
#[test]
fn what_a_lost_rank_did_is_told_if_it_had_not_come() {
    let runtime = runtime();
    for has_come in [false, true] {
        let (comm, [mut one]) = linked(&runtime, ROOM);
        let text = b"it sleeps";
        let doing = Header::Doing {
            generation: GENERATION,
            tag: Tag::default(),
            rank: SENDER,
            length: text.len() as u32,
        };
        write(&runtime, &mut one, &frame(doing, text));
        if has_come {
            let ask = Header::Ask(Data {
                tag: Tag::default(),
                operation: Operation::new(OperationKind::Barrier, None, 0),
                ..of_broadcast()
            });
            write(&runtime, &mut one, &ask.encode());
        }
        drop(one);
        let error = comm.barrier().unwrap_err().to_string();
        assert_eq!(
            error.contains("it had said: it sleeps"),
            !has_come,
            "{error}"
        );
        assert!(error.contains("rank 1 is lost"), "{error}");
    }
}

/// Counts how often who waits is woken.
#[derive(Debug, Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Rank 1 has lost rank 0 in another group and is gone, and can't be linked again. The end of rank 0's link is seen after that, or
/// it is there.
#[test]
fn who_left_because_of_one_whose_end_is_not_seen_yet_is_not_the_one_that_is_lost() {
    let runtime = runtime();
    for is_there in [false, true] {
        let fault = Fault::cut();
        let (comm, mut ends) = after_a_deadline(&runtime, |lane| faulty(Box::new(lane), &fault));
        let cause = Cause::LostElsewhere {
            rank: Rank(0),
            reason: "its link broke".to_owned(),
        };
        let (mut one, zero) = (ends.remove(1), ends.remove(0));
        write(&runtime, &mut one, &notice(Tag::default(), &cause));
        drop(one);
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(Arc::clone(&wakes));
        let mut cx = Context::from_waker(&waker);
        let mut data = [0_u8];
        let mut waits = Box::pin(comm.broadcast_async(&mut data, Rank(1)));
        for _ in 0..2 {
            // The second time that there is no new link.
            let polled = waits.as_mut().poll(&mut cx);
            assert!(polled.is_pending(), "{polled:?}");
            until(|| wakes.0.swap(0, Ordering::SeqCst) > 0);
        }
        let zero = Some(zero).filter(|_| is_there);
        let error = runtime.block_on(waits).unwrap_err();
        drop(zero);
        let lost = Rank(u32::from(is_there));
        assert_eq!(error.culprit_rank(), Some(lost), "{error}");
        let text = error.to_string();
        assert_eq!(text.contains("nothing listens where"), is_there, "{text}");
    }
}
