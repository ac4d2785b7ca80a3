//! What the clones of a communicator share, and how an operation gets its turn.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use kolo_transport::ids::{Generation, JobId, Rank};
use tokio::runtime::Handle;
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::Sleep;

use crate::blocking::Alarm;
use crate::cause::Cause;
use crate::element::Element;
use crate::engine::{Engine, call_notice};
use crate::error::CollectiveError;
use crate::lane::{Connector, Lane, LaneError};
use crate::operation::{Operation, Tag};
use crate::run::Run;
use crate::signals::{Arrival, Signals};

/// Longer timeouts count as this one: clocks end somewhere.
const FOREVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

pub(crate) struct Inner {
    pub(crate) me: u32,
    pub(crate) world: u32,
    pub(crate) generation: Generation,
    pub(crate) job: JobId,
    connector: Arc<dyn Connector>,
    handle: Handle,
    pub(crate) signals: Signals,
    /// Fair: operations get it in the order in which they asked.
    pub(crate) engine: Mutex<Engine>,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner")
            .field("me", &self.me)
            .finish_non_exhaustive()
    }
}

impl Inner {
    pub(crate) fn new(
        me: u32,
        world: u32,
        generation: Generation,
        job: JobId,
        connector: Arc<dyn Connector>,
        handle: Handle,
    ) -> Self {
        Self {
            me,
            world,
            generation,
            job,
            connector,
            handle,
            signals: Signals::new(world),
            engine: Mutex::new(Engine::new(me, world, generation)),
        }
    }

    /// A timer of the communicator's own runtime, for async operations on any executor.
    pub(crate) fn sleep(&self) -> Sleep {
        let _context = self.handle.enter();
        tokio::time::sleep(FOREVER)
    }

    /// Waits until no other operation is under way, and takes the next `numbers` numbers of operations.
    pub(crate) async fn turn<A: Alarm>(
        self: &Arc<Self>,
        alarm: &mut A,
        started: Instant,
        operation: &'static str,
        numbers: u64,
    ) -> Result<(Turn<'_>, Tag), CollectiveError> {
        let timeout = self.signals.lock().timeout.min(FOREVER);
        let deadline = started + timeout;
        let engine = if let Ok(engine) = self.engine.try_lock() {
            engine
        } else {
            let mut waiting = Waiting {
                inner: self,
                operation,
                numbers,
                call: self.signals.lock().call,
                over: false,
            };
            let _wanted = self.signals.want();
            let mut lock = pin!(self.engine.lock());
            let engine = poll_fn(|cx| {
                if let Poll::Ready(engine) = lock.as_mut().poll(cx) {
                    return Poll::Ready(Ok(engine));
                }
                alarm.poll_at(deadline, cx).map(|()| {
                    Err(CollectiveError::Deadline {
                        operation: operation.to_owned(),
                        waited: timeout,
                        late: Vec::new(),
                    })
                })
            })
            .await?;
            waiting.over = true;
            engine
        };
        let mut turn = Turn {
            inner: self,
            engine,
            operation: Operation::BARRIER,
            started,
            deadline,
        };
        self.settle(&mut turn.engine);
        let tag = self.signals.lock().take_numbers(numbers);
        Ok((turn, tag))
    }

    /// Takes the numbers of the operations that were given up before their turn, and tells the peers.
    fn settle(&self, engine: &mut Engine) {
        let mut state = self.signals.lock();
        for (operation, numbers) in std::mem::take(&mut state.cancelled) {
            let tag = state.take_numbers(numbers);
            let error = CollectiveError::Aborted {
                reason: format!("{operation} was cancelled before its turn"),
            };
            tracing::debug!(rank = self.me, %tag, %error, "gave up");
            engine.previous = None;
            let notice = engine.tell(tag, &Cause::of(&error, Rank(self.me)));
            state.operation_notice = Some(notice);
        }
    }

    /// Starts making a link; the lane comes by [`Inner::arrive`].
    fn connect(self: &Arc<Self>, peer: u32) {
        let connecting = self.connector.connect(Rank(peer));
        let inner = Arc::downgrade(self);
        self.handle.spawn(async move {
            let lane = connecting.await;
            if let Some(inner) = inner.upgrade() {
                inner.arrive(peer, lane);
            }
        });
    }

    /// A lane has come, or will not.
    pub(crate) fn arrive(self: &Arc<Self>, rank: u32, lane: Result<Box<dyn Lane>, LaneError>) {
        let failed = self.signals.change(|state| {
            state.arrivals.retain(|arrival| arrival.rank != rank);
            state.arrivals.push(Arrival { rank, lane });
            state.needs_attendant()
        });
        // The next operation takes it in. But after a failure the peer, which waits, must hear of it now.
        if failed {
            self.attend();
        }
    }

    pub(crate) fn abort_call(self: &Arc<Self>, call: u64, reason: &str) {
        let news = self.signals.change(|state| {
            if state.call != call
                || matches!(state.call_notice, Some((noticed, _)) if noticed == call)
            {
                return false;
            }
            let echo = state
                .last_failure
                .as_ref()
                .filter(|error| error.culprit_rank().is_some());
            let own = CollectiveError::Aborted {
                reason: reason.to_owned(),
            };
            let cause = Cause::of(echo.unwrap_or(&own), Rank(self.me));
            state.call_notice = Some((call, call_notice(self.generation, call, &cause)));
            state.notice_pending = true;
            state.call_failed.get_or_insert(own);
            true
        });
        if !news || self.world == 1 {
            return;
        }
        let Ok(mut engine) = self.engine.try_lock() else {
            // The operation that is under way ends now; then the attendant sends the notice.
            self.attend();
            return;
        };
        self.give_notice(&mut engine);
        engine.flush_now();
        if engine.has_backlog() {
            self.attend();
        }
    }

    /// Puts the notice of a failed call on all links, and makes links to some of the ranks that may wait for
    /// this one to make them. Those tell the others.
    fn give_notice(self: &Arc<Self>, engine: &mut Engine) {
        let (arrivals, notice, old) = {
            let mut state = self.signals.lock();
            if !std::mem::take(&mut state.notice_pending) {
                return;
            }
            let notice = state.call_notice.as_ref().map(|(_, frame)| frame.clone());
            let arrivals = std::mem::take(&mut state.arrivals);
            (arrivals, notice, state.operation_notice.clone())
        };
        for arrival in arrivals {
            // A link that did not come is made again when it is needed.
            drop(engine.arrive(arrival, old.as_deref().unwrap_or_default()));
        }
        engine.notify_all(&notice.unwrap_or_default());
        for peer in engine.unlinked_neighbours() {
            self.connect(peer);
        }
    }

    /// Makes sure that what a failed operation or call left to be said is said, without an operation to do it.
    fn attend(self: &Arc<Self>) {
        {
            let mut state = self.signals.lock();
            if std::mem::replace(&mut state.attended, true) {
                return;
            }
        }
        let inner = Arc::clone(self);
        self.handle
            .spawn(async move { inner.attend_until_done().await });
    }

    async fn attend_until_done(self: &Arc<Self>) {
        let mut engine = self.engine.lock().await;
        let timeout = self.signals.lock().timeout.min(FOREVER);
        let mut sleep = pin!(tokio::time::sleep(timeout));
        poll_fn(|cx| {
            self.settle(&mut engine);
            // Before the arrivals, because it is for the links that are there.
            self.give_notice(&mut engine);
            let (arrivals, notices) = {
                let mut state = self.signals.lock();
                state.register(cx);
                (std::mem::take(&mut state.arrivals), state.notices())
            };
            for arrival in arrivals {
                drop(engine.arrive(arrival, &notices));
            }
            let flushed = engine.poll_flush(cx).is_ready();
            let late = !flushed && sleep.as_mut().poll(cx).is_ready();
            if late {
                engine.end_slow_links();
            }
            let mut state = self.signals.lock();
            // An operation that waits sends the rest itself, and asks for the attendant again if it must.
            if flushed || late || self.signals.is_wanted() {
                if !state.needs_attendant() || self.signals.is_wanted() {
                    state.attended = false;
                    return Poll::Ready(());
                }
                cx.waker().wake_by_ref();
            }
            Poll::Pending
        })
        .await;
    }
}

/// An operation that waits for its turn. Given up before that, it still takes its numbers when its turn comes,
/// so that this rank stays in step, and the peers hear that it was cancelled.
struct Waiting<'a> {
    inner: &'a Arc<Inner>,
    operation: &'static str,
    numbers: u64,
    call: u64,
    over: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        self.inner.signals.change(|state| {
            if state.call == self.call {
                state.cancelled.push((self.operation, self.numbers));
            }
        });
        self.inner.attend();
    }
}

/// The right to run operations, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    inner: &'a Arc<Inner>,
    engine: MutexGuard<'a, Engine>,
    /// What ran last.
    operation: Operation,
    started: Instant,
    deadline: Instant,
}

impl Turn<'_> {
    /// Runs one operation, whose algorithm is not chosen yet.
    pub(crate) async fn run<A: Alarm>(
        &mut self,
        alarm: &mut A,
        tag: Tag,
        mut operation: Operation,
        input: &[u8],
    ) -> Result<(), CollectiveError> {
        if let Err(error) = operation.check(self.inner.world) {
            let reason = format!("{operation}: {error}");
            return Err(self.refuse(tag, CollectiveError::Invalid { reason }));
        }
        {
            let state = self.inner.signals.lock();
            self.engine
                .settle(state.settings, state.tuning, &state.layout);
        }
        self.engine.choose(&mut operation);
        self.operation = operation;
        if let Err(error) = self.engine.plan(&operation) {
            return Err(self.refuse(tag, error));
        }
        self.engine.load(&operation, input);
        let connect = |peer| self.inner.connect(peer);
        let mut run = Run::new(
            &mut self.engine,
            &self.inner.signals,
            &connect,
            operation,
            tag,
            (self.started, self.deadline),
        );
        let mut fired = false;
        poll_fn(|cx| {
            loop {
                if let Poll::Ready(result) = run.poll(cx, fired) {
                    return Poll::Ready(result);
                }
                fired = alarm.poll_at(run.wake_at(), cx).is_ready();
                if !fired {
                    return Poll::Pending;
                }
            }
        })
        .await
    }

    /// Copies the result of the operation that ran last.
    pub(crate) fn store<T: Element>(&self, into: &mut [T]) {
        self.engine.store(&self.operation, into);
    }

    /// Does not run an operation, and tells the peers why.
    pub(crate) fn refuse(&mut self, tag: Tag, error: CollectiveError) -> CollectiveError {
        let cause = Cause::of(&error, Rank(self.inner.me));
        let notice = self.engine.tell(tag, &cause);
        self.engine.flush_now();
        self.inner.signals.failed(tag, &error, notice);
        error
    }

    /// Sets how many elements each rank has in a varcount gather. Returns their sum.
    pub(crate) fn set_offsets(&mut self, counts: impl Iterator<Item = usize>) -> Option<usize> {
        let offsets = &mut self.engine.offsets;
        offsets.clear();
        offsets.push(0);
        let mut total = 0_usize;
        for count in counts {
            total = total.checked_add(count)?;
            offsets.push(total);
        }
        Some(total)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let pending = self.inner.signals.lock().needs_attendant();
        if pending || self.engine.has_backlog() {
            self.inner.attend();
        }
    }
}
