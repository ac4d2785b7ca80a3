//! Operations that are started now and waited for later.

// A failure gives the input back, which is large.
#![allow(clippy::result_large_err)]

use std::sync::Arc;
use std::time::Instant;

use kolo_transport::ids::Rank;

use super::alike::{Job, Waiting, in_place};
use crate::communicator::Communicator;
use crate::element::Element;
use crate::error::CollectiveError;
use crate::handle::{Ended, Handle, Progress};
use crate::negotiation::{Negotiation, Task, may_fuse};
use crate::operation::Operation;

/// Starts operations that run by themselves: see [`Communicator::start`] and [`Communicator::named`].
///
/// Each method takes the data, and its [`Handle`] gives the result; what they do is said at the methods of
/// [`Communicator`] with the same names.
///
/// ```
/// use kolo_collectives::{ReduceOp, local_group};
/// use kolo_collectives::Rank;
///
/// let group = local_group(2)?;
/// let started: Vec<_> = group
///     .iter()
///     .map(|comm| {
///         let start = comm.start();
///         let sum = start.all_reduce(vec![1.0_f32; 3], ReduceOp::Sum);
///         let all = start.all_gather(vec![comm.rank().0]);
///         let first = start.broadcast(vec![comm.rank().0], Rank(0));
///         (sum, all, first, start.barrier())
///     })
///     .collect();
/// for (sum, all, first, met) in started {
///     assert_eq!((sum.wait()?, all.wait()?, first.wait()?), (vec![2.0; 3], vec![0, 1], vec![0]));
///     met.wait()?;
/// }
/// # Ok::<(), kolo_collectives::CollectiveError>(())
/// ```
#[derive(Debug, Clone)]
#[must_use = "it starts nothing by itself"]
pub struct Start {
    pub(super) comm: Communicator,
    name: Option<String>,
}

type Access = Result<Communicator, CollectiveError>;

impl Communicator {
    /// Starts operations without waiting for them: `comm.start().all_reduce(data, op)` returns a [`Handle`]. They run one
    /// after the other, in the order in which they were started, on a thread that this communicator makes at first use;
    /// an operation that is called in another form comes after those that were started before it.
    pub fn start(&self) -> Start {
        Start {
            comm: self.clone(),
            name: None,
        }
    }

    /// As [`Communicator::start`], for one operation, told apart from others by its name and not by its order: ranks may
    /// start named operations in different orders, and beside those without names. An operation runs when all ranks have
    /// started it. Two with one name can't be under way at once.
    ///
    /// Small all-reduces, all-gathers and reduce-scatters that are ready at the same time are done as one
    /// ([`Communicator::set_fusion_threshold`]). Ranks that ask for different things by one name all get
    /// [`CollectiveError::Mismatch`]. The [time limit](Communicator::timeout) counts twice: until all have started it, and
    /// for the operation itself.
    ///
    /// ```
    /// # use kolo_collectives::{ReduceOp, run_local};
    /// run_local(2, |comm| {
    ///     // Each rank in its own order.
    ///     let mut names = ["weights", "bias"];
    ///     names.rotate_left(comm.rank().index());
    ///     let handles = names.map(|name| {
    ///         comm.named(name).all_reduce(vec![name.len() as f32], ReduceOp::Sum)
    ///     });
    ///     for (name, handle) in names.iter().zip(handles) {
    ///         assert_eq!(handle.wait().unwrap(), [2.0 * name.len() as f32]);
    ///     }
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    pub fn named(&self, name: impl Into<String>) -> Start {
        Start {
            comm: self.clone(),
            name: Some(name.into()),
        }
    }

    /// Small [named](Communicator::named) all-reduces, all-gathers of equal lengths, and reduce-scatters of at least as many rows as
    /// there are ranks, that are ready at the same time and are alike (operation, type, operator, factors, compression), are done
    /// as one, up to so many bytes (128 MiB at first; of gathers what a rank gets counts); 0 is never. What counts is
    /// the setting of the member with the lowest rank among all.
    ///
    /// ```
    /// # use kolo_collectives::{ReduceOp, run_local};
    /// run_local(2, |comm| {
    ///     // Each by itself, so that sums have the same bits in each run.
    ///     comm.set_fusion_threshold(0);
    ///     let sum = comm.named("bias").all_reduce(vec![1.0_f32], ReduceOp::Sum);
    ///     assert_eq!(sum.wait().unwrap(), [2.0]);
    /// })?;
    /// # Ok::<(), kolo_collectives::CollectiveError>(())
    /// ```
    pub fn set_fusion_threshold(&self, bytes: u64) {
        Negotiation::of(&self.inner).set_threshold(bytes);
    }

    /// The thread that runs what is started.
    pub(crate) fn progress(&self) -> Result<&Progress, CollectiveError> {
        if let Some(progress) = self.inner.progress.get() {
            return Ok(progress);
        }
        let name = format!("kolo-comm-{}", self.inner.me);
        let made = Progress::new(name).map_err(|error| CollectiveError::Invalid {
            reason: format!("no thread for operations that are started: {error}"),
        })?;
        // Another thread may have been faster; then this one's ends by itself.
        Ok(self.inner.progress.get_or_init(|| made))
    }
}

impl Start {
    /// Runs a job, which gets the communicator to do it on, or why it can't be done. `operation` is what the ranks must
    /// agree on by name.
    fn submit<R: Send + 'static>(
        &self,
        operation: Operation,
        job: impl FnOnce(Access) -> Ended<R> + Send + 'static,
    ) -> Handle<R> {
        let (handle, promise) = Handle::new();
        let comm = self.comm.clone();
        if self.name.is_some() {
            // The communicator stays until its operations have ended.
            let task = Task::Alone(Box::new(move |access| {
                promise.keep(job(access));
                drop(comm);
            }));
            self.submit_named(operation, task);
            return handle;
        }
        match self.comm.progress() {
            Ok(progress) => progress.start(Box::new(move || promise.keep(job(Ok(comm))))),
            Err(error) => promise.keep(job(Err(error))),
        }
        handle
    }

    /// As [`Start::submit`], of what may be done together with others by name.
    pub(super) fn submit_job<J: Job>(&self, operation: Operation, job: J) -> Handle<J::Result> {
        if self.name.is_some() && may_fuse(&operation, self.comm.inner.world) {
            let (handle, promise) = Handle::new();
            let waiting = Waiting { job, promise };
            self.submit_named(operation, Task::Fusable(Box::new(waiting)));
            return handle;
        }
        self.submit(operation, move |access| match access {
            Ok(comm) => J::perform(&comm, vec![job]).remove(0),
            Err(error) => Err(job.refuse(error)),
        })
    }

    /// An operation whose result is what `perform` returns.
    pub(super) fn give<R: Send + 'static>(
        &self,
        operation: Operation,
        perform: impl FnOnce(&Communicator) -> Result<R, CollectiveError> + Send + 'static,
    ) -> Handle<R> {
        self.submit(operation, |access| {
            Ok(access.and_then(|comm| perform(&comm))?)
        })
    }

    /// An operation whose result is in its input, which comes back after a failure.
    pub(super) fn change<D: Send + 'static>(
        &self,
        operation: Operation,
        mut data: D,
        perform: impl FnOnce(&Communicator, &mut D) -> Result<(), CollectiveError> + Send + 'static,
    ) -> Handle<D> {
        self.submit(operation, |access| {
            let result = access.and_then(|comm| perform(&comm, &mut data));
            in_place(data, result)
        })
    }

    fn submit_named(&self, operation: Operation, task: Task) {
        let name = self.name.as_deref().unwrap_or_default();
        let timeout = self.comm.timeout();
        let negotiation = Negotiation::of(&self.comm.inner);
        negotiation.set_timeout(timeout);
        let options = self.comm.options;
        let options = options.called(options.name, Some(Instant::now()));
        negotiation.submit(name, (options, operation), timeout, task);
    }

    /// See [`Communicator::join`]. What is started after it without a name waits until all have joined. It has no name, also if others have.
    pub fn join(&self) -> Handle<Rank> {
        let unnamed = self.comm.start();
        unnamed.give(Operation::JOIN, Communicator::join)
    }

    /// See [`Communicator::send`]. Its order counts among what this rank sends to that one, whatever the name; what else
    /// is started does not wait for it.
    pub fn send<T: Element>(&self, data: Vec<T>, to: Rank) -> Handle<Vec<T>> {
        let comm = self.comm.clone();
        self.between((self.comm.rank(), to), move |error| {
            let result = match error {
                Some(error) => Err(error),
                None => comm.send(&data, to),
            };
            in_place(data, result)
        })
    }

    /// See [`Communicator::receive`]. Its order counts among what this rank receives from that one.
    pub fn receive<T: Element>(&self, from: Rank) -> Handle<Vec<T>> {
        let comm = self.comm.clone();
        self.between((from, self.comm.rank()), move |error| match error {
            Some(error) => Err(error.into()),
            None => Ok(comm.receive(from)?),
        })
    }

    /// On the thread of two ranks.
    fn between<R: Send + 'static>(
        &self,
        (from, to): (Rank, Rank),
        job: impl FnOnce(Option<CollectiveError>) -> Ended<R> + Send + 'static,
    ) -> Handle<R> {
        let (handle, promise) = Handle::new();
        let pair = self.comm.pair(from, to);
        let progress = pair.as_ref().map_err(Clone::clone).and_then(|pair| {
            pair.progress()?;
            Ok(Arc::clone(&pair.inner))
        });
        match progress {
            Ok(inner) => {
                if let Some(progress) = inner.progress.get() {
                    progress.start(Box::new(move || promise.keep(job(None))));
                }
            }
            Err(error) => promise.keep(job(Some(error))),
        }
        handle
    }
}
