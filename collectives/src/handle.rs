//! Operations that are started now and waited for later.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::error::CollectiveError;

/// Operations of one communicator that wait for their turn. A start beyond that waits.
const MOST: usize = 1 << 16;

const TAKEN: &str = "a handle was used after it gave its result";

/// An operation that runs by itself, on a thread of its communicator. Three ways to its result: [`Handle::wait`] blocks,
/// [`Handle::poll`] looks, and the handle is a future.
///
/// A handle that is dropped does not cancel its operation: it goes on, with all ranks, and its result is lost. The time
/// limit of an operation counts from its turn on.
///
/// ```
/// use kolo_collectives::{ReduceOp, local_group};
///
/// let group = local_group(2)?;
/// let handles: Vec<_> = group
///     .iter()
///     .map(|comm| comm.start().all_reduce(vec![1.5_f32; 4], ReduceOp::Sum))
///     .collect();
/// // Something else is done here.
/// for handle in handles {
///     assert_eq!(handle.wait()?, [3.0; 4]);
/// }
/// # Ok::<(), kolo_collectives::CollectiveError>(())
/// ```
#[must_use = "an operation whose handle is dropped goes on, but nobody sees its result"]
pub struct Handle<R> {
    shared: Arc<Shared<R>>,
}

/// Why an operation failed, with the buffer that was given to it, if it was one of those that work in place.
#[derive(Debug)]
pub struct Failure<R> {
    /// Why.
    pub error: CollectiveError,
    /// The input, as it was (F-2). Of a broadcast's buffer that holds on the root.
    pub input: Option<R>,
}

pub(crate) type Ended<R> = Result<R, Failure<R>>;

impl<R> From<CollectiveError> for Failure<R> {
    fn from(error: CollectiveError) -> Self {
        Self { error, input: None }
    }
}

struct Shared<R> {
    state: Mutex<State<R>>,
    ended: Condvar,
}

struct State<R> {
    result: Option<Ended<R>>,
    taken: bool,
    waker: Option<Waker>,
}

impl<R> Shared<R> {
    fn lock(&self) -> MutexGuard<'_, State<R>> {
        // Nothing that runs under the lock panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<R> fmt::Debug for Handle<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle")
            .field("is_done", &self.poll())
            .finish_non_exhaustive()
    }
}

impl<R> Handle<R> {
    /// A handle, and where its result is put.
    pub(crate) fn new() -> (Self, Promise<R>) {
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                result: None,
                taken: false,
                waker: None,
            }),
            ended: Condvar::new(),
        });
        let promise = Promise {
            shared: Some(Arc::clone(&shared)),
        };
        (Self { shared }, promise)
    }

    /// Whether the operation has ended, well or not.
    ///
    /// ```
    /// use kolo_collectives::{ReduceOp, local_group};
    ///
    /// let group = local_group(2)?;
    /// let [one, other] = [0, 1].map(|rank: usize| group[rank].start().all_reduce(vec![1], ReduceOp::Sum));
    /// other.wait()?;
    /// while !one.poll() {
    ///     // Something else is done here.
    ///     std::thread::yield_now();
    /// }
    /// assert_eq!(one.wait()?, [2]);
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    pub fn poll(&self) -> bool {
        let state = self.shared.lock();
        state.taken || state.result.is_some()
    }

    /// Waits until the operation has ended. Not for a thread that the communicator's runtime needs.
    ///
    /// # Errors
    ///
    /// What the operation ended with. [`Handle::wait_or_reclaim`] gives the input back, too.
    pub fn wait(self) -> Result<R, CollectiveError> {
        self.wait_or_reclaim().map_err(|failure| failure.error)
    }

    /// As [`Handle::wait`].
    ///
    /// ```
    /// use kolo_collectives::{ReduceOp, local_group};
    ///
    /// let group = local_group(3)?;
    /// // That needs a power of two of ranks.
    /// let failed = group[0].start().all_reduce(vec![1.5_f32], ReduceOp::Adasum);
    /// let failure = failed.wait_or_reclaim().unwrap_err();
    /// assert_eq!(failure.input, Some(vec![1.5]));
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// What the operation ended with, and its input, as it was, if it is an operation in place (all-reduce, reduce,
    /// broadcast, send). A broadcast's buffer on a rank that is not the root is no input: it may hold a part of the result.
    pub fn wait_or_reclaim(self) -> Result<R, Failure<R>> {
        loop {
            if let Some(result) = self.wait_until(None) {
                return result;
            }
        }
    }

    /// What the operation ended with, if it has by then.
    fn wait_until(&self, until: Option<Instant>) -> Option<Ended<R>> {
        let mut state = self.shared.lock();
        loop {
            if let Some(result) = state.result.take() {
                return Some(result);
            }
            assert!(!state.taken, "{TAKEN}");
            let left = until.map_or(Duration::MAX, |until| {
                until.saturating_duration_since(Instant::now())
            });
            if left.is_zero() {
                return None;
            }
            let waited = self.shared.ended.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// As [`Handle::wait`], for at most so long: then the handle comes back.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use kolo_collectives::{ReduceOp, local_group};
    ///
    /// let group = local_group(2)?;
    /// let one = group[0].start().all_reduce(vec![1], ReduceOp::Sum);
    /// // Rank 1 has not come yet.
    /// let one = one.wait_for(Duration::from_millis(1)).unwrap_err();
    /// let other = group[1].start().all_reduce(vec![1], ReduceOp::Sum);
    /// assert_eq!((one.wait()?, other.wait()?), (vec![2], vec![2]));
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The handle, if the operation has not ended.
    pub fn wait_for(self, limit: Duration) -> Result<Result<R, CollectiveError>, Self> {
        let ended = self.wait_until(Instant::now().checked_add(limit));
        let ended = ended.map(|ended| ended.map_err(|failure| failure.error));
        ended.ok_or(self)
    }
}

/// Dropping it changes nothing; after it was ready it must not be polled again, nor waited for: that panics.
impl<R> Future for Handle<R> {
    type Output = Result<R, CollectiveError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.shared.lock();
        if let Some(result) = state.result.take() {
            state.taken = true;
            return Poll::Ready(result.map_err(|failure| failure.error));
        }
        assert!(!state.taken, "{TAKEN}");
        match &mut state.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        Poll::Pending
    }
}

/// Where the result of a handle is put. Dropped without one, the operation was given up.
pub(crate) struct Promise<R> {
    shared: Option<Arc<Shared<R>>>,
}

impl<R> Promise<R> {
    pub(crate) fn keep(mut self, result: Ended<R>) {
        self.put(result);
    }

    fn put(&mut self, result: Ended<R>) {
        let Some(shared) = self.shared.take() else {
            return;
        };
        let waker = {
            let mut state = shared.lock();
            state.result = Some(result);
            state.waker.take()
        };
        shared.ended.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<R> Drop for Promise<R> {
    fn drop(&mut self) {
        let error = CollectiveError::Aborted {
            reason: "the communicator was dropped, or the operation panicked".to_owned(),
        };
        self.put(Err(error.into()));
    }
}

pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// The thread that runs handles, one after the other, in the order in which they were started.
#[derive(Debug)]
pub(crate) struct Progress {
    jobs: SyncSender<Job>,
    started: AtomicU64,
    done: watch::Sender<u64>,
    thread: Arc<OnceLock<ThreadId>>,
    /// Keeps what is started and what is counted in one order.
    order: Mutex<()>,
}

impl Progress {
    pub(crate) fn new(name: String) -> std::io::Result<Self> {
        let (jobs, todo) = sync_channel::<Job>(MOST);
        let (done, _) = watch::channel(0);
        let (counter, thread) = (done.clone(), Arc::new(OnceLock::new()));
        let own = Arc::clone(&thread);
        std::thread::Builder::new().name(name).spawn(move || {
            own.get_or_init(|| std::thread::current().id());
            // It ends with the communicator.
            while let Ok(job) = todo.recv() {
                // A panic of one operation (in a user's serialisation, say) is that operation's.
                let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
                if outcome.is_err() {
                    tracing::error!("an operation that a handle stands for panicked");
                }
                counter.send_modify(|done| *done += 1);
            }
        })?;
        Ok(Self {
            jobs,
            started: AtomicU64::new(0),
            done,
            thread,
            order: Mutex::new(()),
        })
    }

    /// Starts one; waits if too many wait already.
    pub(crate) fn start(&self, job: Job) {
        let _order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        self.started.fetch_add(1, Ordering::SeqCst);
        if self.jobs.send(job).is_err() {
            // The thread never ends before the sender is gone.
            tracing::error!("the thread of a communicator's handles is gone");
        }
    }

    /// As [`Progress::start`], and does not wait: the job comes back.
    pub(crate) fn try_start(&self, job: Job) -> Result<(), Job> {
        let _order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        match self.jobs.try_send(job) {
            Ok(()) => {
                self.started.fetch_add(1, Ordering::SeqCst);
                Ok(())
            }
            Err(TrySendError::Full(job) | TrySendError::Disconnected(job)) => Err(job),
        }
    }

    /// What an operation that comes now must wait for: all that was started before. Nothing for the operations of the
    /// handles themselves.
    pub(crate) fn ahead(&self) -> Option<Ahead> {
        let target = self.started.load(Ordering::SeqCst);
        if *self.done.borrow() >= target || self.thread.get() == Some(&std::thread::current().id())
        {
            return None;
        }
        Some(Ahead {
            done: self.done.subscribe(),
            target,
        })
    }
}

pub(crate) struct Ahead {
    done: watch::Receiver<u64>,
    target: u64,
}

impl Ahead {
    pub(crate) async fn done(mut self) {
        // The other side can't be gone: it is in the communicator.
        drop(self.done.wait_for(|done| *done >= self.target).await);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocking::{Wait, block_on};

    #[test]
    fn a_result_is_seen_by_all_ways() {
        let (handle, promise) = Handle::new();
        assert!(!handle.poll());
        let handle = handle.wait_for(Duration::from_millis(5)).unwrap_err();
        let thread = std::thread::spawn(move || promise.keep(Ok(5)));
        assert_eq!(handle.wait(), Ok(5));
        thread.join().unwrap();

        let (handle, promise) = Handle::new();
        let waiting = std::thread::spawn(move || block_on(&Wait::default(), |_| handle));
        promise.keep(Ok(6));
        assert_eq!(waiting.join().unwrap(), Ok(6));
    }

    #[test]
    #[should_panic(expected = "used after it gave its result")]
    fn a_handle_that_gave_its_result_does_not_wait_for_ever() {
        let (mut handle, promise) = Handle::new();
        promise.keep(Ok(5));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(Pin::new(&mut handle).poll(&mut cx).is_ready());
        assert!(Handle::poll(&handle));
        drop(handle.wait());
    }

    #[test]
    fn a_broken_promise_is_an_error_and_inputs_come_back() {
        let (handle, promise) = Handle::<u8>::new();
        drop(promise);
        let error = handle.wait().unwrap_err();
        assert!(matches!(error, CollectiveError::Aborted { .. }), "{error}");
        let (handle, promise) = Handle::new();
        promise.keep(Err(Failure {
            error: CollectiveError::Invalid {
                reason: "no".to_owned(),
            },
            input: Some(vec![1]),
        }));
        assert_eq!(handle.wait_or_reclaim().unwrap_err().input, Some(vec![1]));
    }

    #[test]
    fn jobs_run_in_order_and_survive_a_panic() {
        let progress = Progress::new("test".to_owned()).unwrap();
        let ran = Arc::new(Mutex::new(Vec::new()));
        assert!(progress.ahead().is_none());
        for number in 0..20 {
            let ran = Arc::clone(&ran);
            progress.start(Box::new(move || {
                assert_ne!(number, 7, "this one panics");
                ran.lock().unwrap().push(number);
            }));
        }
        if let Some(ahead) = progress.ahead() {
            block_on(&Wait::default(), |_| ahead.done());
        }
        let expected: Vec<i32> = (0..20).filter(|number| *number != 7).collect();
        assert_eq!(*ran.lock().unwrap(), expected);
        assert!(progress.ahead().is_none());
    }
}
