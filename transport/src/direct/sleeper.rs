//! A thread that runs a future and sleeps in between.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};

use super::patience::{LONGEST, Patience};

/// Sockets that are waited for without asking the allocator.
const FEW: usize = 16;

/// What others need of a sleeping thread.
struct Bell {
    thread: Thread,
    woken: AtomicBool,
    /// The thread is in `poll(2)`, or about to be.
    polling: AtomicBool,
    /// Ends its `poll(2)`. `None` if the system gave no descriptor: then the thread sleeps on nothing else.
    event: Option<OwnedFd>,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.woken.swap(true, Ordering::SeqCst) {
            return;
        }
        match &self.event {
            // The thread says that it polls before it looks at `woken` for the last time.
            Some(event) if self.polling.load(Ordering::SeqCst) => {
                // It can only be full, and then the thread wakes up anyway.
                rustix::io::write(event, &1_u64.to_ne_bytes()).ok();
            }
            _ => self.thread.unpark(),
        }
    }
}

/// A socket that the thread waits for.
struct Wanted {
    /// A socket that is dropped meanwhile is closed at once.
    socket: Weak<OwnedFd>,
    flags: PollFlags,
}

struct Sleeper {
    bell: Arc<Bell>,
    waker: Waker,
    wanted: RefCell<Vec<Wanted>>,
    patience: Cell<Patience>,
    /// The last wait was eager, and so may be the next one.
    was_eager: Cell<bool>,
    /// The future is polled again in any case before the thread sleeps.
    polls_again: Cell<bool>,
}

thread_local! {
    /// How many `block_on` run inside each other on this thread. The list of sockets is the outermost's.
    static DEPTH: Cell<usize> = const { Cell::new(0) };

    // One for all futures of the thread: no allocation and no descriptor after the first.
    static SLEEPER: Sleeper = {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let bell = Arc::new(Bell {
            thread: std::thread::current(),
            woken: AtomicBool::new(false),
            polling: AtomicBool::new(false),
            event: event.ok(),
        });
        Sleeper {
            waker: Waker::from(Arc::clone(&bell)),
            bell,
            wanted: RefCell::default(),
            patience: Cell::new(Patience::new()),
            was_eager: Cell::new(false),
            polls_again: Cell::new(false),
        }
    };
}

/// Whether who polls needs no waker: a future that this thread runs by [`block_on`], which [`Socket`](super::Socket)s wake
/// themselves, or somebody who only looks ([`looker`]). For what is made of sockets and has wakers of its own.
#[must_use]
pub fn is_direct(cx: &Context<'_>) -> bool {
    is_own(cx) || only_looks(cx)
}

/// Whether who polls polls again before it sleeps, whatever happens: a thread in [`block_on`] that only looks as yet. For what
/// is made of sockets and shared memory: what it would take to be woken it can leave for later.
#[must_use]
pub fn polls_again(cx: &Context<'_>) -> bool {
    is_own(cx) && SLEEPER.with(|sleeper| sleeper.polls_again.get())
}

/// A waker that wakes nobody, for who polls a [`Socket`](super::Socket) and does not wait: then nothing is registered. (Any
/// other waker does as well, but that the socket can't know; [`Waker::noop`] has no address of its own.)
#[must_use]
pub fn looker() -> &'static Waker {
    static LOOKER: LazyLock<Waker> = LazyLock::new(|| Waker::from(Arc::new(Nobody)));
    &LOOKER
}

struct Nobody;

impl Wake for Nobody {
    fn wake(self: Arc<Self>) {}
}

pub(super) fn only_looks(cx: &Context<'_>) -> bool {
    cx.waker().will_wake(looker())
}

/// Whether it is the future that this thread runs and that may sleep on sockets.
fn is_own(cx: &Context<'_>) -> bool {
    // Threads that never block here have no sleeper.
    DEPTH.get() == 1
        && SLEEPER
            .with(|sleeper| sleeper.bell.event.is_some() && cx.waker().will_wake(&sleeper.waker))
}

/// The thread will sleep until this can be read or written, too.
pub(super) fn want(socket: &Arc<OwnedFd>, flags: PollFlags) {
    SLEEPER.with(|sleeper| {
        let mut wanted = sleeper.wanted.borrow_mut();
        let known = wanted
            .iter_mut()
            .find(|known| known.socket.as_ptr() == Arc::as_ptr(socket));
        match known {
            Some(known) => known.flags |= flags,
            None => wanted.push(Wanted {
                socket: Arc::downgrade(socket),
                flags,
            }),
        }
    });
}

/// Runs a future on this thread. When it is pending, the thread sleeps until its waker is woken, one of the [`Socket`](super::Socket)s
/// that it has polled in vain has something to give, or the time has come that `until` says; then the future is polled again.
///
/// While `eager` says so, the future is polled again for some microseconds before the thread sleeps, which is a gain where what it
/// waits for has a processor of its own and comes soon. How long adapts: who waits for long soon sleeps at once.
///
/// Inside another `block_on` on the same thread it works as well, but there sockets wake it through their runtime.
///
/// # Panics
///
/// If the future does.
pub fn block_on<F: Future>(
    until: impl Fn() -> Option<Instant>,
    eager: impl Fn() -> bool,
    future: F,
) -> F::Output {
    let mut future = pin!(future);
    SLEEPER.with(|sleeper| {
        let _entered = Entered::new(sleeper);
        let mut cx = Context::from_waker(&sleeper.waker);
        loop {
            if let Poll::Ready(output) = sleeper.poll(&eager, future.as_mut(), &mut cx) {
                return output;
            }
            sleeper.sleep(until());
        }
    })
}

/// Clears the list, also when the future panics.
struct Entered<'a>(&'a Sleeper);

impl<'a> Entered<'a> {
    fn new(sleeper: &'a Sleeper) -> Self {
        DEPTH.set(DEPTH.get() + 1);
        Self(sleeper)
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let depth = DEPTH.get() - 1;
        DEPTH.set(depth);
        if depth == 0 {
            self.0.wanted.borrow_mut().clear();
        } else {
            // Whatever woke the inner one may have been meant for the outer one.
            self.0.bell.woken.store(true, Ordering::SeqCst);
        }
    }
}

impl Sleeper {
    /// Polls the future once, or, if that is eager, for some time. If it is pending after that, it has seen to it that it is
    /// woken.
    fn poll<F: Future>(
        &self,
        eager: impl Fn() -> bool,
        mut future: Pin<&mut F>,
        cx: &mut Context<'_>,
    ) -> Poll<F::Output> {
        let look = self.patience.get().length();
        let expects = self.was_eager.get() && look.is_some();
        let mut polled = self.poll_once(future.as_mut(), cx, expects);
        if polled.is_ready() {
            return polled;
        }
        let eager = eager();
        self.was_eager.set(eager);
        match look {
            Some(length) if eager => polled = self.poll_eagerly(length, future.as_mut(), cx),
            None if eager => self.change_patience(Patience::skipped),
            _ => {}
        }
        if polled.is_pending() && (expects || (eager && look.is_some())) {
            polled = self.poll_once(future, cx, false);
        }
        polled
    }

    fn poll_once<F: Future>(
        &self,
        future: Pin<&mut F>,
        cx: &mut Context<'_>,
        polls_again: bool,
    ) -> Poll<F::Output> {
        // One inside another says no: when it ends, the outer one may be in its last poll before it sleeps.
        self.polls_again.set(polls_again && DEPTH.get() == 1);
        // Cleared before the poll, so that what happens during it is not missed. A swap: who finds it set and tells nobody
        // has written before what is seen after it.
        self.bell.woken.swap(false, Ordering::SeqCst);
        if DEPTH.get() == 1 {
            self.wanted.borrow_mut().clear();
        }
        future.poll(cx)
    }

    fn poll_eagerly<F: Future>(
        &self,
        length: Duration,
        mut future: Pin<&mut F>,
        cx: &mut Context<'_>,
    ) -> Poll<F::Output> {
        let begun = Instant::now();
        while begun.elapsed() < length {
            // Who is waited for may need this processor.
            std::thread::yield_now();
            let polled = self.poll_once(future.as_mut(), cx, true);
            if polled.is_ready() {
                // Somebody else may have kept the processor for long.
                let in_time = begun.elapsed() <= 2 * LONGEST;
                self.change_patience(if in_time {
                    Patience::found
                } else {
                    Patience::looked_in_vain
                });
                return polled;
            }
        }
        self.change_patience(Patience::looked_in_vain);
        Poll::Pending
    }

    fn change_patience(&self, change: impl FnOnce(&mut Patience)) {
        let mut patience = self.patience.get();
        change(&mut patience);
        self.patience.set(patience);
    }

    fn sleep(&self, until: Option<Instant>) {
        if DEPTH.get() > 1 || self.wanted.borrow().is_empty() {
            self.park(until);
            return;
        }
        let wanted = self.wanted.borrow();
        self.bell.polling.store(true, Ordering::SeqCst);
        if !self.bell.woken.load(Ordering::SeqCst) {
            self.sleep_on(&wanted, until);
        }
        self.bell.polling.store(false, Ordering::SeqCst);
    }

    fn park(&self, until: Option<Instant>) {
        while !self.bell.woken.load(Ordering::SeqCst) {
            match until {
                None => std::thread::park(),
                Some(at) => {
                    let Some(left) = at.checked_duration_since(Instant::now()) else {
                        return;
                    };
                    std::thread::park_timeout(left);
                }
            }
        }
    }

    /// Whatever ends it, the future is polled next and finds out itself.
    fn sleep_on(&self, wanted: &[Wanted], until: Option<Instant>) {
        let Some(event) = &self.bell.event else {
            return;
        };
        let timeout = until.map(|at| {
            let left = at.saturating_duration_since(Instant::now());
            Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        // They stay open as long as the thread sleeps on them.
        let mut few: [Option<Arc<OwnedFd>>; FEW] = Default::default();
        let many: Vec<Option<Arc<OwnedFd>>>;
        let sockets = if wanted.len() <= FEW {
            for (place, one) in few.iter_mut().zip(wanted) {
                *place = one.socket.upgrade();
            }
            &few[..wanted.len()]
        } else {
            many = wanted.iter().map(|one| one.socket.upgrade()).collect();
            &many
        };
        let bell = || PollFd::new(event, PollFlags::IN);
        let polled = sockets
            .iter()
            .zip(wanted)
            .map(|(socket, one)| match socket {
                Some(socket) => PollFd::from_borrowed_fd(socket.as_fd(), one.flags),
                None => bell(),
            });
        let mut few: [PollFd<'_>; FEW + 1] = std::array::from_fn(|_| bell());
        let mut many: Vec<PollFd<'_>>;
        let polled = if sockets.len() <= FEW {
            for (place, one) in few[1..].iter_mut().zip(polled) {
                *place = one;
            }
            &mut few[..=sockets.len()]
        } else {
            many = std::iter::once(bell()).chain(polled).collect();
            &mut many[..]
        };
        let ready = rustix::event::poll(polled, timeout.as_ref());
        if ready.is_ok() && !polled[0].revents().is_empty() {
            let mut count = [0; 8];
            // Empty already, if it is one of the others' place holders.
            rustix::io::read(event, &mut count).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_wake_from_another_thread_is_seen() {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let thread = std::thread::spawn(move || sender.send(5));
        assert_eq!(block_on(|| None, || false, receiver), Ok(5));
        assert_eq!(thread.join().unwrap(), Ok(()));
    }

    #[test]
    fn a_wake_during_the_poll_is_seen() {
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
        block_on(|| None, || false, done);
        assert_eq!(polls, 3);
    }

    /// Whoever leaves to the last poll what wakes it is woken.
    #[test]
    fn before_it_sleeps_a_thread_says_that_it_does_not_poll_again() {
        // The third one's first poll takes it for eager as the second was.
        for (eager, looks) in [(false, false), (true, true), (false, true)] {
            let (sender, mut receiver) = tokio::sync::oneshot::channel::<()>();
            let (mut sender, mut said) = (Some(sender), Vec::new());
            let come = poll_fn(|cx| {
                said.push(polls_again(cx));
                if polls_again(cx) {
                    return Poll::Pending;
                }
                if let Some(sender) = sender.take() {
                    let polled = Pin::new(&mut receiver).poll(cx);
                    std::thread::spawn(move || sender.send(()));
                    return polled.map(drop);
                }
                Pin::new(&mut receiver).poll(cx).map(drop)
            });
            block_on(|| None, || eager, come);
            assert!(said.contains(&false));
            assert_eq!(said.contains(&true), looks, "{said:?}");
        }
    }

    #[test]
    fn one_inside_another_leaves_nothing_to_a_poll_that_does_not_come() {
        let said = block_on(
            || None,
            || true,
            poll_fn(|cx| {
                let inner = block_on(|| None, || true, poll_fn(|cx| Poll::Ready(polls_again(cx))));
                Poll::Ready((inner, polls_again(cx)))
            }),
        );
        assert_eq!(said, (false, false));
    }

    #[test]
    fn the_time_ends_a_wait() {
        let at = Instant::now() + Duration::from_millis(20);
        let come = poll_fn(|_| {
            if Instant::now() >= at {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        });
        block_on(|| Some(at), || true, come);
    }

    #[test]
    fn one_inside_another_loses_no_wake() {
        let (inner_sender, mut inner) = tokio::sync::oneshot::channel();
        let (outer_sender, mut outer) = tokio::sync::oneshot::channel();
        let mut senders = Some((inner_sender, outer_sender));
        let done = poll_fn(|cx| {
            if let Poll::Ready(value) = std::pin::Pin::new(&mut outer).poll(cx) {
                return Poll::Ready(value);
            }
            if let Some((inner_sender, outer_sender)) = senders.take() {
                // It wakes the thread while the inner future runs, for the outer one.
                let thread = std::thread::spawn(move || {
                    outer_sender.send(1).unwrap();
                    inner_sender.send(()).unwrap();
                });
                block_on(|| None, || false, &mut inner).unwrap();
                thread.join().unwrap();
            }
            Poll::Pending
        });
        assert_eq!(block_on(|| None, || false, done), Ok(1));
    }
}
