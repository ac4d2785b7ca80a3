//! A socket that any task or thread can wait for.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;

use super::sleeper::{is_direct, only_looks, want};

/// A thread that has had a socket to itself for so long ends its registration with the runtime, which is woken for nothing.
const ALONE: Duration = Duration::from_secs(1);

/// A stream socket, non-blocking, that is waited for by whoever polls it: a thread in [`block_on`](super::block_on) by itself,
/// any other task through a tokio runtime. Both directions belong to one of them at a time: a thread that polls either ends what a
/// task waits for in both.
#[derive(Debug)]
pub struct Socket {
    fd: Arc<OwnedFd>,
    handle: Handle,
    /// While a task waits through the runtime.
    watched: Option<AsyncFd<Arc<OwnedFd>>>,
    /// When a task polled it last.
    watched_at: Instant,
    /// The last one took less than it could have: the next one would find nothing.
    is_empty: bool,
    is_full: bool,
}

impl Socket {
    /// Takes a stream socket, which is in non-blocking mode already. The handle is of a runtime with I/O enabled; as long as it
    /// runs, tasks can wait for this socket.
    pub fn new(fd: OwnedFd, handle: Handle) -> Self {
        Self {
            fd: Arc::new(fd),
            handle,
            watched: None,
            watched_at: Instant::now(),
            is_empty: false,
            is_full: false,
        }
    }

    /// The descriptor, still non-blocking and registered nowhere.
    ///
    /// # Errors
    ///
    /// What the system says if there is no descriptor to be had: a thread that sleeps on the socket right now keeps its own.
    pub fn into_fd(mut self) -> io::Result<OwnedFd> {
        self.watched = None;
        Arc::try_unwrap(self.fd).or_else(|shared| shared.try_clone())
    }

    /// Reads by `read`, which says how much of the `room` it has filled and fails with `WouldBlock` if there is nothing. Then
    /// this is pending, and the last waker is woken when there is something.
    ///
    /// # Errors
    ///
    /// Those of `read`, and what the system says if the socket can't be registered with the runtime.
    pub fn poll_read_with(
        &mut self,
        cx: &mut Context<'_>,
        room: usize,
        mut read: impl FnMut(BorrowedFd<'_>) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        if is_direct(cx) {
            let only_looks = self.enter(cx);
            if !std::mem::take(&mut self.is_empty)
                && let Poll::Ready(result) = tried(|| read(self.fd.as_fd()))
            {
                // 0 is the end, and not for want of more.
                self.is_empty = matches!(result, Ok(count) if 0 < count && count < room);
                return Poll::Ready(result);
            }
            // `poll(2)` says what is there, not what has come since: nothing is missed.
            if !only_looks {
                want(&self.fd, PollFlags::IN);
            }
            return Poll::Pending;
        }
        self.is_empty = false;
        loop {
            let watched = self.watch()?;
            let mut ready = ready!(watched.poll_read_ready(cx))?;
            match ready.try_io(|fd| retried(|| read(fd.get_ref().as_fd()))) {
                Ok(result) => return Poll::Ready(result),
                Err(_would_block) => {}
            }
        }
    }

    /// Writes by `write`, which says how much it has written of `length` bytes and fails with `WouldBlock` if there is no room.
    /// Then this is pending, and the last waker is woken when there is some.
    ///
    /// # Errors
    ///
    /// As [`Socket::poll_read_with`].
    pub fn poll_write_with(
        &mut self,
        cx: &mut Context<'_>,
        length: usize,
        mut write: impl FnMut(BorrowedFd<'_>) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        if is_direct(cx) {
            let only_looks = self.enter(cx);
            if !std::mem::take(&mut self.is_full)
                && let Poll::Ready(result) = tried(|| write(self.fd.as_fd()))
            {
                self.is_full = matches!(result, Ok(count) if count < length);
                return Poll::Ready(result);
            }
            if !only_looks {
                want(&self.fd, PollFlags::OUT);
            }
            return Poll::Pending;
        }
        self.is_full = false;
        loop {
            let watched = self.watch()?;
            let mut ready = ready!(watched.poll_write_ready(cx))?;
            match ready.try_io(|fd| retried(|| write(fd.get_ref().as_fd()))) {
                Ok(result) => return Poll::Ready(result),
                Err(_would_block) => {}
            }
        }
    }

    /// Returns whether who polls only looks. If not, a thread sleeps on the socket from here on.
    fn enter(&mut self, cx: &Context<'_>) -> bool {
        let only_looks = only_looks(cx);
        // Who takes turns with a task does not register it each time.
        if !only_looks && self.watched.is_some() && self.watched_at.elapsed() > ALONE {
            self.watched = None;
        }
        only_looks
    }

    fn watch(&mut self) -> io::Result<&AsyncFd<Arc<OwnedFd>>> {
        self.watched_at = Instant::now();
        if self.watched.is_none() {
            let _entered = self.handle.enter();
            let interest = Interest::READABLE | Interest::WRITABLE;
            // The successor is unsafe, for types whose descriptor may change. This one's is the same all its life.
            #[allow(deprecated)]
            let watched = AsyncFd::with_interest(Arc::clone(&self.fd), interest)?;
            return Ok(self.watched.insert(watched));
        }
        Ok(self.watched.as_ref().expect("it was there"))
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Pending if it would block.
fn tried<T>(attempt: impl FnMut() -> io::Result<T>) -> Poll<io::Result<T>> {
    match retried(attempt) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Poll::Pending,
        result => Poll::Ready(result),
    }
}

/// Again if a signal came between.
fn retried<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match attempt() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}
