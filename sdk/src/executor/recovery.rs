//! The generations of a group, as its driver learns of them.

use kolo_transport::ids::Generation;
use tokio::sync::mpsc;

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
    ///     let mut loss = [1.0 / f64::from(number + 1)];
    ///     ctx.comm().all_reduce(&mut loss, ReduceOp::Sum)?;
    ///     Ok(loss[0])
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
            Target::Fixed(group) if group.is_whole() => std::sync::Arc::clone(group),
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

    /// All changes of the members, the present generation first.
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
        let changes = match &self.inner.target {
            Target::Fixed(group) => {
                let (sender, changes) = mpsc::unbounded_channel();
                let first = GenerationChange::new(None, std::sync::Arc::clone(group.members()));
                // The receiver is there.
                let _ = sender.send(first);
                changes
            }
            Target::Elastic(generations) => generations.changes(),
        };
        GenerationChanges { changes }
    }
}

/// The generations of a group, one after the other; made by [`Executor::generations`]. None is left out.
#[derive(Debug)]
pub struct GenerationChanges {
    changes: mpsc::UnboundedReceiver<GenerationChange>,
}

impl GenerationChanges {
    /// The next one. `None` when there are no more: the job has ended, or the members never change. Cancel safe.
    pub async fn next(&mut self) -> Option<GenerationChange> {
        self.changes.recv().await
    }
}
