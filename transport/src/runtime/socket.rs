//! The UDP socket under quinn.
//!
//! It differs from quinn's own in what it asks the kernel for: it is watched for incoming datagrams only, so that sending
//! one does not end the wait for others, and a read that did not fill its buffers is not followed by one that
//! finds nothing. Each saves a system call per datagram, on every side of a link.

use std::fmt;
use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use quinn::udp::{RecvMeta, Transmit, UdpSocketState};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::obituary;
use crate::wire::Obituary;

/// Errors in a row after which a socket counts as broken.
const MOST_ERRORS: u32 = 64;

/// A socket of an endpoint.
pub(super) struct Socket {
    io: UdpSocket,
    state: UdpSocketState,
    /// Most datagrams in one send with segmentation offload. The sum of a segmented send must stay under
    /// 64 KiB, or the kernel refuses it and quinn takes that for a black hole.
    max_segments: usize,
    /// Where a full socket is waited for.
    handle: Handle,
    /// The last send found no room.
    full: AtomicBool,
    input: Input,
    obituaries: Option<mpsc::Sender<Obituary>>,
}

/// Who tells that datagrams are there.
enum Input {
    /// The runtime's own reactor.
    Watched(AsyncFd<UdpSocket>),
    /// Whoever drives the endpoint, by [`Socket::readable`].
    Told {
        maybe: AtomicBool,
        waker: Mutex<Option<Waker>>,
        /// Counts reads that brought something.
        reads: AtomicU64,
    },
}

impl Socket {
    /// A socket that is watched by this runtime.
    pub(super) fn watched(io: UdpSocket, max_segments: usize, handle: &Handle) -> io::Result<Self> {
        let _entered = handle.enter();
        let watch = watch(io.try_clone()?, Interest::READABLE).map_err(|(_, error)| error)?;
        Self::new(io, max_segments, handle, Input::Watched(watch))
    }

    /// A socket that somebody else watches.
    pub(super) fn told(io: UdpSocket, max_segments: usize, handle: &Handle) -> io::Result<Self> {
        let input = Input::Told {
            maybe: AtomicBool::new(true),
            waker: Mutex::default(),
            reads: AtomicU64::new(0),
        };
        Self::new(io, max_segments, handle, input)
    }

    fn new(io: UdpSocket, max_segments: usize, handle: &Handle, input: Input) -> io::Result<Self> {
        // This makes it non-blocking, too.
        let state = UdpSocketState::new((&io).into())?;
        Ok(Self {
            max_segments: max_segments.min(state.max_gso_segments()).max(1),
            io,
            state,
            handle: handle.clone(),
            full: AtomicBool::new(false),
            input,
            obituaries: None,
        })
    }

    /// The same, and obituaries that come to it are passed on.
    pub(super) fn listening(self, obituaries: Option<mpsc::Sender<Obituary>>) -> Self {
        Self { obituaries, ..self }
    }

    /// Another descriptor of it, watched by the current runtime.
    ///
    /// # Panics
    ///
    /// If that has no reactor.
    pub(super) fn watch_here(&self, interest: Interest) -> io::Result<AsyncFd<UdpSocket>> {
        watch(self.descriptor()?, interest).map_err(|(_, error)| error)
    }

    /// Another descriptor of it.
    pub(super) fn descriptor(&self) -> io::Result<UdpSocket> {
        self.io.try_clone()
    }

    /// Says that there may be datagrams.
    pub(super) fn readable(&self) {
        if let Input::Told { maybe, waker, .. } = &self.input {
            maybe.store(true, Ordering::SeqCst);
            let waker = waker.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    /// How many reads have brought something.
    pub(super) fn reads(&self) -> u64 {
        match &self.input {
            Input::Watched(_) => 0,
            Input::Told { reads, .. } => reads.load(Ordering::Relaxed),
        }
    }

    /// An error that a datagram left behind is told once, and is none of the endpoint's.
    fn recv(&self, bufs: &mut [IoSliceMut<'_>], meta: &mut [RecvMeta]) -> io::Result<usize> {
        let mut tries = MOST_ERRORS;
        loop {
            match self.state.recv((&self.io).into(), bufs, meta) {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock && tries > 0 => tries -= 1,
                done => {
                    if let (Ok(count), Some(to)) = (&done, &self.obituaries) {
                        for (buffer, meta) in bufs.iter().zip(meta.iter()).take(*count) {
                            obituary::listen(to, buffer, meta);
                        }
                    }
                    return done;
                }
            }
        }
    }
}

// What it gave way to is unsafe, for types whose descriptor changes. A socket of the standard library has one until it
// is dropped, and it is dropped by the `AsyncFd` that owns it.
#[allow(deprecated)]
pub(super) fn watch(
    io: UdpSocket,
    interest: Interest,
) -> Result<AsyncFd<UdpSocket>, (UdpSocket, io::Error)> {
    match AsyncFd::try_with_interest(io, interest) {
        Ok(watched) => Ok(watched),
        Err(error) => Err(error.into_parts()),
    }
}

impl quinn::AsyncUdpSocket for Socket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn quinn::UdpPoller>> {
        Box::pin(Room {
            socket: self,
            watch: None,
        })
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let sent = self.state.send((&self.io).into(), transmit);
        if let Err(error) = &sent
            && error.kind() == io::ErrorKind::WouldBlock
        {
            self.full.store(true, Ordering::Release);
        }
        sent
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        // A read that leaves room in the buffers has emptied the queue, and what comes later is told anew.
        match &self.input {
            Input::Watched(watch) => loop {
                let mut ready = ready!(watch.poll_read_ready(cx))?;
                let received = self.recv(bufs, meta);
                match &received {
                    Ok(count) if *count == bufs.len() => {}
                    Ok(_) => ready.clear_ready(),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        ready.clear_ready();
                        continue;
                    }
                    Err(_) => {}
                }
                return Poll::Ready(received);
            },
            Input::Told {
                maybe,
                waker,
                reads,
            } => loop {
                if !maybe.swap(false, Ordering::SeqCst) {
                    *waker.lock().unwrap_or_else(PoisonError::into_inner) =
                        Some(cx.waker().clone());
                    // It may have been told before the waker was there.
                    if !maybe.load(Ordering::SeqCst) {
                        return Poll::Pending;
                    }
                    continue;
                }
                let received = self.recv(bufs, meta);
                match &received {
                    Ok(count) => {
                        reads.fetch_add(1, Ordering::Relaxed);
                        if *count == bufs.len() {
                            maybe.store(true, Ordering::SeqCst);
                        }
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                    Err(_) => maybe.store(true, Ordering::SeqCst),
                }
                return Poll::Ready(received);
            },
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.io.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.max_segments
    }

    fn max_receive_segments(&self) -> usize {
        self.state.gro_segments()
    }

    fn may_fragment(&self) -> bool {
        self.state.may_fragment()
    }
}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Socket")
            .field("local_addr", &self.io.local_addr())
            .finish_non_exhaustive()
    }
}

/// Waits for room in a socket that was full. There nearly always is some, so the kernel is asked to tell only then.
struct Room {
    socket: Arc<Socket>,
    watch: Option<AsyncFd<UdpSocket>>,
}

impl quinn::UdpPoller for Room {
    fn poll_writable(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.socket.full.load(Ordering::Acquire) {
            self.watch = None;
            return Poll::Ready(Ok(()));
        }
        let this = &mut *self;
        let watch = if let Some(watch) = &this.watch {
            watch
        } else {
            let _entered = this.socket.handle.enter();
            let watch = this.socket.watch_here(Interest::WRITABLE)?;
            this.watch.insert(watch)
        };
        let ready = ready!(watch.poll_write_ready(cx)).map(drop);
        this.socket.full.store(false, Ordering::Release);
        this.watch = None;
        Poll::Ready(ready)
    }
}

impl fmt::Debug for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Room").finish_non_exhaustive()
    }
}
