//! Ranks that come late, or not at all.

use super::*;

#[test]
fn the_deadline_names_the_rank_that_did_not_come() {
    for world in [2_u32, 3, 8] {
        for late in [0, world - 1] {
            for algorithm in [Algorithm::Flat, Algorithm::Halving, Algorithm::Ring] {
                let group = Group::new(Kind::Memory, world);
                force(&group, algorithm);
                let warm = world % 2 == 0;
                if warm {
                    group.run(|comm| sum(comm, 50).unwrap());
                }
                group.set_timeout(Duration::from_millis(100));
                let present: Vec<&Communicator> = group
                    .members
                    .iter()
                    .filter(|comm| comm.rank() != Rank(late))
                    .collect();
                for result in run(present, |comm| sum(comm, 50)) {
                    let error = result.unwrap_err();
                    let CollectiveError::Deadline { late: named, .. } = &error else {
                        panic!("world {world} late {late} {algorithm}: {error}");
                    };
                    assert_eq!(*named, [Rank(late)], "world {world} {algorithm}: {error}");
                    assert!(error.is_retryable());
                    let text = error.to_string();
                    assert!(text.contains("all_reduce(sum) of 50 f64"), "{text}");
                }
            }
        }
    }
}

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
        (Kind::Unix, false),
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

/// A leaf of the tree waits for its parent, which waits for the root: the root is named, not the parent.
#[test]
fn the_deadline_names_a_late_root_and_not_those_that_wait_for_it() {
    let group = Group::new(Kind::Unix, 8);
    group.set_timeout(Duration::from_millis(100));
    let results = run(&group.members[1..], |comm| {
        comm.broadcast(&mut [0_f32; 5], Rank(0))
    });
    for result in results {
        let error = result.unwrap_err();
        assert_eq!(error.culprit_rank(), Some(Rank(0)), "{error}");
    }
}

/// A rank that has come, and then stands still (as by SIGSTOP).
#[test]
fn the_deadline_names_a_rank_that_stopped_in_the_middle() {
    for algorithm in [Algorithm::Ring, Algorithm::Halving] {
        let group = Group::new(Kind::Memory, 4);
        force(&group, algorithm);
        let fault = Fault::freeze();
        group.set_fault(2, &fault);
        group.run(|comm| sum(comm, 10).unwrap());
        // Who is late must not be one that only got no processor: all begin together, and have time.
        group.set_timeout(Duration::from_secs(1));
        // Its own deadline is far away, and its links move nothing.
        group.members[2].set_timeout(Duration::from_secs(6));
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
    }
}

#[test]
fn a_late_rank_hears_that_it_was_late_and_the_next_operation_works() {
    let group = Group::new(Kind::Unix, 3);
    group.run(|comm| sum(comm, 10).unwrap());
    group.set_timeout(Duration::from_millis(100));
    for result in run(&group.members[..2], |comm| sum(comm, 10)) {
        assert_eq!(result.unwrap_err().culprit_rank(), Some(Rank(2)));
    }
    let error = sum(&group.members[2], 10).unwrap_err();
    assert_eq!(
        error.culprit_rank(),
        Some(Rank(2)),
        "it is named itself: {error}"
    );
    group.set_timeout(LONG);
    group.run(|comm| sum(comm, 100_000).unwrap());
}
