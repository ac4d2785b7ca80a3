//! Links between the workers of one node.

use super::*;
use crate::node::messages::Link;

/// A rank that waits for a link of a higher one has it told, if it can do something about it.
#[test]
fn a_request_for_a_link_reaches_who_is_to_make_it() {
    let now = Instant::now();
    let mut core = ready(3, now);
    let ask = |core: &mut Colocator, slot: u32, rank: u32, generation: u64| {
        let request = WorkerEvent::Said(FromWorker::RequestLink {
            rank: Rank(rank),
            generation: Generation(generation),
            group: 7,
        });
        core.worker(now, at(slot), request)
    };
    assert_eq!(
        ask(&mut core, 0, 2, 1),
        [Output::Tell(
            at(2),
            ToWorker::LinkRequested {
                rank: Rank(0),
                generation: Generation(1),
                group: 7,
            }
        )]
    );
    assert!(ask(&mut core, 0, 2, 2).is_empty(), "another generation");
    core.worker(now, at(2), exited(Exit::Signal(9)));
    assert!(matches!(
        ask(&mut core, 0, 2, 1)[..],
        [Output::Tell(_, ToWorker::RankLost { .. })]
    ));
    let stranger = WorkerEvent::Said(FromWorker::RequestLink {
        rank: Rank(9),
        generation: Generation(1),
        group: 0,
    });
    assert!(killed_for(&mut core, now, 0, stranger).contains("no other rank of this node"));

    // Who has not begun to take calls has nothing to make links with.
    let mut core = running(3, now);
    core.worker(now, at(0), hello(0));
    core.worker(
        now,
        at(0),
        WorkerEvent::Said(FromWorker::Ready { address: None }),
    );
    assert!(ask(&mut core, 0, 2, 1).is_empty());
}

#[test]
fn two_workers_are_linked_as_often_as_they_ask() {
    let now = Instant::now();
    let mut core = ready(3, now);
    let ask = |core: &mut Colocator, slot: u32, rank: u32, generation: u64| {
        core.worker(
            now,
            at(slot),
            WorkerEvent::Said(FromWorker::ConnectPeer {
                rank: Rank(rank),
                generation: Generation(generation),
            }),
        )
    };
    assert_eq!(
        ask(&mut core, 2, 1, 1),
        [Output::Link(Link {
            first: (at(2), Rank(2)),
            second: (at(1), Rank(1)),
            generation: Generation(1),
        })]
    );
    // For another group.
    assert_eq!(ask(&mut core, 2, 1, 1).len(), 1);
    assert!(ask(&mut core, 0, 1, 2).is_empty(), "another generation");
    // A new generation starts anew.
    core.membership(testing::table(3, 2)).unwrap();
    assert!(ask(&mut core, 1, 2, 1).is_empty(), "stale");
    assert_eq!(ask(&mut core, 1, 2, 2).len(), 1);
    // One that is gone is answered with its loss.
    core.worker(now, at(0), exited(Exit::Signal(9)));
    assert!(matches!(
        ask(&mut core, 1, 0, 2)[..],
        [Output::Tell(_, ToWorker::RankLost { .. })]
    ));
    // Itself and ranks of other nodes are faults.
    assert_eq!(ask(&mut core, 1, 1, 2), [signal(1, Signal::Kill)]);
    assert_eq!(ask(&mut core, 2, 9, 2), [signal(2, Signal::Kill)]);
}
