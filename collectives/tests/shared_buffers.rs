//! Where the memory of shared buffers goes. In a process of its own, because it looks at all that the process maps.

#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::{Group, Kind, LONG};
use kolo_collectives::ReduceOp;
use kolo_collectives::schedule::{Algorithm, Tuning};
use kolo_transport::ids::Rank;

/// Whatever became of their operations, buffers that are dropped leave room for others.
#[test]
fn buffers_leave_no_room_lost() {
    const LENGTH: usize = 4 << 20;
    let group = Group::new(Kind::Shared, 2);
    let pages = || {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let arenas = smaps.split("kolo-arena").skip(1);
        let pages = arenas.filter_map(|map| {
            let line = map.lines().find(|line| line.starts_with("Rss:"))?;
            line.split_whitespace().nth(1)?.parse::<usize>().ok()
        });
        pages.sum::<usize>()
    };
    let before = group.run(|comm| comm.barrier().map(|()| pages()).unwrap())[0];
    for round in 0..6 {
        group.run(|comm| {
            comm.set_tuning(Tuning {
                force: (round % 2 == 1).then_some(Algorithm::Ring),
                ..Tuning::default()
            });
            let mut buffer = comm.buffer::<u8>(LENGTH + round).unwrap();
            buffer.fill(2);
            comm.all_reduce_buffer(&mut buffer, ReduceOp::Sum).unwrap();
            assert!(buffer.iter().all(|value| *value == 4));
        });
    }
    group.set_timeout(Duration::from_millis(50));
    let mut buffers = group.run(|comm| comm.buffer::<u8>(LENGTH).unwrap());
    let error = group.members[0].all_reduce_buffer(&mut buffers[0], ReduceOp::Sum);
    assert_eq!(error.unwrap_err().culprit_rank(), Some(Rank(1)));
    drop(buffers);
    group.set_timeout(LONG);
    // The late one hears of the failure; then all that was left is free.
    assert!(group.members[1].barrier().is_err());
    drop(group.run(|comm| comm.buffer::<u8>(1).unwrap()));
    let after = pages();
    assert!(
        after < before + 4096,
        "{before} KiB before, {after} KiB after"
    );
}
