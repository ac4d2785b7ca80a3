//! What operations cost and take: allocations, memory that is not there, memory that is shared, and processor time of what waits. A test
//! looks at its own threads, or at all of the process; so they run one after the other.

#![allow(clippy::unwrap_used)]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use common::{Group, Kind, LONG};
use kolo_collectives::schedule::{Algorithm, Tuning};
use kolo_collectives::{CollectiveError, Communicator, Compression, Gathered, Options, ReduceOp};
use kolo_transport::ids::Rank;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
    /// More than that a thread does not get in one piece.
    static MOST: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// Counts, and gives a thread no more than it may have.
struct Scarce;

fn is_there(size: usize) -> bool {
    // A thread that ends has no cells any more, and is not measured.
    let _counted = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
    MOST.try_with(|most| size <= most.get()).unwrap_or(true)
}

// SAFETY: every call is passed on to the system's allocator with the same arguments, or gets nothing, which any may.
unsafe impl GlobalAlloc for Scarce {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !is_there(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract of `alloc`, which is that of the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`; all memory here comes from the system's.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !is_there(size) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract of `realloc`; all memory here comes from the system's.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Scarce = Scarce;

fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What one round allocates after the first: that of several which allocates least, for a rank that waits for more than 0.1 s says so, and that is sent.
fn least(mut round: impl FnMut()) -> usize {
    round();
    let rounds = (0..4).map(|_| {
        let before = ALLOCATIONS.get();
        round();
        ALLOCATIONS.get() - before
    });
    rounds.min().unwrap()
}

/// Over sockets, over rings and in shared memory.
#[test]
fn nothing_is_allocated_after_the_first_operation_of_a_size() {
    let _alone = alone();
    for kind in [Kind::Unix, Kind::Ring, Kind::Shared] {
        let counts = Group::new(kind, 4).run(allocated_by_each);
        assert_eq!(counts, [0; 4], "{kind:?}");
    }
}

fn allocated_by_each(comm: &Communicator) -> usize {
    let mut short = vec![1.0_f32; 100];
    let mut long = vec![1.0_f64; 300_000];
    let mut all = vec![0.0_f32; 400];
    let (me, world) = (comm.rank().index(), 4);
    let root = Rank(1);
    let (mut half, mut part, given) = (vec![1_u16; 64], vec![0_u16; 16], [1_u16; 64]);
    let mut varied = Gathered::default();
    let mut exchanged = Gathered::default();
    let mut shares = Vec::new();
    let options = Options::new().prescale(2.0).shape(&[10, 10]);
    let scaled = comm.with(options.compression(Compression::Bf16));
    let (ones, mut into) = (vec![1.0_f32; 5000], vec![0.0_f32; 5000]);
    let mut buffer = comm.buffer::<f32>(70_000).unwrap();
    buffer.fill(1.0);
    least(|| {
        let mut others = [1_i64; 50];
        scaled.all_reduce(&mut short, ReduceOp::Average).unwrap();
        comm.all_reduce_grouped(&mut [&mut others[..], &mut [2; 3]], ReduceOp::Sum)
            .unwrap();
        comm.reduce(&mut half, ReduceOp::BitOr, root).unwrap();
        comm.reduce_scatter_into(&half, 4, &mut part, ReduceOp::Max)
            .unwrap();
        comm.gather_into(&part, if me == 1 { &mut half } else { &mut [] }, root)
            .unwrap();
        comm.scatter_into(&half, &mut part, root).unwrap();
        comm.all_to_all_into(&given, &mut half).unwrap();
        comm.all_gather_varcount_into(&short[..me], &mut varied)
            .unwrap();
        comm.gather_varcount_into(&short[..me], &mut varied, root)
            .unwrap();
        comm.scatter_varcount_into(&half, &[10, 20, 30, 4], &mut shares, root)
            .unwrap();
        comm.all_to_all_varcount_into(&half, &[me, 1, 2, 3], &mut exchanged)
            .unwrap();
        let (next, before) = (Rank((me as u32 + 1) % world), Rank((me as u32 + 3) % world));
        if me % 2 == 0 {
            comm.send(&part, next).unwrap();
        }
        comm.receive_into(&mut half[..part.len()], before).unwrap();
        if me % 2 == 1 {
            comm.send(&part, next).unwrap();
        }
        comm.all_reduce(&mut short, ReduceOp::Sum).unwrap();
        comm.all_reduce(&mut long, ReduceOp::Max).unwrap();
        comm.broadcast(&mut long, Rank(2)).unwrap();
        comm.all_gather_into(&short, &mut all).unwrap();
        comm.all_reduce_into(&ones, &mut into, ReduceOp::Sum)
            .unwrap();
        comm.all_reduce(&mut into, ReduceOp::Adasum).unwrap();
        comm.all_reduce_buffer(&mut buffer, ReduceOp::Max).unwrap();
        comm.barrier().unwrap();
    })
}

/// Through shared memory piece by piece, and in rounds (on a machine with one processor in slices).
#[test]
fn nothing_is_allocated_for_long_data_in_shared_memory() {
    const LENGTH: usize = (24 << 20) / size_of::<f64>() + 1001;
    let _alone = alone();
    let group = Group::new(Kind::Shared, 2);
    let counts = group.run(|comm| {
        let ones = vec![1.0_f64; LENGTH];
        let (mut data, mut part) = (ones.clone(), vec![0.0; LENGTH / 2]);
        let mut buffer = comm.buffer::<f64>(LENGTH).unwrap();
        buffer.fill(1.0);
        let root = Rank(1);
        least(|| {
            comm.all_reduce(&mut data, ReduceOp::Max).unwrap();
            comm.all_reduce_into(&ones, &mut data, ReduceOp::Min)
                .unwrap();
            comm.reduce(&mut data, ReduceOp::Max, root).unwrap();
            comm.all_reduce_buffer(&mut buffer, ReduceOp::Max).unwrap();
            let even = LENGTH / 2 * 2;
            comm.reduce_scatter_into(&ones[..even], even, &mut part, ReduceOp::Sum)
                .unwrap();
            comm.broadcast(&mut data, root).unwrap();
            comm.scatter_into(&data[..even], &mut part, root).unwrap();
            comm.all_gather_into(&part, &mut data[..even]).unwrap();
            comm.all_to_all_into(&ones[..even], &mut data[..even])
                .unwrap();
        })
    });
    assert_eq!(counts, [0; 2]);
}

/// Of `u64`: what is given is there, and as much once more is not.
const LENGTH: usize = 1 << 17;

type Body = fn(&Communicator, &mut [u64]) -> Result<(), CollectiveError>;

/// Rank 1 has no memory left; the other ranks have.
fn without_memory(kind: Kind, body: Body) {
    let group = Group::new(kind, 2);
    let results = group.run(|comm| {
        comm.barrier().unwrap();
        let mut data = vec![1; LENGTH];
        if comm.rank() == Rank(1) {
            MOST.set(LENGTH / 2);
        }
        let result = body(comm, &mut data);
        MOST.set(usize::MAX);
        assert!(data.iter().all(|value| *value == 1), "what was given");
        result
    });
    let [zeros, ones] = &results[..] else {
        unreachable!("there are two");
    };
    let error = ones.clone().unwrap_err();
    let invalid = matches!(error, CollectiveError::Invalid { .. });
    assert!(invalid && error.to_string().contains("memory"), "{error}");
    let error = zeros.clone().unwrap_err();
    let failed = matches!(error, CollectiveError::PeerFailed { rank: Rank(1), .. });
    assert!(failed, "{error}");
    for result in group.run(|comm| comm.all_gather(&[comm.rank().0])) {
        assert_eq!(result, Ok(vec![0, 1]));
    }
}

/// For the result, or to pack several buffers.
#[test]
fn an_operation_that_gets_no_memory_fails_on_all_ranks() {
    let _alone = alone();
    let bodies: [Body; 5] = [
        |comm, data| comm.all_gather(data).map(drop),
        |comm, data| {
            let runtime = tokio::runtime::Builder::new_current_thread().build();
            let gathered = comm.all_gather_async(data);
            runtime.unwrap().block_on(gathered).map(drop)
        },
        |comm, data| comm.gather(data, Rank(1)).map(drop),
        |comm, data| comm.all_to_all(data).map(drop),
        |comm, data| comm.all_reduce_grouped(&mut [data], ReduceOp::Sum),
    ];
    for body in bodies {
        for kind in [Kind::Unix, Kind::Shared] {
            without_memory(kind, body);
        }
    }
}

/// What was in them is kept.
#[test]
fn an_adasum_of_several_buffers_without_memory_to_keep_them_fails_on_all_ranks() {
    let _alone = alone();
    without_memory(Kind::Unix, |comm, data| {
        let mut first = [1.0_f32; 10];
        let mut second: Vec<f32> = Vec::new();
        // It has this memory already.
        MOST.with(|most| {
            let was = most.replace(usize::MAX);
            second.resize(data.len(), 1.0);
            most.set(was);
        });
        let buffers = &mut [&mut first[..], &mut second[..]];
        let result = comm.all_reduce_grouped(buffers, ReduceOp::Adasum);
        assert!(
            first
                .iter()
                .chain(&second)
                .all(|value| value.total_cmp(&1.0).is_eq())
        );
        result
    });
}

/// Alone, a rank packs nothing.
#[test]
fn several_buffers_of_a_world_of_one_take_no_memory() {
    let _alone = alone();
    let group = Group::new(Kind::Shared, 1);
    let alone = &group.members[0];
    let (mut first, mut second) = (vec![1_u64; LENGTH], [2_u64; 10]);
    // What any operation of this length works in is there from here on.
    let mut all = vec![0_u64; LENGTH + second.len()];
    alone.all_reduce(&mut all, ReduceOp::Sum).unwrap();
    MOST.set(LENGTH / 2);
    let result = alone.all_reduce_grouped(&mut [&mut first, &mut second], ReduceOp::Average);
    MOST.set(usize::MAX);
    assert_eq!(result, Ok(()));
    assert!(first.iter().all(|value| *value == 1) && second == [2; 10]);
    // What has a factor is computed all the same.
    let scaled = alone.with(Options::new().prescale(2.0));
    let result = scaled.all_reduce_grouped(&mut [&mut first, &mut second], ReduceOp::Sum);
    assert_eq!(result, Ok(()));
    assert!(first.iter().all(|value| *value == 2) && second == [4; 10]);
}

#[test]
fn operations_are_done_in_shared_memory_and_leave_nothing_behind() {
    let _alone = alone();
    let group = Group::new(Kind::Shared, 3);
    group.run(|comm| {
        for length in [1, 14, 15, 1000, 100_000, 700_001] {
            let mut data = vec![comm.rank().0 as f32 + 1.0_f32; length];
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert!(data.iter().all(|value| value.total_cmp(&6.0).is_eq()));
            let record = comm.records().pop().unwrap();
            assert!(record.lanes.names().any(|lane| lane == "shm"));
        }
    });
    let maps = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.matches("kolo-arena").count()
    };
    assert!(maps() >= 3);
    // A child that is forked does not get it, nor does a core file.
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    for map in smaps.split("kolo-arena").skip(1) {
        let flags = map.lines().find(|line| line.starts_with("VmFlags:"));
        let flags: Vec<&str> = flags.unwrap().split(' ').collect();
        assert!(flags.contains(&"dc") && flags.contains(&"dd"), "{flags:?}");
    }
    // It has no descriptor once it is mapped, and never a name.
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let open = open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    assert!(
        !open
            .into_iter()
            .any(|link| link.to_string_lossy().contains("kolo-arena"))
    );
    let named = std::fs::read_dir("/dev/shm")
        .into_iter()
        .flatten()
        .flatten();
    assert!(
        !named
            .into_iter()
            .any(|entry| entry.file_name().to_string_lossy().contains("kolo"))
    );
}

/// Whatever became of their operations, buffers that are dropped leave room for others.
#[test]
fn buffers_leave_no_room_lost() {
    const LENGTH: usize = 4 << 20;
    let _alone = alone();
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

/// Of this process, in ticks of 10 ms.
fn cpu_ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    // The name may have spaces, and ends with the last parenthesis; user and system time are fields 14 and 15.
    let rest = &stat[stat.rfind(')').unwrap() + 2..];
    let times = rest.split(' ').skip(11).take(2);
    times.map(|field| field.parse::<u64>().unwrap()).sum()
}

/// Of which the ranks that share memory look once a second, which is little; one that looked all the time would take 300 ticks.
const FEW: u64 = 30;

#[test]
fn what_waits_costs_no_cpu() {
    let _alone = alone();
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
    while used.len() < 5 && used.last().is_none_or(|last| *last > FEW) {
        let before = cpu_ticks();
        std::thread::sleep(Duration::from_secs(3));
        used.push(cpu_ticks() - before);
    }
    assert!(
        used.last().is_some_and(|last| *last <= FEW),
        "{used:?} ticks of 10 ms in windows of 3 s"
    );
    handles.extend(groups.iter().flat_map(|group| start(&group.members[3])));
    for handle in handles {
        assert_eq!(handle.wait().unwrap(), [4]);
    }
}
