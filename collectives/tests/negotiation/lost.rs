//! Named operations when ranks come late, stand still, lose their links or are lost.

use super::*;

#[test]
fn a_rank_that_does_not_start_is_reported_and_named_at_the_deadline() {
    let group = Group::new(Kind::Unix, 3);
    for comm in &group.members {
        comm.set_stall_after(Duration::from_millis(100));
        comm.set_timeout(Duration::from_millis(900));
    }
    // All have links: then the late one can be asked what it does.
    group.run(|comm| comm.named("warm").barrier().wait().unwrap());
    let results = run(&group.members[1..], |comm| {
        let sum = comm.named("w").all_reduce(vec![1], ReduceOp::Sum);
        let max = comm.named("v").all_reduce(vec![1], ReduceOp::Max);
        let errors = (sum.wait().unwrap_err(), max.wait().unwrap_err());
        (errors, comm.stalls())
    });
    for ((error, _), stalls) in results {
        let CollectiveError::Deadline {
            late,
            operation,
            doing,
            ..
        } = &error
        else {
            panic!("{error}");
        };
        assert_eq!(late, &[Rank(0)]);
        let does = "it is in no operation; its last was barrier";
        assert!(
            matches!(&doing[..], [other] if other.rank == Rank(0) && other.doing.starts_with(does)),
            "{error}"
        );
        assert_eq!(operation, "all_reduce(sum) of 1 i32 named `w`");
        let text: Vec<String> = stalls.iter().map(ToString::to_string).collect();
        let text = text.join("\n");
        assert!(
            text.contains("named `v`") && text.contains("named `w`"),
            "{text}"
        );
        assert!(
            text.contains("for rank 0: it is in no operation; its last was barrier"),
            "{text}"
        );
    }
}

/// Rank 0 keeps the time. If it stands still, the others see to it themselves.
#[test]
fn a_rank_0_that_stands_still_is_named_by_those_that_wait() {
    let group = Group::new(Kind::Memory, 3);
    let fault = Fault::freeze();
    group.set_fault(0, &fault);
    group.run(|comm| comm.named("warm").barrier().wait().unwrap());
    group.set_timeout(Duration::from_millis(300));
    fault.arm(0);
    let begun = Instant::now();
    for result in run(&group.members[1..], |comm| {
        let one = comm.named("w").all_reduce(vec![1], ReduceOp::Sum);
        let other = comm.named("v").barrier();
        (one.wait_or_reclaim(), other.wait())
    }) {
        let failure = result.0.unwrap_err();
        assert!(
            matches!(failure.error, CollectiveError::Deadline { .. }),
            "{failure:?}"
        );
        assert_eq!(failure.error.culprit_rank(), Some(Rank(0)));
        assert_eq!(failure.input, Some(vec![1]));
        assert_eq!(result.1.unwrap_err().culprit_rank(), Some(Rank(0)));
    }
    assert!(begun.elapsed() < LONG / 2);
}

/// Links break while operations are negotiated and while they run. Whatever came of those, the ranks count alike afterwards.
#[test]
fn links_that_broke_in_the_middle_are_made_again_and_names_go_on() {
    let group = Group::new(Kind::Memory, 3);
    let fault = Fault::cut();
    for rank in 0..3 {
        group.set_fault(rank, &fault);
    }
    group.set_timeout(Duration::from_millis(700));
    let round = |comm: &Communicator| {
        let handles: Vec<Handle<Vec<u32>>> = (0..4)
            .map(|index| {
                comm.named(format!("t{index}"))
                    .all_reduce(vec![1; 100], ReduceOp::Sum)
            })
            .collect();
        let all = comm.named("all").all_gather_varcount(vec![7_u8]);
        let mut well = true;
        for handle in handles {
            match handle.wait() {
                Ok(sum) => assert_eq!(sum, [3; 100]),
                Err(_) => well = false,
            }
        }
        well & all.wait().is_ok()
    };
    for budget in [0, 30, 207, 400, 900, 2000, 3557, 6000] {
        assert_eq!(group.run(round), [true; 3]);
        fault.arm(budget);
        group.run(round);
        fault.disarm();
        // Who only reads may not have seen yet that a link broke.
        let mut attempts = 0;
        while group.run(round) != [true; 3] {
            attempts += 1;
            assert!(
                attempts < 5,
                "cut after {budget} bytes: they do not find together"
            );
        }
    }
}

/// A middlebox that cuts each link is no reason to make hundreds.
#[test]
fn links_that_are_cut_one_by_one_are_made_again_with_pauses() {
    let group = Group::new(Kind::Memory, 2);
    // More than a member's first word, which says that it is there.
    let fault = Fault::cut_each_after(8);
    for rank in 0..2 {
        group.set_fault(rank, &fault);
    }
    group.run(|comm| comm.named("warm").barrier().wait().unwrap());
    let links = group.links();
    fault.arm(0);
    let begun = Instant::now();
    // The member sees that its link is gone.
    let cut = group.members[1].named("w").barrier();
    until(|| group.links() >= links + 3);
    assert!(begun.elapsed() > Duration::from_millis(900));
    assert!(cut.wait().is_err());
}

/// Rank 0 may go as soon as it has heard of a failure. The others hear the same.
#[test]
fn what_rank_0_has_decided_is_told_before_it_goes() {
    for _ in 0..5 {
        let mut group = Group::new(Kind::Unix, 3);
        group.run(|comm| comm.named("warm").barrier().wait().unwrap());
        group.set_timeout(Duration::from_millis(100));
        let first = group.members.remove(0);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let comm = &group.members[0];
                comm.set_timeout(LONG);
                comm.named("w").barrier().wait().unwrap_err()
            });
            let error = first.named("w").barrier().wait().unwrap_err();
            drop(first);
            for error in [error, waits.join().unwrap()] {
                assert!(
                    matches!(&error, CollectiveError::Deadline { late, .. } if late == &[Rank(2)]),
                    "{error}"
                );
            }
        });
    }
}

/// The word of the node or the head ends what waits at once, and all to come, whether the lost rank has ever had a link.
#[test]
fn a_rank_that_is_said_to_be_lost_is_named_at_once() {
    for lost in [0, 2] {
        let group = Group::new(Kind::Memory, 3);
        let others = || {
            (0..3)
                .filter(|rank| *rank != lost)
                .map(|rank| &group.members[rank])
        };
        let start = |comm: &Communicator| comm.named("w").barrier();
        let waiting: Vec<_> = others().map(start).collect();
        let lost = Rank(lost as u32);
        others().for_each(|comm| comm.rank_lost(lost, "killed"));
        for handle in waiting.into_iter().chain(others().map(start)) {
            let error = handle.wait().unwrap_err();
            let expected = CollectiveError::PeerLost {
                rank: lost,
                reason: "killed".to_owned(),
            };
            assert_eq!(error, expected);
        }
    }
}

/// The end of a link is only a suspicion: a program that ends because of a loss is not named in place of the lost rank.
#[test]
fn the_rank_that_is_said_to_be_lost_is_named_and_not_one_that_leaves_because_of_it() {
    for leaves in [0, 1] {
        let mut group = Group::new(Kind::Unix, 3);
        group.run(|comm| comm.named("warm").barrier().wait().unwrap());
        let waiting = group.members[1 - leaves].named("w").barrier();
        drop(group.members.remove(leaves));
        let other = &group.members[0];
        // It is not named before the word can come.
        let waiting = waiting.wait_for(Duration::from_millis(100)).unwrap_err();
        other.rank_lost(Rank(2), "killed");
        let error = waiting.wait().unwrap_err();
        assert_eq!(error.culprit_rank(), Some(Rank(2)), "{error}");
    }
}

/// Nothing waits when the link of a rank ends, as the links of a network do. The ranks that know of the loss by then start nothing any more.
#[test]
fn a_rank_that_ended_before_a_name_is_started_is_named_alone() {
    let mut group = Group::new(Kind::Memory, 4);
    let fault = Fault::cut();
    for rank in 0..4 {
        group.set_fault(rank, &fault);
    }
    group.run(|comm| comm.named("warm").barrier().wait().unwrap());
    let requests = group.requests();
    drop(group.members.remove(2));
    // Rank 0 has seen the end, and asks for another link.
    until(|| group.requests() > requests);
    group.set_timeout(LONG / 4);
    let [zero, _one, three] = &group.members[..] else {
        unreachable!("three are left");
    };
    let begun = Instant::now();
    for waiting in [zero, three].map(|comm| comm.named("w").barrier()) {
        let error = waiting.wait().unwrap_err();
        let is_right = matches!(error, CollectiveError::Connect { rank: Rank(2), .. });
        assert!(is_right, "{error}");
    }
    assert!(begun.elapsed() < LONG / 8, "by the deadline");
}

/// What waits for a name ends when an operation without one has found a rank lost, which never had a link for names.
#[test]
fn a_loss_that_is_found_by_an_operation_without_a_name_ends_those_that_wait_for_one() {
    let mut group = Group::new(Kind::Memory, 3);
    group.run(|comm| comm.all_to_all(&[1_u8; 3]).map(drop).unwrap());
    group.set_timeout(LONG / 4);
    drop(group.members.remove(2));
    let waiting: Vec<_> = (group.members.iter())
        .map(|comm| comm.named("w").barrier())
        .collect();
    let is_right = |error: CollectiveError| {
        let is_right = matches!(error, CollectiveError::PeerLost { rank: Rank(2), .. });
        assert!(is_right, "{error}");
    };
    for found in group.run(Communicator::barrier) {
        is_right(found.unwrap_err());
    }
    for waiting in waiting {
        is_right(waiting.wait().unwrap_err());
    }
}

/// Rank 1 starts nothing, and says all the same which rank is lost: on its link for names, or on the one that it is asked for.
#[test]
fn a_loss_that_one_rank_knows_of_ends_what_waits_on_the_others() {
    for is_linked in [true, false] {
        let group = Group::new(Kind::Memory, 3);
        group.set_timeout(LONG / 4);
        if is_linked {
            group.run(|comm| comm.named("warm").barrier().wait().unwrap());
        }
        let waiting = [0, 2].map(|rank: usize| group.members[rank].named("w").barrier());
        group.members[1].rank_lost(Rank(2), "killed");
        for handle in waiting {
            let error = handle.wait().unwrap_err();
            let killed = matches!(&error, CollectiveError::PeerLost { rank: Rank(2), reason } if reason == "killed");
            assert!(killed, "{error}");
        }
    }
}
