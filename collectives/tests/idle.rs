//! What waits costs nothing. Alone in its program, whose CPU time it looks at.

#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::{Group, Kind};
use kolo_collectives::{Communicator, ReduceOp};
use kolo_transport::ids::Rank;

/// Of this process, in ticks of 10 ms.
fn cpu_ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    // The name may have spaces, and ends with the last parenthesis; user and system time are fields 14 and 15.
    let rest = &stat[stat.rfind(')').unwrap() + 2..];
    let fields: Vec<u64> = rest
        .split(' ')
        .skip(11)
        .take(2)
        .map(|field| field.parse().unwrap())
        .collect();
    fields.iter().sum()
}

/// Of which the ranks that share memory look once a second, which is little; one that looked all the time would take 300 ticks.
const MOST: u64 = 30;

#[test]
fn what_waits_costs_no_cpu() {
    let groups = [Kind::Unix, Kind::Ring, Kind::Shared, Kind::Tls].map(|kind| Group::new(kind, 4));
    for group in &groups {
        group.run(|comm| {
            let named = comm.named("a").all_reduce(vec![1_u8], ReduceOp::Sum);
            named.wait().unwrap();
            comm.start().barrier().wait().unwrap();
            let all = comm.group(&[0, 1, 2, 3].map(Rank)).unwrap().unwrap();
            all.barrier().unwrap();
        });
    }
    // A name that one rank has not started, a handle that waits for it, and an operation that waits, too.
    let start = |comm: &Communicator| {
        let name = comm.named("late").all_reduce(vec![1_u8], ReduceOp::Sum);
        [name, comm.start().all_reduce(vec![1_u8], ReduceOp::Sum)]
    };
    let there = groups.iter().flat_map(|group| &group.members[..3]);
    let mut handles: Vec<_> = there.flat_map(start).collect();
    // Past what is said and looked at after a second.
    std::thread::sleep(Duration::from_millis(1500));
    // Again if it was more: a busy host counts its own time as ours, and what spins does so in every window.
    let mut used = Vec::new();
    while used.len() < 5 && used.last().is_none_or(|last| *last > MOST) {
        let before = cpu_ticks();
        std::thread::sleep(Duration::from_secs(3));
        used.push(cpu_ticks() - before);
    }
    assert!(
        used.last().is_some_and(|last| *last <= MOST),
        "{used:?} ticks of 10 ms in windows of 3 s"
    );
    handles.extend(groups.iter().flat_map(|group| start(&group.members[3])));
    for handle in handles {
        assert_eq!(handle.wait().unwrap(), [4]);
    }
}
