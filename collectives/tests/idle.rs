//! What waits costs nothing. Alone in its program, whose CPU time it looks at.

#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::{Group, Kind};
use kolo_collectives::ReduceOp;
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

#[test]
fn what_waits_costs_no_cpu() {
    // In shared memory ranks look once a second, which is little; one that looked all the time would take 300 ticks.
    for (kind, most) in [
        (Kind::Unix, 5),
        (Kind::Ring, 5),
        (Kind::Shared, 10),
        (Kind::Tls, 10),
    ] {
        check(kind, most);
    }
}

fn check(kind: Kind, most: u64) {
    let group = Group::new(kind, 4);
    group.run(|comm| {
        comm.named("a")
            .all_reduce(vec![1_u8], ReduceOp::Sum)
            .wait()
            .unwrap();
        comm.start().barrier().wait().unwrap();
        comm.group(&[Rank(0), Rank(1), Rank(2), Rank(3)])
            .unwrap()
            .unwrap()
            .barrier()
            .unwrap();
    });
    // A name that one rank has not started, a handle that waits for it, and an operation that waits, too.
    let handles: Vec<_> = group.members[..3]
        .iter()
        .flat_map(|comm| {
            let name = comm.named("late").all_reduce(vec![1_u8], ReduceOp::Sum);
            [name, comm.start().all_reduce(vec![1_u8], ReduceOp::Sum)]
        })
        .collect();
    // Past what is said and looked at after a second.
    std::thread::sleep(Duration::from_millis(1500));
    // Again if it was more: a busy host counts its own time as ours, and what spins does so in every window.
    let mut used = Vec::new();
    while used.len() < 5 && used.last().is_none_or(|last| *last > most) {
        let before = cpu_ticks();
        std::thread::sleep(Duration::from_secs(3));
        used.push(cpu_ticks() - before);
    }
    assert!(
        used.last().is_some_and(|last| *last <= most),
        "{kind:?}: {used:?} ticks of 10 ms in windows of 3 s"
    );
    let last = &group.members[3];
    let late = last.named("late").all_reduce(vec![1_u8], ReduceOp::Sum);
    assert_eq!(
        last.start()
            .all_reduce(vec![1_u8], ReduceOp::Sum)
            .wait()
            .unwrap(),
        [4]
    );
    assert_eq!(late.wait().unwrap(), [4]);
    for handle in handles {
        assert_eq!(handle.wait().unwrap(), [4]);
    }
}
