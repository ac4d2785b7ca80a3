//! Running an operation on a plain thread, and waking it at its deadline.
//!
//! A blocked thread sleeps by itself ([`direct`]) and needs no timer of a runtime, so that a deadline holds even if the
//! runtime is stuck or gone.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::OnceLock;
use std::task::{Context, Poll};
use std::time::Instant;

use kolo_transport::direct;
use tokio::time::Sleep;

/// Something that wakes the task at a time.
pub(crate) trait Alarm {
    /// Ready when the time has come. Only the last time that was asked for counts.
    fn poll_at(&mut self, at: Instant, cx: &mut Context<'_>) -> Poll<()>;

    /// Whether it belongs to a thread that may sleep in the middle of a poll.
    fn may_sleep(&self) -> bool {
        false
    }

    /// Whether a thread shall look for some time before it sleeps.
    fn be_eager(&mut self, _eager: bool) {}
}

/// What a blocked thread waits for besides being woken.
#[derive(Debug, Default)]
pub(crate) struct Wait {
    at: Cell<Option<Instant>>,
    is_eager: Cell<bool>,
}

/// The alarm of a blocked thread.
#[derive(Debug)]
pub(crate) struct ParkAlarm<'a>(&'a Wait);

impl Alarm for ParkAlarm<'_> {
    fn may_sleep(&self) -> bool {
        true
    }

    fn poll_at(&mut self, at: Instant, _cx: &mut Context<'_>) -> Poll<()> {
        if Instant::now() >= at {
            self.0.at.set(None);
            return Poll::Ready(());
        }
        self.0.at.set(Some(at));
        Poll::Pending
    }

    fn be_eager(&mut self, eager: bool) {
        self.0.is_eager.set(eager);
    }
}

/// The alarm of an async task.
#[derive(Debug)]
pub(crate) struct SleepAlarm<'a>(pub(crate) Pin<&'a mut Sleep>);

impl Alarm for SleepAlarm<'_> {
    fn poll_at(&mut self, at: Instant, cx: &mut Context<'_>) -> Poll<()> {
        let at = tokio::time::Instant::from_std(at);
        if self.0.deadline() != at {
            self.0.as_mut().reset(at);
        }
        self.0.as_mut().poll(cx)
    }
}

/// Runs a future on this thread. The alarm that it is given wakes it.
pub(crate) fn block_on<'a, F: Future>(
    wait: &'a Wait,
    make: impl FnOnce(ParkAlarm<'a>) -> F,
) -> F::Output {
    let mut future = pin!(make(ParkAlarm(wait)));
    direct::block_on(
        || wait.at.get(),
        || wait.is_eager.get(),
        poll_fn(|cx| {
            wait.at.set(None);
            future.as_mut().poll(cx)
        }),
    )
}

/// Processors that this process may use.
pub(crate) fn processors() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    // The system takes some microseconds to say so.
    *COUNT.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}
