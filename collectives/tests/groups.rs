//! Groups of some of the ranks: made, split, in calls, and when ranks are late, fail or are lost. Several at work at once are in
//! `operations`.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod common;

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use common::{Fault, Group, Kind, LONG, at_once, run, until};
use kolo_collectives::schedule::Layout;
use kolo_collectives::{CollectiveError, Communicator, GroupId, ReduceOp};
use kolo_transport::ids::{CallId, Rank};

fn ranks(numbers: &[u32]) -> Vec<Rank> {
    numbers.iter().copied().map(Rank).collect()
}

#[test]
fn a_group_has_its_own_ranks_in_the_order_given() {
    let group = Group::new(Kind::Unix, 5);
    group.run(|comm| {
        let Some(some) = comm.group(&ranks(&[4, 0, 3])).unwrap() else {
            assert!([Rank(1), Rank(2)].contains(&comm.rank()));
            return;
        };
        assert_eq!(some.members(), ranks(&[4, 0, 3]));
        assert_eq!(some.world_size(), 3);
        assert_eq!(some.rank_of(comm.rank()), Some(some.rank()));
        assert_eq!(some.rank_of(Rank(1)), None);
        // A group of a group, and one to one.
        if let Some(two) = some.group(&ranks(&[2, 0])).unwrap() {
            assert_eq!(two.members(), ranks(&[3, 4]));
            assert_eq!(two.all_gather(&[comm.rank().0]).unwrap(), [3, 4]);
        }
        match some.rank() {
            Rank(0) => some.send(&[9_u8], Rank(1)).unwrap(),
            Rank(1) => assert_eq!(some.receive::<u8>(Rank(0)).unwrap(), [9]),
            _ => {}
        }
    });
    for (given, text) in [
        (&[][..], "a group of no ranks"),
        (&[0, 1, 0], "names rank 0 twice"),
        (&[0, 5], "names rank 5: there are ranks 0 to 4"),
    ] {
        let error = group.members[0].group(&ranks(given)).unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
    }
}

#[test]
fn a_split_orders_by_key_and_leaves_out_who_has_no_color() {
    let group = Group::new(Kind::Memory, 6);
    group.run(|comm| {
        let me = comm.rank().0;
        let color = (me != 5).then_some(me % 2);
        let Some(part) = comm.split(color, -i64::from(me)).unwrap() else {
            assert_eq!(me, 5);
            return;
        };
        let expected = if me % 2 == 0 {
            ranks(&[4, 2, 0])
        } else {
            ranks(&[3, 1])
        };
        assert_eq!(part.members(), expected);
        let mut sum = [me];
        part.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [if me % 2 == 0 { 6 } else { 4 }]);
    });
}

#[test]
fn local_and_cross_follow_the_layout() {
    let group = Group::new(Kind::Memory, 5);
    group.run(|comm| {
        comm.set_layout(Layout::of_hosts(&["a", "b", "a", "b", "a"]))
            .unwrap();
        let (local, cross) = (comm.local().unwrap(), comm.cross().unwrap());
        let me = comm.rank().0;
        let mates = if me % 2 == 0 {
            ranks(&[0, 2, 4])
        } else {
            ranks(&[1, 3])
        };
        assert_eq!(local.members(), mates);
        assert_eq!(local.layout().hosts(), 1);
        let same = [&[0, 1][..], &[0, 1], &[2, 3], &[2, 3], &[4]][me as usize];
        assert_eq!(cross.members(), ranks(same));
        assert_eq!(cross.layout().hosts(), same.len() as u32);
        // Sum over a host, then over hosts.
        let mut data = [1_u32];
        local.reduce(&mut data, ReduceOp::Sum, Rank(0)).unwrap();
        if local.rank() == Rank(0) {
            cross.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        }
        local.broadcast(&mut data, Rank(0)).unwrap();
        assert_eq!(data, [5]);
    });
}

/// Horovod: `test_static`, `test_multi_comm` and `test_horovod_add_get_remove_process_set`. Groups overlap, come in any order, and are
/// made again: each is one of its own, with one id on all its members, and goes with its communicator.
#[test]
fn groups_are_told_apart_by_their_ids() {
    let sets: [&[u32]; 5] = [&[0], &[1, 2, 3], &[3, 2, 1], &[0, 1, 2, 3], &[0, 3]];
    let group = Group::new(Kind::Unix, 4);
    group.run(|comm| {
        let me = comm.rank().0;
        let mut ids = vec![comm.group_id()];
        assert_eq!(ids, [GroupId::WORLD]);
        for _ in 0..3 {
            let halves = [[0, 2], [1, 3]];
            let half = &halves[me as usize % 2][..];
            let split = comm.split(Some(me % 2), i64::from(me)).unwrap();
            let made = sets.map(|set| (comm.group(&ranks(set)).unwrap(), set));
            for (group, set) in made.into_iter().chain([(split, half)]) {
                assert_eq!(group.is_some(), set.contains(&me));
                let Some(group) = group else { continue };
                let id = group.group_id();
                assert!(!ids.contains(&id) && id.to_string().starts_with("group "));
                ids.push(id);
                assert_eq!(group.members(), ranks(set));
                assert_eq!(group.all_gather(&[id.0]).unwrap(), vec![id.0; set.len()]);
                assert_eq!(group.all_gather(&[me]).unwrap(), set);
            }
        }
    });
}

/// Horovod: `test_process_set_barrier_op`, `test_global_barrier_op` and `test_horovod_barrier`.
#[test]
fn a_barrier_waits_for_all_its_ranks_and_for_no_others() {
    let [passed, waiting, came] = [0; 3].map(AtomicU32::new);
    Group::new(Kind::Unix, 4).run(|comm| {
        let half = comm.split(Some(comm.rank().0 % 2), 0).unwrap().unwrap();
        match comm.rank() {
            Rank(0) => {
                until(|| passed.load(SeqCst) == 2 && waiting.load(SeqCst) == 1);
                came.fetch_add(1, SeqCst);
                half.barrier().unwrap();
            }
            Rank(2) => {
                let barrier = half.start().barrier();
                assert!(!barrier.poll(), "rank 0 is not there");
                waiting.fetch_add(1, SeqCst);
                barrier.wait().unwrap();
                assert!(came.load(SeqCst) > 0);
            }
            _ => {
                half.barrier().unwrap();
                passed.fetch_add(1, SeqCst);
            }
        }
        for round in 1..=10 {
            came.fetch_add(1, SeqCst);
            comm.barrier().unwrap();
            assert!(came.load(SeqCst) > 4 * round);
        }
    });
}

#[test]
fn errors_of_a_group_name_ranks_of_the_job() {
    let group = Group::new(Kind::Unix, 4);
    let fault = Fault::kill();
    group.set_fault(1, &fault);
    let results = group.run(|comm| {
        let some = comm.group(&ranks(&[3, 1, 2])).unwrap()?;
        some.barrier().unwrap();
        Some((some.clone(), some))
    });
    let members: Vec<Communicator> = results
        .into_iter()
        .flatten()
        .map(|(member, _)| member)
        .collect();
    // Ranks that disagree.
    let errors = run(&members, |comm| {
        let is_two = comm.members()[comm.rank().index()] == Rank(2);
        let mut data = vec![0_u8; 1 + usize::from(is_two)];
        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap_err()
    });
    for error in errors {
        let CollectiveError::Mismatch { rank, other, .. } = error else {
            panic!("{error}");
        };
        let both = [rank, other];
        assert!(both.contains(&Rank(2)) && !both.contains(&Rank(0)));
    }
    // A lost rank.
    fault.arm(0);
    let begun = Instant::now();
    let results = run(&members, |comm| {
        (comm.members()[comm.rank().index()], comm.barrier())
    });
    assert!(begun.elapsed() < LONG / 2);
    for (rank, result) in results {
        let error = result.unwrap_err();
        if rank != Rank(1) {
            assert_eq!(error.culprit_rank(), Some(Rank(1)), "{error}");
        }
    }
    // Whoever asks the communicator of all ranks hears of it.
    let error = group.members[3].last_failure().unwrap();
    assert_eq!(error.culprit_rank(), Some(Rank(1)));
}

#[test]
fn calls_and_losses_reach_all_groups() {
    let group = Group::new(Kind::Unix, 3);
    let pairs: Vec<Communicator> = group
        .run(|comm| {
            let pair = comm.group(&ranks(&[0, 1])).unwrap()?;
            pair.barrier().unwrap();
            Some(pair)
        })
        .into_iter()
        .flatten()
        .collect();
    for comm in &group.members {
        comm.begin_call(CallId(1));
    }
    run(&pairs, |comm| comm.barrier().unwrap());
    // Rank 1 fails in the call; rank 0 waits for it in the group.
    let result = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| pairs[0].barrier());
        group.members[1].abort_call(CallId(1), "user code panicked");
        waiting.join().unwrap()
    });
    let expected = CollectiveError::PeerFailed {
        rank: Rank(1),
        call: CallId(1),
        reason: "user code panicked".to_owned(),
    };
    assert_eq!(result, Err(expected));
    for comm in &group.members {
        comm.begin_call(CallId(2));
    }
    run(&pairs, |comm| comm.barrier().unwrap());
    // The control plane says that rank 1 is lost.
    group.members[0].rank_lost(Rank(1), "its host is gone");
    let error = pairs[0].barrier().unwrap_err();
    assert_eq!(error.culprit_rank(), Some(Rank(1)));
    // Rank 2 is not in the group: nothing changes there.
    group.members[1].rank_lost(Rank(2), "killed");
    pairs[1].set_timeout(Duration::from_millis(50));
    let error = pairs[1].barrier().unwrap_err();
    assert!(!error.to_string().contains("killed"), "{error}");
}

/// Those that wait in it have asked by then, and were answered on the links that the operation goes over in the end. Links for names come
/// before the group, and wait until somebody makes it.
#[test]
fn a_group_that_one_rank_makes_late_works() {
    let check = |(kind, (late, by, has_name))| {
        let group = Group::new(kind, 3);
        group.run(|comm| {
            if comm.rank() == Rank(late) {
                std::thread::sleep(Duration::from_millis(by));
            }
            let members = comm.group(&ranks(&[1, 2, 0])).unwrap().unwrap();
            let by_name = || {
                let name = members.named("a").all_gather(vec![comm.rank().0]);
                assert_eq!(name.wait().unwrap(), [1, 2, 0], "{kind:?}, {late} is late");
            };
            if has_name {
                by_name();
            }
            for length in [200_000, 3] {
                let mut data = vec![comm.rank().0; length];
                members.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert_eq!(data, vec![3; length], "{kind:?}, {late} is late");
            }
            by_name();
        });
    };
    // They ask after 0.1 s and after 1 s, and have nobody to ask before.
    let times = [50, 300, 1500].into_iter();
    let ways = times.flat_map(|by| [(0, by, false), (2, by, false), (0, by, true), (2, by, true)]);
    let kinds = [Kind::Memory, Kind::Unix, Kind::Shared, Kind::Tls].into_iter();
    at_once(
        kinds.flat_map(|kind| ways.clone().map(move |way| (kind, way))),
        check,
    );
}

/// Who has waited for a rank that had not made the group gives up, and both go on there.
#[test]
fn a_group_that_one_rank_makes_too_late_stays_in_step() {
    let check = |(kind, late)| {
        let group = Group::new(kind, 2);
        let is_over = std::sync::Barrier::new(2);
        group.run(|comm| {
            let sum = |members: &Communicator| {
                let mut data = vec![comm.rank().0 + 1; 100];
                members.all_reduce(&mut data, ReduceOp::Sum).map(|()| data)
            };
            let make = || comm.group(&ranks(&[0, 1])).unwrap().unwrap();
            let members = if comm.rank() == Rank(late) {
                is_over.wait();
                let members = make();
                let error = sum(&members).unwrap_err();
                assert!(error.is_retryable(), "{kind:?}: {error}");
                members
            } else {
                comm.set_timeout(Duration::from_secs(2));
                let members = make();
                let error = sum(&members).unwrap_err();
                let text = error.to_string();
                let says = format!(
                    "rank {late}: it has not made this group; it has done no operation yet"
                );
                assert!(text.contains(&says), "{kind:?}: {text}");
                is_over.wait();
                members.set_timeout(LONG);
                members
            };
            for _ in 0..3 {
                assert_eq!(sum(&members).unwrap(), [3; 100], "{kind:?}, {late} is late");
            }
        });
    };
    let kinds = [Kind::Memory, Kind::Unix, Kind::Shared, Kind::Tls].into_iter();
    at_once(kinds.flat_map(|kind| [(kind, 0), (kind, 1)]), check);
}
