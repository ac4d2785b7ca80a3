//! Links inside a host over rings in shared memory: what goes through them, and what they leave behind.

#![allow(clippy::unwrap_used)]

mod common;

use std::future::{Future, poll_fn};
use std::io::{IoSlice, Read, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use common::{LONG, hello};
use kolo_collectives::lane::UnixLane;
use kolo_collectives::{Lane, LaneError};
use kolo_transport::direct;
use kolo_transport::ids::Rank;
use proptest::prelude::*;
use tokio::runtime::Runtime;

/// More than a ring has.
const MORE: usize = 3 << 20;

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

/// Both ends of a link, of which each may do without rings.
async fn pair(without: [bool; 2]) -> [UnixLane; 2] {
    let (one, two) = UnixStream::pair().unwrap();
    let open = |socket, without| {
        let lane = UnixLane::from_std(socket).unwrap();
        if without { lane.without_rings() } else { lane }
    };
    let (one, two) = (open(one, without[0]), open(two, without[1]));
    let (a, b) = (hello(Rank(0)), hello(Rank(1)));
    let (one, two) = tokio::try_join!(
        one.greeted(&a, Rank(1), LONG),
        two.greeted(&b, Rank(0), LONG)
    )
    .unwrap();
    [one, two]
}

/// The byte at this place of what one side sends.
fn byte(seed: u8, at: usize) -> u8 {
    (at.wrapping_mul(31) ^ (at >> 9)) as u8 ^ seed
}

/// Takes part in a conversation in which this side sends pieces of these lengths, and reads so much at a time.
async fn converse(
    lane: &mut UnixLane,
    (own, theirs): (u8, u8),
    writes: &[usize],
    reads: &[usize],
    total: usize,
) -> Result<(), LaneError> {
    let all: usize = writes.iter().sum();
    let out: Vec<u8> = (0..all).map(|at| byte(own, at)).collect();
    let (mut sent, mut got, mut piece, mut turn) = (0, 0, 0, 0);
    poll_fn(|cx| {
        while sent < all {
            // In up to three parts, of which some may be empty.
            while sent >= writes[..=piece].iter().sum() {
                piece += 1;
            }
            let end: usize = writes[..=piece].iter().sum();
            let (middle, rest) = (usize::midpoint(sent, end), &out[..end]);
            let parts = [&rest[sent..middle], &[], &rest[middle..]].map(IoSlice::new);
            match lane.poll_write(cx, &parts) {
                Poll::Ready(count) => {
                    let count = count?;
                    assert!(count > 0 && count <= end - sent);
                    sent += count;
                }
                Poll::Pending => break,
            }
        }
        while got < total {
            let mut into = vec![0; reads[turn % reads.len()].min(total - got)];
            match lane.poll_read(cx, &mut into) {
                Poll::Ready(count) => {
                    let count = count?;
                    assert!(count > 0, "it ends too early");
                    for value in &into[..count] {
                        assert_eq!(*value, byte(theirs, got));
                        got += 1;
                    }
                    turn += 1;
                }
                Poll::Pending => break,
            }
        }
        if sent == all && got == total {
            Poll::Ready(Ok(()))
        } else {
            Poll::Pending
        }
    })
    .await
}

async fn talk(lanes: &mut [UnixLane; 2], writes: [&[usize]; 2], reads: [&[usize]; 2]) {
    let [one, two] = lanes;
    let totals = writes.map(|writes| writes.iter().sum());
    let (a, b) = tokio::join!(
        converse(one, (1, 2), writes[0], reads[0], totals[1]),
        converse(two, (2, 1), writes[1], reads[1], totals[0])
    );
    a.unwrap();
    b.unwrap();
}

#[test]
fn both_sides_use_rings_or_neither_does() {
    runtime().block_on(async {
        for without in [[false, false], [true, false], [false, true], [true, true]] {
            let mut lanes = pair(without).await;
            let expected = if without.contains(&true) {
                "unix"
            } else {
                "shm-ring"
            };
            for lane in &lanes {
                assert_eq!(lane.kind(), expected, "{without:?}");
            }
            talk(&mut lanes, [&[MORE, 1], &[5, MORE]], [&[4096], &[1 << 20]]).await;
        }
    });
}

fn lengths() -> impl Strategy<Value = Vec<usize>> {
    let length = prop_oneof![1..200_usize, 4000..9000_usize, 30_000..300_000_usize];
    prop::collection::vec(length, 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn bytes_of_any_lengths_arrive_both_ways(
        writes in [lengths(), lengths()],
        reads in [lengths(), lengths()],
    ) {
        runtime().block_on(async {
            let mut lanes = pair([false; 2]).await;
            let [a, b] = &writes;
            let [c, d] = &reads;
            talk(&mut lanes, [a, b], [c, d]).await;
            // Again, from another place of the ring.
            talk(&mut lanes, [b, a], [d, c]).await;
        });
    }
}

/// Small numbers that look random, the same in every run.
fn numbers(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut random = 0x9e37_79b9_7f4a_7c15 ^ (seed << 17);
    move |limit| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % limit
    }
}

/// Pauses are about as long as a thread looks before it sleeps: what comes meets looks, last looks and sleeps.
#[test]
fn bytes_arrive_between_threads_that_look_before_they_sleep() {
    const ROUNDS: usize = 3000;
    let (one, two) = UnixStream::pair().unwrap();
    let converse_directly = |socket, rank: u32| {
        let runtime = runtime();
        let own = hello(Rank(rank));
        let mut lane = runtime
            .block_on(async {
                let lane = UnixLane::from_std(socket).unwrap();
                lane.greeted(&own, Rank(1 - rank), LONG).await
            })
            .unwrap();
        assert_eq!(lane.kind(), "shm-ring");
        let (own, theirs) = (rank as u8, 1 - rank as u8);
        // The same on both sides, so that they know what comes; the pauses are each one's own.
        let (mut length, mut pause) = (numbers(2), numbers(u64::from(rank)));
        for round in 0..ROUNDS {
            let count = match length(128) {
                // More than a ring holds: who writes waits, too.
                0 => 600_000 + length(400_000) as usize,
                1..=9 => 1 + length(70_000) as usize,
                _ => 1 + length(200) as usize,
            };
            // One alone, the other alone, both at once.
            let speaks = |rank| round % 3 != rank as usize;
            let writes: &[usize] = if speaks(rank) { &[count] } else { &[] };
            let total = if speaks(1 - rank) { count } else { 0 };
            if speaks(rank) {
                std::thread::sleep(Duration::from_micros(pause(200)));
            }
            let end = Instant::now() + LONG;
            let mut talk = pin!(converse(&mut lane, (own, theirs), writes, &[9000], total));
            let looks = poll_fn(|cx| {
                let polled = talk.as_mut().poll(cx);
                let is_late = polled.is_pending() && Instant::now() > end;
                assert!(!is_late, "rank {rank} was not woken in round {round}");
                polled
            });
            direct::block_on(|| Some(end), || true, looks).unwrap();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| converse_directly(one, 0));
        scope.spawn(|| converse_directly(two, 1));
    });
}

async fn write(lane: &mut UnixLane, mut bytes: &[u8]) -> Result<(), LaneError> {
    while !bytes.is_empty() {
        let count = poll_fn(|cx| lane.poll_write(cx, &[IoSlice::new(bytes)])).await?;
        bytes = &bytes[count..];
    }
    Ok(())
}

async fn read(lane: &mut UnixLane, count: usize) -> Result<Vec<u8>, LaneError> {
    let mut bytes = vec![0; count];
    let mut got = 0;
    while got < count {
        match poll_fn(|cx| lane.poll_read(cx, &mut bytes[got..])).await? {
            0 => break,
            more => got += more,
        }
    }
    bytes.truncate(got);
    Ok(bytes)
}

fn file(text: &str) -> std::fs::File {
    let fd = rustix::fs::memfd_create("kolo-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let mut file = std::fs::File::from(fd);
    file.write_all(text.as_bytes()).unwrap();
    file.rewind().unwrap();
    file
}

#[test]
fn a_descriptor_is_there_with_its_bytes() {
    runtime().block_on(async {
        let [mut one, mut two] = pair([false; 2]).await;
        assert!(two.take_descriptor().is_none());
        for round in 0..5 {
            // Whoever sleeps before is woken by bytes on the socket, too.
            let before = vec![1; round * 50_000];
            let text = format!("file {round}");
            let passed = file(&text);
            let ((), got) = tokio::join!(
                async {
                    write(&mut one, &before).await.unwrap();
                    let fd = passed.as_fd();
                    let count = poll_fn(|cx| one.poll_write_with(cx, b"here", fd)).await;
                    assert_eq!(count.unwrap(), 4);
                    write(&mut one, &[3; 9]).await.unwrap();
                },
                async {
                    assert_eq!(read(&mut two, before.len()).await.unwrap(), before);
                    assert_eq!(read(&mut two, 4).await.unwrap(), b"here");
                    let fd = two.take_descriptor().unwrap();
                    assert!(two.take_descriptor().is_none());
                    assert_eq!(read(&mut two, 9).await.unwrap(), [3; 9]);
                    fd
                }
            );
            let mut said = String::new();
            std::fs::File::from(got).read_to_string(&mut said).unwrap();
            assert_eq!(said, text);
        }
    });
}

#[derive(Debug, Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Reading and writing may wait in two tasks, and one byte on the socket wakes both, whoever reads it.
#[test]
fn who_waits_to_write_is_woken_though_who_reads_saw_the_ring_first() {
    runtime().block_on(async {
        let [mut one, mut two] = pair([false; 2]).await;
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let mut writer = Context::from_waker(&waker);
        let mut reader = Context::from_waker(Waker::noop());
        let mut filled = 0;
        let piece = [7; 5000];
        while let Poll::Ready(count) = one.poll_write(&mut writer, &[IoSlice::new(&piece)]) {
            filled += count.unwrap();
        }
        let mut place = [0; 10];
        assert!(one.poll_read(&mut reader, &mut place).is_pending());
        assert_eq!(woken.0.load(Ordering::SeqCst), 0);
        // All room comes back, and the byte of the socket is read by the side that reads.
        assert_eq!(read(&mut two, filled).await.unwrap().len(), filled);
        while woken.0.load(Ordering::SeqCst) == 0 {
            assert!(one.poll_read(&mut reader, &mut place).is_pending());
            tokio::task::yield_now().await;
        }
        assert!(
            one.poll_write(&mut writer, &[IoSlice::new(&[7])])
                .is_ready()
        );
    });
}

/// Also the end of a peer that reads nothing, while this side waits for room.
#[test]
fn what_was_written_before_the_end_is_read_and_then_the_link_ends() {
    runtime().block_on(async {
        for count in [0, 1, 100_000] {
            let [mut one, mut two] = pair([false; 2]).await;
            let sent: Vec<u8> = (0..count).map(|at| byte(9, at)).collect();
            write(&mut one, &sent).await.unwrap();
            drop(one);
            assert_eq!(read(&mut two, MORE).await.unwrap(), sent);
            assert_eq!(poll_fn(|cx| two.poll_read(cx, &mut [0; 5])).await, Ok(0));
            assert!(two.end_is_final());
            let error = write(&mut two, &[1]).await.unwrap_err();
            assert!(matches!(error, LaneError::Ended { .. }), "{error:?}");
        }
        let [mut one, two] = pair([false; 2]).await;
        let sent = vec![0; MORE];
        let (result, ()) = tokio::join!(write(&mut one, &sent), async {
            tokio::task::yield_now().await;
            drop(two);
        });
        assert!(matches!(result, Err(LaneError::Ended { .. })), "{result:?}");
    });
}

/// The maps of this process that are rings' memory, and their pages that are there, in bytes.
fn maps() -> (usize, usize) {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut count, mut resident, mut is_ring) = (0, 0, false);
    for line in text.lines() {
        if line.contains('-') && line.contains(' ') && !line.starts_with(char::is_uppercase) {
            is_ring = line.contains("memfd:kolo-ring");
            count += usize::from(is_ring);
        } else if is_ring && let Some(size) = line.strip_prefix("Rss:") {
            let kib = size.trim().trim_end_matches(" kB");
            resident += kib.parse::<usize>().unwrap() << 10;
        }
    }
    (count, resident)
}

/// In a process of its own: other tests have rings, too.
#[test]
fn links_are_small_and_leave_nothing() {
    if std::env::var_os("KOLO_TEST_CHILD").is_none() {
        let own = std::env::current_exe().unwrap();
        let done = std::process::Command::new(own)
            .args(["links_are_small_and_leave_nothing", "--exact"])
            .env("KOLO_TEST_CHILD", "1")
            .output()
            .unwrap();
        assert!(done.status.success(), "{done:?}");
        return;
    }
    let fds = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let runtime = runtime();
    runtime.block_on(async {
        let before = fds();
        assert_eq!(maps(), (0, 0));
        let mut links = Vec::new();
        for _ in 0..4 {
            let mut lanes = pair([false; 2]).await;
            talk(&mut lanes, [&[64, 64], &[64]], [&[64], &[64]]).await;
            links.push(lanes);
        }
        assert_eq!(fds(), before + 8, "a link has its socket alone");
        let (count, resident) = maps();
        assert_eq!(count, 8, "both ends are in this process");
        assert!(resident <= 8 * (48 << 10), "{resident} bytes for 4 links");
        drop(links);
        assert_eq!((fds(), maps()), (before, (0, 0)));
    });
}
