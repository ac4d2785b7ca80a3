//! The end of all operations of a rank, whatever it waits in.

use super::*;

const WHY: &str = "the job ends: its driver has ended it";

fn revoked() -> CollectiveError {
    CollectiveError::Revoked {
        reason: WHY.to_owned(),
    }
}

/// What two of three ranks do, while the third one does not come.
type Wait = fn(&Communicator) -> Result<(), CollectiveError>;

const OTHER: Rank = Rank(2);

const WAITS: [(&str, Wait); 9] = [
    ("all-reduce", |comm| {
        comm.all_reduce(&mut [1.0_f64; 1000], ReduceOp::Sum)
    }),
    ("barrier of a group", |comm| {
        let group = comm.group(&[Rank(0), Rank(1), OTHER])?;
        group.map_or(Ok(()), |group| group.barrier())
    }),
    ("gather of a group of two", |comm| {
        let group = comm.group(&[comm.rank(), OTHER])?;
        group.map_or(Ok(()), |group| group.all_gather(&[1_u8]).map(drop))
    }),
    ("receive", |comm| comm.receive::<u8>(OTHER).map(drop)),
    ("send", |comm| comm.send(&[1_u8; 1 << 20], OTHER)),
    ("join", |comm| comm.join().map(drop)),
    ("handles", |comm| {
        let start = |_| comm.start().all_reduce(vec![1], ReduceOp::Sum);
        let handles: Vec<_> = (0..10).map(start).collect();
        let mut results = handles.into_iter().map(|handle| handle.wait().map(drop));
        results.all(|result| result == Err(revoked()));
        comm.barrier()
    }),
    ("an operation with a name", |comm| {
        let named = comm.named("sum").all_reduce(vec![1], ReduceOp::Sum);
        named.wait().map(drop)
    }),
    ("a future", |comm| {
        let (tell, told) = channel();
        let own = comm.clone();
        let waiting = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = { runtime }.enable_all().build().unwrap();
            tell.send(runtime.block_on(own.barrier_async())).unwrap();
        });
        let result = told.recv().unwrap();
        waiting.join().unwrap();
        result
    }),
];

/// A rank is in an operation that has not ended, or waits for the turn of a name.
fn is_waiting(comm: &Communicator, what: &str) -> bool {
    what == "an operation with a name"
        || (comm.records().iter()).any(|record| record.ended == Duration::ZERO)
}

#[test]
fn a_revoked_communicator_ends_every_wait_over_every_link() {
    for kind in [Kind::Memory, Kind::Unix, Kind::Shared, Kind::Tls] {
        for linked in [true, false] {
            for (what, wait) in WAITS {
                let group = Group::new(kind, 3);
                if linked {
                    group.run(|comm| comm.barrier().unwrap());
                }
                let results: Vec<_> = std::thread::scope(|scope| {
                    let waiting: Vec<_> = (group.members[..2].iter())
                        .map(|comm| scope.spawn(|| wait(comm)))
                        .collect();
                    for comm in &group.members[..2] {
                        until(|| is_waiting(comm, what));
                    }
                    // Only that rank 0 ends is told to the other one by the links, which may then be the first to say so.
                    group.members[1].revoke(WHY);
                    group.members[0].revoke(WHY);
                    let results = waiting.into_iter().map(|one| one.join().unwrap());
                    results.collect()
                });
                let says_why = |result: &Result<(), CollectiveError>| {
                    (result.as_ref()).is_err_and(|error| error.to_string().contains(WHY))
                };
                assert!(
                    results.iter().all(says_why),
                    "{kind:?}, linked: {linked}, {what}: {results:?}"
                );
                assert_eq!(results[1], Err(revoked()), "{kind:?}, {linked}, {what}");
                // Nor does anything begin any more, in old groups or new ones.
                for (what, wait) in WAITS {
                    let result = wait(&group.members[1]);
                    assert_eq!(result, Err(revoked()), "{kind:?}, then {what}");
                }
            }
        }
    }
}

#[test]
fn a_loss_that_was_heard_before_is_named_and_one_after_is_not() {
    let group = Group::new(Kind::Unix, 3);
    group.members[0].rank_lost(OTHER, "killed by signal 9");
    group.members[0].revoke(WHY);
    let error = group.members[0].barrier().unwrap_err();
    assert_eq!(error.culprit_rank(), Some(OTHER), "{error}");
    group.members[1].revoke(WHY);
    // Others leave because the job ends.
    group.members[1].rank_lost(Rank(0), "its process ended with exit code 0");
    assert_eq!(group.members[1].barrier(), Err(revoked()));
    // A call that begins changes nothing.
    group.members[1].begin_call(CallId(9));
    assert_eq!(group.members[1].barrier(), Err(revoked()));
}
