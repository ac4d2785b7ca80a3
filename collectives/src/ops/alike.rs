//! Started operations that may be done together with others that are alike.

use std::any::Any;

use super::room;
use crate::communicator::Communicator;
use crate::element::Element;
use crate::error::CollectiveError;
use crate::handle::{Ended, Failure, Promise};
use crate::negotiation::Fusable;
use crate::operation::{OperationKind, ReduceOp};

/// What is given to an operation that may be done for several at once.
pub(super) trait Job: Send + Sized + 'static {
    type Result: Send + 'static;

    /// Does all of them, at least one, in one operation. There are as many results, in order.
    fn perform(comm: &Communicator, jobs: Vec<Self>) -> Vec<Ended<Self::Result>>;

    /// It can't be done.
    fn refuse(self, error: CollectiveError) -> Failure<Self::Result> {
        error.into()
    }
}

/// An all-reduce. Jobs that are alike have one operator.
pub(super) struct Reduce<T>(pub(super) Vec<T>, pub(super) ReduceOp);

impl<T: Element> Job for Reduce<T> {
    type Result = Vec<T>;

    fn perform(comm: &Communicator, jobs: Vec<Self>) -> Vec<Ended<Vec<T>>> {
        let op = jobs[0].1;
        let mut buffers: Vec<Vec<T>> = jobs.into_iter().map(|Self(data, _)| data).collect();
        let result = match &mut buffers[..] {
            [one] => comm.all_reduce(one, op),
            several => {
                let mut parts: Vec<&mut [T]> = several.iter_mut().map(Vec::as_mut_slice).collect();
                comm.all_reduce_grouped(&mut parts, op)
            }
        };
        let ended = |data| in_place(data, result.clone());
        buffers.into_iter().map(ended).collect()
    }

    fn refuse(self, error: CollectiveError) -> Failure<Vec<T>> {
        Failure {
            error,
            input: Some(self.0),
        }
    }
}

/// A buffer that holds the result, or the input.
pub(super) fn in_place<R>(data: R, result: Result<(), CollectiveError>) -> Ended<R> {
    match result {
        Ok(()) => Ok(data),
        Err(error) => Err(Failure {
            error,
            input: Some(data),
        }),
    }
}

/// An all-gather of equal lengths.
pub(super) struct Gather<T>(pub(super) Vec<T>);

impl<T: Element> Job for Gather<T> {
    type Result = Vec<T>;

    fn perform(comm: &Communicator, jobs: Vec<Self>) -> Vec<Ended<Vec<T>>> {
        let count = jobs.len();
        let all = match &jobs[..] {
            [Self(one)] => comm.all_gather(one).map(|all| vec![all]),
            several => gather_packed(comm, several),
        };
        each(count, all)
    }
}

fn gather_packed<T: Element>(
    comm: &Communicator,
    jobs: &[Gather<T>],
) -> Result<Vec<Vec<T>>, CollectiveError> {
    let world = comm.world();
    // Before the operation: afterwards the others would not hear that there is no room here.
    let rooms = || -> Result<_, CollectiveError> {
        let lengths = jobs.iter().map(|Gather(data)| data.len());
        let packed: Vec<T> = room(lengths.clone().sum())?;
        let all = lengths.map(|length| room(length.saturating_mul(world)));
        Ok((packed, all.collect::<Result<Vec<Vec<T>>, _>>()?))
    };
    let (mut packed, mut all) = comm.needed(OperationKind::AllGather, rooms())?;
    for Gather(data) in jobs {
        packed.extend_from_slice(data);
    }
    let gathered = comm.all_gather(&packed)?;
    let mut rest = &gathered[..];
    for _ in 0..world {
        for (all, Gather(data)) in all.iter_mut().zip(jobs) {
            let (values, behind) = rest.split_at(data.len());
            all.extend_from_slice(values);
            rest = behind;
        }
    }
    Ok(all)
}

/// A reduce-scatter: the data, and how many rows they have.
pub(super) struct ReduceScatter<T>(pub(super) Vec<T>, pub(super) usize, pub(super) ReduceOp);

impl<T: Element> Job for ReduceScatter<T> {
    type Result = Vec<T>;

    fn perform(comm: &Communicator, jobs: Vec<Self>) -> Vec<Ended<Vec<T>>> {
        let mine = match &jobs[..] {
            [Self(one, rows, op)] => comm.reduce_scatter(one, *rows, *op).map(|mine| vec![mine]),
            several => {
                let op = several[0].2;
                let parts = several.iter().map(|Self(data, rows, _)| (&data[..], *rows));
                comm.reduce_scatter_grouped(&parts.collect::<Vec<_>>(), op)
            }
        };
        each(jobs.len(), mine)
    }
}

/// The result of each, or the error of all.
fn each<R>(count: usize, results: Result<Vec<R>, CollectiveError>) -> Vec<Ended<R>> {
    match results {
        Ok(results) => results.into_iter().map(Ok).collect(),
        Err(error) => (0..count).map(|_| Err(error.clone().into())).collect(),
    }
}

/// A job, and who waits for it.
pub(super) struct Waiting<J: Job> {
    pub(super) job: J,
    pub(super) promise: Promise<J::Result>,
}

impl<J: Job> Fusable for Waiting<J> {
    fn perform(self: Box<Self>, others: Vec<Box<dyn Fusable>>, comm: &Communicator) {
        let others = others.into_iter().filter_map(|other| {
            // They are alike, so it is the same type. If it were not, who waits for it would hear that it was given up.
            let other: Box<dyn Any> = other;
            other.downcast::<Self>().ok()
        });
        let (jobs, promises): (Vec<J>, Vec<_>) = std::iter::once(self)
            .chain(others)
            .map(|waiting| (waiting.job, waiting.promise))
            .unzip();
        for (promise, ended) in promises.into_iter().zip(J::perform(comm, jobs)) {
            promise.keep(ended);
        }
    }

    fn fail(self: Box<Self>, error: CollectiveError) {
        let Self { job, promise } = *self;
        promise.keep(Err(job.refuse(error)));
    }
}
