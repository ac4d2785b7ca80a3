//! The tasks of a [`Pump`].

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering, fence};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Wake, Waker};

use tokio::sync::oneshot;
use tokio::task::unconstrained;

use super::{Pump, lock};

const WAITING: u8 = 0;
const QUEUED: u8 = 1;
const POLLED: u8 = 2;
/// Woken while it was polled.
const AGAIN: u8 = 3;
const DONE: u8 = 4;

/// What a task does.
pub(in crate::runtime) type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A task of a [`Pump`].
pub(in crate::runtime) struct Task {
    id: u64,
    work: Mutex<Option<Work>>,
    state: AtomicU8,
    cancelled: AtomicBool,
    pump: Weak<Pump>,
}

impl Task {
    /// A task that is not queued. Without work it is done.
    pub(in crate::runtime) fn new(id: u64, work: Option<Work>, pump: Weak<Pump>) -> Self {
        let state = if work.is_some() { WAITING } else { DONE };
        Self {
            id,
            work: Mutex::new(work),
            state: AtomicU8::new(state),
            cancelled: AtomicBool::new(false),
            pump,
        }
    }

    pub(in crate::runtime) fn id(&self) -> u64 {
        self.id
    }

    /// Drops the work: now, or when the thread that polls it is done.
    pub(in crate::runtime) fn cancel(&self) {
        self.cancelled.store(true, Ordering::SeqCst);
        self.drop_cancelled();
    }

    fn drop_cancelled(&self) {
        // Either the canceller finds the lock free, or who had it finds the mark: both look behind what they wrote.
        fence(Ordering::SeqCst);
        if self.cancelled.load(Ordering::SeqCst)
            && let Ok(mut work) = self.work.try_lock()
        {
            self.state.store(DONE, Ordering::SeqCst);
            let work = work.take();
            end(work);
        }
    }

    /// Only by the thread that runs the pump, for a task that was queued.
    pub(in crate::runtime) fn run(self: Arc<Self>, pump: &Pump) {
        let queued =
            self.state
                .compare_exchange(QUEUED, POLLED, Ordering::SeqCst, Ordering::SeqCst);
        if queued.is_err() {
            return;
        }
        let mut work = lock(&self.work);
        let waker = Waker::from(Arc::clone(&self));
        let mut cx = Context::from_waker(&waker);
        let done = match work.as_mut() {
            None => true,
            Some(work) => {
                // It is none of what tokio lets the calling task do in one turn: with that used up, it would be
                // polled over and over, and get nowhere.
                let mut work = unconstrained(work.as_mut());
                catch_unwind(AssertUnwindSafe(|| Pin::new(&mut work).poll(&mut cx)))
                    .unwrap_or_else(|_| {
                        tracing::error!("a task of the transport panicked");
                        Poll::Ready(())
                    })
                    .is_ready()
            }
        };
        if done {
            self.state.store(DONE, Ordering::SeqCst);
            let finished = work.take();
            drop(work);
            pump.forget(self.id);
            return end(finished);
        }
        drop(work);
        self.drop_cancelled();
        let rest = self
            .state
            .compare_exchange(POLLED, WAITING, Ordering::SeqCst, Ordering::SeqCst);
        if rest == Err(AGAIN) {
            self.state.store(QUEUED, Ordering::SeqCst);
            pump.queue(self);
        }
    }
}

/// Drops what a task did. A panic of that must not end the thread that polls the others.
pub(in crate::runtime) fn end(work: Option<Work>) {
    if catch_unwind(AssertUnwindSafe(|| drop(work))).is_err() {
        tracing::error!("a task of the transport panicked when it was dropped");
    }
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        Self::wake_by_ref(&self);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let next = |state| match state {
            WAITING => Some(QUEUED),
            POLLED => Some(AGAIN),
            _ => None,
        };
        let woken = self
            .state
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
        if woken == Ok(WAITING)
            && let Some(pump) = self.pump.upgrade()
        {
            pump.queue(Arc::clone(self));
        }
    }
}

/// The rest of a task's life. Dropping it cancels the task.
pub(in crate::runtime) struct Driven {
    pub(in crate::runtime) task: Arc<Task>,
    pub(in crate::runtime) done: oneshot::Receiver<()>,
}

impl Future for Driven {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        // It ends without a word if it is cancelled or panics.
        Pin::new(&mut self.done).poll(cx).map(drop)
    }
}

impl Drop for Driven {
    fn drop(&mut self) {
        self.task.cancel();
        if let Some(pump) = self.task.pump.upgrade() {
            pump.forget(self.task.id);
        }
    }
}
