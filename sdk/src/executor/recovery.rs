//! The generations of a group, as its driver learns of them.

use std::sync::Arc;

use kolo_transport::ids::Generation;
use kolo_transport::wire::GenerationTable;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use super::Executor;
use crate::call::{GenerationChange, Target};
use crate::error::RecoveryError;

/// A generation that takes calls.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recovered {
    /// Its number.
    pub generation: Generation,
    /// Its number of ranks.
    pub world_size: usize,
    /// Why it came about, in words.
    pub cause: String,
}

impl Executor {
    /// Waits for a generation that takes calls: for the next one, if a rank of the present one is lost or a call has failed with
    /// [`CallError::GenerationOver`](crate::CallError::GenerationOver) there. Cancel safe.
    ///
    /// ```no_run
    /// use kolo::prelude::*;
    ///
    /// #[kolo::function]
    /// fn step(ctx: &Context, number: u32) -> Result<f64> {
    ///     let mut loss = 1.0 / f64::from(number + 1);
    ///     ctx.comm().all_reduce(&mut loss, ReduceOp::Average)?;
    ///     Ok(loss)
    /// }
    ///
    /// # async fn example() -> kolo::Result<()> {
    /// let cluster = Cluster::connect_or_local().await?;
    /// let executor = Executor::builder().workers(2..=8).start(&cluster).await?;
    /// let mut number = 0;
    /// while number < 100 {
    ///     match executor.run(step, number).await {
    ///         Ok(_) => number += 1,
    ///         Err(error) if error.is_retryable() => {
    ///             let next = executor.recovered().await?;
    ///             println!("{} workers: {}", next.world_size, next.cause);
    ///         }
    ///         Err(error) => return Err(error.into()),
    ///     }
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`RecoveryError`]: there is no such generation, and none will come.
    pub async fn recovered(&self) -> Result<Recovered, RecoveryError> {
        let job = self.job();
        let group = match &self.inner.target {
            Target::Fixed(group) if group.is_whole() => Arc::clone(group),
            Target::Fixed(_) => return Err(RecoveryError::Fixed { job }),
            Target::Elastic(generations) => generations.recovered().await.map_err(|end| {
                let (reason, failure) = (end.reason, end.failure.map(Box::new));
                RecoveryError::Ended {
                    job,
                    reason,
                    failure,
                }
            })?,
        };
        Ok(Recovered {
            generation: group.generation(),
            world_size: group.world_size(),
            cause: group.members().cause.clone(),
        })
    }

    /// The changes of the members, the present generation first. If 64 generations wait to be read, each further one takes the place
    /// of the oldest: a change then has all that is new since the generation that was read before.
    ///
    /// ```no_run
    /// # async fn example(executor: kolo::Executor) {
    /// let mut changes = executor.generations();
    /// tokio::spawn(async move {
    ///     while let Some(change) = changes.next().await {
    ///         let (before, table) = (change.before, &change.table);
    ///         println!(
    ///             "generation {}: {} -> {} workers, {} left, {} joined: {}",
    ///             table.generation, before, table.members.len(),
    ///             change.left.len(), change.joined.len(), table.cause,
    ///         );
    ///     }
    /// });
    /// # }
    /// ```
    pub fn generations(&self) -> GenerationChanges {
        let (first, later) = match &self.inner.target {
            // Nothing follows.
            Target::Fixed(group) => {
                let none = broadcast::Sender::new(1).subscribe();
                (Arc::clone(group.members()), none)
            }
            Target::Elastic(generations) => generations.changes(),
        };
        GenerationChanges {
            first: Some(first),
            later,
            last: None,
        }
    }
}

/// The generations of a group, one after the other; made by [`Executor::generations`]. A slow reader gets the 64 newest.
#[derive(Debug)]
pub struct GenerationChanges {
    first: Option<Arc<GenerationTable>>,
    later: broadcast::Receiver<Arc<GenerationTable>>,
    /// The last one that was read.
    last: Option<Arc<GenerationTable>>,
}

impl GenerationChanges {
    /// The next one. `None` when there are no more: the job has ended, or the members never change. Cancel safe.
    pub async fn next(&mut self) -> Option<GenerationChange> {
        let table = match self.first.take() {
            Some(first) => first,
            None => loop {
                match self.later.recv().await {
                    Ok(table) => break table,
                    Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => return None,
                }
            },
        };
        let before = self.last.replace(Arc::clone(&table));
        Some(GenerationChange::new(before.as_deref(), table))
    }
}

#[cfg(test)]
mod tests {
    use kolo_transport::ids::Rank;

    use super::*;
    use crate::call::test_table;

    #[tokio::test]
    async fn a_slow_reader_gets_the_newest_with_all_that_has_changed() {
        let news = broadcast::Sender::new(2);
        let mut changes = GenerationChanges {
            first: Some(test_table(1, &[(0, 1), (1, 1)])),
            later: news.subscribe(),
            last: None,
        };
        let first = changes.next().await.unwrap();
        assert_eq!((first.before, first.joined.len()), (0, 2));
        for (generation, last) in [(2, 2), (3, 3), (4, 4)] {
            news.send(test_table(generation, &[(0, 1), (last, 1)]))
                .unwrap();
        }
        drop(news);
        for generation in [3, 4] {
            let change = changes.next().await.unwrap();
            assert_eq!(change.table.generation, Generation(generation));
            assert_eq!(change.before, 2);
            assert_eq!(
                (&change.left[..], &change.joined[..]),
                (&[Rank(1)][..], &[Rank(1)][..])
            );
        }
        assert!(changes.next().await.is_none());
    }
}
