//! What peers do that keep to nothing.

use std::future::poll_fn;
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::{Duration, Instant};

use kolo_transport::direct::{Socket, block_on, looker};
use tokio::runtime::Handle;

use super::*;

/// One end, the socket of the other one, and another mapping of the memory.
struct Victim {
    end: RingEnd,
    socket: PassingSocket,
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
            socket: PassingSocket::new(Socket::new(mine.into(), Handle::current())),
            theirs: Rings::open(fd.as_fd()).unwrap(),
            their_socket,
        }
    }

    fn read(&mut self, into: &mut [u8]) -> Poll<Result<usize, LaneError>> {
        let cx = Context::from_waker(Waker::noop());
        self.end.poll_read(&mut self.socket, &cx, into)
    }

    fn write(&mut self, bytes: &[u8]) -> Poll<Result<usize, LaneError>> {
        let cx = Context::from_waker(Waker::noop());
        let parts = [IoSlice::new(bytes)];
        self.end.poll_write(&mut self.socket, &cx, &parts)
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
    // A count that goes back.
    let mut victim = Victim::new();
    let set = |victim: &Victim, tail| {
        let words = victim.theirs.words(Direction::Back);
        words.tail.store(tail, Ordering::SeqCst);
    };
    set(&victim, 100);
    assert_eq!(victim.read(&mut [0; 60]), Poll::Ready(Ok(60)));
    for tail in [99, 60, 0] {
        set(&victim, tail);
        let read = victim.read(&mut [0; 60]);
        assert!(is_protocol(&read), "{tail}: {read:?}");
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
async fn a_peer_that_rings_all_the_time_leaves_others_their_turn() {
    for writes in [false, true] {
        let mut victim = Victim::new();
        assert_eq!(victim.write(&vec![7; SIZE]), Poll::Ready(Ok(SIZE)));
        victim.their_socket.write_all(&vec![7; 20_000]).unwrap();
        let cx = Context::from_waker(looker());
        let Victim { end, socket, .. } = &mut victim;
        let polled = if writes {
            end.poll_write(socket, &cx, &[IoSlice::new(&[1])])
        } else {
            end.poll_read(socket, &cx, &mut [0; 10])
        };
        assert!(polled.is_pending());
        assert!(matches!(socket.read(&mut [0]), Ok(1)), "some of it is left");
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
                theirs,
                their_socket,
            } = &mut victim;
            let mut sides = [write_first, !write_first].map(|writes| {
                let polled = if writes {
                    end.poll_write(socket, cx, &bytes)
                } else {
                    end.poll_read(socket, cx, &mut byte)
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
        let (end, own) = (&mut victim.end, &mut victim.socket);
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
                let read = end.poll_read(own, &cx, &mut into);
                let written = end.poll_write(own, &cx, &[IoSlice::new(&into)]);
                if is_protocol(&read) || is_protocol(&written) {
                    break;
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
