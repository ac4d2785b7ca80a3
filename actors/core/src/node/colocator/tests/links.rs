//! Links between the workers of one node.

use super::*;
use crate::node::messages::Link;

/// A worker asks for a link to a rank: in group 7, or of its own.
fn ask(job: &mut Job, slot: u32, rank: u32, generation: u64, group: Option<u64>) -> Vec<Output> {
    let (rank, generation) = (Rank(rank), Generation(generation));
    let message = match group {
        Some(group) => FromWorker::RequestLink {
            rank,
            generation,
            group,
        },
        None => FromWorker::ConnectPeer { rank, generation },
    };
    job.says(at(slot), message)
}

/// A rank that waits for a link of a higher one has it told, if it can do something about it.
#[test]
fn a_request_for_a_link_reaches_who_is_to_make_it() {
    let mut job = Job::ready(3);
    let request = ToWorker::LinkRequested {
        rank: Rank(0),
        generation: FIRST,
        group: 7,
    };
    let told = [Output::Tell(at(2), request)];
    assert_eq!(ask(&mut job, 0, 2, 1, Some(7)), told);
    assert_eq!(ask(&mut job, 0, 2, 2, Some(7)), [], "another generation");
    job.ends(at(2), Exit::Signal(9));
    assert_eq!(hear_of_a_loss(&ask(&mut job, 0, 2, 1, Some(7))), [at(0)]);
    assert_eq!(ask(&mut job, 0, 9, 1, Some(0)), [signal(0, Signal::Kill)]);
    job.ends(at(0), Exit::Signal(9));
    let reason = job.report().0.reason.unwrap();
    assert!(reason.contains("no other rank of this node"), "{reason}");

    // Who has not begun to take calls has nothing to make links with.
    let mut job = Job::running(3);
    job.greets(at(0));
    job.readies(at(0));
    assert_eq!(ask(&mut job, 0, 2, 1, Some(7)), []);
}

#[test]
fn two_workers_are_linked_as_often_as_they_ask() {
    let mut job = Job::ready(3);
    let link = || {
        Output::Link(Link {
            first: (at(2), Rank(2)),
            second: (at(1), Rank(1)),
            generation: FIRST,
        })
    };
    // The second one is for another group.
    assert_eq!(ask(&mut job, 2, 1, 1, None), [link()]);
    assert_eq!(ask(&mut job, 2, 1, 1, None), [link()]);
    assert_eq!(ask(&mut job, 0, 1, 2, None), [], "another generation");
    // A new generation starts anew.
    job.core.membership(testing::table(3, 2)).unwrap();
    assert_eq!(ask(&mut job, 1, 2, 1, None), [], "stale");
    assert_eq!(ask(&mut job, 1, 2, 2, None).len(), 1);
    // One that is gone is answered with its loss.
    job.ends(at(0), Exit::Signal(9));
    assert_eq!(hear_of_a_loss(&ask(&mut job, 1, 0, 2, None)), [at(1)]);
    // Itself and ranks of other nodes are faults.
    assert_eq!(ask(&mut job, 1, 1, 2, None), [signal(1, Signal::Kill)]);
    assert_eq!(ask(&mut job, 2, 9, 2, None), [signal(2, Signal::Kill)]);
}
