//! Ranks that leave because of a loss in one group, as others find in another one.

use super::leaving::{ROOM, linked};
use super::*;

/// What the ranks that lose one do, and then those that find them gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    Ordered,
    Named,
    /// To the next rank.
    Sends,
}

impl Work {
    const ALL: [Self; 3] = [Self::Ordered, Self::Named, Self::Sends];

    fn of(self, comm: &Communicator) -> Result<(), CollectiveError> {
        match self {
            Self::Ordered => sum(comm, 10),
            Self::Named => comm.named("all").barrier().wait(),
            Self::Sends => {
                let other = Rank(1 - comm.rank().0 % 2);
                let pair = comm.rank().0 / 2 * 2;
                let other = Rank(pair + other.0);
                if comm.rank() < other {
                    comm.send(&[1_u8], other)?;
                    comm.receive::<u8>(other).map(drop)
                } else {
                    comm.receive::<u8>(other)?;
                    comm.send(&[1_u8], other)
                }
            }
        }
    }
}

const KINDS: [Kind; 5] = [
    Kind::Memory,
    Kind::Ring,
    Kind::Shared,
    Kind::Tls,
    Kind::Quic,
];

/// Rank 3 is lost, rank 2 sees that in a group of the two or while they send to each other, and leaves: the others, who look at
/// their links to rank 2 first, name rank 3.
#[test]
fn who_leaves_because_of_a_loss_in_another_group_is_not_named() {
    for kind in KINDS {
        for first in Work::ALL {
            for then in [Work::Ordered, Work::Named] {
                let mut group = Group::new(kind, 4);
                group.run(|comm| {
                    Work::Ordered.of(comm).unwrap();
                    Work::Named.of(comm).unwrap();
                });
                let two = |comm: &Communicator| {
                    let two = comm.group(&[Rank(2), Rank(3)]).unwrap();
                    let two = two.filter(|_| first != Work::Sends);
                    first.of(two.as_ref().unwrap_or(comm)).unwrap();
                    two
                };
                let mut parts = run(&group.members[2..], two);
                drop((parts.pop(), group.members.pop()));
                let (part, leaves) = (parts.pop().unwrap(), group.members.pop().unwrap());
                let error = first.of(part.as_ref().unwrap_or(&leaves)).unwrap_err();
                assert_eq!(error.culprit_rank(), Some(Rank(3)), "{error}");
                drop((part, leaves));
                for result in group.run(|comm| then.of(comm)) {
                    let error = result.unwrap_err();
                    assert!(
                        matches!(error, CollectiveError::PeerLost { rank: Rank(3), .. }),
                        "{kind:?}, {first:?}, {then:?}: {error}"
                    );
                }
            }
        }
    }
}

/// Rank 3 is lost to rank 2 in their group alone, and both live.
fn parted(kind: Kind) -> Group {
    let group = Group::new(kind, 4);
    group.run(|comm| {
        // All have links to all.
        comm.all_to_all_varcount(&[1_u8; 4], &[1; 4]).unwrap();
        Work::Named.of(comm).unwrap();
    });
    let two = |comm: &Communicator| {
        let two = comm.group(&[Rank(2), Rank(3)]).unwrap().unwrap();
        sum(&two, 10).unwrap();
        two
    };
    let mut parts = run(&group.members[2..], two);
    drop(parts.pop());
    let error = sum(&parts[0], 10).unwrap_err();
    assert_eq!(error.culprit_rank(), Some(Rank(3)), "{error}");
    group
}

#[test]
fn who_is_lost_in_one_group_alone_is_not_lost_in_others() {
    for kind in KINDS {
        let mut group = parted(kind);
        for _ in 0..2 {
            group.run(|comm| sum(comm, 10).unwrap());
        }
        // What rank 2 said before is no reason for this.
        drop(group.members.remove(2));
        for result in group.run(|comm| sum(comm, 10)) {
            let error = result.unwrap_err();
            assert_eq!(error.culprit_rank(), Some(Rank(2)), "{kind:?}: {error}");
        }
    }
}

#[test]
fn who_has_lost_one_elsewhere_and_is_only_late_is_late() {
    for kind in KINDS {
        let group = parted(kind);
        group.set_timeout(Duration::from_millis(300));
        for result in run(&group.members[..2], |comm| sum(comm, 10)) {
            let error = result.unwrap_err();
            let CollectiveError::Deadline { late, .. } = &error else {
                panic!("{kind:?}: {error}");
            };
            assert_eq!(*late, [Rank(2), Rank(3)], "{kind:?}: {error}");
        }
    }
}

/// Over QUIC, or without a link to it, nothing shows that rank 3 is there.
#[test]
fn who_leaves_while_the_other_one_is_there_is_named() {
    for kind in KINDS.into_iter().filter(|kind| *kind != Kind::Quic) {
        let mut group = parted(kind);
        drop(group.members.remove(2));
        for result in run(&group.members[..2], |comm| sum(comm, 10)) {
            let error = result.unwrap_err();
            assert_eq!(error.culprit_rank(), Some(Rank(2)), "{kind:?}: {error}");
        }
    }
}

#[test]
fn who_goes_on_with_names_and_then_leaves_is_named() {
    for kind in KINDS {
        let mut group = parted(kind);
        group.run(|comm| Work::Named.of(comm).unwrap());
        drop(group.members.remove(2));
        for result in run(&group.members[..2], |comm| Work::Named.of(comm)) {
            let error = result.unwrap_err();
            assert_eq!(error.culprit_rank(), Some(Rank(2)), "{kind:?}: {error}");
        }
    }
}

/// Rank 4 is lost to rank 3 in one group, which is then lost to rank 2 in another one.
#[test]
fn a_loss_goes_from_group_to_group() {
    for (kind, then) in KINDS
        .into_iter()
        .flat_map(|kind| [Work::Ordered, Work::Named].map(|then| (kind, then)))
    {
        let mut group = Group::new(kind, 5);
        group.run(|comm| {
            Work::Ordered.of(comm).unwrap();
            Work::Named.of(comm).unwrap();
        });
        let chain = |comm: &Communicator| {
            let parts = [[2, 3], [3, 4]].map(|two| comm.group(&two.map(Rank)).unwrap());
            let sums = parts.iter().flatten().map(|part| sum(part, 10));
            assert!(sums.collect::<Vec<_>>().iter().all(Result::is_ok));
            parts
        };
        let mut parts = run(&group.members[2..], chain);
        drop((parts.pop(), group.members.pop()));
        for index in [1, 0] {
            let mine = parts.pop().unwrap();
            let error = sum(mine[index].as_ref().unwrap(), 10).unwrap_err();
            let next = Rank(3 + index as u32);
            assert_eq!(error.culprit_rank(), Some(next), "{error}");
            drop((mine, group.members.pop()));
        }
        for result in group.run(|comm| then.of(comm)) {
            let error = result.unwrap_err();
            let culprit = error.culprit_rank();
            assert_eq!(culprit, Some(Rank(4)), "{kind:?}, {then:?}: {error}");
        }
    }
}

/// Its other peers hear of a loss in another group while this rank waits for them.
#[test]
fn what_is_lost_elsewhere_is_said_in_an_operation_that_is_under_way() {
    let runtime = runtime();
    let (connector, handle) = (Arc::new(NoConnector), runtime.handle().clone());
    let comm = Communicator::new(Rank(0), 3, GENERATION, JOB, connector, handle).unwrap();
    comm.set_timeout(LONG);
    let part = comm.group(&[Rank(0), Rank(2)]).unwrap().unwrap();
    let link = |group, peer| {
        let (mine, theirs) = MemoryLane::pair(1 << 20);
        let accepted = comm
            .acceptor()
            .accept_group(group, Rank(peer), Box::new(mine));
        accepted.unwrap();
        theirs
    };
    let (mut one, two) = (link(GroupId::WORLD, 1), link(GroupId::WORLD, 2));
    drop(link(part.group_id(), 2));
    let waits = comm.start().all_reduce(vec![1.0_f32; 10], ReduceOp::Sum);
    assert_eq!(read_notice(&runtime, &mut one), None, "it has begun");
    let error = part.barrier().unwrap_err();
    assert_eq!(error.culprit_rank(), Some(Rank(2)), "{error}");
    let (tag, cause) = std::iter::from_fn(|| Some(read_notice(&runtime, &mut one)))
        .flatten()
        .next()
        .unwrap();
    let Cause::LostElsewhere { rank: Rank(2), .. } = &cause else {
        panic!("{cause:?}");
    };
    assert_eq!(tag, Tag::default());
    drop((one, two));
    assert!(waits.wait().is_err());
}

/// No rank links anywhere, and the host of rank 2 says that it is gone.
#[derive(Debug)]
struct TwoIsGone;

impl Connector for TwoIsGone {
    fn connect(&self, peer: Rank) -> Connecting {
        NoConnector.connect(peer)
    }

    fn is_gone(&self, peer: Rank, _met: bool) -> Option<Gone> {
        let why = (peer == Rank(2)).then(|| "nothing listens there any more".to_owned());
        Some(Box::pin(std::future::ready(why)))
    }
}

/// Who hears only that a rank is gone does not know that this one goes because of it.
#[test]
fn what_is_gone_for_good_is_said_to_be_lost_elsewhere_too() {
    let runtime = runtime();
    let (connector, handle) = (Arc::new(TwoIsGone), runtime.handle().clone());
    let comm = Communicator::new(Rank(0), 3, GENERATION, JOB, connector, handle).unwrap();
    comm.set_timeout(LONG);
    let part = comm.group(&[Rank(0), Rank(2)]).unwrap().unwrap();
    let (mine, mut one) = MemoryLane::pair(1 << 20);
    comm.acceptor().accept(Rank(1), Box::new(mine)).unwrap();
    let error = part.barrier().unwrap_err();
    assert_eq!(error.culprit_rank(), Some(Rank(2)), "{error}");
    drop((part, comm));
    let said = std::iter::from_fn(|| Some(read_notice(&runtime, &mut one).unwrap().1));
    let mut causes = said.filter(|cause| !matches!(cause, Cause::Gone { .. }));
    let cause = causes.next().unwrap();
    assert!(
        matches!(cause, Cause::LostElsewhere { rank: Rank(2), .. }),
        "{cause:?}"
    );
}

/// Rank 2 has done its part and is killed, and rank 1 has lost it in another group, and stays, but does not come.
#[test]
fn who_does_not_come_because_of_one_that_is_gone_is_not_waited_for() {
    let runtime = runtime();
    let (connector, handle) = (Arc::new(TwoIsGone), runtime.handle().clone());
    let comm = Communicator::new(Rank(0), 3, GENERATION, JOB, connector, handle).unwrap();
    comm.set_timeout(LONG);
    comm.set_tuning(Tuning {
        force: Some(Algorithm::Flat),
        ..Tuning::default()
    });
    let link = |peer| {
        let (mine, theirs) = MemoryLane::pair(1 << 20);
        let mine = faulty(Box::new(mine), &Fault::cut());
        comm.acceptor().accept(Rank(peer), mine).unwrap();
        theirs
    };
    let (mut one, mut two) = (link(1), link(2));
    let waits = (comm.start()).all_reduce(vec![1_i32; COUNT as usize], ReduceOp::Sum);
    for lane in [&mut one, &mut two] {
        assert_eq!(read_notice(&runtime, lane), None, "what rank 0 gives");
    }
    let payload = vec![0; 4 * COUNT as usize];
    write(&runtime, &mut two, &frame(Header::Data(right()), &payload));
    drop(two);
    let cause = Cause::LostElsewhere {
        rank: Rank(2),
        reason: "its link ended".to_owned(),
    };
    write(&runtime, &mut one, &notice(Tag::default(), &cause));
    let error = waits.wait().unwrap_err();
    assert!(
        matches!(error, CollectiveError::PeerLost { rank: Rank(2), .. }),
        "{error}"
    );
}

/// A rank that has begun nothing yet looks at its links, and sees ends behind what it does not take in: rank 2, of which this one
/// gets what rank 1 has, has lost rank 3 in another group, that one rank 1, and all are gone.
#[test]
fn what_an_idle_rank_has_seen_of_ends_is_not_all_that_was_said() {
    let runtime = runtime();
    let (comm, mut ends) = linked::<3>(&runtime, ROOM);
    comm.set_tuning(Tuning {
        force: Some(Algorithm::Binomial),
        ..Tuning::default()
    });
    for (lane, lost) in ends[1..].iter_mut().zip([3, 1]) {
        let cause = Cause::LostElsewhere {
            rank: Rank(lost),
            reason: "its link ended".to_owned(),
        };
        write(&runtime, lane, &notice(Tag::default(), &cause));
    }
    drop(ends);
    // What that has woken comes first on the only thread.
    runtime.block_on(async { runtime.spawn(tokio::task::yield_now()).await.unwrap() });
    let error = comm.broadcast(&mut [0_u8], Rank(1)).unwrap_err();
    assert!(
        matches!(error, CollectiveError::PeerLost { rank: Rank(1), .. }),
        "{error}"
    );
}
