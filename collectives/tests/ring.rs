//! Links inside a host over rings in shared memory. (What they leave behind when a rank is killed: `kills`.)

#![allow(clippy::unwrap_used)]

mod common;

use std::future::poll_fn;
use std::io::IoSlice;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use common::{LONG, hello};
use kolo_collectives::lane::UnixLane;
use kolo_collectives::{Lane, LaneError};
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
