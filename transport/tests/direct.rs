//! Threads that sleep on sockets.

#![allow(clippy::unwrap_used)]

use std::future::poll_fn;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use kolo_transport::direct::{Socket, block_on};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

fn runtime() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
}

/// By turns with and without patience.
fn wait<F: Future>(future: F) -> F::Output {
    static TURN: AtomicUsize = AtomicUsize::new(0);
    let eager = TURN.fetch_add(1, Ordering::Relaxed).is_multiple_of(2);
    block_on(|| None, || eager, future)
}

fn pair(runtime: &Runtime) -> (Socket, UnixStream) {
    let (near, far) = UnixStream::pair().unwrap();
    near.set_nonblocking(true).unwrap();
    (Socket::new(near.into(), runtime.handle().clone()), far)
}

fn poll_read(socket: &mut Socket, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<usize> {
    let room = into.len();
    let read = socket.poll_read_with(cx, room, |fd| Ok(rustix::io::read(fd, &mut *into)?));
    read.map(Result::unwrap)
}

fn poll_write(socket: &mut Socket, cx: &mut Context<'_>, from: &[u8]) -> Poll<usize> {
    let written = socket.poll_write_with(cx, from.len(), |fd| Ok(rustix::io::write(fd, from)?));
    written.map(Result::unwrap)
}

/// Sends back one byte after the other.
fn echo(mut far: UnixStream) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let mut byte = [0];
        while far.read(&mut byte).unwrap() > 0 {
            far.write_all(&byte).unwrap();
        }
    })
}

async fn round(socket: &mut Socket, byte: u8) {
    assert_eq!(poll_fn(|cx| poll_write(socket, cx, &[byte])).await, 1);
    let mut back = [0; 8];
    assert_eq!(poll_fn(|cx| poll_read(socket, cx, &mut back)).await, 1);
    assert_eq!(back[0], byte);
}

#[test]
fn threads_and_tasks_take_turns_with_one_socket() {
    let runtime = runtime();
    let (mut socket, far) = pair(&runtime);
    let thread = echo(far);
    for byte in 0..200 {
        if byte % 3 == 0 {
            socket = runtime
                .block_on(runtime.spawn(async move {
                    round(&mut socket, byte).await;
                    socket
                }))
                .unwrap();
        } else {
            wait(round(&mut socket, byte));
        }
    }
    drop(socket);
    thread.join().unwrap();
}

#[test]
fn all_that_fits_and_all_that_comes_moves_while_the_other_side_is_slow() {
    let runtime = runtime();
    let (mut socket, mut far) = pair(&runtime);
    let bytes: Vec<u8> = (0..3_000_000_u32)
        .map(|value| (value % 251) as u8)
        .collect();
    let expected = bytes.clone();
    let thread = std::thread::spawn(move || {
        let mut back = vec![0; expected.len()];
        far.read_exact(&mut back).unwrap();
        assert!(back == expected);
        far.write_all(&back).unwrap();
    });
    let (mut sent, mut got) = (0, vec![0; bytes.len()]);
    wait(poll_fn(|cx| {
        while sent < bytes.len() {
            match poll_write(&mut socket, cx, &bytes[sent..]) {
                Poll::Ready(count) => sent += count,
                Poll::Pending => return Poll::Pending,
            }
        }
        Poll::Ready(())
    }));
    let mut filled = 0;
    wait(poll_fn(|cx| {
        while filled < got.len() {
            match poll_read(&mut socket, cx, &mut got[filled..]) {
                Poll::Ready(count) => filled += count,
                Poll::Pending => return Poll::Pending,
            }
        }
        Poll::Ready(())
    }));
    assert!(got == bytes);
    thread.join().unwrap();
}

#[test]
fn any_of_many_sockets_ends_the_sleep() {
    let runtime = runtime();
    // As many as are waited for without memory, and more.
    for count in [1, 16, 17, 40] {
        let (mut sockets, mut fars): (Vec<Socket>, Vec<UnixStream>) =
            (0..count).map(|_| pair(&runtime)).unzip();
        for index in (0..count).rev() {
            let far = fars.pop().unwrap();
            let thread = std::thread::spawn(move || {
                let mut far = far;
                far.write_all(&[7]).unwrap();
                far
            });
            let found = wait(poll_fn(|cx| {
                let mut byte = [0];
                for (index, socket) in sockets.iter_mut().enumerate() {
                    if poll_read(socket, cx, &mut byte).is_ready() {
                        return Poll::Ready((index, byte[0]));
                    }
                }
                Poll::Pending
            }));
            assert_eq!(found, (index, 7));
            thread.join().unwrap();
            sockets.pop();
        }
    }
}

#[test]
fn a_waker_ends_a_sleep_on_sockets_and_so_does_the_time() {
    let runtime = runtime();
    let (mut socket, _far) = pair(&runtime);
    for _ in 0..100 {
        let (sender, mut receiver) = oneshot::channel();
        let thread = std::thread::spawn(move || sender.send(3).unwrap());
        let got = wait(poll_fn(|cx| {
            assert!(poll_read(&mut socket, cx, &mut [0]).is_pending());
            Future::poll(std::pin::Pin::new(&mut receiver), cx)
        }));
        assert_eq!(got, Ok(3));
        thread.join().unwrap();
    }
    let at = Instant::now() + Duration::from_millis(20);
    block_on(
        || Some(at),
        || true,
        poll_fn(|cx| {
            assert!(poll_read(&mut socket, cx, &mut [0]).is_pending());
            if Instant::now() < at {
                Poll::Pending
            } else {
                Poll::Ready(())
            }
        }),
    );
}

#[test]
fn a_socket_that_is_dropped_is_closed_though_the_thread_sleeps_on() {
    let runtime = runtime();
    let (one, mut far) = pair(&runtime);
    let (mut other, mut other_far) = pair(&runtime);
    let mut one = Some(one);
    let thread = std::thread::spawn(move || {
        // The end comes while the other thread waits for what is written after it.
        assert_eq!(far.read(&mut [0]).unwrap(), 0);
        other_far.write_all(&[1]).unwrap();
        other_far
    });
    let got = wait(poll_fn(|cx| {
        if let Some(mut one) = one.take() {
            assert!(poll_read(&mut one, cx, &mut [0]).is_pending());
        }
        poll_read(&mut other, cx, &mut [0; 4])
    }));
    assert_eq!(got, 1);
    drop(thread.join().unwrap());
    // The end itself is something to read.
    assert_eq!(wait(poll_fn(|cx| poll_read(&mut other, cx, &mut [0]))), 0);
}

#[test]
fn the_descriptor_is_given_back_as_it_was() {
    let runtime = runtime();
    let (mut socket, far) = pair(&runtime);
    let thread = echo(far);
    runtime.block_on(round(&mut socket, 1));
    wait(round(&mut socket, 2));
    let mut stream = UnixStream::from(socket.into_fd().unwrap());
    stream.set_nonblocking(false).unwrap();
    stream.write_all(&[9]).unwrap();
    let mut byte = [0];
    stream.read_exact(&mut byte).unwrap();
    assert_eq!(byte, [9]);
    drop(stream);
    thread.join().unwrap();
}
