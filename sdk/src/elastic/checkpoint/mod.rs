//! Checkpoints: commits on disk, which outlive all ranks.

mod file;
mod folder;
mod writer;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kolo_transport::ids::JobId;

use super::StateError;
use super::snapshot::{CommitId, Snapshot};
use crate::Context;
use file::{About, Opened};
use writer::{Base, Writer};

/// Keeps the commits of a [`State`](super::State) on disk, too, so that the loss of all ranks costs the work since the last checkpoint and no more.
///
/// A checkpoint is a commit in a file. Rank 0 writes checkpoints, on a thread of its own: no commit waits for a disk. Of
/// the commits that come meanwhile the newest is written next. A file appears under its name when all of it is on disk, and
/// ends with a BLAKE3 checksum. The two newest are kept.
///
/// Give the state on every rank the same checkpoints, in a directory that all hosts of the job share: rank 0 may be on another
/// host after a loss. Each job needs a directory of its own: the process that writes locks a file there, `writer.lock`.
///
/// ```
/// use kolo::elastic::{Checkpoints, State, Value};
/// use kolo::prelude::*;
/// use std::time::Duration;
///
/// #[derive(serde::Serialize, serde::Deserialize)]
/// struct Progress {
///     step: u32,
/// }
///
/// #[kolo::function]
/// fn work(ctx: &Context, directory: std::path::PathBuf, steps: u32) -> Result<u32> {
///     let checkpoints = Checkpoints::in_directory(directory)
///         .not_more_often_than(Duration::from_secs(60))
///         .resume(true);
///     let mut state = State::new(Value(Progress { step: 0 })).checkpoints(checkpoints);
///     let first = ctx.elastic(&mut state, |ctx, state| {
///         let first = state.step;
///         while state.step < steps {
///             state.step += 1;
///             state.commit(ctx)?;
///         }
///         Ok::<_, kolo::Error>(first)
///     })?;
///     // The last commit is on disk when this returns, or when the state is dropped.
///     state.flush()?;
///     Ok(first)
/// }
///
/// # let folder = tempfile::tempdir()?;
/// # let directory = folder.path().to_owned();
/// # let alone = || kolo::collectives::local_group(1).map(|mut group| Context::for_tests(group.remove(0)));
/// assert_eq!(work::call(&alone()?, directory.clone(), 5)?, 0);
/// // Another job goes on where the first one ended.
/// assert_eq!(work::call(&alone()?, directory, 8)?, 5);
/// # Ok::<(), kolo::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoints {
    directory: PathBuf,
    every: u64,
    interval: Duration,
    resume: bool,
}

impl Checkpoints {
    /// Checkpoints in this directory, which is made if there is none: at most one a second.
    pub fn in_directory(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
            every: 1,
            interval: Duration::from_secs(1),
            resume: false,
        }
    }

    /// Writes no more than one of so many commits. 0 counts as 1.
    #[must_use]
    pub fn every(mut self, commits: u64) -> Self {
        self.every = commits.max(1);
        self
    }

    /// Lets so much time pass from the beginning of one write to that of the next, at least: a second, if this is not called. With
    /// [`Duration::ZERO`] the disk is never at rest.
    #[must_use]
    pub fn not_more_often_than(mut self, interval: Duration) -> Self {
        // The sum with a time of this machine is a time.
        self.interval = interval.min(Duration::from_secs(u64::from(u32::MAX)));
        self
    }

    /// Whether a job begins with the newest checkpoint in the directory, if there is one. If not, a directory that has
    /// checkpoints is refused: no run is resumed by mistake, and none loses its checkpoints to another one.
    ///
    /// A job that has lost all its ranks while it runs goes on with its last checkpoint in any case.
    #[must_use]
    pub fn resume(mut self, resume: bool) -> Self {
        self.resume = resume;
        self
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    fn refused(&self, reason: impl std::fmt::Display) -> StateError {
        StateError::Checkpoint {
            directory: self.directory.clone(),
            reason: reason.to_string(),
        }
    }
}

/// The checkpoints of one state.
pub(super) struct Keeper {
    settings: Checkpoints,
    base: Base,
    /// From the first commit that this rank is to write.
    writer: Option<Writer>,
}

impl Keeper {
    pub(super) fn new(settings: Checkpoints) -> Self {
        Self {
            settings,
            base: Base::Unknown,
            writer: None,
        }
    }

    /// The group is about to begin, or goes on, with what rank 0 or a survivor has.
    pub(super) fn synced(&mut self) {
        if self.base == Base::Unknown {
            self.base = Base::Synced;
        }
    }

    /// Keeps a commit of rank 0.
    pub(super) fn keep(&mut self, job: JobId, id: CommitId, copy: &Arc<Snapshot>) {
        let writer = self.writer.get_or_insert_with(|| {
            let settings = self.settings.clone();
            Writer::start(settings, job, self.base)
        });
        writer.offer(id, Arc::clone(copy));
    }

    /// The last commit that this rank has on disk, or 0.
    pub(super) fn written(&self) -> u64 {
        let read = match self.base {
            Base::Read(id) => id.number,
            Base::Unknown | Base::Synced => 0,
        };
        let written = self.writer.as_ref().map_or(0, Writer::written);
        written.max(read)
    }

    pub(super) fn flush(&self) -> Result<(), StateError> {
        let Some(writer) = &self.writer else {
            return Ok(());
        };
        writer.flush().map_err(|why| self.settings.refused(why))
    }

    /// Looks for the checkpoint that the group is to begin with. `must` says that the group has lost all its ranks. The checkpoint
    /// is read by `take`, whose outer error is one of the file: then the next older file is tried.
    pub(super) fn find(
        &mut self,
        ctx: &Context,
        must: bool,
        mut take: impl FnMut(CommitId, &mut Opened) -> Result<Result<(), StateError>, String>,
    ) -> Result<(), StateError> {
        let directory = &self.settings.directory;
        let unreadable = |error| {
            self.settings
                .refused(format_args!("can't be read: {error}"))
        };
        let names = folder::list(directory).map_err(unreadable)?;
        let Some(newest) = names.first() else {
            if must {
                let reason = format_args!(
                    "has no checkpoint on host {}, but all ranks are lost, and the group can only go on with one: let \
                     all hosts share the directory",
                    ctx.hostname()
                );
                return Err(self.settings.refused(reason));
            }
            return Ok(());
        };
        if !must && !self.settings.resume {
            let reason = format_args!(
                "has checkpoints already, `{newest}` for one: resume them (`Checkpoints::resume`), or name another directory"
            );
            return Err(self.settings.refused(reason));
        }
        let mut flaws = Vec::new();
        for name in &names {
            let read = Opened::new(&directory.join(name.to_string())).and_then(|mut opened| {
                let About {
                    job, generation, ..
                } = opened.about;
                // The generations of another job say nothing here.
                let generation = if job == ctx.job() { generation } else { 0 };
                let id = CommitId {
                    generation,
                    number: opened.about.commit,
                };
                Ok((id, take(id, &mut opened)?))
            });
            match read {
                Ok((id, taken)) => {
                    taken?;
                    let path = directory.join(name.to_string());
                    tracing::info!(commit = id.number, path = %path.display(), "a checkpoint is resumed");
                    self.base = Base::Read(name.id());
                    return Ok(());
                }
                Err(flaw) => {
                    tracing::warn!(
                        directory = %directory.display(),
                        "the checkpoint `{name}` {flaw}; the next older is tried"
                    );
                    flaws.push(format!("`{name}` {flaw}"));
                }
            }
        }
        let flaws = flaws.join("; ");
        Err(self.settings.refused(format_args!(
            "has no good checkpoint: {flaws}. Put a good file there, or name another directory"
        )))
    }
}
