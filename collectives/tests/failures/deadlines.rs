//! Ranks that come late, or not at all.

use super::*;

/// Whoever is there, whether they wait for all the late ones or only for each other.
#[test]
fn the_deadline_names_all_ranks_that_did_not_come() {
    type Body = fn(&Communicator) -> Result<(), CollectiveError>;
    let operations: [Body; 3] = [
        |comm| sum(comm, 50),
        Communicator::barrier,
        |comm| comm.broadcast(&mut [0_f32; 5], Rank(0)),
    ];
    let late: [&[u32]; 5] = [&[1, 2], &[0, 3, 4], &[1, 3, 5], &[0, 1, 2, 3, 4], &[5, 6]];
    let check = |kind, late: &[u32], algorithm, warm: bool| {
        let group = Group::new(kind, 7);
        if let Some(algorithm) = algorithm {
            force(&group, algorithm);
        }
        if warm {
            group.run(|comm| sum(comm, 50).unwrap());
        }
        group.set_timeout(Duration::from_millis(100));
        let is_late = |comm: &&Communicator| late.contains(&comm.rank().0);
        let (late, present): (Vec<&Communicator>, Vec<&Communicator>) =
            group.members.iter().partition(is_late);
        let late: Vec<Rank> = late.iter().map(|comm| comm.rank()).collect();
        let operations = match algorithm {
            Some(_) => &operations[..1],
            None => &operations[..],
        };
        for (number, operation) in operations.iter().enumerate() {
            let at = format!("{kind:?} {algorithm:?} {warm} {number}");
            for result in run(present.clone(), operation) {
                let error = result.unwrap_err();
                let CollectiveError::Deadline { late: named, .. } = &error else {
                    panic!("{at}: late {late:?}: {error}");
                };
                assert_eq!(*named, late, "{at}: {error}");
            }
        }
    };
    let algorithms = [None, Some(Algorithm::Ring), Some(Algorithm::Halving)];
    for (kind, warm) in [
        (Kind::Memory, false),
        (Kind::Unix, true),
        (Kind::Shared, false),
        (Kind::Shared, true),
    ] {
        let check = &check;
        std::thread::scope(|scope| {
            for (late, algorithm) in late
                .into_iter()
                .flat_map(|late| algorithms.map(|algorithm| (late, algorithm)))
            {
                scope.spawn(move || check(kind, late, algorithm, warm));
            }
        });
    }
}

/// A rank that has come, and then stands still (as by SIGSTOP).
#[test]
fn the_deadline_names_a_rank_that_stopped_in_the_middle() {
    at_once([Algorithm::Ring, Algorithm::Halving], |algorithm| {
        let group = Group::new(Kind::Memory, 4);
        force(&group, algorithm);
        let fault = Fault::freeze();
        group.set_fault(2, &fault);
        group.run(|comm| sum(comm, 10).unwrap());
        // Who is late must not be one that only got no processor: all begin together, and have time.
        group.set_timeout(Duration::from_secs(1));
        // Its own deadline is far away, and its links move nothing.
        group.members[2].set_timeout(Duration::from_secs(4));
        fault.arm(300_000);
        let begin = Barrier::new(4);
        let results = group.run(|comm| {
            begin.wait();
            sum(comm, 500_000)
        });
        for result in others(results, 2) {
            let error = result.unwrap_err();
            assert_eq!(error.culprit_rank(), Some(Rank(2)), "{algorithm}: {error}");
        }
    });
}

/// Ranks 0 and 2 are through with a barrier in which rank 1 stands still, and rank 0 never sends anything to rank 3.
#[test]
fn the_deadline_does_not_name_ranks_that_are_through() {
    let group = Group::new(Kind::Unix, 4);
    group.run(|comm| comm.all_to_all(&[1_u8; 4]).map(drop).unwrap());
    group.members[3].set_timeout(Duration::from_millis(300));
    let mut cx = Context::from_waker(Waker::noop());
    let mut stopped = Box::pin(group.members[1].barrier_async());
    assert!(stopped.as_mut().poll(&mut cx).is_pending());
    let others = [&group.members[0], &group.members[2], &group.members[3]];
    let [zero, two, three] = run(others, Communicator::barrier).try_into().unwrap();
    assert_eq!([zero, two], [Ok(()), Ok(())]);
    let Err(CollectiveError::Deadline { late, .. }) = three else {
        panic!("{three:?}");
    };
    assert_eq!(late, [Rank(1)]);
}

/// Lengths come before values. Rank 2 sends its own to rank 0 and goes no further: rank 0 is in the second part, and rank 1 misses
/// it in the first one.
#[test]
fn who_misses_a_rank_in_an_earlier_part_is_not_late() {
    let group = Group::new(Kind::Memory, 3);
    force(&group, Algorithm::Pairwise);
    let fault = Fault::freeze();
    group.set_fault(2, &fault);
    let exchange = |comm: &Communicator| comm.all_to_all_varcount(&[1_u8; 3], &[1; 3]).map(drop);
    group.run(|comm| exchange(comm).unwrap());
    group.set_timeout(Duration::from_millis(300));
    // One frame, with one length.
    fault.arm(HEADER + 8);
    let mut errors = group.run(exchange);
    errors.truncate(2);
    let parts = (group.members[..2].iter()).map(|comm| comm.records().pop().unwrap().tag.part);
    assert_eq!(parts.collect::<Vec<_>>(), [1, 0]);
    for error in errors.into_iter().map(Result::unwrap_err) {
        let CollectiveError::Deadline { late, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(*late, [Rank(2)], "{error}");
    }
}
