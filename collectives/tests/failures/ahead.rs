//! What a peer has said for a later operation.

use super::*;

/// Rank 1 is ahead and has given up there. This rank, which waits for others and hears nothing for a while, sees that in an operation for
/// which it says nothing.
#[test]
fn what_was_seen_before_its_time_is_seen_again() {
    let runtime = runtime();
    let (connector, handle) = (Arc::new(NoConnector), runtime.handle().clone());
    let comm = Communicator::new(Rank(0), 4, GENERATION, JOB, connector, handle).unwrap();
    let [mut one, _two, _three] = [1, 2, 3].map(|rank| {
        let (mine, theirs) = MemoryLane::pair(1 << 20);
        let accepted = comm.acceptor().accept(Rank(rank), Box::new(mine));
        accepted.unwrap();
        theirs
    });
    // Nothing is due from rank 1 in a barrier of four.
    let tag = Tag::new(0, 1);
    let of_barrier = Header::Data(Data {
        generation: GENERATION,
        tag,
        operation: Operation {
            algorithm: Algorithm::Dissemination,
            ..Operation::new(OperationKind::Barrier, None, 0)
        },
        step: 1,
        offset: 0,
        length: 0,
    });
    write(&runtime, &mut one, &of_barrier.encode());
    let later = Cause::Failure(CollectiveError::PeerFailed {
        rank: Rank(1),
        call: CallId(0),
        reason: "later".to_owned(),
    });
    write(&runtime, &mut one, &notice(tag, &later));
    comm.set_timeout(Duration::from_millis(300));
    let error = comm.barrier().unwrap_err();
    assert!(matches!(error, CollectiveError::Deadline { .. }), "{error}");
    comm.set_timeout(LONG);
    let error = comm.barrier().unwrap_err();
    assert!(error.to_string().contains("later"), "{error}");
}
