//! Ranks that run out of data.

#![allow(clippy::unwrap_used, clippy::float_cmp)]

mod common;

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use common::value::{Value, combined, for_each_type, input};
use common::{Fault, Group, Kind, bodies, until};
use kolo_collectives::record::{Outcome, Record};
use kolo_collectives::schedule::{Algorithm, Tuning};
use kolo_collectives::{CollectiveError, Communicator, ReduceOp};
use kolo_transport::ids::Rank;

/// The neutral element of every operator, for every type, by every algorithm: the others see nothing of a rank that joined.
fn reduce_without<T: Value>(comm: &Communicator, gone: &[u32], length: usize) {
    let (me, world) = (comm.rank().0, comm.world_size());
    for op in ReduceOp::ALL {
        if matches!(op, ReduceOp::Adasum | ReduceOp::Average) || !op.allows(T::DTYPE) {
            continue;
        }
        let there = (0..world).filter(|rank| !gone.contains(rank));
        let expected = combined::<T>(op, there, length);
        let mut data = input::<T>(me, length);
        comm.all_reduce(&mut data, op).unwrap();
        assert_eq!(data, expected, "all_reduce({op}) of {}", T::DTYPE);
        let part = comm
            .reduce_scatter(&input::<T>(me, length), length, op)
            .unwrap();
        assert_eq!(part, expected[comm.rows_of(length, comm.rank())]);
        let root = Rank((0..world).find(|rank| !gone.contains(rank)).unwrap());
        let mut data = input::<T>(me, length);
        comm.reduce(&mut data, op, root).unwrap();
        if comm.rank() == root {
            assert_eq!(data, expected, "reduce({op}) of {}", T::DTYPE);
        }
    }
}

/// By every algorithm, on lanes that hold little; and in shared memory, where operations begin the short way and go over the links when
/// it is seen there that a rank has joined.
///
/// Horovod: `test_horovod_join_allreduce`.
#[test]
fn what_works_without_a_rank_works_by_every_algorithm_and_in_shared_memory() {
    let forced = Algorithm::ALL.map(|force| (Kind::Narrow(100), Some(force)));
    let chosen = [Kind::Memory, Kind::Shared].map(|kind| (kind, None));
    for (kind, force) in forced.into_iter().chain(chosen) {
        let group = Group::new(kind, 6);
        group.run(|comm| {
            comm.set_tuning(Tuning {
                force,
                ..Tuning::default()
            });
            comm.barrier().unwrap();
            for _ in 0..2 {
                if comm.rank().0 % 3 != 1 {
                    works_without_two_of_six(comm);
                    if force.is_none() {
                        for without in for_each_type!(reduce_without) {
                            without(comm, &[1, 4], 7);
                        }
                    }
                }
                comm.join().unwrap();
            }
        });
    }
}

/// Ranks 1 and 4 have joined.
fn works_without_two_of_six(comm: &Communicator) {
    let (me, root) = (comm.rank().0, Rank(3));
    let is_root = comm.rank() == root;
    reduce_without::<f32>(comm, &[1, 4], 50);
    let mut sum = [0; 5];
    comm.all_reduce_into(&[me; 5], &mut sum, ReduceOp::Sum)
        .unwrap();
    assert_eq!(sum, [10; 5]);
    let mut data = [me];
    comm.broadcast(&mut data, root).unwrap();
    assert_eq!(data, [3]);
    comm.barrier().unwrap();
    let got = comm.all_gather_varcount(&[me]).unwrap();
    assert_eq!(got.counts, [1, 0, 1, 1, 0, 1]);
    assert_eq!(got.values, [0, 2, 3, 5]);
    let got = comm.gather_varcount(&[me], root).unwrap();
    assert_eq!(got.map(|got| got.values), is_root.then(|| vec![0, 2, 3, 5]));
    let buffers = [&[me][..], &[], &[me; 2]];
    let got = comm.all_gather_grouped(&buffers).unwrap();
    assert_eq!(got[0].values, [0, 2, 3, 5]);
    assert_eq!(got[1].counts, [0; 6]);
    assert_eq!(got[2].counts, [2, 0, 2, 2, 0, 2]);
    let buffers: [(&[u64], usize); 2] = [(&[1; 6], 6), (&[2; 5], 5)];
    let got = comm.reduce_scatter_grouped(&buffers, ReduceOp::Sum);
    let rows = comm.rows_of(5, comm.rank()).len();
    assert_eq!(got.unwrap(), [vec![4], vec![8; rows]]);
    let text = is_root.then(|| "x".repeat(500));
    let got: String = comm.broadcast_object(text, root).unwrap();
    assert_eq!(got.len(), 500);
}

/// The rank that had most to do is the last one, and averages divide by the whole world.
///
/// Horovod: `test_horovod_join_last_joined_rank`.
#[test]
fn uneven_epochs_end_together_again_and_again() {
    for kind in [Kind::Unix, Kind::Shared] {
        let group = Group::new(kind, 4);
        group.run(uneven_epochs);
    }
}

fn uneven_epochs(comm: &Communicator) {
    for epoch in 0..5_u32 {
        let batches = (comm.rank().0 * 7 + epoch * 3) % 5;
        for batch in 0..batches {
            let mut data = [1.0_f64; 3];
            comm.all_reduce(&mut data, ReduceOp::Average).unwrap();
            let with_data = (0..4)
                .filter(|rank| (rank * 7 + epoch * 3) % 5 > batch)
                .count();
            assert_eq!(
                data,
                [with_data as f64 / 4.0; 3],
                "epoch {epoch}, batch {batch}"
            );
        }
        let last = comm.join().unwrap();
        let expected = (0..4)
            .max_by_key(|rank| ((rank * 7 + epoch * 3) % 5, *rank))
            .unwrap();
        assert_eq!(last, Rank(expected), "epoch {epoch}");
    }
}

/// Who waits in one group for the others to run out of data works in another one meanwhile.
#[test]
fn a_group_joins_while_another_one_works() {
    for kind in [Kind::Memory, Kind::Unix, Kind::Shared] {
        let group = Group::new(kind, 4);
        let worked = AtomicU32::new(0);
        group.run(|comm| {
            let me = comm.rank();
            let joining = comm.group(&[Rank(3), Rank(1), Rank(2)]).unwrap();
            let working = comm.group(&[Rank(2), Rank(0), Rank(1)]).unwrap();
            std::thread::scope(|scope| {
                if let Some(joining) = &joining {
                    scope.spawn(|| {
                        if me == Rank(3) {
                            until(|| worked.load(SeqCst) == 3);
                        }
                        // Ranks 1 and 2 have one batch and none; rank 3 comes late and has three.
                        for batch in 0..[0, 1, 0, 3][me.index()] {
                            let mut data = [1.0_f64];
                            joining.all_reduce(&mut data, ReduceOp::Average).unwrap();
                            let with_data = if batch == 0 { 2.0 } else { 1.0 };
                            assert_eq!(data, [with_data / 3.0], "{kind:?}");
                        }
                        // As it is called in this group.
                        assert_eq!(joining.join(), Ok(Rank(0)), "{kind:?}");
                    });
                }
                let Some(working) = &working else {
                    return;
                };
                let waits = |record: &Record| {
                    let joining = joining.as_ref().map(Communicator::group_id);
                    record.outcome == Outcome::Running && Some(record.group) == joining
                };
                if joining.is_some() {
                    until(|| comm.records().iter().any(waits));
                }
                for number in 0..30 {
                    let mut data = [me.0 + number];
                    working.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    assert_eq!(data, [3 * number + 3], "{kind:?}");
                }
                assert!(joining.is_none() || comm.records().iter().any(waits));
                worked.fetch_add(1, SeqCst);
                // And joins, too.
                working.join().unwrap();
            });
            // All ranks are still in step.
            assert_eq!(comm.all_gather(&[me.0]).unwrap(), [0, 1, 2, 3]);
        });
    }
}

/// What Adasum makes of vectors and of nothing are the vectors.
#[test]
fn adasum_without_a_rank_is_that_of_the_others() {
    let group = Group::new(Kind::Unix, 4);
    group.run(|comm| {
        let me = comm.rank().index();
        if me != 2 {
            let mut orthogonal = [0.0_f64; 4];
            orthogonal[me] = 3.0;
            comm.all_reduce(&mut orthogonal, ReduceOp::Adasum).unwrap();
            assert_eq!(orthogonal, [3.0, 3.0, 0.0, 3.0]);
            let mut alike = [1.5_f32; 7];
            comm.all_reduce(&mut alike, ReduceOp::Adasum).unwrap();
            assert_eq!(alike, [1.5; 7]);
        }
        comm.join().unwrap();
    });
}

/// They fail at once, by their own names, the others go on, and the rank that joined stays. Horovod: `test_horovod_join_allgather` and
/// `test_horovod_join_broadcast`.
#[test]
fn what_a_rank_without_data_can_not_do_fails_on_the_others_and_they_go_on() {
    let cases = bodies! { comm:
        comm.all_gather(&[1_u8]) => "all_gather of 1 u8";
        comm.all_to_all(&[1_u8; 3]) => "all_to_all of 1 u8";
        comm.gather(&[1_u8], Rank(0)) => "gather of 1 u8 to root 0";
        comm.scatter(&[1_u8; 3], 1, Rank(0)) => "scatter of 1 u8 from root 0";
        comm.broadcast(&mut [1_u8], Rank(1)) => "broadcast of 1 u8 from root 1";
        comm.reduce(&mut [1_u8], ReduceOp::Sum, Rank(1)) => "reduce(sum) of 1 u8 to root 1";
        comm.split(Some(1), 0) => "split";
        comm.trace() => "trace";
        comm.buffer::<f32>(9) => "buffer of f32, shape [9]";
    };
    for kind in [Kind::Memory, Kind::Unix, Kind::Shared] {
        let group = Group::new(kind, 3);
        group.run(|comm| {
            comm.barrier().unwrap();
            if comm.rank() != Rank(1) {
                for (body, name) in cases {
                    let error = body(comm).unwrap_err();
                    let text = format!("{name} is not possible: rank 1 has joined and has no data");
                    assert!(
                        error.to_string().contains(&text),
                        "{kind:?}, {name}: {error}"
                    );
                    assert_eq!(error.culprit_rank(), Some(Rank(1)));
                    let mut data = [1_u8];
                    comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    assert_eq!(data, [2], "{kind:?}, after {name}");
                }
                let error = comm.all_gather_object(&5_u32).unwrap_err();
                assert!(error.to_string().contains("rank 1 has joined"), "{error}");
            }
            comm.join().unwrap();
            for (body, _) in cases {
                body(comm).unwrap();
            }
            assert_eq!(comm.all_gather_object(&()).unwrap(), [(); 3]);
        });
    }
}

#[test]
fn ranks_that_disagree_beside_one_that_joined_hear_of_it() {
    let group = Group::new(Kind::Memory, 4);
    group.run(|comm| {
        let me = comm.rank().0;
        if me != 2 {
            let error = comm
                .all_reduce(&mut vec![0_u8; 1 + me as usize % 2], ReduceOp::Sum)
                .unwrap_err();
            assert!(matches!(error, CollectiveError::Mismatch { .. }), "{error}");
            let mut data = [1_u8];
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [3]);
        }
        comm.join().unwrap()
    });
}

#[test]
fn a_join_that_is_started_runs_by_itself_and_what_comes_after_it_waits() {
    let group = Group::new(Kind::Unix, 3);
    group.run(|comm| {
        let me = comm.rank().0;
        let sum = || comm.start().all_reduce(vec![1_u32], ReduceOp::Sum);
        let batches: Vec<_> = (0..=me).map(|_| sum()).collect();
        let join = comm.start().join();
        let after = sum();
        for (number, batch) in (0..).zip(batches) {
            // Ranks below have joined.
            assert_eq!(batch.wait().unwrap(), [3 - number]);
        }
        assert_eq!(join.wait().unwrap(), Rank(2));
        assert_eq!(after.wait().unwrap(), [3]);
    });
}

/// Buffers in shared memory, whichever rank comes first, and whatever they did before.
#[test]
fn shared_buffers_are_reduced_without_ranks_that_joined() {
    let group = Group::new(Kind::Shared, 3);
    for _ in 0..5 {
        group.run(|comm| {
            let me = comm.rank().0;
            let lengths = [5, 50_000];
            let mut buffers = lengths.map(|length| comm.buffer::<f32>(length).unwrap());
            for buffer in &mut buffers {
                buffer.fill(1.0);
                comm.all_reduce_buffer(buffer, ReduceOp::Sum).unwrap();
                buffer.fill(2.0);
            }
            if me < 2 {
                for buffer in &mut buffers {
                    for expected in [4.0, 8.0, 16.0] {
                        comm.all_reduce_buffer(buffer, ReduceOp::Sum).unwrap();
                        assert!(buffer.iter().all(|value| *value == expected), "{expected}");
                    }
                }
            }
            comm.join().unwrap();
            // All are there again.
            for buffer in &mut buffers {
                buffer.fill(2.0);
                comm.all_reduce_buffer(buffer, ReduceOp::Sum).unwrap();
                assert!(buffer.iter().all(|value| *value == 6.0));
            }
        });
    }
}

/// What a joined rank asks for is no other operation than that of a rank whose deadline has passed.
#[test]
fn a_deadline_beside_a_join_names_the_late_ranks() {
    for mine in [300, 60_000] {
        let group = Group::new(Kind::Memory, 4);
        common::force(&group, Algorithm::Ring);
        group.members[0].set_timeout(Duration::from_millis(mine));
        group.members[2].set_timeout(Duration::from_millis(60_300 - mine));
        std::thread::scope(|scope| {
            let join = scope.spawn(|| group.members[0].join().map(drop));
            let sum = scope.spawn(|| common::sum(&group.members[2], 50));
            for ended in [join, sum].map(|one| one.join().unwrap()) {
                let Err(CollectiveError::Deadline { late, .. }) = ended else {
                    panic!("{ended:?}");
                };
                assert_eq!(late, [Rank(1), Rank(3)]);
            }
        });
    }
}

/// What it waits for is done with its data, and what it has none for without, fused or not.
#[test]
fn a_rank_that_joins_before_its_names_have_ended_does_its_part_in_them() {
    // On a narrow link the coordinator hears of the join apart from what was asked for before.
    let kinds = [Kind::Unix, Kind::Narrow(100)].into_iter();
    for (kind, joins) in kinds.flat_map(|kind| [(kind, 0), (kind, 1)]) {
        let group = Group::new(kind, 2);
        group.run(|comm| {
            let start = |letter: &str| {
                let sum = |index| {
                    let named = comm.named(format!("{letter}{index}"));
                    named.all_reduce(vec![1_u32; 10], ReduceOp::Sum)
                };
                (0..20).map(sum).collect::<Vec<_>>()
            };
            let with_all = start("a");
            if comm.rank() == Rank(joins) {
                comm.join().unwrap();
            } else {
                for handle in start("b") {
                    assert_eq!(handle.wait(), Ok(vec![1; 10]));
                }
            }
            for handle in with_all {
                assert_eq!(handle.wait(), Ok(vec![2; 10]));
            }
            if comm.rank() != Rank(joins) {
                comm.join().unwrap();
            }
        });
    }
}

enum Seen {
    Waits,
    Ended(Result<Vec<u32>, CollectiveError>),
}

/// A rank that has joined no more starts a named operation when another one is seen to wait for it there.
fn sums_with_a_rank_that_is_late(group: &Group, late: usize) {
    let [other, late] = [1 - late, late].map(|rank| &group.members[rank]);
    let (seen, events) = std::sync::mpsc::channel();
    let waits = std::sync::Mutex::new(seen.clone());
    other.on_stall(move |_| waits.lock().unwrap().send(Seen::Waits).unwrap_or_default());
    let sum = |comm: &Communicator| comm.named("sum").all_reduce(vec![1_u32], ReduceOp::Sum);
    std::thread::scope(|scope| {
        let start = || {
            let (seen, handle) = (seen.clone(), sum(other));
            scope.spawn(move || seen.send(Seen::Ended(handle.wait())).unwrap_or_default());
        };
        start();
        loop {
            match events.recv().unwrap() {
                Seen::Waits => break,
                // It began before rank 0 heard that the join has failed.
                Seen::Ended(Err(error)) => {
                    assert!(error.to_string().contains("join has failed"), "{error}");
                    start();
                }
                Seen::Ended(Ok(sum)) => panic!("{sum:?} without rank {}", late.rank()),
            }
        }
        assert_eq!(sum(late).wait(), Ok(vec![2]));
        let ended = events.iter().find_map(|seen| match seen {
            Seen::Ended(ended) => Some(ended),
            Seen::Waits => None,
        });
        assert_eq!(ended, Some(Ok(vec![2])));
    });
}

#[test]
fn a_rank_whose_join_failed_is_waited_for_by_names() {
    for joins in [0, 1] {
        let group = Group::new(Kind::Unix, 2);
        for comm in &group.members {
            comm.set_stall_after(Duration::from_millis(10));
        }
        group.run(|comm| comm.named("warm").barrier().wait().unwrap());
        let late = &group.members[joins];
        late.set_timeout(Duration::from_millis(50));
        let error = late.join().unwrap_err();
        assert!(matches!(error, CollectiveError::Deadline { .. }), "{error}");
        group.set_timeout(common::LONG);
        sums_with_a_rank_that_is_late(&group, joins);
    }
}

/// Its link for names breaks, and nothing is to be asked for: that it has joined is said again.
#[test]
fn a_rank_that_has_joined_is_linked_again_and_takes_part() {
    let group = Group::new(Kind::Memory, 2);
    group.run(|comm| comm.barrier().unwrap());
    // Only links that are made from now on break, and those for operations without names are there.
    let fault = Fault::cut();
    for rank in 0..2 {
        group.set_fault(rank, &fault);
    }
    group.run(|comm| comm.named("warm").barrier().wait().unwrap());
    let [with_data, joined] = [0, 1].map(|rank| &group.members[rank]);
    std::thread::scope(|scope| {
        let join = scope.spawn(|| joined.join());
        with_data.set_timeout(Duration::from_secs(1));
        let sum = || with_data.named("sum").all_reduce(vec![1], ReduceOp::Sum);
        assert_eq!(sum().wait(), Ok(vec![1]));
        fault.arm(0);
        // Who only reads finds it out when something is written; if they found it out before, the link is there again.
        drop(sum().wait());
        fault.disarm();
        let done = (0..5).find_map(|_| sum().wait().ok());
        assert_eq!(done, Some(vec![1]), "it does not take part any more");
        with_data.set_timeout(common::LONG);
        with_data.join().unwrap();
        join.join().unwrap().unwrap();
    });
}
