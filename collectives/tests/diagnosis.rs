//! The flight recorder, counters, stall reports, traces.

#![allow(clippy::unwrap_used)]

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Group, Kind, at_once, run, until};
use kolo_collectives::operation::OperationKind;
use kolo_collectives::record::{Moved, Outcome};
use kolo_collectives::{CollectiveError, Communicator, ReduceOp};
use kolo_transport::ids::Rank;

#[test]
fn what_goes_through_shared_memory_is_counted() {
    let group = Group::new(Kind::Shared, 3);
    let of = |comm: &Communicator| -> (Moved, Vec<(Rank, Moved)>) {
        let counters = comm.counters();
        let mut shm = counters.lanes.iter().filter(|(kind, _)| *kind == "shm");
        (shm.next().unwrap().1, counters.peers)
    };
    group.run(|comm| {
        let me = comm.rank();
        comm.all_reduce(&mut [1_u8], ReduceOp::Sum).unwrap();
        let (first, _) = of(comm);
        // Below any length from which on a rank does not read all that the others give.
        let gathered = comm.all_gather(&[7_u8; 100]).unwrap();
        assert_eq!(gathered, [7; 300]);
        let (then, peers) = of(comm);
        assert_eq!(then.sent - first.sent, 100, "once for all");
        assert_eq!(then.received - first.received, 200);
        let from: u64 = peers.iter().map(|(_, moved)| moved.received).sum();
        assert!(from >= then.received && peers.iter().all(|(rank, _)| *rank != me));
        // Those of a group that is gone stay, and so do the ranks' names in it.
        if me.0 < 2 {
            let pair = comm.group(&[Rank(0), Rank(1)]).unwrap().unwrap();
            pair.all_gather(&[1_u8; 1000]).unwrap();
            drop(pair);
            let pair = comm.group(&[Rank(1), Rank(0)]).unwrap().unwrap();
            pair.all_gather(&[1_u8; 1000]).unwrap();
            let (last, peers) = of(comm);
            let of_other = |peers: &[(Rank, Moved)]| {
                let other = Rank(1 - me.0);
                peers.iter().find(|(rank, _)| *rank == other).unwrap().1
            };
            assert_eq!(last.received - then.received, 2000);
            assert!(of_other(&peers).received >= 2100, "{peers:?}");
        } else {
            assert!(comm.group(&[Rank(0), Rank(1)]).unwrap().is_none());
            assert!(comm.group(&[Rank(1), Rank(0)]).unwrap().is_none());
        }
    });
}

#[test]
fn the_recorder_says_what_was_done_how_and_when() {
    let group = Group::new(Kind::Unix, 3);
    group.run(|comm| {
        let mut data = vec![1.0_f32; 1000];
        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        comm.barrier().unwrap();
        let length = 1 + comm.rank().index() / 2;
        comm.all_reduce(&mut vec![0_u8; length], ReduceOp::Max)
            .unwrap_err();
        comm.named("w")
            .all_reduce(vec![1_u8], ReduceOp::Sum)
            .wait()
            .unwrap();
        let records = comm.records();
        let texts: Vec<String> = records
            .iter()
            .map(|record| record.operation.to_string())
            .collect();
        assert_eq!(texts[..2], ["all_reduce(sum) of 1000 f32", "barrier"]);
        let first = &records[0];
        assert_eq!((first.bytes(), first.outcome), (4000, Outcome::Done));
        assert!(first.sent > 0 && first.received > 0, "{first:?}");
        // Others in a run of all tests over them.
        let lanes = first.lanes.to_string();
        let is_known = |lane| ["unix", "shm-ring", "shm", "tls"].contains(&lane);
        assert!(lanes.split(',').all(is_known), "{lanes}");
        assert_eq!(records[2].outcome, Outcome::Failed);
        assert_eq!(records[3].name.as_str(), "w");
        for record in &records {
            assert!(record.asked <= record.started && record.started <= record.ended);
        }
        let counters = comm.counters();
        let (_, counted) = counters
            .operations
            .iter()
            .find(|(kind, _)| *kind == OperationKind::AllReduce)
            .unwrap();
        assert_eq!((counted.done, counted.failed, counted.bytes), (2, 1, 4001));
        let sent: u64 = counters.peers.iter().map(|(_, moved)| moved.sent).sum();
        // What a rank gives in shared memory is for all.
        let lanes = counters.lanes.iter().filter(|(kind, _)| *kind != "shm");
        let over_lanes: u64 = lanes.map(|(_, moved)| moved.sent).sum();
        assert_eq!(sent, over_lanes);
        assert!(counters.peers.iter().all(|(rank, _)| *rank != comm.rank()));
    });
}

/// The first operation of a group finds out whether memory is shared, and others may begin meanwhile.
#[test]
fn every_operation_has_one_record_whatever_begins_beside_it() {
    for kind in [Kind::Shared, Kind::Unix] {
        Group::new(kind, 2).run(|comm| {
            let (me, peer) = (comm.rank().0, Rank(1 - comm.rank().0));
            std::thread::scope(|scope| {
                scope.spawn(move || match me {
                    0 => comm.send(&[1_u32; 1000], peer).unwrap(),
                    _ => drop(comm.receive::<u32>(peer).unwrap()),
                });
                for _ in 0..3 {
                    comm.all_reduce(&mut [1.0_f32; 10], ReduceOp::Sum).unwrap();
                }
            });
            let records = comm.records();
            let counted = comm.counters().operations.into_iter();
            let done: u64 = counted.map(|(_, count)| count.done).sum();
            assert_eq!(records.len() as u64, done, "{kind:?}: {records:?}");
            for record in &records {
                assert!(record.outcome == Outcome::Done && record.lanes.names().count() > 0);
            }
        });
    }
}

#[test]
fn what_never_ran_is_in_the_records_too() {
    let group = Group::new(Kind::Unix, 2);
    group.run(|comm| {
        comm.all_to_all(&[1_u16; 3]).unwrap_err();
        comm.reduce(&mut [1_u8], ReduceOp::Adasum, Rank(0))
            .unwrap_err();
        comm.gather(&[1_u8; 5], Rank(2)).unwrap_err();
        // Other lengths by one name: it never is its turn.
        let odd = vec![1_u8; 1 + comm.rank().index()];
        let odd = comm.named("odd").all_reduce(odd, ReduceOp::Sum);
        odd.wait().unwrap_err();
        let long = comm.named("n".repeat(1 << 20));
        let long = long.all_reduce(vec![1_u8; 7], ReduceOp::Sum);
        assert!(matches!(long.wait(), Err(CollectiveError::Invalid { .. })));
        let records = comm.records();
        for (record, (begins, ends)) in records.iter().zip([
            ("all_to_all", ""),
            ("reduce", ""),
            ("gather", ""),
            ("all_reduce(sum) of", "odd"),
            ("all_reduce(sum) of 7 u8", "nnnn"),
        ]) {
            assert_eq!(record.outcome, Outcome::Failed);
            assert!(record.asked <= record.started && record.started <= record.ended);
            let is_right = record.operation.to_string().starts_with(begins)
                && record.name.as_str().ends_with(ends);
            assert!(is_right, "{record:?}");
        }
        let failed: u64 = (comm.counters().operations.iter())
            .map(|(_, count)| count.failed)
            .sum();
        assert_eq!((records.len(), failed), (5, 5));
    });
}

/// What does an operation wait for? The report says who, and what that rank does instead.
#[test]
fn a_stall_names_who_did_not_come_and_what_it_does() {
    at_once([Kind::Unix, Kind::Shared], |kind| {
        let group = Group::new(kind, 4);
        let heard = Arc::new(Mutex::new(Vec::new()));
        for comm in &group.members {
            comm.set_stall_after(Duration::from_millis(1500));
            let (heard, rank) = (Arc::clone(&heard), comm.rank());
            comm.on_stall(move |report| heard.lock().unwrap().push((rank, report.to_string())));
        }
        group.run(|comm| comm.all_gather(&[1_u8]).map(drop).unwrap());
        group.run(|comm| {
            if comm.rank() == Rank(2) {
                // It is busy with something else until all have missed it.
                until(|| heard.lock().unwrap().len() == 3);
            }
            comm.all_reduce(&mut [1_u32; 5], ReduceOp::Sum).unwrap();
        });
        let heard = heard.lock().unwrap();
        let mut ranks: Vec<Rank> = heard.iter().map(|(rank, _)| *rank).collect();
        ranks.sort();
        assert_eq!(ranks, [Rank(0), Rank(1), Rank(3)], "{kind:?}: {heard:?}");
        for (_, text) in &*heard {
            assert!(
                text.starts_with(
                    "all_reduce(sum) of 5 u32 (operation 1 of call 0, all ranks) has waited 1."
                ),
                "{kind:?}: {text}"
            );
            assert!(
                text.contains("for rank 2: it is in no operation; its last was all_gather of 1 u8"),
                "{kind:?}: {text}"
            );
        }
        let stalls = group.members[0].stalls();
        assert_eq!(stalls.len(), 1);
        assert_eq!(stalls[0].missing[0].rank, Rank(2));
        assert!(group.members[2].stalls().is_empty());
        drop(heard);
        // Who has waited for long answers later, when it does nothing.
        group.set_timeout(Duration::from_secs(2));
        for error in run(&group.members[1..], |comm| comm.barrier().unwrap_err()) {
            let CollectiveError::Deadline { late, doing, .. } = &error else {
                panic!("{kind:?}: {error}");
            };
            assert_eq!(late, &[Rank(0)], "{kind:?}: {error}");
            let says = "it is in no operation; its last was all_reduce";
            assert!(doing[0].doing.starts_with(says), "{kind:?}: {error}");
        }
    });
}

/// It is reported once also at the deadline: by default both are a minute. A rank that waits in an operation of another group is not
/// missing without a trace.
#[test]
fn a_stall_that_is_due_at_the_deadline_is_reported_once_and_tells_of_other_groups() {
    at_once([Kind::Unix, Kind::Shared], |kind| {
        let limit = Duration::from_millis(1500);
        let group = Group::new(kind, 3);
        // Ranks 0 and 2 are in a barrier of all, rank 1 in one of the other group: nobody can go on.
        group.run(|comm| {
            comm.barrier().unwrap();
            comm.set_stall_after(limit);
            comm.set_timeout(limit);
            let pair = comm.group(&[Rank(1), Rank(2)]).unwrap();
            let result = match &pair {
                Some(pair) if comm.rank() == Rank(1) => pair.barrier(),
                _ => comm.barrier(),
            };
            let is_deadline = matches!(result, Err(CollectiveError::Deadline { .. }));
            assert!(is_deadline, "{kind:?}: {result:?}");
            let stalls = comm.stalls();
            let [stall] = &stalls[..] else {
                panic!("{kind:?}: {stalls:?}");
            };
            // It may have heard a little sooner that the other one's time is over.
            let is_due = stall.waited + Duration::from_millis(300) >= limit;
            assert!(is_due, "{kind:?}: {stall}");
            let text = match comm.rank() {
                Rank(1) => "rank 2: it is in barrier",
                _ => "rank 1: it is in barrier (operation 0 of call 0, group ",
            };
            assert!(stall.to_string().contains(text), "{kind:?}: {stall}");
            // It stays: who leaves counts as lost.
            pair
        });
    });
}

/// Horovod: `test_timeline` and `test_timeline_api`. Nothing is switched on or off, and nobody names a file: a trace has all so far.
#[test]
fn a_trace_has_all_ranks_on_one_clock() {
    // The ranks' clocks begin at times that differ by far more than the test allows.
    let group = Group::one_by_one(Kind::Unix, 3, Duration::from_millis(120));
    let traces = group.run(|comm| {
        let part = comm.group(&[Rank(0), Rank(1)]).unwrap();
        comm.barrier().unwrap();
        if let Some(part) = part {
            part.named("grad\"1")
                .all_reduce(vec![1_u8], ReduceOp::Sum)
                .wait()
                .unwrap();
        }
        // All leave it at about the same time.
        comm.barrier().unwrap();
        comm.trace().unwrap()
    });
    assert!(traces[1].is_none() && traces[2].is_none());
    let trace: serde_json::Value = serde_json::from_str(traces[0].as_ref().unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let named = |name: &str| -> Vec<&serde_json::Value> {
        events
            .iter()
            .filter(|event| event["name"] == name)
            .collect()
    };
    assert_eq!(named("process_name").len(), 3);
    // Each line of a viewer has one name.
    let place = |event: &serde_json::Value| (event["pid"].to_string(), event["tid"].to_string());
    let mut lines: Vec<_> = named("thread_name").into_iter().map(place).collect();
    lines.sort_unstable();
    let mut used: Vec<_> = (events.iter())
        .filter(|event| event["ph"] == "X")
        .map(place)
        .collect();
    used.sort_unstable();
    used.dedup();
    assert_eq!(lines, used);
    let of_all = |event: &&&serde_json::Value| event["args"]["name"] == "all ranks";
    assert_eq!(named("thread_name").iter().filter(of_all).count(), 3);
    let barriers = named("barrier");
    assert_eq!(barriers.len(), 6);
    // Of each barrier, nobody leaves before all have come: on one clock their spans overlap.
    for number in [0, 1] {
        let spans: Vec<(f64, f64)> = barriers
            .iter()
            .filter(|event| event["args"]["number"] == number)
            .map(|event| {
                let start = event["ts"].as_f64().unwrap();
                (start, start + event["dur"].as_f64().unwrap())
            })
            .collect();
        assert_eq!(spans.len(), 3);
        let latest = spans.iter().map(|span| span.0).fold(f64::MIN, f64::max);
        let first = spans.iter().map(|span| span.1).fold(f64::MAX, f64::min);
        assert!(latest <= first + 2000.0, "{spans:?}");
    }
    let grads = named("all_reduce.grad\"1");
    assert_eq!(grads.len(), 2);
    assert_eq!(grads[0]["args"]["bytes"], 1);
    assert_eq!(grads[0]["args"]["ok"], true);
    assert!(!named("NEGOTIATE_ALL_REDUCE").is_empty());
}
