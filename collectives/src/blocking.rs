//! Running an operation on a plain thread, and waking it at its deadline.
//!
//! A blocked thread sleeps in `park_timeout` and needs no timer of a runtime, so that a deadline holds
//! even if the runtime is stuck or gone.

use std::cell::Cell;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Instant;

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

struct Parker {
    thread: Thread,
    woken: AtomicBool,
}

impl Wake for Parker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.woken.swap(true, Ordering::SeqCst) {
            self.thread.unpark();
        }
    }
}

thread_local! {
    // One for all operations of the thread: no allocation after the first.
    static PARKER: (Arc<Parker>, Waker) = {
        let parker = Arc::new(Parker {
            thread: std::thread::current(),
            woken: AtomicBool::new(false),
        });
        let waker = Waker::from(Arc::clone(&parker));
        (parker, waker)
    };
}

/// Runs a future on this thread. The alarm that it is given wakes it.
pub(crate) fn block_on<'a, F: Future>(
    alarm: &'a Cell<Option<Instant>>,
    make: impl FnOnce(ParkAlarm<'a>) -> F,
) -> F::Output {
    let mut future = pin!(make(ParkAlarm(alarm)));
    PARKER.with(|(parker, waker)| {
        let mut cx = Context::from_waker(waker);
        loop {
            // Cleared before the poll, so that what happens during it is not missed.
            parker.woken.store(false, Ordering::SeqCst);
            alarm.set(None);
            if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
                return output;
            }
            while !parker.woken.load(Ordering::SeqCst) {
                match alarm.get() {
                    None => std::thread::park(),
                    Some(at) => {
                        let Some(left) = at.checked_duration_since(Instant::now()) else {
                            break;
                        };
                        std::thread::park_timeout(left);
                    }
                }
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_wake_from_another_thread_is_seen() {
        let alarm = Cell::new(None);
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let thread = std::thread::spawn(move || sender.send(5));
        assert_eq!(block_on(&alarm, |_| receiver), Ok(5));
        assert_eq!(thread.join().unwrap(), Ok(()));
    }

    #[test]
    fn a_wake_during_the_poll_is_seen() {
        let alarm = Cell::new(None);
        let mut polls = 0;
        let done = poll_fn(|cx| {
            polls += 1;
            cx.waker().wake_by_ref();
            if polls == 3 {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        });
        block_on(&alarm, |_| done);
        assert_eq!(polls, 3);
    }

    #[test]
    fn the_alarm_ends_a_wait() {
        let alarm = Cell::new(None);
        let begun = Instant::now();
        let at = begun + Duration::from_millis(20);
        block_on(&alarm, |mut alarm| poll_fn(move |cx| alarm.poll_at(at, cx)));
        assert!(Instant::now() >= at);
    }
}
