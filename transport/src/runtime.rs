//! The tokio runtime that QUIC runs on.
//!
//! Packets are encrypted, acknowledged and timed here and not on the threads of the caller, which may be
//! an actix arbiter or any other executor. Futures of this crate may be awaited anywhere.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Handle, Runtime};

/// Threads for blocking work, such as a [`JoinHandler`](crate::JoinHandler).
const BLOCKING_THREADS: usize = 16;

/// A tokio runtime of its own, shared by its clones.
///
/// [`Endpoint`](crate::Endpoint)s, [`Connection`](crate::Connection)s and streams hold a clone each. When the
/// last clone is dropped, the runtime's tasks are dropped and its threads end in the background; that never
/// blocks and never panics, also inside asynchronous code.
#[derive(Clone)]
pub struct TransportRuntime {
    shared: Arc<Shared>,
}

struct Shared {
    handle: Handle,
    /// None if the caller owns it.
    owned: Option<Runtime>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(runtime) = self.owned.take() {
            runtime.shutdown_background();
        }
    }
}

impl TransportRuntime {
    /// Starts a runtime with this many threads, at least one. One thread has the shortest round trips; more
    /// help a process with many busy connections.
    ///
    /// # Errors
    ///
    /// If the operating system gives no thread or no event queue.
    pub fn new(threads: usize) -> io::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(threads.max(1))
            .max_blocking_threads(BLOCKING_THREADS)
            .thread_name("kolo-transport")
            .enable_all()
            .build()?;
        Ok(Self {
            shared: Arc::new(Shared {
                handle: runtime.handle().clone(),
                owned: Some(runtime),
            }),
        })
    }

    /// Uses a runtime that the caller owns. It needs I/O and time enabled, and must outlive every endpoint:
    /// when it ends, waits on its connections never end.
    #[must_use]
    pub fn from_handle(handle: Handle) -> Self {
        Self {
            shared: Arc::new(Shared {
                handle,
                owned: None,
            }),
        }
    }

    /// The runtime's handle, to spawn on it.
    pub fn handle(&self) -> &Handle {
        &self.shared.handle
    }

    /// Waits for `future`, at most for `limit`. `None` if it was not done by then; it is dropped then.
    ///
    /// The timer runs on this runtime, so that the caller may be on any executor. Cancel safe if `future` is.
    pub async fn timeout<F: Future>(&self, limit: Duration, future: F) -> Option<F::Output> {
        let sleep = {
            let _entered = self.shared.handle.enter();
            tokio::time::sleep(limit)
        };
        tokio::select! {
            biased;
            output = future => Some(output),
            () = sleep => None,
        }
    }
}

impl fmt::Debug for TransportRuntime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransportRuntime").finish_non_exhaustive()
    }
}

/// Lets quinn spawn and set timers on a [`TransportRuntime`], whoever calls it.
pub(crate) struct QuinnRuntime {
    handle: Handle,
    /// Most datagrams in one send with segmentation offload.
    max_segments: usize,
}

impl QuinnRuntime {
    pub(crate) fn new(runtime: &TransportRuntime, max_segments: usize) -> Self {
        Self {
            handle: runtime.handle().clone(),
            max_segments,
        }
    }
}

impl fmt::Debug for QuinnRuntime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuinnRuntime").finish_non_exhaustive()
    }
}

impl quinn::Runtime for QuinnRuntime {
    fn new_timer(&self, at: Instant) -> Pin<Box<dyn quinn::AsyncTimer>> {
        let _entered = self.handle.enter();
        quinn::TokioRuntime.new_timer(at)
    }

    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>) {
        self.handle.spawn(future);
    }

    fn wrap_udp_socket(
        &self,
        socket: std::net::UdpSocket,
    ) -> io::Result<Arc<dyn quinn::AsyncUdpSocket>> {
        let _entered = self.handle.enter();
        let socket = quinn::TokioRuntime.wrap_udp_socket(socket)?;
        if socket.max_transmit_segments() <= self.max_segments {
            return Ok(socket);
        }
        Ok(Arc::new(CappedSocket {
            socket,
            max_segments: self.max_segments,
        }))
    }

    fn now(&self) -> Instant {
        Instant::now()
    }
}

/// A socket that sends fewer datagrams at once than the kernel would take: the sum of a segmented send
/// must stay under 64 KiB, or the kernel refuses it and quinn takes that for a black hole.
#[derive(Debug)]
struct CappedSocket {
    socket: Arc<dyn quinn::AsyncUdpSocket>,
    max_segments: usize,
}

impl quinn::AsyncUdpSocket for CappedSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn quinn::UdpPoller>> {
        Arc::clone(&self.socket).create_io_poller()
    }

    fn try_send(&self, transmit: &quinn::udp::Transmit<'_>) -> io::Result<()> {
        self.socket.try_send(transmit)
    }

    fn poll_recv(
        &self,
        cx: &mut std::task::Context<'_>,
        bufs: &mut [io::IoSliceMut<'_>],
        meta: &mut [quinn::udp::RecvMeta],
    ) -> std::task::Poll<io::Result<usize>> {
        self.socket.poll_recv(cx, bufs, meta)
    }

    fn local_addr(&self) -> io::Result<std::net::SocketAddr> {
        self.socket.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.socket.max_transmit_segments().min(self.max_segments)
    }

    fn max_receive_segments(&self) -> usize {
        self.socket.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.socket.may_fragment()
    }
}
