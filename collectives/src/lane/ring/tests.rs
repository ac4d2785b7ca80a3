//! What peers do that keep to nothing.

use std::future::poll_fn;
use std::io::Write as _;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::{Duration, Instant};

use kolo_transport::direct::{block_on, looker};
use tokio::runtime::Handle;

use super::*;
use crate::lane::{Lane, UnixLane};

/// One end, the socket of the other one, and another mapping of the memory.
struct Victim {
    end: RingEnd,
    socket: Socket,
    received: Option<OwnedFd>,
    theirs: Rings,
    their_socket: StdUnixStream,
}

impl Victim {
    fn new() -> Self {
        let (rings, fd) = Rings::create().unwrap();
        let (mine, their_socket) = StdUnixStream::pair().unwrap();
        mine.set_nonblocking(true).unwrap();
        Self {
            end: RingEnd::new(rings, Direction::Out),
            socket: Socket::new(mine.into(), Handle::current()),
            received: None,
            theirs: Rings::open(fd.as_fd()).unwrap(),
            their_socket,
        }
    }

    fn read(&mut self, into: &mut [u8]) -> Poll<Result<usize, LaneError>> {
        let cx = Context::from_waker(Waker::noop());
        let link = (&mut self.socket, &mut self.received);
        self.end.poll_read(link, &cx, into)
    }

    fn write(&mut self, bytes: &[u8]) -> Poll<Result<usize, LaneError>> {
        let cx = Context::from_waker(Waker::noop());
        let link = (&mut self.socket, &mut self.received);
        self.end.poll_write(link, &cx, &[IoSlice::new(bytes)])
    }
}

fn is_protocol<T: std::fmt::Debug>(polled: &Poll<Result<T, LaneError>>) -> bool {
    matches!(polled, Poll::Ready(Err(LaneError::Protocol { .. })))
}

#[tokio::test]
async fn counts_that_can_not_be_end_the_link() {
    let size = SIZE as u64;
    for tail in [size + 1, u64::MAX, u64::MAX - size, 1 << 63] {
        let mut victim = Victim::new();
        let words = victim.theirs.words(Direction::Back);
        words.tail.store(tail, Ordering::SeqCst);
        let read = victim.read(&mut [0; 100]);
        assert!(is_protocol(&read), "{tail}: {read:?}");
        // For good, both ways, also if it takes that back.
        let words = victim.theirs.words(Direction::Back);
        words.tail.store(0, Ordering::SeqCst);
        let read = victim.read(&mut [0; 100]);
        assert!(is_protocol(&read), "{tail}: {read:?}");
        let written = victim.write(&[1]);
        assert!(is_protocol(&written), "{tail}: {written:?}");
    }
    for base in [1, 7, size, u64::MAX] {
        let mut victim = Victim::new();
        let words = victim.theirs.words(Direction::Back);
        words.base.store(base, Ordering::SeqCst);
        assert!(victim.read(&mut [0; 100]).is_pending(), "there is nothing");
        let words = victim.theirs.words(Direction::Back);
        words.tail.store(5, Ordering::SeqCst);
        let read = victim.read(&mut [0; 100]);
        assert!(is_protocol(&read), "{base}: {read:?}");
    }
    for head in [11, size, u64::MAX, 1 << 63] {
        let mut victim = Victim::new();
        assert_eq!(victim.write(&[1; 10]), Poll::Ready(Ok(10)));
        let words = victim.theirs.words(Direction::Out);
        words.head.store(head, Ordering::SeqCst);
        let written = victim.write(&[1]);
        assert!(is_protocol(&written), "{head}: {written:?}");
    }
}

#[tokio::test]
async fn a_count_that_goes_back_ends_the_link() {
    let mut victim = Victim::new();
    let words = victim.theirs.words(Direction::Back);
    words.tail.store(100, Ordering::SeqCst);
    assert_eq!(victim.read(&mut [0; 60]), Poll::Ready(Ok(60)));
    for tail in [99, 60, 0] {
        let words = victim.theirs.words(Direction::Back);
        words.tail.store(tail, Ordering::SeqCst);
        let read = victim.read(&mut [0; 60]);
        assert!(is_protocol(&read), "{tail}: {read:?}");
    }
}

#[tokio::test]
async fn a_peer_that_rings_all_the_time_leaves_others_their_turn() {
    for writes in [false, true] {
        let mut victim = Victim::new();
        assert_eq!(victim.write(&vec![7; SIZE]), Poll::Ready(Ok(SIZE)));
        victim.their_socket.write_all(&vec![7; 20_000]).unwrap();
        let cx = Context::from_waker(looker());
        let link = (&mut victim.socket, &mut victim.received);
        let polled = if writes {
            victim.end.poll_write(link, &cx, &[IoSlice::new(&[1])])
        } else {
            victim.end.poll_read(link, &cx, &mut [0; 10])
        };
        assert!(polled.is_pending());
        assert!(rustix::io::ioctl_fionread(&victim.socket).unwrap() > 0);
    }
}

/// A blocked thread polls both sides, and one of them takes the byte from the socket that was for the other one, which has
/// looked before.
#[tokio::test]
async fn a_thread_hears_what_its_other_side_took_from_the_socket() {
    for write_first in [true, false] {
        let mut victim = Victim::new();
        assert_eq!(victim.write(&vec![7; SIZE]), Poll::Ready(Ok(SIZE)));
        let mut polls = 0;
        let begun = Instant::now();
        let limit = Duration::from_secs(20);
        let done = poll_fn(|cx| {
            polls += 1;
            let (mut byte, bytes) = ([0], [IoSlice::new(&[7])]);
            let Victim {
                end,
                socket,
                received,
                theirs,
                their_socket,
            } = &mut victim;
            let mut sides = [write_first, !write_first].map(|writes| {
                let link = (&mut *socket, &mut *received);
                let polled = if writes {
                    end.poll_write(link, cx, &bytes)
                } else {
                    end.poll_read(link, cx, &mut byte)
                };
                if polls == 1 && writes == write_first {
                    let (words, slept) = if writes {
                        let words = theirs.words(Direction::Out);
                        words.head.store(SIZE as u64, Ordering::SeqCst);
                        (words.writer_sleeps, "it is full")
                    } else {
                        let words = theirs.words(Direction::Back);
                        words.tail.store(1, Ordering::SeqCst);
                        (words.reader_sleeps, "it is empty")
                    };
                    assert!(polled.is_pending(), "{slept}");
                    assert_eq!(words.swap(0, Ordering::SeqCst), 1, "{slept}");
                    their_socket.write_all(&[0]).unwrap();
                }
                polled
            });
            match sides.iter_mut().find(|polled| polled.is_ready()) {
                Some(polled) => std::mem::replace(polled, Poll::Pending),
                None => Poll::Pending,
            }
        });
        let at = begun + limit;
        assert_eq!(block_on(|| Some(at), || false, done), Ok(1));
        assert!(begun.elapsed() < limit / 2, "write first: {write_first}");
    }
}

/// Every word is written all the time, with anything: nothing is touched that is not the ring, and nothing hangs.
#[tokio::test]
async fn words_that_change_all_the_time_do_no_harm() {
    for round in 0..30_u64 {
        let mut victim = Victim::new();
        let stop = std::sync::atomic::AtomicBool::new(false);
        let size = SIZE as u64;
        let (theirs, mut socket) = (&victim.theirs, victim.their_socket.try_clone().unwrap());
        // A borrow of the mapping alone goes to the thread.
        let theirs: &Rings = theirs;
        let (end, own, received) = (&mut victim.end, &mut victim.socket, &mut victim.received);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut seed = round;
                while !stop.load(Ordering::Relaxed) {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let value = match seed >> 61 {
                        0 => seed,
                        1 => size - (seed >> 32) % 3,
                        _ => (seed >> 32) % (2 * size),
                    };
                    for direction in [Direction::Out, Direction::Back] {
                        let words = theirs.words(direction);
                        let all = [
                            words.tail,
                            words.head,
                            words.writer_sleeps,
                            words.reader_sleeps,
                        ];
                        all[(seed >> 40) as usize % all.len()].store(value, Ordering::SeqCst);
                    }
                    // The socket may be full: it does not block for long, as the other side reads it or is done.
                    if seed.is_multiple_of(64) {
                        socket.set_nonblocking(true).unwrap();
                        let _full = socket.write(&[7; 100]);
                    }
                }
            });
            let cx = Context::from_waker(Waker::noop());
            let mut into = vec![0; 100_000];
            for _ in 0..2000 {
                let read = end.poll_read((&mut *own, &mut *received), &cx, &mut into);
                let link = (&mut *own, &mut *received);
                let written = end.poll_write(link, &cx, &[IoSlice::new(&into)]);
                if is_protocol(&read) || is_protocol(&written) {
                    break;
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}

/// One end in the middle of its hello, and a socket that says what it likes.
async fn settle(
    first: bool,
    says: &[u8],
    descriptor: Option<&OwnedFd>,
) -> (Result<(), LaneError>, UnixLane) {
    let (mine, theirs) = StdUnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let mut theirs = Socket::new(theirs.into(), Handle::current());
    let mut lane = UnixLane::from_std(mine).unwrap();
    if let Some(descriptor) = descriptor {
        let sent = poll_fn(|cx| passing::poll_send(&mut theirs, cx, says, descriptor.as_fd()));
        assert_eq!(sent.await.unwrap(), says.len());
    } else if !says.is_empty() {
        let sent = poll_fn(|cx| passing::poll_write(&mut theirs, cx, &[IoSlice::new(says)]));
        assert_eq!(sent.await.unwrap(), says.len());
    }
    let limit = Duration::from_secs(20);
    let settled = poll_fn(|cx| lane.poll_settle(cx, first));
    let settled = tokio::time::timeout(limit, settled).await.unwrap();
    if settled.is_ok() {
        // What was agreed on is what is used: `theirs` is a socket alone.
        let written = poll_fn(|cx| lane.poll_write(cx, &[IoSlice::new(b"data")])).await;
        assert_eq!(written, Ok(4));
        let mut said = [0; 16];
        let mut all = Vec::new();
        let read = poll_fn(|cx| passing::poll_receive(&mut theirs, cx, &mut said, &mut None));
        let mut read = read.await.map_err(|error| error.raw_os_error());
        while let Ok(count) = read {
            all.extend_from_slice(&said[..count]);
            read = rustix::io::read(&theirs, &mut said).map_err(|error| Some(error.raw_os_error()));
        }
        assert_eq!(all.ends_with(b"data"), lane.kind() == "unix", "{all:?}");
    }
    (settled, lane)
}

#[tokio::test]
async fn who_says_something_strange_is_refused() {
    for first in [false, true] {
        let (settled, _) = settle(first, b"x", None).await;
        assert!(
            matches!(settled, Err(LaneError::Protocol { .. })),
            "{settled:?}"
        );
    }
}

#[tokio::test]
async fn memory_that_is_no_ring_is_not_used() {
    let (pipe, _write) = rustix::pipe::pipe().unwrap();
    let memory = |length: u64, seal: bool| {
        use rustix::fs::{MemfdFlags, SealFlags};
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("kolo-test", flags).unwrap();
        rustix::fs::ftruncate(&fd, length).unwrap();
        if seal {
            let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
            rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        }
        fd
    };
    let (_rings, good) = Rings::create().unwrap();
    let length = rustix::fs::fstat(&good).unwrap().st_size.cast_unsigned();
    for descriptor in [
        None,
        Some(&pipe),
        Some(&memory(length, false)),
        Some(&memory(length - 4096, true)),
        Some(&memory(length, true)),
    ] {
        let (settled, lane) = settle(false, b"r", descriptor).await;
        assert_eq!((settled, lane.kind()), (Ok(()), "unix"), "{descriptor:?}");
    }
    let (settled, lane) = settle(false, b"r", Some(&good)).await;
    assert_eq!((settled, lane.kind()), (Ok(()), "shm-ring"));
}

#[tokio::test]
async fn an_offer_that_is_declined_leaves_the_socket() {
    let (settled, lane) = settle(true, b"s", None).await;
    assert_eq!((settled, lane.kind()), (Ok(()), "unix"));
    let (settled, lane) = settle(false, b"s", None).await;
    assert_eq!((settled, lane.kind()), (Ok(()), "unix"));
}
