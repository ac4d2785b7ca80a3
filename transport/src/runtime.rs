//! The tokio runtime that QUIC runs on.
//!
//! Packets are encrypted, acknowledged and timed here and not on the threads of the caller, which may be
//! an actix arbiter or any other executor. Futures of this crate may be awaited anywhere.

mod pump;
mod socket;

use std::fmt;
use std::future::Future;
use std::io;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Sleep;

use self::pump::{Driven, Here, Pump, Wakes};
use self::socket::Socket;
use crate::awake::{AwakeClock, TICK};
use crate::wire::Obituary;

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
    /// If callers may drive the links.
    pump: Option<Arc<Pump>>,
    /// It ticks from its first use on.
    clock: OnceLock<AwakeClock>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        let runtime = self.owned.take();
        if let Some(pump) = &self.pump {
            pump.close(runtime);
        } else if let Some(runtime) = runtime {
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
        Self::build(threads, false)
    }

    /// As [`TransportRuntime::new`] with one thread, for links whose user mostly waits for answers on a tokio runtime of its own.
    ///
    /// While somebody there awaits what was sent in a [`Turn`], that runtime drives the links, so that neither a
    /// message nor its answer changes threads. The thread of this one watches over it, and takes over within
    /// milliseconds when that runtime is blocked, idle or gone. What runs elsewhere notices no difference.
    ///
    /// # Errors
    ///
    /// As [`TransportRuntime::new`].
    pub fn lent() -> io::Result<Self> {
        Self::build(1, true)
    }

    fn build(threads: usize, lent: bool) -> io::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(threads.max(1))
            .max_blocking_threads(BLOCKING_THREADS)
            .thread_name("kolo-transport")
            .enable_all()
            .build()?;
        Ok(Self {
            shared: Arc::new(Shared {
                handle: runtime.handle().clone(),
                pump: lent.then(|| Pump::start(runtime.handle())),
                owned: Some(runtime),
                clock: OnceLock::new(),
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
                pump: None,
                clock: OnceLock::new(),
            }),
        }
    }

    /// The runtime's handle, to spawn on it.
    pub fn handle(&self) -> &Handle {
        &self.shared.handle
    }

    /// The time in which this runtime was awake. Whether a peer is silent is judged by it.
    pub fn clock(&self) -> &AwakeClock {
        let clock = &self.shared.clock;
        clock.get_or_init(|| AwakeClock::start(&self.shared.handle, TICK))
    }

    /// Says how what the calling thread is about to send goes out; see [`Turn`]. Does nothing unless the runtime is
    /// [lent](TransportRuntime::lent).
    pub fn turn(&self, sends: Sends) -> Turn {
        let held = match (&self.shared.pump, sends) {
            (Some(pump), Sends::Now { awaited }) => {
                if awaited {
                    pump.awaited();
                }
                Held::Here(pump.turn_here())
            }
            (Some(pump), Sends::WithOthers) if pump.awaited() => Held::Wakes(pump.turn()),
            _ => Held::Nothing,
        };
        Turn {
            _held: held,
            _local: PhantomData,
        }
    }

    /// The calling task is about to wait for an answer to what was sent earlier.
    pub fn awaited(&self) {
        if let Some(pump) = &self.shared.pump {
            pump.awaited();
        }
    }

    /// Runs `work` where the links are driven: for the task that reads answers and passes them on. It must never
    /// block, and can't use tokio's I/O and timers.
    ///
    /// The returned future ends when `work` does, or earlier if the runtime ends. Dropping it cancels `work`.
    pub fn drive<F>(&self, work: F) -> impl Future<Output = ()> + Send + use<F>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let driven = match &self.shared.pump {
            Some(pump) => {
                let (tell, done) = oneshot::channel::<()>();
                let task = pump.spawn(Box::pin(async move {
                    work.await;
                    drop(tell);
                }));
                Ok(Driven { task, done })
            }
            None => Err(work),
        };
        async move {
            match driven {
                Ok(driven) => driven.await,
                Err(work) => work.await,
            }
        }
    }

    /// Waits for `future`, at most for `limit` by [its clock](Self::clock). `None` if it was not done by then; it is dropped then.
    ///
    /// The timer runs on this runtime, so that the caller may be on any executor. Cancel safe if `future` is.
    pub async fn timeout<F: Future>(&self, limit: Duration, future: F) -> Option<F::Output> {
        self.clock().timeout(limit, future).await
    }
}

/// How something is sent in a [`Turn`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sends {
    /// At once, by the calling thread, when the turn ends. For what comes alone.
    Now {
        /// The calling task is about to wait for the answer.
        awaited: bool,
    },
    /// When the calling task next yields to its runtime, with all that it and others have sent by then. For what is one of many and
    /// is about to be awaited. If the task does not yield, it goes out some milliseconds later.
    WithOthers,
}

/// Held while something is sent, by [`TransportRuntime::turn`]. Without one, the runtime's own thread is woken to do it.
///
/// Hold it only over what sends, without waiting, and without a lock that the work of
/// [`TransportRuntime::drive`] takes: that may run when it is dropped.
#[must_use]
pub struct Turn {
    _held: Held,
    /// It belongs to its thread.
    _local: PhantomData<*const ()>,
}

enum Held {
    Nothing,
    Wakes(#[allow(dead_code)] Wakes),
    Here(#[allow(dead_code)] Here),
}

impl fmt::Debug for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turn").finish_non_exhaustive()
    }
}

impl fmt::Debug for TransportRuntime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransportRuntime").finish_non_exhaustive()
    }
}

/// Lets quinn spawn and set timers on a [`TransportRuntime`], whoever calls it.
///
/// Its time is that in which the runtime was awake: what a peer sent while this side stood still is read before the peer counts
/// as silent, and a resend or a keep-alive that was due meanwhile is due no earlier either.
pub(crate) struct QuinnRuntime {
    handle: Handle,
    clock: AwakeClock,
    pump: Option<Arc<Pump>>,
    /// Most datagrams in one send with segmentation offload.
    max_segments: usize,
    obituaries: Option<mpsc::Sender<Obituary>>,
}

impl QuinnRuntime {
    pub(crate) fn new(
        runtime: &TransportRuntime,
        max_segments: usize,
        obituaries: Option<mpsc::Sender<Obituary>>,
    ) -> Self {
        Self {
            handle: runtime.handle().clone(),
            clock: runtime.clock().clone(),
            pump: runtime.shared.pump.clone(),
            max_segments,
            obituaries,
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
        Box::pin(Timer {
            sleep: Box::pin(self.clock.sleep(at)),
            clock: self.clock.clone(),
            at,
        })
    }

    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>) {
        match &self.pump {
            Some(pump) => drop(pump.spawn(future)),
            None => drop(self.handle.spawn(future)),
        }
    }

    fn wrap_udp_socket(
        &self,
        socket: std::net::UdpSocket,
    ) -> io::Result<Arc<dyn quinn::AsyncUdpSocket>> {
        let obituaries = self.obituaries.clone();
        let Some(pump) = &self.pump else {
            let socket = Socket::watched(socket, self.max_segments, &self.handle)?;
            return Ok(Arc::new(socket.listening(obituaries)));
        };
        let socket = Socket::told(socket, self.max_segments, &self.handle)?;
        let socket = Arc::new(socket.listening(obituaries));
        pump.add_socket(&socket);
        Ok(socket)
    }

    fn now(&self) -> Instant {
        self.clock.now()
    }
}

/// A timer by the clock of a runtime.
struct Timer {
    clock: AwakeClock,
    at: Instant,
    sleep: Pin<Box<Sleep>>,
}

impl quinn::AsyncTimer for Timer {
    fn reset(mut self: Pin<&mut Self>, at: Instant) {
        let until = tokio::time::Instant::now() + self.clock.until(at);
        self.at = at;
        self.sleep.as_mut().reset(until);
    }

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        while self.clock.now() < self.at {
            ready!(Future::poll(self.sleep.as_mut(), cx));
            // Early, if something stood still.
            let at = self.at;
            self.as_mut().reset(at);
        }
        Poll::Ready(())
    }
}

impl fmt::Debug for Timer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timer")
            .field("at", &self.at)
            .finish_non_exhaustive()
    }
}
