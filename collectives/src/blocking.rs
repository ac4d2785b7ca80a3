//! Running an operation on a plain thread, and waking it at its deadline.
//!
//! A blocked thread sleeps by itself ([`direct`]) and needs no timer of a runtime, so that a deadline holds even if the
//! runtime is stuck or gone.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
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
}

/// The alarm of a blocked thread.
#[derive(Debug)]
pub(crate) struct ParkAlarm<'a>(&'a Cell<Option<Instant>>);

impl Alarm for ParkAlarm<'_> {
    fn may_sleep(&self) -> bool {
        true
    }

    fn poll_at(&mut self, at: Instant, _cx: &mut Context<'_>) -> Poll<()> {
        if Instant::now() >= at {
            self.0.set(None);
            return Poll::Ready(());
        }
        self.0.set(Some(at));
        Poll::Pending
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
    alarm: &'a Cell<Option<Instant>>,
    make: impl FnOnce(ParkAlarm<'a>) -> F,
) -> F::Output {
    let mut future = pin!(make(ParkAlarm(alarm)));
    direct::block_on(
        || alarm.get(),
        poll_fn(|cx| {
            alarm.set(None);
            future.as_mut().poll(cx)
        }),
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_alarm_ends_a_wait() {
        let alarm = Cell::new(None);
        let begun = Instant::now();
        let at = begun + Duration::from_millis(20);
        block_on(&alarm, |mut alarm| poll_fn(move |cx| alarm.poll_at(at, cx)));
        assert!(Instant::now() >= at);
    }
}
