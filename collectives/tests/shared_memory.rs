//! Ranks that share memory: in threads with every kind of trouble, and as processes that are killed.

#![allow(clippy::unwrap_used, clippy::cast_sign_loss, clippy::float_cmp)]

mod common;

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{GENERATION, Group, JOB, Kind, LONG, hello, run};
use kolo_collectives::lane::{Connecting, OneHost, UnixLane};
use kolo_collectives::schedule::{Algorithm, Tuning};
use kolo_collectives::{
    CollectiveError, Communicator, Compression, Connector, LaneError, Options, ReduceOp,
};
use kolo_transport::ids::{CallId, Rank};

fn lanes_of_last(comm: &Communicator) -> Vec<&'static str> {
    comm.records().last().unwrap().lanes.names().collect()
}

#[test]
fn operations_are_done_in_shared_memory_and_leave_nothing_behind() {
    let group = Group::new(Kind::Shared, 3);
    group.run(|comm| {
        for length in [1, 14, 15, 1000, 100_000, 700_001] {
            let mut data = vec![comm.rank().0 as f32 + 1.0; length];
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, vec![6.0; length]);
            assert!(lanes_of_last(comm).contains(&"shm"));
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

#[test]
fn where_one_rank_shares_nothing_all_use_links() {
    for odd in 0..3 {
        let group = Group::new(Kind::Unshared(odd), 3);
        group.run(|comm| {
            for _ in 0..3 {
                let mut data = [1_i32; 10];
                comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert_eq!(data, [3; 10]);
            }
            assert_eq!(lanes_of_last(comm), ["unix"]);
        });
    }
}

/// The others ask each other meanwhile what they wait for. That is no reason against shared memory.
#[test]
fn a_rank_that_begins_late_shares_memory_all_the_same() {
    for late in 0..3 {
        let group = Group::new(Kind::Shared, 3);
        group.run(|comm| {
            if comm.rank() == Rank(late) {
                std::thread::sleep(Duration::from_millis(300));
            }
            let mut data = [1_u32; 10];
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [9; 10]);
            assert!(lanes_of_last(comm).contains(&"shm"), "late {late}");
        });
    }
}

/// The attempt goes on where it was.
#[test]
fn a_first_operation_that_fails_does_not_end_the_attempt_to_share() {
    for late in 0..3 {
        let group = Group::new(Kind::Shared, 3);
        group.set_timeout(Duration::from_millis(150));
        let present = group
            .members
            .iter()
            .filter(|comm| comm.rank() != Rank(late));
        for result in run(present, Communicator::barrier) {
            let error = result.unwrap_err();
            assert_eq!(error.culprit_rank(), Some(Rank(late)), "{error}");
        }
        group.set_timeout(LONG);
        let error = group.members[late as usize].barrier().unwrap_err();
        assert_eq!(error.culprit_rank(), Some(Rank(late)), "{error}");
        group.run(|comm| {
            let mut data = [1_u32; 10];
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [3; 10]);
            assert!(lanes_of_last(comm).contains(&"shm"), "late {late}");
        });
    }
}

#[test]
fn an_algorithm_that_is_asked_for_is_used_over_the_links() {
    let group = Group::new(Kind::Shared, 3);
    group.run(|comm| {
        let mut data = [1_i64; 10];
        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        comm.set_tuning(Tuning {
            force: Some(Algorithm::Ring),
            ..Tuning::default()
        });
        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(lanes_of_last(comm), ["unix"]);
        comm.set_tuning(Tuning::default());
        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [27; 10]);
        assert!(lanes_of_last(comm).contains(&"shm"));
    });
}

#[test]
fn several_buffers_and_named_ones_are_reduced_in_shared_memory() {
    let group = Group::new(Kind::Shared, 3);
    group.run(|comm| {
        let mine = comm.rank().0 as f32 + 1.0;
        let half = comm.with(Options::new().compression(Compression::F16).prescale(0.5));
        // In the line of the flag, in a slot, in slices; with and without another type on the way.
        for lengths in [[1, 2, 0], [3, 1000, 20], [0, 70_000, 131_071]] {
            for (comm, expected) in [(comm, 6.0), (&half, 3.0)] {
                let mut buffers = lengths.map(|length| vec![mine; length]);
                let mut parts = buffers.each_mut().map(Vec::as_mut_slice);
                comm.all_reduce_grouped(&mut parts, ReduceOp::Sum).unwrap();
                assert_eq!(buffers, lengths.map(|length| vec![expected; length]));
                assert!(lanes_of_last(comm).contains(&"shm"), "{lengths:?}");
            }
        }
        let mut flags = [[comm.rank().0 == 1; 3], [true; 3]];
        let [one, two] = &mut flags;
        comm.all_reduce_grouped(&mut [one, two], ReduceOp::BitAnd)
            .unwrap();
        assert_eq!(flags, [[false; 3], [true; 3]]);

        let handles = ["b", "a", "c"].map(|name| {
            let named = comm.named(name);
            named.all_reduce(vec![mine; 500], ReduceOp::Sum)
        });
        for handle in handles {
            assert_eq!(handle.wait().unwrap(), [6.0; 500]);
        }
        let records = comm.records();
        // Fused or not, the last ones are these three.
        let mut bytes = 0;
        for record in records.iter().rev() {
            if bytes == 3 * 2000 {
                break;
            }
            assert!(record.lanes.names().any(|lane| lane == "shm"), "{record:?}");
            bytes += record.bytes();
        }
        assert_eq!(bytes, 3 * 2000);

        // Lengths that differ are seen before anything is stored.
        let extra = usize::from(comm.rank() == Rank(2));
        let mut buffers = [vec![mine; 5 + extra], vec![mine; 5 - extra]];
        let mut parts = buffers.each_mut().map(Vec::as_mut_slice);
        let error = comm
            .all_reduce_grouped(&mut parts, ReduceOp::Sum)
            .unwrap_err();
        assert!(matches!(error, CollectiveError::Mismatch { .. }), "{error}");
        assert!(buffers.iter().flatten().all(|value| *value == mine));
    });
}

#[test]
fn buffers_are_reduced_in_place_and_keep_their_input_when_it_fails() {
    let group = Group::new(Kind::Shared, 3);
    group.run(|comm| {
        let me = comm.rank().0;
        for length in [0, 1, 1000, 300_001] {
            let mut buffer = comm.buffer::<f64>(length).unwrap();
            assert!(buffer.is_shared());
            assert!(buffer.iter().all(|value| *value == 0.0));
            for round in 0..4 {
                buffer.fill(f64::from(me + round));
                comm.all_reduce_buffer(&mut buffer, ReduceOp::Sum).unwrap();
                assert!(
                    buffer
                        .iter()
                        .all(|value| *value == f64::from(3 + 3 * round))
                );
            }
            comm.all_reduce_buffer(&mut buffer, ReduceOp::Average)
                .unwrap();
            assert!(buffer.iter().all(|value| *value == 12.0));
            // It is a slice for all else.
            comm.broadcast(&mut buffer, Rank(1)).unwrap();
        }
        let flags = comm.buffer::<bool>(5).unwrap();
        assert!(!flags.is_shared());
    });
    let mut buffers: Vec<_> = group.run(|comm| {
        let mut buffer = comm.buffer::<i32>(1000).unwrap();
        buffer.fill(7);
        buffer
    });
    group.set_timeout(Duration::from_millis(100));
    std::thread::scope(|scope| {
        for (comm, buffer) in group.members.iter().zip(&mut buffers).take(2) {
            scope.spawn(move || {
                let error = comm.all_reduce_buffer(buffer, ReduceOp::Sum).unwrap_err();
                assert_eq!(error.culprit_rank(), Some(Rank(2)), "{error}");
                assert!(buffer.iter().all(|value| *value == 7));
            });
        }
    });
    // The late one hears of it, and then it works.
    let error = group.members[2].all_reduce_buffer(&mut buffers[2], ReduceOp::Sum);
    let error = error.unwrap_err();
    assert_eq!(error.culprit_rank(), Some(Rank(2)), "{error}");
    group.set_timeout(LONG);
    std::thread::scope(|scope| {
        for (comm, buffer) in group.members.iter().zip(&mut buffers) {
            scope.spawn(move || {
                comm.all_reduce_buffer(buffer, ReduceOp::Sum).unwrap();
                assert!(buffer.iter().all(|value| *value == 21));
            });
        }
    });
    // A buffer outlives its communicator.
    drop(group);
    assert_eq!(buffers[0][999], 21);
}

#[test]
fn a_buffer_on_one_rank_and_a_slice_on_another_disagree() {
    let group = Group::new(Kind::Shared, 2);
    let errors = group.run(|comm| {
        let mut buffer = comm.buffer::<f32>(10).unwrap();
        if comm.rank() == Rank(0) {
            comm.all_reduce_buffer(&mut buffer, ReduceOp::Sum)
                .unwrap_err()
        } else {
            comm.all_reduce(&mut [0_f32; 10], ReduceOp::Sum)
                .unwrap_err()
        }
    });
    for error in errors {
        assert!(matches!(error, CollectiveError::Mismatch { .. }), "{error}");
    }
    group.run(|comm| comm.barrier().unwrap());
}

#[test]
fn calls_and_failures_take_turns_with_quick_operations() {
    let group = Group::new(Kind::Shared, 3);
    group.run(|comm| {
        let mut call = 0;
        for round in 0..200_u64 {
            call += 1;
            comm.begin_call(CallId(call));
            for length in [1, 3000, 1] {
                let mut data = vec![1_u32; length];
                comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert_eq!(data, vec![3; length]);
            }
            call += 1;
            comm.begin_call(CallId(call));
            if round % 3 == u64::from(comm.rank().0) {
                comm.abort_call(CallId(call), "no");
            } else {
                let mut data = [5_u32; 4];
                let error = comm.all_reduce(&mut data, ReduceOp::Sum).unwrap_err();
                assert_eq!(
                    error.culprit_rank(),
                    Some(Rank((round % 3) as u32)),
                    "{error}"
                );
                assert_eq!(data, [5; 4]);
            }
        }
    });
}

/// Also if all others are there already, and only wait for this rank's data.
#[test]
fn an_operation_of_a_call_that_was_aborted_here_does_not_end_well() {
    let group = Group::new(Kind::Shared, 3);
    let results = group.run(|comm| {
        comm.begin_call(CallId(1));
        comm.barrier().unwrap();
        let mut data = vec![1_u32; 50_000];
        if comm.rank() == Rank(1) {
            std::thread::sleep(Duration::from_millis(100));
            comm.abort_call(CallId(1), "no");
        }
        comm.all_reduce(&mut data, ReduceOp::Sum)
    });
    for (rank, result) in (0..).zip(results) {
        match result.unwrap_err() {
            CollectiveError::Aborted { .. } => assert_eq!(rank, 1),
            CollectiveError::PeerFailed { rank: failed, .. } => assert_eq!(failed, Rank(1)),
            other => panic!("{other}"),
        }
    }
}

#[tokio::test]
async fn tasks_share_memory_too() {
    let group = Group::new(Kind::Shared, 3);
    let tasks: Vec<_> = group
        .members
        .iter()
        .cloned()
        .map(|comm| {
            tokio::spawn(async move {
                for length in [1, 50_000, 3] {
                    let mut data = vec![i64::from(comm.rank().0); length];
                    comm.all_reduce_async(&mut data, ReduceOp::Sum).await?;
                    assert_eq!(data, vec![3; length]);
                }
                comm.barrier_async().await
            })
        })
        .collect();
    for task in tasks {
        assert_eq!(task.await.unwrap(), Ok(()));
    }
    // Its runtime may not be dropped in async code.
    tokio::task::spawn_blocking(move || drop(group))
        .await
        .unwrap();
}

#[test]
fn a_late_rank_is_named_whatever_it_is_late_for() {
    for late in 0..3 {
        let group = Group::new(Kind::Shared, 3);
        group.run(|comm| comm.barrier().unwrap());
        group.set_timeout(Duration::from_millis(80));
        let present = group
            .members
            .iter()
            .filter(|comm| comm.rank() != Rank(late));
        for result in run(present, |comm| comm.broadcast(&mut [1_u8; 3], Rank(0))) {
            let error = result.unwrap_err();
            assert!(matches!(error, CollectiveError::Deadline { .. }), "{error}");
            assert_eq!(error.culprit_rank(), Some(Rank(late)), "{error}");
        }
    }
}

/// The sockets of one rank of processes, by peer.
#[derive(Debug)]
struct Sockets {
    rank: Rank,
    sockets: Mutex<HashMap<u32, UnixStream>>,
}

impl Connector for Sockets {
    fn connect(&self, peer: Rank) -> Connecting {
        let socket = self.sockets.lock().unwrap().remove(&peer.0);
        let own = hello(self.rank);
        Box::pin(async move {
            let socket = socket.ok_or_else(|| LaneError::Unreachable {
                reason: "the socket was used before".to_owned(),
            })?;
            let lane = UnixLane::open(socket, &own, peer, LONG).await?;
            Ok(Box::new(lane) as Box<dyn kolo_collectives::Lane>)
        })
    }

    fn is_one_host(&self, _ranks: &[Rank]) -> Option<OneHost> {
        Some(Box::pin(async { true }))
    }
}

/// One rank, in a process of its own. It works until a rank is lost, and says which.
#[test]
fn child() {
    let Ok(given) = std::env::var("KOLO_TEST_CHILD") else {
        return;
    };
    let mut given = given
        .split(',')
        .map(|number| number.parse::<i64>().unwrap());
    let mut next = || given.next().unwrap();
    let (rank, world, mut seed) = (next() as u32, next() as u32, next() as u64);
    let mut lower = HashMap::new();
    let mut higher = Vec::new();
    for peer in (0..world).filter(|peer| *peer != rank) {
        // SAFETY: the parent made this descriptor for this process, and names it once.
        let socket = UnixStream::from(unsafe { OwnedFd::from_raw_fd(next() as RawFd) });
        if peer < rank {
            lower.insert(peer, socket);
        } else {
            higher.push((peer, socket));
        }
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let connector = Arc::new(Sockets {
        rank: Rank(rank),
        sockets: Mutex::new(lower),
    });
    let handle = runtime.handle().clone();
    let comm = Communicator::new(Rank(rank), world, GENERATION, JOB, connector, handle)
        .unwrap()
        .with_timeout(Duration::from_secs(5));
    let acceptor = comm.acceptor();
    for (peer, socket) in higher {
        let acceptor = acceptor.clone();
        runtime.spawn(async move {
            if let Ok(lane) = UnixLane::open(socket, &hello(Rank(rank)), Rank(peer), LONG).await {
                acceptor.accept(Rank(peer), Box::new(lane)).unwrap();
            }
        });
    }
    println!("\nkolo: begun");
    let mut operations = 0_u32;
    let error = loop {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let length = [1, 40, 3000, 60_000, 400_000][(seed >> 33) as usize % 5];
        let value = (operations % 5 + rank) as f32;
        let mut data = vec![value; length];
        let expected = (operations % 5 * world + world * (world - 1) / 2) as f32;
        let (result, expected) = match (seed >> 40) % 4 {
            0 => (comm.barrier(), value),
            1 => {
                let root = operations % world;
                let expected = (operations % 5 + root) as f32;
                (comm.broadcast(&mut data, Rank(root)), expected)
            }
            _ => (comm.all_reduce(&mut data, ReduceOp::Sum), expected),
        };
        let expected = if result.is_ok() { expected } else { value };
        assert!(data.iter().all(|value| *value == expected), "{result:?}");
        if let Err(error) = result {
            break error;
        }
        operations += 1;
        if operations == 1 {
            println!("kolo: ready");
        }
    };
    let lost = error.culprit_rank().map_or(-1, |rank| i64::from(rank.0));
    println!("kolo: lost {lost} after {operations}: {error}");
    // The others see this one's end only when all have said what they saw.
    std::io::stdin().read_line(&mut String::new()).unwrap();
    drop(comm);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("kolo-arena"));
    println!("kolo: clean");
    std::process::exit(0);
}

fn spawn(world: u32, seed: u64) -> Vec<Child> {
    let mut ends: HashMap<(u32, u32), UnixStream> = HashMap::new();
    for low in 0..world {
        for high in low + 1..world {
            let (one, other) = UnixStream::pair().unwrap();
            ends.insert((low, high), one);
            ends.insert((high, low), other);
        }
    }
    (0..world)
        .map(|rank| {
            let mine: Vec<RawFd> = (0..world)
                .filter(|peer| *peer != rank)
                .map(|peer| ends[&(rank, peer)].as_raw_fd())
                .collect();
            let numbers: Vec<String> = mine.iter().map(ToString::to_string).collect();
            let given = format!("{rank},{world},{seed},{}", numbers.join(","));
            let mut command = Command::new(std::env::current_exe().unwrap());
            command
                .args(["child", "--exact", "--nocapture"])
                .env("KOLO_TEST_CHILD", given)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped());
            let inherit = move || {
                for fd in &mine {
                    // SAFETY: the parent keeps it open until the child runs.
                    let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
                    rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
                }
                Ok(())
            };
            // SAFETY: between fork and exec it makes system calls alone.
            unsafe { command.pre_exec(inherit) };
            command.spawn().unwrap()
        })
        .collect()
}

/// The next line of a child that is for this test.
fn line(output: &mut impl BufRead) -> Option<String> {
    let mut line = String::new();
    while output.read_line(&mut line).unwrap() > 0 {
        if let Some(said) = line.trim().strip_prefix("kolo: ") {
            return Some(said.to_owned());
        }
        line.clear();
    }
    None
}

#[test]
fn a_rank_that_is_killed_at_any_moment_is_named_by_all_others() {
    // As many as the issue asks for: KOLO_TEST_KILLS=200.
    let kills = std::env::var("KOLO_TEST_KILLS")
        .ok()
        .and_then(|kills| kills.parse().ok())
        .unwrap_or(12_u64);
    let mut random = u64::from(std::process::id()) | 1;
    for kill in 0..kills {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let world = 2 + (kill % 3) as u32;
        let victim = (random >> 20) as u32 % world;
        let moment = Duration::from_micros((random >> 30) % 60_000);
        let mut children = spawn(world, random >> 8);
        let mut outputs: Vec<_> = children
            .iter_mut()
            .map(|child| BufReader::new(child.stdout.take().unwrap()))
            .collect();
        // Now and then it has not come so far that the others have a link to it, whose end they could see.
        let early = kill % 4 == 0;
        for output in &mut outputs {
            assert_eq!(line(output).as_deref(), Some("begun"));
            if !early {
                assert_eq!(line(output).as_deref(), Some("ready"));
            }
        }
        std::thread::sleep(if early { moment / 8 } else { moment });
        children[victim as usize].kill().unwrap();
        let begun = Instant::now();
        for (rank, output) in outputs.iter_mut().enumerate() {
            if rank as u32 == victim {
                continue;
            }
            let mut said = line(output).unwrap_or_default();
            if said == "ready" {
                said = line(output).unwrap_or_default();
            }
            let place = format!("world {world}, victim {victim} after {moment:?}, rank {rank}");
            assert!(
                said.starts_with(&format!("lost {victim} after")),
                "{place}: {said:?}"
            );
            let by_the_deadline = begun.elapsed() > Duration::from_secs(4);
            assert!(
                !by_the_deadline || said.contains("after 0:"),
                "{place}: {said:?}"
            );
        }
        for (rank, mut child) in children.into_iter().enumerate() {
            drop(child.stdin.take());
            if rank as u32 != victim {
                assert_eq!(line(&mut outputs[rank]).as_deref(), Some("clean"));
            }
            let status = child.wait().unwrap();
            assert_eq!(status.success(), rank as u32 != victim);
        }
    }
}
