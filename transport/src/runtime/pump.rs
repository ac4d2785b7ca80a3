//! Tasks of a transport runtime that the caller's thread may drive.
//!
//! A call costs two wake-ups more if its links live on a thread of their own: one to have it sent, one to hear the result.
//! If they live on the caller's runtime, code that blocks it stops heartbeats. So both may drive them: quinn's
//! tasks and those that read results wait in one queue, and whoever is there polls them, one thread at a time.
//!
//! - The runtime's *own* thread always can. It watches the sockets, and is woken for whatever any thread but
//!   the guest has made ready.
//! - A *guest* is a task on the runtime of somebody who awaits calls. While it is active, it watches the sockets
//!   in the own thread's place, and what its runtime's tasks send in a turn wakes it alone.
//! - Any thread that sends may drive what it has made ready, right there.
//!
//! The own thread looks after an active guest every [`LOOK`]. If work was waiting and the guest was not seen since the
//! last look, its runtime is blocked: the own thread takes everything back at once. The same happens after [`IDLE`]
//! looks without a new call. The next call makes the guest active again. So the guest can delay a datagram by
//! two looks at most, which is far below what a heartbeat or an acknowledgement has, and user code can do
//! nothing that costs a connection. A runtime that was blocked is the guest again once it has polled its task: one
//! that nobody polls, with calls from within its context, delays the first of them and no other.

mod task;
mod watch;

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use tokio::io::Interest;
use tokio::runtime::{Handle, Id, Runtime};
use tokio::task::unconstrained;
use tokio::time::{Instant, Sleep, sleep};

pub(super) use self::task::Driven;
use self::task::{Task, Work, end};
use self::watch::Watch;
use super::socket::Socket;

/// How often the own thread looks after an active guest.
const LOOK: Duration = Duration::from_millis(5);

/// Looks without a new call after which the guest is not needed any more.
const IDLE: u32 = 10;

/// Tasks that are polled before other tasks of the same thread have a turn.
const BUDGET: usize = 256;

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is held in here is whole between any two statements.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    /// The pump whose guest is to be woken by this thread.
    static TURN: Cell<*const Pump> = const { Cell::new(std::ptr::null()) };
    /// The pump that this thread is about to run.
    static HERE: Cell<*const Pump> = const { Cell::new(std::ptr::null()) };
}

/// See the [module](self).
pub(super) struct Pump {
    ready: Mutex<VecDeque<Arc<Task>>>,
    /// Some thread polls tasks. It looks at `ready` once more when it has set this to false.
    running: AtomicBool,
    tasks: Mutex<Tasks>,
    /// Nothing is polled any more.
    closed: AtomicBool,
    /// A runtime that ends when no thread polls tasks, for they use its timers.
    ending: Mutex<Option<Runtime>>,
    sockets: Mutex<Vec<Weak<Socket>>>,
    /// Counts changes of `sockets`.
    version: AtomicU64,
    own: Seat,
    own_runtime: Id,
    guest: Mutex<Option<Arc<Guest>>>,
}

#[derive(Default)]
struct Tasks {
    all: HashMap<u64, Arc<Task>>,
    next: u64,
}

/// Wakes the task of one of the two drivers.
#[derive(Default)]
struct Seat(Mutex<Option<Waker>>);

impl Seat {
    fn take(&self, cx: &Context<'_>) {
        let mut seat = lock(&self.0);
        if !seat
            .as_ref()
            .is_some_and(|waker| waker.will_wake(cx.waker()))
        {
            *seat = Some(cx.waker().clone());
        }
    }

    fn wake(&self) {
        let waker = lock(&self.0).clone();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

struct Guest {
    runtime: Id,
    seat: Seat,
    /// It watches the sockets.
    active: AtomicBool,
    /// Its task has ended, or must.
    gone: AtomicBool,
    /// Counts calls.
    asked: AtomicU64,
    /// Counts polls of its task.
    seen: AtomicU64,
    /// What it had counted when it was found to be blocked; it is the guest again once it counts on.
    blocked: AtomicU64,
    /// Its runtime has no reactor.
    blind: bool,
}

/// While it is held, what this thread makes ready wakes the guest on this thread's runtime and not the own thread.
pub(super) struct Wakes(*const Pump);

impl Wakes {
    fn new(pump: &Pump) -> Self {
        Self(TURN.replace(pump))
    }
}

impl Drop for Wakes {
    fn drop(&mut self) {
        TURN.set(self.0);
    }
}

impl Pump {
    /// A pump whose own thread is one of `handle`'s.
    pub(super) fn start(handle: &Handle) -> Arc<Self> {
        let pump = Arc::new(Self {
            ready: Mutex::default(),
            running: AtomicBool::new(false),
            tasks: Mutex::default(),
            closed: AtomicBool::new(false),
            ending: Mutex::default(),
            sockets: Mutex::default(),
            version: AtomicU64::new(0),
            own: Seat::default(),
            own_runtime: handle.id(),
            guest: Mutex::default(),
        });
        let own = Own {
            pump: Arc::clone(&pump),
            watch: Watch::default(),
            look: None,
            asked: 0,
            seen: 0,
            idle: 0,
        };
        handle.spawn(unconstrained(own));
        pump
    }

    /// Adds a socket that was made by [`Socket::told`].
    pub(super) fn add_socket(&self, socket: &Arc<Socket>) {
        let mut sockets = lock(&self.sockets);
        sockets.retain(|socket| socket.strong_count() > 0);
        sockets.push(Arc::downgrade(socket));
        self.version.fetch_add(1, Ordering::SeqCst);
        drop(sockets);
        self.own.wake();
        if let Some(guest) = self.guest() {
            guest.seat.wake();
        }
    }

    /// Drives `work` until it is done or the pump is closed.
    pub(super) fn spawn(self: &Arc<Self>, work: Work) -> Arc<Task> {
        let mut tasks = lock(&self.tasks);
        tasks.next += 1;
        let closed = self.closed.load(Ordering::SeqCst);
        let (work, refused) = if closed {
            (None, Some(work))
        } else {
            (Some(work), None)
        };
        let task = Arc::new(Task::new(tasks.next, work, Arc::downgrade(self)));
        if !closed {
            tasks.all.insert(task.id(), Arc::clone(&task));
        }
        drop(tasks);
        // Without the lock: it may be what holds others.
        end(refused);
        Wake::wake_by_ref(&task);
        task
    }

    /// Drops all tasks, takes no more, and ends the runtime that they ran on. Never waits: if a thread polls a
    /// task now, it does the last part.
    pub(super) fn close(&self, runtime: Option<Runtime>) {
        let tasks = {
            let mut tasks = lock(&self.tasks);
            self.closed.store(true, Ordering::SeqCst);
            std::mem::take(&mut tasks.all)
        };
        for task in tasks.into_values() {
            task.cancel();
        }
        let guest = lock(&self.guest).take();
        if let Some(guest) = guest {
            guest.leave();
        }
        *lock(&self.ending) = runtime;
        self.end_runtime();
    }

    /// Ends the runtime that is to end, if no thread polls tasks. Who does calls this afterwards.
    fn end_runtime(&self) {
        while lock(&self.ending).is_some() && !self.running.swap(true, Ordering::SeqCst) {
            let runtime = lock(&self.ending).take();
            if let Some(runtime) = runtime {
                // `running` stays true: no thread ever polls again.
                return runtime.shutdown_background();
            }
            self.running.store(false, Ordering::SeqCst);
        }
    }

    /// The calling task is about to wait: its runtime becomes the guest, unless another one is active or it has no
    /// reactor. Whether it is the guest now.
    pub(super) fn awaited(self: &Arc<Self>) -> bool {
        Handle::try_current().is_ok_and(|handle| self.invite(&handle))
    }

    /// For a task whose runtime is the guest and that is about to wait: the guest drives what it sends.
    pub(super) fn turn(&self) -> Wakes {
        Wakes::new(self)
    }

    /// The calling thread itself drives what it sends, when the turn ends.
    pub(super) fn turn_here(self: &Arc<Self>) -> Here {
        Here::new(self, Some(Arc::clone(self)))
    }

    /// Whether the runtime is the active guest now.
    fn invite(self: &Arc<Self>, handle: &Handle) -> bool {
        let mut place = lock(&self.guest);
        if let Some(guest) = &*place {
            if guest.runtime == handle.id() && !guest.gone.load(Ordering::Acquire) {
                guest.asked.fetch_add(1, Ordering::Relaxed);
                if guest.blind || guest.is_blocked() {
                    return false;
                }
                if !guest.active.swap(true, Ordering::SeqCst) {
                    guest.seat.wake();
                    self.own.wake();
                }
                return true;
            }
            if guest.active.load(Ordering::SeqCst) {
                return false;
            }
        }
        if handle.id() == self.own_runtime {
            return false;
        }
        let blind = !self.has_reactor();
        let guest = Arc::new(Guest {
            runtime: handle.id(),
            seat: Seat::default(),
            active: AtomicBool::new(!blind),
            gone: AtomicBool::new(false),
            asked: AtomicU64::new(1),
            seen: AtomicU64::new(0),
            blocked: AtomicU64::new(u64::MAX),
            blind,
        });
        if let Some(before) = place.replace(Arc::clone(&guest)) {
            before.leave();
        }
        drop(place);
        if blind {
            return false;
        }
        let visit = Visit {
            pump: Arc::downgrade(self),
            guest,
            watch: Watch::default(),
        };
        handle.spawn(unconstrained(visit));
        self.own.wake();
        true
    }

    /// Whether the current runtime can watch a socket.
    fn has_reactor(&self) -> bool {
        let sockets = lock(&self.sockets);
        let Some(socket) = sockets.iter().find_map(Weak::upgrade) else {
            return false;
        };
        drop(sockets);
        // Tokio has no other answer than a panic for a runtime that was built without.
        if cfg!(panic = "abort") {
            return false;
        }
        catch_unwind(AssertUnwindSafe(|| {
            socket.watch_here(Interest::READABLE).is_ok()
        }))
        .unwrap_or(false)
    }

    fn guest(&self) -> Option<Arc<Guest>> {
        lock(&self.guest).clone()
    }

    fn active_guest(&self) -> Option<Arc<Guest>> {
        self.guest()
            .filter(|guest| guest.active.load(Ordering::SeqCst))
    }

    fn reads(&self) -> u64 {
        let sockets = lock(&self.sockets);
        let sockets = sockets.iter().filter_map(Weak::upgrade);
        sockets.map(|socket| socket.reads()).sum()
    }

    fn tell_sockets(&self) {
        for socket in lock(&self.sockets).iter().filter_map(Weak::upgrade) {
            socket.readable();
        }
    }

    /// A task wants to be polled.
    pub(super) fn queue(&self, task: Arc<Task>) {
        lock(&self.ready).push_back(task);
        self.notify();
    }

    /// A task is not to be polled any more.
    pub(super) fn forget(&self, task: u64) {
        let task = lock(&self.tasks).all.remove(&task);
        drop(task);
    }

    /// Somebody has put a task into `ready`.
    fn notify(&self) {
        if std::ptr::eq(HERE.get(), self) || self.running.load(Ordering::SeqCst) {
            return;
        }
        if std::ptr::eq(TURN.get(), self)
            && let Some(guest) = self.active_guest()
        {
            return guest.seat.wake();
        }
        self.own.wake();
    }

    /// Polls what is ready, unless another thread does. Whether there is more.
    fn run(&self) -> bool {
        let mut left = BUDGET;
        loop {
            if self.running.swap(true, Ordering::SeqCst) {
                return false;
            }
            let running = Running(self);
            while left > 0 && !self.closed.load(Ordering::SeqCst) {
                let Some(task) = lock(&self.ready).pop_front() else {
                    break;
                };
                task.run(self);
                left -= 1;
            }
            drop(running);
            self.end_runtime();
            if self.closed.load(Ordering::SeqCst) {
                return false;
            }
            if lock(&self.ready).is_empty() {
                return false;
            }
            if left == 0 {
                return true;
            }
        }
    }
}

impl fmt::Debug for Pump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pump").finish_non_exhaustive()
    }
}

/// What this thread makes ready, it runs itself: at the end of this, if it has the pump.
pub(super) struct Here {
    before: *const Pump,
    run: Option<Arc<Pump>>,
}

impl Here {
    fn new(pump: &Pump, run: Option<Arc<Pump>>) -> Self {
        Self {
            before: HERE.replace(pump),
            run,
        }
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        let more = self.run.as_ref().is_some_and(|pump| pump.run());
        HERE.set(self.before);
        if more && let Some(pump) = &self.run {
            pump.notify();
        }
    }
}

struct Running<'a>(&'a Pump);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.running.store(false, Ordering::SeqCst);
    }
}

/// The task on the runtime's own thread.
struct Own {
    pump: Arc<Pump>,
    watch: Watch,
    /// The next look after the guest.
    look: Option<Pin<Box<Sleep>>>,
    /// At the last look.
    asked: u64,
    seen: u64,
    /// Looks since the last call.
    idle: u32,
}

impl Own {
    /// Whether it is time for a look.
    fn is_time(&mut self, cx: &mut Context<'_>) -> bool {
        let look = self.look.get_or_insert_with(|| Box::pin(sleep(LOOK)));
        if look.as_mut().poll(cx).is_pending() {
            return false;
        }
        look.as_mut().reset(Instant::now() + LOOK);
        if look.as_mut().poll(cx).is_ready() {
            cx.waker().wake_by_ref();
        }
        true
    }

    fn look_after(&mut self, guest: &Guest, cx: &mut Context<'_>) {
        if !self.is_time(cx) {
            return;
        }
        let seen = guest.seen.load(Ordering::SeqCst);
        let asked = guest.asked.load(Ordering::Relaxed);
        let absent = seen == self.seen;
        let waiting = !lock(&self.pump.ready).is_empty();
        let before = self.pump.reads();
        self.pump.tell_sockets();
        let _more = self.pump.run();
        let found = self.pump.reads() != before;
        self.idle = if asked == self.asked {
            self.idle + 1
        } else {
            0
        };
        (self.seen, self.asked) = (seen, asked);
        let blocked = absent && (waiting || found);
        if blocked {
            guest.blocked.store(seen, Ordering::SeqCst);
        }
        if blocked || self.idle >= IDLE {
            guest.active.store(false, Ordering::SeqCst);
            // It stops watching.
            guest.seat.wake();
        }
    }
}

impl Future for Own {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        this.pump.own.take(cx);
        let here = Arc::clone(&this.pump);
        let _here = Here::new(&here, None);
        if let Some(guest) = this.pump.active_guest() {
            this.watch.stop();
            this.look_after(&guest, cx);
        }
        if this.pump.active_guest().is_none() {
            this.idle = 0;
            if this.watch.poll(&this.pump, cx) {
                this.look = None;
            } else if this.is_time(cx) {
                this.pump.tell_sockets();
            }
        }
        if this.pump.run() {
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }
}

/// The task on a guest's runtime.
struct Visit {
    pump: Weak<Pump>,
    guest: Arc<Guest>,
    watch: Watch,
}

impl Future for Visit {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        this.guest.seat.take(cx);
        this.guest.seen.fetch_add(1, Ordering::SeqCst);
        let Some(pump) = this.pump.upgrade() else {
            return Poll::Ready(());
        };
        if this.guest.gone.load(Ordering::SeqCst) {
            return Poll::Ready(());
        }
        let _here = Here::new(&pump, None);
        if this.guest.active.load(Ordering::SeqCst) {
            if !this.watch.poll(&pump, cx) {
                // The own thread can.
                this.guest.active.store(false, Ordering::SeqCst);
                pump.own.wake();
            }
        } else {
            this.watch.stop();
        }
        if pump.run() {
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }
}

impl Guest {
    /// Its runtime was not there when there was work, and was not seen since.
    fn is_blocked(&self) -> bool {
        self.blocked.load(Ordering::SeqCst) == self.seen.load(Ordering::SeqCst)
    }

    /// Its task ends when it is polled again.
    fn leave(&self) {
        self.gone.store(true, Ordering::SeqCst);
        self.active.store(false, Ordering::SeqCst);
        self.seat.wake();
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        // Its runtime ends. The own thread takes over what it has left.
        self.guest.gone.store(true, Ordering::SeqCst);
        self.guest.active.store(false, Ordering::SeqCst);
        // A waker keeps a runtime that has ended in memory, and what it has open.
        let waker = lock(&self.guest.seat.0).take();
        drop(waker);
        if let Some(pump) = self.pump.upgrade() {
            pump.own.wake();
        }
    }
}

#[cfg(test)]
mod tests;
